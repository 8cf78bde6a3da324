// SPDX-License-Identifier: Apache-2.0
//
// vramctl run on a terminal: what the terminal sends, and the job control of a shell.
#include <gtest/gtest.h>
#include <signal.h>

#include <memory>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "tests/support/any_library.h"
#include "tests/support/terminal.h"
#include "tests/support/vramctl_test.h"

namespace vrambroker::testing_support {
namespace {

class RunTerminalTest : public VramctlDaemonTest {
 protected:
  void SetUp() override { ASSERT_OK(StartDaemon()); }

  // With a library that any program can load.
  std::string RunCommand() const {
    return absl::StrCat("env VRAMBROKER_PRELOAD=", AnyLibrary(), " ", VramctlProgram(), " run --socket-dir=", dir(),
                        " --");
  }
};

TEST_F(RunTerminalTest, CtrlCReachesTheProgramOnce) {
  ASSERT_OK_AND_ASSIGN(const std::unique_ptr<Terminal> terminal,
                       Terminal::Start({"/bin/sh", "-c",
                                        absl::StrCat("exec ", RunCommand(),
                                                     R"( sh -c 'trap "n=\$((n+1)); echo got-\$n" INT; echo ready; )"
                                                     R"(while :; do sleep 0.05; done')")},
                                       80, 24));
  ASSERT_TRUE(terminal->Shows("ready"));
  terminal->Press("C-c");
  ASSERT_TRUE(terminal->Shows("got-1"));
  terminal->Press("C-c");
  ASSERT_TRUE(terminal->Shows("got-2"));
  terminal->Signal(SIGTERM);
  ASSERT_TRUE(terminal->Shows("exit=143"));
  EXPECT_FALSE(absl::StrContains(terminal->Screen(), "got-3")) << terminal->Screen();
}

// Ends a line also where the shell has not set the terminal back yet, in which Enter stays a carriage return.
constexpr char kLineFeed[] = "C-j";

TEST_F(RunTerminalTest, AShellStopsItAndGoesOnWithIt) {
  ASSERT_OK_AND_ASSIGN(const std::unique_ptr<Terminal> terminal,
                       Terminal::Start({"/usr/bin/env", "PS1=shell> ", "bash", "--norc", "-i"}, 200, 24));
  ASSERT_TRUE(terminal->Shows("shell>"));
  terminal->Press(absl::StrCat(RunCommand(), " sh -c 'echo re''ady; read line; echo got $line'"));
  terminal->Press("Enter");
  ASSERT_TRUE(terminal->Shows("ready"));
  terminal->Press("C-z");
  ASSERT_TRUE(terminal->Shows("Stopped"));
  terminal->Press("fg");
  terminal->Press("Enter");
  terminal->Press("this");
  terminal->Press(kLineFeed);
  EXPECT_TRUE(terminal->Shows("got this"));
  // In the background it stops when it reads from the terminal.
  terminal->Press("clear");
  terminal->Press("Enter");
  ASSERT_TRUE(terminal->ShowsNoMore("Stopped"));
  terminal->Press(absl::StrCat(RunCommand(), " sh -c 'read line; echo got $line' &"));
  terminal->Press("Enter");
  ASSERT_TRUE(WaitFor([&] {
    terminal->Press("jobs");
    terminal->Press("Enter");
    return absl::StrContains(terminal->Screen(), "Stopped");
  }));
  terminal->Press("fg");
  terminal->Press("Enter");
  terminal->Press("that");
  terminal->Press(kLineFeed);
  EXPECT_TRUE(terminal->Shows("got that"));
  // The shell gets its terminal back.
  terminal->Press("clear");
  terminal->Press("Enter");
  ASSERT_TRUE(terminal->ShowsNoMore("Stopped"));
  terminal->Press(absl::StrCat(RunCommand(), " sh -c 'kill -STOP $$; echo we''nt on'"));
  terminal->Press("Enter");
  ASSERT_TRUE(terminal->Shows("Stopped"));
  terminal->Press("fg");
  terminal->Press("Enter");
  EXPECT_TRUE(terminal->Shows("went on"));
  terminal->Press("exit");
  terminal->Press("Enter");
  EXPECT_TRUE(terminal->Shows("exit=0"));
}

}  // namespace
}  // namespace vrambroker::testing_support
