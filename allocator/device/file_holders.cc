// SPDX-License-Identifier: Apache-2.0
#include "allocator/device/file_holders.h"

#include <fcntl.h>
#include <sys/mman.h>
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
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "allocator/base/descriptor_reserve.h"
#include "allocator/base/unique_fd.h"
#include "allocator/device/process_files.h"

namespace vrambroker {
namespace {

struct Mapping {
  FileId file;
  absl::string_view path;  // to the end of the line
};

// Parses a line of /proc/PID/maps.
std::optional<Mapping> ParseMapping(const char* line) {
  unsigned device_major = 0;
  unsigned device_minor = 0;
  uint64_t inode = 0;
  int path = 0;
  // NOLINTNEXTLINE(bugprone-unchecked-string-to-number-conversion): the kernel writes these numbers
  if (std::sscanf(line, "%*s %*s %*s %x:%x %" SCNu64 " %n", &device_major, &device_minor, &inode, &path) != 3) {
    return std::nullopt;
  }
  return Mapping{.file = FileId(makedev(device_major, device_minor), inode), .path = line + path};
}

// Searches for holders of given files.
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
    if (const std::optional<Mapping> mapping = ParseMapping(line)) Found(pid, files_, mapping->file);
  }

  template <typename Files, typename Id>
  void Found(pid_t pid, const Files& files, const Id& id) {
    const auto it = files.find(id);
    if (it == files.end()) return;
    for (const size_t segment : it->second) holders_.holders.push_back({.segment = segment, .pid = pid});
  }

  absl::flat_hash_map<FileId, std::vector<size_t>> files_;  // indices of the files' descriptors
  absl::flat_hash_map<MountedFile, std::vector<size_t>> mounted_files_;
  SegmentHolders holders_;
};

// Searches for files not open in the calling process. `memory_file` is any memory file: all are on one file system.
class LeftSearch : public ProcessFiles {
 public:
  LeftSearch(const std::string& name, absl::FunctionRef<uint64_t(absl::string_view)> bytes_of,
             const RecordedFiles& recorded, const OpenFile& memory_file)
      : ProcessFiles(LinkTo(name)), bytes_of_(bytes_of), recorded_(recorded), memory_file_(memory_file) {}

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
  void OnUnnamedDescriptor(pid_t pid, const MountedFile& mounted) override {
    if (!memory_file_.mounted.has_value() || memory_file_.mounted->first != mounted.first) return;
    const FileId id(memory_file_.file.first, mounted.second);
    if (const uint64_t bytes = RecordedBytes(id); bytes > 0) Found(pid, id, bytes);
  }
  void OnMapping(pid_t pid, const char* line) override {
    const std::optional<Mapping> mapping = ParseMapping(line);
    if (!mapping.has_value() || !absl::StartsWith(mapping->path, link())) return;
    const uint64_t bytes = BytesByName(mapping->path);
    if (bytes == 0) return;
    struct stat file = {};
    const absl::string_view text = line;
    const std::string range(text.substr(0, text.find(' ')));
    if (stat(absl::StrCat("/proc/", pid, "/map_files/", range).c_str(), &file) == 0) {
      if (IsCreatedByUs(file)) Found(pid, file);
      return;
    }
    if (errno != EPERM && errno != EACCES) return;
    // The directory is open to the process's own user and with CAP_DAC_READ_SEARCH, its links with
    // CAP_CHECKPOINT_RESTORE. Without access, the record tells whether the file is a segment.
    if (const uint64_t recorded = RecordedBytes(mapping->file); recorded > 0) {
      Found(pid, mapping->file, recorded);
    } else if (IsCreatedByUs(ProcessOf(pid))) {
      Found(pid, mapping->file, bytes);  // by name: processes of the user or root have no use for forging names
    } else if (std::exchange(last_unread_, pid) != pid) {
      Unread();
    }
  }

  // Returns 0 for files outside of the record. Huge pages have a file system of their own, with names like memory
  // files.
  uint64_t RecordedBytes(const FileId& id) const {
    if (id.first != memory_file_.file.first) return 0;
    const auto it = recorded_.find(id.second);
    return it == recorded_.end() ? 0 : it->second;
  }

  uint64_t BytesByName(absl::string_view text) const {
    text.remove_prefix(link().size());
    return bytes_of_(text.substr(0, text.find_first_of(" \n")));
  }
  // The directory's owner is the process's user.
  static struct stat ProcessOf(pid_t pid) {
    struct stat process = {};
    if (stat(absl::StrCat("/proc/", pid).c_str(), &process) != 0) process.st_uid = static_cast<uid_t>(-1);
    return process;
  }
  static bool IsCreatedByUs(const struct stat& file) { return file.st_uid == geteuid() || file.st_uid == 0; }

  void Found(pid_t pid, const struct stat& file) {
    Found(pid, FileId(file.st_dev, file.st_ino), static_cast<uint64_t>(file.st_size));
  }
  void Found(pid_t pid, const FileId& id, uint64_t bytes) {
    LeftSegment& segment = found_[id];
    segment.file_device = id.first;
    segment.file_inode = id.second;
    segment.bytes = bytes;
    if (segment.holders.empty()) segment.holder_uid = ProcessOf(pid).st_uid;
    // A process ended just now, with its pid reused, holds nothing: the next search shows so.
    segment.holders.push_back({.pid = pid, .started = StartOf(pid)});
  }

  const absl::FunctionRef<uint64_t(absl::string_view)> bytes_of_;
  const RecordedFiles& recorded_;
  const OpenFile memory_file_;
  pid_t last_unread_ = 0;  // counts a process once, regardless of the number of files mapped
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
                                           absl::FunctionRef<uint64_t(absl::string_view rest)> bytes_of,
                                           const RecordedFiles& recorded) {
  OpenFile memory_file;
  if (!recorded.empty()) {
    const UniqueFd fd(memfd_create("vrambroker-search", MFD_CLOEXEC));
    if (!fd.valid()) return DescriptorError(errno, "memfd_create");
    memory_file = IdentityOf(fd.get());
  }
  LeftSearch search(name, bytes_of, recorded, memory_file);
  if (absl::Status status = search.Walk(); !status.ok()) return status;
  return std::move(search).Left();
}

}  // namespace vrambroker
