// SPDX-License-Identifier: Apache-2.0
//
// The socket directory: its lock, its two listening sockets, and the kernel's word on who is at the other end.
#ifndef VRAMBROKER_SERVER_UNIX_SOCKET_H_
#define VRAMBROKER_SERVER_UNIX_SOCKET_H_

#include <sys/types.h>

#include <string>

#include "absl/status/statusor.h"
#include "allocator/device.h"
#include "server/session.h"

namespace vrambroker {

// Creates `dir` if it is missing, and locks it against a second daemon. The lock lasts as long as the descriptor.
// FailedPrecondition names the process that holds it.
absl::StatusOr<UniqueFd> LockSocketDir(const std::string& dir);

// A non-blocking listening socket of `type` (SOCK_STREAM, SOCK_SEQPACKET) at `path`; a file left there by a dead
// daemon is replaced. REQUIRES: the directory is locked.
absl::StatusOr<UniqueFd> ListenUnix(const std::string& path, int type, mode_t mode);

// The process that connected, with a pidfd of it. NotFound when it has gone already, FailedPrecondition when it lives
// in a pid namespace that this one cannot see.
absl::StatusOr<Caller> GetPeer(int fd);

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_UNIX_SOCKET_H_
