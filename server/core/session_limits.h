// SPDX-License-Identifier: Apache-2.0
//
// SessionLimits: limit, guarantee and priority of a live session, set by operators or by the policy. Operators'
// settings survive a restart of the daemon (SavedSettings).
#ifndef VRAMBROKER_SERVER_CORE_SESSION_LIMITS_H_
#define VRAMBROKER_SERVER_CORE_SESSION_LIMITS_H_

#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <optional>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "allocator/base/ids.h"
#include "allocator/base/mutex.h"
#include "server/identity/policy.h"
#include "server/identity/saved_settings.h"
#include "server/pool/segment_pool.h"
#include "server/requests/waiting_requests.h"
#include "server/sessions/session.h"

namespace vrambroker {

// InvalidArgument for a fraction outside of [0, 1].
absl::Status CheckLimit(absl::string_view field, const Limit& limit);

// Thread-safe. No call blocks.
class SessionLimits {
 public:
  using Done = std::function<void(absl::Status)>;

  // All arguments outlive the object. `pools` are indexed by device.
  SessionLimits(std::vector<SegmentPool*> pools, std::chrono::milliseconds reclaim_timeout, WaitingRequests* waiting,
                SavedSettings* settings);

  // Asks the client to give back memory reserved above the new limit, as far as it is reclaimable; the rest stays.
  // InvalidArgument below the guarantee.
  absl::Status SetLimit(const SessionPtr& session, const Limit& limit) ABSL_LOCKS_EXCLUDED(mu_);
  // Sets the guarantee on all devices or on none. Answers when other sessions have given up the memory needed, or will
  // not. Errors: see Ledger::SetGuarantee(), as ResourceExhausted. Guarantees of a session change sequentially, in call
  // order, so the last answered change holds.
  void SetGuarantee(const SessionPtr& session, const Limit& guarantee, const Done& done);
  // Tells the session its current limit: the lower of the session's and the claim's.
  void TellLimit(const SessionPtr& session) ABSL_LOCKS_EXCLUDED(mu_);
  // As TellLimit(), but without telling the client, not connected yet.
  void UpdateLimit(const SessionPtr& session) ABSL_LOCKS_EXCLUDED(mu_);
  // Gives a new session its requested guarantee, or (nullopt) all that the policy allows. PermissionDenied above the
  // policy's amount; further errors as SetGuarantee(). After an error, close the session. A guarantee set by an
  // operator before the restart takes precedence. `goes_on`: the session ran before the daemon was started. Such a
  // session may be in its own way until the daemon knows the session's memory. So the session is answered at once, and
  // is owed a guarantee without room: see GiveOwed(). Meanwhile, a session whose guarantee an operator had set gets the
  // guarantee of its client or of its rule, as far as there is room.
  void KeepGuarantee(const SessionPtr& session, const std::optional<Limit>& wished, bool goes_on, const Done& done);
  // Tries again to give sessions the guarantees that they are owed, and asks other sessions for memory. Call regularly.
  void GiveOwed() ABSL_LOCKS_EXCLUDED(owed_mu_);
  // InvalidArgument outside of [-kMaxPriority, kMaxPriority]. Only an operator's setting is saved.
  absl::Status SetPriority(const SessionPtr& session, int64_t priority, bool is_operators = false)
      ABSL_LOCKS_EXCLUDED(mu_);

 private:
  class Guarantee;

  // Runs `change` once earlier changes of the session's guarantee are answered. `change` calls its argument once, where
  // it would call `done`.
  void InTurn(const SessionPtr& session, std::function<void(const Done& done)> change, const Done& done)
      ABSL_LOCKS_EXCLUDED(turns_mu_);
  // Runs the session's changes while each is answered at once. A change answered later runs the next from its answer.
  void TakeTurns(SessionId session) ABSL_LOCKS_EXCLUDED(turns_mu_);
  // Body of SetGuarantee(), run in turn.
  void SetGuaranteeNow(const SessionPtr& session, const Limit& guarantee, const Done& done);
  // Gives the operator's guarantee, else the client's or the rule's. ResourceExhausted: no room for the first of these;
  // the session may have got less.
  void GiveWanted(const SessionPtr& session, const std::optional<Limit>& wished, bool asks_others, const Done& done);
  // Whether the session's guarantee is at least `guarantee`.
  bool Has(const Session& session, const Limit& guarantee) const;
  // Checks the client's right, by the policy, to ask for the guarantee: InvalidArgument or PermissionDenied.
  absl::Status CheckWish(const Session& session, const Limit& guarantee) const;
  struct Attempt {
    bool takes_less;   // falls back to the part reported by LeftOf()
    bool asks_others;  // asks other sessions for memory before refusing
  };
  // SetGuarantee() without saving the guarantee for the next daemon.
  void GiveGuarantee(const SessionPtr& session, const Limit& guarantee, Attempt attempt, const Done& done);
  void TellLimitOf(const SessionPtr& session, int device) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  // Guarantee of a session without a request: the policy's, but at most the session's limit and the rest of the user's
  // guarantee.
  Limit LeftOf(const Session& session, const Limit& allowed) const;

  const std::vector<SegmentPool*> pools_;
  const std::chrono::milliseconds reclaim_timeout_;
  WaitingRequests& waiting_;
  SavedSettings& settings_;

  // Held while a limit or a priority changes, so pool, allocator and client see two changes in the same order, on all
  // devices. Locked while no lock of a request, session or pool is held.
  Mutex mu_ ABSL_ACQUIRED_AFTER(lock_level::kLimits) ABSL_ACQUIRED_BEFORE(lock_level::kTimer){lock_level::kLimits};

  Mutex turns_mu_;  // guards only turns_; no other lock is taken under it
  // Changes queued behind the running change of each session's guarantee.
  using Turn = std::function<void(const std::function<void()>& answered)>;
  absl::flat_hash_map<SessionId, std::deque<Turn>> turns_ ABSL_GUARDED_BY(turns_mu_);

  // A session that goes on without the guarantee that it is owed.
  struct Owed {
    SessionPtr session;
    std::optional<Limit> wished;  // by the client
    bool is_tried = false;        // an attempt is under way
  };
  Mutex owed_mu_;  // guards only owed_; no other lock is taken under it
  absl::flat_hash_map<SessionId, Owed> owed_ ABSL_GUARDED_BY(owed_mu_);
};

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_CORE_SESSION_LIMITS_H_
