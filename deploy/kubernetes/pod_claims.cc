// SPDX-License-Identifier: Apache-2.0
#include "deploy/kubernetes/pod_claims.h"

#include <set>
#include <tuple>
#include <utility>

#include "deploy/kubernetes/labels.h"

namespace vrambroker::kubernetes {
namespace {

using UnitKey = std::tuple<std::string, std::string, uint32_t>;  // resource, device, number

std::string LabelOf(const UnitClaim& claim, const char* label) {
  const auto it = claim.labels.find(label);
  return it == claim.labels.end() ? "" : it->second;
}

std::vector<UnitKey> UnitsOf(const UnitClaim& claim) {
  std::vector<UnitKey> units;
  for (const uint32_t number : ParseUnits(LabelOf(claim, kUnitsLabel))) {
    units.emplace_back(LabelOf(claim, kResourceLabel), LabelOf(claim, kDeviceLabel), number);
  }
  return units;
}

// Truncates a name to a label's maximum: a pod's name may have 253 bytes.
std::string LabelValue(const std::string& name) {
  return name.substr(0, kMostLabelBytes);
}

bool IsOfPod(const UnitClaim& claim, const ContainerUnits& container) {
  return LabelOf(claim, kNamespaceLabel) == LabelValue(container.pod_namespace) &&
         LabelOf(claim, kPodLabel) == LabelValue(container.pod);
}

UnitClaim Named(UnitClaim claim, const ContainerUnits& container) {
  claim.labels[kNamespaceLabel] = LabelValue(container.pod_namespace);
  claim.labels[kPodLabel] = LabelValue(container.pod);
  // The kubelet lists an init container's units for the later container with the same units.
  if (FormatUnits(container.units.numbers, kMostLabelBytes) == LabelOf(claim, kUnitsLabel)) {
    claim.labels[kContainerLabel] = LabelValue(container.container);
  }
  return claim;
}

}  // namespace

void PodClaims::NoteCreated(const std::string& claim, Clock::time_point now) {
  const MutexLock lock(mu_);
  created_[claim] = now;
  last_created_ = now;
}

bool PodClaims::HasCreatedSince(Clock::time_point time) {
  const MutexLock lock(mu_);
  return last_created_ >= time;
}

bool PodClaims::IsGivenAgain(const UnitClaim& claim, const UnitClaim& later) const {
  const auto now = created_.find(later.name);
  if (now == created_.end()) return false;
  const auto before = created_.find(claim.name);
  if (before == created_.end()) return true;  // from an earlier run of the plugin
  const bool had_pod = claim.labels.contains(kPodLabel) && !later.labels.contains(kPodLabel);
  return now->second - before->second > (had_pod ? Clock::duration(kAdmission) : Clock::duration(kLongAdmission));
}

void PodClaims::FindSuperseded(const std::vector<UnitClaim>& claims) {
  std::map<UnitKey, std::vector<const UnitClaim*>> claims_of;
  for (const UnitClaim& claim : claims) {
    for (const UnitKey& unit : UnitsOf(claim)) claims_of[unit].push_back(&claim);
  }
  for (const auto& [unit, of_unit] : claims_of) {
    for (const UnitClaim* claim : of_unit) {
      for (const UnitClaim* later : of_unit) {
        if (IsGivenAgain(*claim, *later)) superseded_.insert(claim->name);
      }
    }
  }
}

ClaimChanges PodClaims::Compare(const std::vector<UnitClaim>& claims, const std::vector<ContainerUnits>& containers,
                                Clock::time_point now) {
  const MutexLock lock(mu_);
  std::map<UnitKey, const ContainerUnits*> user;
  for (const ContainerUnits& container : containers) {
    for (const uint32_t number : container.units.numbers) {
      user[{container.resource, container.units.device, number}] = &container;
    }
  }
  FindSuperseded(claims);
  std::set<std::string> names;
  for (const UnitClaim& claim : claims) names.insert(claim.name);

  ClaimChanges changes;
  std::map<std::string, Unlisted> unlisted;
  for (const UnitClaim& claim : claims) {
    const ContainerUnits* container = nullptr;
    for (const UnitKey& unit : UnitsOf(claim)) {
      if (const auto it = user.find(unit); it != user.end()) container = it->second;
    }
    const bool was_listed = claim.labels.contains(kPodLabel);
    bool has_gone = superseded_.contains(claim.name);
    if (container == nullptr) {
      const auto known = unlisted_.find(claim.name);
      Unlisted times = known == unlisted_.end() ? Unlisted{.since = now} : known->second;
      ++times.times;
      const Clock::duration enough = was_listed ? Clock::duration(kUnlistedFor) : Clock::duration(kNeverListedFor);
      has_gone |= times.times >= kUnlistedTimes && now - times.since >= enough;
      unlisted[claim.name] = times;
    } else if (was_listed) {
      has_gone |= !IsOfPod(claim, *container);
    }
    if (has_gone) {
      if (claim.is_idle) changes.drain.push_back(claim.name);
    } else if (container != nullptr && !was_listed) {
      changes.label.push_back(Named(claim, *container));
    }
  }
  unlisted_ = std::move(unlisted);
  std::erase_if(superseded_, [&](const std::string& name) { return !names.contains(name); });
  std::erase_if(created_, [&](const auto& created) {
    return !names.contains(created.first) && now - created.second > kLongAdmission;
  });
  return changes;
}

}  // namespace vrambroker::kubernetes
