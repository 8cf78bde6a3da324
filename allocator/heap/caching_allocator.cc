// SPDX-License-Identifier: Apache-2.0
//
// States of a block, and the function making each transition:
//
//   (none) --AddSegment--> FREE --HandOut--> ALLOCATED --Free--> FREE --Unlink--> (none)
//                                                \--Free--> PENDING --CompleteFree--> FREE
//
// PENDING: freed by its owner, but perhaps in use by a stream named in RecordStream().
//
// Invariants, checked by CheckInvariants() and cited by number elsewhere:
// (1) The blocks of a segment tile it: no gap, no overlap, sizes multiples of 512.
// (2) Two free neighbours never exist.
// (3) A free index holds exactly the free blocks of its pool and stream.
// (4) Every `current` figure equals the count of a walk over all blocks, and is at most its peak.
// (5) Exactly the pending blocks wait for events, as many per block as BlockUses::events says.
// (6) The list of wholly free segments holds exactly the wholly free segments, longest free first.
#include "allocator/heap/caching_allocator.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "absl/container/inlined_vector.h"
#include "allocator/base/bytes.h"
#include "allocator/heap/free_index.h"
#include "allocator/heap/heap_records.h"

namespace vrambroker {
namespace {

constexpr uint64_t kFirstAddress = 0x7F00'0000'0000;

}  // namespace

CachingAllocator::CachingAllocator(EventSource* events, const AllocatorOptions& options, uint64_t capacity_bytes)
    : events_(events),
      options_(options),
      next_address_(kFirstAddress),
      limit_(kNoLimit),
      capacity_bytes_(capacity_bytes) {
  SetMemoryFraction(options.per_process_memory_fraction);
}

CachingAllocator::~CachingAllocator() {
  for (Segment* segment = first_segment_; segment != nullptr;) {
    for (Block* block = segment->first; block != nullptr; block = block->next) {
      delete block->uses;
    }
    delete std::exchange(segment, segment->next);
  }
}

// ---- Records ----

Block* CachingAllocator::NewBlock() {
  if (spare_blocks_ == nullptr) {
    slabs_.push_back(std::make_unique<BlockSlab>());
    for (Block& block : slabs_.back()->blocks) {
      block.next = spare_blocks_;
      spare_blocks_ = &block;
    }
  }
  return std::exchange(spare_blocks_, spare_blocks_->next);
}

void CachingAllocator::RecycleBlock(Block* block) {
  block->next = spare_blocks_;
  spare_blocks_ = block;
}

StreamPools* CachingAllocator::FindPools(Stream stream) const {
  if (recent_pools_ != nullptr && recent_pools_->stream == stream) return recent_pools_;
  const auto it = pools_.find(stream);
  if (it == pools_.end()) return nullptr;
  return recent_pools_ = it->second.get();
}

StreamPools* CachingAllocator::MakePools(Stream stream) {
  if (StreamPools* pools = FindPools(stream)) return pools;
  std::unique_ptr<StreamPools>& pools = pools_[stream];
  pools = std::make_unique<StreamPools>();
  pools->stream = stream;
  return recent_pools_ = pools.get();
}

void CachingAllocator::PutInCache(Block* block) {
  Segment& segment = *block->segment;
  block->state = BlockState::kFree;
  segment.pools->free[static_cast<int>(segment.pool)].Insert(block);
  if (block->IsWholeSegment()) AddFreeSegment(&segment);
}

void CachingAllocator::TakeFromCache(Block* block) {
  Segment& segment = *block->segment;
  segment.pools->free[static_cast<int>(segment.pool)].Erase(block);
  if (block->IsWholeSegment()) RemoveFreeSegment(&segment);
}

void CachingAllocator::AddFreeSegment(Segment* segment) {
  segment->free_since = searches_[static_cast<int>(segment->pool)];
  segment->free_since_tick = ticks_;
  segment->prev_free = last_free_segment_;
  segment->next_free = nullptr;
  (last_free_segment_ == nullptr ? first_free_segment_ : last_free_segment_->next_free) = segment;
  last_free_segment_ = segment;
}

void CachingAllocator::RemoveFreeSegment(Segment* segment) {
  Segment* const prev = segment->prev_free;
  Segment* const next = segment->next_free;
  (prev == nullptr ? first_free_segment_ : prev->next_free) = next;
  (next == nullptr ? last_free_segment_ : next->prev_free) = prev;
}

// ---- Allocating ----

CachingAllocator::Request CachingAllocator::Describe(uint64_t requested, Stream stream, ScopeId scope) const {
  Request request{.requested = requested, .stream = stream, .scope = scope};
  request.block_bytes = RoundRequest(requested, options_);
  request.segment_bytes = SegmentBytesFor(request.block_bytes, options_);
  request.pool = PoolFor(request.block_bytes);
  return request;
}

Block* CachingAllocator::TryAllocate(uint64_t requested, Stream stream, ScopeId scope) {
  if (requested >= kMaxRequestBytes) return nullptr;
  const Request request = Describe(requested, stream, scope);
  Block* block = nullptr;
  bool events_missing = false;
  {
    MutexLock lock(mu_);
    if (!pending_.empty()) Poll();
    block = AllocateFromCache(request);
    // The BlockRequest after a miss counts the miss.
    if (block != nullptr && CollectsGarbage()) ++searches_[static_cast<int>(request.pool)];
    events_missing = events_missing_;
  }
  if (events_missing) RecordMissingEvents();
  return block;
}

Block* CachingAllocator::FindInCache(const Request& request) const {
  const StreamPools* pools = FindPools(request.stream);
  if (pools == nullptr) return nullptr;
  Block* candidate = pools->free[static_cast<int>(request.pool)].FirstAtLeast(request.block_bytes);
  return candidate != nullptr && MayServe(request.block_bytes, candidate->bytes, options_) ? candidate : nullptr;
}

Block* CachingAllocator::AllocateFromCache(const Request& request) {
  Block* candidate = FindInCache(request);
  if (candidate == nullptr) return nullptr;
  TakeFromCache(candidate);
  return HandOut(candidate, request);
}

// REQUIRES: `block` is free and in no index.
Block* CachingAllocator::HandOut(Block* block, const Request& request) {
  const PoolKind pool = request.pool;
  const bool was_split = !block->IsWholeSegment();
  const uint64_t rest_bytes = block->bytes - request.block_bytes;
  if (ShouldSplit(pool, request.block_bytes, rest_bytes, options_)) {
    // The lower part is handed out, the upper part stays free.
    Block* rest = NewBlock();
    rest->bytes = rest_bytes;
    rest->address = block->address + request.block_bytes;
    rest->segment = block->segment;
    rest->requested_bytes = block->requested_bytes;
    rest->prev = block;
    rest->next = block->next;
    if (rest->next != nullptr) rest->next->prev = rest;
    block->next = rest;
    block->bytes = request.block_bytes;
    PutInCache(rest);
    if (was_split) {
      counters_.inactive_split_bytes.Down(pool, request.block_bytes);
    } else {
      counters_.inactive_split_bytes.Up(pool, rest_bytes);
      counters_.inactive_split.Up(pool, 1);
    }
  } else if (was_split) {
    counters_.inactive_split_bytes.Down(pool, block->bytes);
    counters_.inactive_split.Down(pool, 1);
  }
  block->state = BlockState::kAllocated;
  block->uses = nullptr;
  block->requested_bytes = request.requested;
  block->scope = request.scope;
  clock_.Count();
  block->handed_out_s = clock_.seconds();
  counters_.allocation.Up(pool, 1);
  if (request.scope != 0) scope_counters_.Up(request.scope, block->bytes);
  if (counters_.allocated_bytes.Up(pool, block->bytes)) scope_counters_.PeakIsNow();
  counters_.active.Up(pool, 1);
  counters_.active_bytes.Up(pool, block->bytes);
  counters_.requested_bytes.Up(pool, request.requested);
  if (options_.IsOversize(block->bytes)) counters_.oversize_allocations.Up(1);
  Record(HistoryAction::kAllocate, block->address, request.requested, request.stream, block->bytes, request.scope);
  return block;
}

// ---- Growing ----

SlowCall CachingAllocator::BeginSlowCall() {
  slow_calls_.insert(next_slow_call_);
  return {this, next_slow_call_++};
}

void CachingAllocator::EndSlowCall(SlowCall& call) {
  if (std::exchange(call.heap_, nullptr) == nullptr) return;
  slow_calls_.erase(call.number_);
  slow_call_ended_.NotifyAll();
}

SlowCall::~SlowCall() {
  if (heap_ == nullptr) return;
  MutexLock lock(heap_->mu_);
  heap_->EndSlowCall(*this);
}

void CachingAllocator::WaitForSlowCalls() {
  MutexLock lock(mu_);
  const uint64_t now = next_slow_call_;
  while (!slow_calls_.empty() && *slow_calls_.begin() < now) slow_call_ended_.Wait(mu_);
}

// Adds a new segment as one block, free and in no index.
Block* CachingAllocator::AddSegment(const AcquiredSegment& acquired, const Request& request) {
  Segment* const segment = NewSegment(acquired, request.segment_bytes, request.pool, request.stream);
  ++counters_.num_device_alloc;
  Record(HistoryAction::kSegmentAllocate, segment->address, segment->bytes, request.stream);
  return segment->first;
}

// Makes a segment of one block, free and in no index.
Segment* CachingAllocator::NewSegment(const AcquiredSegment& acquired, uint64_t bytes, PoolKind pool, Stream stream) {
  auto* segment = new Segment{.id = acquired.id,
                              .order = next_segment_order_++,
                              .address = next_address_,
                              .base = acquired.base,
                              .bytes = bytes,
                              .pool = pool,
                              .pools = MakePools(stream),
                              .first = NewBlock(),
                              .prev = last_segment_};
  next_address_ += RoundUpTo(segment->bytes, kSegmentGranuleBytes);
  (last_segment_ == nullptr ? first_segment_ : last_segment_->next) = segment;
  last_segment_ = segment;
  ++segment->pools->segments;

  Block* block = segment->first;
  *block = Block();
  block->bytes = segment->bytes;
  block->address = segment->address;
  block->segment = segment;
  counters_.segment.Up(segment->pool, 1);
  counters_.reserved_bytes.Up(segment->pool, segment->bytes);
  if (options_.IsOversize(segment->bytes)) counters_.oversize_segments.Up(1);
  return segment;
}

// ---- Freeing ----

void CachingAllocator::RecordStream(Block* block, Stream stream) {
  if (events_ == nullptr) return;
  MutexLock lock(mu_);
  if (stream == block->segment->pools->stream) return;
  if (block->uses == nullptr) block->uses = new BlockUses;
  auto& streams = block->uses->streams;
  if (std::find(streams.begin(), streams.end(), stream) == streams.end()) streams.push_back(stream);
}

void CachingAllocator::Free(Block* block) {
  absl::InlinedVector<Stream, 4> streams;
  {
    MutexLock lock(mu_);
    const Segment& segment = *block->segment;
    counters_.allocation.Down(segment.pool, 1);
    counters_.allocated_bytes.Down(segment.pool, block->bytes);
    if (block->scope != 0) scope_counters_.Down(block->scope, block->bytes);
    if (options_.IsOversize(block->bytes)) counters_.oversize_allocations.Down(1);
    Record(block->uses == nullptr ? History::kFreed : HistoryAction::kFreeRequested, block->address,
           block->requested_bytes, segment.pools->stream, block->bytes, block->scope);
    if (block->uses == nullptr) {
      CompleteFree(block);
      return;
    }
    block->state = BlockState::kPendingFree;
    streams.swap(block->uses->streams);
    block->uses->events = streams.size();
  }
  // Events must cover the work queued at the free, not at RecordStream(): the last use may be long after
  // RecordStream(). An event that cannot be recorded now is recorded later: a later event waits for more work, never
  // for less.
  absl::InlinedVector<std::unique_ptr<Event>, 4> recorded;
  for (const Stream stream : streams) {
    absl::StatusOr<std::unique_ptr<Event>> event = events_->RecordEvent(stream);
    recorded.push_back(event.ok() ? *std::move(event) : nullptr);
  }
  MutexLock lock(mu_);
  for (size_t i = 0; i < streams.size(); ++i) {
    pending_[streams[i]].push_back({.event = std::move(recorded[i]), .block = block, .number = next_pending_++});
  }
}

// Merges `upper`, in no index, into its lower neighbour `lower`. Returns `lower`.
Block* CachingAllocator::Absorb(Block* lower, Block* upper) {
  lower->next = upper->next;
  if (lower->next != nullptr) lower->next->prev = lower;
  lower->bytes += upper->bytes;
  RecycleBlock(upper);
  return lower;
}

// REQUIRES: neither an owner nor a stream uses `block`.
void CachingAllocator::CompleteFree(Block* block) {
  const PoolKind pool = block->segment->pool;
  const uint64_t bytes = block->bytes;
  const uint64_t requested = block->requested_bytes;

  // Only the net change of the inactive-split figures is counted, as one step each way.
  int64_t split_blocks = 0;
  int64_t split_bytes = 0;
  if (Block* prev = block->prev; prev != nullptr && prev->state == BlockState::kFree) {
    TakeFromCache(prev);
    split_blocks -= 1;
    split_bytes -= static_cast<int64_t>(prev->bytes);
    block = Absorb(prev, block);
    block->requested_bytes = requested;
  }
  if (Block* next = block->next; next != nullptr && next->state == BlockState::kFree) {
    TakeFromCache(next);
    split_blocks -= 1;
    split_bytes -= static_cast<int64_t>(next->bytes);
    Absorb(block, next);
  }
  PutInCache(block);
  if (!block->IsWholeSegment()) {
    split_blocks += 1;
    split_bytes += static_cast<int64_t>(block->bytes);
  }
  const auto apply = [pool](PoolCounter& counter, int64_t change) {
    if (change > 0) counter.Up(pool, static_cast<uint64_t>(change));
    if (change < 0) counter.Down(pool, static_cast<uint64_t>(-change));
  };
  apply(counters_.inactive_split, split_blocks);
  apply(counters_.inactive_split_bytes, split_bytes);
  counters_.active.Down(pool, 1);
  counters_.active_bytes.Down(pool, bytes);
  counters_.requested_bytes.Down(pool, requested);
}

// Notes the end of an event awaited by `block`. Returns true after the last event.
bool CachingAllocator::StreamIsDone(Block* block) {
  if (--block->uses->events > 0) return false;
  delete std::exchange(block->uses, nullptr);
  Record(HistoryAction::kFreeCompleted, block->address, block->requested_bytes, block->segment->pools->stream,
         block->bytes, block->scope);
  CompleteFree(block);
  return true;
}

void CachingAllocator::PollEvents() {
  {
    MutexLock lock(mu_);
    Poll();
    if (!events_missing_) return;
  }
  RecordMissingEvents();
}

void CachingAllocator::RecordMissingEvents() {
  std::vector<std::pair<Stream, uint64_t>> missing;  // with the number of the free
  {
    MutexLock lock(mu_);
    events_missing_ = false;
    for (const auto& [stream, frees] : pending_) {
      if (frees.front().event == nullptr) missing.emplace_back(stream, frees.front().number);
    }
  }
  for (const auto& [stream, number] : missing) {
    absl::StatusOr<std::unique_ptr<Event>> event = events_->RecordEvent(stream);
    if (!event.ok()) continue;  // the next poll tries again
    MutexLock lock(mu_);
    const auto it = pending_.find(stream);
    if (it == pending_.end()) continue;
    PendingFree& oldest = it->second.front();
    if (oldest.number == number && oldest.event == nullptr) oldest.event = *std::move(event);
  }
}

void CachingAllocator::Poll() {
  for (auto it = pending_.begin(); it != pending_.end();) {
    auto& [stream, frees] = *it;
    while (!frees.empty()) {
      PendingFree& oldest = frees.front();
      if (oldest.event == nullptr) {
        events_missing_ = true;
        break;
      }
      const absl::StatusOr<bool> done = oldest.event->Query();
      if (absl::IsNotFound(done.status())) {
        lost_[stream].push_back(std::move(oldest));
      } else if (done.value_or(false)) {
        StreamIsDone(oldest.block);
      } else {
        break;  // an event without an answer is not done
      }
      frees.pop_front();
    }
    it = frees.empty() ? pending_.erase(it) : std::next(it);
  }
}

void CachingAllocator::WaitForStreams(bool only_lost) {
  PendingFrees waited;
  SlowCall call;
  {
    MutexLock lock(mu_);
    if (only_lost && lost_.empty()) return;
    if (!only_lost) {
      ++counters_.num_sync_all_streams;
      waited.swap(pending_);
    }
    for (auto& [stream, frees] : lost_) std::move(frees.begin(), frees.end(), std::back_inserter(waited[stream]));
    lost_.clear();
    call = BeginSlowCall();
  }
  PendingFrees not_done;
  for (auto& [stream, frees] : waited) {
    for (PendingFree& pending : frees) {
      if (pending.event == nullptr) {
        absl::StatusOr<std::unique_ptr<Event>> event = events_->RecordEvent(stream);
        if (event.ok()) pending.event = *std::move(event);
      }
      if (pending.event == nullptr || !pending.event->Wait().ok()) {
        not_done[stream].push_back(std::exchange(pending, PendingFree()));
      }
    }
  }
  MutexLock lock(mu_);
  for (auto& [stream, frees] : waited) {
    for (const PendingFree& pending : frees) {
      if (pending.block != nullptr) StreamIsDone(pending.block);
    }
  }
  for (auto& [stream, frees] : not_done) {
    std::deque<PendingFree>& queue = pending_[stream];
    queue.insert(queue.begin(), std::make_move_iterator(frees.begin()), std::make_move_iterator(frees.end()));
  }
  EndSlowCall(call);
}

// ---- Limits ----

void CachingAllocator::SetLimit(uint64_t bytes) {
  MutexLock lock(mu_);
  limit_ = bytes;
}

void CachingAllocator::SetCapacity(uint64_t bytes) {
  MutexLock lock(mu_);
  capacity_bytes_ = bytes;
}

void CachingAllocator::SetMemoryFraction(double fraction) {
  MutexLock lock(mu_);
  limit_ = fraction < 1.0 ? static_cast<uint64_t>(fraction * static_cast<double>(capacity_bytes_)) : kNoLimit;
}

}  // namespace vrambroker
