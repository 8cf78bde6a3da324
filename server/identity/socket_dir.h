// SPDX-License-Identifier: Apache-2.0
//
// The socket directory: safe from others, and locked against a second daemon.
#ifndef VRAMBROKER_SERVER_IDENTITY_SOCKET_DIR_H_
#define VRAMBROKER_SERVER_IDENTITY_SOCKET_DIR_H_

#include <string>

#include "absl/status/statusor.h"
#include "allocator/base/unique_fd.h"

namespace vrambroker {

// Creates `dir` if it is missing, and locks it against a second daemon by its file vrambroker.lock. The lock lasts as
// long as the descriptor. Only this user and root can ever take it: flock() is satisfied with a descriptor that only
// reads, so a file that others can open (of version 0.1) is replaced by a new one, unless a daemon serves by it. So is
// one of another user that nobody holds. One that cannot be opened is left alone, for a daemon may hold it.
// FailedPrecondition names the process that serves `dir`; or says what is in the way, and what to do.
absl::StatusOr<UniqueFd> LockSocketDir(const std::string& dir);

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_IDENTITY_SOCKET_DIR_H_
