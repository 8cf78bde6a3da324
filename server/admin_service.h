// SPDX-License-Identifier: Apache-2.0
#ifndef VRAMBROKER_SERVER_ADMIN_SERVICE_H_
#define VRAMBROKER_SERVER_ADMIN_SERVICE_H_

#include <grpcpp/grpcpp.h>

#include "server/broker.h"
#include "server/connections.h"
#include "vrambroker/v1/admin.grpc.pb.h"

namespace vrambroker {

// vrambroker.v1.Admin: translates between messages and the Broker. Thread-safe; no handler blocks.
class AdminService final : public v1::Admin::CallbackService {
 public:
  // Both outlive the gRPC server.
  AdminService(Broker* broker, const Connections* connections) : broker_(*broker), connections_(*connections) {}

  grpc::ServerUnaryReactor* ListSessions(grpc::CallbackServerContext* context, const v1::ListSessionsRequest* request,
                                         v1::ListSessionsResponse* response) override;
  grpc::ServerUnaryReactor* GetSession(grpc::CallbackServerContext* context, const v1::GetSessionRequest* request,
                                       v1::GetSessionResponse* response) override;
  grpc::ServerUnaryReactor* SetLimit(grpc::CallbackServerContext* context, const v1::SetLimitRequest* request,
                                     v1::SetLimitResponse* response) override;
  grpc::ServerUnaryReactor* TrimSession(grpc::CallbackServerContext* context, const v1::TrimSessionRequest* request,
                                        v1::TrimSessionResponse* response) override;
  grpc::ServerUnaryReactor* EndSession(grpc::CallbackServerContext* context, const v1::EndSessionRequest* request,
                                       v1::EndSessionResponse* response) override;
  grpc::ServerWriteReactor<v1::GetSnapshotResponse>* GetSnapshot(grpc::CallbackServerContext* context,
                                                                 const v1::GetSnapshotRequest* request) override;
  grpc::ServerUnaryReactor* SetRecording(grpc::CallbackServerContext* context, const v1::SetRecordingRequest* request,
                                         v1::SetRecordingResponse* response) override;

 private:
  absl::StatusOr<SessionPtr> Find(const v1::SessionRef& ref) const;
  // The same for calls that change something: PermissionDenied for callers who may not.
  absl::StatusOr<SessionPtr> FindForChange(const grpc::CallbackServerContext& context, const v1::SessionRef& ref) const;
  // The same for snapshots, which are large and show how a program uses memory: not for everyone, but for the session's
  // own user, too.
  absl::StatusOr<SessionPtr> FindForSnapshots(const grpc::CallbackServerContext& context,
                                              const v1::SessionRef& ref) const;

  Broker& broker_;
  const Connections& connections_;
};

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_ADMIN_SERVICE_H_
