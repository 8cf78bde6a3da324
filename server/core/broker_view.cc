// SPDX-License-Identifier: Apache-2.0
//
// What operators see of sessions and devices.
#include <algorithm>
#include <utility>

#include "server/core/broker.h"

namespace vrambroker {
namespace {

// Cuts what a client says of its free blocks to what can be true of a heap of `reserved` bytes.
void ClampFree(uint64_t reserved, FreeSizes& free) {
  uint64_t left = reserved;
  for (size_t i = 0; i < FreeSizes::kClasses; ++i) {
    free.bytes[i] = std::min(free.bytes[i], left);
    left -= free.bytes[i];
    free.blocks[i] = std::min(free.blocks[i], free.bytes[i] / FreeSizes::ClassBytes(i));
  }
  free.largest_bytes = std::min(free.largest_bytes, reserved - left);
}

}  // namespace

BrokerView Broker::View() const {
  BrokerView view;
  std::vector<SessionPtr> sessions;
  std::vector<uint64_t> retries;
  {
    MutexLock lock(mu_);
    sessions.reserve(sessions_.size());
    for (const auto& [id, session] : sessions_) sessions.push_back(session);
    retries = closed_retries_;
    view.counts = counts_;
    view.draining = draining_;
  }
  std::vector<std::vector<AccountFigures>> accounts(sessions.size());
  for (std::vector<AccountFigures>& of_session : accounts) of_session.reserve(pools_.size());
  view.devices.reserve(pools_.size());
  for (size_t device = 0; device < pools_.size(); ++device) {
    PoolView of_pool = pools_[device]->GetView();
    for (size_t i = 0; i < sessions.size(); ++i) {
      const auto account = of_pool.accounts.find(sessions[i]->id());
      accounts[i].push_back(account == of_pool.accounts.end() ? AccountFigures() : account->second);
    }
    DeviceInfo& info = view.devices.emplace_back(DeviceInfo{.properties = pools_[device]->properties(),
                                                            .figures = of_pool.figures,
                                                            .quarantine = {},
                                                            .carried_over = std::move(of_pool.carried_over),
                                                            .health = of_pool.health,
                                                            .idle_sizes = of_pool.idle_sizes,
                                                            .reclaims = std::move(of_pool.reclaims),
                                                            .calls = std::move(of_pool.calls),
                                                            .driver_free_bytes = of_pool.driver_free_bytes,
                                                            .waits = queues_[device]->GetFigures()});
    const SteadyTime now = options_.clock();  // after all that began before it
    if (info.waits.oldest.has_value()) {
      info.longest_waiting = std::chrono::duration_cast<std::chrono::milliseconds>(now - *info.waits.oldest);
    }
    for (Quarantine::Holding& holding : of_pool.quarantine) {
      const auto age = std::chrono::duration_cast<std::chrono::milliseconds>(now - holding.since);
      info.quarantine.push_back({.age = age, .holding = std::move(holding)});
    }
    for (size_t cause = 0; cause < kOomCauses.size(); ++cause) {
      info.ooms[cause] = ooms_[device][cause].load(std::memory_order_relaxed);
    }
    for (const auto& [session, account] : of_pool.accounts) info.leased_bytes += account.reserved_bytes;
    info.alloc_retries = retries[device];
    for (const SessionPtr& session : sessions) {
      info.alloc_retries += session->CountAllocRetries(static_cast<int>(device));
    }
  }
  view.refusals = tenant_refusals_.Get();
  view.sessions.reserve(sessions.size());
  for (size_t i = 0; i < sessions.size(); ++i) view.sessions.push_back(FiguresOf(*sessions[i], accounts[i]));
  AddWaiting(absl::MakeSpan(view.sessions));
  AddFragmentation(absl::MakeSpan(view.sessions));
  for (size_t device = 0; device < view.devices.size(); ++device) {
    DeviceInfo& info = view.devices[device];
    info.left_behind_bytes = info.figures.quarantined_bytes;
    for (const CarriedOver::Holding& holding : info.carried_over) {
      if (holding.session == kNoSession) info.left_behind_bytes += holding.bytes;
    }
    info.quarantined_bytes = info.left_behind_bytes;
    for (const SessionInfo& session : view.sessions) {
      const SessionDeviceInfo& held = session.devices[device];
      info.stats.Add(held.stats);
      info.reclaimable_bytes += held.idle_bytes;
      info.unknown_bytes += held.unknown_bytes;
      if (session.state != SessionState::kActive) info.quarantined_bytes += held.account.reserved_bytes;
    }
  }
  return view;
}

SessionInfo Broker::Describe(const Session& session) const {
  std::vector<AccountFigures> accounts;
  accounts.reserve(pools_.size());
  for (const SegmentPool* pool : pools_) accounts.push_back(pool->GetAccount(session.id()).value_or(AccountFigures()));
  SessionInfo info = FiguresOf(session, accounts);
  AddWaiting(absl::MakeSpan(&info, 1));
  AddFragmentation(absl::MakeSpan(&info, 1));
  return info;
}

void Broker::AddWaiting(absl::Span<SessionInfo> infos) const {
  for (size_t device = 0; device < pools_.size(); ++device) {
    if (queues_[device]->size() == 0) continue;
    absl::flat_hash_map<SessionId, SessionInfo*> by_id;
    for (SessionInfo& info : infos) by_id.emplace(info.id, &info);
    size_t place = 0;
    const std::vector<WaitingRequest> requests = queues_[device]->GetWaiting();
    const SteadyTime now = options_.clock();  // after all of them
    for (const WaitingRequest& request : requests) {
      ++place;
      const auto it = by_id.find(request.session);
      if (it == by_id.end()) continue;
      const auto left = std::max(request.deadline - now, SteadyTime::duration(0));
      it->second->devices[device].waiting.push_back(
          {.bytes = request.bytes,
           .guarantee = request.guarantee,
           .waited = std::chrono::duration_cast<std::chrono::milliseconds>(now - request.since),
           .left = std::chrono::duration_cast<std::chrono::milliseconds>(left),
           .place = place});
    }
  }
}

SessionInfo Broker::FiguresOf(const Session& session, absl::Span<const AccountFigures> accounts) {
  SessionInfo info{.id = session.id(),
                   .name = session.name(),
                   .caller = session.caller(),
                   .state = session.state(),
                   .started = session.started(),
                   .terms = session.terms(),
                   .leases = session.leases()};
  info.devices.reserve(accounts.size());
  for (size_t device = 0; device < accounts.size(); ++device) {
    info.devices.push_back(FiguresOn(session, static_cast<int>(device), accounts[device]));
  }
  return info;
}

SessionDeviceInfo Broker::FiguresOn(const Session& session, int device, const AccountFigures& account) {
  SessionDeviceInfo held;
  held.account = account;
  held.stats = session.GetMemoryStats(device);
  MemoryStats& stats = held.stats;
  if (session.leases()) {  // its client counts for itself, and may be late, or lie
    const uint64_t reserved = account.reserved_bytes;
    for (PoolStat* bytes : {&stats.allocated_bytes, &stats.active_bytes, &stats.requested_bytes, &stats.reserved_bytes,
                            &stats.inactive_split_bytes}) {
      bytes->all.current = std::min(bytes->all.current, reserved);
    }
    stats.allocation.all.current = std::min(stats.allocation.all.current, reserved / kMinBlockBytes);
    ClampFree(reserved, stats.free);
  }
  held.idle_bytes = IdleBytes(session, held.account, stats);
  const uint64_t known = stats.active_bytes.all.current + stats.inactive_split_bytes.all.current + held.idle_bytes;
  held.unknown_bytes =
      std::min(account.carried_over_bytes, account.reserved_bytes - std::min(account.reserved_bytes, known));
  held.ooms = session.GetOoms(device);
  return held;
}

}  // namespace vrambroker
