// SPDX-License-Identifier: Apache-2.0
//
// Claims: what several processes may have of the devices together. A claim outlives its sessions, and the daemon: it is
// there until an operator removes it. Its sockets say who is in it.
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

// What an operator gives a claim.
struct ClaimTerms {
  Limit limit = 1.0;              // of each device
  Limit guarantee = uint64_t{0};  // the same
  int priority = 0;
  std::string tenant;                                 // empty: its own
  std::optional<std::chrono::milliseconds> max_wait;  // none: the daemon's
  ClaimOwner owner;
  std::vector<size_t> devices;  // it has nothing of the others; empty: all
  absl::btree_map<std::string, std::string> labels;

  friend bool operator==(const ClaimTerms&, const ClaimTerms&) = default;
};

enum class ClaimState { kActive, kDraining, kRevoked };

const char* ClaimStateName(ClaimState state);  // "active", "draining", "revoked"

// What a rule of the policy says of a claim.
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
  // The label of the policy's rule that has made it, for as long as it has sessions; empty: an operator has. One that
  // the policy has made has no sockets, and is not saved.
  std::string rule;
  // What its rule says. `terms` lacks the guarantee for as long as that cannot be given.
  std::optional<RuleTerms> rule_terms;
  SteadyTime next_try = SteadyTime::min();  // to give it; min(): it has not been tried
  bool is_being_made = false;               // it is not served yet
  bool is_own = false;                      // its owner has made it, within what the policy gives that
  // The process that it goes with. When that has gone the claim is removed as soon as it has nothing.
  std::optional<ProcessId> maker{};
  bool has_lost_maker = false;
  size_t sessions = 0;                        // open, or being opened
  SteadyTime keep_until = SteadyTime::min();  // even if it is to be removed, and has nothing
};

// A line of the log that names the claim.
LogLine ClaimLine(absl::string_view event, const Claim& claim);

// Who changes claims.
struct ClaimAsker {
  Caller caller;
  // What the policy gives a caller who may have claims of its own, and no others; none: an operator.
  std::optional<SessionTerms> rule;
  size_t max_claims = 0;  // that such a caller may have
};

// What is to be changed; none: nothing.
struct ClaimChange {
  std::optional<Limit> limit;
  std::optional<Limit> guarantee;
  std::optional<int64_t> priority;
  std::optional<std::chrono::milliseconds> max_wait;
  std::optional<absl::btree_map<std::string, std::string>> labels;
};

// What claims need of their surroundings. But for those about members, none of them is called from two threads at a
// time.
struct ClaimHooks {
  // Makes the claim's sockets and serves who connects to them. After an error stop_serving() removes what there is.
  std::function<absl::Status(const Claim&)> serve = [](const Claim&) { return absl::OkStatus(); };
  // No more, and removes them.
  std::function<void(const Claim&)> stop_serving = [](const Claim&) {};
  // These are all that there are, from now on, also for the next daemon.
  std::function<absl::Status(const std::vector<Claim>&)> save = [](const std::vector<Claim>&) {
    return absl::OkStatus();
  };
  // The state of one that was saved is what it says now, also for the next daemon, and also when the disk is full.
  std::function<absl::Status(const Claim&)> save_state = [](const Claim&) { return absl::UnimplementedError(""); };
  // The process has a session in the claim.
  std::function<void(const ProcessId& process, const std::string& claim)> note_member = [](const ProcessId&,
                                                                                           const std::string&) {};
  // The process can touch what an ended session of the claim has left, as a child that it has forked.
  std::function<void(const ProcessId& process, const std::string& claim)> note_holder = [](const ProcessId&,
                                                                                           const std::string&) {};
  // The claim is no more: nobody has a session in it.
  std::function<void(const std::string& claim)> forget_members = [](const std::string&) {};
  // Of names that are no directory's.
  std::function<absl::Status(absl::string_view name)> check_name = CheckClaimName;
  // Claims of users' own that may be served at a time: each has file descriptors.
  size_t most_own = std::numeric_limits<size_t>::max();
};

// Thread-safe. What changes claims is done by a worker, one change after the other, operators' before those of users,
// and answers through its callback.
class Claims {
 public:
  static constexpr size_t kMaxClaims = 4096;
  static constexpr size_t kMaxOwnClaims = kMaxClaims / 4 * 3;  // of users: operators have the rest in any case
  static constexpr size_t kMaxLabels = 16;
  static constexpr size_t kMaxLabelValue = 128;
  static constexpr size_t kMaxOwnLabelBytes = 512;  // of a user's own claim, keys and values together

