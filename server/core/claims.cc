// SPDX-License-Identifier: Apache-2.0
#include "server/core/claims.h"

#include <poll.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "allocator/base/utf8.h"
#include "allocator/device/process_files.h"
#include "server/identity/process_watch.h"

namespace vrambroker {
namespace {

// Clients of the last daemon look for the new daemon several times a second.
constexpr std::chrono::seconds kComingBack(5);
constexpr std::chrono::seconds kBetweenTries(1);
constexpr size_t kMaxOwnChanges = 64;  // running changes per user

}  // namespace

LogLine ClaimLine(absl::string_view event, const Claim& claim) {
  return LogLine(event).Add("claim", claim.name);
}

const char* ClaimStateName(ClaimState state) {
  switch (state) {
    case ClaimState::kActive:
      return "active";
    case ClaimState::kDraining:
      return "draining";
    case ClaimState::kRevoked:
      return "revoked";
  }
  return "unknown";
}

Claims::Claims(Options options, std::vector<SegmentPool*> pools, Executor* workers, const SessionRegistry* sessions,
               WaitingRequests* waiting, SessionLimits* limits)
    : options_(std::move(options)),
      pools_(std::move(pools)),
      sessions_(*sessions),
      waiting_(*waiting),
      limits_(*limits),
      own_changes_({.what = "changes of claims under way",
                    .per_uid = kMaxOwnChanges,
                    .per_uid_bound = "the daemon",
                    .in_all = SerialQueue::kMaxTasks / 4 * 3,
                    .in_all_bound = "it"}),
      changes_(std::make_shared<SerialQueue>(workers)) {
  for (SegmentPool* pool : pools_) {
    pool->SetOnClaimHolder([this](pid_t process, ClaimId claim) { NoteHolder(process, claim); });
  }
}

// ---- Operators ----

template <typename Result>
void Claims::Submit(const ClaimAsker& asker, const std::function<void(absl::StatusOr<Result>)>& done,
                    std::function<absl::StatusOr<Result>()> change) {
  std::shared_ptr<UserSlots::Slot> slot;
  if (asker.rule.has_value()) {
    absl::StatusOr<UserSlots::Slot> taken = own_changes_.Take(asker.caller.uid);
    if (!taken.ok()) return done(taken.status());
    slot = std::make_shared<UserSlots::Slot>(*std::move(taken));
  }
  auto run = [done, slot = std::move(slot), change = std::move(change)]() mutable {
    absl::StatusOr<Result> result = change();
    slot.reset();  // before the answer: the asker may make its next change then, and the daemon may end
    done(std::move(result));
  };
  if (asker.rule.has_value() ? changes_->Submit(std::move(run)) : changes_->SubmitFirst(std::move(run))) return;
  done(absl::ResourceExhaustedError("too many claims are being changed at a time; try again"));
}

void Claims::Create(const std::string& name, const ClaimTerms& terms, const Done& done, const ClaimAsker& asker,
                    bool is_ephemeral) {
  Submit<Claim>(asker, done,
                [this, name, terms, asker, is_ephemeral] { return CreateNow(name, terms, asker, is_ephemeral); });
}

void Claims::Update(const std::string& name, const ClaimChange& change, const Done& done, const ClaimAsker& asker) {
  Submit<Claim>(asker, done, [this, name, change, asker] { return UpdateNow(name, change, asker); });
}

void Claims::Delete(const std::string& name, bool revoke, const std::function<void(absl::StatusOr<Deleted>)>& done,
                    const ClaimAsker& asker) {
  Submit<Deleted>(asker, done, [this, name, revoke, asker] { return DeleteNow(name, revoke, asker); });
}

std::vector<Claim> Claims::GetAll() const {
  std::vector<Claim> all;
  MutexLock lock(mu_);
  all.reserve(claims_.size());
  for (const auto& [name, claim] : claims_) all.push_back(claim);
  return all;
}

absl::StatusOr<Claim> Claims::Find(absl::string_view name) const {
  MutexLock lock(mu_);
  const auto it = claims_.find(name);
  if (it != claims_.end()) return it->second;
  return absl::NotFoundError(absl::StrCat("no claim is named '", ToUtf8(name.substr(0, 100)), "' (vramctl claim ls)"));
}

void Claims::NoteHolder(pid_t process, ClaimId claim) const {
  std::string name;
  {
    MutexLock lock(mu_);
    const auto found = names_.find(claim);
    if (found == names_.end()) return;
    name = found->second;
  }
  options_.hooks.note_holder({.pid = process, .started = StartOf(process)}, name);
}

bool Claims::HasNothing(ClaimId claim) const {
  return std::all_of(pools_.begin(), pools_.end(),
                     [&](SegmentPool* pool) { return pool->GetShare(claim).used_bytes == 0; });
}

std::vector<SessionPtr> Claims::SessionsOf(ClaimId claim) const {
  std::vector<SessionPtr> sessions = sessions_.GetAll();
  std::erase_if(sessions, [claim](const SessionPtr& session) { return session->terms().claim_id != claim; });
  return sessions;
}

size_t Claims::NumberOf(bool by_policy) const {
  return static_cast<size_t>(std::count_if(claims_.begin(), claims_.end(), [by_policy](const auto& entry) {
    return entry.second.rule.empty() != by_policy;
  }));
}

std::string Claims::LimitsText(const Claim& claim) const {
  std::vector<uint64_t> limits;
  limits.reserve(pools_.size());
  for (size_t device = 0; device < pools_.size(); ++device) limits.push_back(LimitOn(claim, device));
  return absl::StrJoin(limits, ",");
}

void Claims::Put(const Claim& claim) {
  MutexLock lock(mu_);
  Claim& kept = claims_[claim.name];
  const bool is_there = kept.id == claim.id;
  const size_t sessions = is_there ? kept.sessions : 0;
  const std::string rule = is_there ? kept.rule : claim.rule;
  const std::optional<RuleTerms> rule_terms = is_there ? kept.rule_terms : claim.rule_terms;
  const bool has_lost_maker = is_there && kept.has_lost_maker;
  kept = claim;
  kept.sessions = sessions;
  kept.rule = rule;
  kept.rule_terms = rule_terms;
  kept.has_lost_maker = claim.has_lost_maker || has_lost_maker;
  names_[claim.id] = claim.name;
}

// ---- Removing ----

void Claims::Tick() {
  const SteadyTime now = std::chrono::steady_clock::now();
  const bool is_time = now >= next_try_;
  if (is_time) next_try_ = now + kBetweenTries;
  LookAtMakers(/*all=*/is_time);
  RemoveEmpty();
  if (!is_time || is_stopping_) return;
  if (any_unsaved_) (void)changes_->Submit([this] { SaveAgain(); });
  if (any_unserved_) (void)changes_->Submit([this] { ServeUnserved(/*is_first_try=*/false); });
  if (any_rule_unapplied_) (void)changes_->Submit([this] { ApplyRulesAgain(); });
}

void Claims::LookAtMakers(bool all) {
  std::vector<ClaimId> ended;
  std::vector<std::pair<ClaimId, ProcessId>> earlier;  // makers from an earlier run, checked through /proc
  {
    MutexLock lock(mu_);
    for (const auto& [id, maker] : makers_) {
      pollfd end = {.fd = maker == nullptr ? -1 : maker->get(), .events = POLLIN, .revents = 0};
      if (end.fd >= 0) {
        if (poll(&end, 1, 0) == 1) ended.push_back(id);
      } else if (all) {
        earlier.emplace_back(id, claims_.at(names_.at(id)).maker.value_or(ProcessId()));
      }
    }
  }
  for (const auto& [id, maker] : earlier) {
    if (HasEnded(maker)) ended.push_back(id);
  }
  if (ended.empty()) return;
  MutexLock lock(mu_);
  for (const ClaimId id : ended) {
    if (makers_.erase(id) == 0) continue;  // the claim was removed meanwhile
    claims_.at(names_.at(id)).has_lost_maker = true;
    any_leaving_ = true;
  }
}

void Claims::RemoveEmpty() {
  if (!any_leaving_ || is_stopping_ || is_removing_.exchange(true)) return;
  const bool queued = changes_->Submit([this] {
    RemoveEmptyNow();
    is_removing_ = false;
  });
  if (!queued) is_removing_ = false;
}

void Claims::RemoveEmptyNow() {
  any_leaving_ = false;  // sessions leaving from now on are handled by the next call
  bool any_left = false;
  std::vector<Claim> removed;  // claims with sockets, saved in the file
  for (const Claim& claim : GetAll()) {
    if (claim.state == ClaimState::kActive && claim.rule.empty() && !claim.has_lost_maker) continue;
    // Also ends sessions half opened during the revocation.
    if (claim.state == ClaimState::kRevoked) EndSessionsOf(claim);
    if (is_stopping_) continue;
    // Sessions of the earlier daemon may return to a draining claim.
    const bool is_time = std::chrono::steady_clock::now() >= claim.keep_until;
    if (!is_time || claim.sessions > 0 || !HasNothing(claim.id) || !RemoveIfEmpty(claim)) {
      any_left = any_left || claim.sessions == 0 || claim.rule.empty();
      continue;
    }
    // No session can enter any more.
    if (claim.rule.empty()) {
      removed.push_back(claim);
    } else {
      ClaimLine("claim removed", claim).Write(spdlog::level::info);
    }
  }
  if (any_left) any_leaving_ = true;
  if (removed.empty()) return;
  // If the file cannot be written before the next daemon starts, the claims return then, to be removed.
  const absl::Status status = Save(nullptr, nullptr);
  any_unsaved_ = !status.ok();
  for (const Claim& claim : removed) {
    options_.hooks.stop_serving(claim);
    LogLine line = ClaimLine(status.ok() ? "claim removed" : "claim removed, but not from the file yet", claim);
    if (!status.ok()) line.Add("why", status.message());
    line.Write(status.ok() ? spdlog::level::info : spdlog::level::err);
  }
}

void Claims::EndSessionsOf(const Claim& claim) {
  for (const SessionPtr& session : SessionsOf(claim.id)) {
    if (session->state() < SessionState::kEnded) options_.end_session(session, "its claim was revoked");
  }
}

bool Claims::RemoveIfEmpty(const Claim& claim) {
  MutexLock making(making_mu_);
  {
    MutexLock lock(mu_);
    if (claims_.at(claim.name).sessions > 0) return false;
    names_.erase(claim.id);
    makers_.erase(claim.id);
    claims_.erase(claim.name);
  }
  for (SegmentPool* pool : pools_) pool->CloseClaim(claim.id);
  options_.hooks.forget_members(claim.name);  // before a new claim of the same name can exist
  const SessionTerms terms = TermsOf(claim);
  options_.removed(claim, claim.rule.empty() && terms.has_claims_tenant ? terms.tenant : "");
  return true;
}

// ---- The start ----

void Claims::Restore(std::vector<Claim> claims) {
  for (Claim& claim : claims) {
    {
      MutexLock lock(mu_);
      claim.id = ClaimId{next_id_++};
    }
    if (claim.state != ClaimState::kRevoked) claim.keep_until = std::chrono::steady_clock::now() + kComingBack;
    SetLimit(claim);
    // A device may be gone, or smaller than before. The claim's terms stay in the file.
    if (absl::Status status = RaiseGuarantee(claim.id, claim.terms, /*reclaims=*/false); !status.ok()) {
      ClaimLine("the claim has no guarantee until it is set again (vramctl claim set)", claim)
          .Add("why", status.message())
          .Write(spdlog::level::err);
    }
    options_.added(claim);
    claim.has_lost_maker = claim.maker.has_value() && HasEnded(*claim.maker);
    Put(claim);
    if (claim.state != ClaimState::kActive || claim.has_lost_maker) any_leaving_ = true;
    if (!claim.maker.has_value() || claim.has_lost_maker) continue;
    MutexLock lock(mu_);
    makers_.emplace(claim.id, nullptr);
  }
}

void Claims::SetEarlierMembers(absl::btree_map<ProcessId, std::string> members) {
  MutexLock lock(mu_);
  earlier_ = std::move(members);
}

void Claims::ServeRestored() {
  for (const Claim& claim : GetAll()) unserved_.insert(claim.id);
  ServeUnserved(/*is_first_try=*/true);
}

void Claims::ServeUnserved(bool is_first_try) {
  std::vector<Claim> all = GetAll();
  std::stable_partition(all.begin(), all.end(), [](const Claim& claim) { return !claim.is_own; });
  auto own = static_cast<size_t>(std::count_if(
      all.begin(), all.end(), [this](const Claim& claim) { return claim.is_own && !unserved_.contains(claim.id); }));
  for (const Claim& claim : all) {
    if (!unserved_.contains(claim.id)) continue;
    // The file may list more claims than a daemon with fewer file descriptors can serve.
    const absl::Status status = claim.is_own && own >= MostOwn() ? TooManyOwn() : options_.hooks.serve(claim);
    if (status.ok()) {
      if (claim.is_own) ++own;
      unserved_.erase(claim.id);
      if (!is_first_try) ClaimLine("the claim is served now", claim).Write(spdlog::level::info);
    } else if (is_first_try) {
      ClaimLine("the claim's sockets could not be made: nobody can connect to it, until the daemon can make them",
                claim)
          .Add("why", status.message())
          .Write(spdlog::level::err);
    }
  }
  absl::erase_if(unserved_, [this](ClaimId id) {
    MutexLock lock(mu_);
    return !names_.contains(id);
  });
  any_unserved_ = !unserved_.empty();
}

}  // namespace vrambroker
