// SPDX-License-Identifier: Apache-2.0
#include "tests/support/fake_kubelet.h"

#include <grpcpp/grpcpp.h>

#include <chrono>
#include <filesystem>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "tests/support/util.h"

namespace vrambroker::testing_support {
namespace {

absl::Status FromGrpc(const grpc::Status& status) {
  return {static_cast<absl::StatusCode>(status.error_code()), status.error_message()};
}

void SetDeadline(grpc::ClientContext& context) {
  context.set_deadline(std::chrono::system_clock::now() + absl::ToChronoSeconds(kPatience));
}

}  // namespace

class FakeKubelet::Registration final : public ::v1beta1::Registration::Service {
 public:
  explicit Registration(FakeKubelet& kubelet) : kubelet_(kubelet) {}
  grpc::Status Register(grpc::ServerContext* /*context*/, const ::v1beta1::RegisterRequest* request,
                        ::v1beta1::Empty* /*response*/) override {
    return kubelet_.Register(*request);
  }

 private:
  FakeKubelet& kubelet_;
};

class FakeKubelet::Lister final : public ::v1::PodResourcesLister::Service {
 public:
  explicit Lister(FakeKubelet& kubelet) : kubelet_(kubelet) {}
  grpc::Status List(grpc::ServerContext* /*context*/, const ::v1::ListPodResourcesRequest* /*request*/,
                    ::v1::ListPodResourcesResponse* response) override {
    const MutexLock lock(kubelet_.mu_);
    *response = kubelet_.pods_;
    ++kubelet_.pod_lists_;
    return grpc::Status::OK;
  }

 private:
  FakeKubelet& kubelet_;
};

struct FakeKubelet::Plugin {
  std::unique_ptr<::v1beta1::DevicePlugin::Stub> stub;
  grpc::ClientContext watch;
  std::thread watcher;
  Mutex mu;
  std::map<std::string, bool> units ABSL_GUARDED_BY(mu);

