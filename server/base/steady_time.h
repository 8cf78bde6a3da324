// SPDX-License-Identifier: Apache-2.0
//
// SteadyTime: a moment of the clock that nobody sets.
#ifndef VRAMBROKER_SERVER_BASE_STEADY_TIME_H_
#define VRAMBROKER_SERVER_BASE_STEADY_TIME_H_

#include <chrono>

namespace vrambroker {

using SteadyTime = std::chrono::steady_clock::time_point;

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_BASE_STEADY_TIME_H_
