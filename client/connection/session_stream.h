// SPDX-License-Identifier: Apache-2.0
#ifndef VRAMBROKER_CLIENT_CONNECTION_SESSION_STREAM_H_
#define VRAMBROKER_CLIENT_CONNECTION_SESSION_STREAM_H_

#include <grpcpp/grpcpp.h>

#include <chrono>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "allocator/base/mutex.h"
#include "client/connection/call_gate.h"
#include "vrambroker/v1/admin.grpc.pb.h"
#include "vrambroker/v1/broker.grpc.pb.h"

namespace vrambroker::client_internal {

// The client's end of the Broker.Session call. The callback API notices a dead daemon at once; a synchronous API would
// notice only during a call. Lives until gRPC is done with the call, even without other owners.
class SessionStream : public grpc::ClientBidiReactor<v1::SessionRequest, v1::SessionResponse> {
 public:
  struct Handlers {
    std::function<void(const v1::Welcome&)> welcomed;  // before all other handlers
    std::function<void(const v1::CloseSegments&)> close_segments;
    std::function<void(const v1::LimitChanged&)> limit_changed;
    std::function<void(const v1::Question&)> question;
    std::function<void(const absl::Status&)> lost;  // once, unless Close() was called first
  };

  // Sends `messages`, beginning with the hello. Handlers run on gRPC's threads until Abort(); their captures must live
  // as long.
  static std::shared_ptr<SessionStream> Start(std::shared_ptr<grpc::Channel> channel,
                                              std::vector<v1::SessionRequest> messages, Handlers handlers);

  // For calls over this connection.
  v1::Broker::Stub& stub() { return *stub_; }
  v1::Admin::Stub& admin() { return *admin_; }

  // OK when the daemon has answered the hello and `welcomed` has run; else the reason.
  absl::Status WaitForWelcome(absl::Duration timeout) ABSL_LOCKS_EXCLUDED(mu_);

  // Waits while many messages are queued; for senders without other flow control.
  void WaitForRoom() ABSL_LOCKS_EXCLUDED(mu_);
  // Drops messages after the end of the stream.
  void Send(v1::SessionRequest request) ABSL_LOCKS_EXCLUDED(mu_);

  // Allocate or free over the stream, and wait for the answer. DeadlineExceeded after `timeout`; a block granted later
  // is freed. `give_up` as in Lease().
  absl::StatusOr<v1::AllocateResponse> Allocate(const v1::AllocateRequest& request, absl::Duration timeout,
                                                const std::function<bool()>& give_up = nullptr);
  absl::Status Free(uint64_t block_id, absl::Duration timeout);

  // Lease or return segments. Segments leased after the timeout are returned. While a request waits in the daemon
  // (beyond the timeout), polls `give_up`: true ends the wait with Cancelled, soon even when the daemon does not
  // answer. `give_up` must not call this object.
  absl::StatusOr<v1::LeaseSegmentsResponse> Lease(const v1::LeaseSegmentsRequest& request, absl::Duration timeout,
                                                  const std::function<bool()>& give_up = nullptr);
  absl::Status Return(const v1::ReturnSegmentsRequest& request, absl::Duration timeout);
  // The error for a request left without memory by a refused lease.
  absl::Status Explain(const v1::ExplainRequest& request, absl::Duration timeout);

  // Frees without waiting; several frees may share a message. Never blocks. Later allocations and frees over the stream
  // come after these frees.
  void FreeLater(uint64_t block_id) ABSL_LOCKS_EXCLUDED(mu_);
  // Waits until the daemon has done every FreeLater().
  void WaitForFrees(absl::Duration timeout) ABSL_LOCKS_EXCLUDED(mu_);

  // Stops all waits except in Close(): current waits end with Unavailable, later requests are sent without waiting for
  // the answer.
  void StopWaiting() ABSL_LOCKS_EXCLUDED(mu_);

  // Breaks the stream without a goodbye: a session stays as it is. After Abort() returns no handler runs, except a
  // handler that called Abort().
  void Abort() ABSL_LOCKS_EXCLUDED(mu_);

  // Says goodbye, and waits for the daemon to end the stream. DeadlineExceeded: no answer so far; call Close() again,
  // or Abort(). Unavailable: the stream has broken; the daemon may have missed the goodbye.
  absl::Status Close(absl::Duration timeout) ABSL_LOCKS_EXCLUDED(mu_);

