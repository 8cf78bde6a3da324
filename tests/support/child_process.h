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

using Arguments = std::vector<std::string>;  // begins with the program's path
using Environment = std::vector<std::pair<std::string, std::string>>;

// Runs another program, with pipes to the program's standard input and output. The child always executes a program: in
// a fork of this process gRPC's threads would be missing. The child is killed when this object ends, and when the
// thread that started the child ends.
class ChildProcess {
 public:
  static absl::StatusOr<std::unique_ptr<ChildProcess>> Start(const Arguments& arguments,
                                                             const Environment& environment = {});
  ~ChildProcess();
  ChildProcess(const ChildProcess&) = delete;
  ChildProcess& operator=(const ChildProcess&) = delete;

  pid_t pid() const { return pid_; }

  absl::Status WriteLine(absl::string_view line);
  // Returns a line without the newline; Unavailable at the end of the output.
  absl::StatusOr<std::string> ReadLine(absl::Duration timeout = kPatience);
  // Returns the rest of the output, up to the end.
  std::string ReadRest(absl::Duration timeout = kPatience);
  // Returns the text that the child has written to standard error so far.
  std::string ErrorText() const;

  void Signal(int signal) const;  // returns, for SIGSTOP, when all threads have stopped
  // Stops all processes at about the same time. Returns when all threads of each process have stopped, or the process
  // has ended.
  static void StopAll(const std::vector<const ChildProcess*>& processes);
  bool Running();
  // Returns the exit code, or 128 + the number of the signal that ended the process.
  absl::StatusOr<int> Wait(absl::Duration timeout = kPatience);

 private:
  ChildProcess(pid_t pid, UniqueFd in, UniqueFd out, UniqueFd err)
      : pid_(pid), in_(std::move(in)), out_(std::move(out)), err_(std::move(err)) {}

  // Returns false at the end of the output or of the time.
  bool ReadMore(absl::Time deadline);

  const pid_t pid_;
  UniqueFd in_;
  UniqueFd out_;
  const UniqueFd err_;  // is a memory file: the file takes any amount of text, and can be read at any time
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
