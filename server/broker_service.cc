// SPDX-License-Identifier: Apache-2.0
#include "server/broker_service.h"

#include <vector>

#include "absl/strings/str_cat.h"
#include "server/convert.h"
#include "server/session_stream.h"
#include "server/version.h"

namespace vrambroker {
absl::StatusOr<SessionPtr> BrokerService::OwnSession(const grpc::CallbackServerContext& context, uint64_t id) const {
  absl::StatusOr<Caller> caller = connections_.Identify(context);
  if (!caller.ok()) return caller.status();
  return broker_.FindSession(SessionId{id}, *caller);
}

grpc::ServerBidiReactor<v1::SessionRequest, v1::SessionResponse>* BrokerService::Session(
    grpc::CallbackServerContext* context) {
  return new SessionStream(&broker_, context, connections_.Identify(*context));
}

grpc::ServerUnaryReactor* BrokerService::Allocate(grpc::CallbackServerContext* context,
                                                  const v1::AllocateRequest* request, v1::AllocateResponse* response) {
  absl::StatusOr<SessionPtr> session = OwnSession(*context, request->session_id());
  if (!session.ok()) return Reply(context, session.status());
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  broker_.Allocate(*session, request->device(), request->requested_bytes(), request->stream(),
                   [this, context, reactor, response, session = *session](absl::StatusOr<Allocation> allocation) {
                     // A caller that gave up will never learn the block's id, so nobody could free it.
                     if (allocation.ok() && context->IsCancelled()) (void)broker_.Free(session, {allocation->block});
                     if (allocation.ok()) *response = ToProto(*allocation);
                     reactor->Finish(ToGrpc(allocation.status()));
                   });
  return reactor;
}

grpc::ServerUnaryReactor* BrokerService::Free(grpc::CallbackServerContext* context, const v1::FreeRequest* request,
                                              v1::FreeResponse* /*response*/) {
  absl::StatusOr<SessionPtr> session = OwnSession(*context, request->session_id());
  if (!session.ok()) return Reply(context, session.status());
  const absl::StatusOr<std::vector<BlockId>> blocks = BlockIds(*request);
  return Reply(context, blocks.ok() ? broker_.Free(*session, *blocks) : blocks.status());
}

grpc::ServerUnaryReactor* BrokerService::EmptyCache(grpc::CallbackServerContext* context,
                                                    const v1::EmptyCacheRequest* request,
                                                    v1::EmptyCacheResponse* response) {
  absl::StatusOr<SessionPtr> session = OwnSession(*context, request->session_id());
  if (!session.ok()) return Reply(context, session.status());
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  broker_.EmptyCache(*session, [reactor, response](const absl::StatusOr<uint64_t>& bytes) {
    response->set_released_bytes(bytes.value_or(0));
    reactor->Finish(ToGrpc(bytes.status()));
  });
  return reactor;
}

grpc::ServerUnaryReactor* BrokerService::GetMemoryStats(grpc::CallbackServerContext* context,
                                                        const v1::GetMemoryStatsRequest* request,
                                                        v1::GetMemoryStatsResponse* response) {
  absl::StatusOr<SessionPtr> session = OwnSession(*context, request->session_id());
  if (!session.ok()) return Reply(context, session.status());
  if (absl::Status status = broker_.CheckDevice(request->device()); !status.ok()) return Reply(context, status);
  const int device = static_cast<int>(request->device());
  *response->mutable_stats() = ToProto((*session)->GetMemoryStats(device));
  response->set_limit_bytes(
      broker_.pools()[device]->GetAccount((*session)->id()).value_or(AccountFigures()).limit_bytes);
  return Reply(context, absl::OkStatus());
}

grpc::ServerUnaryReactor* BrokerService::ResetPeakStats(grpc::CallbackServerContext* context,
                                                        const v1::ResetPeakStatsRequest* request,
                                                        v1::ResetPeakStatsResponse* /*response*/) {
  absl::StatusOr<SessionPtr> session = OwnSession(*context, request->session_id());
  if (!session.ok()) return Reply(context, session.status());
  if (absl::Status status = broker_.CheckDevice(request->device()); !status.ok()) return Reply(context, status);
  CachingAllocator& allocator = (*session)->allocator(static_cast<int>(request->device()));
  allocator.ResetPeakStats();
  if (request->accumulated()) allocator.ResetAccumulatedStats();
  return Reply(context, absl::OkStatus());
}

grpc::ServerUnaryReactor* BrokerService::GetDevices(grpc::CallbackServerContext* context,
                                                    const v1::GetDevicesRequest* /*request*/,
                                                    v1::GetDevicesResponse* response) {
  for (const SegmentPool* pool : broker_.pools()) *response->add_devices() = ToProto(*pool);
  response->set_daemon_version(kVersion);
  return Reply(context, absl::OkStatus());
}

}  // namespace vrambroker
