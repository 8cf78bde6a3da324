// SPDX-License-Identifier: Apache-2.0
//
// Units: the kubelet counts devices, not bytes, so a device's memory is a number of units to it. Which bytes a unit
// stands for is of no account: a claim's limit is its number of units times their size.
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

// The kubelet and the scheduler keep a list of them, and the kubelet asks for it at once.
inline constexpr uint64_t kMostUnits = 20'000;

// Characters of an id, or of a part of it, in an error: gRPC breaks connections over texts of some KiB.
inline constexpr size_t kMostIdShown = 100;

// Some units of one device: what a container is given.
struct DeviceUnits {
  std::string device;  // its uuid
  std::set<uint32_t> numbers;
};

// "GPU-7c3e...::12": what the kubelet calls a unit.
std::string UnitId(absl::string_view device, uint32_t number);

// The units of these ids. InvalidArgument: an id is none. FailedPrecondition: they are not all of one device.
absl::StatusOr<DeviceUnits> ParseUnitIds(const std::vector<std::string>& ids);

// The `count` units to take of those `available`, `required` ones among them. All are of one device: of the one with
// the fewest available units that suffices, so that large gaps stay for large requests. None where no device suffices.
std::vector<std::string> ChooseUnits(const std::vector<std::string>& available,
                                     const std::vector<std::string>& required, size_t count);

// "0-7,12": as many of the ranges as fit into so many bytes, the lowest first; and such a text read. What is wrong in
// it is left out.
std::string FormatUnits(const std::set<uint32_t>& numbers, size_t most_bytes);
std::set<uint32_t> ParseUnits(absl::string_view text);

// InvalidArgument: not a whole number of MiB, at least one.
absl::Status CheckUnitBytes(uint64_t unit_bytes);
// "vrambroker.dev/memory-256mi".
std::string ResourceName(uint64_t unit_bytes);
// InvalidArgument says what Kubernetes takes.
absl::Status CheckResourceName(absl::string_view name);

}  // namespace vrambroker::kubernetes

#endif  // VRAMBROKER_DEPLOY_KUBERNETES_UNITS_H_
