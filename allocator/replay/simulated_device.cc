// SPDX-License-Identifier: Apache-2.0
#include "allocator/replay/simulated_device.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "allocator/base/bytes.h"

namespace vrambroker {

class SimulatedEvent : public Event {
 public:
  SimulatedEvent(SimulatedDevice* device, Stream stream, uint64_t number)
      : device_(*device), stream_(stream), number_(number) {}

  absl::StatusOr<bool> Query() override {
    MutexLock lock(device_.mu_);
    return device_.queues_[stream_].finished >= number_;
  }
  absl::Status Wait() override {
    MutexLock lock(device_.mu_);
    uint64_t& finished = device_.queues_[stream_].finished;
    finished = std::max(finished, number_);
    return absl::OkStatus();
  }

 private:
  SimulatedDevice& device_;
  const Stream stream_;
  const uint64_t number_;
};

absl::StatusOr<AcquiredSegment> SimulatedDevice::AcquireSegment(uint64_t bytes) {
  MutexLock lock(mu_);
  if (bytes > bytes_ - used_) {
    return absl::ResourceExhaustedError(absl::StrCat("the simulated device has ", FormatBytes(bytes_ - used_),
                                                     " left, the segment needs ", FormatBytes(bytes)));
  }
  used_ += bytes;
  given_.push_back(true);
  return AcquiredSegment{.id = SegmentId{given_.size()}};
}

uint64_t SimulatedDevice::ReleaseSegments(absl::Span<const ReleasedSegment> segments) {
  uint64_t bytes = 0;
  for (const ReleasedSegment& segment : segments) bytes += segment.bytes;
  MutexLock lock(mu_);
  for (const ReleasedSegment& segment : segments) given_[static_cast<uint64_t>(segment.id) - 1] = false;
  used_ -= bytes;
  return bytes;
}

bool SimulatedDevice::Holds(SegmentId id) const {
  MutexLock lock(mu_);
  const uint64_t index = static_cast<uint64_t>(id) - 1;
  return index < given_.size() && given_[index];
}

uint64_t SimulatedDevice::AvailableBytes() {
  MutexLock lock(mu_);
  return bytes_ - used_;
}

absl::StatusOr<std::unique_ptr<Event>> SimulatedDevice::RecordEvent(Stream stream) {
  MutexLock lock(mu_);
  return std::make_unique<SimulatedEvent>(this, stream, ++queues_[stream].recorded);
}

void SimulatedDevice::FinishStream(Stream stream, uint64_t events) {
  MutexLock lock(mu_);
  Queue& queue = queues_[stream];
  queue.finished += std::min(events, queue.recorded - queue.finished);
}

void SimulatedDevice::FinishAll() {
  MutexLock lock(mu_);
  for (auto& [stream, queue] : queues_) queue.finished = queue.recorded;
}

uint64_t SimulatedDevice::used_bytes() const {
  MutexLock lock(mu_);
  return used_;
}

}  // namespace vrambroker
