// SPDX-License-Identifier: Apache-2.0
#ifndef VRAMBROKER_CLIENT_CONNECTION_DEADLINE_H_
#define VRAMBROKER_CLIENT_CONNECTION_DEADLINE_H_

#include <algorithm>
#include <chrono>

#include "absl/time/time.h"

namespace vrambroker::client_internal {

// When a wait ends. By the steady clock: people and NTP set the other one.
using Deadline = std::chrono::steady_clock::time_point;

// As good as for ever, and every clock can count it.
inline constexpr absl::Duration kLongestDuration = absl::Hours(24 * 365 * 100);

// What programs mean by a duration that is negative, infinite, or the largest number they have.
inline absl::Duration ClampDuration(absl::Duration duration) {
  return std::clamp(duration, absl::ZeroDuration(), kLongestDuration);
}

inline Deadline DeadlineAfter(absl::Duration timeout) {
  return std::chrono::steady_clock::now() + absl::ToChronoNanoseconds(ClampDuration(timeout));
}

// Zero when it has passed.
inline absl::Duration TimeUntil(Deadline deadline) {
  return ClampDuration(absl::FromChrono(deadline - std::chrono::steady_clock::now()));
}

}  // namespace vrambroker::client_internal

#endif  // VRAMBROKER_CLIENT_CONNECTION_DEADLINE_H_
