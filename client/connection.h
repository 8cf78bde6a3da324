// SPDX-License-Identifier: Apache-2.0
//
// Reaching the daemon: the gRPC socket, the descriptor socket, statuses.
#ifndef VRAMBROKER_CLIENT_CONNECTION_H_
#define VRAMBROKER_CLIENT_CONNECTION_H_

#include <grpcpp/grpcpp.h>

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "allocator/device.h"

namespace vrambroker::client_internal {

// A channel over one connection to the daemon that serves `socket_dir`. It never reconnects: when the daemon goes
// away, calls fail at once, and a session can never silently continue with another daemon.
// Unavailable (no daemon) or PermissionDenied say what to do.
absl::StatusOr<std::shared_ptr<grpc::Channel>> ConnectChannel(const std::string& socket_dir);

// Exchanges a ticket for a file descriptor.
absl::StatusOr<UniqueFd> FetchDescriptor(const std::string& socket_dir, absl::string_view ticket,
                                         absl::Duration timeout);

// Code, message, and details as payloads.
absl::Status FromGrpc(const grpc::Status& status);

}  // namespace vrambroker::client_internal

#endif  // VRAMBROKER_CLIENT_CONNECTION_H_
