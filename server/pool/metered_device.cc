// SPDX-License-Identifier: Apache-2.0
#include "server/pool/metered_device.h"

#include <chrono>
#include <utility>

namespace vrambroker {
namespace {

const absl::Status& StatusOf(const absl::Status& result) {
  return result;  // NOLINT(bugprone-return-const-ref-from-parameter): callers pass named objects
}
template <typename T>
const absl::Status& StatusOf(const absl::StatusOr<T>& result) {
  return result.status();
}

}  // namespace

const char* DeviceCallName(DeviceCall call) {
  switch (call) {
    case DeviceCall::kAllocate:
      return "allocate";
    case DeviceCall::kFree:
      return "free";
    case DeviceCall::kExport:
      return "export";
    case DeviceCall::kHealth:
      return "health";
    case DeviceCall::kMemory:
      return "memory";
    case DeviceCall::kHolders:
      return "holders";
    case DeviceCall::kProcesses:
      return "processes";
  }
  return "unknown";
}

MeteredDevice::Meter::Meter() : durations({1e-6, 1e-5, 5e-5, 1e-4, 5e-4, 1e-3, 5e-3, 1e-2, 0.1, 1, 10}) {}

template <typename Run>
auto MeteredDevice::Measure(DeviceCall call, const Run& run) {
  Meter& meter = meters_[static_cast<size_t>(call)];
  const auto start = std::chrono::steady_clock::now();
  auto result = run();
  meter.durations.Observe(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  // Calls unsupported by the kind of device are not errors.
  if (const absl::Status& status = StatusOf(result); !status.ok() && !absl::IsUnimplemented(status)) {
    meter.errors.Increment();
  }
  return result;
}

DeviceMeterStats MeteredDevice::GetStats() const {
  DeviceMeterStats stats;
  stats.calls.reserve(meters_.size());
  for (const Meter& meter : meters_) {
    stats.calls.push_back(
        {.durations = meter.durations.Collect().histogram, .errors = static_cast<uint64_t>(meter.errors.Value())});
  }
  stats.scrubs = scrubs_.load(std::memory_order_relaxed);
  stats.scrubbed_bytes = scrubbed_bytes_.load(std::memory_order_relaxed);
  return stats;
}

absl::StatusOr<uint64_t> MeteredDevice::FreeBytes() {
  return Measure(DeviceCall::kMemory, [&] { return device_->FreeBytes(); });
}

absl::Status MeteredDevice::Health() {
  return Measure(DeviceCall::kHealth, [&] { return device_->Health(); });
}

absl::StatusOr<DeviceSegment> MeteredDevice::AllocateSegment(uint64_t bytes) {
  return Measure(DeviceCall::kAllocate, [&] { return device_->AllocateSegment(bytes); });
}

absl::Status MeteredDevice::Zero(const DeviceSegment& segment, uint64_t offset, uint64_t bytes) {
  absl::Status status = device_->Zero(segment, offset, bytes);
  if (status.ok()) {
    scrubs_.fetch_add(1, std::memory_order_relaxed);
    scrubbed_bytes_.fetch_add(bytes, std::memory_order_relaxed);
  }
  return status;
}

absl::Status MeteredDevice::FreeSegment(const DeviceSegment& segment) {
  return Measure(DeviceCall::kFree, [&] { return device_->FreeSegment(segment); });
}

absl::StatusOr<SegmentHandle> MeteredDevice::ExportSegment(const DeviceSegment& segment) {
  return Measure(DeviceCall::kExport, [&] { return device_->ExportSegment(segment); });
}

absl::StatusOr<SegmentHolders> MeteredDevice::FindHolders(absl::Span<const DeviceSegment> segments) {
  return Measure(DeviceCall::kHolders, [&] { return device_->FindHolders(segments); });
}

absl::StatusOr<std::vector<GpuProcess>> MeteredDevice::FindProcesses() {
  return Measure(DeviceCall::kProcesses, [&] { return device_->FindProcesses(); });
}

}  // namespace vrambroker
