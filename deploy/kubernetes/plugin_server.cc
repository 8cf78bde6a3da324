// SPDX-License-Identifier: Apache-2.0
#include "deploy/kubernetes/plugin_server.h"

#include <grpcpp/grpcpp.h>
#include <spdlog/spdlog.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "client/connection/connection.h"
#include "server/base/log_line.h"

namespace vrambroker::kubernetes {
namespace {

constexpr char kApiVersion[] = "v1beta1";
constexpr absl::Duration kRegisterTimeout = absl::Seconds(10);
// A registered kubelet starts watching at once. Register again with a kubelet that does not.
constexpr std::chrono::seconds kUnwatchedFor{5};
constexpr absl::Duration kConnectTimeout = absl::Seconds(1);
// For running calls of the kubelet.
constexpr std::chrono::seconds kShutdownTimeout{5};

}  // namespace

std::optional<PluginServer::FileId> PluginServer::IdOf(const std::string& path) {
  struct stat status = {};
  if (lstat(path.c_str(), &status) != 0) return std::nullopt;
  return FileId{.device = status.st_dev, .inode = status.st_ino};
}

PluginServer::PluginServer(std::string directory, std::string resource, uint64_t unit_bytes, GpuAccess access,
                           const DaemonClient& daemon, PodClaims& pod_claims)
    : directory_(std::move(directory)),
      resource_(std::move(resource)),
      unit_bytes_(unit_bytes),
      access_(access),
      daemon_(daemon),
      pod_claims_(pod_claims),
      endpoint_(absl::StrCat(absl::StrReplaceAll(resource_, {{"/", "_"}}), ".sock")) {}

PluginServer::~PluginServer() {
  StopServing();
}

void PluginServer::SetDevices(const std::vector<DeviceOfUnits>& devices) {
  devices_ = devices;
  if (plugin_ != nullptr) plugin_->SetDevices(devices);
}

absl::Status PluginServer::KeepRegistered() {
  if (server_ == nullptr || IdOf(absl::StrCat(directory_, "/", endpoint_)) != socket_) {
    StopServing();
    if (absl::Status status = Serve(); !status.ok()) return status;
  }
  const std::optional<FileId> kubelet = IdOf(absl::StrCat(directory_, "/kubelet.sock"));
  if (!kubelet.has_value()) {
    return absl::UnavailableError(absl::StrCat("there is no kubelet: no ", directory_, "/kubelet.sock"));
  }
  if (registered_with_ == kubelet && (plugin_->IsWatched() || Clock::now() - registered_ < kUnwatchedFor)) {
    return absl::OkStatus();
  }
  if (absl::Status status = Register(); !status.ok()) return status;
  registered_with_ = kubelet;
  registered_ = Clock::now();
  LogLine("resource registered").Add("resource", resource_).Add("endpoint", endpoint_).Write(spdlog::level::info);
  return absl::OkStatus();
}

absl::Status PluginServer::Serve() {
  const std::string path = absl::StrCat(directory_, "/", endpoint_);
  if (path.size() >= sizeof(sockaddr_un::sun_path)) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, " is too long for a socket, which may have ", sizeof(sockaddr_un::sun_path) - 1, " bytes"));
  }
  struct stat status = {};
  if (stat(directory_.c_str(), &status) != 0) {
    return absl::ErrnoToStatus(errno, absl::StrCat("the kubelet's directory of device plugins, ", directory_));
  }
  // gRPC removes a socket left by an earlier process.
  if (client_internal::ConnectSocket(path, SOCK_STREAM, kConnectTimeout).ok()) {
    return absl::AlreadyExistsError(absl::StrCat("another process serves ", path));
  }
  auto plugin = std::make_unique<DevicePlugin>(resource_, unit_bytes_, access_, daemon_, pod_claims_);
  plugin->SetDevices(devices_);
  grpc::ServerBuilder builder;
  int bound = 0;
  builder.AddListeningPort(absl::StrCat("unix:", path), grpc::InsecureServerCredentials(), &bound);
  builder.RegisterService(plugin.get());
  std::unique_ptr<grpc::Server> server = builder.BuildAndStart();
  if (server == nullptr || bound == 0) return absl::UnavailableError(absl::StrCat("cannot listen on ", path));
  plugin_ = std::move(plugin);
  server_ = std::move(server);
  socket_ = IdOf(path);
  registered_with_.reset();
  return absl::OkStatus();
}

void PluginServer::StopServing() {
  if (server_ == nullptr) return;
  plugin_->EndWatches();
  server_->Shutdown(std::chrono::system_clock::now() + kShutdownTimeout);
  server_->Wait();
  server_.reset();
  plugin_.reset();
}

absl::Status PluginServer::Register() {
  // A separate channel: gRPC's shared channel would be the failed channel, and would wait before the next try.
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  const std::shared_ptr<grpc::Channel> channel = grpc::CreateCustomChannel(
      absl::StrCat("unix:", directory_, "/kubelet.sock"), grpc::InsecureChannelCredentials(), arguments);
  ::v1beta1::RegisterRequest request;
  request.set_version(kApiVersion);
  request.set_endpoint(endpoint_);
  request.set_resource_name(resource_);
  request.mutable_options()->set_get_preferred_allocation_available(true);
  grpc::ClientContext context;
  client_internal::SetTimeout(context, kRegisterTimeout);
  ::v1beta1::Empty response;
  const grpc::Status status = ::v1beta1::Registration::NewStub(channel)->Register(&context, request, &response);
  if (status.ok()) return absl::OkStatus();
  return {static_cast<absl::StatusCode>(status.error_code()),
          absl::StrCat("the kubelet does not register ", resource_, ": ", status.error_message())};
}

}  // namespace vrambroker::kubernetes
