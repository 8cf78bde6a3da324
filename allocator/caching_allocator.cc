// SPDX-License-Identifier: Apache-2.0
//
// States of a block, and the function that makes each transition:
//
//   (none) --AddSegment--> FREE --HandOut--> ALLOCATED --Free--> FREE --Unlink--> (none)
//                                                \--Free--> PENDING --CompleteFree--> FREE
//
// PENDING: freed by its owner, but a stream that RecordStream() named may still use it.
//
// Invariants, checked by CheckInvariants() and cited by number elsewhere:
// (1) The blocks of a segment tile it: no gap, no overlap, sizes multiples of 512.
// (2) Two free neighbours never exist.
// (3) Exactly the free blocks are in a free index, each in that of its segment's pool and stream.
// (4) Every `current` figure equals what a walk over all blocks counts, and is at most its peak.
// (5) Exactly the pending blocks wait for events, each for as many as it says.
// (6) Exactly the wholly free segments are in the list of those, in the order in which they became so.
#include "allocator/caching_allocator.h"

#include <algorithm>
#include <iterator>
#include <optional>
#include <thread>
#include <tuple>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/container/inlined_vector.h"
#include "absl/strings/str_cat.h"
#include "allocator/bytes.h"
#include "allocator/free_index.h"

namespace vrambroker {
namespace {

constexpr uint64_t kFirstAddress = 0x7F00'0000'0000;
constexpr size_t kTrimBatch = 64;  // segments that Trim() gives to the source in one call
constexpr int kTrimYields = 200;   // how often it steps back for a thread that wants the lock

}  // namespace

// What a heap keeps for a stream; the stream is the unit of reuse, since work on one stream is ordered.
struct StreamPools {
  Stream stream = 0;
  std::array<FreeIndex, 2> free;  // by PoolKind
  size_t segments = 0;
};

namespace {

// The order in which the original gives segments back: large pool first, then small, each by (stream, size, age).
bool ReleasedBefore(const Block* a, const Block* b) {
  const auto key = [](const Block* block) {
    return std::tuple(block->segment->pool == PoolKind::kSmall, block->segment->pools->stream, block->bytes,
                      block->address);
  };
  return key(a) < key(b);
}

}  // namespace

struct BlockUses {
  absl::InlinedVector<Stream, 4> streams;  // while allocated: who else uses it
  size_t events = 0;                       // while pending: how many are still to come
};

struct CachingAllocator::BlockSlab {
  std::array<Block, 256> blocks;
};

CachingAllocator::CachingAllocator(SegmentSource* source, EventSource* events, const AllocatorOptions& options,
                                   uint64_t capacity_bytes)
    : source_(*source),
      events_(events),
      options_(options),
      capacity_bytes_(capacity_bytes),
      next_address_(kFirstAddress),
      limit_(kNoLimit) {
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

CachingAllocator::Request CachingAllocator::Describe(uint64_t requested, Stream stream) const {
  Request request{.requested = requested, .stream = stream};
  request.block_bytes = RoundRequest(requested, options_);
  request.segment_bytes = SegmentBytesFor(request.block_bytes, options_);
  request.pool = PoolFor(request.block_bytes);
  return request;
}

Block* CachingAllocator::TryAllocate(uint64_t requested, Stream stream) {
  if (requested >= kMaxRequestBytes) return nullptr;
  const Request request = Describe(requested, stream);
  MutexLock lock(mu_);
  if (!pending_.empty()) Poll();
  Block* block = AllocateFromCache(request);
  // A miss is counted by the Allocate() that follows it.
  if (block != nullptr && CollectsGarbage()) ++searches_[static_cast<int>(request.pool)];
  return block;
}

absl::StatusOr<Block*> CachingAllocator::Allocate(uint64_t requested, Stream stream) {
  if (requested >= kMaxRequestBytes) {
    return absl::ResourceExhaustedError(absl::StrCat(requested, " bytes are more than any device has"));
  }
  const Request request = Describe(requested, stream);
  std::vector<ReleasedSegment> unused;
  uint64_t ticket = 0;
  {
    MutexLock lock(mu_);
    if (!pending_.empty()) Poll();
    if (CollectsGarbage()) ++searches_[static_cast<int>(request.pool)];
    if (Block* block = AllocateFromCache(request)) return block;
    if (CollectsGarbage()) unused = UnlinkGarbage();
    ticket = BeginSlowCall();
  }
  Release(unused, ticket);
  Growth growth = Grow(request, /*is_retry=*/false);
  if (growth.IsLast() || growth.without_retry) return growth.Result();

  bool enough = false;
  {
    MutexLock lock(mu_);
    unused = UnlinkOversize(request, &enough);
    ticket = BeginSlowCall();
  }
  Release(unused, ticket);
  if (enough) {
    growth = Grow(request, /*is_retry=*/false);
    if (growth.IsLast()) return growth.Result();
  }

  EmptyCache();
  WaitForSlowCalls();
  growth = Grow(request, /*is_retry=*/true);
  if (growth.IsLast()) return growth.Result();
  const uint64_t available = source_.AvailableBytes();
  MutexLock lock(mu_);
  if (Block* block = AllocateFromCache(request)) return block;  // freed by another thread, or by a stream
  ++counters_.num_ooms;
  history_.Add(HistoryAction::kOutOfMemory, available, request.block_bytes, stream);
  return growth.refusal;
}

Block* CachingAllocator::AllocateFromCache(const Request& request) {
  const StreamPools* pools = FindPools(request.stream);
  if (pools == nullptr) return nullptr;
  Block* candidate = pools->free[static_cast<int>(request.pool)].FirstAtLeast(request.block_bytes);
  if (candidate == nullptr || !MayServe(request.block_bytes, candidate->bytes, options_)) return nullptr;
  TakeFromCache(candidate);
  return HandOut(candidate, request);
}

// `block` is free and in no index.
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
  counters_.allocation.Up(pool, 1);
  counters_.allocated_bytes.Up(pool, block->bytes);
  counters_.active.Up(pool, 1);
  counters_.active_bytes.Up(pool, block->bytes);
  counters_.requested_bytes.Up(pool, request.requested);
  if (options_.IsOversize(block->bytes)) counters_.oversize_allocations.Up(1);
  history_.Add(HistoryAction::kAllocate, block->address, request.requested, request.stream);
  return block;
}

// ---- Growing ----

CachingAllocator::Growth CachingAllocator::Grow(const Request& request, bool is_retry) {
  std::optional<uint64_t> ticket;
  {
    MutexLock lock(mu_);
    if (is_retry) ++counters_.num_alloc_retries;
    const uint64_t grown = counters_.reserved_bytes.current() + growing_bytes_ + request.segment_bytes;
    const bool passes_limit = limit_ != kNoLimit && grown > limit_;
    if (passes_limit && !limit_is_sources_) {
      return {.refusal =
                  absl::ResourceExhaustedError(absl::StrCat("a segment of ", FormatBytes(request.segment_bytes),
                                                            " would pass the limit of ", FormatBytesExactly(limit_)))};
    }
    if (!passes_limit && options_.reject_without_retry &&
        static_cast<double>(grown) > options_.per_process_memory_fraction * static_cast<double>(capacity_bytes_)) {
      ++counters_.num_oom_rejections;
      return {.refusal = absl::ResourceExhaustedError(
                  absl::StrCat("a segment of ", FormatBytes(request.segment_bytes),
                               " would pass per_process_memory_fraction, and throw_on_cudamalloc_oom is set")),
              .without_retry = true};
    }
    growing_bytes_ += request.segment_bytes;
    // A retry gives nothing back that others could wait for, and may itself wait for long.
    if (!is_retry) ticket = BeginSlowCall();
  }
  const absl::StatusOr<AcquiredSegment> segment =
      source_.AcquireSegment(request.segment_bytes, /*last_resort=*/is_retry);
  MutexLock lock(mu_);
  growing_bytes_ -= request.segment_bytes;
  if (ticket.has_value()) EndSlowCall(*ticket);
  if (!segment.ok()) return {.refusal = segment.status()};
  return {.block = HandOut(AddSegment(*segment, request), request)};
}

uint64_t CachingAllocator::BeginSlowCall() {
  slow_calls_.insert(next_slow_call_);
  return next_slow_call_++;
}

void CachingAllocator::EndSlowCall(uint64_t ticket) {
  slow_calls_.erase(ticket);
  slow_call_ended_.NotifyAll();
}

// Those of other threads that have begun; not those that begin meanwhile, or it might never end.
void CachingAllocator::WaitForSlowCalls() {
  MutexLock lock(mu_);
  const uint64_t now = next_slow_call_;
  while (!slow_calls_.empty() && *slow_calls_.begin() < now) slow_call_ended_.Wait(mu_);
}

// The new segment as one block, free and in no index.
Block* CachingAllocator::AddSegment(const AcquiredSegment& acquired, const Request& request) {
  auto* segment = new Segment{.id = acquired.id,
                              .order = next_segment_order_++,
                              .address = next_address_,
                              .base = acquired.base,
                              .bytes = request.segment_bytes,
                              .pool = request.pool,
                              .pools = MakePools(request.stream),
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
  ++counters_.num_device_alloc;
  history_.Add(HistoryAction::kSegmentAllocate, segment->address, segment->bytes, request.stream);
  return block;
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
    if (options_.IsOversize(block->bytes)) counters_.oversize_allocations.Down(1);
    history_.Add(HistoryAction::kFreeRequested, block->address, block->requested_bytes, segment.pools->stream);
    if (block->uses == nullptr) {
      CompleteFree(block);
      return;
    }
    block->state = BlockState::kPendingFree;
    streams.swap(block->uses->streams);
    block->uses->events = streams.size();
  }
  // The work to wait for is what is queued at the free, not at RecordStream(): that may have been long before the last
  // use. An event that cannot be recorded now is recorded later, which waits for more, never for less.
  absl::InlinedVector<std::unique_ptr<Event>, 4> recorded;
  for (const Stream stream : streams) {
    absl::StatusOr<std::unique_ptr<Event>> event = events_->RecordEvent(stream);
    recorded.push_back(event.ok() ? *std::move(event) : nullptr);
  }
  MutexLock lock(mu_);
  for (size_t i = 0; i < streams.size(); ++i) {
    pending_[streams[i]].push_back({.event = std::move(recorded[i]), .block = block});
  }
}

// `upper`, in no index, becomes part of `lower`, its neighbour. Returns `lower`.
Block* CachingAllocator::Absorb(Block* lower, Block* upper) {
  lower->next = upper->next;
  if (lower->next != nullptr) lower->next->prev = lower;
  lower->bytes += upper->bytes;
  RecycleBlock(upper);
  return lower;
}

// `block` is no longer used by anyone.
void CachingAllocator::CompleteFree(Block* block) {
  const PoolKind pool = block->segment->pool;
  const uint64_t bytes = block->bytes;
  const uint64_t requested = block->requested_bytes;
  history_.Add(HistoryAction::kFreeCompleted, block->address, requested, block->segment->pools->stream);

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

// One event that `block` waited for is done. Returns true when that was the last one.
bool CachingAllocator::StreamIsDone(Block* block) {
  if (--block->uses->events > 0) return false;
  delete std::exchange(block->uses, nullptr);
  CompleteFree(block);
  return true;
}

void CachingAllocator::PollEvents() {
  MutexLock lock(mu_);
  Poll();
}

void CachingAllocator::Poll() {
  for (auto it = pending_.begin(); it != pending_.end();) {
    auto& [stream, frees] = *it;
    while (!frees.empty()) {
      PendingFree& oldest = frees.front();
      if (oldest.event == nullptr) {
        absl::StatusOr<std::unique_ptr<Event>> event = events_->RecordEvent(stream);
        if (event.ok()) oldest.event = *std::move(event);
      }
      // An event that cannot be asked is not done.
      if (oldest.event == nullptr || !oldest.event->Query().value_or(false)) break;
      StreamIsDone(oldest.block);
      frees.pop_front();
    }
    it = frees.empty() ? pending_.erase(it) : std::next(it);
  }
}

void CachingAllocator::WaitForStreams() {
  PendingFrees waited;
  uint64_t ticket = 0;
  {
    MutexLock lock(mu_);
    ++counters_.num_sync_all_streams;
    waited.swap(pending_);
    ticket = BeginSlowCall();
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
  EndSlowCall(ticket);
}

// ---- Giving back ----

uint64_t CachingAllocator::EmptyCache() {
  WaitForStreams();
  std::vector<ReleasedSegment> segments;
  uint64_t ticket = 0;
  {
    MutexLock lock(mu_);
    segments = UnlinkFreeSegments();
    ticket = BeginSlowCall();
  }
  return Release(segments, ticket);
}

uint64_t CachingAllocator::Trim(const TrimOptions& options) {
  uint64_t wanted = 0;
  {
    MutexLock lock(mu_);
    if (!pending_.empty()) Poll();
    // More than is held now can only be what other threads free while this one works: without an end, if they go on.
    wanted = std::min(options.wanted_bytes, counters_.reserved_bytes.current());
  }
  uint64_t taken = 0;
  uint64_t available = 0;
  bool more = true;
  while (more) {
    std::vector<ReleasedSegment> segments;
    segments.reserve(kTrimBatch);
    uint64_t ticket = 0;
    while (more && segments.size() < kTrimBatch) {
      for (int i = 0; i < kTrimYields && mu_.IsWanted(); ++i) std::this_thread::yield();
      MutexLock lock(mu_);
      if (segments.empty()) ticket = BeginSlowCall();
      Segment* const oldest = first_free_segment_;
      more = taken < wanted && oldest != nullptr && ticks_ - oldest->free_since_tick >= options.min_idle_ticks;
      if (!more) break;
      segments.push_back(Unlink(oldest->first));
      taken += segments.back().bytes;
    }
    available += Release(segments, ticket);
  }
  return available;
}

void CachingAllocator::Tick() {
  MutexLock lock(mu_);
  ++ticks_;
}

// Ends the slow call `ticket`, begun when the segments were unlinked.
uint64_t CachingAllocator::Release(const std::vector<ReleasedSegment>& segments, uint64_t ticket) {
  const uint64_t bytes = segments.empty() ? 0 : source_.ReleaseSegments(segments);
  MutexLock lock(mu_);
  EndSlowCall(ticket);
  return bytes;
}

ReleasedSegment CachingAllocator::Unlink(Block* whole_segment) {
  TakeFromCache(whole_segment);
  Segment* segment = whole_segment->segment;
  const ReleasedSegment released{.id = segment->id, .bytes = segment->bytes};
  counters_.segment.Down(segment->pool, 1);
  counters_.reserved_bytes.Down(segment->pool, segment->bytes);
  if (options_.IsOversize(segment->bytes)) counters_.oversize_segments.Down(1);
  ++counters_.num_device_free;
  history_.Add(HistoryAction::kSegmentFree, segment->address, segment->bytes, segment->pools->stream);

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

// Segments of the large pool that are wholly free for longer than the mean of those, in rounds, until the heap is
// below its threshold or nothing is left. Time is counted in searches of the pool.
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

// Free oversize segments of the request's pool and stream: one that is large enough, or else as many smaller ones as
// it takes. `*enough` says whether they come to the size of the request.
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

// ---- Limits, figures ----

void CachingAllocator::SetLimit(uint64_t bytes) {
  MutexLock lock(mu_);
  limit_ = bytes;
  limit_is_sources_ = false;
}

void CachingAllocator::SetSourceLimit(uint64_t bytes) {
  MutexLock lock(mu_);
  limit_ = bytes;
  limit_is_sources_ = true;
}

void CachingAllocator::SetMemoryFraction(double fraction) {
  SetLimit(fraction < 1.0 ? static_cast<uint64_t>(fraction * static_cast<double>(capacity_bytes_)) : kNoLimit);
}

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
}

void CachingAllocator::ResetAccumulatedStats() {
  MutexLock lock(mu_);
  counters_.ResetTotals();
}

void CachingAllocator::CountOutOfMemory(uint64_t block_bytes, Stream stream) {
  const uint64_t available = source_.AvailableBytes();
  MutexLock lock(mu_);
  ++counters_.num_ooms;
  if (block_bytes > 0) history_.Add(HistoryAction::kOutOfMemory, available, block_bytes, stream);
}

void CachingAllocator::SetRecording(size_t max_events) {
  MutexLock lock(mu_);
  history_.Restart(max_events);
}

FitReport CachingAllocator::ExplainFit(uint64_t requested, Stream stream) const {
  const Request request = Describe(requested, stream);
  FitReport report{.block_bytes = request.block_bytes, .segment_bytes = request.segment_bytes};
  MutexLock lock(mu_);
  const StreamPools* pools = FindPools(stream);
  if (pools == nullptr) return report;
  for (const Block* block : pools->free[static_cast<int>(request.pool)].InOrder()) {
    report.pool_free_bytes += block->bytes;
    report.pool_largest_bytes = block->bytes;
  }
  return report;
}

HeapSnapshot CachingAllocator::Snapshot(bool with_history) {
  HeapSnapshot snapshot{.options = options_};
  MutexLock lock(mu_);
  if (with_history) {
    history_.Add(HistoryAction::kSnapshot, 0, counters_.active_bytes.current(), 0);
    snapshot.history = history_.Events();
  }
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
                             .state = block->state});
    }
  }
  return snapshot;
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
  for (const auto& [stream, frees] : pending_) {
    for (const PendingFree& pending : frees) ++waiting[pending.block];
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
