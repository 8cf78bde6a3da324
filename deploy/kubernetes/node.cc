// SPDX-License-Identifier: Apache-2.0
#include "deploy/kubernetes/node.h"

#include <grpcpp/grpcpp.h>
#include <spdlog/spdlog.h>

#include <utility>

#include "absl/algorithm/container.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "allocator/base/bytes.h"
#include "client/connection/connection.h"
#include "deploy/kubernetes/labels.h"
#include "deploy/kubernetes/proto/podresources.grpc.pb.h"
#include "deploy/kubernetes/units.h"
#include "server/base/log_line.h"

namespace vrambroker::kubernetes {
namespace {

constexpr absl::Duration kDaemonTimeout = absl::Seconds(5);
constexpr absl::Duration kListTimeout = absl::Seconds(10);
constexpr std::chrono::seconds kComparePeriod{5};
constexpr int kMostBytesOfList = 16 << 20;  // the limit of Kubernetes' own clients

absl::StatusOr<::v1::ListPodResourcesResponse> ListPods(const std::string& kubelet_dir) {
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(kMostBytesOfList);
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);  // as in PluginServer::Register()
  const std::shared_ptr<grpc::Channel> channel = grpc::CreateCustomChannel(
      absl::StrCat("unix:", kubelet_dir, "/pod-resources/kubelet.sock"), grpc::InsecureChannelCredentials(), arguments);
  grpc::ClientContext context;
  client_internal::SetTimeout(context, kListTimeout);
  ::v1::ListPodResourcesResponse response;
  const grpc::Status status = ::v1::PodResourcesLister::NewStub(channel)->List(&context, {}, &response);
  if (!status.ok()) {
    return absl::Status(static_cast<absl::StatusCode>(status.error_code()),
                        absl::StrCat("the kubelet does not say which pods there are (", kubelet_dir,
                                     "/pod-resources/kubelet.sock): ", status.error_message()));
  }
  return response;
}

// The listed containers with units of memory. Older kubelets list an entry with all units of a container, newer
// kubelets an entry per unit.
std::vector<ContainerUnits> ContainersWithUnits(const ::v1::ListPodResourcesResponse& pods) {
  std::vector<ContainerUnits> containers;
  for (const ::v1::PodResources& pod : pods.pod_resources()) {
    for (const ::v1::ContainerResources& container : pod.containers()) {
      std::map<std::string, std::vector<std::string>> ids;  // by resource
      for (const ::v1::ContainerDevices& devices : container.devices()) {
        std::vector<std::string>& of_resource = ids[devices.resource_name()];
        of_resource.insert(of_resource.end(), devices.device_ids().begin(), devices.device_ids().end());
      }
      for (const auto& [resource, of_resource] : ids) {
        absl::StatusOr<DeviceUnits> units = ParseUnitIds(of_resource);
        if (!units.ok()) continue;  // of another plugin
        containers.push_back({.pod_namespace = pod.namespace_(),
                              .pod = pod.name(),
                              .container = container.name(),
                              .resource = resource,
                              .units = *std::move(units)});
      }
    }
  }
  return containers;
}

// The daemon does not answer: a further call would wait as long.
bool IsAway(const absl::Status& status) {
  return absl::IsUnavailable(status) || absl::IsDeadlineExceeded(status);
}

}  // namespace

std::vector<UnitClaim> UnitClaims(const std::vector<v1::Claim>& claims) {
  std::vector<UnitClaim> made;
  for (const v1::Claim& claim : claims) {
    if (claim.state() != v1::CLAIM_STATE_ACTIVE || !claim.terms().labels().contains(kResourceLabel)) continue;
    made.push_back(
        {.name = claim.name(),
         .labels = {claim.terms().labels().begin(), claim.terms().labels().end()},
         .is_idle = claim.sessions() == 0 && absl::c_all_of(claim.devices(), [](const v1::ClaimDevice& device) {
                      return device.reserved_bytes() == 0;
                    })});
  }
  return made;
}

void Node::Trouble::Note(const absl::Status& status) {
  const std::string text(status.message());
  if (text == said_) return;
  if (status.ok()) {
    LogLine(absl::StrCat(event_, " back")).Write(spdlog::level::info);
  } else {
    LogLine(absl::StrCat(event_, " unavailable")).Add("why", text).Write(spdlog::level::warn);
  }
  said_ = text;
}

Node::Node(const NodeOptions& options) : options_(options), daemon_(options.socket_dir, kDaemonTimeout) {}

