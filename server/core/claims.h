// SPDX-License-Identifier: Apache-2.0
//
// Claims: the share of the devices given to several processes together. A claim outlives its sessions and the daemon,
// until an operator removes it. Clients join a claim through its sockets.
#ifndef VRAMBROKER_SERVER_CORE_CLAIMS_H_
#define VRAMBROKER_SERVER_CORE_CLAIMS_H_

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/container/btree_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "allocator/base/ids.h"
#include "allocator/base/mutex.h"
#include "server/base/log_line.h"
#include "server/base/steady_time.h"
#include "server/base/user_slots.h"
#include "server/base/worker_pool.h"
#include "server/core/session_limits.h"
#include "server/identity/caller.h"
#include "server/identity/claim_dir.h"
#include "server/identity/policy.h"
#include "server/pool/segment_pool.h"
#include "server/requests/waiting_requests.h"
#include "server/sessions/session_registry.h"

namespace vrambroker {

// Terms of a claim, set by an operator.
struct ClaimTerms {
  Limit limit = 1.0;              // of each device
  Limit guarantee = uint64_t{0};  // of each device
  int priority = 0;
  std::string tenant;                                 // empty: a tenant of the claim's own
  std::optional<std::chrono::milliseconds> max_wait;  // nullopt: the daemon's
  ClaimOwner owner;
  std::vector<size_t> devices;  // usable devices; empty: all
  absl::btree_map<std::string, std::string> labels;

  friend bool operator==(const ClaimTerms&, const ClaimTerms&) = default;
};

enum class ClaimState { kActive, kDraining, kRevoked };

const char* ClaimStateName(ClaimState state);  // "active", "draining", "revoked"

// Terms of a claim made by a rule of the policy.
struct RuleTerms {
  Limit limit = 1.0;
  Limit guarantee = uint64_t{0};

  friend bool operator==(const RuleTerms&, const RuleTerms&) = default;
};

struct Claim {
  ClaimId id{};
  std::string name;
  ClaimTerms terms;
  ClaimState state = ClaimState::kActive;
  std::chrono::system_clock::time_point created;
  // Label of the policy's rule if the policy made the claim, for the lifetime of the sessions; empty: made by an
  // operator. A claim of the policy has no sockets, and is not saved.
  std::string rule;
  // Terms set by the rule. `terms` lacks the guarantee while the pools cannot give it.
  std::optional<RuleTerms> rule_terms;
  SteadyTime next_try = SteadyTime::min();  // to give the guarantee; min(): not tried yet
  bool is_being_made = false;               // not served yet
  bool is_own = false;                      // made by its owner, within the policy's bounds for owners
  // After the end of this process the claim is removed as soon as it is empty.
  std::optional<ProcessId> maker{};
  bool has_lost_maker = false;
  size_t sessions = 0;                        // open, or being opened
  SteadyTime keep_until = SteadyTime::min();  // keeps an empty claim that is to be removed
};

// A log line naming the claim.
LogLine ClaimLine(absl::string_view event, const Claim& claim);

// The requester of a change of claims.
struct ClaimAsker {
  Caller caller;
  // Policy's terms for a caller without ADMIN, limited to own claims; nullopt: an operator.
  std::optional<SessionTerms> rule;
  size_t max_claims = 0;  // most claims of such a caller
};

// Requested changes; nullopt: unchanged.
struct ClaimChange {
  std::optional<Limit> limit;
  std::optional<Limit> guarantee;
  std::optional<int64_t> priority;
  std::optional<std::chrono::milliseconds> max_wait;
  std::optional<absl::btree_map<std::string, std::string>> labels;
};

// Hooks into the daemon. Only the hooks about members may be called from two threads at a time.
struct ClaimHooks {
  // Makes the claim's sockets and serves connecting clients. After an error stop_serving() removes the remains.
  std::function<absl::Status(const Claim&)> serve = [](const Claim&) { return absl::OkStatus(); };
  // Stops serving, and removes the sockets.
  std::function<void(const Claim&)> stop_serving = [](const Claim&) {};
  // Saves the complete list of claims for the next daemon.
  std::function<absl::Status(const std::vector<Claim>&)> save = [](const std::vector<Claim>&) {
    return absl::OkStatus();
  };
  // Saves the state of a claim already saved, even when the disk is full.
  std::function<absl::Status(const Claim&)> save_state = [](const Claim&) { return absl::UnimplementedError(""); };
  // Records that the process has a session in the claim.
  std::function<void(const ProcessId& process, const std::string& claim)> note_member = [](const ProcessId&,
                                                                                           const std::string&) {};
  // Records that the process, a forked child, can touch memory left by an ended session of the claim.
  std::function<void(const ProcessId& process, const std::string& claim)> note_holder = [](const ProcessId&,
                                                                                           const std::string&) {};
  // Called when the claim is removed: no process has a session in it.
  std::function<void(const std::string& claim)> forget_members = [](const std::string&) {};
  // Rejects names unusable for a directory.
  std::function<absl::Status(absl::string_view name)> check_name = CheckClaimName;
  // Most claims of users' own served at a time: each uses file descriptors.
  size_t most_own = std::numeric_limits<size_t>::max();
};

// Thread-safe. A worker makes changes of claims, sequentially, operators' before users', and answers through the
// callback.
class Claims {
 public:
  static constexpr size_t kMaxClaims = 4096;
  static constexpr size_t kMaxOwnClaims = kMaxClaims / 4 * 3;  // users' own claims: the rest is reserved for operators
  static constexpr size_t kMaxLabels = 16;
  static constexpr size_t kMaxLabelValue = 128;
  static constexpr size_t kMaxOwnLabelBytes = 512;  // keys and values of a user's own claim together

