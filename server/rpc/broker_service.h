// SPDX-License-Identifier: Apache-2.0
#ifndef VRAMBROKER_SERVER_RPC_BROKER_SERVICE_H_
#define VRAMBROKER_SERVER_RPC_BROKER_SERVICE_H_

#include <grpcpp/grpcpp.h>

#include <functional>

#include "server/base/user_slots.h"
#include "server/core/broker.h"
#include "server/rpc/connections.h"
#include "server/rpc/rpc_meter.h"
#include "server/rpc/session_calls.h"
#include "vrambroker/v1/broker.grpc.pb.h"

namespace vrambroker {

// vrambroker.v1.Broker: client calls made as RPCs. Thread-safe; no handler blocks.
class BrokerService final : public v1::Broker::CallbackService {
 public:
  // All arguments outlive the gRPC server. A user may have `max_streams_per_uid` session streams open: enough for a
  // stream per session, plus a second stream during a resume.
  BrokerService(Broker* broker, const SessionCalls* calls, const Connections* connections, const RpcMeter* rpcs,
                size_t max_streams_per_uid);

  grpc::ServerBidiReactor<v1::SessionRequest, v1::SessionResponse>* Session(
      grpc::CallbackServerContext* context) override;
  grpc::ServerUnaryReactor* Allocate(grpc::CallbackServerContext* context, const v1::AllocateRequest* request,
                                     v1::AllocateResponse* response) override;
  grpc::ServerUnaryReactor* Free(grpc::CallbackServerContext* context, const v1::FreeRequest* request,
                                 v1::FreeResponse* response) override;
  grpc::ServerUnaryReactor* LeaseSegments(grpc::CallbackServerContext* context, const v1::LeaseSegmentsRequest* request,
                                          v1::LeaseSegmentsResponse* response) override;
  grpc::ServerUnaryReactor* ReturnSegments(grpc::CallbackServerContext* context,
                                           const v1::ReturnSegmentsRequest* request,
                                           v1::ReturnSegmentsResponse* response) override;
  grpc::ServerUnaryReactor* EmptyCache(grpc::CallbackServerContext* context, const v1::EmptyCacheRequest* request,
                                       v1::EmptyCacheResponse* response) override;
  grpc::ServerUnaryReactor* GetMemoryStats(grpc::CallbackServerContext* context,
                                           const v1::GetMemoryStatsRequest* request,
                                           v1::GetMemoryStatsResponse* response) override;
  grpc::ServerUnaryReactor* ResetPeakStats(grpc::CallbackServerContext* context,
                                           const v1::ResetPeakStatsRequest* request,
                                           v1::ResetPeakStatsResponse* response) override;
  grpc::ServerUnaryReactor* GetDevices(grpc::CallbackServerContext* context, const v1::GetDevicesRequest* request,
                                       v1::GetDevicesResponse* response) override;

 private:
  // Returns session `id` if owned by the caller of the RPC. Counts the call.
  absl::StatusOr<SessionPtr> OwnSession(const grpc::CallbackServerContext& context, uint64_t id) const;
  // Like OwnSession(), for calls that SessionCalls makes at any rate: `call` gets the result of Admit().
  absl::Status GiveBack(
      const grpc::CallbackServerContext& context, uint64_t id,
      const std::function<absl::Status(const SessionPtr& session, const Admission& admitted)>& call) const;

  Broker& broker_;
  const SessionCalls& calls_;
  const Connections& connections_;
  const RpcMeter& rpcs_;
  UserSlots streams_;
  UserSlots resume_lists_;
};

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_RPC_BROKER_SERVICE_H_
