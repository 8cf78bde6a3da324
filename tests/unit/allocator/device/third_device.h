// SPDX-License-Identifier: Apache-2.0
//
// A third kind of device, beside host and CUDA, with properties that neither has together: handles are descriptors, the
// driver keeps freed bytes, and does not tell holders. The contract suite shows that a kind needs no more than a
// Device.
#ifndef VRAMBROKER_TESTS_UNIT_ALLOCATOR_DEVICE_THIRD_DEVICE_H_
#define VRAMBROKER_TESTS_UNIT_ALLOCATOR_DEVICE_THIRD_DEVICE_H_

#include <algorithm>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "allocator/base/mutex.h"
#include "allocator/device/device.h"
#include "allocator/device/host_device.h"

namespace vrambroker {

// Takes its memory from a host device, and keeps freed segments, uncleared, for the next one of the size.
class ThirdDevice : public Device {
 public:
  explicit ThirdDevice(uint64_t total_bytes)
      : memory_(MakeHostDevice(0, total_bytes)),
        properties_{.kind = "third",
                    .uuid = "THIRD-0",
                    .name = "a third kind",
                    .total_bytes = total_bytes,
                    .keeps_freed_bytes = true} {}

  const DeviceProperties& properties() const override { return properties_; }
  absl::StatusOr<uint64_t> FreeBytes() override {
    absl::StatusOr<uint64_t> free = memory_->FreeBytes();
    MutexLock lock(mu_);
    for (const DeviceSegment& segment : freed_) *free += segment.bytes;
    return free;
  }

  absl::StatusOr<DeviceSegment> AllocateSegment(uint64_t bytes) override {
    std::vector<DeviceSegment> unused;
    {
      MutexLock lock(mu_);
      const auto same = std::find_if(freed_.begin(), freed_.end(), [&](const auto& s) { return s.bytes == bytes; });
      if (same != freed_.end()) {
        const DeviceSegment segment = *same;
        freed_.erase(same);
        return segment;
      }
      unused.swap(freed_);
    }
    for (const DeviceSegment& segment : unused) (void)memory_->FreeSegment(segment);
    return memory_->AllocateSegment(bytes);
  }
  absl::Status FreeSegment(const DeviceSegment& segment) override {
    MutexLock lock(mu_);
    freed_.push_back(segment);
    return absl::OkStatus();
  }
  absl::StatusOr<SegmentHandle> ExportSegment(const DeviceSegment& segment) override {
    return memory_->ExportSegment(segment);
  }
  absl::Status Zero(const DeviceSegment& segment, uint64_t offset, uint64_t bytes) override {
    return memory_->Zero(segment, offset, bytes);
  }

  absl::StatusOr<void*> OpenHandle(const SegmentHandle& handle, uint64_t bytes) override {
    return memory_->OpenHandle(handle, bytes);
  }
  absl::Status CloseHandle(void* address, uint64_t bytes) override { return memory_->CloseHandle(address, bytes); }
  absl::Status CopyIn(void* segment_address, const void* from, uint64_t bytes) override {
    return memory_->CopyIn(segment_address, from, bytes);
  }
  absl::Status CopyOut(void* to, const void* segment_address, uint64_t bytes) override {
    return memory_->CopyOut(to, segment_address, bytes);
  }
  absl::StatusOr<std::unique_ptr<Event>> RecordEvent(Stream stream) override { return memory_->RecordEvent(stream); }

 private:
  const std::unique_ptr<Device> memory_;
  const DeviceProperties properties_;
  Mutex mu_;
  std::vector<DeviceSegment> freed_ ABSL_GUARDED_BY(mu_);
};

}  // namespace vrambroker

#endif  // VRAMBROKER_TESTS_UNIT_ALLOCATOR_DEVICE_THIRD_DEVICE_H_
