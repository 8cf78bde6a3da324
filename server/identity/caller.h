// SPDX-License-Identifier: Apache-2.0
//
// Caller: the process at the client's end of a connection.
#ifndef VRAMBROKER_SERVER_IDENTITY_CALLER_H_
#define VRAMBROKER_SERVER_IDENTITY_CALLER_H_

#include <sys/types.h>

#include <memory>
#include <optional>
#include <vector>

#include "allocator/base/ids.h"
#include "allocator/base/unique_fd.h"
#include "server/base/user_key.h"

namespace vrambroker {

// A caller as identified by the kernel.
struct Caller {
  pid_t pid = 0;
  uid_t uid = 0;
  gid_t gid = 0;
  std::vector<gid_t> groups;  // supplementary groups
  // Refers to the process that made the connection: becomes readable when the process ends. See process_watch.h.
  std::shared_ptr<const UniqueFd> pidfd;
  std::optional<ClaimId> claim{};  // claim of the listening socket; none: the daemon's own socket
  bool counts_in_claim = false;    // for bounds on each user: see Claims::CountsInClaim()

  UserKey user() const { return {uid, counts_in_claim && claim.has_value() ? Raw(*claim) : 0}; }
};

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_IDENTITY_CALLER_H_
