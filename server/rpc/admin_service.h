// SPDX-License-Identifier: Apache-2.0
#ifndef VRAMBROKER_SERVER_RPC_ADMIN_SERVICE_H_
#define VRAMBROKER_SERVER_RPC_ADMIN_SERVICE_H_

#include <grpcpp/grpcpp.h>

#include <functional>
#include <optional>
#include <string>
#include <utility>

#include "absl/strings/string_view.h"
#include "server/base/user_slots.h"
#include "server/config/config.h"
#include "server/core/broker.h"
#include "server/rpc/connections.h"
#include "vrambroker/v1/admin.grpc.pb.h"

namespace vrambroker {

using ReloadDone = std::function<void(const absl::StatusOr<ReloadReport>&)>;

// vrambroker.v1.Admin: translates between messages and the Broker. Thread-safe; no handler blocks.
class AdminService final : public v1::Admin::CallbackService {
 public:
  // All arguments outlive the gRPC server. `snapshots` counts the snapshots in progress. `reload` answers once, from
  // any thread, and does not block. `socket_dir`: directory of the claims' sockets.
  AdminService(Broker* broker, const Connections* connections, UserSlots* snapshots, std::string socket_dir,
               std::function<void(const ReloadDone&)> reload)
      : broker_(*broker),
        connections_(*connections),
        snapshots_(*snapshots),
        socket_dir_(std::move(socket_dir)),
        reload_(std::move(reload)) {}

  grpc::ServerUnaryReactor* ListSessions(grpc::CallbackServerContext* context, const v1::ListSessionsRequest* request,
                                         v1::ListSessionsResponse* response) override;
  grpc::ServerUnaryReactor* GetSession(grpc::CallbackServerContext* context, const v1::GetSessionRequest* request,
                                       v1::GetSessionResponse* response) override;
  grpc::ServerUnaryReactor* SetLimit(grpc::CallbackServerContext* context, const v1::SetLimitRequest* request,
                                     v1::SetLimitResponse* response) override;
  grpc::ServerUnaryReactor* SetGuarantee(grpc::CallbackServerContext* context, const v1::SetGuaranteeRequest* request,
                                         v1::SetGuaranteeResponse* response) override;
  grpc::ServerUnaryReactor* SetPriority(grpc::CallbackServerContext* context, const v1::SetPriorityRequest* request,
                                        v1::SetPriorityResponse* response) override;
  grpc::ServerUnaryReactor* ListQuarantine(grpc::CallbackServerContext* context,
                                           const v1::ListQuarantineRequest* request,
                                           v1::ListQuarantineResponse* response) override;
  grpc::ServerUnaryReactor* TrimSession(grpc::CallbackServerContext* context, const v1::TrimSessionRequest* request,
                                        v1::TrimSessionResponse* response) override;
  grpc::ServerUnaryReactor* ReleaseIdle(grpc::CallbackServerContext* context, const v1::ReleaseIdleRequest* request,
                                        v1::ReleaseIdleResponse* response) override;
  grpc::ServerUnaryReactor* EndSession(grpc::CallbackServerContext* context, const v1::EndSessionRequest* request,
                                       v1::EndSessionResponse* response) override;
  grpc::ServerWriteReactor<v1::GetSnapshotResponse>* GetSnapshot(grpc::CallbackServerContext* context,
                                                                 const v1::GetSnapshotRequest* request) override;
  grpc::ServerWriteReactor<v1::GetSnapshotResponse>* GetRefusalSnapshot(
      grpc::CallbackServerContext* context, const v1::GetRefusalSnapshotRequest* request) override;
  grpc::ServerUnaryReactor* SetRecording(grpc::CallbackServerContext* context, const v1::SetRecordingRequest* request,
                                         v1::SetRecordingResponse* response) override;
  grpc::ServerWriteReactor<v1::HoldRecordingResponse>* HoldRecording(grpc::CallbackServerContext* context,
                                                                     const v1::HoldRecordingRequest* request) override;
  grpc::ServerUnaryReactor* ListOutOfMemory(grpc::CallbackServerContext* context,
                                            const v1::ListOutOfMemoryRequest* request,
                                            v1::ListOutOfMemoryResponse* response) override;

  grpc::ServerUnaryReactor* ExplainPolicy(grpc::CallbackServerContext* context, const v1::ExplainPolicyRequest* request,
                                          v1::ExplainPolicyResponse* response) override;
  grpc::ServerUnaryReactor* CreateClaim(grpc::CallbackServerContext* context, const v1::CreateClaimRequest* request,
                                        v1::CreateClaimResponse* response) override;
  grpc::ServerUnaryReactor* UpdateClaim(grpc::CallbackServerContext* context, const v1::UpdateClaimRequest* request,
                                        v1::UpdateClaimResponse* response) override;
  grpc::ServerUnaryReactor* DeleteClaim(grpc::CallbackServerContext* context, const v1::DeleteClaimRequest* request,
                                        v1::DeleteClaimResponse* response) override;
  grpc::ServerUnaryReactor* ListClaims(grpc::CallbackServerContext* context, const v1::ListClaimsRequest* request,
                                       v1::ListClaimsResponse* response) override;
  grpc::ServerUnaryReactor* ReloadConfig(grpc::CallbackServerContext* context, const v1::ReloadConfigRequest* request,
                                         v1::ReloadConfigResponse* response) override;

 private:
  // The caller and the rights granted by the policy.
  struct Asker {
    Caller caller;
    SessionTerms terms;

    // A caller inside a claim, such as root in a container, is no user outside the claim.
    bool IsUserOf(uid_t uid, std::optional<ClaimId> claim) const;
    bool IsUserOf(const Session& session) const { return IsUserOf(session.caller().uid, session.terms().claim_id); }
    // Returns PermissionDenied: "uid 5 may not ACTION: ...", with the reason and the right required.
    absl::Status Refusal(absl::string_view action, absl::string_view right) const;
  };
  // `calls`: number of calls charged to the caller's rate.
  absl::StatusOr<Asker> Ask(const grpc::CallbackServerContext& context, size_t calls = 1) const;

  absl::StatusOr<SessionPtr> Find(const v1::SessionRef& ref) const;
  // Fills in the changed session.
  template <typename Response>
  void Describe(const Session& session, Response* response) const;
  // Like Find(), for calls that change a session: PermissionDenied without the right.
  absl::StatusOr<SessionPtr> FindForChange(const grpc::CallbackServerContext& context, const v1::SessionRef& ref) const;
  // Like Find(), for snapshots. Snapshots are large and reveal a program's use of memory, so only administrators and
  // the session's own user may take snapshots.
  absl::StatusOr<SessionPtr> FindForSnapshots(const absl::StatusOr<Asker>& asker, const v1::SessionRef& ref) const;
  v1::Claim Describe(const Claim& claim) const;
  // Admits callers with the right to change all claims, or only their own. Otherwise returns PermissionDenied:
  // "uid 5 may not ACTION: ...".
  absl::StatusOr<ClaimAsker> AskForClaims(const grpc::CallbackServerContext& context, absl::string_view action) const;
  // Same errors as GetRefusalSnapshot.
  absl::StatusOr<std::shared_ptr<const HeapSnapshot>> FindRecording(const Asker& asker, uint64_t refusal) const;

  Broker& broker_;
  const Connections& connections_;
  UserSlots& snapshots_;
  const std::string socket_dir_;
  const std::function<void(const ReloadDone&)> reload_;
};

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_RPC_ADMIN_SERVICE_H_
