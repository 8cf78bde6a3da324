// SPDX-License-Identifier: Apache-2.0
//
// How a refused request stands against a heap: what would have served it, and what keeps the heap's free bytes apart.
#ifndef VRAMBROKER_ALLOCATOR_HEAP_FIT_REPORT_H_
#define VRAMBROKER_ALLOCATOR_HEAP_FIT_REPORT_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "allocator/heap/scope_use.h"

namespace vrambroker {

// A block that keeps its segment from being given back: in use, or freed and still used by a stream.
struct PinningBlock {
  uint64_t address = 0;  // a label, as in SegmentSnapshot: segment address + offset
  uint64_t bytes = 0;
  uint64_t held_seconds = 0;  // since it was handed out; see CachingAllocator::NoteTime()
  std::string scope;          // ScopePath() of the scope that it was allocated in
};

// A segment that holds blocks in use and free ones, which are its holes.
struct PinnedSegment {
  uint64_t address = 0;  // a label
  uint64_t bytes = 0;
  uint64_t hole_bytes = 0;
  uint64_t largest_hole_bytes = 0;
  uint64_t pinning_blocks = 0;             // COUNT
  std::vector<PinningBlock> longest_held;  // of these, at most Holes::kMaxBlocks, the one held for longest first
};

// All holes of a heap: memory that is free and that no trim can return.
struct Holes {
  static constexpr size_t kMaxSegments = 3;
  static constexpr size_t kMaxBlocks = 3;

  uint64_t bytes = 0;
  uint64_t count = 0;
  uint64_t segments = 0;                  // COUNT of segments that have any
  std::vector<PinnedSegment> most_bytes;  // of these, at most kMaxSegments, the one with most bytes of holes first
};

struct FitReport {
  uint64_t block_bytes = 0;         // the request, rounded
  uint64_t segment_bytes = 0;       // the segment that a miss asks for
  uint64_t pool_free_bytes = 0;     // free blocks of the pool and stream that would serve it
  uint64_t pool_largest_bytes = 0;  // the largest of them
  Holes holes;                      // of the whole heap
  bool knows_holes = false;         // `holes` was looked at
  uint64_t max_events = 0;          // that the heap keeps
  std::string scope;                // of the request
  std::vector<ScopeUse> scopes;     // LargestScopeUses() of the heap
};

}  // namespace vrambroker

#endif  // VRAMBROKER_ALLOCATOR_HEAP_FIT_REPORT_H_
