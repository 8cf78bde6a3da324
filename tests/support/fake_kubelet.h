// SPDX-License-Identifier: Apache-2.0
//
// FakeKubelet does a kubelet's work for device plugins, in a directory of the test.
#ifndef VRAMBROKER_TESTS_SUPPORT_FAKE_KUBELET_H_
#define VRAMBROKER_TESTS_SUPPORT_FAKE_KUBELET_H_

#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/statusor.h"
#include "allocator/base/mutex.h"
#include "deploy/kubernetes/proto/deviceplugin.grpc.pb.h"
#include "deploy/kubernetes/proto/podresources.grpc.pb.h"

namespace vrambroker::testing_support {

// The class is thread-safe.
class FakeKubelet {
 public:
  // Serves in DIRECTORY/device-plugins and in DIRECTORY/pod-resources. The constructor first empties
  // DIRECTORY/device-plugins, like a starting kubelet; without `removes_plugins` the constructor removes only the
  // kubelet's socket.
  explicit FakeKubelet(std::string directory, bool removes_plugins = true);
  ~FakeKubelet();  // leaves the sockets, like a killed kubelet

  // Returns the number of registrations of this resource, refused registrations included.
  int registrations(const std::string& resource) const ABSL_LOCKS_EXCLUDED(mu_);
  // Returns the units of a resource by the plugin's last message: each unit's health, by id.
  std::map<std::string, bool> Units(const std::string& resource) const ABSL_LOCKS_EXCLUDED(mu_);
  size_t HealthyUnits(const std::string& resource) const;

  // Errors come from the plugin.
  absl::StatusOr<std::vector<std::string>> PreferredUnits(const std::string& resource,
                                                          const std::vector<std::string>& available,
                                                          const std::vector<std::string>& required, int count);
  absl::StatusOr<::v1beta1::ContainerAllocateResponse> Allocate(const std::string& resource,
                                                                const std::vector<std::string>& units);
  // Allocates for several containers in one call.
  absl::StatusOr<::v1beta1::AllocateResponse> Allocate(const std::string& resource,
                                                       const ::v1beta1::AllocateRequest& request);

  // Sets the answer about pods from now on.
  void SetPods(::v1::ListPodResourcesResponse pods) ABSL_LOCKS_EXCLUDED(mu_);
  // Returns the number of questions about pods.
  int pod_lists() const ABSL_LOCKS_EXCLUDED(mu_);

  // Refuses registrations from now on, with this text. An empty text ends the refusals.
  void RefuseRegistrations(std::string why) ABSL_LOCKS_EXCLUDED(mu_);

 private:
  class Registration;
  class Lister;
  // Plugin is a registered plugin.
  struct Plugin;

  grpc::Status Register(const ::v1beta1::RegisterRequest& request) ABSL_LOCKS_EXCLUDED(mu_);
  std::shared_ptr<Plugin> Find(const std::string& resource) const ABSL_LOCKS_EXCLUDED(mu_);

  const std::string directory_;
  std::unique_ptr<Registration> registration_;
  std::unique_ptr<Lister> lister_;
  std::unique_ptr<grpc::Server> server_;
  std::unique_ptr<grpc::Server> pods_server_;

  mutable Mutex mu_;
  std::map<std::string, std::shared_ptr<Plugin>> plugins_ ABSL_GUARDED_BY(mu_);  // key: resource
  std::vector<std::shared_ptr<Plugin>> earlier_ ABSL_GUARDED_BY(mu_);            // plugins that have registered again
  std::map<std::string, int> registrations_ ABSL_GUARDED_BY(mu_);
  ::v1::ListPodResourcesResponse pods_ ABSL_GUARDED_BY(mu_);
  int pod_lists_ ABSL_GUARDED_BY(mu_) = 0;
  std::string refusal_ ABSL_GUARDED_BY(mu_);
};

}  // namespace vrambroker::testing_support

#endif  // VRAMBROKER_TESTS_SUPPORT_FAKE_KUBELET_H_
