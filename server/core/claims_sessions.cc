// SPDX-License-Identifier: Apache-2.0
//
// Claims: entry of sessions, through a claim's sockets or by a rule of the policy.
#include <unistd.h>

#include <utility>

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"
#include "server/core/claims.h"

namespace vrambroker {
namespace {

// Time between two tries to give a refused guarantee of the policy.
constexpr std::chrono::seconds kGuaranteeRetry(1);

bool HasWhatItsRuleSays(const Claim& claim) {
  return !claim.rule_terms.has_value() ||
         (claim.rule_terms->limit == claim.terms.limit && claim.rule_terms->guarantee == claim.terms.guarantee);
}

}  // namespace

// ---- By sockets ----

SessionTerms Claims::TermsOf(const Claim& claim) const {
  // The policy may have changed since a user's own claim got its tenant, so BoundSession() uses the current policy for
  // the user's sessions. Sessions of unbounded users, such as root, share only memory left by the claim's sessions.
  const bool has_its_own = claim.terms.tenant.empty() || claim.is_own;
  return {.rule = "",
          .limit = 1.0,  // bounded by the claim's limit
          .priority = claim.terms.priority,
          .tenant = has_its_own ? absl::StrCat("claim:", claim.name) : claim.terms.tenant,
          .rights = {.client = true, .observer = false, .admin = false},
          .max_wait = claim.terms.max_wait.has_value() ? *claim.terms.max_wait : options_.max_wait(),
          .claim = claim.name,
          .has_claims_tenant = has_its_own,
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
  if (of.is_own && of.terms.owner.uid == caller.uid) return false;
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

absl::StatusOr<SessionTerms> Claims::Enter(const Caller& caller, const ProcessId& process,
                                           const SessionTerms& by_policy) {
  absl::StatusOr<Claim> claim = FindFor(caller);
  if (!claim.ok()) return claim.status();
  const bool is_bounded = claim->is_own && !by_policy.rights.admin;
  if (is_bounded) {
    if (absl::Status status = CheckMayHaveOwn(by_policy, caller.uid); !status.ok()) return status;
  }
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
  SessionTerms terms = TermsOf(*claim);
  if (is_bounded) BoundSession(by_policy, terms);
  return terms;
}

bool Claims::TakesSessions(const Claim& claim, const ProcessId& process) const {
  if (claim.state == ClaimState::kActive) return true;
  const auto earlier = earlier_.find(process);
  return claim.state == ClaimState::kDraining && earlier != earlier_.end() && earlier->second == claim.name;
}

// ---- By a rule ----

absl::StatusOr<ClaimId> Claims::EnterByPolicy(const SessionTerms& terms, const ProcessId& process) {
  MutexLock making(making_mu_);  // only the first of several concurrent sessions makes the claim
  Claim claim{.name = terms.claim,
              .terms = {.limit = terms.claim_limit, .guarantee = terms.claim_guarantee},
              .created = std::chrono::system_clock::now(),
              .rule = terms.rule,
              .rule_terms = RuleTerms{.limit = terms.claim_limit, .guarantee = terms.claim_guarantee},
              .sessions = 1};
  std::vector<ProcessId> earlier;  // members in the previous run
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
    for (const auto& [member, name] : earlier_) {
      if (name == claim.name) earlier.push_back(member);
    }
  }
  SetLimit(claim);
  // So far, memory of `earlier` was charged to the users.
  for (SegmentPool* pool : pools_) pool->ChargeCarriedOver(claim.id, earlier);
  if (absl::Status status = RaiseGuarantee(claim.id, claim.terms, /*reclaims=*/false); !status.ok()) {
    // On GPUs, memory of a returning process may be in the way before it is known to be the claim's.
    if (!absl::c_linear_search(earlier, process)) {
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
  if (!HasWhatItsRuleSays(claim)) any_rule_unapplied_ = true;
  return claim.id;
}

void Claims::UpdateByPolicy(const Claim& claim, absl::string_view rule, const Policy& policy) {
  const auto find = [&](absl::string_view label) {
    const PolicyRule* const found = label.empty() ? nullptr : policy.FindRule(label);
    const bool is_its = found != nullptr && found->has_claim() && (found->claim_per_user || found->claim == claim.name);
    return is_its ? found : nullptr;
  };
  if (claim.rule.empty()) return;  // terms of an operator's claim come from the operator
  const PolicyRule* said = find(claim.rule);
  if (said == nullptr) said = find(rule);
  if (said == nullptr) return;
  const RuleTerms terms{.limit = said->claim_limit, .guarantee = said->claim_guarantee};
  {
    MutexLock lock(mu_);
    const auto it = claims_.find(claim.name);
    if (it == claims_.end() || it->second.id != claim.id || it->second.rule_terms == terms) return;
    it->second.rule_terms = terms;
    it->second.rule = said->label;
    it->second.next_try = SteadyTime::min();
    any_rule_unapplied_ = true;
  }
  (void)changes_->Submit([this, name = claim.name] { ApplyRule(name); });  // Tick() retries if too many changes wait
}

void Claims::ApplyRule(const std::string& name) {
  absl::StatusOr<Claim> claim = Find(name);
  if (!claim.ok() || !claim->rule_terms.has_value()) return;
  const ClaimTerms before = claim->terms;
  claim->terms.limit = claim->rule_terms->limit;
  claim->terms.guarantee = claim->rule_terms->guarantee;
  if (absl::Status status = RaiseGuarantee(claim->id, claim->terms, /*reclaims=*/false); !status.ok()) {
    claim->terms.guarantee = before.guarantee;
    if (claim->next_try == SteadyTime::min()) {  // only at the first try
      ClaimLine("the claim keeps its old guarantee, for now", *claim)
          .Add("why", status.message())
          .Write(spdlog::level::warn);
    }
    claim->next_try = std::chrono::steady_clock::now() + kGuaranteeRetry;
  }
  if (claim->terms.limit == before.limit && claim->terms.guarantee == before.guarantee) return Put(*claim);
  Apply(*claim, before);
  // The configuration has been read, and cannot be refused any more.
  WarnOfCutGuarantees(*claim);
  ClaimLine("claim changed", *claim)
      .Add("limits", LimitsText(*claim))
      .Add("rule", claim->rule)
      .Write(spdlog::level::info);
}

void Claims::ApplyRulesAgain() {
  any_rule_unapplied_ = false;
  const SteadyTime now = std::chrono::steady_clock::now();
  for (const Claim& claim : GetAll()) {
    if (HasWhatItsRuleSays(claim)) continue;
    any_rule_unapplied_ = true;
    if (now >= claim.next_try) ApplyRule(claim.name);
  }
}

// ---- Both ----

void Claims::UpdateByPolicy(const Policy& policy) {
  for (const Claim& claim : GetAll()) UpdateByPolicy(claim, /*rule=*/"", policy);
}

void Claims::Published(const SessionPtr& session, const Policy& policy) {
  const SessionTerms& terms = session->terms();
  const std::optional<ClaimId> id = terms.claim_id;
  // Repeats until the claim has not changed meanwhile.
  std::pair<int, std::chrono::milliseconds> has(terms.priority, terms.max_wait);
  while (id.has_value()) {
    Claim claim;
    {
      MutexLock lock(mu_);
      const auto name = names_.find(*id);
      if (name == names_.end()) return;
      claim = claims_.at(name->second);
    }
    if (!session->caller().claim.has_value()) {
      UpdateByPolicy(claim, terms.rule, policy);
      break;
    }
    const int priority = std::min(claim.terms.priority, terms.most_priority);
    const auto wait = std::min(claim.terms.max_wait.value_or(has.second), terms.most_wait);
    const auto had = std::exchange(has, {priority, wait});
    if (had == has) break;
    if (had.second != wait) session->SetMaxWait(wait);
    if (had.first != priority) (void)limits_.SetPriority(session, priority);
  }
  limits_.UpdateLimit(session);
}

void Claims::Leave(ClaimId claim) {
  {
    MutexLock lock(mu_);
    const auto name = names_.find(claim);
    if (name == names_.end()) return;
    Claim& of = claims_.at(name->second);
    if (--of.sessions == 0 && (!of.rule.empty() || of.has_lost_maker)) any_leaving_ = true;
  }
  RemoveEmpty();
}

}  // namespace vrambroker
