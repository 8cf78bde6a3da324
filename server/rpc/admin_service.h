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
  // All outlive the gRPC server. `snapshots` are those under way. `reload` answers once, from any thread, and does not
  // block.
  // `socket_dir`: where claims have theirs.
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
  // Who calls, and what the policy lets them do.
  struct Asker {
    Caller caller;
    SessionTerms terms;

    // Who is in a claim, as root in a container is, is nobody outside of it.
    bool IsUserOf(uid_t uid, std::optional<ClaimId> claim) const;
    bool IsUserOf(const Session& session) const { return IsUserOf(session.caller().uid, session.terms().claim_id); }
    // PermissionDenied: "uid 5 may not ACTION: ...", why, and who may.
    absl::Status Refusal(absl::string_view action, absl::string_view right) const;
  };
  // `calls`: how many it counts as against the caller's rate.
  absl::StatusOr<Asker> Ask(const grpc::CallbackServerContext& context, size_t calls = 1) const;

  absl::StatusOr<SessionPtr> Find(const v1::SessionRef& ref) const;
  // Answers that the session has been changed.
  template <typename Response>
  void Describe(const Session& session, Response* response) const;
  // The same for calls that change something: PermissionDenied for callers who may not.
  absl::StatusOr<SessionPtr> FindForChange(const grpc::CallbackServerContext& context, const v1::SessionRef& ref) const;
  // The same for snapshots, which are large and show how a program uses memory: not for everyone, but for the session's
  // own user, too.
  absl::StatusOr<SessionPtr> FindForSnapshots(const absl::StatusOr<Asker>& asker, const v1::SessionRef& ref) const;
  v1::Claim Describe(const Claim& claim) const;
  // Who may change claims, or claims of its own: PermissionDenied for others, "uid 5 may not ACTION: ...".
  absl::StatusOr<ClaimAsker> AskForClaims(const grpc::CallbackServerContext& context, absl::string_view action) const;
  // Errors as GetRefusalSnapshot.
  absl::StatusOr<std::shared_ptr<const HeapSnapshot>> FindRecording(const Asker& asker, uint64_t refusal) const;

  Broker& broker_;
  const Connections& connections_;
  UserSlots& snapshots_;
  const std::string socket_dir_;
  const std::function<void(const ReloadDone&)> reload_;
};

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_RPC_ADMIN_SERVICE_H_
