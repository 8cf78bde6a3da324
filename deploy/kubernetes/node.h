// SPDX-License-Identifier: Apache-2.0
//
// Node: a node's memory as resources of the kubelet, and the claims of pods.
#ifndef VRAMBROKER_DEPLOY_KUBERNETES_NODE_H_
#define VRAMBROKER_DEPLOY_KUBERNETES_NODE_H_

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "deploy/kubernetes/daemon_client.h"
#include "deploy/kubernetes/device_plugin.h"
#include "deploy/kubernetes/plugin_server.h"
#include "deploy/kubernetes/pod_claims.h"

namespace vrambroker::kubernetes {

struct NodeOptions {
  std::string socket_dir;   // the daemon's
  std::string kubelet_dir;  // contains device-plugins/ and pod-resources/
  uint64_t unit_bytes = 0;
  std::string resource;
  bool resource_per_device = false;  // adds "-ORDINAL" to the resource's name
  GpuAccess gpu_access = GpuAccess::kEnvironment;
  // The pod of this process: a list without the pod is not yet the kubelet's whole list.
  std::string pod;
  std::string pod_namespace;
};

// The plugin's claims possibly still in use.
std::vector<UnitClaim> UnitClaims(const std::vector<v1::Claim>& claims);

// For a single thread.
class Node {
 public:
  using Clock = std::chrono::steady_clock;

  // Period for calling Step().
  static constexpr std::chrono::seconds kPeriod{1};

  explicit Node(const NodeOptions& options);

  // Looks at the daemon, the kubelet and the claims, and takes the necessary actions. Takes as long as the daemon and
  // the kubelet take to answer.
  void Step();

 private:
  // Logs the beginning, each change and the end of an error, instead of repeating the error every second.
  class Trouble {
   public:
    explicit Trouble(const char* event) : event_(event) {}
    void Note(const absl::Status& status);

   private:
    const char* const event_;
    std::string said_;
  };

  absl::Status ReadDevices();
  void KeepRegistered();
  absl::Status CompareClaims();
  absl::Status CarryOut(const ClaimChanges& changes);

  const NodeOptions options_;
  const DaemonClient daemon_;
  PodClaims pod_claims_;
  // The daemon's last devices; devices that disappear stay.
  std::vector<DeviceOfUnits> devices_;
  // By device UUID. A name with an ordinal stays with the device even when the daemon renumbers devices.
  std::map<std::string, std::string> resource_of_;
  std::map<std::string, std::unique_ptr<PluginServer>> servers_;  // by resource
  Clock::time_point compared_;

  Trouble no_daemon_{"daemon"};
  Trouble no_kubelet_{"kubelet"};
  Trouble no_pods_{"pods"};
};

}  // namespace vrambroker::kubernetes

#endif  // VRAMBROKER_DEPLOY_KUBERNETES_NODE_H_