  struct Options {
    std::chrono::milliseconds reclaim_timeout;
    std::function<std::chrono::milliseconds()> max_wait;  // of a claim that says nothing of it
    std::function<void(const SessionPtr& session, const std::string& reason)> end_session;
    // The claim is there from now on, or no more. `own_tenant`: its tenant is nobody else's; empty: it is.
    std::function<void(const Claim& claim)> added;
    std::function<void(const Claim& claim, const std::string& own_tenant)> removed;
    ClaimHooks hooks;
  };
  // All outlive it.
  Claims(Options options, std::vector<SegmentPool*> pools, Executor* workers, const SessionRegistry* sessions,
         WaitingRequests* waiting, SessionLimits* limits);

  // ---- Operators ----

  using Done = std::function<void(absl::StatusOr<Claim>)>;
  // Errors as those of the RPCs CreateClaim, UpdateClaim and DeleteClaim. Nothing has changed after an error.
  // `is_ephemeral`: the claim goes with the asker's process. An empty name is chosen here then.
  void Create(const std::string& name, const ClaimTerms& terms, const Done& done, const ClaimAsker& asker = {},
              bool is_ephemeral = false);
  void Update(const std::string& name, const ClaimChange& change, const Done& done, const ClaimAsker& asker = {});
  // Answers with the claim as it stands, or as it stood: is_removed.
  struct Deleted {
    Claim claim;
    bool is_removed = false;
  };
  void Delete(const std::string& name, bool revoke, const std::function<void(absl::StatusOr<Deleted>)>& done,
              const ClaimAsker& asker = {});
  std::vector<Claim> GetAll() const ABSL_LOCKS_EXCLUDED(mu_);  // by name
  // NotFound.
  absl::StatusOr<Claim> Find(absl::string_view name) const ABSL_LOCKS_EXCLUDED(mu_);
  // What the claim may have of a device.
  uint64_t LimitOn(const Claim& claim, size_t device) const { return BytesOn(claim.terms, claim.terms.limit, device); }

  // ---- The start ----

  // Those of the last daemon, with their limits and guarantees; a guarantee that cannot be given any more is logged,
  // and left out. Before anything is charged.
  void Restore(std::vector<Claim> claims) ABSL_LOCKS_EXCLUDED(mu_);
  // Which processes were in which of them: those may come back to claims that drain.
  void SetEarlierMembers(absl::btree_map<ProcessId, std::string> members) ABSL_LOCKS_EXCLUDED(mu_);
  // From now on they are served. One whose sockets cannot be made is logged, and keeps what it has.
  void ServeRestored() ABSL_LOCKS_EXCLUDED(mu_);

  // The daemon stops: claims whose sessions end now are the next daemon's.
  void StopRemoving() { is_stopping_ = true; }

  // ---- Sessions ----

  // What a caller through a claim's socket may do, apart from any session. FailedPrecondition: the claim is removed.
  // PermissionDenied: the caller is not its owner.
  absl::StatusOr<SessionTerms> TermsOf(const Caller& caller) const ABSL_LOCKS_EXCLUDED(mu_);
  // Whether bounds on what each user may have count such a caller apart from its user: the owner of the claim, and
  // root, which processes of containers are. Others have as much through all sockets together as without claims.
  bool CountsInClaim(ClaimId claim, const Caller& caller) const ABSL_LOCKS_EXCLUDED(mu_);
  // As TermsOf(), and the claim is not removed until Leave(). FailedPrecondition: it takes no more sessions. A claim
  // that drains takes those of `process` if it was in the claim before the daemon was started again.
  // `by_policy`: what the policy gives the process apart from claims. No more than that for a claim of a user's own;
  // PermissionDenied where such a claim would escape a bound.
  absl::StatusOr<SessionTerms> Enter(const Caller& caller, const ProcessId& process, const SessionTerms& by_policy)
      ABSL_LOCKS_EXCLUDED(mu_);
  // The same for a session that a rule of the policy puts into the claim that its `terms` name, which is made if there
  // is none. ResourceExhausted: its guarantee is not free. Unavailable: an operator is just creating it.
  absl::StatusOr<ClaimId> EnterByPolicy(const SessionTerms& terms, const ProcessId& process)
      ABSL_LOCKS_EXCLUDED(making_mu_, mu_);
  // The policy was read again: the claims that it has made have what their rules say now.
  void UpdateByPolicy(const Policy& policy) ABSL_LOCKS_EXCLUDED(mu_);
  // The session that has entered can be found from now on: it gets what was changed while it was opened.
  // `policy`: as it is by now.
  void Published(const SessionPtr& session, const Policy& policy) ABSL_LOCKS_EXCLUDED(mu_);
  // The session that Enter() was for has ended, or was not opened.
  void Leave(ClaimId claim) ABSL_LOCKS_EXCLUDED(mu_);
  // Removes those that are to be removed, and have nothing any more. Cheap when there are none.
  void RemoveEmpty();
  // Several times a second, from one thread: RemoveEmpty(), and tries again what could not be done: sockets, guarantees
  // of rules, what the file is to say.
  void Tick();

