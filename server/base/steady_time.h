// SPDX-License-Identifier: Apache-2.0
//
// SteadyTime: a time of the monotonic clock.
#ifndef VRAMBROKER_SERVER_BASE_STEADY_TIME_H_
#define VRAMBROKER_SERVER_BASE_STEADY_TIME_H_

#include <algorithm>
#include <chrono>
#include <optional>

namespace vrambroker {

using SteadyTime = std::chrono::steady_clock::time_point;

// The earlier of the two; nullopt is never.
inline std::optional<SteadyTime> Earlier(std::optional<SteadyTime> a, std::optional<SteadyTime> b) {
  return a.has_value() && b.has_value() ? std::min(*a, *b) : a.has_value() ? a : b;
}

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_BASE_STEADY_TIME_H_