  // OK while the session lives.
  absl::Status status() const ABSL_LOCKS_EXCLUDED(mu_);

  void OnReadDone(bool ok) override;
  void OnWriteDone(bool ok) override;
  void OnDone(const grpc::Status& status) override;

 private:
  SessionStream(std::shared_ptr<grpc::Channel> channel, Handlers handlers)
      : channel_(std::move(channel)),
        stub_(v1::Broker::NewStub(channel_)),
        admin_(v1::Admin::NewStub(channel_)),
        handlers_(std::move(handlers)) {}
  // Deletes outside gRPC's threads: the last channel of the process owns the threads for callbacks, and releasing the
  // channel waits for these threads.
  static void Destroy(const SessionStream* stream);

  // The caller of a pending call; lives on the caller's stack.
  struct Waiter {
    CondVar answered;
    std::optional<v1::CallResult> result;
  };

  // Sends the request returned by make_request(call_id), and waits for the result. Returns segments leased on
  // `lease_device` after the timeout. `after_end`: call even after the session has ended.
  absl::StatusOr<v1::CallResult> Call(const std::function<v1::SessionRequest(uint64_t call_id)>& make_request,
                                      absl::Duration timeout, std::optional<uint32_t> lease_device = std::nullopt,
                                      bool after_end = false, const std::function<bool()>& give_up = nullptr)
      ABSL_LOCKS_EXCLUDED(mu_);
  void HandleResult(const v1::CallResult& result) ABSL_LOCKS_EXCLUDED(mu_);
  void QueueFree(uint64_t block_id) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void QueueReturn(uint32_t device, const v1::LeaseSegmentsResponse& leased) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void EndOfStream() ABSL_LOCKS_EXCLUDED(mu_);
  void WriteNext() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Waits for `condition` or the timeout; returns the condition.
  bool WaitFor(const std::function<bool()>& condition, absl::Duration timeout) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  // Runs inside the gate.
  void Receive(const v1::SessionResponse& response);

  const std::shared_ptr<grpc::Channel> channel_;
  const std::unique_ptr<v1::Broker::Stub> stub_;
  const std::unique_ptr<v1::Admin::Stub> admin_;
  const Handlers handlers_;
  CallGate gate_;  // to the handlers
  grpc::ClientContext context_;
  v1::SessionResponse response_;
  std::shared_ptr<SessionStream> self_;  // until gRPC is done with this object

  mutable Mutex mu_ ABSL_ACQUIRED_AFTER(lock_level::kStream)
      ABSL_ACQUIRED_BEFORE(lock_level::kSession){lock_level::kStream};
  CondVar changed_;
  std::deque<v1::SessionRequest> outgoing_ ABSL_GUARDED_BY(mu_);
  bool writing_ ABSL_GUARDED_BY(mu_) = false;
  bool writable_ ABSL_GUARDED_BY(mu_) = true;
  bool closing_ ABSL_GUARDED_BY(mu_) = false;
  bool waiting_stopped_ ABSL_GUARDED_BY(mu_) = false;
  bool done_ ABSL_GUARDED_BY(mu_) = false;
  int closers_ ABSL_GUARDED_BY(mu_) = 0;                          // threads in Close()
  std::shared_ptr<SessionStream> released_ ABSL_GUARDED_BY(mu_);  // self_ after gRPC is done: for a closer
  bool ended_well_ ABSL_GUARDED_BY(mu_) = false;                  // ended by the daemon
  bool welcomed_ ABSL_GUARDED_BY(mu_) = false;
  uint64_t next_call_ ABSL_GUARDED_BY(mu_) = 1;
  absl::flat_hash_map<uint64_t, Waiter*> waiters_ ABSL_GUARDED_BY(mu_);       // by call id
  absl::flat_hash_set<uint64_t> frees_ ABSL_GUARDED_BY(mu_);                  // call ids of unanswered FreeLater()s
  absl::flat_hash_map<uint64_t, uint32_t> late_leases_ ABSL_GUARDED_BY(mu_);  // device, by id of abandoned call
  absl::Status status_ ABSL_GUARDED_BY(mu_);
  std::string why_draining_ ABSL_GUARDED_BY(mu_);  // the daemon's reason to stop, if given
};

}  // namespace vrambroker::client_internal

#endif  // VRAMBROKER_CLIENT_CONNECTION_SESSION_STREAM_H_