 private:
  // What changes claims; on a worker.
  absl::StatusOr<Claim> CreateNow(const std::string& name, ClaimTerms terms, const ClaimAsker& asker, bool is_ephemeral)
      ABSL_LOCKS_EXCLUDED(making_mu_, mu_);
  absl::StatusOr<Claim> UpdateNow(const std::string& name, const ClaimChange& change, const ClaimAsker& asker)
      ABSL_LOCKS_EXCLUDED(mu_);
  absl::StatusOr<Deleted> DeleteNow(const std::string& name, bool revoke, const ClaimAsker& asker)
      ABSL_LOCKS_EXCLUDED(mu_);
  void RemoveEmptyNow() ABSL_LOCKS_EXCLUDED(mu_);

  // Of users without the right ADMIN: within what the policy gives them. What the terms leave out is the rule's.
  static absl::Status CheckMayHaveOwn(const SessionTerms& rule, uid_t uid);
  absl::Status BoundOwn(const ClaimAsker& asker, ClaimTerms& terms) const;
  // The terms of a session in such a claim: no more than `by_policy`, which may have changed since the claim was made.
  static void BoundSession(const SessionTerms& by_policy, SessionTerms& terms);
  static absl::Status CheckOwnName(const std::string& name, uid_t uid);
  absl::Status CheckOwnNumber(const ClaimAsker& asker) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Status TooManyOwn() const;
  size_t MostOwn() const { return std::min(kMaxOwnClaims, options_.hooks.most_own); }
  // The claim of the name, which the asker may change; one that is not its own is not told from one that is not there.
  absl::StatusOr<Claim> FindToChange(const std::string& name, const ClaimAsker& asker) const ABSL_LOCKS_EXCLUDED(mu_);
  absl::Status CheckTerms(const ClaimTerms& terms) const;
  absl::Status CheckDevices(const ClaimTerms& terms) const;
  absl::Status CheckGuaranteeFits(const ClaimTerms& terms) const;
  absl::Status CheckHasAnything(const ClaimTerms& terms) const;
  uint64_t BytesOn(const ClaimTerms& terms, const Limit& limit, size_t device) const;
  uint64_t GuaranteeOn(const ClaimTerms& terms, size_t device) const;
  // To what the terms say, where that is more: on all devices, or on none. `reclaims`: (slow) others are asked to give
  // back what it lacks.
  absl::Status RaiseGuarantee(ClaimId claim, const ClaimTerms& terms, bool reclaims);
  // To what the terms say, where that is less.
  void LowerGuarantee(ClaimId claim, const ClaimTerms& terms);
  // Bounds what the guarantees of the claim's sessions come to by the limits `a` and `b` of the claim, from now on: on
  // all devices, or on none. InvalidArgument: they come to more.
  absl::Status BoundSessionGuarantees(ClaimId claim, const ClaimTerms& a, const ClaimTerms& b);
  // Says where these come to more than the claim's limit, which holds.
  void WarnOfCutGuarantees(const Claim& claim) const;
  // (slow) Has others give back what a guarantee of the claim lacks, as far as it is reclaimable.
  void ReclaimFor(ClaimId claim, int device, uint64_t guarantee_bytes);
  void SetLimit(const Claim& claim);
  // Has the claim's sessions give back what is above its limit, as far as it is reclaimable.
  void ReclaimExcess(const Claim& claim);
  // All of them, with `changed` in place of the claim of its name, or without `removed`.
  absl::Status Save(const Claim* changed, const Claim* removed) const ABSL_LOCKS_EXCLUDED(mu_);
  // The claim, whose state has changed and nothing else.
  absl::Status SaveState(const Claim& claim) const ABSL_LOCKS_EXCLUDED(mu_);
  // Tries again to save all claims.
  void SaveAgain() ABSL_LOCKS_EXCLUDED(mu_);
  // But for the number of sessions, and what a rule says.
  void Put(const Claim& claim) ABSL_LOCKS_EXCLUDED(mu_);
  // The claim is as it says from now on, for its sessions, too. Its guarantee is raised already.
  void Apply(const Claim& claim, const ClaimTerms& before) ABSL_LOCKS_EXCLUDED(mu_);
  // The claim, if the policy has made it, is to have what its rule says, or else `rule`. One of a rule that has gone,
  // or has another claim, stays as it is, for as long as it has sessions.
  void UpdateByPolicy(const Claim& claim, absl::string_view rule, const Policy& policy) ABSL_LOCKS_EXCLUDED(mu_);
  // What the last UpdateByPolicy() said. A guarantee that cannot be given is logged when it is tried first.
  void ApplyRule(const std::string& name) ABSL_LOCKS_EXCLUDED(mu_);
  void ApplyRulesAgain() ABSL_LOCKS_EXCLUDED(mu_);
  // Undoes what was done for a claim that could not be created. Returns `why`.
  absl::Status GiveUp(const Claim& claim, bool is_saved, absl::Status why) ABSL_LOCKS_EXCLUDED(mu_);
  // Serves the claims in `unserved_`: operators' first, and as many of users' own as may be served.
  void ServeUnserved(bool is_first_try) ABSL_LOCKS_EXCLUDED(mu_);
  // Claims whose makers have ended may be removed from now on. `all`: those without a descriptor, too.
  void LookAtMakers(bool all) ABSL_LOCKS_EXCLUDED(mu_);
  void NoteHolder(pid_t process, ClaimId claim) const ABSL_LOCKS_EXCLUDED(mu_);
  void EndSessionsOf(const Claim& claim);
  // Unless somebody has entered: nobody enters from then on, and the pools know nothing of it.
  bool RemoveIfEmpty(const Claim& claim) ABSL_LOCKS_EXCLUDED(making_mu_, mu_);
  bool HasNothing(ClaimId claim) const;
  // FailedPrecondition for one that the policy makes.
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
  UserSlots own_changes_;  // those by operators find room in `changes_` all the same
  const std::shared_ptr<SerialQueue> changes_;
  std::atomic<bool> any_leaving_{false};  // some are to be removed
  std::atomic<bool> is_removing_{false};
  std::atomic<bool> is_stopping_{false};

