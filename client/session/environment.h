// SPDX-License-Identifier: Apache-2.0
#ifndef VRAMBROKER_CLIENT_SESSION_ENVIRONMENT_H_
#define VRAMBROKER_CLIENT_SESSION_ENVIRONMENT_H_

#include "absl/status/statusor.h"
#include "client/vrambroker/client.h"

namespace vrambroker::client_internal {

// What the program has left open is as VRAMBROKER_LIMIT, VRAMBROKER_GUARANTEE, VRAMBROKER_NAME and VRAMBROKER_WAIT say.
// InvalidArgument names the variable that cannot be read.
absl::StatusOr<ClientOptions> WithEnvironment(ClientOptions options);

}  // namespace vrambroker::client_internal

#endif  // VRAMBROKER_CLIENT_SESSION_ENVIRONMENT_H_
