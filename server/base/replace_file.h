// SPDX-License-Identifier: Apache-2.0
//
// Small files of this user alone, most of them replaced as a whole.
#ifndef VRAMBROKER_SERVER_BASE_REPLACE_FILE_H_
#define VRAMBROKER_SERVER_BASE_REPLACE_FILE_H_

#include <cstddef>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "allocator/base/unique_fd.h"

namespace vrambroker {

// Opens a regular file writable by this user only, with O_RDONLY or O_RDWR. Follows no symbolic link. NotFound: no such
// file. FailedPrecondition: other users could have written the file.
absl::StatusOr<UniqueFd> OpenOwnFile(const std::string& path, int access);
// Returns the contents of an open file; `path` is for messages. ResourceExhausted: the file is larger than
// `most_bytes`.
absl::StatusOr<std::string> ReadOpenFile(const UniqueFd& file, const std::string& path, size_t most_bytes);
// Opens and reads. Errors as OpenOwnFile() and ReadOpenFile().
absl::StatusOr<std::string> ReadOwnFile(const std::string& path, size_t most_bytes);

// Replaces the file at once or not at all: readers of `path` find the old text or the new text, even after this process
// was killed. With `outlives_machine`, also after a power failure. Only this user may read and write the file. Uses
// `path`.new: one call at a time.
absl::Status ReplaceFile(const std::string& path, absl::string_view text, bool outlives_machine);

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_BASE_REPLACE_FILE_H_