  ~Plugin() {
    watch.TryCancel();
    if (watcher.joinable()) watcher.join();
  }
};

FakeKubelet::FakeKubelet(std::string directory, bool removes_plugins)
    : directory_(std::move(directory)),
      registration_(std::make_unique<Registration>(*this)),
      lister_(std::make_unique<Lister>(*this)) {
  const std::string plugins = directory_ + "/device-plugins";
  const std::string pods = directory_ + "/pod-resources";
  std::filesystem::create_directories(plugins);
  std::filesystem::create_directories(pods);
  for (const auto& entry : std::filesystem::directory_iterator(plugins)) {
    if (removes_plugins || entry.path().filename() == "kubelet.sock") std::filesystem::remove_all(entry.path());
  }
  std::filesystem::remove(pods + "/kubelet.sock");
  const auto serve = [](const std::string& path, grpc::Service* service) {
    grpc::ServerBuilder builder;
    builder.AddListeningPort("unix:" + path, grpc::InsecureServerCredentials());
    builder.RegisterService(service);
    return builder.BuildAndStart();
  };
  pods_server_ = serve(pods + "/kubelet.sock", lister_.get());
  server_ = serve(plugins + "/kubelet.sock", registration_.get());
}

FakeKubelet::~FakeKubelet() {
  server_->Shutdown(std::chrono::system_clock::now());
  pods_server_->Shutdown(std::chrono::system_clock::now());
}

grpc::Status FakeKubelet::Register(const ::v1beta1::RegisterRequest& request) {
  {
    const MutexLock lock(mu_);
    ++registrations_[request.resource_name()];
    if (!refusal_.empty()) return {grpc::StatusCode::UNKNOWN, refusal_};
  }
  if (request.version() != "v1beta1") return {grpc::StatusCode::INVALID_ARGUMENT, "unsupported version"};
  const std::string path = absl::StrCat(directory_, "/device-plugins/", request.endpoint());
  // Kubelet 1.20 sends the path as :authority.
  grpc::ChannelArguments arguments;
  arguments.SetString(GRPC_ARG_DEFAULT_AUTHORITY, path);
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  const auto plugin = std::make_shared<Plugin>();
  plugin->stub = ::v1beta1::DevicePlugin::NewStub(
      grpc::CreateCustomChannel("unix:" + path, grpc::InsecureChannelCredentials(), arguments));
  plugin->watcher = std::thread([plugin = plugin.get()] {
    const auto stream = plugin->stub->ListAndWatch(&plugin->watch, {});
    ::v1beta1::ListAndWatchResponse response;
    while (stream->Read(&response)) {
      const MutexLock lock(plugin->mu);
      plugin->units.clear();
      for (const ::v1beta1::Device& unit : response.devices()) plugin->units[unit.id()] = unit.health() == "Healthy";
    }
    stream->Finish();
    const MutexLock lock(plugin->mu);  // kubelets mark all units unhealthy
    for (auto& [id, is_healthy] : plugin->units) is_healthy = false;
  });
  const MutexLock lock(mu_);
  std::shared_ptr<Plugin>& known = plugins_[request.resource_name()];
  if (known != nullptr) earlier_.push_back(known);
  known = plugin;
  return grpc::Status::OK;
}

int FakeKubelet::registrations(const std::string& resource) const {
  const MutexLock lock(mu_);
  const auto it = registrations_.find(resource);
  return it == registrations_.end() ? 0 : it->second;
}

std::shared_ptr<FakeKubelet::Plugin> FakeKubelet::Find(const std::string& resource) const {
  const MutexLock lock(mu_);
  const auto it = plugins_.find(resource);
  return it == plugins_.end() ? nullptr : it->second;
}

std::map<std::string, bool> FakeKubelet::Units(const std::string& resource) const {
  const std::shared_ptr<Plugin> plugin = Find(resource);
  if (plugin == nullptr) return {};
  const MutexLock lock(plugin->mu);
  return plugin->units;
}

size_t FakeKubelet::HealthyUnits(const std::string& resource) const {
  size_t count = 0;
  for (const auto& [id, is_healthy] : Units(resource)) count += is_healthy ? 1 : 0;
  return count;
}

absl::StatusOr<std::vector<std::string>> FakeKubelet::PreferredUnits(const std::string& resource,
                                                                     const std::vector<std::string>& available,
                                                                     const std::vector<std::string>& required,
                                                                     int count) {
  const std::shared_ptr<Plugin> plugin = Find(resource);
  if (plugin == nullptr) return absl::NotFoundError("no plugin has registered " + resource);
  ::v1beta1::PreferredAllocationRequest request;
  auto* container = request.add_container_requests();
  container->mutable_available_deviceids()->Assign(available.begin(), available.end());
  container->mutable_must_include_deviceids()->Assign(required.begin(), required.end());
  container->set_allocation_size(count);
  grpc::ClientContext context;
  SetDeadline(context);
  ::v1beta1::PreferredAllocationResponse response;
  const grpc::Status status = plugin->stub->GetPreferredAllocation(&context, request, &response);
  if (!status.ok()) return FromGrpc(status);
  if (response.container_responses_size() != 1) return absl::InternalError("not one answer for one container");
  const auto& ids = response.container_responses(0).deviceids();
  return std::vector<std::string>(ids.begin(), ids.end());
}

absl::StatusOr<::v1beta1::ContainerAllocateResponse> FakeKubelet::Allocate(const std::string& resource,
                                                                           const std::vector<std::string>& units) {
  ::v1beta1::AllocateRequest request;
  request.add_container_requests()->mutable_devicesids()->Assign(units.begin(), units.end());
  const absl::StatusOr<::v1beta1::AllocateResponse> response = Allocate(resource, request);
  if (!response.ok()) return response.status();
  if (response->container_responses_size() != 1) return absl::InternalError("not one answer for one container");
  return response->container_responses(0);
}

absl::StatusOr<::v1beta1::AllocateResponse> FakeKubelet::Allocate(const std::string& resource,
                                                                  const ::v1beta1::AllocateRequest& request) {
  const std::shared_ptr<Plugin> plugin = Find(resource);
  if (plugin == nullptr) return absl::NotFoundError("no plugin has registered " + resource);
  grpc::ClientContext context;
  SetDeadline(context);
  ::v1beta1::AllocateResponse response;
  const grpc::Status status = plugin->stub->Allocate(&context, request, &response);
  if (!status.ok()) return FromGrpc(status);
  return response;
}

void FakeKubelet::SetPods(::v1::ListPodResourcesResponse pods) {
  const MutexLock lock(mu_);
  pods_ = std::move(pods);
}

int FakeKubelet::pod_lists() const {
  const MutexLock lock(mu_);
  return pod_lists_;
}

void FakeKubelet::RefuseRegistrations(std::string why) {
  const MutexLock lock(mu_);
  refusal_ = std::move(why);
}

}  // namespace vrambroker::testing_support
