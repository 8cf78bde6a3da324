// SPDX-License-Identifier: Apache-2.0
//
// SegmentSource: answers a heap's requests for segments at once. A DirectHeap grows from a SegmentSource.
#ifndef VRAMBROKER_ALLOCATOR_REPLAY_SEGMENT_SOURCE_H_
#define VRAMBROKER_ALLOCATOR_REPLAY_SEGMENT_SOURCE_H_

#include <cstdint>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "allocator/heap/owner_segments.h"

namespace vrambroker {

// Thread-safe; called with no lock held.
class SegmentSource {
 public:
  virtual ~SegmentSource() = default;

  // Returns a segment of exactly `bytes`. Errors: as of BlockRequest::Deny().
  virtual absl::StatusOr<AcquiredSegment> AcquireSegment(uint64_t bytes) = 0;

  // Takes segments back; work on their streams may still be under way. Returns the bytes available again now. The rest
  // follows when possible.
  virtual uint64_t ReleaseSegments(absl::Span<const ReleasedSegment> segments) = 0;

  // Bytes left for AcquireSegment() now, for the record of an out-of-memory event. Never blocks.
  virtual uint64_t AvailableBytes() { return 0; }
};

}  // namespace vrambroker

#endif  // VRAMBROKER_ALLOCATOR_REPLAY_SEGMENT_SOURCE_H_
