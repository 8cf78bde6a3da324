// SPDX-License-Identifier: Apache-2.0
//
// PodClaims: which claims belong to which pods, and which to none any more. The kubelet says which container has which
// units, never that a container has ended. So its lists are compared with the claims, again and again.
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

// A claim that the plugin has made.
struct UnitClaim {
  std::string name;
  std::map<std::string, std::string> labels;
  bool is_idle = false;  // it has no session, and nothing is charged to it
};

// Units that a container has, by the kubelet's list.
struct ContainerUnits {
  std::string pod_namespace;
  std::string pod;
  std::string container;
  std::string resource;
  DeviceUnits units;
};

// What to do to the claims.
struct ClaimChanges {
  std::vector<UnitClaim> label;  // with these labels
  std::vector<std::string> drain;
};

// Thread-safe.
class PodClaims {
 public:
  using Clock = std::chrono::steady_clock;

  // A claim that a list has shown is drained when so many lists in a row do not show it, and for so long: a kubelet
  // that starts adds its pods one by one.
  static constexpr int kUnlistedTimes = 3;
  static constexpr std::chrono::seconds kUnlistedFor{15};
  // A claim that no list has ever shown: of an init container, of a sidecar (kubelets before 1.30 list neither), or of
  // a container that never came to be.
  static constexpr std::chrono::hours kNeverListedFor{1};
  // Within which the kubelet asks for the units of all containers of one pod, at the longest and usually. It may list
  // the pod meanwhile. So a pod that ends this soon, and is made again under its name with the same units, cannot be
  // told from one with an init container: its claim, which is idle, stays until the next pod has gone, too.
  static constexpr std::chrono::minutes kLongAdmission{1};
  static constexpr std::chrono::seconds kAdmission{3};

  // A claim of this name is about to be made.
  void NoteCreated(const std::string& claim, Clock::time_point now) ABSL_LOCKS_EXCLUDED(mu_);

  // Whether one was made since then: the sooner lists are compared after that, the fewer pods end before a list shows
  // them.
  bool HasCreatedSince(Clock::time_point time) ABSL_LOCKS_EXCLUDED(mu_);

  // `claims`: read before `containers`, which are of a list of all pods. In the other order a claim could be taken for
  // that of the pod which had its units before.
  //
  // A claim is listed when a container has a unit of it. It takes the name of that pod. If it has another pod's name,
  // that pod has gone. So it has if the kubelet has given a unit of it again, other than to the same pod: init
  // containers share units with those that start after them, and their claims are made together, before any list shows
  // the pod. Only an idle claim is drained: what uses it has not gone, whatever the list says.
  ClaimChanges Compare(const std::vector<UnitClaim>& claims, const std::vector<ContainerUnits>& containers,
                       Clock::time_point now) ABSL_LOCKS_EXCLUDED(mu_);

 private:
  struct Unlisted {
    Clock::time_point since;
    int times = 0;
  };

  // Adds to superseded_ each claim that has a unit which the kubelet has given to another pod since.
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
