// SPDX-License-Identifier: Apache-2.0
//
// Reaching the daemon: sockets, a gRPC channel, statuses.
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

// Connects to a daemon's socket `path`; `timeout` applies to connecting, and to each send. Unavailable (no daemon),
// DeadlineExceeded or PermissionDenied say how to proceed. While waiting, polls `give_up`: true ends the wait like a
// timeout.
absl::StatusOr<UniqueFd> ConnectSocket(const std::string& path, int type, absl::Duration timeout,
                                       const std::function<bool()>& give_up = nullptr);

// Opens a channel over one connection to the daemon serving `socket_dir`. The channel never reconnects: when the daemon
// goes away, calls fail at once, and a session can never silently continue with another daemon. Errors as
// ConnectSocket(). FailedPrecondition in a process forked after its parent had a channel: the parent shares gRPC's
// state, and using gRPC would end the parent. ResourceExhausted when gRPC cannot start: gRPC would end this process, or
// hang.
absl::StatusOr<std::shared_ptr<grpc::Channel>> ConnectChannel(const std::string& socket_dir, absl::Duration timeout,
                                                              const std::function<bool()>& give_up = nullptr);

// Advice for programs on IsNoDaemon() errors; vramctl has an option instead.
inline constexpr char kSocketDirAdvice[] = "set VRAMBROKER_SOCKET_DIR (or socket_dir in the options) to its directory";

// True for an error of ConnectChannel() caused by a directory without a daemon.
bool IsNoDaemon(const absl::Status& status);

// Ends a call after `timeout`, even when the system clock is set meanwhile.
void SetTimeout(grpc::ClientContext& context, absl::Duration timeout);

// Convert code, message, and details as payloads.
absl::Status FromProto(const v1::StatusDetails& details);
absl::Status FromGrpc(const grpc::Status& status);

// The error for a daemon silent for `timeout` after the first call of a connection.
absl::Status NoAnswerError(absl::Duration timeout);

// Adds to the error of an unanswered call why the daemon may have closed the connection. gRPC knows only of the close;
// the daemon's log has the reason.
absl::Status ExplainClosed(const absl::Status& status);

}  // namespace vrambroker::client_internal

#endif  // VRAMBROKER_CLIENT_CONNECTION_CONNECTION_H_
