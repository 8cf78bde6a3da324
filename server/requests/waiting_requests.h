// SPDX-License-Identifier: Apache-2.0
//
// WaitingRequests: requests waiting, on all devices, until sessions give memory back. Determines the sessions that can
// be asked.
#ifndef VRAMBROKER_SERVER_REQUESTS_WAITING_REQUESTS_H_
#define VRAMBROKER_SERVER_REQUESTS_WAITING_REQUESTS_H_

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "server/base/shared_timer.h"
#include "server/base/steady_time.h"
#include "server/base/user_slots.h"
#include "server/base/worker_pool.h"
#include "server/pool/segment_pool.h"
#include "server/queue/request_queue.h"
#include "server/requests/memory_request.h"
#include "server/sessions/session.h"
#include "server/sessions/session_registry.h"

namespace vrambroker {

// See the fields of BrokerOptions.
struct WaitingOptions {
  std::function<SteadyTime()> clock;
  std::chrono::milliseconds reclaim_timeout;
  std::chrono::milliseconds hold_back_time;
  Limit hold_back_limit;
  size_t max_waiting_per_uid;
};

// Finished waits of a claim's requests that were allowed to wait.
struct ClaimWaits {
  uint64_t waits = 0;
  std::chrono::milliseconds waited{0};  // in all
};

// Thread-safe. No call blocks.
class WaitingRequests {
 public:
  // All arguments outlive the object. `pools`, indexed by device, call back when capacity is freed.
  WaitingRequests(const WaitingOptions& options, std::vector<SegmentPool*> pools, Executor* workers,
                  const SessionRegistry* sessions, SharedTimer* timer);
  ~WaitingRequests();

  // Makes `request` wait for `bytes`, to be granted, refused or served otherwise, perhaps before the call returns. Even
  // a request that may not wait asks sessions for memory. ResourceExhausted refuses the request when too many requests
  // of its user wait.
  void Wait(const std::shared_ptr<MemoryRequest>& request, uint64_t bytes);
  // As Wait(), for a guarantee of `bytes` in total. Asks sessions for memory, and waits no longer than for the answers.
  void WaitForGuarantee(const SessionPtr& session, int device, uint64_t bytes,
                        const std::function<void(const absl::Status&)>& done);

  // Whether the session may grow by `bytes` past the queue, before waiting requests have had their turn at newly freed
  // memory: if no turn is due, or the growth is within the guarantee.
  bool GoesFirst(const Session& session, int device, uint64_t bytes) const;
  // Calls `then` after the turn of the waiting requests. See RequestQueue.
  void AfterPass(int device, const std::function<void()>& then) { queues_[device]->AfterPass(then); }

  // The session has freed memory: tries to serve its requests without a grant.
  void Retry(const Session& session);
  void Retry(const Session& session, int device) { queues_[device]->Retry(session.id()); }
  // Cancels the session's requests with this key, including requests not waiting yet. Key 0 cancels nothing.
  void Cancel(const SessionPtr& session, uint64_t cancel_key);
  // Ends all waiting of the session with `why`. A request may still begin to wait afterwards: to end even such a
  // request, change the session's state first.
  void CancelAll(const Session& session, const absl::Status& why);
  // Moves the session's requests to their new place.
  void UpdatePriority(const Session& session, int priority);

  // Asks sessions for missing memory, without a waiting request: sessions reporting reclaimable memory, or
  // (`everybody`) all sessions that may have some. Calls `done` once all have answered, or no answer will come.
  void Reclaim(int device, const Missing& missing, bool everybody, const std::function<void()>& done) const;

  // Starts and stops counting the claim's waits.
  void AddClaim(ClaimId claim) ABSL_LOCKS_EXCLUDED(claims_mu_);
  void ForgetClaim(ClaimId claim) ABSL_LOCKS_EXCLUDED(claims_mu_);
  // By device.
  absl::flat_hash_map<ClaimId, std::vector<ClaimWaits>> GetClaimWaits() const ABSL_LOCKS_EXCLUDED(claims_mu_);

  WaitStats GetStats(int device) const { return queues_[device]->GetStats(); }
  // In order of service.
  std::vector<WaitingRequest> GetWaiting(int device) const { return queues_[device]->GetWaiting(); }
  size_t size(int device) const { return queues_[device]->size(); }

  std::optional<SteadyTime> NextWake() const;
  void OnTimer();

 private:
  std::vector<ReclaimCandidate> Candidates(int device) const;
  void AskFor(int device, const ReclaimVictim& victim, const std::function<void()>& answered) const;
  // Cancels again if the session has ended, since CancelAll() may have run just before the request was added.
  void CancelIfEnded(const Session& session);
  void CountWait(const MemoryRequest& request, std::chrono::milliseconds waited) ABSL_LOCKS_EXCLUDED(claims_mu_);
  // Logs a request for which sessions were asked.
  void Log(const Session& session, int device, uint64_t bytes, const absl::Status& status,
           const WaitRecord& outcome) const;

  // Constant after construction.
  const std::function<SteadyTime()> clock_;
  const std::chrono::milliseconds reclaim_timeout_;
  const std::vector<SegmentPool*> pools_;
  const SessionRegistry& sessions_;

  UserSlots slots_;                                    // waiting requests
  std::vector<std::unique_ptr<RequestQueue>> queues_;  // by device

  mutable Mutex claims_mu_;  // guards only claim_waits_; no other lock is taken under it
  absl::flat_hash_map<ClaimId, std::vector<ClaimWaits>> claim_waits_ ABSL_GUARDED_BY(claims_mu_);
};

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_REQUESTS_WAITING_REQUESTS_H_
