// SPDX-License-Identifier: Apache-2.0
//
// SessionStream: the Broker.Session call of one client. Opens the session, carries its events, and ends it.
#ifndef VRAMBROKER_SERVER_SESSION_STREAM_H_
#define VRAMBROKER_SERVER_SESSION_STREAM_H_

#include <grpcpp/grpcpp.h>

#include <deque>
#include <memory>
#include <string>

#include "allocator/mutex.h"
#include "server/broker.h"
#include "server/connections.h"
#include "vrambroker/v1/broker.pb.h"

namespace vrambroker {

// The newest version of the session protocol; the only one so far.
inline constexpr uint32_t kProtocolVersion = 1;

// Deletes itself when the call is over. Its reactions never block.
class SessionStream : public grpc::ServerBidiReactor<v1::SessionRequest, v1::SessionResponse> {
 public:
  // `broker` outlives the gRPC server. When `identity` is an error, the call ends with it.
  SessionStream(Broker* broker, grpc::CallbackServerContext* context, absl::StatusOr<Caller> identity);

  void OnReadDone(bool ok) override;
  void OnWriteDone(bool ok) override;
  void OnCancel() override;
  void OnDone() override;

 private:
  class Events;

  void Handle(const v1::SessionRequest& request) ABSL_LOCKS_EXCLUDED(mu_);
  absl::Status HandleHello(const v1::Hello& hello) ABSL_LOCKS_EXCLUDED(mu_);
  void HandleAllocate(const v1::AllocateCall& call);
  void HandleFree(const v1::FreeCall& call);

  // Queues a message; messages after the end are dropped. Ends a stream whose client does not read.
  void Send(v1::SessionResponse response) ABSL_LOCKS_EXCLUDED(mu_);
  // Ends the stream after what is queued.
  void End(const absl::Status& status) ABSL_LOCKS_EXCLUDED(mu_);
  void WriteNext() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  // Constant after construction.
  Broker& broker_;
  grpc::CallbackServerContext& context_;
  const absl::StatusOr<Caller> identity_;
  const std::shared_ptr<Events> events_;

  // Touched by reactions to reads only, which gRPC never runs at the same time.
  v1::SessionRequest request_;
  SessionPtr session_;

  Mutex mu_;
  std::deque<v1::SessionResponse> outgoing_ ABSL_GUARDED_BY(mu_);
  bool writing_ ABSL_GUARDED_BY(mu_) = false;
  bool ending_ ABSL_GUARDED_BY(mu_) = false;
  bool finished_ ABSL_GUARDED_BY(mu_) = false;
  grpc::Status final_status_ ABSL_GUARDED_BY(mu_);
};

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_SESSION_STREAM_H_
