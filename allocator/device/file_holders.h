// SPDX-License-Identifier: Apache-2.0
//
// Which processes hold which memory files: of those that this process has open, and of those that are left of an
// earlier one. ProcessFiles says what is seen, and what it takes.
#ifndef VRAMBROKER_ALLOCATOR_DEVICE_FILE_HOLDERS_H_
#define VRAMBROKER_ALLOCATOR_DEVICE_FILE_HOLDERS_H_

#include <sys/types.h>

#include <optional>
#include <string>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "allocator/device/device.h"
#include "allocator/device/process_files.h"
#include "allocator/device/segment_record.h"

namespace vrambroker {

// What links to memory files of names that begin with `name` begin with.
std::string LinkTo(const std::string& name);

// Which file a descriptor is of.
struct OpenFile {
  FileId file;                         // an inode of 0 is of no file
  std::optional<MountedFile> mounted;  // where the kernel tells
};
// Of a descriptor of this process.
OpenFile IdentityOf(int fd);

// Other processes that have one of the memory files open, or mapped if they are to be looked for there. `name` is what
// the names that memfd_create() was called with begin with. Errors as ProcessFiles::Walk().
absl::StatusOr<SegmentHolders> FindFileHolders(absl::Span<const OpenFile> files, const std::string& name,
                                               ProcessFiles::Where where);
// The same for memory files that this process has open as `fds`. Invalid descriptors have no holders.
absl::StatusOr<SegmentHolders> FindFileHolders(absl::Span<const int> fds, const std::string& name);

// The memory files of other processes whose names begin with `name`, and that the user who runs this process, or root,
// has created: anybody can give a file of their own such a name. Root sees who created a file. Others see it only of
// processes of their own user, and, of files that are mapped and not open, only with CAP_CHECKPOINT_RESTORE. Where it
// is not seen, a file counts if it is one of `recorded`, or if the process is of this user or root.
// `bytes_of` says how large a file is by the rest of its name, for where only that can be read, and has 0 for files
// that are not meant.
absl::StatusOr<LeftSegments> FindLeftFiles(const std::string& name,
                                           absl::FunctionRef<uint64_t(absl::string_view rest)> bytes_of,
                                           const RecordedFiles& recorded);

}  // namespace vrambroker

#endif  // VRAMBROKER_ALLOCATOR_DEVICE_FILE_HOLDERS_H_
