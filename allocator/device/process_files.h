// SPDX-License-Identifier: Apache-2.0
//
// ProcessFiles: a walk over files open or mapped in other processes, as /proc tells. For memory files, found by no
// path.
#ifndef VRAMBROKER_ALLOCATOR_DEVICE_PROCESS_FILES_H_
#define VRAMBROKER_ALLOCATOR_DEVICE_PROCESS_FILES_H_

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace vrambroker {

using FileId = std::pair<dev_t, ino_t>;
// Id of the mount, as in fdinfo, and inode.
using MountedFile = std::pair<uint64_t, uint64_t>;

// Returns a descriptor's file, by the path of its fdinfo relative to `directory`. nullopt, and errno, when unreadable
// or when the kernel does not tell (before Linux 5.14).
std::optional<MountedFile> ReadDescriptorInfo(int directory, const char* path);

// Reads all of a file of /proc/PID: a process chooses its own name, even with line breaks. Empty when unreadable.
std::string ReadProcessFile(pid_t pid, absl::string_view name);

// Returns the fields of /proc/PID/stat after the name: the first is number 3, the state, by proc_pid_stat(5). As many
// as there are.
std::vector<absl::string_view> StatFields(absl::string_view text);

// Returns a process's start as in ProcessId; 0 when the process has ended, or /proc is hidden.
uint64_t StartOf(pid_t pid);

// Names the privilege missing for looks into processes, and ways to get the privilege: for a sentence after ";". `uid`:
// the daemon's user; `has_ptrace`: with CAP_SYS_PTRACE; `is_in_user_namespace`: of its own, as in a rootless container.
std::string HowToLookIntoProcesses(uid_t uid, bool has_ptrace, bool is_in_user_namespace);
std::string HowToLookIntoProcesses();  // for the calling process

// A walk takes milliseconds and more: hold no lock meanwhile. Processes of other users can be inspected by root, and
// with CAP_SYS_PTRACE from Linux 5.14 on. Invisible: descriptors on their way through a socket, and processes of pid
// namespaces other than the calling process's and those below it.
class ProcessFiles {
 public:
  // Mappings cost the most, and need no look for files never mapped.
  enum class Where { kDescriptorsAndMappings, kDescriptors };
  // `link`: beginning of links to the files wanted, "/memfd:NAME"; empty: every file.
  explicit ProcessFiles(std::string link, Where where = Where::kDescriptorsAndMappings)
      : link_(std::move(link)), where_(where) {}
  virtual ~ProcessFiles() = default;

  // Looks at all processes but the calling process, and at each of their threads: a thread may have descriptors of its
  // own, and outlive the main thread. Fails without /proc, or when the process lacks descriptors or memory to look at
  // everything.
  absl::Status Walk();
  // Looks at one process, perhaps the calling process.
  absl::Status LookAt(pid_t pid);
  // Counts processes closed to inspection.
  size_t unread_processes() const { return unread_processes_; }

 protected:
  // Called for a descriptor whose link begins with `link`: entry `name` of the directory.
  virtual void OnDescriptor(pid_t pid, int directory, const char* name, absl::string_view link) = 0;
  // Called for any descriptor of a process with unreadable links, whatever its file.
  virtual void OnUnnamedDescriptor(pid_t pid, const MountedFile& file) = 0;
  // Called for a line of the process's maps with `link` in it.
  virtual void OnMapping(pid_t pid, const char* line) = 0;

  const std::string& link() const { return link_; }
  // Counts a process whose holdings cannot be told after all.
  void Unread() { ++unread_processes_; }

 private:
  absl::Status Done() const;
  void LookAtProcess(pid_t pid);
  // Return false, and errno, when they could not look. `task` is "/proc/PID/task/TID".
  bool LookAtDescriptors(pid_t pid, const std::string& task);
  bool LookAtDescriptorInfo(pid_t pid, const std::string& task);
  bool LookAtMappings(pid_t pid, const std::string& task, bool* is_empty);

  const std::string link_;
  const Where where_;
  size_t unread_processes_ = 0;
  int error_ = 0;  // errno, when something may be missing for lack of descriptors or memory
};

}  // namespace vrambroker

#endif  // VRAMBROKER_ALLOCATOR_DEVICE_PROCESS_FILES_H_
