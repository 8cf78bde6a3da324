// SPDX-License-Identifier: Apache-2.0
//
// Claims: who comes into them, by their sockets or by a rule of the policy.
#include <unistd.h>

#include <utility>

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"
#include "server/core/claims.h"

namespace vrambroker {
namespace {

// After a guarantee of the policy's was refused.
constexpr std::chrono::seconds kBetweenUpdates(5);

}  // namespace

// ---- By its sockets ----

SessionTerms Claims::TermsOf(const Claim& claim) const {
  return {.rule = "",
          .limit = 1.0,  // the claim's bounds it
          .priority = claim.terms.priority,
          .tenant = claim.terms.tenant.empty() ? absl::StrCat("claim:", claim.name) : claim.terms.tenant,
          .rights = {.client = true, .observer = false, .admin = false},
          .max_wait = claim.terms.max_wait.has_value() ? *claim.terms.max_wait : options_.max_wait(),
          .claim = claim.name,
          .has_claims_tenant = claim.terms.tenant.empty(),
          .claim_id = claim.id,
          .claim_limit = claim.terms.limit,
          .claim_guarantee = claim.terms.guarantee};
}

absl::Status Claims::CheckOwner(const Claim& claim, const Caller& caller) {
  const ClaimOwner& owner = claim.terms.owner;
  if (!owner.uid.has_value() || caller.uid == *owner.uid || caller.uid == 0 || caller.uid == geteuid()) {
    return absl::OkStatus();
  }
  if (owner.gid.has_value() && (caller.gid == *owner.gid || absl::c_linear_search(caller.groups, *owner.gid))) {
    return absl::OkStatus();
  }
  return absl::PermissionDeniedError(
      absl::StrCat("uid ", caller.uid, " may not use the claim '", claim.name, "', which is uid ", *owner.uid, "'s"));
}

bool Claims::CountsInClaim(ClaimId claim, const Caller& caller) const {
  MutexLock lock(mu_);
  const auto name = names_.find(claim);
  if (name == names_.end()) return false;
  const Claim& of = claims_.at(name->second);
  const bool is_named = of.terms.owner.uid.has_value() || caller.uid == 0 || caller.uid == geteuid();
  return is_named && CheckOwner(of, caller).ok();
}

absl::StatusOr<Claim> Claims::FindFor(const Caller& caller) const {
  MutexLock lock(mu_);
  const auto name = caller.claim.has_value() ? names_.find(*caller.claim) : names_.end();
  if (name == names_.end()) return absl::FailedPreconditionError("the claim of this socket was removed");
  const Claim& claim = claims_.at(name->second);
  if (absl::Status status = CheckOwner(claim, caller); !status.ok()) return status;
  return claim;
}

absl::StatusOr<SessionTerms> Claims::TermsOf(const Caller& caller) const {
  const absl::StatusOr<Claim> claim = FindFor(caller);
  if (!claim.ok()) return claim.status();
  return TermsOf(*claim);
}

absl::StatusOr<SessionTerms> Claims::Enter(const Caller& caller, const ProcessId& process) {
  absl::StatusOr<Claim> claim = FindFor(caller);
  if (!claim.ok()) return claim.status();
  {
    MutexLock lock(mu_);
    const auto it = claims_.find(claim->name);
    if (it == claims_.end() || it->second.id != claim->id || !TakesSessions(it->second, process)) {
      return absl::FailedPreconditionError(
          absl::StrCat("the claim '", claim->name, "' is being removed, and takes no more sessions"));
    }
    ++it->second.sessions;
    *claim = it->second;
  }
  return TermsOf(*claim);
}

bool Claims::TakesSessions(const Claim& claim, const ProcessId& process) const {
  if (claim.state == ClaimState::kActive) return true;
  const auto earlier = earlier_.find(process);
  return claim.state == ClaimState::kDraining && earlier != earlier_.end() && earlier->second == claim.name;
}

// ---- By a rule ----

absl::StatusOr<ClaimId> Claims::EnterByPolicy(const SessionTerms& terms, const ProcessId& process) {
  MutexLock making(making_mu_);  // of several sessions that come at once, one makes the claim
  Claim claim{.name = terms.claim,
              .terms = {.limit = terms.claim_limit, .guarantee = terms.claim_guarantee},
              .created = std::chrono::system_clock::now(),
              .rule = terms.rule,
              .sessions = 1};
  bool has_come_back = false;
  {
    MutexLock lock(mu_);
    if (const auto it = claims_.find(claim.name); it != claims_.end()) {
      if (it->second.is_being_made) return absl::UnavailableError("the claim is just being made; try again");
      if (!TakesSessions(it->second, process)) {
        return absl::FailedPreconditionError(absl::StrCat("the claim '", claim.name, "', which the policy's rule ",
                                                          terms.rule, " asks for, is being removed"));
      }
      ++it->second.sessions;
      return it->second.id;
    }
    if (NumberOf(/*by_policy=*/true) >= kMaxClaims) return TooMany();
    claim.id = ClaimId{next_id_++};
    const auto earlier = earlier_.find(process);
    has_come_back = earlier != earlier_.end() && earlier->second == claim.name;
  }
  SetLimit(claim);
  if (absl::Status status = RaiseGuarantee(claim.id, claim.terms, /*reclaims=*/false); !status.ok()) {
    // What such a process holds of the run before is not the claim's yet, and in the way of its guarantee. Published()
    // sees to that.
    if (!has_come_back) {
      for (SegmentPool* pool : pools_) pool->CloseClaim(claim.id);
      return absl::Status(status.code(), absl::StrCat("the claim '", claim.name, "' of the policy's rule ", terms.rule,
                                                      ": ", status.message()));
    }
    claim.terms.guarantee = uint64_t{0};
  }
  options_.added(claim);
  ClaimLine("claim created", claim).Add("limits", LimitsText(claim)).Add("rule", claim.rule).Write(spdlog::level::info);
  MutexLock lock(mu_);
  names_.emplace(claim.id, claim.name);
  claims_.emplace(claim.name, claim);
  return claim.id;
}

void Claims::UpdateByPolicy(const SessionTerms& terms) {
  {
    MutexLock lock(mu_);
    const auto it = claims_.find(terms.claim);
    if (it == claims_.end() || it->second.rule.empty()) return;  // an operator's has the operator's terms
    Claim& claim = it->second;
    const bool is_same = claim.terms.limit == terms.claim_limit && claim.terms.guarantee == terms.claim_guarantee;
    const SteadyTime now = std::chrono::steady_clock::now();
    if (is_same || now < claim.next_update) return;
    claim.next_update = now + kBetweenUpdates;
  }
  // Dropped when too many changes wait: a session that is opened later asks for it again.
  (void)changes_->Submit([this, terms] {
    absl::StatusOr<Claim> claim = Find(terms.claim);
    if (!claim.ok() || claim->rule.empty()) return;
    const ClaimTerms before = claim->terms;
    claim->rule = terms.rule;
    claim->terms.limit = terms.claim_limit;
    claim->terms.guarantee = terms.claim_guarantee;
    if (absl::Status status = RaiseGuarantee(claim->id, claim->terms, /*reclaims=*/false); !status.ok()) {
      claim->terms.guarantee = before.guarantee;
      ClaimLine("the claim keeps its old guarantee", *claim).Add("why", status.message()).Write(spdlog::level::warn);
    } else {
      claim->next_update = SteadyTime::min();
    }
    Apply(*claim, before);
    ClaimLine("claim changed", *claim)
        .Add("limits", LimitsText(*claim))
        .Add("rule", claim->rule)
        .Write(spdlog::level::info);
  });
}

// ---- Both ----

void Claims::UpdateByPolicy(const Policy& policy) {
  for (const Claim& claim : GetAll()) {
    const PolicyRule* const rule = claim.rule.empty() ? nullptr : policy.FindRule(claim.rule);
    // Of a rule that has gone, or has another claim: it stays as it is, for as long as it has sessions.
    if (rule == nullptr || !rule->has_claim() || (!rule->claim_per_user && rule->claim != claim.name)) continue;
    SessionTerms terms;
    terms.rule = rule->label;
    terms.claim = claim.name;
    terms.claim_limit = rule->claim_limit;
    terms.claim_guarantee = rule->claim_guarantee;
    UpdateByPolicy(terms);
  }
}

void Claims::Published(const SessionPtr& session) {
  const std::optional<ClaimId> id = session->terms().claim_id;
  for (int priority = session->terms().priority; id.has_value();) {
    Claim claim;
    {
      MutexLock lock(mu_);
      const auto name = names_.find(*id);
      if (name == names_.end()) return;
      claim = claims_.at(name->second);
    }
    if (!session->caller().claim.has_value()) return UpdateByPolicy(session->terms());
    if (claim.terms.priority == priority) break;
    priority = claim.terms.priority;  // it may change once more meanwhile
    (void)limits_.SetPriority(session, priority);
  }
  limits_.UpdateLimit(session);
}

void Claims::Leave(ClaimId claim) {
  {
    MutexLock lock(mu_);
    const auto name = names_.find(claim);
    if (name == names_.end()) return;
    Claim& of = claims_.at(name->second);
    if (--of.sessions == 0 && !of.rule.empty()) any_leaving_ = true;
  }
  RemoveEmpty();
}

}  // namespace vrambroker
