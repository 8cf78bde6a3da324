// SPDX-License-Identifier: Apache-2.0
//
// WaitingRequests: the requests, on all devices, that wait until other sessions give memory back. Knows which sessions
// can be asked.
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

// As the fields of BrokerOptions.
struct WaitingOptions {
  std::function<SteadyTime()> clock;
  std::chrono::milliseconds reclaim_timeout;
  std::chrono::milliseconds hold_back_time;
  Limit hold_back_limit;
  size_t max_waiting_per_uid;
};

// What requests of a claim that were allowed to wait have waited, those that wait still aside.
struct ClaimWaits {
  uint64_t waits = 0;
  std::chrono::milliseconds waited{0};  // in all
};

// Thread-safe. No call blocks.
class WaitingRequests {
 public:
  // All outlive it. `pools` by device: each calls back when its capacity is freed.
  WaitingRequests(const WaitingOptions& options, std::vector<SegmentPool*> pools, Executor* workers,
                  const SessionRegistry* sessions, SharedTimer* timer);
  ~WaitingRequests();

  // Has `request` wait for `bytes`: it is granted, refused or served otherwise, perhaps before this returns. A request
  // that may not wait has others asked all the same. ResourceExhausted refuses it when too many of its user's wait.
  void Wait(const std::shared_ptr<MemoryRequest>& request, uint64_t bytes);
  // The same for a guarantee of `bytes` in total. Others are asked for it; it does not wait beyond their answers.
  void WaitForGuarantee(const SessionPtr& session, int device, uint64_t bytes,
                        const std::function<void(const absl::Status&)>& done);

  // The session may grow by so many bytes past the queue, before those who wait have had their turn at what has just
  // become free: nobody has to, or it is within its guarantee.
  bool GoesFirst(const Session& session, int device, uint64_t bytes) const;
  // Calls `then` when those who wait have had their turn. See RequestQueue.
  void AfterPass(int device, const std::function<void()>& then) { queues_[device]->AfterPass(then); }

  // The session has freed something: its requests are tried otherwise.
  void Retry(const Session& session);
  void Retry(const Session& session, int device) { queues_[device]->Retry(session.id()); }
  // Cancels the session's requests with this key, whether they wait already or not. Key 0 cancels nothing.
  void Cancel(const SessionPtr& session, uint64_t cancel_key);
  // Ends all waiting of the session with `why`. A request may still begin to wait after this: the caller changes the
  // session's state first, so that such a request ends, too.
  void CancelAll(const Session& session, const absl::Status& why);
  // The session's requests go to their new place.
  void UpdatePriority(const Session& session, int priority);

  // Asks sessions for what is missing, without a request that waits for it: those whose figures say that they have it,
  // or (`everybody`) all that may. `done` is called once all have answered, or need not be waited for.
  void Reclaim(int device, const Missing& missing, bool everybody, const std::function<void()>& done) const;

  // Has the claim's waits counted from now on; no more.
  void AddClaim(ClaimId claim) ABSL_LOCKS_EXCLUDED(claims_mu_);
  void ForgetClaim(ClaimId claim) ABSL_LOCKS_EXCLUDED(claims_mu_);
  // By device.
  absl::flat_hash_map<ClaimId, std::vector<ClaimWaits>> GetClaimWaits() const ABSL_LOCKS_EXCLUDED(claims_mu_);

  WaitStats GetStats(int device) const { return queues_[device]->GetStats(); }
  // In the order in which they are served.
  std::vector<WaitingRequest> GetWaiting(int device) const { return queues_[device]->GetWaiting(); }
  size_t size(int device) const { return queues_[device]->size(); }

  std::optional<SteadyTime> NextWake() const;
  void OnTimer();

 private:
  std::vector<ReclaimCandidate> Candidates(int device) const;
  void AskFor(int device, const ReclaimVictim& victim, const std::function<void()>& answered) const;
  // CancelAll() may have run just before the request was added. Cancels again if the session has ended.
  void CancelIfEnded(const Session& session);
  void CountWait(const MemoryRequest& request, std::chrono::milliseconds waited) ABSL_LOCKS_EXCLUDED(claims_mu_);
  // Of a request for which others were asked.
  void Log(const Session& session, int device, uint64_t bytes, const absl::Status& status,
           const WaitRecord& outcome) const;

  // Constant after construction.
  const std::function<SteadyTime()> clock_;
  const std::chrono::milliseconds reclaim_timeout_;
  const std::vector<SegmentPool*> pools_;
  const SessionRegistry& sessions_;

  UserSlots slots_;                                    // requests that wait
  std::vector<std::unique_ptr<RequestQueue>> queues_;  // by device

  mutable Mutex claims_mu_;  // held for nothing but this; no other lock is taken
  absl::flat_hash_map<ClaimId, std::vector<ClaimWaits>> claim_waits_ ABSL_GUARDED_BY(claims_mu_);
};

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_REQUESTS_WAITING_REQUESTS_H_
