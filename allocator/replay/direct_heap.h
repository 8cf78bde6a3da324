// SPDX-License-Identifier: Apache-2.0
//
// DirectHeap: a CachingAllocator with a SegmentSource, answering at once. For replays, tests and benchmarks.
#ifndef VRAMBROKER_ALLOCATOR_REPLAY_DIRECT_HEAP_H_
#define VRAMBROKER_ALLOCATOR_REPLAY_DIRECT_HEAP_H_

#include <cstdint>

#include "absl/status/statusor.h"
#include "allocator/device/events.h"
#include "allocator/heap/allocator_options.h"
#include "allocator/heap/block.h"
#include "allocator/heap/block_request.h"
#include "allocator/heap/caching_allocator.h"
#include "allocator/heap/owner_segments.h"
#include "allocator/heap/scopes.h"
#include "allocator/replay/segment_source.h"

namespace vrambroker {

// Thread-safe.
class DirectHeap : public CachingAllocator {
 public:
  // REQUIRES: `source` and `events` outlive the heap.
  explicit DirectHeap(SegmentSource* source, EventSource* events = nullptr, const AllocatorOptions& options = {},
                      uint64_t capacity_bytes = kNoLimit)
      : CachingAllocator(events, options, capacity_bytes), source_(*source) {}

  // TryAllocate(), and after a miss a BlockRequest to its end. Segments beyond SetLimit() are refused.
  absl::StatusOr<Block*> Allocate(uint64_t requested, Stream stream = 0, ScopeId scope = 0);

  // Give segments back. Return the bytes made available by the source.
  uint64_t EmptyCache();
  uint64_t Trim(TrimOptions options = {});
  uint64_t GiveBack(Segment* segment) { return Release(TakeSegment(segment)); }

 private:
  uint64_t Release(const SegmentsToRelease& taken);

  SegmentSource& source_;
};

}  // namespace vrambroker

#endif  // VRAMBROKER_ALLOCATOR_REPLAY_DIRECT_HEAP_H_
