// SPDX-License-Identifier: Apache-2.0
//
// Small files of this user's alone, most of them replaced as a whole.
#ifndef VRAMBROKER_SERVER_BASE_REPLACE_FILE_H_
#define VRAMBROKER_SERVER_BASE_REPLACE_FILE_H_

#include <cstddef>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "allocator/base/unique_fd.h"

namespace vrambroker {

// A regular file that only this user may write, with O_RDONLY or O_RDWR. Follows no symbolic link. NotFound: there is
// none. FailedPrecondition: others could have written it.
absl::StatusOr<UniqueFd> OpenOwnFile(const std::string& path, int access);
// What is in a file that is open; `path` is for messages. ResourceExhausted: it is larger than `most_bytes`.
absl::StatusOr<std::string> ReadOpenFile(const UniqueFd& file, const std::string& path, size_t most_bytes);
// Both. Errors as theirs.
absl::StatusOr<std::string> ReadOwnFile(const std::string& path, size_t most_bytes);

// At once or not at all: who reads `path` finds the old text or the new one, also after this process was killed. With
// `outlives_machine`, also after a power failure. Only this user may read and write it. By way of `path`.new: one call
// at a time.
absl::Status ReplaceFile(const std::string& path, absl::string_view text, bool outlives_machine);

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_BASE_REPLACE_FILE_H_
