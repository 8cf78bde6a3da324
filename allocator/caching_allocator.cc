// SPDX-License-Identifier: Apache-2.0
//
// States of a block, and the function that makes each transition:
//
//   (none) --AddSegment--> FREE --HandOut--> ALLOCATED --Free--> FREE --UnlinkFreeSegments--> (none)
//
// Invariants, checked by CheckInvariants() and cited by number elsewhere:
// (1) The blocks of a segment tile it: no gap, no overlap, sizes multiples of 512.
// (2) Two free neighbours never exist.
// (3) Exactly the free blocks are in a free set, each in that of its segment's pool.
// (4) Every `current` figure equals what a walk over all blocks counts, and current == allocated - freed <= peak.
#include "allocator/caching_allocator.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "absl/strings/str_cat.h"

namespace vrambroker {

CachingAllocator::~CachingAllocator() = default;

Block* CachingAllocator::NewBlock() {
  if (spare_blocks_ == nullptr) {
    slabs_.push_back(std::make_unique<std::array<Block, 64>>());
    for (Block& block : *slabs_.back()) {
      block.next = spare_blocks_;
      spare_blocks_ = &block;
    }
  }
  Block* block = std::exchange(spare_blocks_, spare_blocks_->next);
  *block = Block();
  return block;
}

void CachingAllocator::RecycleBlock(Block* block) {
  block->next = spare_blocks_;
  spare_blocks_ = block;
}

Block* CachingAllocator::TryAllocate(uint64_t requested) {
  MutexLock lock(mu_);
  return AllocateFromCache(requested);
}

absl::StatusOr<Block*> CachingAllocator::Allocate(uint64_t requested) {
  const uint64_t block_bytes = RoundRequest(requested);
  const PoolKind pool = PoolFor(block_bytes);
  const uint64_t segment_bytes = SegmentBytesFor(block_bytes);
  if (Block* block = TryAllocate(requested)) return block;

  const auto take = [&](SegmentId id) {
    MutexLock lock(mu_);
    return HandOut(AddSegment(id, segment_bytes, pool), block_bytes, requested);
  };
  absl::StatusOr<SegmentId> segment = source_.AcquireSegment(segment_bytes);
  if (segment.ok()) return take(*segment);
  if (!absl::IsResourceExhausted(segment.status())) return segment.status();

  EmptyCache();
  {
    MutexLock lock(mu_);
    ++stats_.num_alloc_retries;
  }
  segment = source_.AcquireSegment(segment_bytes);
  if (segment.ok()) return take(*segment);

  MutexLock lock(mu_);
  if (Block* block = AllocateFromCache(requested)) return block;  // freed by another thread meanwhile
  if (absl::IsResourceExhausted(segment.status())) ++stats_.num_ooms;
  return segment.status();
}

Block* CachingAllocator::AllocateFromCache(uint64_t requested) {
  const uint64_t block_bytes = RoundRequest(requested);
  FreeSet& free = free_of(PoolFor(block_bytes));
  const auto it = free.lower_bound(block_bytes);
  if (it == free.end()) return nullptr;
  Block* candidate = *it;
  // The original also rejects a candidate 20 MiB or more above a request of max_split_size; without that option
  // no request is so large.
  free.erase(it);
  return HandOut(candidate, block_bytes, requested);
}

// `candidate` is free and in no free set.
Block* CachingAllocator::HandOut(Block* candidate, uint64_t block_bytes, uint64_t requested) {
  const PoolKind pool = candidate->pool;
  const bool was_split = !candidate->IsWholeSegment();
  Block* block = candidate;
  if (ShouldSplit(pool, candidate->bytes - block_bytes)) {
    // The lower part is handed out; the upper part keeps the record and stays free.
    block = NewBlock();
    block->segment = candidate->segment;
    block->segment_bytes = candidate->segment_bytes;
    block->segment_order = candidate->segment_order;
    block->pool = pool;
    block->offset = candidate->offset;
    block->bytes = block_bytes;
    block->prev = candidate->prev;
    block->next = candidate;
    if (block->prev != nullptr) {
      block->prev->next = block;
    } else {
      segments_[block->segment] = block;
    }
    candidate->prev = block;
    candidate->offset += block_bytes;
    candidate->bytes -= block_bytes;
    free_of(pool).insert(candidate);
    if (was_split) {
      stats_.inactive_split_bytes.Down(pool, block_bytes);
    } else {
      stats_.inactive_split_bytes.Up(pool, candidate->bytes);
      stats_.inactive_split.Up(pool, 1);
    }
  } else if (was_split) {
    stats_.inactive_split_bytes.Down(pool, block->bytes);
    stats_.inactive_split.Down(pool, 1);
  }
  block->allocated = true;
  block->requested_bytes = requested;
  stats_.allocation.Up(pool, 1);
  stats_.allocated_bytes.Up(pool, block->bytes);
  stats_.active.Up(pool, 1);
  stats_.active_bytes.Up(pool, block->bytes);
  stats_.requested_bytes.Up(pool, requested);
  return block;
}

Block* CachingAllocator::AddSegment(SegmentId id, uint64_t bytes, PoolKind pool) {
  Block* block = NewBlock();
  block->segment = id;
  block->bytes = bytes;
  block->segment_bytes = bytes;
  block->segment_order = next_segment_order_++;
  block->pool = pool;
  segments_[id] = block;
  stats_.segment.Up(pool, 1);
  stats_.reserved_bytes.Up(pool, bytes);
  ++stats_.num_device_alloc;
  return block;
}

// Joins a free `neighbour` into `block`; returns its size, or 0 when it cannot be joined.
uint64_t CachingAllocator::Absorb(Block* block, Block* neighbour) {
  if (neighbour == nullptr || neighbour->allocated) return 0;
  free_of(neighbour->pool).erase(neighbour);
  if (block->prev == neighbour) {
    block->offset = neighbour->offset;
    block->prev = neighbour->prev;
    if (block->prev != nullptr) {
      block->prev->next = block;
    } else {
      segments_[block->segment] = block;
    }
  } else {
    block->next = neighbour->next;
    if (block->next != nullptr) block->next->prev = block;
  }
  const uint64_t bytes = neighbour->bytes;
  block->bytes += bytes;
  RecycleBlock(neighbour);
  return bytes;
}

void CachingAllocator::Free(Block* block) {
  MutexLock lock(mu_);
  const PoolKind pool = block->pool;
  const uint64_t bytes = block->bytes;
  block->allocated = false;
  stats_.allocation.Down(pool, 1);
  stats_.allocated_bytes.Down(pool, bytes);

  // Only the net change of the inactive-split figures is counted, as one step each way.
  int64_t split_blocks = 0;
  int64_t split_bytes = 0;
  for (Block* neighbour : {block->prev, block->next}) {
    if (const uint64_t joined = Absorb(block, neighbour); joined > 0) {
      split_blocks -= 1;
      split_bytes -= static_cast<int64_t>(joined);
    }
  }
  free_of(pool).insert(block);
  if (!block->IsWholeSegment()) {
    split_blocks += 1;
    split_bytes += static_cast<int64_t>(block->bytes);
  }
  const auto apply = [pool](PoolStat& stat, int64_t change) {
    if (change > 0) stat.Up(pool, static_cast<uint64_t>(change));
    if (change < 0) stat.Down(pool, static_cast<uint64_t>(-change));
  };
  apply(stats_.inactive_split, split_blocks);
  apply(stats_.inactive_split_bytes, split_bytes);
  stats_.active.Down(pool, 1);
  stats_.active_bytes.Down(pool, bytes);
  stats_.requested_bytes.Down(pool, block->requested_bytes);
}

uint64_t CachingAllocator::EmptyCache() {
  std::vector<ReleasedSegment> segments;
  {
    MutexLock lock(mu_);
    segments = UnlinkFreeSegments();
  }
  return segments.empty() ? 0 : source_.ReleaseSegments(segments);
}

// Large pool first, then small, each in the order of its free set: as the original.
std::vector<ReleasedSegment> CachingAllocator::UnlinkFreeSegments() {
  std::vector<ReleasedSegment> segments;
  for (const PoolKind pool : {PoolKind::kLarge, PoolKind::kSmall}) {
    FreeSet& free = free_of(pool);
    for (auto it = free.begin(); it != free.end();) {
      Block* block = *it;
      if (!block->IsWholeSegment()) {
        ++it;
        continue;
      }
      it = free.erase(it);
      stats_.segment.Down(pool, 1);
      stats_.reserved_bytes.Down(pool, block->bytes);
      ++stats_.num_device_free;
      segments.push_back({.id = block->segment, .bytes = block->bytes});
      segments_.erase(block->segment);
      RecycleBlock(block);
    }
  }
  return segments;
}

MemoryStats CachingAllocator::GetMemoryStats() const {
  MutexLock lock(mu_);
  return stats_;
}

void CachingAllocator::ResetPeakStats() {
  MutexLock lock(mu_);
  stats_.ResetPeaks();
}

void CachingAllocator::CountOutOfMemory() {
  MutexLock lock(mu_);
  ++stats_.num_ooms;
}

FitReport CachingAllocator::ExplainFit(uint64_t requested) const {
  FitReport report;
  report.block_bytes = RoundRequest(requested);
  report.segment_bytes = SegmentBytesFor(report.block_bytes);
  MutexLock lock(mu_);
  const FreeSet& free = free_of(PoolFor(report.block_bytes));
  for (const Block* block : free) report.pool_free_bytes += block->bytes;
  if (!free.empty()) report.pool_largest_bytes = (*free.rbegin())->bytes;
  return report;
}

std::vector<SegmentSnapshot> CachingAllocator::Snapshot() const {
  std::vector<SegmentSnapshot> segments;
  MutexLock lock(mu_);
  segments.reserve(segments_.size());
  for (const auto& [id, first] : segments_) {
    SegmentSnapshot segment{.id = id, .bytes = first->segment_bytes, .pool = first->pool};
    for (const Block* block = first; block != nullptr; block = block->next) {
      segment.blocks.push_back({.offset = block->offset,
                                .bytes = block->bytes,
                                .requested_bytes = block->requested_bytes,
                                .allocated = block->allocated});
    }
    segments.push_back(std::move(segment));
  }
  std::sort(segments.begin(), segments.end(), [](const auto& a, const auto& b) { return a.id < b.id; });
  return segments;
}

absl::Status CachingAllocator::CheckInvariants() const {
  MutexLock lock(mu_);
  MemoryStats counted;
  size_t free_blocks = 0;
  for (const auto& [id, first] : segments_) {
    const auto broken = [id = id](int invariant, absl::string_view what) {
      return absl::InternalError(absl::StrCat("invariant ", invariant, ", segment ", Raw(id), ": ", what));
    };
    if (first->offset != 0 || first->prev != nullptr) return broken(1, "the first block is not at offset 0");
    uint64_t next_offset = 0;
    for (const Block* block = first; block != nullptr; block = block->next) {
      const PoolKind pool = block->pool;
      if (block->segment != id || pool != first->pool) return broken(1, "a block of another segment");
      if (block->offset != next_offset) return broken(1, absl::StrCat("gap or overlap at ", block->offset));
      if (block->bytes == 0 || block->bytes % kMinBlockBytes != 0) return broken(1, "bad block size");
      if (block->next != nullptr && block->next->prev != block) return broken(1, "links disagree");
      next_offset += block->bytes;
      if (block->allocated) {
        counted.allocation.Up(pool, 1);
        counted.allocated_bytes.Up(pool, block->bytes);
        counted.active.Up(pool, 1);
        counted.active_bytes.Up(pool, block->bytes);
        counted.requested_bytes.Up(pool, block->requested_bytes);
        continue;
      }
      if (block->next != nullptr && !block->next->allocated) return broken(2, "free neighbours");
      ++free_blocks;
      const auto it = free_of(pool).find(const_cast<Block*>(block));
      if (it == free_of(pool).end() || *it != block) return broken(3, "a free block is not in its free set");
      if (!block->IsWholeSegment()) {
        counted.inactive_split.Up(pool, 1);
        counted.inactive_split_bytes.Up(pool, block->bytes);
      }
    }
    if (next_offset != first->segment_bytes) return broken(1, "the blocks do not fill the segment");
    counted.segment.Up(first->pool, 1);
    counted.reserved_bytes.Up(first->pool, first->segment_bytes);
  }
  if (free_[0].size() + free_[1].size() != free_blocks) {
    return absl::InternalError("invariant 3: a free set holds a block that is in no segment");
  }
  std::vector<const PoolStat*> expected;
  static_cast<const MemoryStats&>(counted).ForEach(
      [&](const char*, const PoolStat& stat) { expected.push_back(&stat); });
  absl::Status status;
  size_t i = 0;
  static_cast<const MemoryStats&>(stats_).ForEach([&](const char* name, const PoolStat& stat) {
    const PoolStat& want = *expected[i++];
    const auto check = [&](const Stat& have, const Stat& walk) {
      if (have.current != walk.current || have.current != have.allocated - have.freed || have.peak < have.current) {
        status.Update(absl::InternalError(absl::StrCat("invariant 4: ", name, " is ", have.current, " (allocated ",
                                                       have.allocated, ", freed ", have.freed, ", peak ", have.peak,
                                                       "), a walk counts ", walk.current)));
      }
    };
    check(stat.all, want.all);
    for (size_t p = 0; p < stat.pool.size(); ++p) check(stat.pool[p], want.pool[p]);
  });
  return status;
}

}  // namespace vrambroker
