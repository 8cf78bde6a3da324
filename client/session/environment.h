// SPDX-License-Identifier: Apache-2.0
#ifndef VRAMBROKER_CLIENT_SESSION_ENVIRONMENT_H_
#define VRAMBROKER_CLIENT_SESSION_ENVIRONMENT_H_

#include "absl/status/statusor.h"
#include "client/vrambroker/client.h"

namespace vrambroker::client_internal {

inline constexpr char kDevicesVariable[] = "VRAMBROKER_DEVICES";

// Fills in options left open by the program from VRAMBROKER_LIMIT, _GUARANTEE, _NAME, _WAIT and _DEVICES.
// InvalidArgument names an unreadable variable, or an entry of `devices` that cannot be a device.
absl::StatusOr<ClientOptions> WithEnvironment(ClientOptions options);

}  // namespace vrambroker::client_internal

#endif  // VRAMBROKER_CLIENT_SESSION_ENVIRONMENT_H_
