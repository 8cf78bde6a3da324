// SPDX-License-Identifier: Apache-2.0
#include "tests/support/heap_model.h"

#include <algorithm>
#include <iterator>

#include "absl/strings/str_cat.h"

namespace vrambroker {
namespace {

uint64_t LimitOf(double fraction, uint64_t capacity) {
  return fraction < 1 ? static_cast<uint64_t>(fraction * static_cast<double>(capacity)) : CachingAllocator::kNoLimit;
}

// Serves() repeats the allocator's rule, so that the test does not compare the rule with itself.
bool Serves(uint64_t wanted, uint64_t block, const AllocatorOptions& options) {
  if (wanted < options.max_split_bytes) return block < options.max_split_bytes;
  return block < wanted + options.max_non_split_rounding_bytes;
}

}  // namespace

std::string ToString(const HeapOp& op) {
  static const char* const kNames[HeapOp::kKinds] = {
      "allocate", "try to allocate", "free", "record stream", "finish",       "poll", "empty cache", "limit",
      "fraction", "device",          "fail", "reset peaks",   "reset totals", "trim", "tick"};
  return absl::StrCat(kNames[static_cast<int>(op.kind)], " ", op.a, " ", op.b);
}

HeapModel::HeapModel(const HeapConfig& config)
    : config_(config),
      source_(config.device_bytes),
      streams_(0),
      events_(&streams_),
      allocator_(&source_, &events_, config.options, config.device_bytes),
      limit_(LimitOf(config.options.per_process_memory_fraction, config.device_bytes)) {}

std::string HeapModel::Do(const HeapOp& op) {
  using Kind = HeapOp::Kind;
  const Stream stream = op.b % HeapOp::kStreams;
  std::string wrong;
  ++ops_;
  switch (op.kind) {
    case Kind::kAllocate:
    case Kind::kTryAllocate:
      wrong = Allocate(op.a % kMaxRequestBytes, stream, op.kind == Kind::kAllocate);
      break;
    case Kind::kFree:
      if (!held_.empty()) Free(op.a);
      break;
    case Kind::kRecordStream:
      if (!held_.empty()) {
        Held& held = std::next(held_.begin(), static_cast<std::ptrdiff_t>(op.a % held_.size()))->second;
        allocator_.RecordStream(held.block, stream);
        const bool known = std::find(held.users.begin(), held.users.end(), stream) != held.users.end();
        if (stream != held.stream && !known) held.users.push_back(stream);
      }
      break;
    case Kind::kFinish:
      streams_.FinishStream(stream, op.a);
      break;
    case Kind::kPoll:
      allocator_.PollEvents();
      DropCompleted();
      break;
    case Kind::kEmptyCache:
      allocator_.EmptyCache();
      DropCompleted();
      break;
    case Kind::kSetLimit:
      allocator_.SetLimit(limit_ = op.a);
      break;
    case Kind::kSetFraction: {
      const double fraction = static_cast<double>(op.a % 1001) / 1000;
      allocator_.SetMemoryFraction(fraction);
      limit_ = LimitOf(fraction, config_.device_bytes);
      break;
    }
    case Kind::kDeviceLimit:
      source_.set_limit(op.a);
      break;
    case Kind::kFail:
      events_.fail_record = (op.a & 1) != 0;
      events_.fail_query = (op.a & 2) != 0;
      events_.fail_wait = (op.a & 4) != 0;
      events_.lose_streams = (op.a & 8) != 0;
      events_failed_ |= (op.a & 15) != 0;
      break;
    case Kind::kResetPeaks:
      allocator_.ResetPeakStats();
      break;
    case Kind::kResetTotals:
      allocator_.ResetAccumulatedStats();
      ooms_ = 0;
      break;
    case Kind::kTrim:
      wrong = Trim(op.a, op.b);
      break;
    case Kind::kTick:
      allocator_.Tick();
      ++ticks_;
      break;
  }
  NoteFreeSegments();
  return wrong.empty() ? CheckState() : wrong;
}

std::string HeapModel::End() {
  while (!held_.empty()) Free(0);
  events_.fail_record = events_.fail_query = events_.fail_wait = events_.lose_streams = false;
  allocator_.EmptyCache();
  DropCompleted();
  pending_.clear();
  if (source_.used_bytes() != 0) return absl::StrCat(source_.used_bytes(), " bytes are left in the end");
  if (allocator_.GetMemoryStats().active.all.current != 0) return "a block is active in the end";
  return CheckState();
}

// Finds the smallest block that is large enough, then the oldest segment, then the lowest offset. Returns no place when
// this block may not serve: the search ends there.
std::optional<HeapModel::Place> HeapModel::BestFit(uint64_t block_bytes, Stream stream) {
  std::optional<std::tuple<uint64_t, uint64_t, uint64_t>> best;
  for (const SegmentSnapshot& segment : allocator_.Snapshot().segments) {
    if (segment.pool != PoolFor(block_bytes) || segment.stream != stream) continue;
    for (const BlockSnapshot& block : segment.blocks) {
      if (block.state != BlockState::kFree || block.bytes < block_bytes) continue;
      const auto candidate = std::make_tuple(block.bytes, Raw(segment.id), block.offset);
      if (!best.has_value() || candidate < *best) best = candidate;
    }
  }
  if (!best.has_value() || !Serves(block_bytes, std::get<0>(*best), config_.options)) return std::nullopt;
  return Place(std::get<1>(*best), std::get<2>(*best));
}

std::string HeapModel::Allocate(uint64_t requested, Stream stream, bool may_grow) {
  // The allocator takes these steps, too. Here the steps come first, so that the model can tell the best fit.
  allocator_.PollEvents();
  DropCompleted();
  const uint64_t block_bytes = RoundRequest(requested, config_.options);
  const std::optional<Place> best = BestFit(block_bytes, stream);
  const MemoryStats before = allocator_.GetMemoryStats();
  const int calls = source_.acquire_calls();
  Block* block = nullptr;
  if (may_grow) {
    const absl::StatusOr<Block*> allocated = allocator_.Allocate(requested, stream);
    if (!allocated.ok() && !absl::IsResourceExhausted(allocated.status())) {
      return absl::StrCat("an unexpected error: ", allocated.status().ToString());
    }
    if (!allocated.ok()) {
      return best.has_value() ? "a request was refused that a free block fits"
                              : CheckRefusal(requested, stream, before);
    }
    block = *allocated;
  } else {
    block = allocator_.TryAllocate(requested, stream);
    if ((block != nullptr) != best.has_value()) return "TryAllocate() and the best fit disagree";
    if (block == nullptr) return "";
  }
  const bool flushed = allocator_.GetMemoryStats().num_sync_all_streams > before.num_sync_all_streams;
  if (best.has_value() && (flushed || source_.acquire_calls() != calls)) return "a hit asked for a segment";
  DropCompleted();
  return CheckNew(*block, requested, stream, best);
}

std::string HeapModel::CheckRefusal(uint64_t requested, Stream stream, const MemoryStats& before) {
  const uint64_t block_bytes = RoundRequest(requested, config_.options);
  const uint64_t segment_bytes = SegmentBytesFor(block_bytes, config_.options);
  const MemoryStats after = allocator_.GetMemoryStats();
  const uint64_t grown = after.reserved_bytes.all.current + segment_bytes;
  // A fraction of 1 is no limit, but still bounds a request here.
  const double allowed = config_.options.per_process_memory_fraction * static_cast<double>(config_.device_bytes);
  const bool rejects = config_.options.reject_without_retry && grown > static_cast<uint64_t>(allowed);
  if (after.num_ooms == before.num_ooms) {
    if (!rejects || after.num_oom_rejections != before.num_oom_rejections + 1) return "a refusal was not counted";
    if (after.num_sync_all_streams != before.num_sync_all_streams) return "a rejection flushed the cache";
    return "";
  }
  ++ooms_;
  DropCompleted();
  if (grown <= limit_ && !rejects && source_.CouldAcquire(segment_bytes)) return "refused, although there is room";
  if (after.num_alloc_retries != before.num_alloc_retries + 1) return "refused without a retry";
  if (BestFit(block_bytes, stream).has_value()) return "refused, although a block fits after the flush";
  for (const SegmentSnapshot& segment : allocator_.Snapshot().segments) {
    if (segment.blocks.size() == 1 && segment.blocks[0].state == BlockState::kFree) return "a segment was not flushed";
    for (const BlockSnapshot& block : segment.blocks) {
      if (block.state == BlockState::kPendingFree && !events_failed_) return "a pending block was not waited for";
    }
  }
  return "";
}

std::string HeapModel::CheckNew(const Block& block, uint64_t requested, Stream stream, std::optional<Place> best) {
  const Place place(Raw(block.segment_id()), block.offset());
  const uint64_t end = block.offset() + block.bytes;
  const uint64_t block_bytes = RoundRequest(requested, config_.options);
  if (best.has_value() && place != *best) return "not the best fit";
  if (block.state != BlockState::kAllocated || block.requested_bytes != requested) return "the record is wrong";
  if (block.bytes < block_bytes) return "the block is too small";
  const uint64_t waste = block.bytes - block_bytes;
  if (config_.options.IsOversize(block_bytes)
          ? waste >= std::max(config_.options.max_non_split_rounding_bytes, kSegmentGranuleBytes)
          : waste > (PoolFor(block_bytes) == PoolKind::kSmall ? 0 : 1_MiB)) {
    return "the block is too large";
  }
  if (block.segment_bytes() != source_.BytesOf(block.segment_id())) return "the segment is not live";
  if (end > block.segment_bytes()) return "the block passes the end of its segment";
  const auto overlaps = [&](const auto& others) {
    const auto next = others.lower_bound(place);
    if (next != others.end() && std::get<0>(next->first) == std::get<0>(place) && std::get<1>(next->first) < end) {
      return true;
    }
    if (next == others.begin()) return false;
    const auto& [other, value] = *std::prev(next);
    return std::get<0>(other) == std::get<0>(place) && std::get<1>(other) + value.bytes > block.offset();
  };
  if (overlaps(held_)) return "the block overlaps another";
  if (overlaps(pending_)) return "the block overlaps one that a stream still uses";
  for (const auto& [other, held] : held_) {
    if (std::get<0>(other) == std::get<0>(place) && held.stream != stream) return "two streams share a segment";
  }
  held_[place] = {.bytes = block.bytes, .block = const_cast<Block*>(&block), .stream = stream, .users = {}};
  held_bytes_ += block.bytes;
  return "";
}

void HeapModel::Free(uint64_t which) {
  const auto it = std::next(held_.begin(), static_cast<std::ptrdiff_t>(which % held_.size()));
  const Held& held = it->second;
  if (!held.users.empty()) {
    Pending& pending = pending_[it->first];
    pending = {.bytes = held.bytes, .events = {}};
    // The allocator later makes up for a failed record. The event's number is then this number or a higher number.
    for (const Stream user : held.users) pending.events.emplace_back(user, events_.recorded(user) + 1);
    ++deferred_frees_;
  }
  held_bytes_ -= held.bytes;
  allocator_.Free(held.block);
  held_.erase(it);
}

std::string HeapModel::Trim(uint64_t wanted_bytes, uint64_t min_idle_ticks) {
  // The allocator takes these steps, too. Here the steps come first, so that the model can tell which segments are
  // free.
  allocator_.PollEvents();
  DropCompleted();
  NoteFreeSegments();
  const size_t released_before = source_.released_ids().size();
  const uint64_t reserved_before = source_.used_bytes();
  allocator_.Trim({.wanted_bytes = wanted_bytes, .min_idle_ticks = min_idle_ticks});
  const std::vector<uint64_t> released = source_.released_ids();
  const uint64_t bytes = reserved_before - source_.used_bytes();
  uint64_t last_op = 0;
  for (size_t i = released_before; i < released.size(); ++i) {
    const auto it = free_segments_.find(released[i]);
    if (it == free_segments_.end()) return "a segment was trimmed that was not wholly free";
    if (ticks_ - it->second.tick < min_idle_ticks) return "a segment was trimmed that was not idle for long enough";
    if (it->second.op < last_op) return "not trimmed in the order of the frees";
    last_op = it->second.op;
    free_segments_.erase(it);
  }
  for (const auto& [id, since] : free_segments_) {
    if (since.op < last_op) return "a segment was passed over that was free for longer";
    if (bytes < wanted_bytes && ticks_ - since.tick >= min_idle_ticks) return "less was trimmed than was wanted";
  }
  return "";
}

// Notes when each wholly free segment became free: no operation uses and frees a segment again.
void HeapModel::NoteFreeSegments() {
  std::map<uint64_t, FreeSince> now;
  for (const SegmentSnapshot& segment : allocator_.Snapshot().segments) {
    if (segment.blocks.size() != 1 || segment.blocks[0].state != BlockState::kFree) continue;
    const auto before = free_segments_.find(Raw(segment.id));
    now[Raw(segment.id)] = before == free_segments_.end() ? FreeSince{.op = ops_, .tick = ticks_} : before->second;
  }
  free_segments_.swap(now);
}

// Forgets frees whose events are all done, to the allocator's knowledge: the allocator has to complete these frees at
// once.
void HeapModel::DropCompleted() {
  std::erase_if(pending_, [&](const auto& item) {
    const auto& events = item.second.events;
    return std::all_of(events.begin(), events.end(),
                       [&](const auto& event) { return events_.known_done(event.first) >= event.second; });
  });
}

std::string HeapModel::CheckState() const {
  if (absl::Status status = allocator_.CheckInvariants(); !status.ok()) return std::string(status.message());
  if (!source_.misuse().empty()) return source_.misuse();
  const MemoryStats stats = allocator_.GetMemoryStats();
  if (stats.allocated_bytes.all.current != held_bytes_) return "allocated_bytes is wrong";
  if (stats.allocation.all.current != held_.size()) return "allocation is wrong";
  if (stats.reserved_bytes.all.current != source_.used_bytes()) return "reserved_bytes is not what the source gave";
  if (stats.num_ooms != ooms_) return "num_ooms is wrong";
  if (!events_failed_ && stats.active.all.current != held_.size() + pending_.size()) return "active is wrong";
  return "";
}

}  // namespace vrambroker
