// SPDX-License-Identifier: Apache-2.0
//
// The file in which a daemon keeps its claims: vrambroker.config.v1.SavedClaims, as text.
#ifndef VRAMBROKER_SERVER_WIRE_CLAIM_FILE_H_
#define VRAMBROKER_SERVER_WIRE_CLAIM_FILE_H_

#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/core/claims.h"

namespace vrambroker {

// None when there is no such file. One that is larger than any that SaveClaims() writes is put aside, as
// `path`.too-large, which is logged: none then, too. Otherwise FailedPrecondition names the file, and what is wrong
// with it: a daemon that went on without its claims would let everybody have everything. What an older daemon or a
// person has written is written anew.
absl::StatusOr<std::vector<Claim>> LoadClaims(const std::string& path);
// Replaces the file, so that it outlives the machine.
absl::Status SaveClaims(const std::string& path, const std::vector<Claim>& claims);

// The same, again and again: what has not changed since the last time is not printed anew, which takes longer than
// writing it. The ids of claims tell them apart. Not thread-safe.
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

// In the file that SaveClaims() has written, the claim's state is what it says now: one byte of it is changed in place,
// so that a full disk does not keep it from that. Outlives the machine, too. NotFound: the file does not have the
// claim.
absl::Status SaveClaimState(const std::string& path, const Claim& claim);

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_WIRE_CLAIM_FILE_H_
