// SPDX-License-Identifier: Apache-2.0
//
// HeapSnapshot: a heap at one moment, with segments, blocks and recorded history.
#ifndef VRAMBROKER_ALLOCATOR_HEAP_HEAP_SNAPSHOT_H_
#define VRAMBROKER_ALLOCATOR_HEAP_HEAP_SNAPSHOT_H_

#include <cstdint>
#include <limits>
#include <vector>

#include "allocator/base/ids.h"
#include "allocator/device/events.h"
#include "allocator/heap/allocator_options.h"
#include "allocator/heap/scopes.h"
#include "allocator/heap/size_class.h"

namespace vrambroker {

enum class BlockState : uint8_t {
  kFree,
  kAllocated,
  kPendingFree,  // freed by its owner, still in use by a stream
};

struct BlockSnapshot {
  uint64_t offset = 0;
  uint64_t bytes = 0;
  uint64_t requested_bytes = 0;  // by the owner; of a free block: by the last owner
  BlockState state = BlockState::kFree;
  ScopeId scope = 0;  // scope of the allocation; of a free block: 0
};

struct SegmentSnapshot {
  SegmentId id{};
  uint64_t address = 0;  // a label: grows with every segment obtained, never reused; no pointer
  uint64_t bytes = 0;
  PoolKind pool = PoolKind::kSmall;
  Stream stream = 0;
  std::vector<BlockSnapshot> blocks;  // by offset, tiling the segment
  // Leased whole, for an allocator of the application's own: blocks are unknown, and no event reports the segment.
  bool whole = false;
};

enum class HistoryAction : uint8_t {
  kAllocate,       // a block was handed out
  kFreeRequested,  // the owner freed the block
  kFreeCompleted,  // the block can be handed out again
  kSegmentAllocate,
  kSegmentFree,
  kSnapshot,
  kOutOfMemory,
};

struct HistoryEvent {
  static constexpr uint64_t kBlockUnitBytes = 512;

  HistoryAction action = HistoryAction::kAllocate;
  ScopeId scope = 0;  // scope of the block's allocation, or of the refused request
  // Size of an event's block, not derivable from the request. In units of 512 bytes; 0: not known. Placed here to keep
  // the struct, and so a ring of events, small.
  uint32_t block_units = 0;
  uint64_t address = 0;  // segment address + offset; kOutOfMemory: bytes left with the owner; kSnapshot: 0
  uint64_t bytes = 0;    // requested (blocks), of the segment, active in all (kSnapshot), rounded (kOutOfMemory)
  Stream stream = 0;
  int64_t time_us = 0;  // microseconds since 1970

  uint64_t block_bytes() const { return block_units * kBlockUnitBytes; }
  void set_block_bytes(uint64_t value) {
    const uint64_t units = value / kBlockUnitBytes;
    block_units = units <= std::numeric_limits<uint32_t>::max() ? static_cast<uint32_t>(units) : 0;
  }
};
static_assert(sizeof(HistoryEvent) == 40);

struct HeapSnapshot {
  std::vector<SegmentSnapshot> segments;  // by address
  std::vector<HistoryEvent> history;      // oldest first; empty unless recording is on
  uint64_t max_events = 0;                // events kept by the heap; 0: recording is off, or was not asked for
  AllocatorOptions options;
  // Scopes for the ids of blocks and events, as ScopeTable::scopes(). A heap has no scopes: the owner adds the list.
  std::vector<Scope> scopes;
  // Bytes allocated in each scope, by id, at the peak of the heap's allocated bytes; entry 0: in no scope. Empty unless
  // scopes were used.
  std::vector<uint64_t> scope_bytes_at_peak;
};

}  // namespace vrambroker

#endif  // VRAMBROKER_ALLOCATOR_HEAP_HEAP_SNAPSHOT_H_
