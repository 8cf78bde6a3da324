// SPDX-License-Identifier: Apache-2.0
//
// LeasedHeap from outside: limits, statistics, snapshots, and memory held from earlier runs of the daemon.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "allocator/base/bytes.h"
#include "client/heap/leased_heap.h"

namespace vrambroker::client_internal {

void LeasedHeap::SetLimit(uint64_t limit_bytes) {
  MutexLock lock(limits_mu_);
  session_limit_bytes_ = limit_bytes;
  ApplyLimits();
}

void LeasedHeap::SetCapacity(uint64_t capacity_bytes) {
  MutexLock lock(limits_mu_);
  capacity_bytes_ = capacity_bytes;
  allocator_.SetCapacity(capacity_bytes);
  ApplyLimits();
}

absl::Status LeasedHeap::SetMemoryFraction(double fraction) {
  if (!(fraction >= 0 && fraction <= 1)) {
    return absl::InvalidArgumentError(absl::StrCat("fraction: ", fraction, " is not between 0 and 1"));
  }
  MutexLock lock(limits_mu_);
  own_fraction_ = fraction;
  ApplyLimits();
  return absl::OkStatus();
}

void LeasedHeap::ApplyLimits() {
  const uint64_t capacity = capacity_bytes_;
  own_limit_bytes_ = own_fraction_ < 1 ? static_cast<uint64_t>(own_fraction_ * static_cast<double>(capacity))
                                       : CachingAllocator::kNoLimit;
  const uint64_t limit = std::min(session_limit_bytes_, own_limit_bytes());
  allocator_.SetLimit(limit < capacity ? limit : CachingAllocator::kNoLimit);
}

uint64_t LeasedHeap::HeldBytes() const {
  uint64_t held = growing_bytes_;
  for (const auto& [id, mapped] : mapped_) held += mapped.bytes;
  return held;
}

absl::StatusOr<MemoryStats> LeasedHeap::GetMemoryStats() {
  MemoryStats stats = allocator_.GetMemoryStats();
  MutexLock lock(mu_);
  const uint64_t max_split_bytes = stats.max_split_bytes;
  stats.Add(WholeStats());
  stats.max_split_bytes = max_split_bytes;
  return stats;
}

void LeasedHeap::ReportUse(const SegmentUse& use) {
  MutexLock lock(mu_);
  // The application's figures may be wrong, or from another moment.
  const uint64_t reserved = whole_stats_.reserved_bytes.all.current;
  use_ = use;
  for (uint64_t* bytes :
       {&use_->allocated_bytes, &use_->requested_bytes, &use_->inactive_split_bytes, &use_->idle_bytes}) {
    *bytes = std::min(*bytes, reserved);
  }
  const uint64_t told = std::min(use.allocated_bytes_peak, whole_stats_.reserved_bytes.all.peak);
  const bool is_new = std::exchange(told_peak_bytes_, told) != told;  // otherwise the peak may predate a reset
  const MemoryStats now = WholeStats();
  const auto raise = [](uint64_t& peak, uint64_t bytes) { peak = std::max(peak, bytes); };
  raise(use_peaks_.allocated_bytes, std::max(now.allocated_bytes.all.current, is_new ? told : 0));
  raise(use_peaks_.requested_bytes, now.requested_bytes.all.current);
  raise(use_peaks_.active_bytes, std::max(now.active_bytes.all.current, use_peaks_.allocated_bytes));
  raise(use_peaks_.inactive_split_bytes, now.inactive_split_bytes.all.current);
}

MemoryStats LeasedHeap::WholeStats() const {
  MemoryStats stats = whole_stats_;
  if (!use_.has_value()) return stats;
  const uint64_t reserved = stats.reserved_bytes.all.current;
  const uint64_t reclaimable = std::min(use_->idle_bytes, reserved);
  const uint64_t split = std::min(use_->inactive_split_bytes, reserved - reclaimable);
  const uint64_t active = reserved - reclaimable - split;
  const uint64_t allocated = std::min(use_->allocated_bytes, active);
  const auto set = [](PoolStat& stat, uint64_t bytes, uint64_t peak) {
    const uint64_t current = stat.all.current;
    bytes < current ? stat.Down(PoolKind::kLarge, current - bytes) : stat.Up(PoolKind::kLarge, bytes - current);
    for (Stat* one : {&stat.all, &stat.pool[static_cast<int>(PoolKind::kLarge)]}) one->peak = std::max(peak, bytes);
  };
  set(stats.inactive_split_bytes, split, use_peaks_.inactive_split_bytes);
  set(stats.active_bytes, active, use_peaks_.active_bytes);
  set(stats.allocated_bytes, allocated, use_peaks_.allocated_bytes);
  set(stats.requested_bytes, std::min(use_->requested_bytes, allocated), use_peaks_.requested_bytes);
  return stats;
}

absl::Status LeasedHeap::ResetPeakStats(bool accumulated) {
  allocator_.ResetPeakStats();
  {
    MutexLock lock(mu_);
    whole_stats_.ResetPeaks();
    use_peaks_ = {};
  }
  return accumulated ? ResetTotals() : absl::OkStatus();
}

absl::Status LeasedHeap::ResetTotals() {
  allocator_.ResetAccumulatedStats();
  MutexLock lock(mu_);
  whole_stats_.ForEach([](const char*, PoolStat& stat) {
    for (Stat* one : {&stat.all, stat.pool.data(), stat.pool.data() + 1}) one->allocated = one->freed = 0;
  });
  whole_stats_.num_device_alloc = whole_stats_.num_device_free = 0;
  return absl::OkStatus();
}

bool LeasedHeap::InUse() {
  // Allocation counts are not enough: a thread freeing a block with several streams may still be using the heap.
  allocator_.PollEvents();
  if (allocator_.GetMemoryStats().active.all.current > 0) return true;
  MutexLock lock(mu_);
  return !whole_.empty();
}

HeapSnapshot LeasedHeap::Snapshot(bool with_history) {
  HeapSnapshot snapshot = allocator_.Snapshot(with_history);
  snapshot.scopes = AllScopes();  // after the heap, so that all of the heap's ids are included
  const uint64_t peak_of_blocks = allocator_.GetMemoryStats().allocated_bytes.all.peak;
  MutexLock lock(mu_);
  std::vector<SegmentSnapshot> whole;
  whole.reserve(whole_.size());
  for (const auto& [base, segment] : whole_) {
    whole.push_back({.id = segment.id,
                     .address = segment.address,
                     .bytes = segment.bytes,
                     .pool = PoolKind::kLarge,
                     .blocks = {{.offset = 0,
                                 .bytes = segment.bytes,
                                 .requested_bytes = segment.requested,
                                 .state = BlockState::kAllocated}},
                     .whole = true});
  }
  std::sort(whole.begin(), whole.end(), [](const auto& a, const auto& b) { return a.address < b.address; });
  // As in GetMemoryStats(), and in no scope.
  if (const uint64_t peak = WholeStats().allocated_bytes.all.peak; peak > 0) {
    if (snapshot.scope_bytes_at_peak.empty()) snapshot.scope_bytes_at_peak.push_back(peak_of_blocks);
    snapshot.scope_bytes_at_peak[0] += peak;
  }
  snapshot.segments.insert(snapshot.segments.begin(), std::make_move_iterator(whole.begin()),
                           std::make_move_iterator(whole.end()));
  return snapshot;
}

absl::Status LeasedHeap::CheckCarriedOver(uint64_t session, uint64_t bytes) const {
  if (session == 0) return absl::OkStatus();  // the first session
  uint64_t held = 0;
  bool any = false;
  MutexLock lock(mu_);
  for (const auto& [id, mapped] : mapped_) {
    held += mapped.bytes;
    any = any || mapped.session != session;
  }
  const uint64_t limit = session_.limit_bytes(ordinal());
  if (!any || (held <= limit && bytes <= limit - held)) return absl::OkStatus();
  return absl::ResourceExhaustedError(absl::StrCat("the session's limit of ", FormatBytes(limit),
                                                   " is used up: it holds ", FormatBytes(held),
                                                   ", in part from an earlier run of the daemon"));
}

uint64_t LeasedHeap::CarriedId(uint64_t session, uint64_t daemon_id) {
  return session << 48 | daemon_id;
}

std::vector<v1::CarriedOver::Segment> LeasedHeap::CarriedOver(uint64_t session) const {
  std::vector<v1::CarriedOver::Segment> carried;
  MutexLock lock(mu_);
  for (const auto& [id, mapped] : mapped_) {
    if (mapped.session == session) continue;
    v1::CarriedOver::Segment& segment = carried.emplace_back();
    segment.set_id(Raw(id));
    segment.set_device(static_cast<uint32_t>(ordinal()));
    segment.set_segment_bytes(mapped.bytes);
    segment.set_file_device(mapped.file_device);
    segment.set_file_inode(mapped.file_inode);
  }
  return carried;
}

std::vector<uint64_t> LeasedHeap::HeldSegments(uint64_t session) const {
  std::vector<uint64_t> ids;
  MutexLock lock(mu_);
  for (const auto& [id, mapped] : mapped_) {
    if (mapped.session == session) ids.push_back(mapped.daemon_id);
  }
  return ids;
}

}  // namespace vrambroker::client_internal
