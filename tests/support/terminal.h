// SPDX-License-Identifier: Apache-2.0
#ifndef VRAMBROKER_TESTS_SUPPORT_TERMINAL_H_
#define VRAMBROKER_TESTS_SUPPORT_TERMINAL_H_

#include <sys/types.h>

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "tests/support/child_process.h"

namespace vrambroker::testing_support {

// Runs a program on a new terminal, drawn by tmux. The program ends with this object, or with the thread that made the
// object.
class Terminal {
 public:
  static absl::StatusOr<std::unique_ptr<Terminal>> Start(const Arguments& program, int columns, int rows);

  // Returns the text on the screen; `escapes` adds the colours.
  std::string Screen(bool escapes = false) const;
  // Shows() waits until `text` comes up, ShowsNoMore() until `text` goes. A failure includes the screen.
  bool Shows(const std::string& text) const;
  bool ShowsNoMore(const std::string& text) const;

  // Takes keys by tmux's names: "q", "Down", "C-c".
  void Press(const std::string& key) const;
  void Resize(int columns, int rows) const;
  void Signal(int signal) const;  // goes to the program
  pid_t pid() const;              // the program's; 0 when the program has ended

  // Waits for the program's end. Returns the exit code and the state of the terminal, "exit=0 plain" or "exit=1 odd:
  // ...".
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
