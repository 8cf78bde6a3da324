// SPDX-License-Identifier: Apache-2.0
//
// PodClaims: which claims belong to which pods, and which to none any more. The kubelet says which container has which
// units, never that a container has ended. So its lists are compared with the claims, again and again.
#ifndef VRAMBROKER_DEPLOY_KUBERNETES_POD_CLAIMS_H_
#define VRAMBROKER_DEPLOY_KUBERNETES_POD_CLAIMS_H_

#include <chrono>
#include <map>
#include <string>
#include <vector>

#include "deploy/kubernetes/units.h"

namespace vrambroker::kubernetes {

// A claim that the plugin has made.
struct UnitClaim {
  std::string name;
  std::map<std::string, std::string> labels;
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

// For one thread.
class PodClaims {
 public:
  using Clock = std::chrono::steady_clock;

  // Within which the kubelet lists the units that it has just been given; much longer than it takes.
  static constexpr std::chrono::seconds kUnlistedFor{10};

  // `claims`: read before `containers`, which are of a list of all pods. In the other order a claim could be taken for
  // that of the pod which had its units before.
  //
  // A claim is in use when a container has a unit of it. It takes the name of that pod. If it has another pod's name,
  // that pod has gone, and it is drained at once; if no container has any of its units, then after kUnlistedFor. A pod
  // has several claims with the same units when it has init containers: the kubelet asks for all of them before the
  // first one starts.
  ClaimChanges Compare(const std::vector<UnitClaim>& claims, const std::vector<ContainerUnits>& containers,
                       Clock::time_point now);

 private:
  std::map<std::string, Clock::time_point> unlisted_since_;  // by the claim's name
};

}  // namespace vrambroker::kubernetes

#endif  // VRAMBROKER_DEPLOY_KUBERNETES_POD_CLAIMS_H_
