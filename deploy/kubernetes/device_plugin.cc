// SPDX-License-Identifier: Apache-2.0
#include "deploy/kubernetes/device_plugin.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "allocator/base/utf8.h"
#include "deploy/kubernetes/labels.h"
#include "server/base/log_line.h"
#include "server/base/random_token.h"

namespace vrambroker::kubernetes {
namespace {

// The message for the pod's event: the kubelet adds only that the allocation failed.
grpc::Status ToGrpc(const absl::Status& status) {
  return {static_cast<grpc::StatusCode>(status.raw_code()),
          absl::StrCat("vrambroker-device-plugin: ", absl::string_view(status.message()))};
}

// Names are never reused: a container with the directory of a removed claim gets into no later claim.
absl::StatusOr<std::string> NewClaimName(uint32_t ordinal, uint32_t first_unit) {
  const absl::StatusOr<RandomToken> token = NewRandomToken();
  if (!token.ok()) return token.status();
  return absl::StrCat("k8s-", ordinal, "-", first_unit, "-", absl::BytesToHexString({token->data(), 8}));
}

}  // namespace

// A kubelet watching the devices.
class DevicePlugin::Watch final : public grpc::ServerWriteReactor<::v1beta1::ListAndWatchResponse> {
 public:
  explicit Watch(DevicePlugin& plugin) : plugin_(plugin) {}

  // Tells the kubelet that the devices have changed.
  void Tell() ABSL_LOCKS_EXCLUDED(mu_) {
    {
      const MutexLock lock(mu_);
      stale_ = true;
    }
    Proceed();
  }
  void End() ABSL_LOCKS_EXCLUDED(mu_) {
    {
      const MutexLock lock(mu_);
      ended_ = true;
    }
    Proceed();
  }

  void OnWriteDone(bool ok) override ABSL_LOCKS_EXCLUDED(mu_) {
    {
      const MutexLock lock(mu_);
      busy_ = false;
      if (!ok) ended_ = true;
    }
    Proceed();
  }
  void OnCancel() override { End(); }
  void OnDone() override { plugin_.Forget(this); }

 private:
  // Takes the next action, a single action at a time: never writes during another write, or after the end.
  void Proceed() ABSL_LOCKS_EXCLUDED(mu_) {
    bool finish = false;
    {
      const MutexLock lock(mu_);
      if (busy_ || (!ended_ && !stale_)) return;
      busy_ = true;
      stale_ = false;
      finish = ended_;
    }
    if (finish) {
      Finish(grpc::Status::OK);
    } else {
      message_ = plugin_.ListUnits();
      StartWrite(&message_);
    }
  }

