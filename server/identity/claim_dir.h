// SPDX-License-Identifier: Apache-2.0
//
// The directories of claims: `claims/NAME` in the socket directory, with sockets for each claim. A process connecting
// to these sockets belongs to the claim, whatever its pid namespace: a container is given the directory, and finds the
// daemon inside.
#ifndef VRAMBROKER_SERVER_IDENTITY_CLAIM_DIR_H_
#define VRAMBROKER_SERVER_IDENTITY_CLAIM_DIR_H_

#include <sys/types.h>

#include <cstdint>
#include <optional>
#include <string>

#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "server/identity/client_socket.h"

namespace vrambroker {

// Users allowed to connect to a claim's sockets, beside root and the daemon's user.
struct ClaimOwner {
  std::optional<uid_t> uid;  // none: everyone able to reach the directory
  std::optional<gid_t> gid;  // also admits members of this group

  friend bool operator==(const ClaimOwner&, const ClaimOwner&) = default;
};

// Checks a name like "train": at most 63 letters, digits and . _ - : @, not beginning with . _ or -. Used as the name
// of a directory. InvalidArgument describes the fault.
absl::Status CheckClaimName(absl::string_view name);

std::string ClaimDir(absl::string_view socket_dir, absl::string_view name);
// InvalidArgument: the sockets would have longer paths than clients can connect to.
absl::Status CheckClaimDir(absl::string_view socket_dir, absl::string_view name);

struct ClaimSockets {
  ClientSocket connections;  // vrambroker.sock
  ClientSocket descriptors;  // vrambroker-fd.sock
  ClientSocket counts;       // vram-count.sock
};

enum class ClaimDirUse : uint8_t {
  kNew,   // of a new claim: an existing directory is another claim's, and is put aside
  kKept,  // of a claim older than this start of the daemon: containers have the directory
};

// Makes the directory if missing, and listens inside. The directory becomes the owner's, with mode 0700, or 0750 with a
// group, if this process may change owners. Otherwise this process keeps the directory and everyone may enter: the
// caller must check each client in any case. Withstands anything done by the owner in the directory: touches nothing
// outside, and removes or renames obstacles to the sockets. ResourceExhausted: the owner of a new claim must first
// empty the directories of earlier claims. REQUIRES: the socket directory is locked; both checks succeed; calls are
// serialized.
absl::StatusOr<ClaimSockets> ListenClaim(const std::string& socket_dir, const std::string& name,
                                         const ClaimOwner& owner, ClaimDirUse use);

// Removes the directory and the owner's files inside. Some files may be left: too many to remove at once, or files in
// directories of other users. The directory is then returned to its owner under a new name, given by
// FailedPrecondition, and ListenClaim() continues the removal at the next new claim. A container still holding the
// directory does not enter a later claim of the name. REQUIRES: as ListenClaim().
absl::Status RemoveClaimDir(const std::string& socket_dir, const std::string& name, const ClaimOwner& owner);

// Removes all claim directories not in `names`: leftovers of a killed daemon.
void RemoveOtherClaimDirs(const std::string& socket_dir, const absl::flat_hash_set<std::string>& names);

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_IDENTITY_CLAIM_DIR_H_
