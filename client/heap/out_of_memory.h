// SPDX-License-Identifier: Apache-2.0
#ifndef VRAMBROKER_CLIENT_HEAP_OUT_OF_MEMORY_H_
#define VRAMBROKER_CLIENT_HEAP_OUT_OF_MEMORY_H_

#include "absl/status/status.h"
#include "client/vrambroker/client.h"
#include "vrambroker/v1/types.pb.h"

namespace vrambroker::client_internal {

// Unknown causes and reasons of newer daemons become kUnknown.
OutOfMemory FromProto(const v1::OutOfMemory& proto);

// A refusal decided by the client, in the daemon's format.
absl::Status OutOfMemoryError(const v1::OutOfMemory& oom);

}  // namespace vrambroker::client_internal

#endif  // VRAMBROKER_CLIENT_HEAP_OUT_OF_MEMORY_H_
