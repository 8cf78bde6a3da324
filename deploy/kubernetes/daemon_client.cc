// SPDX-License-Identifier: Apache-2.0
#include "deploy/kubernetes/daemon_client.h"

#include <memory>

#include "absl/strings/str_cat.h"
#include "client/connection/connection.h"

namespace vrambroker::kubernetes {
namespace {

// Makes a call of v1::Broker or v1::Admin.
template <typename Service, typename Request, typename Response>
absl::Status Call(const std::string& socket_dir, absl::Duration timeout,
                  grpc::Status (Service::Stub::*method)(grpc::ClientContext*, const Request&, Response*),
                  const Request& request, Response* response) {
  const absl::StatusOr<std::shared_ptr<grpc::Channel>> channel = client_internal::ConnectChannel(socket_dir, timeout);
  if (!channel.ok()) return channel.status();
  const std::unique_ptr<typename Service::Stub> stub = Service::NewStub(*channel);
  grpc::ClientContext context;
  client_internal::SetTimeout(context, timeout);
  return client_internal::FromGrpc((*stub.*method)(&context, request, response));
}

}  // namespace

absl::StatusOr<std::vector<v1::Device>> DaemonClient::Devices() const {
  v1::GetDevicesResponse response;
  absl::Status status =
      Call<v1::Broker>(socket_dir_, timeout_, &v1::Broker::Stub::GetDevices, v1::GetDevicesRequest(), &response);
  if (!status.ok()) return status;
  return std::vector<v1::Device>(response.devices().begin(), response.devices().end());
}

absl::StatusOr<v1::Claim> DaemonClient::CreateClaim(const v1::CreateClaimRequest& request) const {
  v1::CreateClaimResponse response;
  absl::Status status = Call<v1::Admin>(socket_dir_, timeout_, &v1::Admin::Stub::CreateClaim, request, &response);
  if (!status.ok()) return status;
  return response.claim();
}

absl::Status DaemonClient::SetLabels(const std::string& claim, const std::map<std::string, std::string>& labels) const {
  v1::UpdateClaimRequest request;
  request.set_name(claim);
  request.set_replace_labels(true);
  request.mutable_labels()->insert(labels.begin(), labels.end());
  v1::UpdateClaimResponse response;
  return Call<v1::Admin>(socket_dir_, timeout_, &v1::Admin::Stub::UpdateClaim, request, &response);
}

absl::Status DaemonClient::DrainClaim(const std::string& claim) const {
  v1::DeleteClaimRequest request;
  request.set_name(claim);
  request.set_mode(v1::DeleteClaimRequest::DRAIN);
  v1::DeleteClaimResponse response;
  absl::Status status = Call<v1::Admin>(socket_dir_, timeout_, &v1::Admin::Stub::DeleteClaim, request, &response);
  return absl::IsNotFound(status) ? absl::OkStatus() : status;
}

absl::StatusOr<std::vector<v1::Claim>> DaemonClient::Claims() const {
  std::vector<v1::Claim> claims;
  v1::ListClaimsRequest request;
  for (;;) {
    v1::ListClaimsResponse response;
    absl::Status status = Call<v1::Admin>(socket_dir_, timeout_, &v1::Admin::Stub::ListClaims, request, &response);
    if (!status.ok()) return status;
    if (response.own_only()) {
      return absl::PermissionDeniedError(
          absl::StrCat("the daemon that serves ", socket_dir_,
                       " does not show all claims to this user: run vrambroker-device-plugin as root, or give its user "
                       "the right ADMIN in a rule of the daemon's configuration"));
    }
    claims.insert(claims.end(), response.claims().begin(), response.claims().end());
    if (!response.more() || response.claims().empty()) return claims;
    request.set_after(claims.back().name());
  }
}

}  // namespace vrambroker::kubernetes
