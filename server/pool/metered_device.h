// SPDX-License-Identifier: Apache-2.0
//
// MeteredDevice: counts and times the calls of a device.
#ifndef VRAMBROKER_SERVER_POOL_METERED_DEVICE_H_
#define VRAMBROKER_SERVER_POOL_METERED_DEVICE_H_

#include <prometheus/counter.h>
#include <prometheus/histogram.h>

#include <array>
#include <atomic>
#include <memory>
#include <vector>

#include "allocator/device/device.h"

namespace vrambroker {

enum class DeviceCall { kAllocate, kFree, kExport, kHealth, kMemory, kHolders, kProcesses };

inline constexpr std::array<DeviceCall, 7> kDeviceCalls = {
    DeviceCall::kAllocate, DeviceCall::kFree,    DeviceCall::kExport,   DeviceCall::kHealth,
    DeviceCall::kMemory,   DeviceCall::kHolders, DeviceCall::kProcesses};

const char* DeviceCallName(DeviceCall call);  // "allocate", ...

// Totals of a device's calls since it was opened.
struct DeviceCallStats {
  prometheus::ClientMetric::Histogram durations;  // seconds
  uint64_t errors = 0;
};

struct DeviceMeterStats {
  std::vector<DeviceCallStats> calls;  // by DeviceCall
  uint64_t scrubs = 0;                 // new segments overwritten with zeros
  uint64_t scrubbed_bytes = 0;
};

// As thread-safe as the wrapped device. Counts and times the calls of DeviceCall, and passes all calls on.
class MeteredDevice : public SegmentOwner {
 public:
  explicit MeteredDevice(std::unique_ptr<SegmentOwner> device) : device_(std::move(device)) {}

  DeviceMeterStats GetStats() const;

  const DeviceProperties& properties() const override { return device_->properties(); }
  absl::StatusOr<uint64_t> FreeBytes() override;
  absl::Status Health() override;
  absl::StatusOr<DeviceSegment> AllocateSegment(uint64_t bytes) override;
  absl::Status FreeSegment(const DeviceSegment& segment) override;
  void LeaveSegments() override { device_->LeaveSegments(); }
  absl::StatusOr<SegmentHandle> ExportSegment(const DeviceSegment& segment) override;
  absl::Status Zero(const DeviceSegment& segment, uint64_t offset, uint64_t bytes) override;
  absl::StatusOr<SegmentHolders> FindHolders(absl::Span<const DeviceSegment> segments) override;
  absl::StatusOr<std::vector<GpuProcess>> FindProcesses() override;
  GpuSensors ReadSensors() override { return device_->ReadSensors(); }
  absl::StatusOr<LeftSegments> FindLeftSegments() override { return device_->FindLeftSegments(); }

 private:
  struct Meter {
    Meter();
    prometheus::Histogram durations;  // seconds
    prometheus::Counter errors;
  };

  // Returns the result of `run`.
  template <typename Run>
  auto Measure(DeviceCall call, const Run& run);

  const std::unique_ptr<SegmentOwner> device_;
  std::array<Meter, kDeviceCalls.size()> meters_;
  std::atomic<uint64_t> scrubs_{0};
  std::atomic<uint64_t> scrubbed_bytes_{0};
};

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_POOL_METERED_DEVICE_H_
