// SPDX-License-Identifier: Apache-2.0
//
// MemoryRequest: one request for memory that may come to wait for others.
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

// How far a request goes when the device is full.
struct RequestOptions {
  bool may_reclaim = false;           // others that hold reclaimable memory are asked to give it back
  std::chrono::milliseconds wait{0};  // with may_reclaim: and then it waits for so long, as far as its terms allow
  uint64_t cancel_key = 0;            // for WaitingRequests::Cancel(); 0: none
  uint64_t resumes = 0;               // of a charge: see CountedSession::resumes()
  ScopeId scope = 0;                  // of an allocation, in the session's list: what the block is for
};

// InvalidArgument above kMaxWait.
absl::Status CheckWait(const RequestOptions& options);

// It may wait several times, one after the other: WaitingRequests::Wait(). While it waits, it may be granted, refused
// and served otherwise at the same moment. The first of these ends the wait and goes on with the request. The others do
// nothing, and a reservation that came too late gives itself back. Queues and tasks that refer to a request keep it
// alive.
class MemoryRequest : public std::enable_shared_from_this<MemoryRequest> {
 public:
  // If it may wait, its session's CancelKeys know it from now on.
  MemoryRequest(SessionPtr session, int device, const RequestOptions& options);
  virtual ~MemoryRequest() = default;
  MemoryRequest(const MemoryRequest&) = delete;
  MemoryRequest& operator=(const MemoryRequest&) = delete;

  const SessionPtr& session() const { return session_; }
  int device() const { return device_; }
  const RequestOptions& options() const { return options_; }
  bool is_cancelled() const { return *cancelled_; }

  // ---- For WaitingRequests ----

  // A wait ends with one of these, or with EndWaitOtherwise(). Neither blocks.
  // The request goes on with what is reserved for it, as a slow call of its session.
  void Granted(Reservation reservation);
  // Answers the request. `why`: SegmentRefused(), why it was cancelled, or why it cannot go on.
  virtual void Refused(const absl::Status& why) = 0;

  // Begins a wait; returns its number. All waits together end at deadline(), which the first one sets.
  int StartWaiting(SteadyTime now) ABSL_LOCKS_EXCLUDED(mu_);
  // False: it has ended already. `outcome`: what was done for it.
  bool EndWait(int wait, WaitRecord outcome) ABSL_LOCKS_EXCLUDED(mu_);
  // Ends the wait if the request can be served without a grant. False: it cannot, or the wait has ended already.
  bool EndWaitOtherwise(int wait) ABSL_LOCKS_EXCLUDED(mu_);
  SteadyTime deadline() const ABSL_LOCKS_EXCLUDED(mu_);

 protected:
  // May wait once more.
  bool HasTimeLeft(SteadyTime now) const { return now < deadline(); }
  // What was done for it in the last wait.
  WaitRecord outcome() const ABSL_LOCKS_EXCLUDED(mu_);

 private:
  // (slow) Goes on with a request that was granted.
  virtual void RunReserved(Reservation reservation) = 0;
  // Serves the request if its session has what it takes; ServedOtherwise() then goes on. Called with this request's
  // lock held; may take the session's and the heap's.
  virtual bool TryServeOtherwise() { return false; }
  virtual void ServedOtherwise() {}

  const SessionPtr session_;
  const int device_;
  const RequestOptions options_;
  const std::shared_ptr<const CancelKeys::Flag> cancelled_;

  mutable Mutex mu_ ABSL_ACQUIRED_AFTER(lock_level::kRequest)
      ABSL_ACQUIRED_BEFORE(lock_level::kQueue){lock_level::kRequest};
  int waits_ ABSL_GUARDED_BY(mu_) = 0;         // so far
  int current_wait_ ABSL_GUARDED_BY(mu_) = 0;  // its number; 0: it does not wait
  std::optional<SteadyTime> deadline_ ABSL_GUARDED_BY(mu_);
  WaitRecord outcome_ ABSL_GUARDED_BY(mu_);
};

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_REQUESTS_MEMORY_REQUEST_H_
