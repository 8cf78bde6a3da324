// SPDX-License-Identifier: Apache-2.0
//
// ProcessFiles: a walk over what other processes have open or mapped, as /proc tells. For memory files: they have no
// path to ask for.
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
// Id of the mount, as fdinfo has it, and inode.
using MountedFile = std::pair<uint64_t, uint64_t>;

// A descriptor's file, by the path of its fdinfo relative to `directory`. Nothing, and errno, when it cannot be read or
// the kernel does not tell (before Linux 5.14).
std::optional<MountedFile> ReadDescriptorInfo(int directory, const char* path);

// All of a file of /proc/PID: a process names itself as it likes, with line breaks, too. Empty when it cannot be read.
std::string ReadProcessFile(pid_t pid, absl::string_view name);

// The fields of /proc/PID/stat behind the name: the first is number 3, the state, by proc_pid_stat(5). As many as there
// are.
std::vector<absl::string_view> StatFields(absl::string_view text);

// When the process started, as ProcessId has it; 0 when it has ended, or /proc is hidden.
uint64_t StartOf(pid_t pid);

// What a daemon lacks that may not look into processes, and how it gets that: for a sentence after ";". `uid`: whom it
// runs as; `has_ptrace`: with CAP_SYS_PTRACE; `is_in_user_namespace`: of its own, as in a rootless container.
std::string HowToLookIntoProcesses(uid_t uid, bool has_ptrace, bool is_in_user_namespace);
std::string HowToLookIntoProcesses();  // for this process

// Milliseconds and more: hold no lock meanwhile. Processes of other users can be looked into by root, and by those who
// have CAP_SYS_PTRACE from Linux 5.14 on. Not seen: descriptors on their way through a socket, and processes of other
// pid namespaces than this one and those below it.
class ProcessFiles {
 public:
  // Mappings cost the most: those of files that nobody maps need no look.
  enum class Where { kDescriptorsAndMappings, kDescriptors };
  // `link`: what links to the files looked for begin with, "/memfd:NAME"; empty: every file.
  explicit ProcessFiles(std::string link, Where where = Where::kDescriptorsAndMappings)
      : link_(std::move(link)), where_(where) {}
  virtual ~ProcessFiles() = default;

  // Looks at all processes but this one, at each of their threads: one may have descriptors of its own, and live on
  // when the main thread has ended. An error when there is no /proc, or when this process lacks descriptors or memory
  // to look at all of it.
  absl::Status Walk();
  // The same for one process, which may be this one.
  absl::Status LookAt(pid_t pid);
  // Processes that may not be looked into.
  size_t unread_processes() const { return unread_processes_; }

 protected:
  // A descriptor whose link begins with `link`: entry `name` of the directory.
  virtual void OnDescriptor(pid_t pid, int directory, const char* name, absl::string_view link) = 0;
  // A descriptor of a process whose links may not be read: whatever file it is of.
  virtual void OnUnnamedDescriptor(pid_t pid, const MountedFile& file) = 0;
  // A line of the process's maps that has `link` in it.
  virtual void OnMapping(pid_t pid, const char* line) = 0;

  const std::string& link() const { return link_; }
  // What a process holds cannot be told after all.
  void Unread() { ++unread_processes_; }

 private:
  absl::Status Done() const;
  void LookAtProcess(pid_t pid);
  // These return false, and errno, when they could not look. `task` is "/proc/PID/task/TID".
  bool LookAtDescriptors(pid_t pid, const std::string& task);
  bool LookAtDescriptorInfo(pid_t pid, const std::string& task);
  bool LookAtMappings(pid_t pid, const std::string& task, bool* is_empty);

  const std::string link_;
  const Where where_;
  size_t unread_processes_ = 0;
  int error_ = 0;  // errno, when something may be missing for want of descriptors or memory
};

}  // namespace vrambroker

#endif  // VRAMBROKER_ALLOCATOR_DEVICE_PROCESS_FILES_H_
