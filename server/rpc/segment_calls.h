// SPDX-License-Identifier: Apache-2.0
//
// SegmentCalls: leases and returns that come as packets over the descriptor socket (v1::SegmentCall). Neither gRPC nor
// the relay has a part in them, and the answer brings the descriptors along.
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
  // Sends the answer with its descriptors. False: the client cannot get it any more.
  using Send = std::function<bool(const v1::CallResult& result, const std::vector<UniqueFd>& descriptors)>;

  // All outlive it, and whatever is under way.
  SegmentCalls(Broker* broker, const SessionCalls* calls, const RpcMeter* rpcs);

  // `send` is called once, perhaps before this returns, and from any thread. What was leased for a client that cannot
  // get the answer is given back.
  void Make(const Caller& caller, const v1::SegmentCall& call, const Send& send) const;

 private:
  // Sends the answer to a call, and meters it.
  class Answer;

  absl::StatusOr<SessionPtr> FindSession(const Caller& caller, const v1::SegmentCall& call) const;
  void Lease(const SessionPtr& session, const v1::LeaseSegmentsRequest& request, const Admission& admitted,
             const Answer& answer) const;
  void Return(const SessionPtr& session, const v1::ReturnSegmentsRequest& request, const Admission& admitted,
              const Answer& answer) const;
  // Takes the descriptors that the tickets in `leased` stand for.
  std::vector<UniqueFd> Attach(const Session& session, uint64_t device, v1::LeaseSegmentsResponse* leased) const;

  Broker& broker_;
  const SessionCalls& calls_;
  RpcMeter::Method* const lease_method_;
  RpcMeter::Method* const return_method_;
};

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_RPC_SEGMENT_CALLS_H_
