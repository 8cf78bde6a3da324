// SPDX-License-Identifier: Apache-2.0
//
// Records of CachingAllocator beside blocks and segments; for the files of CachingAllocator only.
#ifndef VRAMBROKER_ALLOCATOR_HEAP_HEAP_RECORDS_H_
#define VRAMBROKER_ALLOCATOR_HEAP_HEAP_RECORDS_H_

#include <array>
#include <cstddef>

#include "absl/container/inlined_vector.h"
#include "allocator/device/events.h"
#include "allocator/heap/block.h"
#include "allocator/heap/caching_allocator.h"
#include "allocator/heap/free_index.h"

namespace vrambroker {

// StreamPools: a heap's records for a stream. A stream is the unit of reuse, since work on a stream is ordered.
struct StreamPools {
  Stream stream = 0;
  std::array<FreeIndex, 2> free;  // by PoolKind
  size_t segments = 0;
};

struct BlockUses {
  absl::InlinedVector<Stream, 4> streams;  // while allocated: other streams using the block
  size_t events = 0;                       // while pending: number of events still to come
};

struct CachingAllocator::BlockSlab {
  std::array<Block, 256> blocks;
};

}  // namespace vrambroker

#endif  // VRAMBROKER_ALLOCATOR_HEAP_HEAP_RECORDS_H_
