// SPDX-License-Identifier: Apache-2.0
#ifndef VRAMBROKER_DEPLOY_KUBERNETES_DAEMON_CLIENT_H_
#define VRAMBROKER_DEPLOY_KUBERNETES_DAEMON_CLIENT_H_

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "vrambroker/v1/admin.grpc.pb.h"
#include "vrambroker/v1/broker.grpc.pb.h"

namespace vrambroker::kubernetes {

// Calls of vrambrokerd. Each call uses a separate connection, so that calls after a restart of the daemon need no
// special handling. Errors are the daemon's, or explain why the daemon does not answer. Thread-safe.
class DaemonClient {
 public:
  // `timeout`: for each call, and for connecting before the call.
  DaemonClient(std::string socket_dir, absl::Duration timeout)
      : socket_dir_(std::move(socket_dir)), timeout_(timeout) {}

  absl::StatusOr<std::vector<v1::Device>> Devices() const;

  absl::StatusOr<v1::Claim> CreateClaim(const v1::CreateClaimRequest& request) const;
  absl::Status SetLabels(const std::string& claim, const std::map<std::string, std::string>& labels) const;
  // The claim is removed when its last session has ended. A missing claim is no error.
  absl::Status DrainClaim(const std::string& claim) const;
  absl::StatusOr<std::vector<v1::Claim>> Claims() const;

 private:
  const std::string socket_dir_;
  const absl::Duration timeout_;
};

}  // namespace vrambroker::kubernetes

#endif  // VRAMBROKER_DEPLOY_KUBERNETES_DAEMON_CLIENT_H_
