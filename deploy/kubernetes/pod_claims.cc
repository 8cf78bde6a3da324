// SPDX-License-Identifier: Apache-2.0
#include "deploy/kubernetes/pod_claims.h"

#include <tuple>
#include <utility>

#include "deploy/kubernetes/labels.h"

namespace vrambroker::kubernetes {
namespace {

std::string LabelOf(const UnitClaim& claim, const char* label) {
  const auto it = claim.labels.find(label);
  return it == claim.labels.end() ? "" : it->second;
}

// As much of a name as a label takes: a pod's name may have 253 bytes.
std::string LabelValue(const std::string& name) {
  return name.substr(0, kMostLabelBytes);
}

bool IsOfPod(const UnitClaim& claim, const ContainerUnits& container) {
  return LabelOf(claim, kNamespaceLabel) == LabelValue(container.pod_namespace) &&
         LabelOf(claim, kPodLabel) == LabelValue(container.pod);
}

}  // namespace

ClaimChanges PodClaims::Compare(const std::vector<UnitClaim>& claims, const std::vector<ContainerUnits>& containers,
                                Clock::time_point now) {
  std::map<std::tuple<std::string, std::string, uint32_t>, const ContainerUnits*> user;  // of a unit
  for (const ContainerUnits& container : containers) {
    for (const uint32_t number : container.units.numbers) {
      user[{container.resource, container.units.device, number}] = &container;
    }
  }
  ClaimChanges changes;
  std::map<std::string, Clock::time_point> unlisted_since;
  for (const UnitClaim& claim : claims) {
    const std::string units = LabelOf(claim, kUnitsLabel);
    const ContainerUnits* container = nullptr;
    for (const uint32_t number : ParseUnits(units)) {
      const auto it = user.find({LabelOf(claim, kResourceLabel), LabelOf(claim, kDeviceLabel), number});
      if (it == user.end()) continue;
      container = it->second;
      break;
    }
    if (container == nullptr) {
      const auto known = unlisted_since_.find(claim.name);
      const Clock::time_point since = known == unlisted_since_.end() ? now : known->second;
      if (now - since >= kUnlistedFor) changes.drain.push_back(claim.name);
      unlisted_since[claim.name] = since;
    } else if (!claim.labels.contains(kPodLabel)) {
      UnitClaim named = claim;
      named.labels[kNamespaceLabel] = LabelValue(container->pod_namespace);
      named.labels[kPodLabel] = LabelValue(container->pod);
      // An init container's units are listed as those of the container that has them after it.
      if (FormatUnits(container->units.numbers, kMostLabelBytes) == units) {
        named.labels[kContainerLabel] = LabelValue(container->container);
      }
      changes.label.push_back(std::move(named));
    } else if (!IsOfPod(claim, *container)) {
      changes.drain.push_back(claim.name);
    }
  }
  unlisted_since_ = std::move(unlisted_since);
  return changes;
}

}  // namespace vrambroker::kubernetes
