// SPDX-License-Identifier: Apache-2.0
//
// SegmentPool: leases idle and new segments.
#include <algorithm>
#include <numeric>
#include <utility>

#include "server/pool/segment_pool.h"
#include "server/pool/segment_refusal.h"

namespace vrambroker {

absl::StatusOr<SegmentId> SegmentPool::Lease(SessionId session, uint64_t bytes, bool granted) {
  const absl::StatusOr<std::vector<SegmentId>> segments = LeaseAll(session, {bytes}, granted);
  if (!segments.ok()) return segments.status();
  return segments->front();
}

absl::StatusOr<std::vector<SegmentId>> SegmentPool::LeaseAll(SessionId session, absl::Span<const uint64_t> sizes,
                                                             bool granted) {
  const uint64_t bytes = std::accumulate(sizes.begin(), sizes.end(), uint64_t{0});
  std::vector<UnleasedSegment> victims;
  Gathered gathered;
  ShareId share;
  std::string tenant;
  bool is_outside = false;
  {
    MutexLock lock(mu_);
    const Account* const account = accounts_.Find(session);
    if (account == nullptr) return absl::AbortedError("the session has ended");
    is_outside = !granted && IsOutside(CheckGrowth(*account, bytes));
  }
  if (is_outside) AskDriver();
  {
    MutexLock lock(mu_);
    Account* const account = accounts_.Find(session);
    if (account == nullptr) return absl::AbortedError("the session has ended");
    share = account->terms.share();
    tenant = account->terms.tenant;
    if (!granted || !accounts_.ConsumeGrant(*account, bytes)) {
      if (absl::Status status = CheckGrowth(*account, bytes); !status.ok()) return status;
      accounts_.Charge(*account, bytes);
    }
    gathered = TakeIdle(*account, sizes);
    uint64_t missing = 0;
    for (size_t i = 0; i < sizes.size(); ++i) missing += gathered.idle[i].has_value() ? 0 : sizes[i];
    if (missing == 0) return AddLeases(session, gathered);
    victims = TakeInTheWay();
    driver_.StartObtaining(missing);
  }
  driver_.Free(victims);
  absl::Status status = Obtain(tenant, sizes, gathered);
  std::vector<UnleasedSegment> unwanted;
  {
    MutexLock lock(mu_);
    if (status.ok() && accounts_.Find(session) != nullptr) return AddLeases(session, gathered);
    if (status.ok()) status = absl::AbortedError("the session has ended");
    unwanted = Undo(session, share, tenant, bytes, gathered);
  }
  driver_.Free(unwanted);
  for (size_t i = 0; i < sizes.size() && absl::IsResourceExhausted(status); ++i) {
    if (gathered.idle[i].has_value() || gathered.fresh[i].has_value()) continue;
    DriverRefused(sizes[i]);
    break;
  }
  CapacityFreed();
  return absl::IsResourceExhausted(status) ? SegmentRefused(OomCause::kCapacity, status.message()) : status;
}

std::vector<UnleasedSegment> SegmentPool::TakeInTheWay() {
  const Ledger& ledger = accounts_.ledger();
  const uint64_t held = ledger.charged_bytes() + idle_.bytes();
  if (held <= ledger.capacity_bytes()) return {};
  return StartFreeing(idle_.TakeOldest(held - ledger.capacity_bytes()));
}

absl::Status SegmentPool::Obtain(const std::string& tenant, absl::Span<const uint64_t> sizes, Gathered& gathered) {
  const auto take_idle = [this] {
    MutexLock lock(mu_);
    return StartFreeing(idle_.TakeOldest(idle_.bytes()));
  };
  absl::Status status;
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (gathered.idle[i].has_value()) continue;
    if (!status.ok()) {
      driver_.GiveUp(sizes[i]);
      continue;
    }
    const absl::StatusOr<DeviceSegment> fresh = driver_.Obtain(tenant, sizes[i], take_idle);
    status = fresh.status();
    if (fresh.ok()) gathered.fresh[i] = *fresh;
  }
  return status;
}

