// SPDX-License-Identifier: Apache-2.0
#ifndef VRAMBROKER_TESTS_SUPPORT_CHILD_PROCESS_H_
#define VRAMBROKER_TESTS_SUPPORT_CHILD_PROCESS_H_

#include <sys/types.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "allocator/base/unique_fd.h"
#include "tests/support/util.h"

namespace vrambroker::testing_support {

using Arguments = std::vector<std::string>;  // the program's path first
using Environment = std::vector<std::pair<std::string, std::string>>;

// Another program, run with pipes to its standard input and output. Never a fork of this process that goes on: gRPC's
// threads would be missing in it. Killed at the end of this object, and when the thread that started it ends.
class ChildProcess {
 public:
  static absl::StatusOr<std::unique_ptr<ChildProcess>> Start(const Arguments& arguments,
                                                             const Environment& environment = {});
  ~ChildProcess();
  ChildProcess(const ChildProcess&) = delete;
  ChildProcess& operator=(const ChildProcess&) = delete;

  pid_t pid() const { return pid_; }

  absl::Status WriteLine(absl::string_view line);
  // Without its newline. Unavailable at the end of the output.
  absl::StatusOr<std::string> ReadLine(absl::Duration timeout = kPatience);
  // All that is left of the output, until its end.
  std::string ReadRest(absl::Duration timeout = kPatience);
  // What was written to standard error so far.
  std::string ErrorText() const;

  void Signal(int signal) const;  // after SIGSTOP it returns when all threads have stopped
  // All of them at about the same time; returns when all threads of all have stopped, or the process has ended.
  static void StopAll(const std::vector<const ChildProcess*>& processes);
  bool Running();
  // The exit code, or 128 + the signal that ended it.
  absl::StatusOr<int> Wait(absl::Duration timeout = kPatience);

 private:
  ChildProcess(pid_t pid, UniqueFd in, UniqueFd out, UniqueFd err)
      : pid_(pid), in_(std::move(in)), out_(std::move(out)), err_(std::move(err)) {}

  // False at the end of the output or of the time.
  bool ReadMore(absl::Time deadline);

  const pid_t pid_;
  UniqueFd in_;
  UniqueFd out_;
  const UniqueFd err_;  // a memory file: it takes any amount, and is there to be read at any time
  std::string unread_;
  std::optional<int> exit_code_;
};

struct RunResult {
  int exit_code = -1;
  std::string out;
  std::string err;
};

// Runs a program to its end.
RunResult RunProgram(const Arguments& arguments, const Environment& environment = {});

}  // namespace vrambroker::testing_support

#endif  // VRAMBROKER_TESTS_SUPPORT_CHILD_PROCESS_H_
