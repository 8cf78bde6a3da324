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

// One resource, known to the kubelet: its DevicePlugin on a socket in the kubelet's directory, registered. For one
// thread.
class PluginServer {
 public:
  using Clock = std::chrono::steady_clock;

  // `directory`: where the kubelet has kubelet.sock, and looks for the sockets of plugins. `daemon` and `pod_claims`
  // outlive this.
  PluginServer(std::string directory, std::string resource, uint64_t unit_bytes, GpuAccess access,
               const DaemonClient& daemon, PodClaims& pod_claims);
  ~PluginServer();

  void SetDevices(const std::vector<DeviceOfUnits>& devices);

  // To be called again and again. Serves where nothing is served, and registers where no kubelet watches: one that
  // starts forgets all plugins, and removes their sockets. An error says what keeps it from that; it is tried again.
  absl::Status KeepRegistered();

 private:
  struct FileId {
    dev_t device = 0;
    ino_t inode = 0;
    bool operator==(const FileId&) const = default;
  };
  static std::optional<FileId> IdOf(const std::string& path);  // none: there is no such file

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

  std::unique_ptr<DevicePlugin> plugin_;  // while it is served
  std::unique_ptr<grpc::Server> server_;
  std::optional<FileId> socket_;
  std::optional<FileId> registered_with_;  // kubelet.sock, as it was then
  Clock::time_point registered_;
};

}  // namespace vrambroker::kubernetes

#endif  // VRAMBROKER_DEPLOY_KUBERNETES_PLUGIN_SERVER_H_
