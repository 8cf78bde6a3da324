// SPDX-License-Identifier: Apache-2.0
//
// Shares and durations as people write them: amount_parser.h has the grammar. Sizes: bytes.h.
#ifndef VRAMBROKER_ALLOCATOR_BASE_AMOUNTS_H_
#define VRAMBROKER_ALLOCATOR_BASE_AMOUNTS_H_

#include <cstdint>
#include <variant>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace vrambroker {

// Returns InvalidArgument for every error: "'8X' is not a size: its unit is unknown; write ...".

// "0.4", "40%", 0 to 1.
absl::StatusOr<double> ParseShare(absl::string_view text);

// A size in bytes, or a share. Refuses "80": 80% or 80GiB?
absl::StatusOr<std::variant<uint64_t, double>> ParseSizeOrShare(absl::string_view text);

// "30s", "10min", "1h30m", "0".
absl::StatusOr<absl::Duration> ParseTime(absl::string_view text);
// ParseTime() in milliseconds, rounded up: a short time does not become 0.
absl::StatusOr<int64_t> ParseMilliseconds(absl::string_view text);

}  // namespace vrambroker

#endif  // VRAMBROKER_ALLOCATOR_BASE_AMOUNTS_H_
