// SPDX-License-Identifier: Apache-2.0
//
// FakeKubelet: what a kubelet does for device plugins, in a directory of the test's own.
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

// Thread-safe.
class FakeKubelet {
 public:
  // Serves in DIRECTORY/device-plugins, from which it first removes everything, as kubelets do when they start, or only
  // its own socket, and in DIRECTORY/pod-resources.
  explicit FakeKubelet(std::string directory, bool removes_plugins = true);
  ~FakeKubelet();  // as if it were killed: the sockets stay

  // How often a plugin has registered this resource.
  int registrations(const std::string& resource) const ABSL_LOCKS_EXCLUDED(mu_);
  // The units of a resource as its plugin told them last: whether each is healthy, by id.
  std::map<std::string, bool> Units(const std::string& resource) const ABSL_LOCKS_EXCLUDED(mu_);
  size_t HealthyUnits(const std::string& resource) const;

  // Errors are the plugin's.
  absl::StatusOr<std::vector<std::string>> PreferredUnits(const std::string& resource,
                                                          const std::vector<std::string>& available,
                                                          const std::vector<std::string>& required, int count);
  absl::StatusOr<::v1beta1::ContainerAllocateResponse> Allocate(const std::string& resource,
                                                                const std::vector<std::string>& units);
  // Several containers in one call.
  absl::StatusOr<::v1beta1::AllocateResponse> Allocate(const std::string& resource,
                                                       const ::v1beta1::AllocateRequest& request);

  // What it says about pods from now on.
  void SetPods(::v1::ListPodResourcesResponse pods) ABSL_LOCKS_EXCLUDED(mu_);
  // How often it was asked that.
  int pod_lists() const ABSL_LOCKS_EXCLUDED(mu_);

  // Registrations are refused from now on, with this text; empty: they are not.
  void RefuseRegistrations(std::string why) ABSL_LOCKS_EXCLUDED(mu_);

 private:
  class Registration;
  class Lister;
  // A plugin that has registered.
  struct Plugin;

  grpc::Status Register(const ::v1beta1::RegisterRequest& request) ABSL_LOCKS_EXCLUDED(mu_);
  std::shared_ptr<Plugin> Find(const std::string& resource) const ABSL_LOCKS_EXCLUDED(mu_);

  const std::string directory_;
  std::unique_ptr<Registration> registration_;
  std::unique_ptr<Lister> lister_;
  std::unique_ptr<grpc::Server> server_;
  std::unique_ptr<grpc::Server> pods_server_;

  mutable Mutex mu_;
  std::map<std::string, std::shared_ptr<Plugin>> plugins_ ABSL_GUARDED_BY(mu_);  // by resource
  std::vector<std::shared_ptr<Plugin>> earlier_ ABSL_GUARDED_BY(mu_);            // that have registered again
  std::map<std::string, int> registrations_ ABSL_GUARDED_BY(mu_);
  ::v1::ListPodResourcesResponse pods_ ABSL_GUARDED_BY(mu_);
  int pod_lists_ ABSL_GUARDED_BY(mu_) = 0;
  std::string refusal_ ABSL_GUARDED_BY(mu_);
};

}  // namespace vrambroker::testing_support

#endif  // VRAMBROKER_TESTS_SUPPORT_FAKE_KUBELET_H_
