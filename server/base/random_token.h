// SPDX-License-Identifier: Apache-2.0
#ifndef VRAMBROKER_SERVER_BASE_RANDOM_TOKEN_H_
#define VRAMBROKER_SERVER_BASE_RANDOM_TOKEN_H_

#include <array>
#include <string>

#include "absl/status/statusor.h"

namespace vrambroker {

// Knowing one is a right: nobody can guess it.
using RandomToken = std::array<char, 16>;

// From the kernel's random numbers. Thread-safe; errors of getrandom().
absl::StatusOr<RandomToken> NewRandomToken();

// Sixteen hexadecimal digits, as no other call gives them, in this process or another one. Thread-safe.
std::string RandomName();

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_BASE_RANDOM_TOKEN_H_
