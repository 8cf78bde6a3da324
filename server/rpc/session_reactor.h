// SPDX-License-Identifier: Apache-2.0
//
// SessionReactor: the Broker.Session call of one client. Opens the session, carries its events, and ends it.
#ifndef VRAMBROKER_SERVER_RPC_SESSION_REACTOR_H_
#define VRAMBROKER_SERVER_RPC_SESSION_REACTOR_H_

#include <grpcpp/grpcpp.h>

#include <deque>
#include <memory>
#include <string>

#include "absl/container/flat_hash_set.h"
#include "allocator/base/ids.h"
#include "allocator/base/mutex.h"
#include "server/base/rate_limit.h"
#include "server/base/user_slots.h"
#include "server/core/broker.h"
#include "server/rpc/connections.h"
#include "server/rpc/rpc_meter.h"
#include "vrambroker/v1/broker.pb.h"

namespace vrambroker {

// The newest version of the session protocol; the only one so far.
inline constexpr uint32_t kProtocolVersion = 1;

// Deletes itself when the call is over. Its reactions never block.
class SessionReactor : public grpc::ServerBidiReactor<v1::SessionRequest, v1::SessionResponse> {
 public:
  // `broker`, `rates` and `rpcs` outlive the gRPC server. When `identity` is an error, the call ends with it. `slot` is
  // kept until the call is over; `resume_lists`, which outlives it, bounds those that are not whole.
  SessionReactor(Broker* broker, CallRates* rates, const RpcMeter* rpcs, grpc::CallbackServerContext* context,
                 absl::StatusOr<Caller> identity, UserSlots::Slot slot, UserSlots* resume_lists);

  void OnReadDone(bool ok) override;
  void OnWriteDone(bool ok) override;
  void OnCancel() override;
  void OnDone() override;

 private:
  class Events;

  // What the client says of the session that it resumes.
  struct ResumeList {
    ResumeToken token{};
    absl::flat_hash_set<SegmentId> held;
    size_t listed = 0;     // ids, with those that are in the list twice
    UserSlots::Slot slot;  // while it is not whole
  };

  void Handle(const v1::SessionRequest& request) ABSL_LOCKS_EXCLUDED(mu_);
  absl::Status HandleFirst(const v1::SessionRequest& request) ABSL_LOCKS_EXCLUDED(mu_);
  // A call that gives something back, made at any rate: who sends too much must not be left with what it does not want.
  void HandleGivingBack(const v1::SessionRequest& request);
  // A message of an open session when its user sends too many: calls are answered with `refusal`, and messages that
  // have no answer are taken as ever. An error when the client sends nothing else.
  absl::Status HandleTooMany(const v1::SessionRequest& request, const absl::Status& refusal) ABSL_LOCKS_EXCLUDED(mu_);
  absl::Status HandleHello(const v1::Hello& hello) ABSL_LOCKS_EXCLUDED(mu_);
  absl::Status HandleResume(const v1::Resume& resume) ABSL_LOCKS_EXCLUDED(mu_);
  absl::Status HandleResumeMore(const v1::ResumeMore& part) ABSL_LOCKS_EXCLUDED(mu_);
  // Notes what the client holds, and resumes the session unless `more` follows.
  absl::Status ResumeWith(const google::protobuf::RepeatedField<uint64_t>& segment_ids, bool more)
      ABSL_LOCKS_EXCLUDED(mu_);
  // The session that the broker has opened or resumed, or why not; the stream reads on, or ends.
  void Opened(const absl::StatusOr<SessionPtr>& session, const AllocConf& conf) ABSL_LOCKS_EXCLUDED(mu_);
  void SendWelcome(const AllocConf& conf) ABSL_LOCKS_EXCLUDED(mu_);
  absl::Status HandleLater(const v1::SessionRequest& request) ABSL_LOCKS_EXCLUDED(mu_);
  void HandleAllocate(const v1::AllocateCall& call);
  // False: there was nothing to give back, and `over_rate`, if it is an error, was the answer.
  bool HandleFree(const v1::FreeCall& call, const absl::Status& over_rate);
  void HandleLease(const v1::LeaseCall& call);
  bool HandleReturn(const v1::ReturnCall& call, const absl::Status& over_rate);
  void HandleExplain(const v1::ExplainCall& call);
  absl::Status HandleStats(const v1::HeapStats& stats);
  absl::Status HandleCarriedOver(const v1::CarriedOver& message);
  void HandleAnswer(const v1::Answer& answer);

  // Queues a message; messages after the end are dropped. Ends a stream whose client does not read.
  void Send(v1::SessionResponse response) ABSL_LOCKS_EXCLUDED(mu_);
  // Ends the stream after what is queued.
  void End(const absl::Status& status) ABSL_LOCKS_EXCLUDED(mu_);
  void WriteNext() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  // Constant after construction.
  Broker& broker_;
  CallRates& rates_;
  const RpcMeter& rpcs_;
  const RpcMeter::Call call_;
  grpc::CallbackServerContext& context_;
  const absl::StatusOr<Caller> identity_;
  const UserSlots::Slot slot_;
  UserSlots& resume_lists_;
  const std::shared_ptr<Events> events_;

  // Touched by reactions to reads only, which gRPC never runs at the same time.
  v1::SessionRequest request_;
  SessionPtr session_;
  bool resumed_ = false;                     // the session is older than this stream
  std::unique_ptr<ResumeList> resume_list_;  // while it is not whole
  int too_many_ = 0;  // messages without an answer, beyond the rate, since the last one within it

  Mutex mu_ ABSL_ACQUIRED_AFTER(lock_level::kStream) ABSL_ACQUIRED_BEFORE(lock_level::kSession){lock_level::kStream};
  std::deque<v1::SessionResponse> outgoing_ ABSL_GUARDED_BY(mu_);
  bool writing_ ABSL_GUARDED_BY(mu_) = false;
  bool ending_ ABSL_GUARDED_BY(mu_) = false;
  bool finished_ ABSL_GUARDED_BY(mu_) = false;
  bool welcomed_ ABSL_GUARDED_BY(mu_) = false;  // the welcome has been written
  grpc::Status final_status_ ABSL_GUARDED_BY(mu_);
};

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_RPC_SESSION_REACTOR_H_
