// SPDX-License-Identifier: Apache-2.0
#ifndef VRAMBROKER_SERVER_BASE_USER_KEY_H_
#define VRAMBROKER_SERVER_BASE_USER_KEY_H_

#include <sys/types.h>

#include <cstdint>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"

namespace vrambroker {

// Subject of the per-user bounds: a user, or a user within a claim, counted separately. Containers all run as root, and
// none of them may take the share of all other containers, or of root itself.
struct UserKey {
  uid_t uid = 0;
  uint64_t claim = 0;  // the claim's id; 0: none

  constexpr UserKey() = default;
  constexpr UserKey(uid_t of, uint64_t in_claim = 0)
      : uid(of), claim(in_claim) {}  // NOLINT(google-explicit-constructor)

  // "uid 1000", "uid 0 in its claim"
  std::string Text() const { return absl::StrCat("uid ", uid, claim == 0 ? "" : " in its claim"); }

  friend auto operator<=>(const UserKey&, const UserKey&) = default;
  template <typename H>
  friend H AbslHashValue(H state, const UserKey& key) {
    return H::combine(std::move(state), key.uid, key.claim);
  }
};

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_BASE_USER_KEY_H_