  DevicePlugin& plugin_;
  Mutex mu_;
  bool stale_ ABSL_GUARDED_BY(mu_) = false;  // the kubelet lacks the latest devices
  bool ended_ ABSL_GUARDED_BY(mu_) = false;
  bool busy_ ABSL_GUARDED_BY(mu_) = false;   // writing, or finished
  ::v1beta1::ListAndWatchResponse message_;  // being written
};

DevicePlugin::DevicePlugin(std::string resource, uint64_t unit_bytes, GpuAccess access, const DaemonClient& daemon,
                           PodClaims& pod_claims)
    : resource_(std::move(resource)),
      unit_bytes_(unit_bytes),
      access_(access),
      daemon_(daemon),
      pod_claims_(pod_claims) {}

void DevicePlugin::SetDevices(std::vector<DeviceOfUnits> devices) {
  std::set<std::shared_ptr<Watch>> watches;
  {
    const MutexLock lock(mu_);
    if (devices_ == devices) return;
    devices_ = std::move(devices);
    watches = watches_;
  }
  for (const auto& watch : watches) watch->Tell();
}

bool DevicePlugin::IsWatched() const {
  const MutexLock lock(mu_);
  return !watches_.empty();
}

void DevicePlugin::EndWatches() {
  std::set<std::shared_ptr<Watch>> watches;
  {
    const MutexLock lock(mu_);
    ended_ = true;
    watches = watches_;
  }
  for (const auto& watch : watches) watch->End();
}

void DevicePlugin::Forget(const Watch* watch) {
  std::shared_ptr<Watch> forgotten;  // destroyed after the lock is released
  const MutexLock lock(mu_);
  const auto it = absl::c_find_if(watches_, [watch](const auto& other) { return other.get() == watch; });
  if (it == watches_.end()) return;
  forgotten = *it;
  watches_.erase(it);
}

::v1beta1::ListAndWatchResponse DevicePlugin::ListUnits() const {
  ::v1beta1::ListAndWatchResponse list;
  const MutexLock lock(mu_);
  for (const DeviceOfUnits& device : devices_) {
    for (uint32_t number = 0; number < device.units; ++number) {
      ::v1beta1::Device* unit = list.add_devices();
      unit->set_id(UnitId(device.uuid, number));
      unit->set_health(device.is_healthy ? "Healthy" : "Unhealthy");
    }
  }
  return list;
}

absl::StatusOr<DeviceOfUnits> DevicePlugin::FindDevice(const DeviceUnits& units) const {
  const MutexLock lock(mu_);
  const auto it = absl::c_find_if(devices_, [&](const DeviceOfUnits& device) { return device.uuid == units.device; });
  if (it == devices_.end()) {
    return absl::NotFoundError(absl::StrCat("the daemon has no device ", CleanText(units.device, kMostIdShown)));
  }
  if (const uint32_t last = *units.numbers.rbegin(); last >= it->units) {
    return absl::NotFoundError(absl::StrCat("device ", it->ordinal, " has no unit ", last, " of memory: of ", resource_,
                                            " it has ", it->units, it->units == 1 ? " unit" : " units",
                                            ", numbered from 0"));
  }
  return *it;
}

grpc::Status DevicePlugin::GetDevicePluginOptions(grpc::ServerContext* /*context*/, const ::v1beta1::Empty* /*request*/,
                                                  ::v1beta1::DevicePluginOptions* response) {
  response->set_get_preferred_allocation_available(true);
  return grpc::Status::OK;
}

grpc::ServerWriteReactor<::v1beta1::ListAndWatchResponse>* DevicePlugin::ListAndWatch(
    grpc::CallbackServerContext* /*context*/, const ::v1beta1::Empty* /*request*/) {
  const auto watch = std::make_shared<Watch>(*this);
  bool ended = false;
  {
    const MutexLock lock(mu_);
    watches_.insert(watch);
    ended = ended_;
  }
  if (ended) {
    watch->End();
  } else {
    watch->Tell();
  }
  return watch.get();
}

grpc::Status DevicePlugin::GetPreferredAllocation(grpc::ServerContext* /*context*/,
                                                  const ::v1beta1::PreferredAllocationRequest* request,
                                                  ::v1beta1::PreferredAllocationResponse* response) {
  for (const auto& container : request->container_requests()) {
    const std::vector<std::string> available(container.available_deviceids().begin(),
                                             container.available_deviceids().end());
    const std::vector<std::string> required(container.must_include_deviceids().begin(),
                                            container.must_include_deviceids().end());
    auto* answer = response->add_container_responses();
    for (std::string& id : ChooseUnits(available, required, std::max(0, container.allocation_size()))) {
      answer->add_deviceids(std::move(id));
    }
  }
  return grpc::Status::OK;
}

grpc::Status DevicePlugin::Allocate(grpc::ServerContext* /*context*/, const ::v1beta1::AllocateRequest* request,
                                    ::v1beta1::AllocateResponse* response) {
  for (const auto& container : request->container_requests()) {
    absl::StatusOr<::v1beta1::ContainerAllocateResponse> answer =
        AllocateContainer({container.devicesids().begin(), container.devicesids().end()});
    // Claims of earlier containers then belong to no container, and are removed like claims of removed pods.
    if (!answer.ok()) {
      LogLine("allocation failed")
          .Add("resource", resource_)
          .Add("why", answer.status().message())
          .Write(spdlog::level::warn);
      return ToGrpc(answer.status());
    }
    *response->add_container_responses() = *std::move(answer);
  }
  return grpc::Status::OK;
}

absl::StatusOr<::v1beta1::ContainerAllocateResponse> DevicePlugin::AllocateContainer(
    const std::vector<std::string>& ids) {
  const absl::StatusOr<DeviceUnits> units = ParseUnitIds(ids);
  if (!units.ok()) return units.status();
  const absl::StatusOr<DeviceOfUnits> device = FindDevice(*units);
  if (!device.ok()) return device.status();
  // The kubelet starts nothing else while waiting for the answer.
  if (!device->is_healthy) {
    return absl::UnavailableError(absl::StrCat("the daemon does not serve device ", device->ordinal, " now"));
  }
  absl::StatusOr<std::string> name = NewClaimName(device->ordinal, *units->numbers.begin());
  if (!name.ok()) return name.status();

  v1::CreateClaimRequest request;
  request.set_name(*std::move(name));
  v1::ClaimTerms& terms = *request.mutable_terms();
  terms.mutable_limit()->set_bytes(units->numbers.size() * unit_bytes_);
  terms.add_devices(device->ordinal);
  // The container's processes may run as any user. The daemon's directory keeps other users of the node away: see
  // README.
  terms.set_any_owner(true);
  auto& labels = *terms.mutable_labels();
  labels[kResourceLabel] = resource_;
  labels[kDeviceLabel] = device->uuid;
  labels[kUnitsLabel] = FormatUnits(units->numbers, kMostLabelBytes);
  pod_claims_.NoteCreated(request.name(), PodClaims::Clock::now());
  const absl::StatusOr<v1::Claim> claim = daemon_.CreateClaim(request);
  if (!claim.ok()) return claim.status();
  LogLine("claim created")
      .Add("claim", claim->name())
      .Add("resource", resource_)
      .Add("device", device->ordinal)
      .Add("units", units->numbers.size())
      .Write(spdlog::level::info);

  ::v1beta1::ContainerAllocateResponse response;
  (*response.mutable_envs())["VRAMBROKER_SOCKET_DIR"] = kSocketDirInContainer;
  ::v1beta1::Mount* mount = response.add_mounts();
  mount->set_host_path(claim->socket_dir());
  mount->set_container_path(kSocketDirInContainer);
  mount->set_read_only(true);
  if (device->is_gpu && access_ == GpuAccess::kEnvironment) {
    (*response.mutable_envs())["NVIDIA_VISIBLE_DEVICES"] = device->uuid;
  } else if (device->is_gpu && access_ == GpuAccess::kCdi) {
    response.add_cdi_devices()->set_name(absl::StrCat("nvidia.com/gpu=", device->uuid));
  }
  return response;
}

}  // namespace vrambroker::kubernetes
