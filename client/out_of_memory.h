// SPDX-License-Identifier: Apache-2.0
#ifndef VRAMBROKER_CLIENT_OUT_OF_MEMORY_H_
#define VRAMBROKER_CLIENT_OUT_OF_MEMORY_H_

#include "client/vrambroker/client.h"
#include "vrambroker/v1/types.pb.h"

namespace vrambroker::client_internal {

// Causes and reasons that a newer daemon has become kUnknown.
OutOfMemory FromProto(const v1::OutOfMemory& proto);

}  // namespace vrambroker::client_internal

#endif  // VRAMBROKER_CLIENT_OUT_OF_MEMORY_H_
