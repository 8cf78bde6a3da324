// SPDX-License-Identifier: Apache-2.0
//
// The listening sockets, and the kernel's identification of peers.
#ifndef VRAMBROKER_SERVER_IDENTITY_UNIX_SOCKET_H_
#define VRAMBROKER_SERVER_IDENTITY_UNIX_SOCKET_H_

#include <sys/types.h>

#include <functional>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "allocator/base/unique_fd.h"
#include "server/base/client_log.h"
#include "server/identity/caller.h"
#include "server/identity/client_socket.h"
#include "server/identity/process_watch.h"

namespace vrambroker {

// A non-blocking listening socket of `type` (SOCK_STREAM, SOCK_SEQPACKET) at `path`; a file left there by a dead
// daemon is replaced. REQUIRES: the directory is locked.
absl::StatusOr<ClientSocket> ListenUnix(const std::string& path, int type, mode_t mode);

// Accepts connections on non-blocking listening sockets. Not thread-safe.
class Acceptor {
 public:
  Acceptor();
  // Returns the next waiting connection, non-blocking; invalid when none waits. When the process is out of descriptors,
  // accepts and drops the connection, with a line in the log once in a while: a waiting connection would wake the event
  // loop forever.
  ClientSocket Accept(int listener);

 private:
  UniqueFd reserve_;  // given up for a moment to drop a connection
  LineLimit errors_{0.1, 1};
};

// Claim of a listening socket; none: the daemon's own socket.
struct ClaimOfListener {
  std::optional<ClaimId> id;
  std::function<bool(ClaimId, const Caller&)> counts_in_claim;  // see Caller

  void AddTo(Caller& caller) const {
    caller.claim = id;
    caller.counts_in_claim = id.has_value() && counts_in_claim(*id, caller);
  }
};

// Identifies the process that connected, watched by `processes`. NotFound when the process has already gone,
// FailedPrecondition when the process is in a pid namespace invisible to the daemon.
absl::StatusOr<Caller> GetPeer(int fd, ProcessWatch* processes);

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_IDENTITY_UNIX_SOCKET_H_
