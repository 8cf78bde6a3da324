// SPDX-License-Identifier: Apache-2.0
#include "server/base/random_token.h"

#include <sys/random.h>

#include <cerrno>

#include "absl/status/status.h"
#include "absl/strings/escaping.h"
#include "absl/strings/string_view.h"

namespace vrambroker {

absl::StatusOr<RandomToken> NewRandomToken() {
  RandomToken token;
  if (getrandom(token.data(), token.size(), 0) != static_cast<ssize_t>(token.size())) {
    return absl::ErrnoToStatus(errno, "getrandom failed");
  }
  return token;
}

std::string RandomName() {
  const RandomToken token = NewRandomToken().value_or(RandomToken());
  return absl::BytesToHexString(absl::string_view(token.data(), token.size() / 2));
}

}  // namespace vrambroker
