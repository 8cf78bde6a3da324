// SPDX-License-Identifier: Apache-2.0
//
// CachingAllocator as seen from outside: figures, snapshots, and the check of its invariants (caching_allocator.cc).
#include <algorithm>
#include <cstddef>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "allocator/heap/caching_allocator.h"
#include "allocator/heap/free_index.h"
#include "allocator/heap/heap_records.h"
#include "allocator/heap/scope_use.h"

namespace vrambroker {

MemoryStats CachingAllocator::GetMemoryStats() const {
  MutexLock lock(mu_);
  MemoryStats stats = counters_.Report();
  stats.max_split_bytes = options_.max_split_bytes;
  for (const auto& [stream, pools] : pools_) {
    for (const FreeIndex& free : pools->free) stats.free.Add(free.GetSizes());
  }
  return stats;
}

uint64_t CachingAllocator::num_alloc_retries() const {
  MutexLock lock(mu_);
  return counters_.num_alloc_retries;
}

void CachingAllocator::ResetPeakStats() {
  MutexLock lock(mu_);
  counters_.ResetPeaks();
  scope_counters_.PeakIsNow();
}

void CachingAllocator::ResetAccumulatedStats() {
  MutexLock lock(mu_);
  counters_.ResetTotals();
}

void CachingAllocator::CountOutOfMemory() {
  MutexLock lock(mu_);
  ++counters_.num_ooms;
  clock_.Update();
}

void CachingAllocator::SetRecording(size_t max_events, bool exact_times) {
  MutexLock lock(mu_);
  history_.Keep(max_events, exact_times);
}

void CachingAllocator::HoldRecording(size_t events) {
  MutexLock lock(mu_);
  history_.Hold(events);
}

void CachingAllocator::NoteTime() {
  MutexLock lock(mu_);
  clock_.Update();
}

void CachingAllocator::NoteEachTime() {
  MutexLock lock(mu_);
  clock_.ReadForEach();
}

namespace {

// Returns holes without the pinning blocks. Counts all blocks of the segment in `tally`, unless nullptr.
PinnedSegment HolesOf(const Segment& segment, ScopeTally* tally) {
  PinnedSegment pinned{.address = segment.address, .bytes = segment.bytes};
  for (const Block* block = segment.first; block != nullptr; block = block->next) {
    if (tally != nullptr) tally->Add(block->state, block->bytes, block->scope);
    if (block->state != BlockState::kFree) {
      ++pinned.pinning_blocks;
      continue;
    }
    pinned.hole_bytes += block->bytes;
    pinned.largest_hole_bytes = std::max(pinned.largest_hole_bytes, block->bytes);
  }
  if (tally != nullptr) tally->EndSegment();
  return pinned;
}

// Returns at most Holes::kMaxBlocks, longest held first; of equals the lowest address first.
std::vector<const Block*> LongestHeld(const Segment& segment, uint32_t now_s) {
  std::vector<const Block*> longest;
  const auto held = [&](const Block* block) { return now_s - block->handed_out_s; };
  for (const Block* block = segment.first; block != nullptr; block = block->next) {
    if (block->state == BlockState::kFree) continue;
    const auto place =
        std::find_if(longest.begin(), longest.end(), [&](const Block* other) { return held(other) < held(block); });
    if (place - longest.begin() == static_cast<ptrdiff_t>(Holes::kMaxBlocks)) continue;
    longest.insert(place, block);
    if (longest.size() > Holes::kMaxBlocks) longest.pop_back();
  }
  return longest;
}

std::string ReportedPath(absl::Span<const Scope> scopes, ScopeId scope) {
  return EndOfScopePath(ScopePath(scopes, scope), kMaxReportedScopeBytes);
}

}  // namespace

Holes CachingAllocator::FindHoles(ScopeTally* tally, std::vector<ScopeId>* pinning) const {
  Holes holes;
  std::vector<std::pair<PinnedSegment, const Segment*>> most;
  for (const Segment* segment = first_segment_; segment != nullptr; segment = segment->next) {
    PinnedSegment pinned = HolesOf(*segment, tally);
    if (pinned.hole_bytes == 0 || pinned.pinning_blocks == 0) continue;
    holes.bytes += pinned.hole_bytes;
    ++holes.segments;
    // Keeps the oldest segment first among equals.
    const auto place = std::find_if(most.begin(), most.end(),
                                    [&](const auto& other) { return other.first.hole_bytes < pinned.hole_bytes; });
    most.emplace(place, std::move(pinned), segment);
    if (most.size() > Holes::kMaxSegments) most.pop_back();
  }
  holes.count = counters_.inactive_split.current();
  const uint32_t now_s = clock_.seconds();
  for (auto& [pinned, segment] : most) {
    for (const Block* block : LongestHeld(*segment, now_s)) {
      const uint64_t held_seconds = now_s - block->handed_out_s;
      pinned.longest_held.push_back({.address = block->address, .bytes = block->bytes, .held_seconds = held_seconds});
      pinning->push_back(block->scope);
    }
    holes.most_bytes.push_back(std::move(pinned));
  }
  return holes;
}

uint64_t CachingAllocator::NeededSegmentBytes(uint64_t requested) const {
  return Describe(requested, 0).segment_bytes;
}

FitReport CachingAllocator::ExplainFit(uint64_t requested, Stream stream, ScopeId scope, ScopeList scopes) {
  // A request too large to be rounded keeps its size.
  const Request request = requested < kMaxRequestBytes ? Describe(requested, stream)
                                                       : Request{.requested = requested,
                                                                 .stream = stream,
                                                                 .scope = 0,
                                                                 .block_bytes = requested,
                                                                 .segment_bytes = requested,
                                                                 .pool = PoolKind::kLarge};
  FitReport report{.block_bytes = request.block_bytes, .segment_bytes = request.segment_bytes, .knows_holes = true};
  ScopeTally tally;
  std::vector<ScopeId> pinning;  // of the blocks in report.holes, in the order there
  std::vector<uint64_t> bytes_at_peak;
  bool uses_scopes = false;
  {
    MutexLock lock(mu_);
    clock_.Update();
    uses_scopes = scope_counters_.any() && first_segment_ != nullptr;
    report.holes = FindHoles(uses_scopes ? &tally : nullptr, &pinning);
    report.max_events = history_.max_events();
    if (uses_scopes) bytes_at_peak = ScopeBytesAtPeak();
    if (const StreamPools* pools = FindPools(stream); pools != nullptr) {
      const FreeSizes free = pools->free[static_cast<int>(request.pool)].GetSizes();
      report.pool_free_bytes = std::accumulate(free.bytes.begin(), free.bytes.end(), uint64_t{0});
      report.pool_largest_bytes = free.largest_bytes;
    }
  }
  if (!uses_scopes && scope == 0) return report;
  // Only now, to include every scope added before the look at the heap.
  const std::vector<Scope> names = scopes();
  report.scope = ReportedPath(names, scope);
  if (!uses_scopes) return report;
  auto next = pinning.begin();
  for (PinnedSegment& pinned : report.holes.most_bytes) {
    for (PinningBlock& block : pinned.longest_held) block.scope = ReportedPath(names, *next++);
  }
  report.scopes = LargestScopeUses(tally.Uses(names, bytes_at_peak));
  for (ScopeUse& use : report.scopes) use.scope = EndOfScopePath(std::move(use.scope), kMaxReportedScopeBytes);
  return report;
}

HeapSnapshot CachingAllocator::Snapshot(bool with_history) {
  HeapSnapshot snapshot{.options = options_};
  std::vector<HistoryEvent> kept;
  CopyHeap(with_history ? &kept : nullptr, &snapshot);
  snapshot.history = History::Expand(kept);
  return snapshot;
}

void CachingAllocator::CopyHeap(std::vector<HistoryEvent>* kept, HeapSnapshot* copied) {
  HeapSnapshot& snapshot = *copied;
  MutexLock lock(mu_);
  if (kept != nullptr) {
    clock_.Update();
    Record(HistoryAction::kSnapshot, 0, counters_.active_bytes.current(), 0);
    *kept = history_.Kept();
    snapshot.max_events = history_.max_events();
  }
  CopySegments(copied);
}

std::vector<uint64_t> CachingAllocator::ScopeBytesAtPeak() const {
  std::vector<uint64_t> bytes = scope_counters_.AtPeak();
  const uint64_t in_scopes = std::accumulate(bytes.begin(), bytes.end(), uint64_t{0});
  bytes[0] = counters_.allocated_bytes.peak() - in_scopes;
  return bytes;
}

void CachingAllocator::CopySegments(HeapSnapshot* copied) const {
  HeapSnapshot& snapshot = *copied;
  if (scope_counters_.any()) snapshot.scope_bytes_at_peak = ScopeBytesAtPeak();
  snapshot.segments.reserve(counters_.segment.current());
  for (const Segment* segment = first_segment_; segment != nullptr; segment = segment->next) {
    SegmentSnapshot& copy = snapshot.segments.emplace_back(SegmentSnapshot{.id = segment->id,
                                                                           .address = segment->address,
                                                                           .bytes = segment->bytes,
                                                                           .pool = segment->pool,
                                                                           .stream = segment->pools->stream});
    for (const Block* block = segment->first; block != nullptr; block = block->next) {
      copy.blocks.push_back({.offset = block->offset(),
                             .bytes = block->bytes,
                             .requested_bytes = block->requested_bytes,
                             .state = block->state,
                             .scope = block->state == BlockState::kFree ? ScopeId{0} : block->scope});
    }
  }
}

uint64_t CachingAllocator::MetadataBytes() const {
  MutexLock lock(mu_);
  uint64_t bytes = slabs_.size() * sizeof(BlockSlab) + counters_.segment.current() * sizeof(Segment);
  for (const auto& [stream, pools] : pools_) {
    for (const FreeIndex& free : pools->free) bytes += free.MemoryBytes();
  }
  return bytes;
}

absl::Status CachingAllocator::CheckInvariants() const {
  MutexLock lock(mu_);
  HeapCounters counted;
  absl::flat_hash_map<const Block*, size_t> waiting;
  for (const PendingFrees* part : {&pending_, &lost_}) {
    for (const auto& [stream, frees] : *part) {
      for (const PendingFree& pending : frees) ++waiting[pending.block];
    }
  }
  size_t free_blocks = 0;
  size_t free_segments = 0;
  for (const Segment* segment = first_segment_; segment != nullptr; segment = segment->next) {
    const auto broken = [&](int invariant, absl::string_view what) {
      return absl::InternalError(absl::StrCat("invariant ", invariant, ", segment ", segment->order, ": ", what));
    };
    const PoolKind pool = segment->pool;
    const FreeIndex& free = segment->pools->free[static_cast<int>(pool)];
    if (segment->first->address != segment->address || segment->first->prev != nullptr) {
      return broken(1, "the first block is not at offset 0");
    }
    uint64_t next_offset = 0;
    for (const Block* block = segment->first; block != nullptr; block = block->next) {
      if (block->segment != segment) return broken(1, "a block of another segment");
      if (block->offset() != next_offset) return broken(1, absl::StrCat("gap or overlap at ", block->offset()));
      if (block->bytes == 0 || block->bytes % kMinBlockBytes != 0) return broken(1, "bad block size");
      if (block->next != nullptr && block->next->prev != block) return broken(1, "links disagree");
      next_offset += block->bytes;
      if (block->state != BlockState::kFree) {
        counted.active.Up(pool, 1);
        counted.active_bytes.Up(pool, block->bytes);
        counted.requested_bytes.Up(pool, block->requested_bytes);
      }
      if (block->state == BlockState::kAllocated) {
        counted.allocation.Up(pool, 1);
        counted.allocated_bytes.Up(pool, block->bytes);
        if (options_.IsOversize(block->bytes)) counted.oversize_allocations.Up(1);
      }
      if (block->state == BlockState::kPendingFree) {
        const auto it = waiting.find(block);
        if (it == waiting.end() || it->second != block->uses->events) return broken(5, "events do not match");
        waiting.erase(it);
      }
      if (block->state != BlockState::kFree) continue;
      if (block->next != nullptr && block->next->state == BlockState::kFree) return broken(2, "free neighbours");
      ++free_blocks;
      if (!free.Contains(block)) return broken(3, "a free block is not in its index");
      if (block->IsWholeSegment()) {
        ++free_segments;
      } else {
        counted.inactive_split.Up(pool, 1);
        counted.inactive_split_bytes.Up(pool, block->bytes);
      }
    }
    if (next_offset != segment->bytes) return broken(1, "the blocks do not fill the segment");
    counted.segment.Up(pool, 1);
    counted.reserved_bytes.Up(pool, segment->bytes);
    if (options_.IsOversize(segment->bytes)) counted.oversize_segments.Up(1);
  }
  for (const auto& [stream, pools] : pools_) {
    for (const FreeIndex& free : pools->free) {
      FreeSizes sizes;
      const std::vector<Block*> blocks = free.InOrder();
      for (const Block* block : blocks) sizes.Add(block->bytes);
      if (blocks.size() != free.size() || sizes != free.GetSizes()) {
        return absl::InternalError("invariant 3: an index counts wrongly");
      }
      free_blocks -= free.size();
    }
  }
  if (free_blocks != 0) return absl::InternalError("invariant 3: an index holds a block that is in no segment");
  std::array<uint64_t, 2> last_search = {};
  const Segment* last = nullptr;
  for (const Segment* segment = first_free_segment_; segment != nullptr; segment = segment->next_free) {
    uint64_t& search = last_search[static_cast<int>(segment->pool)];
    if (segment->first->state != BlockState::kFree || !segment->first->IsWholeSegment()) {
      return absl::InternalError("invariant 6: a segment in use is listed as free");
    }
    if (segment->prev_free != last) return absl::InternalError("invariant 6: links disagree");
    if (segment->free_since < search || (last != nullptr && segment->free_since_tick < last->free_since_tick)) {
      return absl::InternalError("invariant 6: not in the order of the frees");
    }
    search = segment->free_since;
    last = segment;
    --free_segments;
  }
  if (last_free_segment_ != last || free_segments != 0) {
    return absl::InternalError("invariant 6: a wholly free segment is not listed");
  }
  if (!waiting.empty()) return absl::InternalError("invariant 5: an event of a block that does not wait for it");

  const MemoryStats walked = counted.Report();
  const MemoryStats have = counters_.Report();
  absl::Status status;
  const auto check = [&](absl::string_view name, const Stat& stat, const Stat& walk) {
    if (stat.current == walk.current && stat.current <= stat.peak) return;
    status.Update(absl::InternalError(absl::StrCat("invariant 4: ", name, " is ", stat.current, " (peak ", stat.peak,
                                                   "), a walk counts ", walk.current)));
  };
  std::vector<const PoolStat*> expected;
  walked.ForEach([&](const char*, const PoolStat& stat) { expected.push_back(&stat); });
  size_t i = 0;
  have.ForEach([&](const char* name, const PoolStat& stat) {
    const PoolStat& walk = *expected[i++];
    check(name, stat.all, walk.all);
    for (size_t p = 0; p < stat.pool.size(); ++p) check(name, stat.pool[p], walk.pool[p]);
  });
  check("oversize_allocations", have.oversize_allocations, walked.oversize_allocations);
  check("oversize_segments", have.oversize_segments, walked.oversize_segments);
  return status;
}

}  // namespace vrambroker
