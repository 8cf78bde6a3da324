// SPDX-License-Identifier: Apache-2.0
//
// SimulatedDevice: a budget of bytes, and streams finishing their work on command. No memory behind it.
#ifndef VRAMBROKER_ALLOCATOR_REPLAY_SIMULATED_DEVICE_H_
#define VRAMBROKER_ALLOCATOR_REPLAY_SIMULATED_DEVICE_H_

#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "allocator/base/mutex.h"
#include "allocator/device/events.h"
#include "allocator/replay/segment_source.h"

namespace vrambroker {

// Segments fit as long as enough bytes are left: no fragmentation of physical memory, no overhead. Ids are 1, 2, 3, ...
// Thread-safe. REQUIRES: the device outlives its events.
class SimulatedDevice : public SegmentSource, public EventSource {
 public:
  explicit SimulatedDevice(uint64_t bytes) : bytes_(bytes) {}

  absl::StatusOr<AcquiredSegment> AcquireSegment(uint64_t bytes) override ABSL_LOCKS_EXCLUDED(mu_);
  uint64_t ReleaseSegments(absl::Span<const ReleasedSegment> segments) override ABSL_LOCKS_EXCLUDED(mu_);
  uint64_t AvailableBytes() override ABSL_LOCKS_EXCLUDED(mu_);

  // Records an event, completed by FinishStream(), FinishAll() or Wait() together with all earlier events of its
  // stream.
  absl::StatusOr<std::unique_ptr<Event>> RecordEvent(Stream stream) override ABSL_LOCKS_EXCLUDED(mu_);

  // Finishes the stream's work up to its oldest `events` unfinished events; kAll: everything queued so far.
  static constexpr uint64_t kAll = ~uint64_t{0};
  void FinishStream(Stream stream, uint64_t events = kAll) ABSL_LOCKS_EXCLUDED(mu_);
  void FinishAll() ABSL_LOCKS_EXCLUDED(mu_);

  bool Holds(SegmentId id) const ABSL_LOCKS_EXCLUDED(mu_);
  uint64_t used_bytes() const ABSL_LOCKS_EXCLUDED(mu_);

 private:
  friend class SimulatedEvent;
  struct Queue {
    uint64_t recorded = 0;  // events so far
    uint64_t finished = 0;  // part of `recorded`
  };

  const uint64_t bytes_;
  mutable Mutex mu_;
  uint64_t used_ ABSL_GUARDED_BY(mu_) = 0;
  std::vector<bool> given_ ABSL_GUARDED_BY(mu_);  // by id, less 1: whether the segment is handed out
  std::map<Stream, Queue> queues_ ABSL_GUARDED_BY(mu_);
};

}  // namespace vrambroker

#endif  // VRAMBROKER_ALLOCATOR_REPLAY_SIMULATED_DEVICE_H_
