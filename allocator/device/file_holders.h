// SPDX-License-Identifier: Apache-2.0
//
// Processes holding memory files: files open in the calling process, and files left by an earlier process. ProcessFiles
// lists the limits and privileges of such searches.
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

// Returns the beginning of links to memory files with names beginning with `name`.
std::string LinkTo(const std::string& name);

// Identity of a descriptor's file.
struct OpenFile {
  FileId file;                         // an inode of 0 belongs to no file
  std::optional<MountedFile> mounted;  // if the kernel tells
};
// Identifies the file of a descriptor of the calling process.
OpenFile IdentityOf(int fd);

// Finds other processes with one of the memory files open, or mapped if `where` includes mappings. `name`: beginning of
// the names given to memfd_create(). Errors as ProcessFiles::Walk().
absl::StatusOr<SegmentHolders> FindFileHolders(absl::Span<const OpenFile> files, const std::string& name,
                                               ProcessFiles::Where where);
// Finds holders of memory files open as `fds` in the calling process. Invalid descriptors have no holders.
absl::StatusOr<SegmentHolders> FindFileHolders(absl::Span<const int> fds, const std::string& name);

// Finds memory files of other processes with names beginning with `name`, created by the calling process's user or by
// root: anybody can give a file of their own such a name. Root sees the creator of a file. Other users see the creator
// only for processes of their own user, and, for files mapped and not open, only with CAP_CHECKPOINT_RESTORE. Without a
// visible creator, a file counts if it is one of `recorded`, or if the process belongs to the user or root. `bytes_of`
// gives the size by the rest of the name, for files with nothing else readable, and 0 for files not meant.
absl::StatusOr<LeftSegments> FindLeftFiles(const std::string& name,
                                           absl::FunctionRef<uint64_t(absl::string_view rest)> bytes_of,
                                           const RecordedFiles& recorded);

}  // namespace vrambroker

#endif  // VRAMBROKER_ALLOCATOR_DEVICE_FILE_HOLDERS_H_
