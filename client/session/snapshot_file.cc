// SPDX-License-Identifier: Apache-2.0
#include "client/session/snapshot_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "allocator/base/unique_fd.h"
#include "allocator/replay/pickle.h"
#include "allocator/replay/torch_snapshot.h"

namespace vrambroker::client_internal {

absl::Status WriteToDescriptor(int fd, absl::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t written = write(fd, bytes.data(), bytes.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) return absl::ErrnoToStatus(errno, "write");
    bytes.remove_prefix(static_cast<size_t>(written));
  }
  return absl::OkStatus();
}

namespace {

// Returns the file that a link leads to, or `path` itself when no file exists yet.
std::string Target(const std::string& path) {
  const std::unique_ptr<char, decltype(&std::free)> target(realpath(path.c_str(), nullptr), &std::free);
  return target != nullptr ? std::string(target.get()) : path;
}

}  // namespace

absl::Status CheckFilePath(const std::string& given) {
  struct stat info = {};
  if (given.empty()) return absl::InvalidArgumentError("the name of a file is needed");
  const std::string path = Target(given);
  if (stat(path.c_str(), &info) == 0 && !S_ISREG(info.st_mode)) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": it exists and is not a file"));
  }
  const size_t slash = path.rfind('/');
  const std::string folder = slash == std::string::npos ? "." : path.substr(0, slash + 1);
  if (access(folder.c_str(), W_OK | X_OK) == 0) return absl::OkStatus();
  return absl::ErrnoToStatus(errno, absl::StrCat(path, ": cannot write into its folder"));
}

absl::Status WriteWholeFile(const std::string& given, absl::string_view bytes) {
  const std::string path = Target(given);
  static std::atomic<uint32_t> next{0};
  std::string temporary;
  int opened = -1;
  do {  // skips names of other threads, or files left by killed processes
    temporary = absl::StrCat(path, ".", getpid(), ".", next++, ".tmp");
    opened = open(temporary.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  } while (opened < 0 && errno == EEXIST);
  if (opened < 0) return absl::ErrnoToStatus(errno, absl::StrCat("cannot create ", temporary));
  const UniqueFd file(opened);
  // Copies the mode of the replaced file; copies the owner only where this user may give files away.
  struct stat old = {};
  absl::Status status;
  if (stat(path.c_str(), &old) == 0) {
    constexpr auto kSameUser = static_cast<uid_t>(-1);
    const bool is_given =
        fchown(file.get(), old.st_uid, old.st_gid) == 0 || fchown(file.get(), kSameUser, old.st_gid) == 0;
    // Permissions of the old file's group must not go to another group.
    if (fchmod(file.get(), old.st_mode & (is_given ? 0777 : 0707)) != 0) status = absl::ErrnoToStatus(errno, "fchmod");
  }
  if (status.ok()) status = WriteToDescriptor(file.get(), bytes);
  if (status.ok() && fsync(file.get()) != 0) status = absl::ErrnoToStatus(errno, "fsync");
  if (status.ok() && rename(temporary.c_str(), path.c_str()) != 0) status = absl::ErrnoToStatus(errno, "rename");
  if (status.ok()) return status;
  unlink(temporary.c_str());
  return {status.code(), absl::StrCat("cannot write ", path, ": ", status.message())};
}

absl::Status WriteSnapshotFile(absl::Span<const HeapSnapshot> heaps, const std::string& path) {
  const PickleValue snapshot = TorchSnapshot(heaps);
  return WriteWholeFile(path, absl::EndsWith(path, ".json") ? WriteJson(snapshot) : WritePickle(snapshot));
}

}  // namespace vrambroker::client_internal
