// SPDX-License-Identifier: Apache-2.0
//
// The file in which a daemon keeps its claims: vrambroker.config.v1.SavedClaims, as text.
#ifndef VRAMBROKER_SERVER_WIRE_CLAIM_FILE_H_
#define VRAMBROKER_SERVER_WIRE_CLAIM_FILE_H_

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/core/claims.h"

namespace vrambroker {

// None when there is no such file. One that is larger than any that SaveClaims() writes is put aside, as
// `path`.too-large, which is logged: none then, too. Otherwise FailedPrecondition names the file, and what is wrong
// with it: a daemon that went on without its claims would let everybody have everything.
absl::StatusOr<std::vector<Claim>> LoadClaims(const std::string& path);
// Replaces the file, so that it outlives the machine.
absl::Status SaveClaims(const std::string& path, const std::vector<Claim>& claims);

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_WIRE_CLAIM_FILE_H_