  struct Options {
    std::chrono::milliseconds reclaim_timeout;
    std::function<std::chrono::milliseconds()> max_wait;  // default for claims without a max_wait
    std::function<void(const SessionPtr& session, const std::string& reason)> end_session;
    // The claim now exists, or is gone. `own_tenant`: the tenant if no claim shares the tenant; empty: the tenant is
    // shared.
    std::function<void(const Claim& claim)> added;
    std::function<void(const Claim& claim, const std::string& own_tenant)> removed;
    ClaimHooks hooks;
  };
  // All arguments outlive the object.
  Claims(Options options, std::vector<SegmentPool*> pools, Executor* workers, const SessionRegistry* sessions,
         WaitingRequests* waiting, SessionLimits* limits);

  // ---- Operators ----

  using Done = std::function<void(absl::StatusOr<Claim>)>;
  // Errors as the RPCs CreateClaim, UpdateClaim and DeleteClaim. An error leaves everything unchanged. `is_ephemeral`:
  // the claim ends with the requester's process, and an empty name is replaced by a generated name.
  void Create(const std::string& name, const ClaimTerms& terms, const Done& done, const ClaimAsker& asker = {},
              bool is_ephemeral = false);
  void Update(const std::string& name, const ClaimChange& change, const Done& done, const ClaimAsker& asker = {});
  // The current claim, or (is_removed) its last state.
  struct Deleted {
    Claim claim;
    bool is_removed = false;
  };
  void Delete(const std::string& name, bool revoke, const std::function<void(absl::StatusOr<Deleted>)>& done,
              const ClaimAsker& asker = {});
  std::vector<Claim> GetAll() const ABSL_LOCKS_EXCLUDED(mu_);  // by name
  // NotFound.
  absl::StatusOr<Claim> Find(absl::string_view name) const ABSL_LOCKS_EXCLUDED(mu_);
  // The claim's limit on a device.
  uint64_t LimitOn(const Claim& claim, size_t device) const { return BytesOn(claim.terms, claim.terms.limit, device); }

  // ---- The start ----

