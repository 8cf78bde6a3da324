// SPDX-License-Identifier: Apache-2.0
//
// MemoryRequest: a request for memory, perhaps waiting for other sessions.
#ifndef VRAMBROKER_SERVER_REQUESTS_MEMORY_REQUEST_H_
#define VRAMBROKER_SERVER_REQUESTS_MEMORY_REQUEST_H_

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>

#include "absl/status/status.h"
#include "allocator/base/mutex.h"
#include "allocator/heap/scopes.h"
#include "server/base/steady_time.h"
#include "server/pool/reservation.h"
#include "server/queue/request_queue.h"
#include "server/sessions/session.h"

namespace vrambroker {

// Permitted effort when the device is full.
struct RequestOptions {
  bool may_reclaim = false;           // asks holders of reclaimable memory to give it back
  std::chrono::milliseconds wait{0};  // with may_reclaim: then waits so long, within the session's terms
  uint64_t cancel_key = 0;            // for WaitingRequests::Cancel(); 0: none
  uint64_t resumes = 0;               // for a charge: see CountedSession::resumes()
  ScopeId scope = 0;                  // for an allocation: purpose of the block, in the session's list
};

// InvalidArgument above kMaxWait.
absl::Status CheckWait(const RequestOptions& options);

// A request may wait several times in sequence: see WaitingRequests::Wait(). A grant, a refusal and service without a
// grant may race. The first ends the wait and continues the request. The losers do nothing, and a late reservation
// gives itself back. Queues and tasks referring to a request keep it alive.
class MemoryRequest : public std::enable_shared_from_this<MemoryRequest> {
 public:
  // If the request may wait, its session's CancelKeys know it from now on.
  MemoryRequest(SessionPtr session, int device, const RequestOptions& options);
  virtual ~MemoryRequest() = default;
  MemoryRequest(const MemoryRequest&) = delete;
  MemoryRequest& operator=(const MemoryRequest&) = delete;

  const SessionPtr& session() const { return session_; }
  int device() const { return device_; }
  const RequestOptions& options() const { return options_; }
  bool is_cancelled() const { return *cancelled_; }

  // ---- For WaitingRequests ----

  // Granted(), Refused() or EndWaitOtherwise() ends a wait. Granted() and Refused() never block. Granted() continues
  // the request with the reserved memory, as a slow call of the session.
  void Granted(Reservation reservation);
  // Answers the request. `why`: SegmentRefused(), or the reason of a cancellation or failure.
  virtual void Refused(const absl::Status& why) = 0;

  // Begins a wait; returns its number. deadline(), set by the first wait, ends all waits together.
  int StartWaiting(SteadyTime now) ABSL_LOCKS_EXCLUDED(mu_);
  // False: the wait has ended already. `outcome`: steps taken for the request.
  bool EndWait(int wait, WaitRecord outcome) ABSL_LOCKS_EXCLUDED(mu_);
  // Ends the wait if the request can be served without a grant. False: not possible, or the wait has ended already.
  bool EndWaitOtherwise(int wait) ABSL_LOCKS_EXCLUDED(mu_);
  SteadyTime deadline() const ABSL_LOCKS_EXCLUDED(mu_);

 protected:
  // True: may wait once more.
  bool HasTimeLeft(SteadyTime now) const { return now < deadline(); }
  // Steps taken in the last wait.
  WaitRecord outcome() const ABSL_LOCKS_EXCLUDED(mu_);

 private:
  // (slow) Continues a granted request.
  virtual void RunReserved(Reservation reservation) = 0;
  // Serves the request if its session has the memory; ServedOtherwise() then continues. Called under the request's
  // lock; may take the session's and the heap's locks.
  virtual bool TryServeOtherwise() { return false; }
  virtual void ServedOtherwise() {}

  const SessionPtr session_;
  const int device_;
  const RequestOptions options_;
  const std::shared_ptr<const CancelKeys::Flag> cancelled_;

  mutable Mutex mu_ ABSL_ACQUIRED_AFTER(lock_level::kRequest)
      ABSL_ACQUIRED_BEFORE(lock_level::kQueue){lock_level::kRequest};
  int waits_ ABSL_GUARDED_BY(mu_) = 0;         // so far
  int current_wait_ ABSL_GUARDED_BY(mu_) = 0;  // number of the running wait; 0: none
  std::optional<SteadyTime> deadline_ ABSL_GUARDED_BY(mu_);
  WaitRecord outcome_ ABSL_GUARDED_BY(mu_);
};

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_REQUESTS_MEMORY_REQUEST_H_
