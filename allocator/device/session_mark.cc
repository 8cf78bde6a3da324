// SPDX-License-Identifier: Apache-2.0
#include "allocator/device/session_mark.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <optional>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "allocator/base/descriptor_reserve.h"
#include "allocator/device/file_holders.h"
#include "allocator/device/process_files.h"

namespace vrambroker {
namespace {

constexpr char kMarkName[] = "vrambroker-session";

// All memory files of a machine are on one file system, mounted by no user, so a memory file of our own gives the
// identity of the rest, except for the inode.
absl::StatusOr<OpenFile> OneOfOurs() {
  const UniqueFd ours = MakeSessionMark();
  if (!ours.valid()) return DescriptorError(errno, "memfd_create");
  return IdentityOf(ours.get());
}

OpenFile FileOf(SessionMark mark, OpenFile ours) {
  ours.file.second = mark;
  if (ours.mounted.has_value()) ours.mounted->second = mark;
  return ours;
}

// Searches a process for open files of the driver.
class DriverFiles : public ProcessFiles {
 public:
  // Returns true also if unknown.
  static bool AreOpenIn(pid_t pid, const std::string& path) {
    DriverFiles search(path);
    const absl::Status looked = search.LookAt(pid);
    return search.found_ || !looked.ok() || search.unread_processes() > 0;
  }

 private:
  explicit DriverFiles(const std::string& path) : ProcessFiles("", Where::kDescriptors), path_(path) {}

  // For a process in a chroot, the path as seen from here begins with the path of the chroot.
  void OnDescriptor(pid_t /*pid*/, int /*directory*/, const char* /*name*/, absl::string_view link) override {
    if (absl::StrContains(link, path_)) found_ = true;
  }
  void OnUnnamedDescriptor(pid_t pid, const MountedFile& file) override {
    if (!inodes_.has_value()) inodes_ = FindInodes(pid);
    if (inodes_->contains(file.second)) found_ = true;
  }
  void OnMapping(pid_t /*pid*/, const char* /*line*/) override {}

  // Finds inodes under the paths as the process sees them: in a container the files may differ from ours.
  absl::flat_hash_set<uint64_t> FindInodes(pid_t pid) {
    absl::flat_hash_set<uint64_t> inodes;
    const size_t slash = path_.rfind('/');
    const absl::string_view begin = absl::string_view(path_).substr(slash + 1);
    DIR* const directory = opendir(absl::StrCat("/proc/", pid, "/root", path_.substr(0, slash)).c_str());
    if (directory == nullptr) {
      Unread();
      return inodes;
    }
    const int number = dirfd(directory);
    for (const dirent* entry = readdir(directory); number >= 0 && entry != nullptr; entry = readdir(directory)) {
      struct stat file = {};
      if (absl::StartsWith(entry->d_name, begin) && fstatat(number, entry->d_name, &file, 0) == 0) {
        inodes.insert(file.st_ino);
      }
    }
    (void)closedir(directory);
    return inodes;
  }

  const std::string path_;
  bool found_ = false;
  std::optional<absl::flat_hash_set<uint64_t>> inodes_;
};

}  // namespace

UniqueFd MakeSessionMark() {
  return UniqueFd(memfd_create(kMarkName, MFD_CLOEXEC));
}

absl::StatusOr<SessionMark> FindSessionMark(pid_t pid, uint32_t fd) {
  const absl::StatusOr<OpenFile> ours = OneOfOurs();
  if (!ours.ok()) return ours.status();
  absl::Status no_mark =
      absl::InvalidArgumentError(absl::StrCat("descriptor ", fd, " of process ", pid, " is not a mark of a session"));
  const std::string path = absl::StrCat("/proc/", pid, "/fd/", fd);
  std::array<char, 256> link = {};
  struct stat file = {};
  const ssize_t length = readlink(path.c_str(), link.data(), link.size());
  if (length >= 0 && stat(path.c_str(), &file) == 0) {
    const absl::string_view text(link.data(), static_cast<size_t>(length));
    if (!absl::StartsWith(text, LinkTo(kMarkName)) || file.st_dev != ours->file.first) return no_mark;
    return file.st_ino;
  }
  if (errno != EACCES) return absl::ErrnoToStatus(errno, path);
  const std::optional<MountedFile> mounted =
      ReadDescriptorInfo(AT_FDCWD, absl::StrCat("/proc/", pid, "/fdinfo/", fd).c_str());
  if (!mounted.has_value()) return absl::PermissionDeniedError(absl::StrCat(path, " may not be read"));
  if (!ours->mounted.has_value() || mounted->first != ours->mounted->first) return no_mark;
  return mounted->second;
}

absl::StatusOr<SegmentHolders> FindMarkHolders(absl::Span<const SessionMark> marks, const std::string& driver_files) {
  if (std::all_of(marks.begin(), marks.end(), [](SessionMark mark) { return mark == 0; })) return SegmentHolders();
  const absl::StatusOr<OpenFile> ours = OneOfOurs();
  if (!ours.ok()) return ours.status();
  std::vector<OpenFile> files;
  files.reserve(marks.size());
  for (const SessionMark mark : marks) files.push_back(FileOf(mark, *ours));
  absl::StatusOr<SegmentHolders> found = FindFileHolders(files, kMarkName, ProcessFiles::Where::kDescriptors);
  if (!found.ok() || found->holders.empty() || !DriverFiles::AreOpenIn(getpid(), driver_files)) return found;
  absl::flat_hash_map<pid_t, bool> has_driver;
  for (const SegmentHolders::Holder& holder : found->holders) {
    const auto [it, is_new] = has_driver.try_emplace(holder.pid);
    if (is_new) it->second = DriverFiles::AreOpenIn(holder.pid, driver_files);
  }
  const auto has_let_go = [&](const SegmentHolders::Holder& holder) { return !has_driver.at(holder.pid); };
  found->holders.erase(std::remove_if(found->holders.begin(), found->holders.end(), has_let_go), found->holders.end());
  return found;
}

}  // namespace vrambroker
