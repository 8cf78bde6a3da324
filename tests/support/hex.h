// SPDX-License-Identifier: Apache-2.0
#ifndef VRAMBROKER_TESTS_SUPPORT_HEX_H_
#define VRAMBROKER_TESTS_SUPPORT_HEX_H_

#include <cstdint>
#include <string>

#include "absl/strings/numbers.h"
#include "absl/strings/string_view.h"

namespace vrambroker::testing_support {

// Reverses absl::BytesToHexString(). Abseil's function has another signature in each version. REQUIRES: pairs of
// digits.
inline std::string HexToBytes(absl::string_view digits) {
  std::string bytes;
  bytes.reserve(digits.size() / 2);
  for (; digits.size() >= 2; digits.remove_prefix(2)) {
    uint32_t byte = 0;
    (void)absl::SimpleHexAtoi(digits.substr(0, 2), &byte);
    bytes.push_back(static_cast<char>(byte));
  }
  return bytes;
}

}  // namespace vrambroker::testing_support

#endif  // VRAMBROKER_TESTS_SUPPORT_HEX_H_
