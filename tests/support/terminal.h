// SPDX-License-Identifier: Apache-2.0
#ifndef VRAMBROKER_TESTS_SUPPORT_TERMINAL_H_
#define VRAMBROKER_TESTS_SUPPORT_TERMINAL_H_

#include <sys/types.h>

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "tests/support/child_process.h"

namespace vrambroker::testing_support {

// A program on a terminal of its own, drawn by tmux. It ends with this object, or with the thread that made it.
class Terminal {
 public:
  static absl::StatusOr<std::unique_ptr<Terminal>> Start(const Arguments& program, int columns, int rows);

  // What is on the screen. `escapes`: with the colours.
  std::string Screen(bool escapes = false) const;
  // Whether `text` comes up; not: the screen is in the failure.
  bool Shows(const std::string& text) const;
  bool ShowsNoMore(const std::string& text) const;

  // Keys as tmux calls them: "q", "Down", "C-c".
  void Press(const std::string& key) const;
  void Resize(int columns, int rows) const;
  void Signal(int signal) const;  // to the program
  pid_t pid() const;              // of the program; 0 when it has ended

  // Waits for the end of the program: its exit code and how it left the terminal, "exit=0 plain" or "exit=1 odd: ...".
  std::string End() const;

 private:
  Terminal(std::string socket, std::unique_ptr<ChildProcess> server)
      : socket_(std::move(socket)), server_(std::move(server)) {}

  RunResult Tmux(Arguments arguments) const;

  const std::string socket_;
  const std::unique_ptr<ChildProcess> server_;
};

}  // namespace vrambroker::testing_support

#endif  // VRAMBROKER_TESTS_SUPPORT_TERMINAL_H_
