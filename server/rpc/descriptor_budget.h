// SPDX-License-Identifier: Apache-2.0
//
// DescriptorBudget: how users share the daemon's file descriptors. Half of them are for connections and an eighth for
// the descriptor socket; an eighth stays free for accepting (descriptor_reserve). A sixteenth is for the count socket,
// and another one for claims that users make for themselves. The rest is for HTTP, segments, sessions and operators'
// claims.
#ifndef VRAMBROKER_SERVER_RPC_DESCRIPTOR_BUDGET_H_
#define VRAMBROKER_SERVER_RPC_DESCRIPTOR_BUDGET_H_

#include <cstddef>

#include "absl/status/status.h"

namespace vrambroker {

struct DescriptorBudget {
  // The most connections that one user ever needs.
  static constexpr size_t kMaxPerUid = 2048;

  // For a process that may have `limit` descriptors open. `max_connections_per_uid`: 0 for kMaxPerUid.
  static DescriptorBudget Of(size_t limit, size_t max_connections_per_uid);

  // Whether a user who has `open_of_user` of the `open_of_all` open connections may have another one.
  // He may as MayTakeAnother() says. Of the 120 places that 1024 descriptors leave for them, users who work together
  // leave some until they are 11, and the last two places are for users who have none. `privileged` users, root and the
  // daemon's own, may also use what is kept for them: each may have as many as `for_root`, while any place is free.
  // ResourceExhausted says whose bound it is, and what to do.
  absl::Status Admit(size_t open_of_user, size_t open_of_all, bool privileged) const;

  // The same for the count socket.
  absl::Status AdmitCounted(size_t open_of_user, size_t open_of_all, bool privileged) const;

  size_t limit = 0;                           // descriptors
  size_t connections = 0;                     // of all users together
  size_t connections_per_uid = 0;             // of a user while nobody else has any
  size_t max_per_uid = 0;                     // of a user in any case
  size_t for_root = 0;                        // of `connections`, kept for root and the daemon's own user
  size_t descriptor_connections = 0;          // connections to the descriptor socket, of all users together
  size_t descriptor_connections_per_uid = 0;  // of a user
  size_t counted_connections = 0;             // to the count socket, of all users together
  size_t own_claims = 0;                      // that users make for themselves, of all of them together

 private:
  // `places` of all, `kept` of them for root.
  absl::Status AdmitTo(size_t places, size_t kept, size_t open_of_user, size_t open_of_all, bool privileged) const;
};

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_RPC_DESCRIPTOR_BUDGET_H_
