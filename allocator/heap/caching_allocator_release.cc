// SPDX-License-Identifier: Apache-2.0
//
// CachingAllocator gives segments back: flush, trim, garbage collection. Invariants: caching_allocator.cc.
#include <algorithm>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "allocator/heap/caching_allocator.h"
#include "allocator/heap/free_index.h"
#include "allocator/heap/heap_records.h"

namespace vrambroker {
namespace {

constexpr size_t kTrimBatch = 64;  // segments per call of TakeIdleSegments()
constexpr int kTrimYields = 200;   // yields to threads waiting for the lock, per segment

// Release order of the original: large pool first, then small, each by (stream, size, age).
bool ReleasedBefore(const Block* a, const Block* b) {
  const auto key = [](const Block* block) {
    return std::tuple(block->segment->pool == PoolKind::kSmall, block->segment->pools->stream, block->bytes,
                      block->address);
  };
  return key(a) < key(b);
}

}  // namespace

SegmentsToRelease CachingAllocator::ToRelease(std::vector<ReleasedSegment> segments) {
  if (segments.empty()) return {};
  return {std::move(segments), BeginSlowCall()};
}

SegmentsToRelease CachingAllocator::TakeFreeSegments() {
  MutexLock lock(mu_);
  return ToRelease(UnlinkFreeSegments());
}

SegmentsToRelease CachingAllocator::TakeIdleSegments(TrimOptions* options) {
  PollEvents();
  {
    MutexLock lock(mu_);
    // Caps the trim at the bytes held now: without a cap, segments freed by other threads meanwhile might never end.
    options->wanted_bytes = std::min(options->wanted_bytes, counters_.reserved_bytes.current());
  }
  std::vector<ReleasedSegment> segments;
  segments.reserve(kTrimBatch);
  SlowCall call;
  while (segments.size() < kTrimBatch && options->wanted_bytes > 0) {
    for (int i = 0; i < kTrimYields && mu_.IsWanted(); ++i) std::this_thread::yield();
    MutexLock lock(mu_);
    Segment* const oldest = first_free_segment_;
    if (oldest == nullptr || ticks_ - oldest->free_since_tick < options->min_idle_ticks) {
      options->wanted_bytes = 0;  // the caller stops, even if other threads free segments meanwhile
      break;
    }
    if (segments.empty()) call = BeginSlowCall();
    segments.push_back(Unlink(oldest->first));
    options->wanted_bytes -= std::min(options->wanted_bytes, segments.back().bytes);
  }
  return {std::move(segments), std::move(call)};
}

SegmentsToRelease CachingAllocator::TakeSegment(Segment* segment) {
  PollEvents();
  MutexLock lock(mu_);
  if (!segment->first->IsWholeSegment() || segment->first->state != BlockState::kFree) return {};
  return ToRelease({Unlink(segment->first)});
}

void CachingAllocator::Tick() {
  MutexLock lock(mu_);
  ++ticks_;
}

ReleasedSegment CachingAllocator::Unlink(Block* whole_segment) {
  TakeFromCache(whole_segment);
  Segment* segment = whole_segment->segment;
  const ReleasedSegment released{.id = segment->id, .bytes = segment->bytes, .stream = segment->pools->stream};
  counters_.segment.Down(segment->pool, 1);
  counters_.reserved_bytes.Down(segment->pool, segment->bytes);
  if (options_.IsOversize(segment->bytes)) counters_.oversize_segments.Down(1);
  ++counters_.num_device_free;
  clock_.Update();
  Record(HistoryAction::kSegmentFree, segment->address, segment->bytes, segment->pools->stream);

  (segment->prev == nullptr ? first_segment_ : segment->prev->next) = segment->next;
  (segment->next == nullptr ? last_segment_ : segment->next->prev) = segment->prev;
  if (--segment->pools->segments == 0) {
    recent_pools_ = nullptr;
    pools_.erase(segment->pools->stream);
  }
  RecycleBlock(whole_segment);
  delete segment;
  return released;
}

std::vector<ReleasedSegment> CachingAllocator::UnlinkFreeSegments() {
  std::vector<Block*> free;
  for (const Segment* segment = first_free_segment_; segment != nullptr; segment = segment->next_free) {
    free.push_back(segment->first);
  }
  std::sort(free.begin(), free.end(), ReleasedBefore);
  std::vector<ReleasedSegment> segments;
  segments.reserve(free.size());
  for (Block* block : free) segments.push_back(Unlink(block));
  return segments;
}

// Takes wholly free segments of the large pool, in rounds, each time the segments free for at least the mean time,
// until the heap is below its threshold or nothing is left. Time is counted in searches of the pool.
std::vector<ReleasedSegment> CachingAllocator::UnlinkGarbage() {
  std::vector<ReleasedSegment> segments;
  const auto goal = static_cast<uint64_t>(options_.garbage_collection_threshold * static_cast<double>(limit_));
  const uint64_t reserved = counters_.reserved_bytes.current();
  if (reserved <= goal) return segments;
  const uint64_t target = reserved - goal;

  const uint64_t now = searches_[static_cast<int>(PoolKind::kLarge)];
  std::vector<Block*> candidates;
  uint64_t total_age = 0;
  for (const Segment* segment = first_free_segment_; segment != nullptr; segment = segment->next_free) {
    if (segment->pool != PoolKind::kLarge) continue;
    candidates.push_back(segment->first);
    total_age += now - segment->free_since;
  }
  std::sort(candidates.begin(), candidates.end(), ReleasedBefore);
  uint64_t collected = 0;
  bool progress = true;
  while (collected < target && progress && !candidates.empty()) {
    const double mean = static_cast<double>(total_age) / static_cast<double>(candidates.size());
    const auto old = std::stable_partition(candidates.begin(), candidates.end(), [&](const Block* block) {
      return static_cast<double>(now - block->segment->free_since) < mean;
    });
    progress = old != candidates.end();
    for (auto it = old; it != candidates.end(); ++it) {
      total_age -= now - (*it)->segment->free_since;
      collected += (*it)->bytes;
      segments.push_back(Unlink(*it));
    }
    candidates.erase(old, candidates.end());
  }
  return segments;
}

// Takes free oversize segments of the request's pool and stream: one large enough, or else as many smaller segments as
// needed. `*enough`: whether the segments add up to the size of the request.
std::vector<ReleasedSegment> CachingAllocator::UnlinkOversize(const Request& request, bool* enough) {
  *enough = false;
  std::vector<ReleasedSegment> segments;
  const StreamPools* pools = FindPools(request.stream);
  if (options_.max_split_bytes == kNoLimit || pools == nullptr) return segments;
  const FreeIndex& free = pools->free[static_cast<int>(request.pool)];
  const uint64_t wanted = std::max(request.block_bytes, options_.max_split_bytes);
  if (Block* block = free.FirstAtLeast(wanted); block != nullptr && block->IsWholeSegment()) {
    segments.push_back(Unlink(block));
    *enough = true;
    return segments;
  }
  std::vector<Block*> smaller;
  uint64_t bytes = 0;
  for (Block* block : free.InOrder()) {
    if (block->bytes < wanted && options_.IsOversize(block->bytes) && block->IsWholeSegment()) smaller.push_back(block);
  }
  for (; !smaller.empty() && bytes < wanted; smaller.pop_back()) {
    bytes += smaller.back()->bytes;
    segments.push_back(Unlink(smaller.back()));
  }
  *enough = bytes >= wanted;
  return segments;
}

}  // namespace vrambroker