  std::atomic<bool> any_rule_unapplied_{false};  // a claim lacks something that its rule says
  std::atomic<bool> any_unsaved_{false};         // the file says something else than what is here
  std::atomic<bool> any_unserved_{false};
  absl::flat_hash_set<ClaimId> unserved_;    // restored ones without sockets; of the start, then of changes_
  SteadyTime next_try_ = SteadyTime::min();  // of Tick()

  // Held while a claim of the policy is made, while an operator's comes to be there, and while one is removed: what it
  // has of the pools is there once.
  Mutex making_mu_ ABSL_ACQUIRED_AFTER(lock_level::kLimits)
      ABSL_ACQUIRED_BEFORE(lock_level::kTimer){lock_level::kLimits};
  mutable Mutex mu_;  // held for nothing but this; no other lock is taken
  absl::btree_map<std::string, Claim, std::less<>> claims_ ABSL_GUARDED_BY(mu_);
  absl::btree_map<ClaimId, std::string> names_ ABSL_GUARDED_BY(mu_);
  absl::btree_map<ProcessId, std::string> earlier_ ABSL_GUARDED_BY(mu_);
  // Of claims whose makers live: what can be read when these end; null: not known.
  absl::btree_map<ClaimId, std::shared_ptr<const UniqueFd>> makers_ ABSL_GUARDED_BY(mu_);
  uint64_t next_id_ ABSL_GUARDED_BY(mu_) = 1;
};

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_CORE_CLAIMS_H_
