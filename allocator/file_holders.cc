// SPDX-License-Identifier: Apache-2.0
#include "allocator/file_holders.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace vrambroker {
namespace {

using FileId = std::pair<dev_t, ino_t>;
using MountedFile = std::pair<uint64_t, uint64_t>;  // id of the mount, as fdinfo has it, and inode

struct Closer {
  void operator()(DIR* directory) const { (void)closedir(directory); }
  void operator()(FILE* file) const { (void)std::fclose(file); }
};
using Directory = std::unique_ptr<DIR, Closer>;
using File = std::unique_ptr<FILE, Closer>;

// The number after `key` in `text`, or 0.
uint64_t NumberAfter(absl::string_view text, absl::string_view key) {
  const size_t at = text.find(key);
  uint64_t number = 0;
  if (at == absl::string_view::npos) return 0;
  (void)absl::SimpleAtoi(text.substr(at + key.size(), text.find('\n', at) - at - key.size()), &number);
  return number;
}

// Whether this process, not the one that is looked at, is to blame.
bool IsOurs(int error) {
  return error == EMFILE || error == ENFILE || error == ENOMEM;
}

// Which file the descriptor is of whose fdinfo this is; nothing before Linux 5.14. Nothing, and errno, when it cannot
// be read.
std::optional<MountedFile> ReadDescriptorInfo(int directory, const char* name) {
  const int fd = openat(directory, name, O_RDONLY | O_CLOEXEC);
  if (fd < 0) return std::nullopt;
  std::array<char, 512> text = {};  // the lines that count come first
  const ssize_t length = read(fd, text.data(), text.size());
  (void)close(fd);
  const absl::string_view info(text.data(), length < 0 ? 0 : static_cast<size_t>(length));
  const MountedFile file(NumberAfter(info, "mnt_id:"), NumberAfter(info, "ino:"));
  return file.second == 0 ? std::nullopt : std::optional(file);
}

// Walks over one process after the other.
class Scan {
 public:
  Scan(absl::Span<const int> fds, const std::string& name) : link_(absl::StrCat("/memfd:", name)) {
    for (size_t i = 0; i < fds.size(); ++i) {
      struct stat file = {};
      if (fstat(fds[i], &file) != 0) continue;
      files_[{file.st_dev, file.st_ino}].push_back(i);
      if (const std::optional<MountedFile> mounted =
              ReadDescriptorInfo(AT_FDCWD, absl::StrCat("/proc/self/fdinfo/", fds[i]).c_str())) {
        mounted_files_[*mounted].push_back(i);
      } else if (IsOurs(errno)) {
        error_ = errno;
      }
    }
  }

  bool is_empty() const { return files_.empty(); }

  void Look(pid_t pid) {
    found_.clear();
    // Both may fail because the process has ended meanwhile: then it holds nothing.
    if ((!LookAtDescriptors(pid) && !LookAtDescriptorInfo(pid)) || !LookAtMappings(pid)) {
      if (errno == EACCES || errno == EPERM) ++holders_.unread_processes;
      if (IsOurs(errno)) error_ = errno;
    }
    std::sort(found_.begin(), found_.end());
    found_.erase(std::unique(found_.begin(), found_.end()), found_.end());
    for (const size_t segment : found_) holders_.holders.push_back({.segment = segment, .pid = pid});
  }

  absl::StatusOr<SegmentHolders> Result() && {
    if (error_ != 0) return absl::ErrnoToStatus(error_, "reading /proc failed: not every process was looked at");
    std::sort(holders_.holders.begin(), holders_.holders.end(),
              [](const auto& a, const auto& b) { return std::pair(a.segment, a.pid) < std::pair(b.segment, b.pid); });
    return std::move(holders_);
  }

 private:
  void Found(const FileId& file) {
    if (const auto it = files_.find(file); it != files_.end()) {
      found_.insert(found_.end(), it->second.begin(), it->second.end());
    }
  }

