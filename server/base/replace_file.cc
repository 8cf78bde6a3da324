// SPDX-License-Identifier: Apache-2.0
#include "server/base/replace_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>

#include "absl/strings/str_cat.h"

namespace vrambroker {
namespace {

// On false, errno has the error.
bool WriteAll(int file, absl::string_view text) {
  while (!text.empty()) {
    const ssize_t written = write(file, text.data(), text.size());
    if (written < 0 && errno == EINTR) continue;
    if (written == 0) errno = ENOSPC;
    if (written <= 0) return false;
    text.remove_prefix(static_cast<size_t>(written));
  }
  return true;
}

absl::Status WriteNew(const std::string& path, absl::string_view text, bool outlives_machine) {
  const UniqueFd file(open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
  if (!file.valid()) return absl::ErrnoToStatus(errno, absl::StrCat("cannot create ", path));
  if (!WriteAll(file.get(), text) || (outlives_machine && fsync(file.get()) != 0)) {
    return absl::ErrnoToStatus(errno, absl::StrCat("cannot write ", path));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<UniqueFd> OpenOwnFile(const std::string& path, int access) {
  UniqueFd file(open(path.c_str(), access | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK));
  if (!file.valid()) return absl::ErrnoToStatus(errno, absl::StrCat("cannot open ", path));
  struct stat found = {};
  if (fstat(file.get(), &found) != 0) return absl::ErrnoToStatus(errno, absl::StrCat("cannot look at ", path));
  if (!S_ISREG(found.st_mode) || found.st_uid != geteuid() || (found.st_mode & 0022) != 0) {
    return absl::FailedPreconditionError(absl::StrCat(path, " is not a file that only uid ", geteuid(), " may write"));
  }
  return file;
}

absl::StatusOr<std::string> ReadOpenFile(const UniqueFd& file, const std::string& path, size_t most_bytes) {
  struct stat found = {};
  if (fstat(file.get(), &found) != 0) return absl::ErrnoToStatus(errno, absl::StrCat("cannot look at ", path));
  if (static_cast<uint64_t>(found.st_size) > most_bytes) {
    return absl::ResourceExhaustedError(absl::StrCat(path, " has more than ", most_bytes, " bytes"));
  }
  std::string text(static_cast<size_t>(found.st_size), '\0');
  size_t size = 0;
  while (size < text.size()) {
    const ssize_t got = pread(file.get(), text.data() + size, text.size() - size, static_cast<off_t>(size));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return absl::ErrnoToStatus(errno, absl::StrCat("cannot read ", path));
    if (got == 0) break;
    size += static_cast<size_t>(got);
  }
  text.resize(size);
  return text;
}

absl::StatusOr<std::string> ReadOwnFile(const std::string& path, size_t most_bytes) {
  const absl::StatusOr<UniqueFd> file = OpenOwnFile(path, O_RDONLY);
  return file.ok() ? ReadOpenFile(*file, path, most_bytes) : file.status();
}

absl::Status ReplaceFile(const std::string& path, absl::string_view text, bool outlives_machine) {
  const std::string new_path = absl::StrCat(path, ".new");
  (void)unlink(new_path.c_str());
  absl::Status status = WriteNew(new_path, text, outlives_machine);
  if (status.ok() && rename(new_path.c_str(), path.c_str()) != 0) {
    status = absl::ErrnoToStatus(errno, absl::StrCat("cannot replace ", path));
  }
  if (!status.ok()) {
    (void)unlink(new_path.c_str());
    return status;
  }
  if (!outlives_machine) return status;
  // Sync the directory, too. On a file system without directory sync, the file exists all the same.
  const std::string dir = path.substr(0, path.rfind('/') + 1);
  const UniqueFd folder(open(dir.empty() ? "." : dir.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (folder.valid()) (void)fsync(folder.get());
  return status;
}

}  // namespace vrambroker