void Node::Step() {
  no_daemon_.Note(ReadDevices());
  KeepRegistered();
  const Clock::time_point now = Clock::now();
  const bool has_new = pod_claims_.HasCreatedSince(now - PodClaims::kLongAdmission);
  if (servers_.empty() || (!has_new && now - compared_ < kComparePeriod)) return;
  no_pods_.Note(CompareClaims());
  compared_ = Clock::now();
}

void Node::KeepRegistered() {
  std::map<std::string, std::vector<DeviceOfUnits>> resources;
  for (const DeviceOfUnits& device : devices_) {
    const std::string suffix = options_.resource_per_device ? absl::StrCat("-", device.ordinal) : "";
    resources[resource_of_.try_emplace(device.uuid, options_.resource + suffix).first->second].push_back(device);
  }
  absl::Status status;
  for (const auto& [resource, devices] : resources) {
    std::unique_ptr<PluginServer>& server = servers_[resource];
    if (server == nullptr) {
      server = std::make_unique<PluginServer>(options_.kubelet_dir + "/device-plugins", resource, options_.unit_bytes,
                                              options_.gpu_access, daemon_, pod_claims_);
    }
    server->SetDevices(devices);
    status.Update(server->KeepRegistered());
  }
  no_kubelet_.Note(status);
}

absl::Status Node::ReadDevices() {
  const absl::StatusOr<std::vector<v1::Device>> devices = daemon_.Devices();
  // Earlier devices stay known. Their units cannot be given out meanwhile; pods keep their units.
  for (DeviceOfUnits& device : devices_) device.is_healthy = false;
  if (!devices.ok()) return devices.status();
  uint64_t units = 0;
  for (const v1::Device& device : *devices) units += device.capacity_bytes() / options_.unit_bytes;
  if (units > kMostUnits) {
    return absl::FailedPreconditionError(
        absl::StrCat("the daemon's memory is ", units, " units of ", FormatBytes(options_.unit_bytes),
                     ", and the kubelet has to list each: give --unit a larger size, for ", kMostUnits, " at most"));
  }
  for (const v1::Device& device : *devices) {
    auto known = absl::c_find_if(devices_, [&](const DeviceOfUnits& other) { return other.uuid == device.uuid(); });
    if (known == devices_.end()) known = devices_.insert(known, {.uuid = device.uuid()});
    known->ordinal = device.ordinal();
    known->is_gpu = device.kind() == v1::DEVICE_KIND_CUDA;
    known->units = static_cast<uint32_t>(device.capacity_bytes() / options_.unit_bytes);
    known->is_healthy = device.fault().empty();
  }
  return absl::OkStatus();
}

absl::Status Node::CompareClaims() {
  // In this order: see PodClaims.
  const absl::StatusOr<std::vector<v1::Claim>> claims = daemon_.Claims();
  if (!claims.ok()) return claims.status();
  const absl::StatusOr<::v1::ListPodResourcesResponse> pods = ListPods(options_.kubelet_dir);
  if (!pods.ok()) return pods.status();
  const bool is_whole = absl::c_any_of(pods->pod_resources(), [this](const ::v1::PodResources& pod) {
    return pod.name() == options_.pod && pod.namespace_() == options_.pod_namespace;
  });
  if (!is_whole) {
    return absl::UnavailableError(absl::StrCat("the kubelet's list of pods lacks ", options_.pod_namespace, "/",
                                               options_.pod, ", this one: claims of pods that have gone are kept"));
  }
  return CarryOut(pod_claims_.Compare(UnitClaims(*claims), ContainersWithUnits(*pods), Clock::now()));
}

absl::Status Node::CarryOut(const ClaimChanges& changes) {
  absl::Status first;
  for (const UnitClaim& claim : changes.label) {
    const absl::Status status = daemon_.SetLabels(claim.name, claim.labels);
    if (IsAway(status)) return status;
    if (absl::IsNotFound(status)) continue;  // removed meanwhile
    first.Update(status);
    if (!status.ok()) continue;
    LogLine("claim of a pod")
        .Add("claim", claim.name)
        .Add("namespace", claim.labels.at(kNamespaceLabel))
        .Add("pod", claim.labels.at(kPodLabel))
        .Write(spdlog::level::info);
  }
  for (const std::string& claim : changes.drain) {
    const absl::Status status = daemon_.DrainClaim(claim);
    if (IsAway(status)) return status;
    first.Update(status);
    if (!status.ok()) continue;
    LogLine("claim removed").Add("claim", claim).Add("why", "its pod has gone").Write(spdlog::level::info);
  }
  return first;
}

}  // namespace vrambroker::kubernetes
