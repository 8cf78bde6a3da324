// SPDX-License-Identifier: Apache-2.0
#include "server/sessions/named_devices.h"

#include "absl/algorithm/container.h"
#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"

namespace vrambroker {
namespace {

bool IsOrdinal(absl::string_view name) {
  return !name.empty() && absl::c_all_of(name, absl::ascii_isdigit);
}

// For example "GPU-...", "MIG-...", "HOST-0".
bool IsUuid(absl::string_view name) {
  return absl::StrContains(name, '-') &&
         absl::c_all_of(name, [](char c) { return absl::ascii_isalnum(c) || c == '-'; });
}

bool IsNamed(absl::string_view name, size_t device, const SegmentPool& pool) {
  uint32_t ordinal = 0;
  return IsOrdinal(name) ? absl::SimpleAtoi(name, &ordinal) && ordinal == device : name == pool.properties().uuid;
}

}  // namespace

absl::StatusOr<std::vector<uint32_t>> NamedDevices(absl::Span<const std::string> names,
                                                   absl::Span<SegmentPool* const> pools) {
  if (names.size() > kMaxNamedDevices) {
    return absl::InvalidArgumentError(
        absl::StrCat("devices: ", names.size(), " are named; at most ", kMaxNamedDevices, " can be"));
  }
  std::vector<uint32_t> devices;
  for (const std::string& name : names) {
    if (name.size() > kMaxDeviceName || !(IsOrdinal(name) || IsUuid(name))) {
      return absl::InvalidArgumentError(
          absl::StrCat("devices: '", absl::CHexEscape(name.substr(0, kMaxDeviceName)),
                       "' is neither a device's ordinal, as 0, nor its UUID, as GPU-..."));
    }
    size_t device = 0;
    while (device < pools.size() && !IsNamed(name, device, *pools[device])) ++device;
    if (device == pools.size()) {
      const auto one = [](std::string* out, const SegmentPool* pool) {
        absl::StrAppend(out, pool->properties().ordinal, " (", pool->properties().uuid, ")");
      };
      return absl::NotFoundError(
          absl::StrCat("devices: no device ", name, "; the daemon has ", absl::StrJoin(pools, ", ", one)));
    }
    if (!absl::c_linear_search(devices, device)) devices.push_back(static_cast<uint32_t>(device));
  }
  return devices;
}

}  // namespace vrambroker
