// SPDX-License-Identifier: Apache-2.0
//
// SessionReactor: the Broker.Session call of a client. Opens the session, carries calls and events, and ends the
// session.
#ifndef VRAMBROKER_SERVER_RPC_SESSION_REACTOR_H_
#define VRAMBROKER_SERVER_RPC_SESSION_REACTOR_H_

#include <grpcpp/grpcpp.h>

#include <memory>
#include <string>

#include "absl/container/flat_hash_set.h"
#include "allocator/base/ids.h"
#include "server/base/user_slots.h"
#include "server/core/broker.h"
#include "server/rpc/connections.h"
#include "server/rpc/rpc_meter.h"
#include "server/rpc/session_calls.h"
#include "server/rpc/session_outbox.h"
#include "vrambroker/v1/broker.pb.h"

namespace vrambroker {

// The newest, and so far only, version of the session protocol.
inline constexpr uint32_t kProtocolVersion = 1;

// Deletes itself when the call is over. Reactions never block.
class SessionReactor : public grpc::ServerBidiReactor<v1::SessionRequest, v1::SessionResponse>,
                       public SessionOutbox::Stream {
 public:
  // `broker`, `calls` and `rpcs` outlive the gRPC server. An error in `identity` ends the call. Keeps `slot` until the
  // call is over. `resume_lists` outlives the call, and bounds the number of incomplete lists.
  SessionReactor(Broker* broker, const SessionCalls* calls, const RpcMeter* rpcs, grpc::CallbackServerContext* context,
                 absl::StatusOr<Caller> identity, UserSlots::Slot slot, UserSlots* resume_lists);

  void OnReadDone(bool ok) override;
  void OnWriteDone(bool ok) override;
  void OnCancel() override;
  void OnDone() override;

 private:
  void Write(const v1::SessionResponse& message) override { StartWrite(&message); }
  void ReadOn() override { StartRead(&request_); }
  void FinishWith(const grpc::Status& status) override { Finish(status); }
  void Break() override { context_.TryCancel(); }

  class Answer;

  // The client's description of the session to resume.
  struct ResumeList {
    ResumeToken token{};
    absl::flat_hash_set<SegmentId> held;
    size_t listed = 0;     // ids, counting duplicates
    UserSlots::Slot slot;  // while the list is incomplete
  };

  void Handle(const v1::SessionRequest& request);
  absl::Status HandleFirst(const v1::SessionRequest& request);
  absl::Status HandleHello(const v1::Hello& hello);
  absl::Status HandleResume(const v1::Resume& resume);
  absl::Status HandleResumeMore(const v1::ResumeMore& part);
  // Notes the segments held by the client, and resumes the session unless `more` follows.
  absl::Status ResumeWith(const google::protobuf::RepeatedField<uint64_t>& segment_ids, bool more);
  // Called with the opened or resumed session, or with the broker's error. Returns the welcome.
  absl::StatusOr<v1::SessionResponse> Opened(const absl::StatusOr<SessionPtr>& session, const AllocConf& conf);
  // For an open session. Makes, meters and answers a call, refusals included. False: the message is not a call.
  bool HandleCall(const v1::SessionRequest& request, const Admission& admitted);
  // For an open session: handles a message without an answer. An error ends the stream.
  absl::Status HandleMessage(const v1::SessionRequest& request);
  absl::Status HandleStats(const v1::HeapStats& stats);
  absl::Status HandleCarriedOver(const v1::CarriedOver& message);
  void HandleAnswer(const v1::Answer& answer);

  // Constant after construction.
  Broker& broker_;
  const SessionCalls& calls_;
  const RpcMeter& rpcs_;
  const RpcMeter::Call call_;
  grpc::CallbackServerContext& context_;
  const absl::StatusOr<Caller> identity_;
  const UserSlots::Slot slot_;
  UserSlots& resume_lists_;
  const std::shared_ptr<SessionOutbox> outbox_;

  // Used only by reactions to reads, which gRPC runs one at a time. OnDone() reads session_ and resumed_; Opened() sets
  // session_ while no read runs.
  v1::SessionRequest request_;
  SessionPtr session_;
  bool resumed_ = false;                     // the session is older than the stream
  std::unique_ptr<ResumeList> resume_list_;  // while the list is incomplete
  int too_many_ = 0;  // messages without an answer beyond the rate, since the last message within the rate
};

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_RPC_SESSION_REACTOR_H_
