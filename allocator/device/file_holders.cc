// SPDX-License-Identifier: Apache-2.0
#include "allocator/device/file_holders.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cinttypes>
#include <cstdio>
#include <optional>
#include <utility>
#include <vector>

#include "absl/container/btree_map.h"
#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "allocator/device/process_files.h"

namespace vrambroker {
namespace {

// The file of a line of /proc/PID/maps.
std::optional<FileId> FileOfMapping(const char* line) {
  unsigned device_major = 0;
  unsigned device_minor = 0;
  uint64_t inode = 0;
  // NOLINTNEXTLINE(bugprone-unchecked-string-to-number-conversion): the kernel writes these numbers
  if (std::sscanf(line, "%*s %*s %*s %x:%x %" SCNu64, &device_major, &device_minor, &inode) != 3) return std::nullopt;
  return FileId(makedev(device_major, device_minor), inode);
}

// Who has certain files.
class HolderSearch : public ProcessFiles {
 public:
  HolderSearch(absl::Span<const OpenFile> files, const std::string& name, Where where)
      : ProcessFiles(LinkTo(name), where) {
    for (size_t i = 0; i < files.size(); ++i) {
      if (files[i].file.second == 0) continue;
      files_[files[i].file].push_back(i);
      if (const std::optional<MountedFile>& mounted = files[i].mounted) mounted_files_[*mounted].push_back(i);
    }
  }

  bool is_empty() const { return files_.empty(); }

  SegmentHolders Holders() && {
    std::vector<SegmentHolders::Holder>& holders = holders_.holders;
    const auto key = [](const SegmentHolders::Holder& holder) { return std::pair(holder.segment, holder.pid); };
    std::sort(holders.begin(), holders.end(), [&](const auto& a, const auto& b) { return key(a) < key(b); });
    holders.erase(
        std::unique(holders.begin(), holders.end(), [&](const auto& a, const auto& b) { return key(a) == key(b); }),
        holders.end());
    holders_.unread_processes = unread_processes();
    return std::move(holders_);
  }

 private:
  void OnDescriptor(pid_t pid, int directory, const char* name, absl::string_view /*link*/) override {
    struct stat file = {};
    if (fstatat(directory, name, &file, 0) == 0) Found(pid, files_, FileId(file.st_dev, file.st_ino));
  }
  void OnUnnamedDescriptor(pid_t pid, const MountedFile& file) override { Found(pid, mounted_files_, file); }
  void OnMapping(pid_t pid, const char* line) override {
    if (const std::optional<FileId> file = FileOfMapping(line)) Found(pid, files_, *file);
  }

  template <typename Files, typename Id>
  void Found(pid_t pid, const Files& files, const Id& id) {
    const auto it = files.find(id);
    if (it == files.end()) return;
    for (const size_t segment : it->second) holders_.holders.push_back({.segment = segment, .pid = pid});
  }

  absl::flat_hash_map<FileId, std::vector<size_t>> files_;  // indices of their descriptors
  absl::flat_hash_map<MountedFile, std::vector<size_t>> mounted_files_;
  SegmentHolders holders_;
};

// Files that this process does not have open.
class LeftSearch : public ProcessFiles {
 public:
  LeftSearch(const std::string& name, absl::FunctionRef<uint64_t(absl::string_view)> bytes_of)
      : ProcessFiles(LinkTo(name)), bytes_of_(bytes_of) {}

  LeftSegments Left() && {
    LeftSegments left;
    for (auto& [id, segment] : found_) {
      std::vector<ProcessId>& holders = segment.holders;
      std::sort(holders.begin(), holders.end());
      holders.erase(std::unique(holders.begin(), holders.end()), holders.end());
      left.segments.push_back(std::move(segment));
    }
    left.unread_processes = unread_processes();
    return left;
  }

