// SPDX-License-Identifier: Apache-2.0
//
// CountCalls: what counted sessions ask for over the count socket. proto/vrambroker/v1/count_socket.h has the messages.
#ifndef VRAMBROKER_SERVER_RPC_COUNT_CALLS_H_
#define VRAMBROKER_SERVER_RPC_COUNT_CALLS_H_

#include <cstdint>
#include <functional>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "proto/vrambroker/v1/count_socket.h"
#include "server/core/broker.h"
#include "server/core/returning.h"
#include "server/identity/caller.h"
#include "server/rpc/rpc_meter.h"
#include "server/rpc/session_calls.h"
#include "server/sessions/session.h"

namespace vrambroker {

using CountRequest = vrambroker_count_request;
using CountAnswer = vrambroker_count_answer;

// `status` as an answer to `call`. What its message has no room for is cut off.
CountAnswer CountAnswerOf(uint32_t call, const absl::Status& status);

// The connection that a call comes over.
struct CountOrigin {
  uint64_t cancel_key = 0;  // of a request that may wait
  uint64_t resumes = 0;     // of the session when it got the connection: see CountedSession::resumes()
};

// Thread-safe. No call blocks.
class CountCalls {
 public:
  // Called once, perhaps before the call returns, and from any thread.
  using Opened = std::function<void(absl::StatusOr<SessionPtr>)>;
  // The same. False: the client cannot get the answer any more.
  using Send = std::function<bool(const CountAnswer& answer)>;

  // All outlive it, and whatever is under way.
  CountCalls(Broker* broker, const SessionCalls* calls, const RpcMeter* rpcs, Returning* returning);

  // A session of the caller's process: the one whose token the client has, if its connection has ended, else a new one.
  // With a new one those of the process that are disconnected go: it is another program by now. Errors of
  // NamedDevices(), Broker::OpenSession(), ResumeCounted() and SessionLimits::KeepGuarantee(); Aborted when an operator
  // has ended the session that the process had.
  void Hello(const Caller& caller, const CountRequest& request, const Opened& opened) const;
  // NotFound: no session of the caller's process has this token.
  struct Joined {
    SessionPtr session;
    uint64_t resumes = 0;  // so far
  };
  absl::StatusOr<Joined> Join(const Caller& caller, const CountRequest& request) const;
  // Any other call. What was charged for a client that cannot get the answer is given back.
  void Make(const SessionPtr& session, const CountRequest& request, const CountOrigin& origin, const Send& send) const;

  // To HELLO and JOIN.
  CountAnswer Welcome(uint32_t call, const Session& session) const;

 private:
  // Sends the answer to a call, with the session's figures on its device, and meters it.
  class Answer;

  // Unavailable: later. A client that is told that there is no memory would give up.
  absl::Status Admit(const Session& session) const;
  void Charge(const SessionPtr& session, const CountRequest& request, const RequestOptions& options,
              const Answer& answer) const;

  Broker& broker_;
  const SessionCalls& calls_;
  const RpcMeter& rpcs_;
  Returning& returning_;
};

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_RPC_COUNT_CALLS_H_
