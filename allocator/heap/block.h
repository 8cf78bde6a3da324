// SPDX-License-Identifier: Apache-2.0
//
// Block: a piece of a segment. Segment: the allocator's record of a contiguous piece of device memory.
#ifndef VRAMBROKER_ALLOCATOR_HEAP_BLOCK_H_
#define VRAMBROKER_ALLOCATOR_HEAP_BLOCK_H_

#include <cstdint>

#include "allocator/base/ids.h"
#include "allocator/device/events.h"
#include "allocator/heap/heap_snapshot.h"
#include "allocator/heap/scopes.h"
#include "allocator/heap/size_class.h"

namespace vrambroker {

struct Block;
struct StreamPools;  // heap_records.h

struct Segment {
  SegmentId id{};
  uint64_t order = 0;    // 0 for the heap's first segment ever, then 1, ...
  uint64_t address = 0;  // a label growing with `order`; see SegmentSnapshot
  void* base = nullptr;  // address in the process, if mapped
  uint64_t bytes = 0;
  PoolKind pool = PoolKind::kSmall;
  StreamPools* pools = nullptr;  // the pools of the segment's stream
  Block* first = nullptr;        // the block at offset 0; never replaced while the segment lives
  Segment* prev = nullptr;       // neighbours among all segments of the heap, by order
  Segment* next = nullptr;
  // Valid while the segment is wholly free: when it became so, by the pool's search count and by
  // CachingAllocator::Tick(), and the neighbours among wholly free segments, longest free first.
  uint64_t free_since = 0;
  uint64_t free_since_tick = 0;
  Segment* prev_free = nullptr;
  Segment* next_free = nullptr;
};

struct BlockUses;  // streams recorded for a block, and events still to come (heap_records.h)

// Owned by the allocator. The holder of an allocated block may read `bytes` and call the functions; everything else is
// guarded by the allocator's lock. Fills a cache line.
struct alignas(64) Block {
  uint64_t bytes = 0;    // a multiple of 512
  uint64_t address = 0;  // segment->address + offset
  Segment* segment = nullptr;
  Block* prev = nullptr;  // neighbours in the segment, by offset
  Block* next = nullptr;
  BlockUses* uses = nullptr;          // nullptr while no other stream uses the block
  uint64_t requested_bytes : 60 = 0;  // bytes requested by the (last) owner
  BlockState state : 4 = BlockState::kFree;
  uint32_t handed_out_s = 0;  // time of handing out, by HeapClock
  ScopeId scope = 0;          // scope of the allocation; of a free block: anything

  SegmentId segment_id() const { return segment->id; }
  uint64_t offset() const { return address - segment->address; }  // from the start of the segment, bytes
  uint64_t segment_bytes() const { return segment->bytes; }
  void* data() const { return static_cast<char*>(segment->base) + offset(); }  // REQUIRES: the segment has a base
  bool IsWholeSegment() const { return prev == nullptr && next == nullptr; }
};
static_assert(sizeof(Block) == 64);

}  // namespace vrambroker

#endif  // VRAMBROKER_ALLOCATOR_HEAP_BLOCK_H_
