// SPDX-License-Identifier: Apache-2.0
//
// gRPC takes threads and descriptors when it starts. Without these it ends the process, or waits for ever, so that a
// program looks for them before.
#ifndef VRAMBROKER_ALLOCATOR_BASE_ROOM_TO_START_H_
#define VRAMBROKER_ALLOCATOR_BASE_ROOM_TO_START_H_

#include "absl/status/status.h"

namespace vrambroker {

// ResourceExhausted unless this process has what gRPC needs to start, and `own_threads` threads beside: it starts so
// many for a moment. Other processes of the user may take them right afterwards. In a process with little address space
// (ulimit -v) all threads share their memory from then on (M_ARENA_MAX), or the first ones would take what others need.
absl::Status CheckRoomForGrpc(int own_threads);

// Says what to do when a thread cannot be started.
absl::Status NoThreadError();

}  // namespace vrambroker

#endif  // VRAMBROKER_ALLOCATOR_BASE_ROOM_TO_START_H_
