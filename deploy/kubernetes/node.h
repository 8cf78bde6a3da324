// SPDX-License-Identifier: Apache-2.0
//
// Node: a node's memory as resources of its kubelet, and the claims of its pods.
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
  std::string kubelet_dir;  // has device-plugins/ and pod-resources/
  uint64_t unit_bytes = 0;
  std::string resource;
  bool resource_per_device = false;  // "-ORDINAL" is added to its name
  GpuAccess gpu_access = GpuAccess::kEnvironment;
  // This process's own: a list without it is not the kubelet's whole list yet.
  std::string pod;
  std::string pod_namespace;
};

// The plugin's claims that may still be used.
std::vector<UnitClaim> UnitClaims(const std::vector<v1::Claim>& claims);

// For one thread.
class Node {
 public:
  using Clock = std::chrono::steady_clock;

  // How often Step() is to be called.
  static constexpr std::chrono::seconds kPeriod{1};

  explicit Node(const NodeOptions& options);

  // Looks at the daemon, the kubelet and the claims, and does what there is to do. Takes as long as those take to
  // answer.
  void Step();

 private:
  // Says an error when it begins and when it changes, and its end: not each second.
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
  // As the daemon said last; one that it has no more stays.
  std::vector<DeviceOfUnits> devices_;
  // By the device's uuid. A name with an ordinal stays that of the device, should the daemon number it anew.
  std::map<std::string, std::string> resource_of_;
  std::map<std::string, std::unique_ptr<PluginServer>> servers_;  // by resource
  Clock::time_point compared_;

  Trouble no_daemon_{"daemon"};
  Trouble no_kubelet_{"kubelet"};
  Trouble no_pods_{"pods"};
};

}  // namespace vrambroker::kubernetes

#endif  // VRAMBROKER_DEPLOY_KUBERNETES_NODE_H_
