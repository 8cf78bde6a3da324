// SPDX-License-Identifier: Apache-2.0
//
// CountCalls: calls of counted sessions over the count socket. proto/vrambroker/v1/count_socket.h has the messages.
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

// Converts `status` to an answer to `call`. Truncates a message that does not fit.
CountAnswer CountAnswerOf(uint32_t call, const absl::Status& status);

// The connection used by a call.
struct CountOrigin {
  uint64_t cancel_key = 0;  // of a request that may wait
  uint64_t resumes = 0;     // of the session when it got the connection: see CountedSession::resumes()
};

// Thread-safe. No call blocks.
class CountCalls {
 public:
  // Called once, perhaps before the call returns, and from any thread.
  using Opened = std::function<void(absl::StatusOr<SessionPtr>)>;
  // Like Opened. False: the client can no longer get the answer.
  using Send = std::function<bool(const CountAnswer& answer)>;

  // All arguments outlive this object and every call in progress.
  CountCalls(Broker* broker, const SessionCalls* calls, const RpcMeter* rpcs, Returning* returning);

  // Opens a session for the caller's process. Resumes the session named by the client's token if its connection has
  // ended. Otherwise opens a new session and closes the process's disconnected sessions, since the process now runs
  // another program. Errors: see NamedDevices(), Broker::OpenSession(), ResumeCounted() and
  // SessionLimits::KeepGuarantee(); Aborted when an operator has ended the process's session.
  void Hello(const Caller& caller, const CountRequest& request, const Opened& opened) const;
  // NotFound: no session of the caller's process has the token.
  struct Joined {
    SessionPtr session;
    uint64_t resumes = 0;  // so far
  };
  absl::StatusOr<Joined> Join(const Caller& caller, const CountRequest& request) const;
  // Makes any other call. Gives back a charge whose answer cannot reach the client.
  void Make(const SessionPtr& session, const CountRequest& request, const CountOrigin& origin, const Send& send) const;

  // Answers HELLO and JOIN.
  CountAnswer Welcome(uint32_t call, const Session& session) const;

 private:
  // Sends the answer to a call, with the session's figures on its device, and meters the call.
  class Answer;

  // Unavailable: try later. A client told of lacking memory would give up.
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
