// SPDX-License-Identifier: Apache-2.0
//
// Causes of refusals to reserve more for a session. Defined here because the pool is the lowest layer naming a cause.
// Only `oom` finds kFragmentation.
#ifndef VRAMBROKER_SERVER_POOL_SEGMENT_REFUSAL_H_
#define VRAMBROKER_SERVER_POOL_SEGMENT_REFUSAL_H_

#include <array>
#include <optional>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace vrambroker {

enum class OomCause { kLimit, kCapacity, kFragmentation, kLargerThanDevice };

inline constexpr std::array<OomCause, 4> kOomCauses = {OomCause::kLimit, OomCause::kCapacity, OomCause::kFragmentation,
                                                       OomCause::kLargerThanDevice};

// "limit", "capacity", "fragmentation", "larger_than_device": the `reason` of metrics and logs.
const char* OomCauseName(OomCause cause);

// Answer of SegmentPool when it cannot lease a segment: ResourceExhausted with the cause.
absl::Status SegmentRefused(OomCause cause, absl::string_view message);
// Returns the cause stored by SegmentRefused(); nullopt for any other status.
std::optional<OomCause> SegmentRefusalCause(const absl::Status& status);

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_POOL_SEGMENT_REFUSAL_H_
