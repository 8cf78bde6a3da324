// SPDX-License-Identifier: Apache-2.0
#ifndef VRAMBROKER_CLIENT_CONNECTION_DEADLINE_H_
#define VRAMBROKER_CLIENT_CONNECTION_DEADLINE_H_

#include <algorithm>
#include <chrono>

#include "absl/time/time.h"

namespace vrambroker::client_internal {

// The end of a wait, by the steady clock: people and NTP set the system clock.
using Deadline = std::chrono::steady_clock::time_point;

// Practically for ever, yet within the range of every clock.
inline constexpr absl::Duration kLongestDuration = absl::Hours(24 * 365 * 100);

// Maps negative, infinite or maximal durations to their intended meaning.
inline absl::Duration ClampDuration(absl::Duration duration) {
  return std::clamp(duration, absl::ZeroDuration(), kLongestDuration);
}

inline Deadline DeadlineAfter(absl::Duration timeout) {
  return std::chrono::steady_clock::now() + absl::ToChronoNanoseconds(ClampDuration(timeout));
}

// Zero after the deadline.
inline absl::Duration TimeUntil(Deadline deadline) {
  return ClampDuration(absl::FromChrono(deadline - std::chrono::steady_clock::now()));
}

}  // namespace vrambroker::client_internal

#endif  // VRAMBROKER_CLIENT_CONNECTION_DEADLINE_H_
