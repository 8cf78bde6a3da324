// SPDX-License-Identifier: Apache-2.0
#include "server/identity/policy.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace vrambroker {
namespace {

// Reasons why a rule matches or not, for display. Null when not wanted.
struct Reasons {
  std::vector<std::string> fits;
  std::vector<std::string> misfits;
};

bool GlobFits(absl::string_view what, const std::optional<std::string>& pattern, const std::optional<std::string>& text,
              absl::string_view when_unknown, Reasons* reasons) {
  if (!pattern.has_value()) return true;
  if (!text.has_value()) {
    if (reasons != nullptr) {
      reasons->misfits.push_back(absl::StrCat("needs a ", what, " like ", *pattern, ", but ", when_unknown));
    }
    return false;
  }
  const bool fits = GlobMatches(*pattern, *text);
  if (reasons != nullptr) {
    (fits ? reasons->fits : reasons->misfits)
        .push_back(absl::StrCat(what, " ", *text, fits ? " matches " : " does not match ", *pattern));
  }
  return fits;
}

bool Matches(const PolicyRule& rule, const PolicySubject& subject, Reasons* reasons) {
  bool matches = true;
  if (rule.uid.has_value()) {
    const bool fits = *rule.uid == subject.uid;
    if (reasons != nullptr && fits) reasons->fits.push_back(absl::StrCat("uid is ", subject.uid));
    if (reasons != nullptr && !fits) {
      reasons->misfits.push_back(absl::StrCat("uid is ", subject.uid, ", not ", *rule.uid));
    }
    matches = matches && fits;
  }
  if (rule.gid.has_value()) {
    const bool fits = std::find(subject.gids.begin(), subject.gids.end(), *rule.gid) != subject.gids.end();
    if (reasons != nullptr && fits) reasons->fits.push_back(absl::StrCat("gid ", *rule.gid, " is among the groups"));
    if (reasons != nullptr && !fits) {
      reasons->misfits.push_back(
          absl::StrCat("gid ", *rule.gid, " is not among the groups (", absl::StrJoin(subject.gids, ", "), ")"));
    }
    matches = matches && fits;
  }
  matches = GlobFits("cgroup", rule.cgroup, subject.cgroup, "none is known", reasons) && matches;
  matches = GlobFits("name", rule.session_name, subject.session_name, "no session name is given", reasons) && matches;
  return matches;
}

}  // namespace

uint64_t LimitBytes(const Limit& limit, uint64_t capacity_bytes) {
  if (const uint64_t* bytes = std::get_if<uint64_t>(&limit)) return std::min(*bytes, capacity_bytes);
  // Truncates, like set_per_process_memory_fraction().
  return std::min(capacity_bytes, static_cast<uint64_t>(std::get<double>(limit) * static_cast<double>(capacity_bytes)));
}

bool GlobMatches(absl::string_view pattern, absl::string_view text) {
  // Positions after the last * seen, in the pattern and in the text. Only the last * needs another try, so that the
  // time is at most the product of the lengths.
  size_t p = 0, t = 0;
  size_t star = absl::string_view::npos, star_text = 0;
  while (t < text.size()) {
    if (p < pattern.size() && pattern[p] == '*') {
      star = ++p;
      star_text = t;
    } else if (p < pattern.size() && (pattern[p] == '?' || pattern[p] == text[t])) {
      ++p;
      ++t;
    } else if (star != absl::string_view::npos) {
      p = star;
      t = ++star_text;
    } else {
      return false;
    }
  }
  while (p < pattern.size() && pattern[p] == '*') ++p;
  return p == pattern.size();
}

bool Policy::IsOperator(const PolicySubject& subject) const {
  return subject.uid == 0 || subject.uid == options_.daemon_uid;
}

SessionTerms Policy::Terms(const PolicyRule* rule, const PolicySubject& subject) const {
  SessionTerms terms;
  terms.limit = options_.session_limit;
  terms.max_wait = options_.max_wait;
  terms.user_limit = options_.user_limit;
  terms.user_guarantee = options_.user_guarantee;
  if (rule != nullptr) {
    terms.rule = rule->label;
    if (rule->limit.has_value()) terms.limit = *rule->limit;
    terms.guarantee = rule->guarantee;
    terms.priority = rule->priority;
    terms.tenant = rule->tenant;
    terms.strict = rule->strict;
    terms.rights = rule->rights;
    terms.max_wait = rule->max_wait.value_or(options_.max_wait);
    if (rule->user_limit.has_value()) terms.user_limit = rule->user_limit;
    if (rule->user_guarantee.has_value()) terms.user_guarantee = rule->user_guarantee;
    terms.max_sessions = rule->max_sessions;
    terms.claim = rule->claim_per_user ? absl::StrCat("uid:", subject.uid) : rule->claim;
    terms.claim_limit = rule->claim_limit;
    terms.claim_guarantee = rule->claim_guarantee;
    if (rule->has_claim()) terms.user_limit = terms.user_guarantee = std::nullopt;
  }
  if (terms.tenant.empty()) terms.tenant = absl::StrCat("uid:", subject.uid);
  if (IsOperator(subject)) terms.rights = kEveryRight;
  return terms;
}

const PolicyRule* Policy::FindRule(absl::string_view label) const {
  const auto rule = std::find_if(options_.rules.begin(), options_.rules.end(),
                                 [label](const PolicyRule& each) { return each.label == label; });
  return rule == options_.rules.end() ? nullptr : &*rule;
}

SessionTerms Policy::TermsFor(const PolicySubject& subject) const {
  const auto rule = std::find_if(options_.rules.begin(), options_.rules.end(),
                                 [&](const PolicyRule& each) { return Matches(each, subject, /*reasons=*/nullptr); });
  return Terms(rule == options_.rules.end() ? nullptr : &*rule, subject);
}

PolicyExplanation Policy::Explain(const PolicySubject& subject) const {
  PolicyExplanation explanation;
  explanation.is_operator = IsOperator(subject);
  const PolicyRule* matching = nullptr;
  for (const PolicyRule& rule : options_.rules) {
    Reasons reasons;
    const bool matches = Matches(rule, subject, &reasons);
    if (matches && reasons.fits.empty()) reasons.fits.emplace_back("it has no conditions: it matches everyone");
    explanation.rules.push_back({.label = rule.label,
                                 .place = rule.place,
                                 .matches = matches,
                                 .why = absl::StrJoin(matches ? reasons.fits : reasons.misfits, "; ")});
    if (matches) {
      matching = &rule;
      break;
    }
  }
  explanation.terms = Terms(matching, subject);
  return explanation;
}

}  // namespace vrambroker
