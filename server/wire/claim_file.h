// SPDX-License-Identifier: Apache-2.0
//
// The daemon's file of claims: vrambroker.config.v1.SavedClaims, as text.
#ifndef VRAMBROKER_SERVER_WIRE_CLAIM_FILE_H_
#define VRAMBROKER_SERVER_WIRE_CLAIM_FILE_H_

#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/core/claims.h"

namespace vrambroker {

// Returns no claims when the file is missing. A file larger than any file of SaveClaims() is renamed to
// `path`.too-large, with a log line, and also gives no claims. Otherwise FailedPrecondition names the file and its
// fault: a daemon continuing without its claims would let every client have everything. Rewrites a file written by an
// older daemon or by hand.
absl::StatusOr<std::vector<Claim>> LoadClaims(const std::string& path);
// Replaces the file durably: the new file survives a crash of the machine.
absl::Status SaveClaims(const std::string& path, const std::vector<Claim>& claims);

// Like SaveClaims(), for repeated saves: reuses the text of unchanged claims, because printing takes longer than
// writing. Identifies claims by id. Not thread-safe.
class ClaimSaver {
 public:
  absl::Status Save(const std::string& path, const std::vector<Claim>& claims);

 private:
  struct Printed {
    ClaimTerms terms;
    std::string text;
  };
  absl::flat_hash_map<ClaimId, Printed> printed_;
};

// Updates the claim's state in a file written by SaveClaims(). Changes a single byte in place, so that a full disk
// cannot prevent the update. Durable, too. NotFound: the file does not have the claim.
absl::Status SaveClaimState(const std::string& path, const Claim& claim);

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_WIRE_CLAIM_FILE_H_