  // Restores the last daemon's claims, with limits and guarantees. A guarantee too large by now is logged and dropped.
  // Call before any charge.
  void Restore(std::vector<Claim> claims) ABSL_LOCKS_EXCLUDED(mu_);
  // Sets the former members of each claim, allowed to return to draining claims.
  void SetEarlierMembers(absl::btree_map<ProcessId, std::string> members) ABSL_LOCKS_EXCLUDED(mu_);
  // Starts serving the restored claims. If the sockets cannot be made, logs the claim and keeps its terms.
  void ServeRestored() ABSL_LOCKS_EXCLUDED(mu_);

  // The daemon stops: claims emptied from now on are left to the next daemon.
  void StopRemoving() { is_stopping_ = true; }

  // ---- Sessions ----

  // Rights of a caller through a claim's socket, apart from any session. FailedPrecondition: the claim is removed.
  // PermissionDenied: the caller does not own the claim.
  absl::StatusOr<SessionTerms> TermsOf(const Caller& caller) const ABSL_LOCKS_EXCLUDED(mu_);
  // Whether per-user bounds count the caller separately in this claim: true for the owner of an operator's claim, and
  // for root, the user of container processes. For other callers, bounds apply through all sockets together as without
  // claims.
  bool CountsInClaim(ClaimId claim, const Caller& caller) const ABSL_LOCKS_EXCLUDED(mu_);
  // As TermsOf(), and keeps the claim until Leave(). FailedPrecondition: the claim takes no more sessions. A draining
  // claim takes sessions of `process` if the process was in the claim before the daemon restarted. `by_policy`: the
  // policy's terms for the process without claims; an upper bound in a user's own claim. PermissionDenied where a
  // user's own claim would escape a bound.
  absl::StatusOr<SessionTerms> Enter(const Caller& caller, const ProcessId& process, const SessionTerms& by_policy)
      ABSL_LOCKS_EXCLUDED(mu_);
  // As Enter(), for a session put into the claim named in `terms` by a rule of the policy. Makes a missing claim.
  // ResourceExhausted: the guarantee is not free. Unavailable: an operator is just creating it.
  absl::StatusOr<ClaimId> EnterByPolicy(const SessionTerms& terms, const ProcessId& process)
      ABSL_LOCKS_EXCLUDED(making_mu_, mu_);
  // The policy was reloaded: claims made by its rules get the rules' current terms.
  void UpdateByPolicy(const Policy& policy) ABSL_LOCKS_EXCLUDED(mu_);
  // The entered session is now published: applies changes made during the opening. `policy`: the current policy.
  void Published(const SessionPtr& session, const Policy& policy) ABSL_LOCKS_EXCLUDED(mu_);
  // The session of Enter() has ended, or was not opened.
  void Leave(ClaimId claim) ABSL_LOCKS_EXCLUDED(mu_);
  // Removes empty claims marked for removal. Cheap when there are none.
  void RemoveEmpty();
  // Call several times a second, from one thread. Runs RemoveEmpty(), and retries failed work: sockets, guarantees of
  // rules, saving the file.
  void Tick();

 private:
  // Bodies of the changes, run on a worker.
  absl::StatusOr<Claim> CreateNow(const std::string& name, ClaimTerms terms, const ClaimAsker& asker, bool is_ephemeral)
      ABSL_LOCKS_EXCLUDED(making_mu_, mu_);
  absl::StatusOr<Claim> UpdateNow(const std::string& name, const ClaimChange& change, const ClaimAsker& asker)
      ABSL_LOCKS_EXCLUDED(mu_);
  absl::StatusOr<Deleted> DeleteNow(const std::string& name, bool revoke, const ClaimAsker& asker)
      ABSL_LOCKS_EXCLUDED(mu_);
  void RemoveEmptyNow() ABSL_LOCKS_EXCLUDED(mu_);

