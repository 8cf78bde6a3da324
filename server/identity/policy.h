// SPDX-License-Identifier: Apache-2.0
//
// Policy: assigns terms to sessions. Rules by user, group, control group and session name; the first matching rule
// counts.
#ifndef VRAMBROKER_SERVER_IDENTITY_POLICY_H_
#define VRAMBROKER_SERVER_IDENTITY_POLICY_H_

#include <sys/types.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "allocator/base/ids.h"

namespace vrambroker {

// A bound in bytes, or a fraction of a device's capacity.
using Limit = std::variant<uint64_t, double>;

// Bytes of `limit` on a device: floor(fraction * capacity), or the bytes, at most the capacity. REQUIRES: a fraction is
// within [0, 1].
uint64_t LimitBytes(const Limit& limit, uint64_t capacity_bytes);

// Whether `pattern` matches all of `text`: * stands for any characters, ? for a single character.
bool GlobMatches(absl::string_view pattern, absl::string_view text);

struct Rights {
  bool client = true;    // may open sessions
  bool observer = true;  // may list and read the sessions of all users
  bool admin = false;    // may do everything; REQUIRES: client and observer are set, too

  friend bool operator==(const Rights& a, const Rights& b) {
    return a.client == b.client && a.observer == b.observer && a.admin == b.admin;
  }
};
inline constexpr Rights kEveryRight = {.client = true, .observer = true, .admin = true};

// Upper bound on a request's wait.
inline constexpr std::chrono::milliseconds kMaxWait = std::chrono::hours(1);

inline constexpr int kMaxPriority = 1000;

// Terms of a session by the policy.
struct SessionTerms {
  std::string rule;               // the rule's label; empty: no rule matched
  Limit limit = 1.0;              // the session's bound at opening
  Limit guarantee = uint64_t{0};  // kept free for the session; at most the session's actual limit
  int priority = 0;               // higher is more important
  std::string tenant;             // the trust domain
  bool strict = false;            // the session's memory is never passed on as is, even within the tenant
  Rights rights;
  std::chrono::milliseconds max_wait = kMaxWait;  // of the session's requests
  // For all sessions of the user together.
  std::optional<Limit> user_limit;
  std::optional<Limit> user_guarantee;
  uint32_t max_sessions = 0;  // under this rule, for each user; 0: no bound
  // Claim whose limit the session shares; empty: the session shares its user's limit.
  std::string claim;
  bool has_claims_tenant = false;   // `tenant` comes from the claim
  std::optional<ClaimId> claim_id;  // set once the session is in the claim
  Limit claim_limit = 1.0;          // of a claim made by the policy: see PolicyRule
  Limit claim_guarantee = uint64_t{0};
  // Bounds on later changes by the claim: a user's own claim grants no more than the policy.
  int most_priority = kMaxPriority;
  std::chrono::milliseconds most_wait = kMaxWait;
};

// A subject of the policy's rules.
struct PolicySubject {
  uid_t uid = 0;
  std::vector<gid_t> gids;                  // the process's own group first
  std::optional<std::string> cgroup;        // version 2; none: not known
  std::optional<std::string> session_name;  // none: the question concerns no session
};

// A checked rule of the configuration; config.proto explains each field.
struct PolicyRule {
  std::string label;  // the rule's name, or "rules[2]"
  std::string place;  // "FILE:LINE:COLUMN"

  std::optional<uid_t> uid;
  std::optional<gid_t> gid;
  std::optional<std::string> cgroup;
  std::optional<std::string> session_name;

  std::optional<Limit> limit;  // none: PolicyOptions.session_limit
  Limit guarantee = uint64_t{0};
  int priority = 0;
  std::string tenant;  // empty: the user's own
  bool strict = false;
  Rights rights;
  std::optional<std::chrono::milliseconds> max_wait;  // none, also for the next two fields: see PolicyOptions
  std::optional<Limit> user_limit;
  std::optional<Limit> user_guarantee;
  uint32_t max_sessions = 0;
  std::string claim;  // empty: in none, unless `claim_per_user`
  bool claim_per_user = false;
  Limit claim_limit = 1.0;
  Limit claim_guarantee = uint64_t{0};

  bool has_claim() const { return claim_per_user || !claim.empty(); }
};

struct PolicyOptions {
  std::vector<PolicyRule> rules;
  Limit session_limit = 1.0;  // default for rules without a limit
  std::chrono::milliseconds max_wait = kMaxWait;
  std::optional<Limit> user_limit;
  std::optional<Limit> user_guarantee;
  size_t max_sessions_per_uid = 1024;
  size_t max_claims_per_uid = 64;  // made by the user
  uid_t daemon_uid = 0;            // has every right, like root
};

struct PolicyExplanation {
  struct Rule {
    std::string label;
    std::string place;
    bool matches = false;
    std::string why;  // the matching or failing condition
  };
  std::vector<Rule> rules;  // rules checked, in order: only the last can match
  SessionTerms terms;
  bool is_operator = false;  // root or the daemon's user: every right, whatever the rule says
};

// Immutable, so that any number of threads may use a policy.
class Policy {
 public:
  explicit Policy(PolicyOptions options) : options_(std::move(options)) {}

  SessionTerms TermsFor(const PolicySubject& subject) const;
  // Like TermsFor(), with reasons.
  PolicyExplanation Explain(const PolicySubject& subject) const;

  // nullptr: there is none.
  const PolicyRule* FindRule(absl::string_view label) const;

  size_t max_sessions_per_uid() const { return options_.max_sessions_per_uid; }
  size_t max_claims_per_uid() const { return options_.max_claims_per_uid; }
  std::chrono::milliseconds max_wait() const { return options_.max_wait; }

 private:
  bool IsOperator(const PolicySubject& subject) const;
  // `rule` may be null: none matched.
  SessionTerms Terms(const PolicyRule* rule, const PolicySubject& subject) const;

  const PolicyOptions options_;
};

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_IDENTITY_POLICY_H_
