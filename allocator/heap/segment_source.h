// SPDX-License-Identifier: Apache-2.0
//
// SegmentSource: what a CachingAllocator grows from. In the daemon it is a session's account with the SegmentPool;
// in a benchmark it may be no memory at all.
#ifndef VRAMBROKER_ALLOCATOR_HEAP_SEGMENT_SOURCE_H_
#define VRAMBROKER_ALLOCATOR_HEAP_SEGMENT_SOURCE_H_

#include <cstdint>
#include <optional>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "allocator/base/ids.h"
#include "allocator/device/events.h"

namespace vrambroker {

struct AcquiredSegment {
  SegmentId id{};
  void* base = nullptr;  // where it is mapped in this process; nullptr where it is not
};

struct ReleasedSegment {
  SegmentId id{};
  uint64_t bytes = 0;
  // Whose work may still use it: that of the stream which its blocks were for. All other streams are done with it.
  // None: any stream's.
  std::optional<Stream> stream;
};

// Safe to call from any thread. Calls may take milliseconds; the allocator holds no lock while it makes them.
class SegmentSource {
 public:
  virtual ~SegmentSource() = default;

  // A segment of exactly `bytes`. ResourceExhausted when a limit or the device forbids it: the allocator then gives
  // its cached segments back and tries once more, as a `last_resort`: others may now be asked for theirs, and the call
  // may wait for long. Any other error ends the request.
  virtual absl::StatusOr<AcquiredSegment> AcquireSegment(uint64_t bytes, bool last_resort) = 0;

  // Takes segments back, on whose streams work may still be under way. Returns how many of their bytes are available
  // again; the rest follows when it can.
  virtual uint64_t ReleaseSegments(absl::Span<const ReleasedSegment> segments) = 0;

  // Bytes that AcquireSegment could still hand out now, for the record of an out-of-memory event. Never blocks.
  virtual uint64_t AvailableBytes() { return 0; }
};

}  // namespace vrambroker

#endif  // VRAMBROKER_ALLOCATOR_HEAP_SEGMENT_SOURCE_H_
