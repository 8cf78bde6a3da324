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

// Returns UUIDs of the daemon's GPUs visible to this process, as limited by CUDA_VISIBLE_DEVICES or a container's
// NVIDIA_VISIBLE_DEVICES. Empty: the process sees all of the daemon's GPUs, or none; neither variable limits them, so
// no call is made; only one GPU exists; or the daemon does not say.
absl::StatusOr<std::vector<std::string>> VisibleDevices(const std::shared_ptr<grpc::Channel>& channel,
                                                        absl::Duration timeout);

}  // namespace vrambroker::client_internal

#endif  // VRAMBROKER_CLIENT_SESSION_VISIBLE_DEVICES_H_
