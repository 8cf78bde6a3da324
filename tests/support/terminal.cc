// SPDX-License-Identifier: Apache-2.0
#include "tests/support/terminal.h"

#include <gtest/gtest.h>
#include <signal.h>

#include <cstdlib>
#include <fstream>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "tests/support/paths.h"
#include "tests/support/util.h"

namespace vrambroker::testing_support {
namespace {

// The shell runs the program, prints the exit code and `stty`'s view of the terminal, and stays. Ctrl-C goes to the
// program.
constexpr const char* kShell = R"(trap : INT
"$@"
echo "exit=$?"
stty -a | grep -Eq '(^| )icanon' && stty -a | grep -Eq '(^| )echo( |$)' && echo cooked
echo end-of-test
exec sleep 1000)";

}  // namespace

absl::StatusOr<std::unique_ptr<Terminal>> Terminal::Start(const Arguments& program, int columns, int rows) {
  const std::string socket = MakeTempDir() + "/tmux";
  absl::StatusOr<std::unique_ptr<ChildProcess>> server = ChildProcess::Start(
      {paths::kTmux, "-D", "-u", "-S", socket, "-f", "/dev/null"}, {{"LC_ALL", "C.UTF-8"}, {"NO_COLOR", ""}});
  if (!server.ok()) return server.status();
  std::unique_ptr<Terminal> terminal(new Terminal(socket, *std::move(server)));
  Arguments session = {"new-session", "-d",   "-x", absl::StrCat(columns), "-y", absl::StrCat(rows), "/bin/sh",
                       "-c",          kShell, "sh"};
  session.insert(session.end(), program.begin(), program.end());
  RunResult result;
  if (!WaitFor([&] { return (result = terminal->Tmux(session)).exit_code == 0; })) {
    return absl::InternalError(absl::StrCat("tmux: ", result.err));
  }
  return terminal;
}

RunResult Terminal::Tmux(Arguments arguments) const {
  // -N starts no server: another server would outlive the test.
  const Arguments before = {paths::kTmux, "-N", "-u", "-S", socket_};
  arguments.insert(arguments.begin(), before.begin(), before.end());
  return RunProgram(arguments);
}

std::string Terminal::Screen(bool escapes) const {
  Arguments arguments = {"capture-pane", "-p"};
  if (escapes) arguments.emplace_back("-e");
  return Tmux(arguments).out;
}

bool Terminal::Shows(const std::string& text) const {
  const bool shows = WaitFor([&] { return absl::StrContains(Screen(), text); });
  EXPECT_TRUE(shows) << "'" << text << "' is not on the screen:\n" << Screen();
  return shows;
}

bool Terminal::ShowsNoMore(const std::string& text) const {
  const bool gone = WaitFor([&] { return !absl::StrContains(Screen(), text); });
  EXPECT_TRUE(gone) << "'" << text << "' is on the screen:\n" << Screen();
  return gone;
}

void Terminal::Press(const std::string& key) const {
  EXPECT_EQ(Tmux({"send-keys", key}).exit_code, 0);
}

void Terminal::Resize(int columns, int rows) const {
  EXPECT_EQ(Tmux({"resize-window", "-x", absl::StrCat(columns), "-y", absl::StrCat(rows)}).exit_code, 0);
}

pid_t Terminal::pid() const {
  const pid_t shell = std::atoi(Tmux({"display-message", "-p", "#{pane_pid}"}).out.c_str());
  std::ifstream children(absl::StrCat("/proc/", shell, "/task/", shell, "/children"));
  pid_t pid = 0;
  children >> pid;
  return pid;
}

void Terminal::Signal(int signal) const {
  const pid_t program = pid();
  ASSERT_GT(program, 0);
  kill(program, signal);
}

std::string Terminal::End() const {
  if (!Shows("end-of-test")) return "it goes on";
  const std::string screen = Screen();
  const std::string state = Tmux({"display-message", "-p", "#{alternate_on} #{cursor_flag}"}).out;
  const bool plain = absl::StrContains(screen, "\ncooked\n") && state == "0 1\n";
  const size_t begin = screen.find("exit=");
  return absl::StrCat(screen.substr(begin, screen.find('\n', begin) - begin),
                      plain ? " plain" : absl::StrCat(" odd: ", state, screen));
}

}  // namespace vrambroker::testing_support
