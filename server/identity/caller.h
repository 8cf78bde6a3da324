// SPDX-License-Identifier: Apache-2.0
//
// Caller: the process at the other end of a connection.
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

// Who is calling, in the kernel's words.
struct Caller {
  pid_t pid = 0;
  uid_t uid = 0;
  gid_t gid = 0;
  std::vector<gid_t> groups;  // further ones
  // Of the process that made the connection: can be read once that has ended. See process_watch.h.
  std::shared_ptr<const UniqueFd> pidfd;
  std::optional<ClaimId> claim{};  // whose socket it has connected to; none: the daemon's own
  bool counts_in_claim = false;    // for bounds on what each user may have: see Claims::CountsInClaim()

  UserKey user() const { return {uid, counts_in_claim && claim.has_value() ? Raw(*claim) : 0}; }
};

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_IDENTITY_CALLER_H_
