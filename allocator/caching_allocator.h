// SPDX-License-Identifier: Apache-2.0
//
// CachingAllocator: hands out blocks of segments and keeps freed ones for reuse.
//
// It decides as PyTorch's CUDA caching allocator does in its default configuration (which segment, which block,
// when to split, merge, flush and give up), and counts the same figures. It never touches the memory itself.
//
// Deliberate difference: after a flush the free list is searched once more before the request is refused
// (the original may refuse although a fitting block has just become free: pytorch/pytorch issue 189504).
#ifndef VRAMBROKER_ALLOCATOR_CACHING_ALLOCATOR_H_
#define VRAMBROKER_ALLOCATOR_CACHING_ALLOCATOR_H_

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/container/btree_set.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "allocator/ids.h"
#include "allocator/memory_stats.h"
#include "allocator/mutex.h"
#include "allocator/segment_source.h"
#include "allocator/size_class.h"

namespace vrambroker {

// A piece of one segment. The allocator owns it; the holder of an allocated block may read the fields above the line.
struct Block {
  SegmentId segment{};
  uint64_t offset = 0;           // from the start of the segment, bytes
  uint64_t bytes = 0;            // a multiple of 512
  uint64_t requested_bytes = 0;  // what its (last) owner asked for
  uint64_t segment_bytes = 0;    // size of the whole segment
  // ------------------------------------------------------------
  uint64_t segment_order = 0;  // 0 for the first segment ever obtained, then 1, ...
  PoolKind pool = PoolKind::kSmall;
  bool allocated = false;
  Block* prev = nullptr;  // neighbours in the segment, by offset
  Block* next = nullptr;

  bool IsWholeSegment() const { return prev == nullptr && next == nullptr; }
};

struct BlockSnapshot {
  uint64_t offset = 0;
  uint64_t bytes = 0;
  uint64_t requested_bytes = 0;
  bool allocated = false;
};

struct SegmentSnapshot {
  SegmentId id{};
  uint64_t bytes = 0;
  PoolKind pool = PoolKind::kSmall;
  std::vector<BlockSnapshot> blocks;  // by offset; they tile the segment
};

// How a request stands against the cache; for explaining a refusal.
struct FitReport {
  uint64_t block_bytes = 0;         // the request, rounded
  uint64_t segment_bytes = 0;       // the segment that a miss asks for
  uint64_t pool_free_bytes = 0;     // free blocks of the pool that would serve it
  uint64_t pool_largest_bytes = 0;  // the largest of them
};

// Safe to call from any thread. Hits and frees take a lock for a tree operation; calls that reach the SegmentSource
// drop the lock while they wait for it, so a slow device does not delay other threads' hits.
class CachingAllocator {
 public:
  // `source` outlives the allocator.
  explicit CachingAllocator(SegmentSource* source) : source_(*source) {}
  // Blocks and segments are forgotten, not given back: their owner (a session, a process) is ending as a whole.
  ~CachingAllocator();
  CachingAllocator(const CachingAllocator&) = delete;
  CachingAllocator& operator=(const CachingAllocator&) = delete;

  // A block of at least `requested` bytes from the cache, or nullptr. Never calls the source.
  // REQUIRES: 0 < requested < kMaxRequestBytes.
  Block* TryAllocate(uint64_t requested) ABSL_LOCKS_EXCLUDED(mu_);

  // The same, and on a miss a new segment; when that is refused, gives all cached segments back and tries again.
  // Returns the source's last error when nothing helped; ResourceExhausted counts as an out-of-memory event.
  absl::StatusOr<Block*> Allocate(uint64_t requested) ABSL_LOCKS_EXCLUDED(mu_);

  // Makes `block` free and joins it with free neighbours. It may be handed out again at once.
  // REQUIRES: `block` came from this object and was not freed since.
  void Free(Block* block) ABSL_LOCKS_EXCLUDED(mu_);

  // Gives every wholly free segment back to the source. Returns the bytes that the source has made available.
  uint64_t EmptyCache() ABSL_LOCKS_EXCLUDED(mu_);

  MemoryStats GetMemoryStats() const ABSL_LOCKS_EXCLUDED(mu_);
  void ResetPeakStats() ABSL_LOCKS_EXCLUDED(mu_);

  // Counts an out-of-memory event for a request that was refused without asking the allocator.
  void CountOutOfMemory() ABSL_LOCKS_EXCLUDED(mu_);

  FitReport ExplainFit(uint64_t requested) const ABSL_LOCKS_EXCLUDED(mu_);
  std::vector<SegmentSnapshot> Snapshot() const ABSL_LOCKS_EXCLUDED(mu_);

  // OK, or Internal naming the first invariant (see caching_allocator.cc) that does not hold. Walks everything.
  absl::Status CheckInvariants() const ABSL_LOCKS_EXCLUDED(mu_);

 private:
  // The order of best fit: smallest, then oldest segment, then lowest offset.
  struct FreeOrder {
    using is_transparent = void;
    bool operator()(const Block* a, const Block* b) const {
      if (a->bytes != b->bytes) return a->bytes < b->bytes;
      if (a->segment_order != b->segment_order) return a->segment_order < b->segment_order;
      return a->offset < b->offset;
    }
    bool operator()(const Block* a, uint64_t bytes) const { return a->bytes < bytes; }
    bool operator()(uint64_t bytes, const Block* b) const { return bytes < b->bytes; }
  };
  using FreeSet = absl::btree_set<Block*, FreeOrder>;

  FreeSet& free_of(PoolKind pool) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return free_[static_cast<int>(pool)]; }
  const FreeSet& free_of(PoolKind pool) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    return free_[static_cast<int>(pool)];
  }

  Block* AllocateFromCache(uint64_t requested) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  Block* HandOut(Block* candidate, uint64_t block_bytes, uint64_t requested) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  Block* AddSegment(SegmentId id, uint64_t bytes, PoolKind pool) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  uint64_t Absorb(Block* block, Block* neighbour) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  std::vector<ReleasedSegment> UnlinkFreeSegments() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  Block* NewBlock() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void RecycleBlock(Block* block) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  SegmentSource& source_;

  // Never held while calling the source.
  mutable Mutex mu_;
  std::array<FreeSet, 2> free_ ABSL_GUARDED_BY(mu_);                      // indexed by PoolKind
  absl::flat_hash_map<SegmentId, Block*> segments_ ABSL_GUARDED_BY(mu_);  // to the block at offset 0
  uint64_t next_segment_order_ ABSL_GUARDED_BY(mu_) = 0;
  MemoryStats stats_ ABSL_GUARDED_BY(mu_);
  std::vector<std::unique_ptr<std::array<Block, 64>>> slabs_ ABSL_GUARDED_BY(mu_);  // storage of all blocks
  Block* spare_blocks_ ABSL_GUARDED_BY(mu_) = nullptr;                              // linked by `next`
};

}  // namespace vrambroker

#endif  // VRAMBROKER_ALLOCATOR_CACHING_ALLOCATOR_H_
