// SPDX-License-Identifier: Apache-2.0
//
// Reaching the daemon: its sockets, a channel over the one of gRPC, statuses.
#ifndef VRAMBROKER_CLIENT_CONNECTION_CONNECTION_H_
#define VRAMBROKER_CLIENT_CONNECTION_CONNECTION_H_

#include <grpcpp/grpcpp.h>

#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "allocator/base/unique_fd.h"
#include "vrambroker/v1/types.pb.h"

namespace vrambroker::client_internal {

// A connection to the socket `path` of a daemon; `timeout` is for connecting, and for each send. Unavailable (no
// daemon), DeadlineExceeded or PermissionDenied say what to do. `give_up` is asked now and then while it waits: true
// ends that as if the time were up.
absl::StatusOr<UniqueFd> ConnectSocket(const std::string& path, int type, absl::Duration timeout,
                                       const std::function<bool()>& give_up = nullptr);

// A channel over one connection to the daemon that serves `socket_dir`. It never reconnects: when the daemon goes
// away, calls fail at once, and a session can never silently continue with another daemon.
// Errors as ConnectSocket(). FailedPrecondition in a process made by fork() after its parent had a channel: gRPC's
// state is shared with the parent, and using it would end the parent. ResourceExhausted where gRPC cannot start: it
// would end this process, or wait for ever.
absl::StatusOr<std::shared_ptr<grpc::Channel>> ConnectChannel(const std::string& socket_dir, absl::Duration timeout,
                                                              const std::function<bool()>& give_up = nullptr);

// What such an error advises programs to do; vramctl has an option.
inline constexpr char kSocketDirAdvice[] = "set VRAMBROKER_SOCKET_DIR (or socket_dir in the options) to its directory";

// An error of ConnectChannel() that means: nobody serves the directory.
bool IsNoDaemon(const absl::Status& status);

// Ends a call after `timeout`, even if somebody sets the clock meanwhile.
void SetTimeout(grpc::ClientContext& context, absl::Duration timeout);

// Code, message, and details as payloads.
absl::Status FromProto(const v1::StatusDetails& details);
absl::Status FromGrpc(const grpc::Status& status);

// What is said of a daemon that has not answered the first call of a connection within `timeout`.
absl::Status NoAnswerError(absl::Duration timeout);

// ExplainClosed adds to the error of an unanswered call what may be why the daemon has closed its connection. gRPC
// knows only that it was closed, and the daemon's log has the reason.
absl::Status ExplainClosed(const absl::Status& status);

}  // namespace vrambroker::client_internal

#endif  // VRAMBROKER_CLIENT_CONNECTION_CONNECTION_H_
