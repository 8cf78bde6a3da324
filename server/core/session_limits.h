// SPDX-License-Identifier: Apache-2.0
//
// SessionLimits: what operators, and the policy, set of a live session: limit, guarantee, priority. What operators set
// is kept for the session over a restart of the daemon (SavedSettings).
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

// InvalidArgument for a fraction that is not within [0, 1].
absl::Status CheckLimit(absl::string_view field, const Limit& limit);

// Thread-safe. No call blocks.
class SessionLimits {
 public:
  using Done = std::function<void(absl::Status)>;

  // All outlive it. `pools` by device.
  SessionLimits(std::vector<SegmentPool*> pools, std::chrono::milliseconds reclaim_timeout, WaitingRequests* waiting,
                SavedSettings* settings);

  // What is reserved beyond it is asked back, as far as it is reclaimable; the rest stays. InvalidArgument below the
  // guarantee.
  absl::Status SetLimit(const SessionPtr& session, const Limit& limit) ABSL_LOCKS_EXCLUDED(mu_);
  // On all devices, or on none. Answers when others have given up what is needed for it, or will not: errors of
  // Ledger::SetGuarantee(), as ResourceExhausted. Guarantees of a session are changed one after the other, in the order
  // of the calls: the one that is answered last holds.
  void SetGuarantee(const SessionPtr& session, const Limit& guarantee, const Done& done);
  // The session hears of the limit that it has now: its own, or its claim's, whichever is lower.
  void TellLimit(const SessionPtr& session) ABSL_LOCKS_EXCLUDED(mu_);
  // The same, and its client, who is not connected yet, is not told.
  void UpdateLimit(const SessionPtr& session) ABSL_LOCKS_EXCLUDED(mu_);
  // Gives a new session the guarantee that it asks for, or (none) all that the policy allows. PermissionDenied above
  // that; errors as SetGuarantee(), after which the session is to be closed. Where an operator had set another one
  // before the daemon was started, it gets that, or as if none had been set when that cannot be given any more.
  void KeepGuarantee(const SessionPtr& session, const std::optional<Limit>& wished, const Done& done);
  // InvalidArgument outside of [-kMaxPriority, kMaxPriority]. What is not an operator's word is not kept.
  absl::Status SetPriority(const SessionPtr& session, int64_t priority, bool is_operators = false)
      ABSL_LOCKS_EXCLUDED(mu_);

 private:
  class Guarantee;

  // Runs `change` when earlier changes of the session's guarantee have been answered. `change` calls its argument once,
  // as `done` is called.
  void InTurn(const SessionPtr& session, std::function<void(const Done& done)> change, const Done& done)
      ABSL_LOCKS_EXCLUDED(turns_mu_);
  // Runs the session's changes as long as each is answered at once. One that is not has the next ones run by its
  // answer.
  void TakeTurns(SessionId session) ABSL_LOCKS_EXCLUDED(turns_mu_);
  // Do so, in turn.
  void SetGuaranteeNow(const SessionPtr& session, const Limit& guarantee, const Done& done);
  void KeepGuaranteeNow(const SessionPtr& session, const std::optional<Limit>& wished, const Done& done);
  // Checks that the policy allows the client to ask for the guarantee: InvalidArgument or PermissionDenied.
  absl::Status CheckWish(const Session& session, const Limit& guarantee) const;
  // SetGuarantee() without a word to the next daemon. `takes_less`: it may be what LeftOf() has left of it.
  void GiveGuarantee(const SessionPtr& session, const Limit& guarantee, bool takes_less, const Done& done);
  void TellLimitOf(const SessionPtr& session, int device) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  // The guarantee that a session gets without asking: what the policy allows, but no more than its limit, nor than what
  // its user has left.
  Limit LeftOf(const Session& session, const Limit& allowed) const;

  const std::vector<SegmentPool*> pools_;
  const std::chrono::milliseconds reclaim_timeout_;
  WaitingRequests& waiting_;
  SavedSettings& settings_;

  // Held while a limit or a priority is changed: pool, allocator and client hear of two changes in the same order, all
  // devices of the last one. No lock of a request, session or pool is held when it is taken.
  Mutex mu_ ABSL_ACQUIRED_AFTER(lock_level::kLimits) ABSL_ACQUIRED_BEFORE(lock_level::kTimer){lock_level::kLimits};

  Mutex turns_mu_;  // held for nothing but this; no other lock is taken
  // What is to come after the change of each session's guarantee that is being made.
  using Turn = std::function<void(const std::function<void()>& answered)>;
  absl::flat_hash_map<SessionId, std::deque<Turn>> turns_ ABSL_GUARDED_BY(turns_mu_);
};

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_CORE_SESSION_LIMITS_H_
