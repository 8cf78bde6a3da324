// SPDX-License-Identifier: Apache-2.0
//
// Units: the kubelet counts devices rather than bytes, so a device's memory is offered as a number of units. A unit
// stands for no specific bytes: a claim's limit is its number of units times the unit size.
#ifndef VRAMBROKER_DEPLOY_KUBERNETES_UNITS_H_
#define VRAMBROKER_DEPLOY_KUBERNETES_UNITS_H_

#include <cstddef>
#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace vrambroker::kubernetes {

// Bounded since the kubelet and the scheduler keep a list of all units, requested by the kubelet at once.
inline constexpr uint64_t kMostUnits = 20'000;

// Maximum characters of an id, or part of an id, in an error: gRPC breaks connections over texts of some KiB.
inline constexpr size_t kMostIdShown = 100;

// Units of a single device, given to a container.
struct DeviceUnits {
  std::string device;  // uuid
  std::set<uint32_t> numbers;
};

// The kubelet's id of a unit: "GPU-7c3e...::12".
std::string UnitId(absl::string_view device, uint32_t number);

// Parses ids. InvalidArgument: not an id. FailedPrecondition: the ids belong to several devices.
absl::StatusOr<DeviceUnits> ParseUnitIds(const std::vector<std::string>& ids);

// Chooses `count` units from `available`, including `required`. All units come from a single device: the device with
// the fewest sufficient available units, leaving large gaps to large requests. Empty when no device suffices.
std::vector<std::string> ChooseUnits(const std::vector<std::string>& available,
                                     const std::vector<std::string>& required, size_t count);

// Writes "0-7,12": as many ranges as fit into `most_bytes`, lowest first; and reads such text. ParseUnits() skips
// invalid parts.
std::string FormatUnits(const std::set<uint32_t>& numbers, size_t most_bytes);
std::set<uint32_t> ParseUnits(absl::string_view text);

// InvalidArgument: not a positive whole number of MiB.
absl::Status CheckUnitBytes(uint64_t unit_bytes);
// "vrambroker.dev/memory-256mi".
std::string ResourceName(uint64_t unit_bytes);
// InvalidArgument names the names accepted by Kubernetes.
absl::Status CheckResourceName(absl::string_view name);

}  // namespace vrambroker::kubernetes

#endif  // VRAMBROKER_DEPLOY_KUBERNETES_UNITS_H_
