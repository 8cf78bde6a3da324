// SPDX-License-Identifier: Apache-2.0
//
// The directories of claims: `claims/NAME` in the socket directory, with sockets of their own. Who connects to these
// belongs to the claim, whatever its pid namespace: a container is given the directory, and finds the daemon there.
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

// Who may connect to a claim's sockets, beside root and the daemon's user.
struct ClaimOwner {
  std::optional<uid_t> uid;  // none: everyone who can reach the directory
  std::optional<gid_t> gid;  // members of this group, too

  friend bool operator==(const ClaimOwner&, const ClaimOwner&) = default;
};

// "train": at most 63 letters, digits and . _ - : @, not beginning with . _ or -. It names a directory.
// InvalidArgument says what is wrong.
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
  kNew,   // of a claim that is new: one that is there already is another claim's, and out of the way from now on
  kKept,  // a claim's since before this start: containers have it
};

// Makes the directory if it is missing, and listens there. It is the owner's, with mode 0700, or 0750 with a group,
// where this process may give it away. Else it stays this process's, and everyone may enter: who may connect is for the
// caller to check in any case. Whatever an owner has done in the directory: nothing outside of it is touched, and what
// is in the way of the sockets is removed, or gets another name. ResourceExhausted: the owner of a new claim has to
// empty directories of earlier ones first. REQUIRES: the socket directory is locked, both checks say yes. One call at a
// time.
absl::StatusOr<ClaimSockets> ListenClaim(const std::string& socket_dir, const std::string& name,
                                         const ClaimOwner& owner, ClaimDirUse use);

// Removes the directory, and all that its owner has put there. Some may be left, of which there is too much to be
// removed at once, or which is in directories of others. Then the directory is the owner's by another name, which
// FailedPrecondition tells, and ListenClaim() removes more of it when there is a new claim. A container that still has
// it is not in a later claim of the name. REQUIRES: as ListenClaim().
absl::Status RemoveClaimDir(const std::string& socket_dir, const std::string& name, const ClaimOwner& owner);

// The same for all but those of `names`: what a daemon that was killed has left.
void RemoveOtherClaimDirs(const std::string& socket_dir, const absl::flat_hash_set<std::string>& names);

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_IDENTITY_CLAIM_DIR_H_
