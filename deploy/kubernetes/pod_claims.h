// SPDX-License-Identifier: Apache-2.0
//
// PodClaims: assigns claims to pods, and finds claims without a pod. The kubelet lists the units of each container, but
// never reports the end of a container. So the plugin repeatedly compares the kubelet's lists with the claims.
#ifndef VRAMBROKER_DEPLOY_KUBERNETES_POD_CLAIMS_H_
#define VRAMBROKER_DEPLOY_KUBERNETES_POD_CLAIMS_H_

#include <chrono>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "allocator/base/mutex.h"
#include "deploy/kubernetes/units.h"

namespace vrambroker::kubernetes {

// A claim made by the plugin.
struct UnitClaim {
  std::string name;
  std::map<std::string, std::string> labels;
  bool is_idle = false;  // without sessions and charges
};

// Units of a container in the kubelet's list.
struct ContainerUnits {
  std::string pod_namespace;
  std::string pod;
  std::string container;
  std::string resource;
  DeviceUnits units;
};

// Required changes to the claims.
struct ClaimChanges {
  std::vector<UnitClaim> label;  // claims with new labels
  std::vector<std::string> drain;
};

// Thread-safe.
class PodClaims {
 public:
  using Clock = std::chrono::steady_clock;

  // A listed claim is drained after missing from this many lists in a row, and for this long: a starting kubelet adds
  // its pods step by step.
  static constexpr int kUnlistedTimes = 3;
  static constexpr std::chrono::seconds kUnlistedFor{15};
  // For claims never listed: of an init container, of a sidecar (kubelets before 1.30 list neither), or of a container
  // never started.
  static constexpr std::chrono::hours kNeverListedFor{1};
  // Maximum and usual time for the kubelet's requests for all containers of a pod. The kubelet may list the pod
  // meanwhile. So a pod that ends within this time, and is recreated with the same name and units, looks like a pod
  // with an init container: the pod's idle claim stays until the next pod is gone, too.
  static constexpr std::chrono::minutes kLongAdmission{1};
  static constexpr std::chrono::seconds kAdmission{3};

  // Notes that a claim of this name is about to be made.
  void NoteCreated(const std::string& claim, Clock::time_point now) ABSL_LOCKS_EXCLUDED(mu_);

  // Whether a claim was made since `time`: comparing soon afterwards leaves fewer pods that end before being listed.
  bool HasCreatedSince(Clock::time_point time) ABSL_LOCKS_EXCLUDED(mu_);

  // `claims` must be read before `containers`, a list of all pods. In the opposite order a claim could be mistaken for
  // the claim of the previous pod with the same units.
  //
  // A claim is listed when a container has a unit of the claim. The claim then takes the pod's name. A claim with
  // another pod's name shows that the other pod is gone. So does a unit given out again by the kubelet, except to the
  // same pod: init containers share units with later containers, and their claims are made together, before any list
  // shows the pod. Only idle claims are drained: a claim in use still has a user, whatever the list says.
  ClaimChanges Compare(const std::vector<UnitClaim>& claims, const std::vector<ContainerUnits>& containers,
                       Clock::time_point now) ABSL_LOCKS_EXCLUDED(mu_);

 private:
  struct Unlisted {
    Clock::time_point since;
    int times = 0;
  };

  // Adds to superseded_ each claim with a unit since given to another pod.
  void FindSuperseded(const std::vector<UnitClaim>& claims) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  bool IsGivenAgain(const UnitClaim& claim, const UnitClaim& later) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  Mutex mu_;
  Clock::time_point last_created_ ABSL_GUARDED_BY(mu_) = Clock::time_point::min();
  std::map<std::string, Clock::time_point> created_ ABSL_GUARDED_BY(mu_);  // by the claim's name; of this process
  std::set<std::string> superseded_ ABSL_GUARDED_BY(mu_);                  // names of claims
  std::map<std::string, Unlisted> unlisted_ ABSL_GUARDED_BY(mu_);          // by the claim's name
};

}  // namespace vrambroker::kubernetes

#endif  // VRAMBROKER_DEPLOY_KUBERNETES_POD_CLAIMS_H_
