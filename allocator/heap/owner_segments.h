// SPDX-License-Identifier: Apache-2.0
//
// Segments in transit between a CachingAllocator and its owner: supplied by the owner, or let go by the heap, for the
// owner to release.
#ifndef VRAMBROKER_ALLOCATOR_HEAP_OWNER_SEGMENTS_H_
#define VRAMBROKER_ALLOCATOR_HEAP_OWNER_SEGMENTS_H_

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "absl/types/span.h"
#include "allocator/base/ids.h"
#include "allocator/device/events.h"

namespace vrambroker {

class CachingAllocator;

struct AcquiredSegment {
  SegmentId id{};
  void* base = nullptr;  // address in the process; nullptr if not mapped
};

struct ReleasedSegment {
  SegmentId id{};
  uint64_t bytes = 0;
  // Stream with work that may still use the segment: the stream of its blocks. All other streams are done. nullopt: any
  // stream may have such work.
  std::optional<Stream> stream;
};

// SlowCall: an action of the owner under way, perhaps ending with more memory for the heap: a release, a request for a
// segment, a wait for streams. Before a request is refused, all slow calls begun earlier must end: memory between two
// accounts may be just enough for the request. Ends on destruction. Used by one thread at a time.
class [[nodiscard]] SlowCall {
 public:
  SlowCall() = default;  // empty
  SlowCall(SlowCall&& other) noexcept : heap_(std::exchange(other.heap_, nullptr)), number_(other.number_) {}
  SlowCall& operator=(SlowCall&& other) noexcept {
    std::swap(heap_, other.heap_);
    std::swap(number_, other.number_);
    return *this;
  }
  ~SlowCall();  // takes the heap's lock, unless empty

 private:
  friend class CachingAllocator;
  SlowCall(CachingAllocator* heap, uint64_t number) : heap_(heap), number_(number) {}

  CachingAllocator* heap_ = nullptr;
  uint64_t number_ = 0;
};

// Segments no longer held by the heap. The owner releases the segments, then destroys the object.
class [[nodiscard]] SegmentsToRelease {
 public:
  SegmentsToRelease() = default;  // empty

  absl::Span<const ReleasedSegment> segments() const { return segments_; }
  bool empty() const { return segments_.empty(); }

 private:
  friend class CachingAllocator;
  SegmentsToRelease(std::vector<ReleasedSegment> segments, SlowCall call)
      : segments_(std::move(segments)), call_(std::move(call)) {}

  std::vector<ReleasedSegment> segments_;
  SlowCall call_;
};

}  // namespace vrambroker

#endif  // VRAMBROKER_ALLOCATOR_HEAP_OWNER_SEGMENTS_H_
