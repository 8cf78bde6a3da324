// SPDX-License-Identifier: Apache-2.0
//
// Sizes in a plan: sums and products stop at a bound instead of overflowing.
#ifndef VRAMBROKER_CLIENT_VRAMCTL_PLAN_BOUNDED_H_
#define VRAMBROKER_CLIENT_VRAMCTL_PLAN_BOUNDED_H_

#include <algorithm>
#include <cstdint>
#include <initializer_list>

namespace vrambroker::plan {

// 64 PiB. Sizes of kTooLarge are "too large to plan". No size exceeds kTooLarge, so the sum of 64 sizes still fits in
// 64 bits.
inline constexpr uint64_t kTooLarge = uint64_t{1} << 56;

// Product() and Sum() return kTooLarge if the true result is at least kTooLarge. REQUIRES: no argument is above
// kTooLarge.
constexpr uint64_t Product(std::initializer_list<uint64_t> factors) {
  uint64_t product = 1;
  bool too_large = false;
  for (const uint64_t factor : factors) {
    if (factor == 0) return 0;
    too_large = too_large || product > kTooLarge / factor;
    if (!too_large) product *= factor;
  }
  return too_large ? kTooLarge : product;
}
constexpr uint64_t Sum(std::initializer_list<uint64_t> terms) {
  uint64_t sum = 0;
  for (const uint64_t term : terms) sum = std::min(kTooLarge, sum + term);
  return sum;
}

// REQUIRES: parts > 0.
constexpr uint64_t DividedUp(uint64_t whole, uint64_t parts) {
  return whole / parts + (whole % parts != 0 ? 1 : 0);
}

}  // namespace vrambroker::plan

#endif  // VRAMBROKER_CLIENT_VRAMCTL_PLAN_BOUNDED_H_
