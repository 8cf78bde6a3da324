// SPDX-License-Identifier: Apache-2.0
//
// SessionMark: who has inherited what a session's client had open.
//
// A driver does not name the processes that hold a GPU's memory. A child made by fork() has its parent's descriptors of
// the GPU, and keeps the memory, and what still runs on it, alive when its parent has died. It has the client's mark as
// well: a memory file, open for nothing else. A child that calls exec() has neither, and one may close those of the GPU
// (Megatron-LM's data loaders do, since its pull request 3684). A process has one mark for all its sessions: a child
// may be older than a session, but not than the descriptors. A mark is no socket, because a child may close those:
// gRPC does, with GRPC_ENABLE_FORK_SUPPORT.
#ifndef VRAMBROKER_ALLOCATOR_DEVICE_SESSION_MARK_H_
#define VRAMBROKER_ALLOCATOR_DEVICE_SESSION_MARK_H_

#include <sys/types.h>

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "allocator/device/device.h"

namespace vrambroker {

// The inode of the memory file; 0 when it is not known.
using SessionMark = uint64_t;

// For the client: close-on-exec, to be passed to nobody. Invalid when the kernel makes none.
UniqueFd MakeSessionMark();

// For the daemon: the mark that process `pid` has open as `fd`. InvalidArgument: that is no mark. PermissionDenied: its
// descriptors may not be read; ProcessFiles says what that takes. Otherwise errors of the system.
absl::StatusOr<SessionMark> FindSessionMark(pid_t pid, uint32_t fd);

// Other processes that have the marks open, and the driver: "segment" is the index of the mark. Marks that are not
// known have no holders. Errors as ProcessFiles::Walk().
//
// `driver_files`: what the paths of the driver's files begin with. A process that has closed them has let go of the
// memory. Where this process has none of them, the driver's files are called otherwise, and the mark alone decides.
absl::StatusOr<SegmentHolders> FindMarkHolders(absl::Span<const SessionMark> marks,
                                               const std::string& driver_files = "/dev/nvidia");

}  // namespace vrambroker

#endif  // VRAMBROKER_ALLOCATOR_DEVICE_SESSION_MARK_H_
