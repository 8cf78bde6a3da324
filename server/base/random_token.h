// SPDX-License-Identifier: Apache-2.0
#ifndef VRAMBROKER_SERVER_BASE_RANDOM_TOKEN_H_
#define VRAMBROKER_SERVER_BASE_RANDOM_TOKEN_H_

#include <array>
#include <string>

#include "absl/status/statusor.h"

namespace vrambroker {

// Proof of a right: nobody can guess a token.
using RandomToken = std::array<char, 16>;

// Returns random bytes from the kernel. Thread-safe; errors of getrandom().
absl::StatusOr<RandomToken> NewRandomToken();

// Sixteen hexadecimal digits, unique among all calls of this process and other processes. Thread-safe.
std::string RandomName();

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_BASE_RANDOM_TOKEN_H_
