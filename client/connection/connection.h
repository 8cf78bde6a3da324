// SPDX-License-Identifier: Apache-2.0
//
// Reaching the daemon: the gRPC socket, the descriptor socket, statuses.
#ifndef VRAMBROKER_CLIENT_CONNECTION_CONNECTION_H_
#define VRAMBROKER_CLIENT_CONNECTION_CONNECTION_H_

#include <grpcpp/grpcpp.h>

#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "allocator/base/mutex.h"
#include "allocator/base/unique_fd.h"
#include "vrambroker/v1/types.pb.h"

namespace vrambroker::client_internal {

// A channel over one connection to the daemon that serves `socket_dir`. It never reconnects: when the daemon goes
// away, calls fail at once, and a session can never silently continue with another daemon.
// Unavailable (no daemon), DeadlineExceeded or PermissionDenied say what to do. FailedPrecondition in a process made by
// fork() after its parent had a channel: gRPC's state is shared with the parent, and using it would end the parent.
// `give_up` is asked now and then while it waits: true ends that as if the time were up.
absl::StatusOr<std::shared_ptr<grpc::Channel>> ConnectChannel(const std::string& socket_dir, absl::Duration timeout,
                                                              const std::function<bool()>& give_up = nullptr);

// An error of ConnectChannel() that means: nobody serves the directory.
bool IsNoDaemon(const absl::Status& status);

// Exchanges tickets for file descriptors. Keeps its connection to the descriptor socket for the next ticket; calls at
// the same time have a connection each. Thread-safe.
class DescriptorFetcher {
 public:
  explicit DescriptorFetcher(absl::string_view socket_dir);

  // `timeout` is for all of it. Internal carries the daemon's refusal; otherwise errors as ConnectChannel().
  absl::StatusOr<UniqueFd> Fetch(absl::string_view ticket, absl::Duration timeout) ABSL_LOCKS_EXCLUDED(mu_);

 private:
  const std::string path_;
  Mutex mu_;
  UniqueFd kept_ ABSL_GUARDED_BY(mu_);  // a connection on which nothing is under way; invalid for none
};

// Ends a call after `timeout`, even if somebody sets the clock meanwhile.
void SetTimeout(grpc::ClientContext& context, absl::Duration timeout);

// Code, message, and details as payloads.
absl::Status FromProto(const v1::StatusDetails& details);
absl::Status FromGrpc(const grpc::Status& status);

}  // namespace vrambroker::client_internal

#endif  // VRAMBROKER_CLIENT_CONNECTION_CONNECTION_H_
