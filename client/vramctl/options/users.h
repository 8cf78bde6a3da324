// SPDX-License-Identifier: Apache-2.0
//
// Users and groups as people write them: names on this machine, or numbers.
#ifndef VRAMBROKER_CLIENT_VRAMCTL_OPTIONS_USERS_H_
#define VRAMBROKER_CLIENT_VRAMCTL_OPTIONS_USERS_H_

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"

namespace vrambroker::vramctl {

// A number need not be a known user or group. InvalidArgument names `flag`.
absl::StatusOr<uint32_t> ParseUser(const std::string& flag, const std::string& text);
absl::StatusOr<uint32_t> ParseGroup(const std::string& flag, const std::string& text);

// Returns "ann", or "1000" if the uid has no name here. Not thread-safe.
std::string UserName(uint32_t uid);

}  // namespace vrambroker::vramctl

#endif  // VRAMBROKER_CLIENT_VRAMCTL_OPTIONS_USERS_H_
