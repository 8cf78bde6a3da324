// SPDX-License-Identifier: Apache-2.0
//
// vramctl run on a terminal: keys of the terminal, and the job control of a shell.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <stdlib.h>

#include <array>
#include <memory>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "allocator/base/unique_fd.h"
#include "tests/support/any_library.h"
#include "tests/support/terminal.h"
#include "tests/support/thread_state.h"
#include "tests/support/vramctl_test.h"

namespace vrambroker::testing_support {
namespace {

class RunTerminalTest : public VramctlDaemonTest {
 protected:
  void SetUp() override { ASSERT_OK(StartDaemon()); }

  // Returns the command line, with a library that any program can load.
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

// Key that ends a line even before the shell has restored the terminal; until then Enter sends a carriage return.
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
  // A program in the background stops when reading from the terminal.
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

// --- The terminal hangs up, as when an ssh connection breaks ---

class RunHangUpTest : public RunTerminalTest {
 protected:
  void SetUp() override {
    ASSERT_NO_FATAL_FAILURE(RunTerminalTest::SetUp());
    terminal_ = UniqueFd(posix_openpt(O_RDWR | O_NOCTTY | O_CLOEXEC));
    ASSERT_TRUE(terminal_.valid());
    ASSERT_EQ(grantpt(terminal_.get()), 0);
    ASSERT_EQ(unlockpt(terminal_.get()), 0);
    ASSERT_EQ(ptsname_r(terminal_.get(), name_.data(), name_.size()), 0);
  }

  // Starts a session on the terminal, whose leader is a shell with `script`.
  void Start(const std::string& script) {
    ASSERT_OK_AND_ASSIGN(leader_,
                         ChildProcess::Start({"/usr/bin/setsid", "/bin/sh", "-c",
                                              absl::StrCat("exec < ", name_.data(), " 2> /dev/null; ", script)}));
  }
  // Starts a session whose leader is vramctl; `program` is the script of another shell.
  void StartRun(const std::string& program, const std::string& before = "") {
    Start(absl::StrCat(before, "exec ", RunCommand(), " sh -c '", program, "'"));
  }
  void HangUp() { terminal_.Reset(); }
  std::string Hear() { return leader_->ReadLine().value_or("nothing"); }
  size_t Claims() { return CtlJson({"claim", "ls"})["claims"].size(); }

  static constexpr char kStays[] = "while :; do sleep 0.05; done";

  UniqueFd terminal_;
  std::array<char, 64> name_ = {};
  std::unique_ptr<ChildProcess> leader_;
};

TEST_F(RunHangUpTest, TheProgramEnds) {
  ASSERT_NO_FATAL_FAILURE(StartRun("echo ready; exec sleep 1000"));
  ASSERT_EQ(Hear(), "ready");
  EXPECT_EQ(Claims(), 1u);
  HangUp();
  EXPECT_EQ(leader_->Wait().value_or(-1), 128 + SIGHUP);
  EXPECT_EQ(Claims(), 0u);
}

TEST_F(RunHangUpTest, AProgramThatIsStoppedEnds) {
  ASSERT_NO_FATAL_FAILURE(StartRun("echo $$; kill -STOP $$; echo went on; exec sleep 1000"));
  const std::string pid = Hear();
  EXPECT_TRUE(WaitFor([&] { return StateOfThread(pid, pid) == 'T'; }));
  HangUp();
  EXPECT_EQ(leader_->Wait().value_or(-1), 128 + SIGHUP);
}

TEST_F(RunHangUpTest, AProgramMayDecideItself) {
  ASSERT_NO_FATAL_FAILURE(StartRun(absl::StrCat("trap \"exit 7\" HUP; echo ready; ", kStays)));
  ASSERT_EQ(Hear(), "ready");
  HangUp();
  EXPECT_EQ(leader_->Wait().value_or(-1), 7);
}

// Starts vramctl with SIGHUP ignored, like nohup. SIGCONT comes after SIGHUP.
TEST_F(RunHangUpTest, WhereItIsIgnoredTheProgramGoesOn) {
  ASSERT_NO_FATAL_FAILURE(
      StartRun(absl::StrCat("trap \"echo continued\" CONT; echo ready; ", kStays), "trap '' HUP; "));
  ASSERT_EQ(Hear(), "ready");
  HangUp();
  EXPECT_EQ(Hear(), "continued");
  EXPECT_EQ(Claims(), 1u);
  leader_->Signal(SIGTERM);
  EXPECT_EQ(leader_->Wait().value_or(-1), 128 + SIGTERM);
}

TEST_F(RunHangUpTest, AProgramThatHasLeftTheSessionIsNotTold) {
  ASSERT_NO_FATAL_FAILURE(Start(absl::StrCat("exec ", RunCommand(), R"( setsid sh -c 'trap "echo told" HUP CONT; )",
                                             R"(trap "echo got" USR1; echo ready; )", kStays, "'")));
  ASSERT_EQ(Hear(), "ready");
  HangUp();
  leader_->Signal(SIGUSR1);
  EXPECT_EQ(Hear(), "got");
  leader_->Signal(SIGTERM);
  EXPECT_EQ(leader_->Wait().value_or(-1), 128 + SIGTERM);
  EXPECT_EQ(leader_->ReadRest(), "");
}

// The kernel signals the foreground group after the end of the leader: the program and vramctl alike.
TEST_F(RunHangUpTest, WhereAShellLeadsTheProgramIsToldOnce) {
  ASSERT_NO_FATAL_FAILURE(Start(absl::StrCat(RunCommand(), R"( sh -c 'trap "n=\$((n+1)); echo got-\$n" HUP; echo $$; )",
                                             kStays, "'; echo not reached")));
  int program = 0;
  ASSERT_TRUE(absl::SimpleAtoi(Hear(), &program));
  HangUp();
  EXPECT_EQ(Hear(), "got-1");
  EXPECT_EQ(leader_->Wait().value_or(-1), 128 + SIGHUP);
  kill(program, SIGTERM);
  EXPECT_TRUE(WaitFor([&] { return Claims() == 0; }));
  EXPECT_EQ(leader_->ReadRest(), "");
}

}  // namespace
}  // namespace vrambroker::testing_support