 private:
  void OnDescriptor(pid_t pid, int directory, const char* name, absl::string_view text) override {
    struct stat file = {};
    if (BytesByName(text) > 0 && fstatat(directory, name, &file, 0) == 0 && IsCreatedByUs(file)) Found(pid, file);
  }
  void OnUnnamedDescriptor(pid_t /*pid*/, const MountedFile& /*file*/) override {}  // of any file
  void OnMapping(pid_t pid, const char* line) override {
    const absl::string_view text = line;
    const uint64_t bytes = BytesByName(text.substr(text.find(link())));
    const std::optional<FileId> id = FileOfMapping(line);
    if (bytes == 0 || !id.has_value()) return;
    struct stat file = {};
    const std::string range(text.substr(0, text.find(' ')));
    if (stat(absl::StrCat("/proc/", pid, "/map_files/", range).c_str(), &file) == 0) {
      if (IsCreatedByUs(file)) Found(pid, file);
      return;
    }
    // Following that link takes CAP_CHECKPOINT_RESTORE. Without it, the name has to do, of processes that could not
    // profit from forging it: of this user, or root.
    if (errno != EPERM && errno != EACCES) return;
    if (!IsCreatedByUs(ProcessOf(pid))) return Unread();
    file.st_dev = id->first;
    file.st_ino = id->second;
    file.st_size = static_cast<off_t>(bytes);
    Found(pid, file);
  }

  uint64_t BytesByName(absl::string_view text) const {
    text.remove_prefix(link().size());
    return bytes_of_(text.substr(0, text.find_first_of(" \n")));
  }
  // Its owner is the process's user.
  static struct stat ProcessOf(pid_t pid) {
    struct stat process = {};
    if (stat(absl::StrCat("/proc/", pid).c_str(), &process) != 0) process.st_uid = static_cast<uid_t>(-1);
    return process;
  }
  static bool IsCreatedByUs(const struct stat& file) { return file.st_uid == geteuid() || file.st_uid == 0; }

  void Found(pid_t pid, const struct stat& file) {
    LeftSegment& segment = found_[{file.st_dev, file.st_ino}];
    segment.file_device = file.st_dev;
    segment.file_inode = file.st_ino;
    segment.bytes = static_cast<uint64_t>(file.st_size);
    if (segment.holders.empty()) segment.holder_uid = ProcessOf(pid).st_uid;
    // A process that has just ended, and given its pid on, holds nothing: the next look finds that.
    segment.holders.push_back({.pid = pid, .started = StartOf(pid)});
  }

  const absl::FunctionRef<uint64_t(absl::string_view)> bytes_of_;
  absl::btree_map<FileId, LeftSegment> found_;
};

}  // namespace

std::string LinkTo(const std::string& name) {
  return absl::StrCat("/memfd:", name);
}

OpenFile IdentityOf(int fd) {
  struct stat file = {};
  if (fstat(fd, &file) != 0) return {};
  return {.file = {file.st_dev, file.st_ino},
          .mounted = ReadDescriptorInfo(AT_FDCWD, absl::StrCat("/proc/self/fdinfo/", fd).c_str())};
}

absl::StatusOr<SegmentHolders> FindFileHolders(absl::Span<const int> fds, const std::string& name) {
  std::vector<OpenFile> files;
  files.reserve(fds.size());
  for (const int fd : fds) files.push_back(IdentityOf(fd));
  return FindFileHolders(files, name, ProcessFiles::Where::kDescriptorsAndMappings);
}

absl::StatusOr<SegmentHolders> FindFileHolders(absl::Span<const OpenFile> files, const std::string& name,
                                               ProcessFiles::Where where) {
  HolderSearch search(files, name, where);
  if (search.is_empty()) return SegmentHolders();
  if (absl::Status status = search.Walk(); !status.ok()) return status;
  return std::move(search).Holders();
}

absl::StatusOr<LeftSegments> FindLeftFiles(const std::string& name,
                                           absl::FunctionRef<uint64_t(absl::string_view rest)> bytes_of) {
  LeftSearch search(name, bytes_of);
  if (absl::Status status = search.Walk(); !status.ok()) return status;
  return std::move(search).Left();
}

}  // namespace vrambroker
