// SPDX-License-Identifier: Apache-2.0
//
// Policy: who gets what. Rules by user, group, control group and session name; the first one that matches counts.
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

// Bytes that `limit` comes to on a device: floor(fraction * capacity), or the bytes, at most the capacity.
// REQUIRES: a fraction is within [0, 1].
uint64_t LimitBytes(const Limit& limit, uint64_t capacity_bytes);

// True when `pattern` fits all of `text`: * stands for any characters, ? for one.
bool GlobMatches(absl::string_view pattern, absl::string_view text);

struct Rights {
  bool client = true;    // may open sessions
  bool observer = true;  // may list and read the sessions of all users
  bool admin = false;    // may do everything; REQUIRES: the others are set, too

  friend bool operator==(const Rights& a, const Rights& b) {
    return a.client == b.client && a.observer == b.observer && a.admin == b.admin;
  }
};
inline constexpr Rights kEveryRight = {.client = true, .observer = true, .admin = true};

// The longest that a request may ever wait.
inline constexpr std::chrono::milliseconds kMaxWait = std::chrono::hours(1);

inline constexpr int kMaxPriority = 1000;

// What a session gets by the policy.
struct SessionTerms {
  std::string rule;               // its label; empty: no rule matched
  Limit limit = 1.0;              // the most that it may have when it opens
  Limit guarantee = uint64_t{0};  // kept free for it; at most the limit that it got
  int priority = 0;               // higher is more important
  std::string tenant;             // the trust domain
  bool strict = false;            // its memory passes to no other session as it is, not even of its tenant
  Rights rights;
  std::chrono::milliseconds max_wait = kMaxWait;  // of its requests
  // Of all sessions of its user together.
  std::optional<Limit> user_limit;
  std::optional<Limit> user_guarantee;
  uint32_t max_sessions = 0;  // of this rule, for each user; 0: no such bound
  // Whose limit it shares: its name; empty: that of its user.
  std::string claim;
  bool has_claims_tenant = false;   // `tenant` is the claim's own
  std::optional<ClaimId> claim_id;  // once it is in the claim
  Limit claim_limit = 1.0;          // of a claim that the policy makes: see PolicyRule
  Limit claim_guarantee = uint64_t{0};
  // Bounds on what its claim makes of these later: a claim of a user's own gives no more than the policy.
  int most_priority = kMaxPriority;
  std::chrono::milliseconds most_wait = kMaxWait;
};

// Whom the policy is asked about.
struct PolicySubject {
  uid_t uid = 0;
  std::vector<gid_t> gids;                  // the process's own group first
  std::optional<std::string> cgroup;        // version 2; none: not known
  std::optional<std::string> session_name;  // none: it is not about a session
};

// A checked rule of the configuration; config.proto says what each field means.
struct PolicyRule {
  std::string label;  // its name, or "rules[2]"
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
  std::optional<std::chrono::milliseconds> max_wait;  // these three: none: those of PolicyOptions
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
  Limit session_limit = 1.0;  // where no rule says another
  std::chrono::milliseconds max_wait = kMaxWait;
  std::optional<Limit> user_limit;
  std::optional<Limit> user_guarantee;
  size_t max_sessions_per_uid = 1024;
  size_t max_claims_per_uid = 64;  // of its own
  uid_t daemon_uid = 0;            // has every right, as root has
};

struct PolicyExplanation {
  struct Rule {
    std::string label;
    std::string place;
    bool matches = false;
    std::string why;  // what matched, or what did not
  };
  std::vector<Rule> rules;  // that were looked at, in order: only the last one can match
  SessionTerms terms;
  bool is_operator = false;  // root or the daemon's user: every right, whatever the rule says
};

// Never changes, so that any number of threads may ask.
class Policy {
 public:
  explicit Policy(PolicyOptions options) : options_(std::move(options)) {}

  SessionTerms TermsFor(const PolicySubject& subject) const;
  // The same with reasons.
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
