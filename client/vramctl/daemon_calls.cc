// SPDX-License-Identifier: Apache-2.0
#include "client/vramctl/daemon_calls.h"

#include <cstdint>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "absl/strings/numbers.h"

namespace vrambroker::vramctl {

absl::StatusOr<Daemon> Daemon::Connect(const Context& context) {
  absl::StatusOr<std::shared_ptr<grpc::Channel>> channel =
      client_internal::ConnectChannel(context.socket_dir, kDeadline);
  if (!channel.ok()) return channel.status();
  return Daemon{.broker = v1::Broker::NewStub(*channel), .admin = v1::Admin::NewStub(*channel)};
}

void SetRef(const std::string& session, v1::SessionRef* ref) {
  uint64_t id = 0;
  if (session.find_first_not_of("0123456789") == std::string::npos && absl::SimpleAtoi(session, &id)) {
    ref->set_id(id);
  } else {
    ref->set_name(session);
  }
}

absl::StatusOr<v1::Session> GetSession(Daemon& daemon, const std::string& session) {
  v1::GetSessionRequest request;
  SetRef(session, request.mutable_session());
  v1::GetSessionResponse response;
  absl::Status status = Call(*daemon.admin, &v1::Admin::Stub::GetSession, request, &response);
  if (!status.ok()) return status;
  return response.session();
}

void Print(const nlohmann::ordered_json& json) {
  std::printf("%s\n", json.dump(2).c_str());
}

}  // namespace vrambroker::vramctl
