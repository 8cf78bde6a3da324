// SPDX-License-Identifier: Apache-2.0
//
// gRPC takes threads and descriptors when it starts. A lack of threads or descriptors ends the process or blocks for
// ever, so a program checks before.
#ifndef VRAMBROKER_ALLOCATOR_BASE_ROOM_TO_START_H_
#define VRAMBROKER_ALLOCATOR_BASE_ROOM_TO_START_H_

#include "absl/status/status.h"

namespace vrambroker {

// ResourceExhausted unless the process has enough for the start of gRPC, and for `own_threads` threads beside. Starts
// so many threads for a moment. Other processes of the user may take the room right afterwards. With little address
// space (ulimit -v), all threads share their memory from then on (M_ARENA_MAX), lest the first threads take the others'
// room.
absl::Status CheckRoomForGrpc(int own_threads);

// Advice for a thread that cannot be started.
absl::Status NoThreadError();

}  // namespace vrambroker

#endif  // VRAMBROKER_ALLOCATOR_BASE_ROOM_TO_START_H_
