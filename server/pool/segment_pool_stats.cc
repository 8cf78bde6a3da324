// SPDX-License-Identifier: Apache-2.0
//
// SegmentPool as seen from outside: accounts, figures, the list of segments.
#include <algorithm>
#include <utility>

#include "allocator/heap/size_class.h"
#include "server/base/saturating.h"
#include "server/pool/segment_pool.h"

namespace vrambroker {

std::optional<AccountState> SegmentPool::GetAccount(SessionId session) const {
  MutexLock lock(mu_);
  const Account* const account = accounts_.Find(session);
  if (account == nullptr) return std::nullopt;
  return StateOf(*account);
}

AccountState SegmentPool::StateOf(const Account& account) const {
  AccountState state = account.state;
  state.segments = leased_.CountOf(account.session);
  state.counted_bytes = account.counted_bytes + account.declared_bytes;
  return state;
}

std::optional<SegmentPool::AccountRoom> SegmentPool::GetRoom(SessionId session) const {
  MutexLock lock(mu_);
  const Account* const account = accounts_.Find(session);
  if (account == nullptr) return std::nullopt;
  return AccountRoom{.account = StateOf(*account), .free_bytes = accounts_.ledger().LimitRoom(account->state)};
}

ShareStats SegmentPool::GetShare(const ShareId& share) const {
  MutexLock lock(mu_);
  return accounts_.ledger().GetShare(share);
}

uint64_t SegmentPool::AvailableBytes(SessionId session) const {
  MutexLock lock(mu_);
  const Account* const account = accounts_.Find(session);
  return account == nullptr ? 0 : accounts_.ledger().AvailableBytes(account->state);
}

absl::Status SegmentPool::health() const {
  MutexLock lock(mu_);
  return health_;
}

PoolStats SegmentPool::GetStats() const {
  MutexLock lock(mu_);
  return Stats();
}

PoolView SegmentPool::GetView() const {
  // Read before the lock: neither depends on guarded state.
  PoolView view{.calls = device_->GetStats()};
  prometheus::ClientMetric::Histogram reclaim_durations = reclaim_durations_.Collect().histogram;
  MutexLock lock(mu_);
  view.stats = Stats();
  view.idle_sizes = idle_.GetSizes();
  view.reclaims = reclaims_;
  view.reclaims.durations = std::move(reclaim_durations);
  view.driver_free_bytes = driver_memory_.free();
  view.quarantine = quarantine_.Holdings();
  view.carried_over = carried_over_.Holdings();
  if (const uint64_t bytes = driver_memory_.unowned().elsewhere; bytes > 0)
    view.carried_over.push_back({.bytes = bytes});
  view.health = health_;
  view.shares = accounts_.ledger().shares();
  view.accounts.reserve(accounts_.all().size());
  for (const auto& [session, account] : accounts_.all()) view.accounts.emplace(session, StateOf(account));
  return view;
}

PoolLook SegmentPool::LookFor(SessionId session, bool with_accounts) const {
  PoolLook look;
  MutexLock lock(mu_);
  look.stats = Stats();
  if (const Account* const account = accounts_.Find(session)) {
    look.account = StateOf(*account);
    look.share = accounts_.ledger().GetShare(look.account.share);
    look.is_held_back = accounts_.IsHeldBack(*account, kSegmentGranuleBytes);
  }
  if (with_accounts) {
    look.accounts.reserve(accounts_.all().size());
    for (const auto& [id, account] : accounts_.all()) look.accounts.emplace(id, StateOf(account));
  }
  return look;
}

std::vector<SegmentView> SegmentPool::GetSegments() const {
  std::vector<SegmentView> segments;
  {
    MutexLock lock(mu_);
    segments.reserve(leased_.size() + quarantine_.entries().size());
    for (const auto& [id, leased] : leased_.all()) {
      segments.push_back({.id = Raw(id),
                          .bytes = leased.segment.bytes,
                          .state = leased.returning ? SegmentView::State::kReturning : SegmentView::State::kLeased,
                          .holder = leased.holder});
    }
    for (const auto& [id, entry] : quarantine_.entries()) {
      segments.push_back({.id = Raw(id),
                          .bytes = entry.unleased.segment.bytes,
                          .state = SegmentView::State::kQuarantined,
                          .client = entry.client});
    }
    for (const CarriedOver::Segment& carried : carried_over_.Segments()) {
      const bool is_nobodys = carried.session == kNoSession;
      segments.push_back({.id = carried.number,
                          .bytes = carried.bytes,
                          .state = is_nobodys ? SegmentView::State::kQuarantined : SegmentView::State::kLeased,
                          .holder = carried.session,
                          .client = is_nobodys ? "an earlier run of the daemon" : ""});
    }
    for (const auto& [session, account] : accounts_.all()) {
      if (account.counted_bytes == 0) continue;
      segments.push_back({.id = Raw(session),
                          .bytes = account.counted_bytes,
                          .state = SegmentView::State::kLeased,
                          .holder = session});
    }
    for (const auto& [number, bytes] : idle_.NumbersAndBytes()) {
      segments.push_back({.id = number, .bytes = bytes, .state = SegmentView::State::kIdle});
    }
  }
  std::sort(segments.begin(), segments.end(), [](const SegmentView& a, const SegmentView& b) {
    return std::pair(a.state, a.id) < std::pair(b.state, b.id);
  });
  return segments;
}

PoolStats SegmentPool::Stats() const {
  const Ledger& ledger = accounts_.ledger();
  const DriverMemory::Unowned& unowned = driver_memory_.unowned();
  const DriverSegments::Counts driver = driver_.counts();
  const uint64_t carried_over = carried_over_.bytes() + unowned.elsewhere;
  // Segments on their way to the driver count as idle, except where a session is charged in their place: for bytes yet
  // to be obtained, or obtained before the pool has heard of the free.
  const uint64_t on_the_way = std::min(SaturatingSub(driver.freeing_bytes, driver.obtaining_bytes),
                                       SaturatingSub(capacity_bytes_, ledger.charged_bytes() + idle_.bytes()));
  return {.capacity_bytes = capacity_bytes_,
          .charged_bytes = ledger.charged_bytes(),
          .committed_bytes = ledger.committed_bytes(),
          .guaranteed_bytes = ledger.guaranteed_bytes(),
          .quarantined_bytes = quarantine_.bytes(),
          .carried_over_bytes = carried_over,
          .outside_bytes = unowned.outside,
          .free_bytes = ledger.free_bytes(),
          .held_back_bytes = ledger.held_back_bytes(),
          .idle_bytes = idle_.bytes() + on_the_way,
          .reserved_bytes = FromDriverBy(driver).bytes + carried_over,
          .unfreed_bytes = driver.unfreed_bytes,
          .segments = leased_.size(),
          .segment_allocs = driver.obtained,
          .segment_frees = driver.freed,
          .handovers = handovers_,
          .handover_bytes = handover_bytes_};
}

}  // namespace vrambroker
