// SPDX-License-Identifier: Apache-2.0
//
// The admin service's RPCs about claims.
#include <algorithm>
#include <optional>
#include <string>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"
#include "server/rpc/admin_service.h"
#include "server/wire/convert.h"

namespace vrambroker {
namespace {

constexpr size_t kMostBytesOfList = 3 << 20;  // clients take 4 MiB

}  // namespace

v1::Claim AdminService::Describe(const Claim& claim) const {
  const BrokerView view = broker_.operator_view().Look();
  const auto it = absl::c_find_if(view.claims, [&](const ClaimView& of) { return of.claim.id == claim.id; });
  return ToProto(it != view.claims.end() ? *it : ClaimView{.claim = claim}, socket_dir_);
}

absl::StatusOr<ClaimAsker> AdminService::AskForClaims(const grpc::CallbackServerContext& context,
                                                      absl::string_view action) const {
  absl::StatusOr<Asker> asker = Ask(context);
  if (!asker.ok()) return asker.status();
  if (asker->terms.rights.admin) return ClaimAsker{.caller = std::move(asker->caller)};
  // A caller inside a claim has no rights outside the claim.
  if (asker->caller.claim.has_value() || !asker->terms.rights.client) return asker->Refusal(action, "ADMIN");
  return ClaimAsker{.caller = std::move(asker->caller),
                    .rule = std::move(asker->terms),
                    .max_claims = broker_.policy()->max_claims_per_uid()};
}

grpc::ServerUnaryReactor* AdminService::CreateClaim(grpc::CallbackServerContext* context,
                                                    const v1::CreateClaimRequest* request,
                                                    v1::CreateClaimResponse* response) {
  const absl::StatusOr<ClaimAsker> asker = AskForClaims(*context, "create claims");
  if (!asker.ok()) return Reply(context, asker.status());
  absl::StatusOr<ClaimTerms> terms = FromProto(request->terms(), asker->caller.uid);
  if (!terms.ok()) return Reply(context, terms.status());
  if (asker->rule.has_value() && !request->terms().has_limit()) terms->limit = asker->rule->limit;
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  broker_.claims().Create(
      request->name(), *terms,
      [this, reactor, response](const absl::StatusOr<Claim>& claim) {
        if (claim.ok()) *response->mutable_claim() = Describe(*claim);
        reactor->Finish(ToGrpc(claim.status()));
      },
      *asker, request->ephemeral());
  return reactor;
}

grpc::ServerUnaryReactor* AdminService::UpdateClaim(grpc::CallbackServerContext* context,
                                                    const v1::UpdateClaimRequest* request,
                                                    v1::UpdateClaimResponse* response) {
  const absl::StatusOr<ClaimAsker> asker = AskForClaims(*context, "change claims");
  if (!asker.ok()) return Reply(context, asker.status());
  const absl::StatusOr<ClaimChange> change = FromProto(*request);
  if (!change.ok()) return Reply(context, change.status());
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  broker_.claims().Update(
      request->name(), *change,
      [this, reactor, response](const absl::StatusOr<Claim>& claim) {
        if (claim.ok()) *response->mutable_claim() = Describe(*claim);
        reactor->Finish(ToGrpc(claim.status()));
      },
      *asker);
  return reactor;
}

grpc::ServerUnaryReactor* AdminService::DeleteClaim(grpc::CallbackServerContext* context,
                                                    const v1::DeleteClaimRequest* request,
                                                    v1::DeleteClaimResponse* response) {
  const absl::StatusOr<ClaimAsker> asker = AskForClaims(*context, "remove claims");
  if (!asker.ok()) return Reply(context, asker.status());
  if (!v1::DeleteClaimRequest::Mode_IsValid(request->mode())) {
    return Reply(context,
                 absl::InvalidArgumentError(absl::StrCat("mode: ", request->mode(), " is not DRAIN or REVOKE")));
  }
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  broker_.claims().Delete(
      request->name(), request->mode() == v1::DeleteClaimRequest::REVOKE,
      [this, reactor, response](const absl::StatusOr<Claims::Deleted>& deleted) {
        if (deleted.ok() && !deleted->is_removed) {
          *response->mutable_claim() = Describe(deleted->claim);
        }
        reactor->Finish(ToGrpc(deleted.status()));
      },
      *asker);
  return reactor;
}

grpc::ServerUnaryReactor* AdminService::ListClaims(grpc::CallbackServerContext* context,
                                                   const v1::ListClaimsRequest* request,
                                                   v1::ListClaimsResponse* response) {
  // Costs as much as listing the sessions.
  const absl::StatusOr<Asker> asker = Ask(*context, 1 + broker_.sessions().size());
  if (!asker.ok()) return Reply(context, asker.status());
  const bool own_only = !asker->terms.rights.observer;
  response->set_own_only(own_only);
  size_t bytes = 0;
  for (const ClaimView& of : broker_.operator_view().Look().claims) {
    if (!request->name().empty() && of.claim.name != request->name()) continue;
    if (!request->after().empty() && of.claim.name <= request->after()) continue;
    const bool is_own = asker->caller.claim.has_value() ? of.claim.id == *asker->caller.claim
                                                        : of.claim.terms.owner.uid == asker->caller.uid;
    if (own_only && !is_own) continue;
    v1::Claim claim = ToProto(of, socket_dir_);
    bytes += claim.ByteSizeLong();
    if (bytes > kMostBytesOfList) {
      response->set_more(true);
      break;
    }
    *response->add_claims() = std::move(claim);
  }
  if (request->name().empty() || response->claims_size() > 0) return Reply(context, absl::OkStatus());
  // Hides even the existence of other users' claims.
  return Reply(context, own_only ? absl::NotFoundError(absl::StrCat("uid ", asker->caller.uid,
                                                                    " has no claim of that name (vramctl claim ls)"))
                                 : broker_.claims().Find(request->name()).status());
}

}  // namespace vrambroker
