// SPDX-License-Identifier: Apache-2.0
//
// SessionMark: finds processes that inherited the open files of a session's client.
//
// A driver does not name the processes holding a GPU's memory. A child made by fork() has its parent's descriptors of
// the GPU, and keeps the memory, and work still running there, alive after its parent's death. The child also has the
// client's mark: a memory file, open for no other purpose. A child that calls exec() has neither, and a child may close
// the descriptors of the GPU (Megatron-LM's data loaders do, since its pull request 3684). A process has one mark for
// all its sessions: a child may be older than a session, but not than the descriptors. A socket would not do as a mark,
// because a child may close sockets: gRPC does, with GRPC_ENABLE_FORK_SUPPORT.
#ifndef VRAMBROKER_ALLOCATOR_DEVICE_SESSION_MARK_H_
#define VRAMBROKER_ALLOCATOR_DEVICE_SESSION_MARK_H_

#include <sys/types.h>

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "allocator/device/device.h"

namespace vrambroker {

// Inode of the memory file; 0 when not known.
using SessionMark = uint64_t;

// For the client: makes a mark, close-on-exec, to be passed to no process. Invalid when the kernel makes none.
UniqueFd MakeSessionMark();

// For the daemon: finds the mark open as `fd` in process `pid`. InvalidArgument: `fd` is no mark. PermissionDenied: the
// process's descriptors may not be read; ProcessFiles lists the privileges needed. Otherwise errors of the system.
absl::StatusOr<SessionMark> FindSessionMark(pid_t pid, uint32_t fd);

// Finds other processes with both the marks and the driver open; "segment" is the index of the mark. Unknown marks have
// no holders. Errors as ProcessFiles::Walk().
//
// `driver_files`: beginning of the paths of the driver's files. A process without open driver files has let go of the
// memory. If the calling process has none open, the driver's files have other names, and the mark alone decides.
absl::StatusOr<SegmentHolders> FindMarkHolders(absl::Span<const SessionMark> marks,
                                               const std::string& driver_files = "/dev/nvidia");

}  // namespace vrambroker

#endif  // VRAMBROKER_ALLOCATOR_DEVICE_SESSION_MARK_H_
