// SPDX-License-Identifier: Apache-2.0
//
// FitReport: a refused request against a heap: free memory of the right kind, and blocks keeping the free bytes apart.
#ifndef VRAMBROKER_ALLOCATOR_HEAP_FIT_REPORT_H_
#define VRAMBROKER_ALLOCATOR_HEAP_FIT_REPORT_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "allocator/heap/scope_use.h"

namespace vrambroker {

// PinningBlock: a block in use, or freed and still used by a stream. Keeps its segment from being given back.
struct PinningBlock {
  uint64_t address = 0;  // a label, as in SegmentSnapshot: segment address + offset
  uint64_t bytes = 0;
  uint64_t held_seconds = 0;  // since handed out; see CachingAllocator::NoteTime()
  std::string scope;          // ScopePath() of the allocation's scope
};

// PinnedSegment: holds blocks in use, and free blocks as its holes.
struct PinnedSegment {
  uint64_t address = 0;  // a label
  uint64_t bytes = 0;
  uint64_t hole_bytes = 0;
  uint64_t largest_hole_bytes = 0;
  uint64_t pinning_blocks = 0;             // COUNT
  std::vector<PinningBlock> longest_held;  // at most Holes::kMaxBlocks, longest held first
};

// All holes of a heap: free memory out of reach of trims.
struct Holes {
  static constexpr size_t kMaxSegments = 3;
  static constexpr size_t kMaxBlocks = 3;

  uint64_t bytes = 0;
  uint64_t count = 0;
  uint64_t segments = 0;                  // COUNT of segments with holes
  std::vector<PinnedSegment> most_bytes;  // at most kMaxSegments, most hole bytes first
};

struct FitReport {
  uint64_t block_bytes = 0;         // the request, rounded
  uint64_t segment_bytes = 0;       // the segment for a miss
  uint64_t pool_free_bytes = 0;     // free blocks of the request's pool and stream
  uint64_t pool_largest_bytes = 0;  // largest free block of the request's pool and stream
  Holes holes;                      // of the whole heap
  bool knows_holes = false;         // `holes` is filled in
  uint64_t max_events = 0;          // kept by the heap
  std::string scope;                // of the request
  std::vector<ScopeUse> scopes;     // LargestScopeUses() of the heap
};

}  // namespace vrambroker

#endif  // VRAMBROKER_ALLOCATOR_HEAP_FIT_REPORT_H_
