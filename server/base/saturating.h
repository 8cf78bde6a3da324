// SPDX-License-Identifier: Apache-2.0
#ifndef VRAMBROKER_SERVER_BASE_SATURATING_H_
#define VRAMBROKER_SERVER_BASE_SATURATING_H_

#include <algorithm>
#include <cstdint>

namespace vrambroker {

// `from - bytes`, or 0 instead of a negative difference.
inline uint64_t SaturatingSub(uint64_t from, uint64_t bytes) {
  return from - std::min(from, bytes);
}

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_BASE_SATURATING_H_
