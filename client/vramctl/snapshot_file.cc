// SPDX-License-Identifier: Apache-2.0
#include "client/vramctl/snapshot_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "allocator/device.h"
#include "allocator/replay/pickle.h"
#include "allocator/replay/torch_snapshot.h"

namespace vrambroker::vramctl {
namespace {

absl::Status WriteAll(int fd, absl::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t written = write(fd, bytes.data(), bytes.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) return absl::ErrnoToStatus(errno, "write");
    bytes.remove_prefix(static_cast<size_t>(written));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status WriteFile(const std::string& path, absl::string_view bytes) {
  if (path == "-") return WriteAll(STDOUT_FILENO, bytes);
  const std::string temporary = absl::StrCat(path, ".", getpid(), ".tmp");
  UniqueFd file(open(temporary.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666));
  if (!file.valid()) return absl::ErrnoToStatus(errno, absl::StrCat("cannot create ", temporary));
  absl::Status status = WriteAll(file.get(), bytes);
  if (status.ok() && fsync(file.get()) != 0) status = absl::ErrnoToStatus(errno, "fsync");
  if (status.ok() && rename(temporary.c_str(), path.c_str()) != 0) status = absl::ErrnoToStatus(errno, "rename");
  if (status.ok()) return status;
  unlink(temporary.c_str());
  return {status.code(), absl::StrCat("cannot write ", path, ": ", status.message())};
}

absl::Status CheckSnapshotPath(const std::string& path) {
  struct stat info = {};
  if (path == "-") return absl::OkStatus();
  if (path.empty()) return absl::InvalidArgumentError("-o: the name of a file is needed");
  if (stat(path.c_str(), &info) == 0 && !S_ISREG(info.st_mode)) {
    return absl::InvalidArgumentError(absl::StrCat("-o ", path, ": it exists and is not a file"));
  }
  const size_t slash = path.rfind('/');
  const std::string folder = slash == std::string::npos ? "." : path.substr(0, slash + 1);
  if (access(folder.c_str(), W_OK | X_OK) == 0) return absl::OkStatus();
  return absl::ErrnoToStatus(errno, absl::StrCat("-o ", path, ": cannot write into its folder"));
}

absl::Status WriteSnapshot(absl::Span<const HeapSnapshot> heaps, const std::string& path) {
  const PickleValue snapshot = TorchSnapshot(heaps);
  if (path == "-") return WriteFile(path, absl::StrCat(WriteJson(snapshot), "\n"));
  return WriteFile(path, absl::EndsWith(path, ".json") ? WriteJson(snapshot) : WritePickle(snapshot));
}

}  // namespace vrambroker::vramctl