std::vector<UnleasedSegment> SegmentPool::Undo(SessionId session, const ShareId& share, const std::string& tenant,
                                               uint64_t bytes, const Gathered& gathered) {
  Account* const account = accounts_.Find(session);
  if (account != nullptr) {
    accounts_.Uncharge(*account, bytes);
  } else {
    accounts_.UnchargeUnowned(bytes, share);
  }
  PutIdleBack(gathered);
  // Keep new segments for the next attempt, unless there can be none.
  std::vector<UnleasedSegment> unwanted;
  for (const std::optional<DeviceSegment>& fresh : gathered.fresh) {
    if (!fresh.has_value()) continue;
    if (account == nullptr) {
      unwanted.push_back({.segment = *fresh, .tenant = tenant});
    } else {
      AddIdle({.segment = *fresh, .tenant = tenant, .since = options_.clock()});
    }
  }
  return StartFreeing(std::move(unwanted));
}

absl::StatusOr<std::vector<SegmentId>> SegmentPool::LeaseIdle(SessionId session, absl::Span<const uint64_t> sizes) {
  const uint64_t bytes = std::accumulate(sizes.begin(), sizes.end(), uint64_t{0});
  MutexLock lock(mu_);
  Account* const account = accounts_.Find(session);
  if (account == nullptr) return absl::AbortedError("the session has ended");
  if (absl::Status status = CheckGrowth(*account, bytes); !status.ok()) {
    return IsOutside(status) ? absl::NotFoundError("the driver may have it by now") : status;
  }
  const Gathered gathered = TakeIdle(*account, sizes);
  if (!std::all_of(gathered.idle.begin(), gathered.idle.end(), [](const auto& idle) { return idle.has_value(); })) {
    PutIdleBack(gathered);
    return absl::NotFoundError("not all are idle");
  }
  // Charge only with the segments at hand, so that a miss leaves no trace.
  accounts_.Charge(*account, bytes);
  return AddLeases(session, gathered);
}

SegmentPool::Gathered SegmentPool::TakeIdle(const Account& account, absl::Span<const uint64_t> sizes) {
  Gathered gathered{.idle = {}, .fresh = std::vector<std::optional<DeviceSegment>>(sizes.size())};
  gathered.idle.reserve(sizes.size());
  for (const uint64_t bytes : sizes) gathered.idle.push_back(idle_.Take(account.terms.tenant, bytes));
  return gathered;
}

void SegmentPool::PutIdleBack(const Gathered& gathered) {
  bool has_more = false;
  for (const std::optional<IdleSegments::Taken>& idle : gathered.idle) {
    if (!idle.has_value()) continue;
    idle_.PutBack(*idle);
    has_more = true;
  }
  if (has_more && on_decay_changed_) on_decay_changed_();  // a restored segment may be the oldest
}

std::vector<SegmentId> SegmentPool::AddLeases(SessionId session, const Gathered& gathered) {
  std::vector<SegmentId> ids;
  ids.reserve(gathered.idle.size());
  for (size_t i = 0; i < gathered.idle.size(); ++i) {
    if (const std::optional<IdleSegments::Taken>& idle = gathered.idle[i]; idle.has_value()) {
      ++handovers_;
      handover_bytes_ += idle->entry.segment.bytes;
      ids.push_back(AddLease(session, {.segment = idle->entry.segment}));
    } else if (const std::optional<DeviceSegment>& fresh = gathered.fresh[i]; fresh.has_value()) {
      ids.push_back(AddLease(session, {.segment = *fresh}));
    }
  }
  return ids;
}

SegmentId SegmentPool::AddLease(SessionId session, LeasedSegment segment) {
  const SegmentId id{next_segment_.fetch_add(1)};
  segment.holder = session;
  leased_.Add(id, segment);
  return id;
}

}  // namespace vrambroker