  // Checks for users without the right ADMIN, bounded by the policy. Omitted terms are filled from the rule.
  static absl::Status CheckMayHaveOwn(const SessionTerms& rule, uid_t uid);
  absl::Status BoundOwn(const ClaimAsker& asker, ClaimTerms& terms) const;
  // Bounds the terms of a session in a user's own claim by `by_policy`, possibly changed since the claim was made.
  static void BoundSession(const SessionTerms& by_policy, SessionTerms& terms);
  static absl::Status CheckOwnName(const std::string& name, uid_t uid);
  absl::Status CheckOwnNumber(const ClaimAsker& asker) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Status TooManyOwn() const;
  size_t MostOwn() const { return std::min(kMaxOwnClaims, options_.hooks.most_own); }
  // The claim of the name, if the asker may change it. The error does not tell another user's claim from a missing
  // claim.
  absl::StatusOr<Claim> FindToChange(const std::string& name, const ClaimAsker& asker) const ABSL_LOCKS_EXCLUDED(mu_);
  absl::Status CheckTerms(const ClaimTerms& terms) const;
  absl::Status CheckDevices(const ClaimTerms& terms) const;
  absl::Status CheckGuaranteeFits(const ClaimTerms& terms) const;
  absl::Status CheckHasAnything(const ClaimTerms& terms) const;
  uint64_t BytesOn(const ClaimTerms& terms, const Limit& limit, size_t device) const;
  uint64_t GuaranteeOn(const ClaimTerms& terms, size_t device) const;
  // Raises guarantees to `terms`, on all devices or on none. `reclaims`: (slow) asks sessions to give back the missing
  // memory.
  absl::Status RaiseGuarantee(ClaimId claim, const ClaimTerms& terms, bool reclaims);
  // Lowers guarantees to `terms`.
  void LowerGuarantee(ClaimId claim, const ClaimTerms& terms);
  // Bounds the sum of the guarantees of the claim's sessions by the limits `a` and `b` of the claim, on all devices or
  // on none. InvalidArgument: the sum is above a limit.
  absl::Status BoundSessionGuarantees(ClaimId claim, const ClaimTerms& a, const ClaimTerms& b);
  // Logs devices where the sessions' guarantees exceed the claim's limit; the limit prevails.
  void WarnOfCutGuarantees(const Claim& claim) const;
  // (slow) Asks sessions for the reclaimable memory missing for a guarantee of the claim.
  void ReclaimFor(ClaimId claim, int device, uint64_t guarantee_bytes);
  void SetLimit(const Claim& claim);
  // Asks the claim's sessions for reclaimable memory above the claim's limit.
  void ReclaimExcess(const Claim& claim);
  // Saves all claims, with `changed` replacing the claim of its name, or without `removed`.
  absl::Status Save(const Claim* changed, const Claim* removed) const ABSL_LOCKS_EXCLUDED(mu_);
  // Saves a claim after a change of only the state.
  absl::Status SaveState(const Claim& claim) const ABSL_LOCKS_EXCLUDED(mu_);
  // Retries saving all claims.
  void SaveAgain() ABSL_LOCKS_EXCLUDED(mu_);
  // Stores the claim, except the number of sessions and the rule's terms.
  void Put(const Claim& claim) ABSL_LOCKS_EXCLUDED(mu_);
  // Puts the claim into effect, also for its sessions. The guarantee must be raised already.
  void Apply(const Claim& claim, const ClaimTerms& before) ABSL_LOCKS_EXCLUDED(mu_);
  // Gives a claim made by the policy the current terms of its rule, or else of `rule`. If the rule is gone or names
  // another claim, the claim stays unchanged while it has sessions.
  void UpdateByPolicy(const Claim& claim, absl::string_view rule, const Policy& policy) ABSL_LOCKS_EXCLUDED(mu_);
  // Applies the result of the last UpdateByPolicy(). Logs a refused guarantee at the first try only.
  void ApplyRule(const std::string& name) ABSL_LOCKS_EXCLUDED(mu_);
  void ApplyRulesAgain() ABSL_LOCKS_EXCLUDED(mu_);
  // Undoes the steps of a failed creation. Returns `why`.
  absl::Status GiveUp(const Claim& claim, bool is_saved, absl::Status why) ABSL_LOCKS_EXCLUDED(mu_);
  // Serves the claims in `unserved_`: operators' first, then as many users' own claims as allowed.
  void ServeUnserved(bool is_first_try) ABSL_LOCKS_EXCLUDED(mu_);
  // Marks claims for removal once the makers have ended. `all`: also checks makers without a descriptor.
  void LookAtMakers(bool all) ABSL_LOCKS_EXCLUDED(mu_);
  void NoteHolder(pid_t process, ClaimId claim) const ABSL_LOCKS_EXCLUDED(mu_);
  void EndSessionsOf(const Claim& claim);
  // Removes the claim, also from the pools, unless a session has entered. No session can enter afterwards.
  bool RemoveIfEmpty(const Claim& claim) ABSL_LOCKS_EXCLUDED(making_mu_, mu_);
  bool HasNothing(ClaimId claim) const;
  // FailedPrecondition for a claim made by the policy.
  static absl::Status CheckOperators(const Claim& claim);
  static absl::Status ThereIs(const Claim& claim);
  static absl::Status TooMany();
  std::string LimitsText(const Claim& claim) const;
  bool TakesSessions(const Claim& claim, const ProcessId& process) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  size_t NumberOf(bool by_policy) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  std::vector<SessionPtr> SessionsOf(ClaimId claim) const;
  SessionTerms TermsOf(const Claim& claim) const;
  static absl::Status CheckOwner(const Claim& claim, const Caller& caller);
  absl::StatusOr<Claim> FindFor(const Caller& caller) const ABSL_LOCKS_EXCLUDED(mu_);
  template <typename Result>
  void Submit(const ClaimAsker& asker, const std::function<void(absl::StatusOr<Result>)>& done,
              std::function<absl::StatusOr<Result>()> change);

