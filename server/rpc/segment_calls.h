// SPDX-License-Identifier: Apache-2.0
//
// SegmentCalls: leases and returns sent as packets over the descriptor socket (v1::SegmentCall). The calls bypass gRPC
// and the relay, and the answer carries the descriptors.
#ifndef VRAMBROKER_SERVER_RPC_SEGMENT_CALLS_H_
#define VRAMBROKER_SERVER_RPC_SEGMENT_CALLS_H_

#include <cstdint>
#include <functional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "allocator/base/unique_fd.h"
#include "server/core/broker.h"
#include "server/identity/caller.h"
#include "server/rpc/rpc_meter.h"
#include "server/rpc/session_calls.h"
#include "vrambroker/v1/broker.pb.h"

namespace vrambroker {

// Thread-safe. No call blocks.
class SegmentCalls {
 public:
  // Sends the answer with its descriptors. False: the client can no longer get the answer.
  using Send = std::function<bool(const v1::CallResult& result, const std::vector<UniqueFd>& descriptors)>;

  // All arguments outlive this object and every call in progress.
  SegmentCalls(Broker* broker, const SessionCalls* calls, const RpcMeter* rpcs);

  // Calls `send` once, perhaps before Make() returns, and from any thread. Gives back a lease whose answer cannot reach
  // the client.
  void Make(const Caller& caller, const v1::SegmentCall& call, const Send& send) const;

 private:
  // Sends the answer to a call, and meters the call.
  class Answer;

  absl::StatusOr<SessionPtr> FindSession(const Caller& caller, const v1::SegmentCall& call) const;
  void Lease(const SessionPtr& session, const v1::LeaseSegmentsRequest& request, const Admission& admitted,
             const Answer& answer) const;
  void Return(const SessionPtr& session, const v1::ReturnSegmentsRequest& request, const Admission& admitted,
              const Answer& answer) const;
  // Redeems the tickets in `leased` for their descriptors.
  std::vector<UniqueFd> Attach(const Session& session, uint64_t device, v1::LeaseSegmentsResponse* leased) const;

  Broker& broker_;
  const SessionCalls& calls_;
  RpcMeter::Method* const lease_method_;
  RpcMeter::Method* const return_method_;
};

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_RPC_SEGMENT_CALLS_H_
