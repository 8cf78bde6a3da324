// SPDX-License-Identifier: Apache-2.0
//
// What /proc says about a process. It may have ended meanwhile, and its pid be another's: a caller that acts on the
// answer checks by a pidfd afterwards that it still runs.
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

// True when the process has ended, or is a zombie. An invalid descriptor is of no process that could have ended.
bool HasEnded(const UniqueFd& pidfd);

// The command name, with other characters than a name may have replaced; "client" when it cannot be read.
std::string CommandName(pid_t pid);

// A process's program, and its script or module, without folders, for people: "python3 train.py", "python3 -m
// vllm.entrypoints.openai.api_server". Other arguments are left out: they may hold secrets. Empty when the process has
// ended, or /proc hides it.
std::string CommandOf(pid_t pid);

// The path of the control group (version 2), as the daemon's cgroup namespace sees it. None when the machine has no
// version 2, or /proc is hidden.
std::optional<std::string> CgroupOf(pid_t pid);

struct ProcessUser {
  uid_t uid = 0;            // effective
  std::vector<gid_t> gids;  // effective, then the further ones
};
// NotFound when there is no such process.
absl::StatusOr<ProcessUser> UserOf(pid_t pid);

// Whether the process is in a pid namespace below the daemon's, as in a container that does not share the machine's.
// False where that cannot be told.
bool IsInInnerPidNamespace(pid_t pid);

// Which program a process runs: another one after each exec(), also of the same file, where the kernel places programs
// at random.
struct ProcessImage {
  uint64_t code = 0;  // where its code begins, and its stack
  uint64_t stack = 0;

  friend bool operator==(const ProcessImage&, const ProcessImage&) = default;
};
// None when the process ends, or may not be looked into: those of other users take CAP_SYS_PTRACE.
std::optional<ProcessImage> ImageOf(pid_t pid);

// For these, and for tests: the contents of /proc/PID/cmdline, /proc/PID/cgroup and /proc/PID/status.
std::string ParseCommand(absl::string_view text);
std::optional<std::string> ParseCgroup(const std::string& text);
std::optional<ProcessUser> ParseProcessUser(const std::string& text);
bool ParseHasInnerPid(const std::string& text);

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_IDENTITY_PROCESS_INFO_H_