  const Options options_;
  const std::vector<SegmentPool*> pools_;
  const SessionRegistry& sessions_;
  WaitingRequests& waiting_;
  SessionLimits& limits_;
  UserSlots own_changes_;  // operators' changes always find room in `changes_`
  const std::shared_ptr<SerialQueue> changes_;
  std::atomic<bool> any_leaving_{false};  // some claims are to be removed
  std::atomic<bool> is_removing_{false};
  std::atomic<bool> is_stopping_{false};

  std::atomic<bool> any_rule_unapplied_{false};  // a claim lacks terms of its rule
  std::atomic<bool> any_unsaved_{false};         // the file differs from `claims_`
  std::atomic<bool> any_unserved_{false};
  absl::flat_hash_set<ClaimId> unserved_;    // restored claims without sockets; used at the start, then by changes_
  SteadyTime next_try_ = SteadyTime::min();  // of Tick()

  // Held while a claim of the policy is made, an operator's claim is added, or a claim is removed, so the pools hold
  // each claim once.
  Mutex making_mu_ ABSL_ACQUIRED_AFTER(lock_level::kLimits)
      ABSL_ACQUIRED_BEFORE(lock_level::kTimer){lock_level::kLimits};
  mutable Mutex mu_;  // guards only the members below; no other lock is taken under it
  absl::btree_map<std::string, Claim, std::less<>> claims_ ABSL_GUARDED_BY(mu_);
  absl::btree_map<ClaimId, std::string> names_ ABSL_GUARDED_BY(mu_);
  absl::btree_map<ProcessId, std::string> earlier_ ABSL_GUARDED_BY(mu_);
  // Descriptors, readable once the maker has ended, of claims with live makers; null: unknown.
  absl::btree_map<ClaimId, std::shared_ptr<const UniqueFd>> makers_ ABSL_GUARDED_BY(mu_);
  uint64_t next_id_ ABSL_GUARDED_BY(mu_) = 1;
};

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_CORE_CLAIMS_H_
