// SPDX-License-Identifier: Apache-2.0
//
// Segments on their way between a CachingAllocator and its owner: those that the owner supplies, and those that the
// heap has let go of, for the owner to release.
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
  void* base = nullptr;  // where it is mapped in this process; nullptr where it is not
};

struct ReleasedSegment {
  SegmentId id{};
  uint64_t bytes = 0;
  // Whose work may still use it: that of the stream which its blocks were for. All other streams are done with it.
  // None: any stream's.
  std::optional<Stream> stream;
};

// Something that the owner has under way and that may end with more memory for the heap: a release, a request for a
// segment, a wait for streams. No request of the heap is refused before those that began earlier have ended: what they
// hold between two accounts may be what it needs. Ends when it is destroyed. Used by one thread at a time.
class [[nodiscard]] SlowCall {
 public:
  SlowCall() = default;  // none
  SlowCall(SlowCall&& other) noexcept : heap_(std::exchange(other.heap_, nullptr)), number_(other.number_) {}
  SlowCall& operator=(SlowCall&& other) noexcept {
    std::swap(heap_, other.heap_);
    std::swap(number_, other.number_);
    return *this;
  }
  ~SlowCall();  // takes the heap's lock, unless there is none

 private:
  friend class CachingAllocator;
  SlowCall(CachingAllocator* heap, uint64_t number) : heap_(heap), number_(number) {}

  CachingAllocator* heap_ = nullptr;
  uint64_t number_ = 0;
};

// Segments that the heap does not hold any more. The owner releases them, then destroys this.
class [[nodiscard]] SegmentsToRelease {
 public:
  SegmentsToRelease() = default;  // none

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
