// SPDX-License-Identifier: Apache-2.0
//
// Claims of users' own, made without the right ADMIN. A user's own claim never gives more than the policy: the claim is
// bounded when made, and each session when opened.
#include <algorithm>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "allocator/base/bytes.h"
#include "server/base/fair_share.h"
#include "server/core/claims.h"

namespace vrambroker {
namespace {

absl::Status TakesAdmin(absl::string_view field, absl::string_view why) {
  return absl::PermissionDeniedError(absl::StrCat(field, ": ", why, "; more takes the right ADMIN"));
}

std::string RuleText(const SessionTerms& rule) {
  return rule.rule.empty() ? "the policy" : absl::StrCat("the policy's rule ", rule.rule);
}

}  // namespace

absl::Status Claims::CheckMayHaveOwn(const SessionTerms& rule, uid_t uid) {
  const char* why = nullptr;
  if (!rule.rights.client) why = "does not give it the right CLIENT";
  if (!rule.claim.empty()) why = "puts its sessions into a claim already";
  if (rule.user_limit.has_value()) why = "bounds what it may have in all (user_limit), and a claim would escape that";
  if (rule.user_guarantee.has_value()) why = "bounds its guarantees (user_guarantee), and a claim would escape that";
  if (rule.max_sessions > 0) why = "bounds its sessions (max_sessions), and a claim would escape that";
  if (rule.strict) why = "keeps its sessions apart from each other (STRICT), and those of a claim are not";
  if (why == nullptr) return absl::OkStatus();
  return absl::PermissionDeniedError(
      absl::StrCat("uid ", uid, " may have no claims of its own: ", RuleText(rule), " ", why));
}

absl::Status Claims::TooManyOwn() const {
  return absl::ResourceExhaustedError(absl::StrCat(
      "there are ", MostOwn(), " claims that users have made for themselves, ",
      MostOwn() < kMaxOwnClaims ? "the most that the daemon's file descriptors allow; raise LimitNOFILE of its unit"
                                : "the most there can be; those that nobody needs can be removed (vramctl claim rm)"));
}

absl::Status Claims::BoundOwn(const ClaimAsker& asker, ClaimTerms& terms) const {
  if (!asker.rule.has_value()) return absl::OkStatus();  // an operator
  const SessionTerms& rule = *asker.rule;
  if (absl::Status status = CheckMayHaveOwn(rule, asker.caller.uid); !status.ok()) return status;
  if (terms.owner.uid != asker.caller.uid || terms.owner.gid.has_value()) {
    return TakesAdmin("owner", absl::StrCat("a claim of one's own is for uid ", asker.caller.uid, " alone"));
  }
  size_t label_bytes = 0;
  for (const auto& [key, value] : terms.labels) label_bytes += key.size() + value.size();
  if (label_bytes > kMaxOwnLabelBytes) {
    return absl::InvalidArgumentError(absl::StrCat("labels: ", label_bytes, " bytes; a claim of one's own may have ",
                                                   kMaxOwnLabelBytes, " in all, keys and values"));
  }
  for (size_t device = 0; device < pools_.size(); ++device) {
    if (BytesOn(terms, terms.guarantee, device) > 0) {
      return TakesAdmin("guarantee", "a claim of one's own has none");
    }
    const uint64_t most = LimitBytes(rule.limit, pools_[device]->capacity_bytes());
    if (const uint64_t limit = BytesOn(terms, terms.limit, device); limit > most) {
      return TakesAdmin("limit", absl::StrCat(FormatBytesExactly(limit), " is above the ", FormatBytesExactly(most),
                                              " of device ", device, " that ", RuleText(rule), " gives"));
    }
  }
  if (terms.priority == 0) terms.priority = rule.priority;
  if (terms.priority > rule.priority) {
    return TakesAdmin(
        "priority", absl::StrCat(terms.priority, " is above the ", rule.priority, " that ", RuleText(rule), " gives"));
  }
  if (terms.tenant.empty()) terms.tenant = rule.tenant;
  if (terms.tenant != rule.tenant) {
    return TakesAdmin("tenant", absl::StrCat("it is '", rule.tenant, "', as ", RuleText(rule), " says"));
  }
  if (!terms.max_wait.has_value()) terms.max_wait = rule.max_wait;
  if (*terms.max_wait > rule.max_wait) {
    return TakesAdmin("max_wait_ms", absl::StrCat(terms.max_wait->count(), " is above the ", rule.max_wait.count(),
                                                  " that ", RuleText(rule), " gives"));
  }
  return absl::OkStatus();
}

void Claims::BoundSession(const SessionTerms& by_policy, SessionTerms& terms) {
  terms.limit = by_policy.limit;  // the claim's limit bounds all its sessions together
  terms.most_priority = by_policy.priority;
  terms.priority = std::min(terms.priority, by_policy.priority);
  terms.most_wait = by_policy.max_wait;
  terms.max_wait = std::min(terms.max_wait, by_policy.max_wait);
  // Memory of a team stays the team's after the user has left, even if the claim was made while the user was a member.
  terms.tenant = by_policy.tenant;
  terms.has_claims_tenant = false;
}

absl::Status Claims::CheckOwnName(const std::string& name, uid_t uid) {
  const std::string start = absl::StrCat("u", uid, ".");
  if (absl::StartsWith(name, start) && name.size() > start.size()) return absl::OkStatus();
  return TakesAdmin("name", absl::StrCat("a claim of one's own is called ", start, "NAME"));
}

absl::Status Claims::CheckOwnNumber(const ClaimAsker& asker) const {
  size_t own = 0;
  size_t of_all = 0;
  for (const auto& [name, claim] : claims_) {
    if (!claim.is_own) continue;
    ++of_all;
    if (claim.terms.owner.uid == asker.caller.uid) ++own;
  }
  if (own >= asker.max_claims) {
    return absl::ResourceExhaustedError(absl::StrCat("uid ", asker.caller.uid, " has ", own,
                                                     " claims of its own, the most that max_claims_per_uid allows "
                                                     "(vramctl claim ls)"));
  }
  if (of_all >= MostOwn()) return TooManyOwn();
  if (MayTakeAnother(own, of_all, MostOwn())) return absl::OkStatus();
  return absl::ResourceExhaustedError(absl::StrCat(
      "uid ", asker.caller.uid, " has ", own, " claims of its own, and users may make ", MostOwn() - of_all,
      " more: each may have half as many as are free, so that others get some; remove one (vramctl claim ls)",
      MostOwn() < kMaxOwnClaims ? ", or have LimitNOFILE of the daemon's unit raised" : ""));
}

absl::StatusOr<Claim> Claims::FindToChange(const std::string& name, const ClaimAsker& asker) const {
  absl::StatusOr<Claim> claim = Find(name);
  if (!asker.rule.has_value()) return claim;
  if (claim.ok() && claim->is_own && claim->terms.owner.uid == asker.caller.uid) return claim;
  return absl::PermissionDeniedError(absl::StrCat("uid ", asker.caller.uid,
                                                  " has no claim of its own of that name (vramctl claim ls); others "
                                                  "take the right ADMIN"));
}

}  // namespace vrambroker
