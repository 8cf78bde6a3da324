// SPDX-License-Identifier: Apache-2.0
#include "server/base/random_token.h"

#include <sys/random.h>

#include <cerrno>

#include "absl/status/status.h"

namespace vrambroker {

absl::StatusOr<RandomToken> NewRandomToken() {
  RandomToken token;
  if (getrandom(token.data(), token.size(), 0) != static_cast<ssize_t>(token.size())) {
    return absl::ErrnoToStatus(errno, "getrandom failed");
  }
  return token;
}

}  // namespace vrambroker
