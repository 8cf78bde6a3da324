// SPDX-License-Identifier: Apache-2.0
//
// Facts from /proc about a process. The process may have ended meanwhile, and another process may have its pid: a
// caller acting on the answer must check afterwards, by a pidfd, that the process still runs.
#ifndef VRAMBROKER_SERVER_IDENTITY_PROCESS_INFO_H_
#define VRAMBROKER_SERVER_IDENTITY_PROCESS_INFO_H_

#include <sys/types.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "allocator/base/unique_fd.h"

namespace vrambroker {

// Whether the process has ended, or is a zombie. An invalid descriptor refers to no process, and gives false.
bool HasEnded(const UniqueFd& pidfd);

// The command name, with characters not allowed in names replaced; "client" when unreadable.
std::string CommandName(pid_t pid);

// A process's program, and its script or module, without folders, for display: "python3 train.py", "python3 -m
// vllm.entrypoints.openai.api_server". Leaves out further arguments, which may hold secrets. Empty when the process has
// ended, or /proc hides the process.
std::string CommandOf(pid_t pid);

// The path of the control group (version 2), as seen from the daemon's cgroup namespace. None when the machine has no
// version 2, or /proc is hidden.
std::optional<std::string> CgroupOf(pid_t pid);

struct ProcessUser {
  uid_t uid = 0;            // effective
  std::vector<gid_t> gids;  // effective, then supplementary
};
// NotFound when the process does not exist.
absl::StatusOr<ProcessUser> UserOf(pid_t pid);

// Whether the process is in a pid namespace below the daemon's, as in a container not sharing the machine's. False when
// unknown.
bool IsInInnerPidNamespace(pid_t pid);

// Identifies the program run by a process: changes with each exec(), even of the same file, if the kernel randomizes
// addresses.
struct ProcessImage {
  uint64_t code = 0;  // start addresses of code and stack
  uint64_t stack = 0;

  friend bool operator==(const ProcessImage&, const ProcessImage&) = default;
};
// None when the process ends, or may not be inspected: inspecting other users' processes takes CAP_SYS_PTRACE.
std::optional<ProcessImage> ImageOf(pid_t pid);

// Used by the functions above, and by tests: parse the contents of /proc/PID/cmdline, /proc/PID/cgroup and
// /proc/PID/status.
std::string ParseCommand(absl::string_view text);
std::optional<std::string> ParseCgroup(const std::string& text);
std::optional<ProcessUser> ParseProcessUser(const std::string& text);
bool ParseHasInnerPid(const std::string& text);

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_IDENTITY_PROCESS_INFO_H_
