// SPDX-License-Identifier: Apache-2.0
//
// A heap at one moment: its segments and blocks, and what was recorded of how it came to be.
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
  uint64_t requested_bytes = 0;  // by its owner; of a free block: by its last owner
  BlockState state = BlockState::kFree;
  ScopeId scope = 0;  // in which it was allocated; of a free block: 0
};

struct SegmentSnapshot {
  SegmentId id{};
  uint64_t address = 0;  // a label: grows with every segment obtained, never reused; no pointer
  uint64_t bytes = 0;
  PoolKind pool = PoolKind::kSmall;
  Stream stream = 0;
  std::vector<BlockSnapshot> blocks;  // by offset; they tile the segment
  // Leased as it is, for an allocator of the application's own: its blocks are not known, and no event tells of it.
  bool whole = false;
};

enum class HistoryAction : uint8_t {
  kAllocate,       // a block was handed out
  kFreeRequested,  // its owner freed it
  kFreeCompleted,  // it can be handed out again
  kSegmentAllocate,
  kSegmentFree,
  kSnapshot,
  kOutOfMemory,
};

struct HistoryEvent {
  static constexpr uint64_t kBlockUnitBytes = 512;

  HistoryAction action = HistoryAction::kAllocate;
  ScopeId scope = 0;  // in which the block was allocated, or the request was refused
  // Of blocks: the size of the block, which a request alone does not tell. In units of 512 bytes; 0: not known. Here,
  // because a ring of events is as large as this struct is.
  uint32_t block_units = 0;
  uint64_t address = 0;  // segment address + offset; kOutOfMemory: bytes that the owner still had; kSnapshot: 0
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
  uint64_t max_events = 0;                // that the heap keeps of them; 0: recording is off, or was not asked for
  AllocatorOptions options;
  // What the ids of blocks and events are, of ScopeTable::scopes(). A heap does not know: its owner adds them.
  std::vector<Scope> scopes;
  // By id, what was allocated in each when the heap's allocated bytes were at their peak; of 0 what was in none. Empty
  // unless scopes were used.
  std::vector<uint64_t> scope_bytes_at_peak;
};

}  // namespace vrambroker

#endif  // VRAMBROKER_ALLOCATOR_HEAP_HEAP_SNAPSHOT_H_
