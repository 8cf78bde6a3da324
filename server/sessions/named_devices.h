// SPDX-License-Identifier: Apache-2.0
#ifndef VRAMBROKER_SERVER_SESSIONS_NAMED_DEVICES_H_
#define VRAMBROKER_SERVER_SESSIONS_NAMED_DEVICES_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "server/pool/segment_pool.h"

namespace vrambroker {

inline constexpr size_t kMaxNamedDevices = 64;
inline constexpr size_t kMaxDeviceName = 64;  // characters

// Ordinals, without duplicates, of devices named by a client, each by its ordinal ("0") or its UUID. InvalidArgument
// for malformed names, NotFound for a device outside of `pools`: both messages begin with "devices: ".
absl::StatusOr<std::vector<uint32_t>> NamedDevices(absl::Span<const std::string> names,
                                                   absl::Span<SegmentPool* const> pools);

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_SESSIONS_NAMED_DEVICES_H_
