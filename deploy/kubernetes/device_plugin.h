// SPDX-License-Identifier: Apache-2.0
//
// DevicePlugin: answers the kubelet for a resource. A container requesting units gets a claim: a limit of that many
// units, and the directory of the claim's sockets.
#ifndef VRAMBROKER_DEPLOY_KUBERNETES_DEVICE_PLUGIN_H_
#define VRAMBROKER_DEPLOY_KUBERNETES_DEVICE_PLUGIN_H_

#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "allocator/base/mutex.h"
#include "deploy/kubernetes/daemon_client.h"
#include "deploy/kubernetes/pod_claims.h"
#include "deploy/kubernetes/proto/deviceplugin.grpc.pb.h"
#include "deploy/kubernetes/units.h"

namespace vrambroker::kubernetes {

// How a container reaches the GPU itself. Host devices need nothing.
enum class GpuAccess {
  kEnvironment,  // NVIDIA_VISIBLE_DEVICES, for NVIDIA's container runtime
  kCdi,          // nvidia.com/gpu=UUID, for kubelets since 1.28
  kNone,         // left to other software
};

// A device of the daemon, as units.
struct DeviceOfUnits {
  std::string uuid;
  uint32_t ordinal = 0;
  bool is_gpu = false;
  uint32_t units = 0;       // COUNT
  bool is_healthy = false;  // the daemon serves the device
  bool operator==(const DeviceOfUnits&) const = default;
};

// Thread-safe.
class DevicePlugin final
    : public ::v1beta1::DevicePlugin::WithCallbackMethod_ListAndWatch<::v1beta1::DevicePlugin::Service> {
 public:
  // The directory of the claim's sockets inside a container.
  static constexpr char kSocketDirInContainer[] = "/run/vrambroker";

  // `daemon` and `pod_claims`, told of new claims, outlive the plugin.
  DevicePlugin(std::string resource, uint64_t unit_bytes, GpuAccess access, const DaemonClient& daemon,
               PodClaims& pod_claims);

  // Sets the current devices. Tells watching kubelets about changes.
  void SetDevices(std::vector<DeviceOfUnits> devices) ABSL_LOCKS_EXCLUDED(mu_);
  // Whether a kubelet watches: a kubelet without a watch needs a new registration.
  bool IsWatched() const ABSL_LOCKS_EXCLUDED(mu_);
  // Ends the watches, and prevents new watches: a server's shutdown waits for watches.
  void EndWatches() ABSL_LOCKS_EXCLUDED(mu_);

  // ---- Called by the kubelet ----

  grpc::Status GetDevicePluginOptions(grpc::ServerContext* context, const ::v1beta1::Empty* request,
                                      ::v1beta1::DevicePluginOptions* response) override;
  grpc::ServerWriteReactor<::v1beta1::ListAndWatchResponse>* ListAndWatch(grpc::CallbackServerContext* context,
                                                                          const ::v1beta1::Empty* request) override
      ABSL_LOCKS_EXCLUDED(mu_);
  grpc::Status GetPreferredAllocation(grpc::ServerContext* context,
                                      const ::v1beta1::PreferredAllocationRequest* request,
                                      ::v1beta1::PreferredAllocationResponse* response) override;
  grpc::Status Allocate(grpc::ServerContext* context, const ::v1beta1::AllocateRequest* request,
                        ::v1beta1::AllocateResponse* response) override ABSL_LOCKS_EXCLUDED(mu_);

 private:
  class Watch;

  void Forget(const Watch* watch) ABSL_LOCKS_EXCLUDED(mu_);
  ::v1beta1::ListAndWatchResponse ListUnits() const ABSL_LOCKS_EXCLUDED(mu_);
  absl::StatusOr<::v1beta1::ContainerAllocateResponse> AllocateContainer(const std::vector<std::string>& ids)
      ABSL_LOCKS_EXCLUDED(mu_);
  // NotFound: units never reported to the kubelet.
  absl::StatusOr<DeviceOfUnits> FindDevice(const DeviceUnits& units) const ABSL_LOCKS_EXCLUDED(mu_);

  const std::string resource_;
  const uint64_t unit_bytes_;
  const GpuAccess access_;
  const DaemonClient& daemon_;
  PodClaims& pod_claims_;

  mutable Mutex mu_;
  std::vector<DeviceOfUnits> devices_ ABSL_GUARDED_BY(mu_);
  std::set<std::shared_ptr<Watch>> watches_ ABSL_GUARDED_BY(mu_);
  bool ended_ ABSL_GUARDED_BY(mu_) = false;
};

}  // namespace vrambroker::kubernetes

#endif  // VRAMBROKER_DEPLOY_KUBERNETES_DEVICE_PLUGIN_H_
