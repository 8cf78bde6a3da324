// SPDX-License-Identifier: Apache-2.0
//
// Which processes have a file open or mapped, as /proc tells. For memory files: they have no name to ask for.
#ifndef VRAMBROKER_ALLOCATOR_FILE_HOLDERS_H_
#define VRAMBROKER_ALLOCATOR_FILE_HOLDERS_H_

#include <string>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "allocator/device.h"

namespace vrambroker {

// Other processes that have one of the memory files `fds` open or mapped, in one pass over all processes: milliseconds
// and more, so hold no lock. Processes of other users can be looked into by root, and by those who have CAP_SYS_PTRACE
// from Linux 5.14 on; the others are counted as unread. `name` is what memfd_create() was called with. Invalid
// descriptors have no holders. Not seen: descriptors on their way through a socket, those of a thread that has
// descriptors of its own (CLONE_FILES), and processes of other pid namespaces than this one and those below it.
// An error when there is no /proc, or when this process lacks descriptors or memory to look at all of it.
absl::StatusOr<SegmentHolders> FindFileHolders(absl::Span<const int> fds, const std::string& name);

}  // namespace vrambroker

#endif  // VRAMBROKER_ALLOCATOR_FILE_HOLDERS_H_
