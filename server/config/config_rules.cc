// SPDX-License-Identifier: Apache-2.0
#include "server/config/config_rules.h"

#include <grp.h>
#include <pwd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <limits>
#include <string>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "allocator/base/bytes.h"
#include "allocator/base/names.h"
#include "server/identity/claim_dir.h"

namespace vrambroker {
namespace {

constexpr size_t kMaxPattern = 4095;  // as long as a path can be
constexpr int kMaxPriority = 1000;

// Reads `text` as a number, or looks it up by `look_up` (getpwnam_r or getgrnam_r, with entries of type `Entry`).
template <typename Entry, typename LookUp>
absl::StatusOr<uint32_t> IdOf(const std::string& text, const char* what, const LookUp& look_up, uint32_t Entry::*id) {
  if (text.empty()) return absl::InvalidArgumentError(absl::StrCat("is empty; give a ", what, "'s name or number"));
  uint32_t number = 0;
  if (text.find_first_not_of("0123456789") == std::string::npos) {
    // The highest number means "no change" to the kernel, and belongs to no user or group.
    if (absl::SimpleAtoi(text, &number) && number != std::numeric_limits<uint32_t>::max()) return number;
    return absl::InvalidArgumentError(absl::StrCat("'", text, "' is not between 0 and 4294967294"));
  }
  Entry entry = {};
  Entry* found = nullptr;
  std::vector<char> buffer(4096);
  int error = 0;
  while ((error = look_up(text.c_str(), &entry, buffer.data(), buffer.size(), &found)) == ERANGE &&
         buffer.size() < (1 << 24)) {
    buffer.resize(buffer.size() * 2);
  }
  if (found != nullptr) return entry.*id;
  return absl::InvalidArgumentError(absl::StrCat("there is no ", what, " '", text, "' on this machine",
                                                 error == 0 ? "" : ": ", error == 0 ? "" : strerror(error)));
}

void CheckPattern(const std::string& field, const std::string& pattern, Checker& check) {
  if (pattern.empty()) check.Fault(field, "is empty and would match nobody; leave it out, or write \"*\"");
  if (pattern.size() > kMaxPattern) {
    check.Fault(field, absl::StrCat(pattern.size(), " characters; at most ", kMaxPattern, " are allowed"));
  }
}

void CheckRuleName(const std::string& field, const std::string& name, Checker& check) {
  if (const absl::Status status = CheckName(name); !status.ok()) check.Fault(field, status.message());
}

Rights RightsOf(const std::string& field, const config::v1::PolicyRule& proto, Checker& check) {
  using Proto = config::v1::PolicyRule;
  if (proto.rights().empty()) return Rights();
  Rights rights = {.client = false, .observer = false, .admin = false};
  for (const int right : proto.rights()) {
    rights.client |= right == Proto::CLIENT || right == Proto::ADMIN;
    rights.observer |= right == Proto::OBSERVER || right == Proto::ADMIN;
    rights.admin |= right == Proto::ADMIN;
    if (right == Proto::NONE && proto.rights_size() > 1)
      check.Fault(field + ".rights[0]", "NONE cannot be combined with other rights");
  }
  if (rights.admin && proto.has_session_name()) {
    check.Fault(field + ".session_name",
                "a client chooses its own name, so a rule with a session name cannot give the right ADMIN");
  }
  return rights;
}

std::chrono::milliseconds MaxWaitOf(const std::string& field, const std::string& text, Checker& check) {
  if (text.empty()) check.Fault(field, "is empty; give a duration, or leave it out");
  const absl::Duration most = absl::FromChrono(kMaxWait);
  return absl::ToChronoMilliseconds(check.Time(field, text, most, most));
}

// True when `a` is above `b` on every device, as far as known without the device's capacity.
bool IsAbove(const Limit& a, const Limit& b) {
  return a.index() == b.index() && a > b;
}

std::string Text(const Limit& limit) {
  if (const uint64_t* bytes = std::get_if<uint64_t>(&limit)) return FormatBytes(*bytes);
  return absl::StrCat(std::get<double>(limit));
}

void CheckClaim(const std::string& field, const config::v1::PolicyRule& proto, PolicyRule& rule, Checker& check) {
  rule.claim = proto.claim();
  rule.claim_per_user = proto.claim_per() == config::v1::PolicyRule::USER;
  rule.claim_limit =
      check.LimitOf(field + ".claim_limit", proto.has_claim_limit() ? &proto.claim_limit() : nullptr).value_or(1.0);
  rule.claim_guarantee =
      check.LimitOf(field + ".claim_guarantee", proto.has_claim_guarantee() ? &proto.claim_guarantee() : nullptr)
          .value_or(uint64_t{0});
  if (!rule.claim.empty()) {
    if (absl::Status status = CheckClaimName(rule.claim); !status.ok()) {
      check.Fault(field + ".claim", absl::StripPrefix(status.message(), "name: "));
    }
    if (rule.claim_per_user) check.Fault(field + ".claim_per", "cannot be combined with claim");
  }
  if (!rule.has_claim()) {
    for (const auto& [name, is_there] : {std::pair("claim_limit", proto.has_claim_limit()),
                                         std::pair("claim_guarantee", proto.has_claim_guarantee())}) {
      if (is_there) check.Fault(absl::StrCat(field, ".", name), "needs claim or claim_per");
    }
    return;
  }
  for (const auto& [name, instead, is_there] :
       {std::tuple("user_limit", "claim_limit", proto.has_user_limit()),
        std::tuple("user_guarantee", "claim_guarantee", proto.has_user_guarantee())}) {
    if (is_there) check.Fault(absl::StrCat(field, ".", name), absl::StrCat("has no effect in a claim; use ", instead));
  }
  if (IsAbove(rule.claim_guarantee, rule.claim_limit)) {
    check.Fault(field + ".claim_guarantee",
                absl::StrCat(Text(rule.claim_guarantee), " is above the claim's limit of ", Text(rule.claim_limit)));
  }
}

PolicyRule CheckRule(const std::string& field, const config::v1::PolicyRule& proto, const Limit& session_limit,
                     std::optional<uint64_t> capacity_bytes, Checker& check) {
  PolicyRule rule;
  rule.label = proto.name().empty() ? field : proto.name();
  rule.place = check.PlaceOf(field);
  CheckRuleName(field + ".name", proto.name(), check);

  if (proto.has_uid()) {
    const absl::StatusOr<uint32_t> uid = IdOf(proto.uid(), "user", getpwnam_r, &passwd::pw_uid);
    if (!uid.ok()) check.Fault(field + ".uid", uid.status().message());
    rule.uid = uid.value_or(0);
  }
  if (proto.has_gid()) {
    const absl::StatusOr<uint32_t> gid = IdOf(proto.gid(), "group", getgrnam_r, &group::gr_gid);
    if (!gid.ok()) check.Fault(field + ".gid", gid.status().message());
    rule.gid = gid.value_or(0);
  }
  if (proto.has_cgroup()) {
    CheckPattern(field + ".cgroup", proto.cgroup(), check);
    rule.cgroup = proto.cgroup();
  }
  if (proto.has_session_name()) {
    CheckPattern(field + ".session_name", proto.session_name(), check);
    rule.session_name = proto.session_name();
  }

  rule.limit = check.LimitOf(field + ".limit", proto.has_limit() ? &proto.limit() : nullptr);
  const std::string guarantee = field + ".guarantee";
  rule.guarantee = check.LimitOf(guarantee, proto.has_guarantee() ? &proto.guarantee() : nullptr).value_or(uint64_t{0});
  const Limit limit = rule.limit.value_or(session_limit);
  if (rule.limit.has_value() == proto.has_limit() && IsAbove(rule.guarantee, limit)) {
    check.Fault(guarantee, absl::StrCat(Text(rule.guarantee), " is above the limit of ", Text(limit)));
  } else if (capacity_bytes.has_value() && IsAbove(rule.guarantee, *capacity_bytes)) {
    check.Fault(guarantee,
                absl::StrCat(Text(rule.guarantee), " is above the capacity of ", FormatBytes(*capacity_bytes)));
  }
  rule.priority = proto.priority();
  if (rule.priority < -kMaxPriority || rule.priority > kMaxPriority) {
    check.Fault(field + ".priority",
                absl::StrCat(rule.priority, " is not between -", kMaxPriority, " and ", kMaxPriority));
  }
  rule.tenant = proto.tenant();
  if (proto.has_tenant() && proto.tenant().empty()) check.Fault(field + ".tenant", "is empty");
  CheckRuleName(field + ".tenant", proto.tenant(), check);
  rule.strict = proto.isolation() == config::v1::PolicyRule::STRICT;
  rule.rights = RightsOf(field, proto, check);
  rule.user_limit = check.LimitOf(field + ".user_limit", proto.has_user_limit() ? &proto.user_limit() : nullptr);
  rule.user_guarantee =
      check.LimitOf(field + ".user_guarantee", proto.has_user_guarantee() ? &proto.user_guarantee() : nullptr);
  rule.max_sessions = proto.max_sessions();
  CheckClaim(field, proto, rule, check);
  if (proto.has_max_wait()) rule.max_wait = MaxWaitOf(field + ".max_wait", proto.max_wait(), check);
  return rule;
}

}  // namespace

std::vector<PolicyRule> CheckRules(const config::v1::DaemonConfig& config, const Limit& session_limit,
                                   std::optional<uint64_t> capacity_bytes, Checker& check) {
  std::vector<PolicyRule> rules;
  if (config.rules_size() > kMaxRules) {
    check.Fault(absl::StrCat("rules[", kMaxRules, "]"),
                absl::StrCat(config.rules_size(), " rules; at most ", kMaxRules, " are allowed"));
    return rules;
  }
  rules.reserve(static_cast<size_t>(config.rules_size()));
  absl::flat_hash_map<std::string, std::string> fields;  // by label
  absl::flat_hash_map<std::string, size_t> claims;       // the first rule of each
  for (int i = 0; i < config.rules_size(); ++i) {
    const std::string field = absl::StrCat("rules[", i, "]");
    rules.push_back(CheckRule(field, config.rules(i), session_limit, capacity_bytes, check));
    if (const auto [other, is_new] = fields.emplace(rules.back().label, field); !is_new) {
      check.Fault(field + ".name", absl::StrCat("'", rules.back().label, "' is already the name of ", other->second));
    }
    const PolicyRule& rule = rules.back();
    if (!rule.has_claim()) continue;
    const PolicyRule& first = rules[claims.emplace(rule.claim, rules.size() - 1).first->second];
    if (first.claim_limit != rule.claim_limit || first.claim_guarantee != rule.claim_guarantee) {
      check.Fault(rule.claim_per_user ? field + ".claim_per" : field + ".claim",
                  absl::StrCat("rule ", first.label, " gives the same claim another claim_limit or claim_guarantee"));
    }
  }
  return rules;
}

std::vector<std::string> WarnOfGuarantees(const std::vector<PolicyRule>& rules,
                                          const std::optional<Limit>& user_guarantee, size_t max_sessions_per_uid,
                                          std::optional<uint64_t> capacity_bytes) {
  std::vector<std::string> warnings;
  for (const PolicyRule& rule : rules) {
    // A user_guarantee or a claim bounds the sum of all guarantees.
    if (rule.user_guarantee.has_value() || user_guarantee.has_value() || rule.has_claim()) continue;
    const double sessions = static_cast<double>(
        rule.max_sessions == 0 ? max_sessions_per_uid : std::min<size_t>(rule.max_sessions, max_sessions_per_uid));
    double fraction = 0;
    if (const double* of_capacity = std::get_if<double>(&rule.guarantee)) {
      fraction = *of_capacity;
    } else if (capacity_bytes.has_value()) {
      fraction = static_cast<double>(std::get<uint64_t>(rule.guarantee)) / static_cast<double>(*capacity_bytes);
    }
    if (fraction * sessions <= 1) continue;
    warnings.push_back(absl::StrCat(rule.place.empty() ? "" : rule.place + ": ", "rule ", rule.label, ": one user's ",
                                    sessions, " sessions, with a guarantee of ", Text(rule.guarantee),
                                    " each, could keep all of the device from others; set max_sessions or "
                                    "user_guarantee in the rule"));
  }
  return warnings;
}

}  // namespace vrambroker