  // These return false, and errno, when they could not look.
  bool LookAtDescriptors(pid_t pid) {
    const Directory directory(opendir(absl::StrCat("/proc/", pid, "/fd").c_str()));
    const int base = directory == nullptr ? -1 : dirfd(directory.get());
    if (base < 0) return false;
    std::array<char, 256> link = {};
    for (errno = 0; const dirent* entry = readdir(directory.get()); errno = 0) {
      // Most are no memory files of ours: the link says so, and costs less than stat().
      const ssize_t length = readlinkat(base, entry->d_name, link.data(), link.size());
      if (length < 0 || !absl::StartsWith(absl::string_view(link.data(), static_cast<size_t>(length)), link_)) continue;
      struct stat file = {};
      if (fstatat(base, entry->d_name, &file, 0) == 0) Found({file.st_dev, file.st_ino});
    }
    return errno == 0;
  }

  // What /proc/PID/fd says is for the process's own user and those with CAP_DAC_READ_SEARCH; fdinfo, which says less
  // and costs more to read, is for those with CAP_SYS_PTRACE.
  bool LookAtDescriptorInfo(pid_t pid) {
    if (errno != EACCES || mounted_files_.empty()) return false;
    const Directory directory(opendir(absl::StrCat("/proc/", pid, "/fdinfo").c_str()));
    if (directory == nullptr) return false;
    for (errno = 0; const dirent* entry = readdir(directory.get()); errno = 0) {
      const std::optional<MountedFile> file = ReadDescriptorInfo(dirfd(directory.get()), entry->d_name);
      if (!file.has_value() && IsOurs(errno)) return false;
      if (!file.has_value()) continue;
      if (const auto it = mounted_files_.find(*file); it != mounted_files_.end()) {
        found_.insert(found_.end(), it->second.begin(), it->second.end());
      }
    }
    return errno == 0;
  }

  bool LookAtMappings(pid_t pid) {
    const File maps(std::fopen(absl::StrCat("/proc/", pid, "/maps").c_str(), "re"));
    if (maps == nullptr) return false;
    // Lines: 7f00-7f20 rw-s 00000000 00:01 1234    /memfd:NAME (deleted)
    char* line = nullptr;
    size_t size = 0;
    for (errno = 0; getline(&line, &size, maps.get()) >= 0; errno = 0) {
      if (!absl::StrContains(line, link_)) continue;
      unsigned device_major = 0;
      unsigned device_minor = 0;
      uint64_t inode = 0;
      // NOLINTNEXTLINE(bugprone-unchecked-string-to-number-conversion): the kernel writes these numbers
      if (std::sscanf(line, "%*s %*s %*s %x:%x %" SCNu64, &device_major, &device_minor, &inode) == 3) {
        Found({makedev(device_major, device_minor), inode});
      }
    }
    const int error = errno;
    std::free(line);
    errno = error;
    return error == 0;
  }

  const std::string link_;                                  // what links to such files begin with
  absl::flat_hash_map<FileId, std::vector<size_t>> files_;  // indices of their descriptors
  absl::flat_hash_map<MountedFile, std::vector<size_t>> mounted_files_;
  std::vector<size_t> found_;  // of the process looked at
  SegmentHolders holders_;
  int error_ = 0;  // errno, when holders may be missing for want of descriptors or memory
};

}  // namespace

absl::StatusOr<SegmentHolders> FindFileHolders(absl::Span<const int> fds, const std::string& name) {
  Scan scan(fds, name);
  if (scan.is_empty()) return SegmentHolders();
  const Directory processes(opendir("/proc"));
  if (processes == nullptr) return absl::ErrnoToStatus(errno, "opendir of /proc failed");
  const pid_t self = getpid();
  while (const dirent* entry = readdir(processes.get())) {
    pid_t pid = 0;
    if (absl::SimpleAtoi(entry->d_name, &pid) && pid != self) scan.Look(pid);
  }
  return std::move(scan).Result();
}

}  // namespace vrambroker
