// SPDX-License-Identifier: Apache-2.0
//
// CachingAllocator takes over a heap from elsewhere. Invariants: caching_allocator.cc.
#include <algorithm>
#include <vector>

#include "absl/strings/str_cat.h"
#include "allocator/heap/caching_allocator.h"
#include "allocator/heap/heap_records.h"

namespace vrambroker {

absl::Status CachingAllocator::CheckSegments(absl::Span<const SegmentSnapshot> segments) {
  uint64_t total = 0;
  for (size_t i = 0; i < segments.size(); ++i) {
    const SegmentSnapshot& segment = segments[i];
    const auto wrong = [i](const auto&... what) {
      return absl::InvalidArgumentError(absl::StrCat("segment ", i, ": ", what...));
    };
    if (segment.bytes == 0 || segment.bytes % kMinBlockBytes != 0) {
      return wrong("has ", segment.bytes, " bytes; expected a multiple of ", kMinBlockBytes);
    }
    if (segment.bytes >= kMaxRequestBytes || segment.bytes >= kMaxRequestBytes - total) {
      return wrong("with it, the segments have more bytes than any device");
    }
    total += segment.bytes;
    uint64_t end = 0;
    bool last_is_free = false;
    for (const BlockSnapshot& block : segment.blocks) {
      if (block.offset != end) return wrong("a gap or an overlap at offset ", std::min(end, block.offset));
      if (block.bytes == 0 || block.bytes % kMinBlockBytes != 0 || block.bytes > segment.bytes - end) {
        return wrong("a block of ", block.bytes, " bytes at offset ", end, " of ", segment.bytes);
      }
      const bool is_free = block.state == BlockState::kFree;
      if (is_free && last_is_free) return wrong("two free neighbours at offset ", end);
      if (!is_free && block.requested_bytes > block.bytes) {
        return wrong("the block at offset ", end, " has ", block.bytes, " bytes, and ", block.requested_bytes,
                     " were requested");
      }
      last_is_free = is_free;
      end += block.bytes;
    }
    if (end != segment.bytes) return wrong("its blocks have ", end, " of ", segment.bytes, " bytes");
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<Segment*>> CachingAllocator::StartWith(absl::Span<const SegmentSnapshot> segments) {
  if (absl::Status status = CheckSegments(segments); !status.ok()) return status;
  std::vector<Segment*> held;
  held.reserve(segments.size());
  MutexLock lock(mu_);
  if (next_segment_order_ != 0) return absl::FailedPreconditionError("the heap has had segments");
  for (const SegmentSnapshot& from : segments) {
    const PoolKind pool = from.pool;
    Segment* const segment = NewSegment({.id = from.id}, from.bytes, pool, from.stream);
    held.push_back(segment);
    Block* last = nullptr;
    // Makes all blocks before putting any in the cache: the cache asks for a block's neighbours.
    for (const BlockSnapshot& copy : from.blocks) {
      Block* const block = last == nullptr ? segment->first : NewBlock();
      *block = Block();
      block->bytes = copy.bytes;
      block->address = segment->address + copy.offset;
      block->segment = segment;
      block->requested_bytes = std::min(copy.requested_bytes, kMaxRequestBytes - 1);
      block->state = copy.state == BlockState::kFree ? BlockState::kFree : BlockState::kAllocated;
      block->prev = last;
      if (last != nullptr) last->next = block;
      last = block;
    }
    for (Block* block = segment->first; block != nullptr; block = block->next) {
      if (block->state == BlockState::kFree) {
        PutInCache(block);
        if (block->IsWholeSegment()) continue;
        counters_.inactive_split.Up(pool, 1);
        counters_.inactive_split_bytes.Up(pool, block->bytes);
        continue;
      }
      counters_.allocation.Up(pool, 1);
      counters_.allocated_bytes.Up(pool, block->bytes);
      counters_.active.Up(pool, 1);
      counters_.active_bytes.Up(pool, block->bytes);
      counters_.requested_bytes.Up(pool, block->requested_bytes);
      if (options_.IsOversize(block->bytes)) counters_.oversize_allocations.Up(1);
    }
  }
  counters_.ResetPeaks();
  counters_.ResetTotals();
  return held;
}

}  // namespace vrambroker
