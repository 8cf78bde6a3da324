// SPDX-License-Identifier: Apache-2.0
#ifndef VRAMBROKER_DEPLOY_KUBERNETES_PLUGIN_SERVER_H_
#define VRAMBROKER_DEPLOY_KUBERNETES_PLUGIN_SERVER_H_

#include <sys/types.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "deploy/kubernetes/device_plugin.h"

namespace vrambroker::kubernetes {

// A resource known to the kubelet: a DevicePlugin on a registered socket in the kubelet's directory. For a single
// thread.
class PluginServer {
 public:
  using Clock = std::chrono::steady_clock;

  // `directory`: the kubelet's folder for kubelet.sock and for plugins' sockets. `daemon` and `pod_claims` outlive the
  // server.
  PluginServer(std::string directory, std::string resource, uint64_t unit_bytes, GpuAccess access,
               const DaemonClient& daemon, PodClaims& pod_claims);
  ~PluginServer();

  void SetDevices(const std::vector<DeviceOfUnits>& devices);

  // Call periodically. Serves when not serving, and registers when no kubelet watches: a starting kubelet forgets all
  // plugins, and removes their sockets. Errors give the obstacle; the next call tries again.
  absl::Status KeepRegistered();

 private:
  struct FileId {
    dev_t device = 0;
    ino_t inode = 0;
    bool operator==(const FileId&) const = default;
  };
  static std::optional<FileId> IdOf(const std::string& path);  // none: no such file

  absl::Status Serve();
  void StopServing();
  absl::Status Register();

  const std::string directory_;
  const std::string resource_;
  const uint64_t unit_bytes_;
  const GpuAccess access_;
  const DaemonClient& daemon_;
  PodClaims& pod_claims_;
  const std::string endpoint_;  // the socket's name
  std::vector<DeviceOfUnits> devices_;

  std::unique_ptr<DevicePlugin> plugin_;  // while served
  std::unique_ptr<grpc::Server> server_;
  std::optional<FileId> socket_;
  std::optional<FileId> registered_with_;  // kubelet.sock at the registration
  Clock::time_point registered_;
};

}  // namespace vrambroker::kubernetes

#endif  // VRAMBROKER_DEPLOY_KUBERNETES_PLUGIN_SERVER_H_
