// SPDX-License-Identifier: Apache-2.0
//
// SegmentSource: who answers a heap's requests for segments at once. What a DirectHeap grows from.
#ifndef VRAMBROKER_ALLOCATOR_REPLAY_SEGMENT_SOURCE_H_
#define VRAMBROKER_ALLOCATOR_REPLAY_SEGMENT_SOURCE_H_

#include <cstdint>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "allocator/heap/owner_segments.h"

namespace vrambroker {

// Safe to call from any thread; called with no lock held.
class SegmentSource {
 public:
  virtual ~SegmentSource() = default;

  // A segment of exactly `bytes`. Errors: as of BlockRequest::Deny().
  virtual absl::StatusOr<AcquiredSegment> AcquireSegment(uint64_t bytes) = 0;

  // Takes segments back, on whose streams work may still be under way. Returns how many of their bytes are available
  // again; the rest follows when it can.
  virtual uint64_t ReleaseSegments(absl::Span<const ReleasedSegment> segments) = 0;

  // Bytes that AcquireSegment could still hand out now, for the record of an out-of-memory event. Never blocks.
  virtual uint64_t AvailableBytes() { return 0; }
};

}  // namespace vrambroker

#endif  // VRAMBROKER_ALLOCATOR_REPLAY_SEGMENT_SOURCE_H_
