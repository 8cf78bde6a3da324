// SPDX-License-Identifier: Apache-2.0
//
// DescriptorBudget: shares the daemon's file descriptors among users. Half are for connections, and an eighth for the
// descriptor socket; an eighth stays free for accepting (descriptor_reserve). A sixteenth is for the count socket, and
// another sixteenth for claims made by users for themselves. The rest is for HTTP, segments, sessions and operators'
// claims.
#ifndef VRAMBROKER_SERVER_RPC_DESCRIPTOR_BUDGET_H_
#define VRAMBROKER_SERVER_RPC_DESCRIPTOR_BUDGET_H_

#include <cstddef>

#include "absl/status/status.h"

namespace vrambroker {

struct DescriptorBudget {
  // The most connections that a single user ever needs.
  static constexpr size_t kMaxPerUid = 2048;

  // Computes the budget of a process with at most `limit` open descriptors. `max_connections_per_uid`: 0 for
  // kMaxPerUid.
  static DescriptorBudget Of(size_t limit, size_t max_connections_per_uid);

  // Decides whether a user with `open_of_user` of the `open_of_all` open connections may open another connection, by
  // the rule of MayTakeAnother(). 1024 descriptors leave 120 places: cooperating users leave some free until 11 users
  // cooperate, and the last two places go to users without connections. `privileged` users, root and the daemon's own,
  // may also use the places kept for root: up to `for_root` each, while any place is free. ResourceExhausted names the
  // exhausted bound and the remedy.
  absl::Status Admit(size_t open_of_user, size_t open_of_all, bool privileged) const;

  // Like Admit(), for the count socket.
  absl::Status AdmitCounted(size_t open_of_user, size_t open_of_all, bool privileged) const;

  size_t limit = 0;                           // descriptors
  size_t connections = 0;                     // of all users together
  size_t connections_per_uid = 0;             // of a user while nobody else has any
  size_t max_per_uid = 0;                     // of a user in any case
  size_t for_root = 0;                        // of `connections`, kept for root and the daemon's own user
  size_t descriptor_connections = 0;          // connections to the descriptor socket, of all users together
  size_t descriptor_connections_per_uid = 0;  // of a user
  size_t counted_connections = 0;             // to the count socket, of all users together
  size_t own_claims = 0;                      // made by users for themselves, of all users together

 private:
  // `places`: total; `kept`: part reserved for root.
  absl::Status AdmitTo(size_t places, size_t kept, size_t open_of_user, size_t open_of_all, bool privileged) const;
};

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_RPC_DESCRIPTOR_BUDGET_H_
