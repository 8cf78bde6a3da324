// SPDX-License-Identifier: Apache-2.0
#ifndef VRAMBROKER_CLIENT_SESSION_VISIBLE_DEVICES_H_
#define VRAMBROKER_CLIENT_SESSION_VISIBLE_DEVICES_H_

#include <grpcpp/grpcpp.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace vrambroker::client_internal {

// UUIDs of the daemon's GPUs that this process sees. None: it sees all of them, or none, or there is only one, or the
// daemon does not say. Asks the daemon only where this process may have GPUs.
absl::StatusOr<std::vector<std::string>> VisibleDevices(const std::shared_ptr<grpc::Channel>& channel,
                                                        absl::Duration timeout);

}  // namespace vrambroker::client_internal

#endif  // VRAMBROKER_CLIENT_SESSION_VISIBLE_DEVICES_H_
