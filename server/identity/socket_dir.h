// SPDX-License-Identifier: Apache-2.0
//
// The socket directory: protected from other users, and locked against a second daemon.
#ifndef VRAMBROKER_SERVER_IDENTITY_SOCKET_DIR_H_
#define VRAMBROKER_SERVER_IDENTITY_SOCKET_DIR_H_

#include <string>

#include "absl/status/statusor.h"
#include "allocator/base/unique_fd.h"

namespace vrambroker {

// Creates `dir` if missing, and locks `dir` against a second daemon by its file vrambroker.lock. The lock lasts as long
// as the descriptor. Only this user and root can ever take the lock: flock() works even on a read-only descriptor, so a
// file readable by other users (of version 0.1) is replaced, unless a daemon is using the file. An unlocked file of
// another user is replaced, too. A file that cannot be opened is left alone, because a daemon may hold the lock.
// FailedPrecondition names the process serving `dir`, or the obstacle and the remedy.
absl::StatusOr<UniqueFd> LockSocketDir(const std::string& dir);

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_IDENTITY_SOCKET_DIR_H_
