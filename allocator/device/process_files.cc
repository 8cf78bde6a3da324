// SPDX-License-Identifier: Apache-2.0
#include "allocator/device/process_files.h"

#include <dirent.h>
#include <fcntl.h>
#include <linux/capability.h>
#include <linux/kcmp.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <limits>
#include <memory>
#include <sstream>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

namespace vrambroker {
namespace {

struct Closer {
  void operator()(DIR* directory) const { (void)closedir(directory); }
  void operator()(FILE* file) const { (void)std::fclose(file); }
};
using Directory = std::unique_ptr<DIR, Closer>;
using File = std::unique_ptr<FILE, Closer>;

// Returns the number after `key` in `text`, or 0.
uint64_t NumberAfter(absl::string_view text, absl::string_view key) {
  const size_t at = text.find(key);
  uint64_t number = 0;
  if (at == absl::string_view::npos) return 0;
  (void)absl::SimpleAtoi(text.substr(at + key.size(), text.find('\n', at) - at - key.size()), &number);
  return number;
}

// Whether the calling process, not the process inspected, is to blame.
bool IsOurs(int error) {
  return error == EMFILE || error == ENFILE || error == ENOMEM;
}

// Threads share descriptors, unless a thread has asked for its own. False if the kernel does not tell.
bool ShareDescriptors(pid_t a, pid_t b) {
  return syscall(SYS_kcmp, a, b, KCMP_FILES, 0, 0) == 0;
}

}  // namespace

std::optional<MountedFile> ReadDescriptorInfo(int directory, const char* path) {
  const int fd = openat(directory, path, O_RDONLY | O_CLOEXEC);
  if (fd < 0) return std::nullopt;
  std::array<char, 512> text = {};  // the relevant lines come first
  const ssize_t length = read(fd, text.data(), text.size());
  (void)close(fd);
  const absl::string_view info(text.data(), length < 0 ? 0 : static_cast<size_t>(length));
  const MountedFile file(NumberAfter(info, "mnt_id:"), NumberAfter(info, "ino:"));
  return file.second == 0 ? std::nullopt : std::optional(file);
}

std::string ReadProcessFile(pid_t pid, absl::string_view name) {
  const std::ifstream file(absl::StrCat("/proc/", pid, "/", name));
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

std::vector<absl::string_view> StatFields(absl::string_view text) {
  // PID (NAME) STATE ...: the name may contain anything.
  const size_t name_end = text.rfind(')');
  if (name_end == absl::string_view::npos) return {};
  return absl::StrSplit(text.substr(name_end + 1), absl::ByAnyChar(" \n"), absl::SkipEmpty());
}

uint64_t StartOf(pid_t pid) {
  const std::string text = ReadProcessFile(pid, "stat");
  const std::vector<absl::string_view> fields = StatFields(text);
  constexpr size_t kFieldsBefore = 22 - 3;
  uint64_t start = 0;
  return fields.size() > kFieldsBefore && absl::SimpleAtoi(fields[kFieldsBefore], &start) ? start : 0;
}

std::string HowToLookIntoProcesses(uid_t uid, bool has_ptrace, bool is_in_user_namespace) {
  if (uid != 0 && !has_ptrace) {
    return "run the daemon as root, or with CAP_SYS_PTRACE on Linux 5.14 or newer";
  }
  if (!has_ptrace) {
    return "the daemon is root, but lacks the capability CAP_SYS_PTRACE: give it to the container (docker run "
           "--cap-add "
           "SYS_PTRACE)";
  }
  if (is_in_user_namespace) {
    return "the daemon is in a user namespace of its own, as in a rootless container: start it in that of the machine "
           "(podman run --userns=host)";
  }
  return uid == 0
             ? "the daemon is root and has CAP_SYS_PTRACE: a security module of the kernel may refuse it"
             : "the daemon has CAP_SYS_PTRACE, which is enough on Linux 5.14 or newer: on older ones run it as root";
}

std::string HowToLookIntoProcesses() {
  constexpr uint64_t kPtrace = uint64_t{1} << CAP_SYS_PTRACE;
  uint64_t effective = 0;
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (absl::StartsWith(line, "CapEff:"))
      (void)absl::SimpleHexAtoi(absl::StripAsciiWhitespace(line.substr(7)), &effective);
  }
  uint64_t inside = 0;
  uint64_t outside = 0;
  uint64_t users = 0;
  std::ifstream("/proc/self/uid_map") >> inside >> outside >> users;
  const bool is_of_machine = inside == 0 && outside == 0 && users == std::numeric_limits<uint32_t>::max();
  return HowToLookIntoProcesses(geteuid(), (effective & kPtrace) != 0, !is_of_machine);
}

absl::Status ProcessFiles::Walk() {
  const Directory processes(opendir("/proc"));
  if (processes == nullptr) return absl::ErrnoToStatus(errno, "opendir of /proc failed");
  const pid_t self = getpid();
  while (const dirent* entry = readdir(processes.get())) {
    pid_t pid = 0;
    if (absl::SimpleAtoi(entry->d_name, &pid) && pid != self) LookAtProcess(pid);
  }
  return Done();
}

absl::Status ProcessFiles::LookAt(pid_t pid) {
  LookAtProcess(pid);
  return Done();
}

absl::Status ProcessFiles::Done() const {
  if (error_ != 0) return absl::ErrnoToStatus(error_, "reading /proc failed: not every process was looked at");
  return absl::OkStatus();
}

void ProcessFiles::LookAtProcess(pid_t pid) {
  const std::string tasks_path = absl::StrCat("/proc/", pid, "/task");
  const Directory tasks(opendir(tasks_path.c_str()));
  bool could_look = tasks != nullptr;
  pid_t looked_at = 0;  // last thread with its descriptors read
  // All threads have the same mappings, but an ended thread has none.
  bool mapped_seen = where_ == Where::kDescriptors;
  while (could_look) {
    errno = 0;
    const dirent* entry = readdir(tasks.get());
    pid_t thread = 0;
    if (entry == nullptr) {
      could_look = errno == 0;
      break;
    }
    if (!absl::SimpleAtoi(entry->d_name, &thread)) continue;
    const std::string task = absl::StrCat(tasks_path, "/", thread);
    if (looked_at == 0 || !ShareDescriptors(looked_at, thread)) {
      could_look = LookAtDescriptors(pid, task) || LookAtDescriptorInfo(pid, task);
      looked_at = thread;
    }
    bool is_empty = false;
    if (could_look && !mapped_seen) could_look = LookAtMappings(pid, task, &is_empty);
    mapped_seen = mapped_seen || !is_empty;
    // A thread ended meanwhile holds nothing.
    could_look = could_look || errno == ENOENT || errno == ESRCH;
  }
  if (could_look) return;
  if (errno == EACCES || errno == EPERM) ++unread_processes_;
  if (IsOurs(errno)) error_ = errno;
}

bool ProcessFiles::LookAtDescriptors(pid_t pid, const std::string& task) {
  const Directory directory(opendir(absl::StrCat(task, "/fd").c_str()));
  const int base = directory == nullptr ? -1 : dirfd(directory.get());
  if (base < 0) return false;
  std::array<char, 512> link = {};
  for (errno = 0; const dirent* entry = readdir(directory.get()); errno = 0) {
    // Most descriptors are of other files: the link says so, and costs less than stat().
    const ssize_t length = readlinkat(base, entry->d_name, link.data(), link.size());
    const absl::string_view text(link.data(), length < 0 ? 0 : static_cast<size_t>(length));
    if (absl::StartsWith(text, link_)) OnDescriptor(pid, base, entry->d_name, text);
  }
  return errno == 0;
}

// /proc/PID/fd is open to the process's own user and with CAP_DAC_READ_SEARCH. fdinfo, with less content at a higher
// cost, is open with CAP_SYS_PTRACE.
bool ProcessFiles::LookAtDescriptorInfo(pid_t pid, const std::string& task) {
  if (errno != EACCES) return false;
  const Directory directory(opendir(absl::StrCat(task, "/fdinfo").c_str()));
  if (directory == nullptr) return false;
  for (errno = 0; const dirent* entry = readdir(directory.get()); errno = 0) {
    const std::optional<MountedFile> file = ReadDescriptorInfo(dirfd(directory.get()), entry->d_name);
    if (file.has_value()) {
      OnUnnamedDescriptor(pid, *file);
    } else if (IsOurs(errno)) {
      return false;
    }
  }
  return errno == 0;
}

bool ProcessFiles::LookAtMappings(pid_t pid, const std::string& task, bool* is_empty) {
  const File maps(std::fopen(absl::StrCat(task, "/maps").c_str(), "re"));
  if (maps == nullptr) return false;
  *is_empty = true;
  // Lines: 7f00-7f20 rw-s 00000000 00:01 1234    /memfd:NAME (deleted)
  char* line = nullptr;
  size_t size = 0;
  for (errno = 0; getline(&line, &size, maps.get()) >= 0; errno = 0) {
    *is_empty = false;
    if (absl::StrContains(line, link_)) OnMapping(pid, line);
  }
  const int error = errno;
  std::free(line);
  errno = error;
  return error == 0;
}

}  // namespace vrambroker
