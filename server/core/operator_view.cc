// SPDX-License-Identifier: Apache-2.0
#include "server/core/operator_view.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "server/base/saturating.h"
#include "server/sessions/session_view.h"

namespace vrambroker {

OperatorView::OperatorView(std::vector<SegmentPool*> pools, std::function<SteadyTime()> clock,
                           std::function<std::string(uid_t uid)> user_name, Parts parts)
    : pools_(std::move(pools)), clock_(std::move(clock)), user_name_(std::move(user_name)), parts_(parts) {}

BrokerView OperatorView::Look() const {
  BrokerView view;
  SessionRegistry::View registry = parts_.sessions->GetView();
  const std::vector<SessionPtr>& sessions = registry.sessions;
  view.counts = registry.counts;
  view.is_serving = !registry.draining;
  std::vector<std::vector<AccountState>> accounts(sessions.size());
  for (std::vector<AccountState>& of_session : accounts) of_session.reserve(pools_.size());
  view.devices.reserve(pools_.size());
  std::vector<Shares> shares;
  for (size_t device = 0; device < pools_.size(); ++device) {
    PoolView of_pool = pools_[device]->GetView();
    shares.push_back(std::move(of_pool.shares));
    for (size_t i = 0; i < sessions.size(); ++i) {
      const auto account = of_pool.accounts.find(sessions[i]->id());
      accounts[i].push_back(account == of_pool.accounts.end() ? AccountState() : account->second);
    }
    DeviceView& info =
        view.devices.emplace_back(DeviceView{.properties = pools_[device]->properties(),
                                             .pool = of_pool.stats,
                                             .quarantine = {},
                                             .carried_over = std::move(of_pool.carried_over),
                                             .health = of_pool.health,
                                             .idle_sizes = of_pool.idle_sizes,
                                             .reclaims = std::move(of_pool.reclaims),
                                             .calls = std::move(of_pool.calls),
                                             .driver_free_bytes = of_pool.driver_free_bytes,
                                             .waits = parts_.waiting->GetStats(static_cast<int>(device))});
    const SteadyTime now = clock_();  // after the start of all waits and holdings
    if (info.waits.oldest.has_value()) {
      info.longest_waiting = std::chrono::duration_cast<std::chrono::milliseconds>(now - *info.waits.oldest);
    }
    for (Quarantine::Holding& holding : of_pool.quarantine) {
      const auto age = std::chrono::duration_cast<std::chrono::milliseconds>(now - holding.since);
      info.quarantine.push_back({.age = age, .holding = std::move(holding)});
    }
    info.processes = parts_.reconciliation->Get(device);
    info.sensors = parts_.reconciliation->GetSensors(device);
    info.ooms = parts_.refusals->GetCounts(static_cast<int>(device));
    for (const auto& [session, account] : of_pool.accounts) info.leased_bytes += account.reserved_bytes;
    info.alloc_retries = registry.closed_retries[device];
    for (const SessionPtr& session : sessions) {
      info.alloc_retries += session->CountAllocRetries(static_cast<int>(device));
    }
  }
  view.refusals = parts_.refusals->GetByTenant();
  view.sessions.reserve(sessions.size());
  const SteadyTime now = clock_();
  for (size_t i = 0; i < sessions.size(); ++i) view.sessions.push_back(ViewOf(*sessions[i], accounts[i], now));
  Complete(absl::MakeSpan(view.sessions));
  for (size_t device = 0; device < view.devices.size(); ++device) {
    DeviceView& info = view.devices[device];
    info.left_behind_bytes = info.pool.quarantined_bytes;
    for (const CarriedOver::Holding& holding : info.carried_over) {
      if (holding.session == kNoSession) info.left_behind_bytes += holding.bytes;
    }
    info.quarantined_bytes = info.left_behind_bytes;
    for (const SessionView& session : view.sessions) {
      const SessionDeviceView& held = session.devices[device];
      info.stats.Add(held.stats);
      info.reclaimable_bytes += held.idle_bytes;
      info.unknown_bytes += held.unknown_bytes;
      if (session.state != SessionState::kActive) info.quarantined_bytes += held.account.reserved_bytes;
    }
  }
  view.claims = LookAtClaims(shares, view);
  return view;
}

std::vector<ClaimView> OperatorView::LookAtClaims(const std::vector<Shares>& shares, const BrokerView& view) const {
  std::vector<ClaimView> claims;
  absl::flat_hash_map<ClaimId, size_t> places;
  const absl::flat_hash_map<ClaimId, std::vector<ClaimWaits>> waits = parts_.waiting->GetClaimWaits();
  for (Claim& claim : parts_.claims->GetAll()) {
    places.emplace(claim.id, claims.size());
    ClaimView& of = claims.emplace_back();
    of.devices.resize(pools_.size());
    for (size_t device = 0; device < pools_.size(); ++device) {
      ClaimDeviceView& held = of.devices[device];
      held.limit_bytes = parts_.claims->LimitOn(claim, device);
      if (const auto of_claim = waits.find(claim.id); of_claim != waits.end()) held.waits = of_claim->second[device];
      const auto share = shares[device].find(claim.id);
      if (share == shares[device].end()) continue;
      held.guarantee_bytes = share->second.guarantee_bytes;
      held.peak_bytes = share->second.peak_bytes;
      held.left_behind_bytes = share->second.used_bytes;  // the bytes of its sessions are subtracted below
    }
    of.claim = std::move(claim);
  }
  if (claims.empty()) return claims;
  for (const SessionView& session : view.sessions) {
    const std::optional<ClaimId> id = session.terms.claim_id;
    const auto place = id.has_value() ? places.find(*id) : places.end();
    if (place == places.end()) continue;
    for (size_t device = 0; device < pools_.size(); ++device) {
      const SessionDeviceView& from = session.devices[device];
      ClaimDeviceView& to = claims[place->second].devices[device];
      to.left_behind_bytes = SaturatingSub(to.left_behind_bytes, from.account.committed_bytes());
      to.reserved_bytes += from.account.reserved_bytes;
      to.allocated_bytes += from.stats.allocated_bytes.all.current;
      to.idle_bytes += from.idle_bytes;
      to.waiting += from.waiting.size();
    }
  }
  for (ClaimView& claim : claims) {
    for (ClaimDeviceView& held : claim.devices) held.reserved_bytes += held.left_behind_bytes;
  }
  for (const auto& [name, counts] : parts_.refusals->GetByClaim()) {
    const auto it = std::lower_bound(claims.begin(), claims.end(), name,
                                     [](const ClaimView& of, const std::string& key) { return of.claim.name < key; });
    if (it == claims.end() || it->claim.name != name) continue;
    for (size_t device = 0; device < pools_.size(); ++device) it->devices[device].ooms = counts[device].ooms;
  }
  return claims;
}

SessionView OperatorView::Describe(const Session& session) const {
  std::vector<AccountState> accounts;
  accounts.reserve(pools_.size());
  for (const SegmentPool* pool : pools_) {
    // A session being closed may have no account any more.
    accounts.push_back(pool->GetAccount(session.id()).value_or(AccountState()));
  }
  SessionView info = ViewOf(session, accounts, clock_());
  Complete(absl::MakeSpan(&info, 1));
  return info;
}

void OperatorView::Complete(absl::Span<SessionView> infos) const {
  for (SessionView& info : infos) info.user = user_name_(info.caller.uid);
  AddWaiting(infos);
  AddUse(infos);
  parts_.fragmentation->AddTo(infos);
}

void OperatorView::AddUse(absl::Span<SessionView> infos) const {
  absl::flat_hash_map<SessionId, SessionView*> by_id;
  for (SessionView& info : infos) by_id.emplace(info.id, &info);
  for (size_t device = 0; device < pools_.size(); ++device) {
    const std::shared_ptr<const DeviceProcesses> found = parts_.reconciliation->Get(device);
    for (const ProcessView& process : found->processes) {
      const auto it = process.session.has_value() ? by_id.find(*process.session) : by_id.end();
      if (it == by_id.end()) continue;
      it->second->devices[device].used_bytes = process.used_bytes;
      it->second->devices[device].overhead_bytes = process.overhead_bytes;
    }
  }
}

void OperatorView::AddWaiting(absl::Span<SessionView> infos) const {
  for (size_t device = 0; device < pools_.size(); ++device) {
    if (parts_.waiting->size(static_cast<int>(device)) == 0) continue;
    absl::flat_hash_map<SessionId, SessionView*> by_id;
    for (SessionView& info : infos) by_id.emplace(info.id, &info);
    size_t place = 0;
    const std::vector<WaitingRequest> requests = parts_.waiting->GetWaiting(static_cast<int>(device));
    const SteadyTime now = clock_();  // after the start of all requests
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

}  // namespace vrambroker
