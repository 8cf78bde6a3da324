// SPDX-License-Identifier: Apache-2.0
//
// SimDevice: a device whose calls take as long as the simulation wants, and fail when the simulation says. SimDevice
// knows which tenant's bytes lie in every segment.
#ifndef VRAMBROKER_TESTS_FAULT_SIM_DEVICE_H_
#define VRAMBROKER_TESTS_FAULT_SIM_DEVICE_H_

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "allocator/device/device.h"
#include "tests/fault/sim_threads.h"

namespace vrambroker::fault {

// State of the device for the simulation; outlives the device.
struct SimMemory {
  struct Segment {
    uint64_t bytes = 0;
    std::string contents;  // tenant that wrote last; empty: zeros
  };
  std::map<uint64_t, Segment> live;  // keys: addresses, never used again
  uint64_t live_bytes = 0;
  uint64_t clients_bytes = 0;  // bytes that clients got from the driver themselves
  uint64_t next_address = 1;
  int allocations = 0;
  std::string misuse;  // misuse of the device by the daemon
  // Returns the result of the next allocation.
  std::function<absl::Status()> allocate_fails = [] { return absl::OkStatus(); };
  // Returns the processes that have mapped the segment.
  std::function<std::vector<pid_t>(uint64_t address)> holders = [](uint64_t) { return std::vector<pid_t>(); };
};

inline uint64_t AddressOf(const CudaIpcHandle& handle) {
  uint64_t address = 0;
  std::memcpy(&address, handle.data(), sizeof address);
  return address;
}

class SimDevice : public SegmentOwner {
 public:
  SimDevice(SimMemory* memory, uint64_t total_bytes)
      : memory_(*memory),
        properties_{.kind = "simulated",
                    .uuid = "SIM-0",
                    .name = "simulated",
                    .total_bytes = total_bytes,
                    .has_other_programs = true,
                    .has_contexts = true,
                    .handles = HandleKind::kCudaIpc} {}

  const DeviceProperties& properties() const override { return properties_; }
  absl::StatusOr<uint64_t> FreeBytes() override {
    return properties_.total_bytes - std::min(properties_.total_bytes, memory_.live_bytes + memory_.clients_bytes);
  }

  absl::StatusOr<DeviceSegment> AllocateSegment(uint64_t bytes) override {
    SimThread::Yield();
    if (absl::Status status = memory_.allocate_fails(); !status.ok()) return status;
    const uint64_t address = memory_.next_address++;
    memory_.live[address] = {.bytes = bytes};
    memory_.live_bytes += bytes;
    ++memory_.allocations;
    SimThread::Yield();
    return DeviceSegment{.bytes = bytes, .address = address};
  }
  absl::Status FreeSegment(const DeviceSegment& segment) override {
    SimThread::Yield();
    const auto it = memory_.live.find(segment.address);
    if (it == memory_.live.end()) {
      memory_.misuse += "a segment was freed that is not live; ";
      return absl::InternalError("not live");
    }
    memory_.live_bytes -= it->second.bytes;
    memory_.live.erase(it);
    SimThread::Yield();
    return absl::OkStatus();
  }
  absl::StatusOr<SegmentHandle> ExportSegment(const DeviceSegment& segment) override {
    CudaIpcHandle handle = {};
    std::memcpy(handle.data(), &segment.address, sizeof segment.address);
    return SegmentHandle(handle);
  }
  absl::StatusOr<SegmentHolders> FindHolders(absl::Span<const DeviceSegment> segments) override {
    SimThread::Yield();
    SegmentHolders found;
    for (size_t i = 0; i < segments.size(); ++i) {
      for (const pid_t pid : memory_.holders(segments[i].address)) found.holders.push_back({.segment = i, .pid = pid});
    }
    return found;
  }
  absl::Status Zero(const DeviceSegment&, uint64_t, uint64_t) override {
    return absl::UnimplementedError("simulated device: there is no memory");
  }

 private:
  SimMemory& memory_;
  const DeviceProperties properties_;
};

}  // namespace vrambroker::fault

#endif  // VRAMBROKER_TESTS_FAULT_SIM_DEVICE_H_
