// SPDX-License-Identifier: Apache-2.0
//
// Views for operators: vramctl top on a terminal, vramctl watch, vramctl map.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <nlohmann/json.hpp>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "allocator/base/bytes.h"
#include "tests/support/client_process.h"
#include "tests/support/terminal.h"
#include "tests/support/vramctl_test.h"

namespace vrambroker::testing_support {
namespace {

using absl::StrContains;
using ::testing::HasSubstr;
using ::testing::Not;

class VramctlViewsTest : public VramctlDaemonTest {
 protected:
  void SetUp() override {
    placement_ = Placement::kRemote;
    ASSERT_OK(StartDaemon({.capacity = "256MiB", .devices = 2}));
  }

  Arguments Command(Arguments arguments) const {
    arguments.insert(arguments.begin(), VramctlProgram());
    arguments.push_back("--socket_dir=" + dir());
    return arguments;
  }
  // Starts vramctl top on a terminal. `before`: a program that starts vramctl.
  absl::StatusOr<std::unique_ptr<Terminal>> Top(const Arguments& flags = {}, const Arguments& before = {}) const {
    Arguments program = before;
    const Arguments command = Command({"top", "--interval=0.1"});
    program.insert(program.end(), command.begin(), command.end());
    program.insert(program.end(), flags.begin(), flags.end());
    return Terminal::Start(program, 120, 24);
  }
};

// ---- hold ----

TEST_F(VramctlViewsTest, HoldOnATerminalSaysWhichKeyEndsIt) {
  ASSERT_OK_AND_ASSIGN(const std::unique_ptr<Terminal> hold, Terminal::Start(Command({"hold", "1000"}), 120, 24));
  EXPECT_TRUE(hold->Shows("until interrupted (Ctrl-C)"));
  hold->Press("C-c");
  EXPECT_EQ(hold->End(), "exit=0 plain");
}

// ---- trace ----

TEST_F(VramctlViewsTest, TraceShowsWhatItWaitsFor) {
  ASSERT_OK_AND_ASSIGN(Client trainer, Connect("trainer"));
  const std::string file = MakeTempDir() + "/trainer.pickle";
  ASSERT_OK_AND_ASSIGN(const std::unique_ptr<Terminal> trace,
                       Terminal::Start(Command({"trace", "trainer", "-o", file, "--seconds=3600"}), 120, 24));
  EXPECT_TRUE(trace->Shows("recording trainer: 0 events so far, "));
  EXPECT_TRUE(trace->Shows(" s left (Ctrl-C ends and writes)"));
  ASSERT_OK(trainer.Allocate(1_MiB).status());
  EXPECT_TRUE(trace->ShowsNoMore("0 events so far"));
  trace->Press("C-c");
  EXPECT_TRUE(trace->Shows("trainer: wrote "));
  EXPECT_EQ(trace->End(), "exit=0 plain");

  ASSERT_OK_AND_ASSIGN(const std::unique_ptr<Terminal> until_oom,
                       Terminal::Start(Command({"trace", "trainer", "-o", file, "--until-oom"}), 120, 24));
  EXPECT_TRUE(until_oom->Shows("so far, until a request is refused (Ctrl-C ends and writes)"));
  EXPECT_FALSE(trainer.Allocate(1_GiB).ok());
  EXPECT_EQ(until_oom->End(), "exit=0 plain");
}

// ---- top ----

using TopTest = VramctlViewsTest;

TEST_F(TopTest, ShowsWhatHappens) {
  ASSERT_OK_AND_ASSIGN(Client trainer, Connect("trainer", Limit(0.5)));
  ASSERT_OK_AND_ASSIGN(Buffer large, trainer.Allocate(40_MiB));
  ASSERT_OK_AND_ASSIGN(const std::unique_ptr<Terminal> top, Top());
  ASSERT_TRUE(top->Shows("1 session, 0 requests wait; sorted by reserved"));
  EXPECT_TRUE(top->Shows("216.00 MiB free of 256.00 MiB, 40.00 MiB reserved"));
  EXPECT_TRUE(top->Shows("█ allocated 40.00 MiB   · unreserved 216.00 MiB"));
  EXPECT_TRUE(top->Shows(" 128M "));
  EXPECT_TRUE(top->Shows("no request was refused"));

  {
    ASSERT_OK_AND_ASSIGN(Client server, Connect("server"));
    ASSERT_OK_AND_ASSIGN(const Buffer small, server.Allocate(3_MiB, 1));
    EXPECT_TRUE(top->Shows("2 sessions"));
    EXPECT_TRUE(top->Shows("▒ fragmented 17.00 MiB"));  // the rest of a segment of 20 MiB
  }
  EXPECT_TRUE(top->Shows("1 session,"));
  ASSERT_OK(large.Reset());
  EXPECT_TRUE(top->Shows("░ reclaimable 40.00 MiB"));
  EXPECT_FALSE(trainer.Allocate(200_MiB).ok());
  EXPECT_TRUE(top->Shows("1 refusal, last "));
  EXPECT_TRUE(top->Shows(" trainer wanted 200.00 MiB on device 0: limit."));
  top->Press("q");
  EXPECT_EQ(top->End(), "exit=0 plain");
}

TEST_F(TopTest, ClaimsHaveTheirSessionsBelow) {
  ASSERT_EQ(Ctl({"claim", "create", "team-a", "--limit=64MiB"}).exit_code, 0);
  ASSERT_OK_AND_ASSIGN(ClientProcess trainer, ClientProcess::Connect(dir() + "/claims/team-a", "trainer"));
  ASSERT_OK(trainer.Call(absl::StrCat("alloc ", 20_MiB)).status());
  ASSERT_OK_AND_ASSIGN(const std::unique_ptr<Terminal> top, Top());
  ASSERT_TRUE(top->Shows("1 session, 1 claim, 0 requests wait"));
  EXPECT_TRUE(top->Shows("\n- team-a "));
  EXPECT_TRUE(top->Shows("\n  trainer "));
  EXPECT_TRUE(top->Shows("\nteam-a (claim) on device 0: 0 refusals  █ allocated 20.00 MiB   · unreserved 44.00 MiB"));
  top->Press("c");
  EXPECT_TRUE(top->ShowsNoMore("trainer"));
  EXPECT_TRUE(top->Shows("\n+ team-a "));
  top->Press("c");
  EXPECT_TRUE(top->Shows("\n  trainer "));
  EXPECT_FALSE(trainer.Call(absl::StrCat("alloc ", 60_MiB)).ok());
  EXPECT_TRUE(top->Shows("team-a (claim) on device 0: 1 refusal "));
  top->Press("q");
  EXPECT_EQ(top->End(), "exit=0 plain");

  const RunResult ooms = Ctl({"ooms"});
  EXPECT_THAT(ooms.out, HasSubstr("UNUSED ELSEWHERE  CLAIM\n"));
  EXPECT_THAT(ooms.out, HasSubstr("  team-a\n"));
}

TEST_F(TopTest, ObeysKeys) {
  ASSERT_OK_AND_ASSIGN(Client beta, Connect("beta"));
  ASSERT_OK_AND_ASSIGN(const Buffer of_beta, beta.Allocate(20_MiB));
  ASSERT_OK_AND_ASSIGN(Client alpha, Connect("alpha"));
  ASSERT_OK_AND_ASSIGN(const Buffer of_alpha, alpha.Allocate(1000));
  ASSERT_OK_AND_ASSIGN(const std::unique_ptr<Terminal> top, Top({"--sort=limit"}));
  const auto is_first = [&](const std::string& first, const std::string& second) {
    return WaitFor([&] {
      const std::string screen = top->Screen();
      const size_t at = screen.find("\n" + first + " ");
      return at != std::string::npos && at < screen.find("\n" + second + " ");
    });
  };
  ASSERT_TRUE(top->Shows("sorted by limit"));
  top->Press("r");
  EXPECT_TRUE(top->Shows("sorted by reserved"));
  EXPECT_TRUE(is_first("beta", "alpha")) << top->Screen();
  top->Press("R");
  EXPECT_TRUE(top->Shows("sorted by reserved, reversed"));
  EXPECT_TRUE(is_first("alpha", "beta")) << top->Screen();
  top->Press("n");
  EXPECT_TRUE(top->Shows("sorted by name"));

  EXPECT_TRUE(top->Shows("\nalpha (id "));
  top->Press("Down");
  EXPECT_TRUE(top->Shows("\nbeta (id "));
  top->Press("Home");
  EXPECT_TRUE(top->Shows("\nalpha (id "));

  for (const char* key : {"/", "E", "t", "Enter"}) top->Press(key);
  EXPECT_TRUE(top->Shows("only *Et*"));
  EXPECT_TRUE(top->ShowsNoMore("alpha"));
  top->Press("Escape");
  EXPECT_TRUE(top->Shows("alpha"));

  top->Press("h");
  EXPECT_TRUE(top->Shows("cannot be given back"));
  top->Press("h");
  EXPECT_TRUE(top->Shows("sorted by name"));

  top->Press("Space");
  EXPECT_TRUE(top->Shows("FROZEN"));
  ASSERT_OK_AND_ASSIGN(Client gamma, Connect("gamma"));
  top->Press("Space");
  EXPECT_TRUE(top->Shows("gamma"));
  top->Press("F10");
  EXPECT_EQ(top->End(), "exit=0 plain");
}

TEST_F(TopTest, EnterShowsDetails) {
  std::optional<Client> trainer;
  ASSERT_OK_AND_ASSIGN(trainer, Connect("trainer", Limit(0.5)));
  std::optional<Buffer> buffer;
  ASSERT_OK_AND_ASSIGN(buffer, trainer->Allocate(3_MiB));
  ASSERT_OK_AND_ASSIGN(const std::unique_ptr<Terminal> top, Top());
  ASSERT_TRUE(top->Shows("\ntrainer (id "));
  top->Press("Enter");
  EXPECT_TRUE(top->Shows(absl::StrCat("pid ", getpid())));
  EXPECT_TRUE(top->Shows("20.00 MiB large [█"));
  EXPECT_TRUE(top->Shows("1 block, a hole of 17.00 MiB"));
  EXPECT_TRUE(top->Shows("no request was refused"));
  EXPECT_FALSE(trainer->Allocate(200_MiB).ok());
  EXPECT_TRUE(top->Shows("wanted 200.00 MiB on device 0: limit"));
  EXPECT_TRUE(top->Shows("do:  "));
  {
    ASSERT_OK_AND_ASSIGN(const Buffer large, trainer->Allocate(40_MiB));
    EXPECT_TRUE(top->Shows("40.00 MiB large [█"));
  }
  top->Press("T");
  EXPECT_TRUE(top->Shows("y/N"));
  top->Press("y");
  EXPECT_TRUE(top->Shows("): 40.00 MiB came back"));
  EXPECT_TRUE(top->ShowsNoMore("40.00 MiB large"));
  buffer.reset();
  trainer.reset();
  EXPECT_TRUE(top->Shows("has ended: its last figures"));
  top->Press("q");
  EXPECT_TRUE(top->Shows("no sessions"));
  top->Press("q");
  EXPECT_EQ(top->End(), "exit=0 plain");
}

TEST_F(TopTest, DetailsWaitForNobody) {
  ASSERT_OK_AND_ASSIGN(ClientProcess silent, ConnectProcess("silent"));
  ASSERT_OK(silent.Call(absl::StrCat("alloc ", 2_MiB)));
  ASSERT_OK_AND_ASSIGN(const std::unique_ptr<Terminal> top, Top());
  ASSERT_TRUE(top->Shows("\nsilent (id "));
  silent.process().Signal(SIGSTOP);
  top->Press("Enter");
  EXPECT_TRUE(top->Shows("pid "));
  EXPECT_TRUE(top->Shows("its segments are missing here: "));
  top->Press("Escape");
  EXPECT_TRUE(top->Shows("sorted by reserved"));
  top->Press("q");
  EXPECT_EQ(top->End(), "exit=0 plain");
  silent.process().Signal(SIGCONT);
}

TEST_F(TopTest, DetailsSayWhoMaySeeSegments) {
  if (geteuid() != 0) GTEST_SKIP() << "needs root, to act as somebody else";
  ASSERT_OK(StartDaemon({.capacity = "256MiB", .config = "socket_mode: '0666'"}));
  ASSERT_OK_AND_ASSIGN(Client client, Connect("trainer"));
  ASSERT_OK_AND_ASSIGN(const Buffer buffer, client.Allocate(3_MiB));
  ASSERT_OK_AND_ASSIGN(const std::unique_ptr<Terminal> top,
                       Top({}, {"/usr/bin/setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"}));
  ASSERT_TRUE(top->Shows("\ntrainer (id "));
  top->Press("Enter");
  EXPECT_TRUE(top->Shows("its segments are missing here: the session belongs to another user"));
  EXPECT_TRUE(top->Shows("reserved 20.00 MiB"));
  top->Press("F10");
  EXPECT_EQ(top->End(), "exit=0 plain");
}

TEST_F(TopTest, FollowsTheSizeOfTheTerminal) {
  ASSERT_OK_AND_ASSIGN(Client client, Connect("trainer"));
  ASSERT_OK_AND_ASSIGN(const std::unique_ptr<Terminal> top, Top());
  ASSERT_TRUE(top->Shows("TENANT"));
  top->Resize(70, 10);
  EXPECT_TRUE(top->ShowsNoMore("TENANT"));
  EXPECT_TRUE(top->Shows("trainer"));
  EXPECT_TRUE(top->Shows("h help"));
  top->Resize(10, 2);
  EXPECT_TRUE(top->ShowsNoMore("trainer"));
  top->Resize(200, 50);
  EXPECT_TRUE(top->Shows("TENANT"));
  EXPECT_TRUE(top->Shows("h help"));
  top->Press("q");
  EXPECT_EQ(top->End(), "exit=0 plain");
}

TEST_F(TopTest, FindsTheDaemonAgain) {
  ASSERT_OK_AND_ASSIGN(const std::unique_ptr<Terminal> top, Top());
  ASSERT_TRUE(top->Shows("no sessions"));
  daemon_->Kill();
  EXPECT_TRUE(top->Shows("no daemon since "));
  top->Press("n");  // keys work meanwhile
  EXPECT_TRUE(top->Shows("sorted by name"));
  ASSERT_OK(daemon_->Restart());
  EXPECT_TRUE(top->ShowsNoMore("no daemon since "));
  ASSERT_OK_AND_ASSIGN(Client client, Connect("later"));
  EXPECT_TRUE(top->Shows("later"));
  top->Press("q");
  EXPECT_EQ(top->End(), "exit=0 plain");
}

TEST_F(TopTest, KeysWorkWhileTheDaemonHangs) {
  ASSERT_OK_AND_ASSIGN(const std::unique_ptr<Terminal> top, Top());
  ASSERT_TRUE(top->Shows("no sessions"));
  daemon_->process().Signal(SIGSTOP);
  EXPECT_TRUE(top->Shows("the daemon accepts connections but did not answer within 3s"));
  top->Press("n");
  EXPECT_TRUE(top->Shows("sorted by name"));
  top->Press("q");
  EXPECT_EQ(top->End(), "exit=0 plain");
  daemon_->process().Signal(SIGCONT);
}

TEST_F(TopTest, WaitsForADaemonThatHangsFromTheBeginning) {
  ASSERT_OK_AND_ASSIGN(Client client, Connect("early"));
  daemon_->process().Signal(SIGSTOP);
  ASSERT_OK_AND_ASSIGN(const std::unique_ptr<Terminal> top, Top());
  EXPECT_TRUE(top->Shows("no answer since "));
  EXPECT_TRUE(top->Shows("nothing was read yet"));
  EXPECT_THAT(top->Screen(), Not(HasSubstr("no request was refused")));
  daemon_->process().Signal(SIGCONT);
  EXPECT_TRUE(top->Shows("early"));
  EXPECT_TRUE(top->ShowsNoMore("no answer since "));
  top->Press("q");
  EXPECT_EQ(top->End(), "exit=0 plain");
}

TEST_F(TopTest, GivesTheTerminalBackWhenItIsEnded) {
  for (const int signal : {SIGINT, SIGTERM, SIGHUP}) {
    ASSERT_OK_AND_ASSIGN(const std::unique_ptr<Terminal> top, Top());
    ASSERT_TRUE(top->Shows("no sessions"));
    top->Signal(signal);
    EXPECT_EQ(top->End(), "exit=0 plain") << signal;
  }
  ASSERT_OK_AND_ASSIGN(const std::unique_ptr<Terminal> top, Top());
  ASSERT_TRUE(top->Shows("no sessions"));
  top->Press("C-c");
  EXPECT_EQ(top->End(), "exit=0 plain");
}

TEST_F(TopTest, UsesWhatTheTerminalCan) {
  ASSERT_OK_AND_ASSIGN(Client client, Connect("trainer"));
  ASSERT_OK_AND_ASSIGN(const Buffer buffer, client.Allocate(40_MiB));
  constexpr const char* kGreen = "\x1b[32m";
  ASSERT_OK_AND_ASSIGN(const std::unique_ptr<Terminal> colour, Top());
  ASSERT_TRUE(colour->Shows("█ allocated"));
  EXPECT_THAT(colour->Screen(true), HasSubstr(kGreen));
  ASSERT_OK_AND_ASSIGN(const std::unique_ptr<Terminal> no_colour, Top({}, {"/usr/bin/env", "NO_COLOR=1"}));
  ASSERT_TRUE(no_colour->Shows("█ allocated"));
  EXPECT_THAT(no_colour->Screen(true), Not(HasSubstr(kGreen)));

  ASSERT_OK_AND_ASSIGN(const std::unique_ptr<Terminal> ascii, Top({}, {"/usr/bin/env", "LC_ALL=C", "TERM=vt100"}));
  ASSERT_TRUE(ascii->Shows("# allocated 40.00 MiB"));
  for (const char c : ascii->Screen()) EXPECT_LT(static_cast<unsigned char>(c), 0x80);

  ASSERT_OK_AND_ASSIGN(const std::unique_ptr<Terminal> unknown, Top({}, {"/usr/bin/env", "TERM=nonsense"}));
  EXPECT_TRUE(unknown->Shows("TERM=nonsense names no terminal"));
  EXPECT_EQ(unknown->End(), "exit=1 plain");
}

TEST_F(TopTest, WrongUse) {
  const RunResult no_terminal = Ctl({"top"});
  EXPECT_EQ(no_terminal.exit_code, 1);
  EXPECT_THAT(no_terminal.err, HasSubstr("vramctl watch"));
  for (const char* flag : {"--interval=0", "--interval=-1", "--interval=nan", "--interval=1e9", "--interval=x",
                           "--sort=size", "--format=json"}) {
    const RunResult result = Ctl({"top", flag});
    EXPECT_EQ(result.exit_code, 2) << flag;
    EXPECT_THAT(result.err, ::testing::AnyOf(HasSubstr("--interval"), HasSubstr("interval"), HasSubstr("--sort"),
                                             HasSubstr("JSON")));
  }
  daemon_->Kill();
  ASSERT_OK_AND_ASSIGN(const std::unique_ptr<Terminal> top, Top());
  EXPECT_TRUE(top->Shows("vramctl: no vrambrokerd"));
  EXPECT_EQ(top->End(), "exit=1 plain");
}

// ---- Changes of sessions by top ----

class TopChangesTest : public VramctlViewsTest {
 protected:
  // Returns the session as the daemon knows it now; null if the session has ended.
  Json SessionNamed(const std::string& name) {
    const Json all = CtlJson({"sessions"});
    for (const Json& session : all["sessions"]) {
      if (session["name"] == name && session["state"] != "ended") return session;
    }
    return nullptr;
  }
  // Types text like a user: tmux takes one character for each key.
  static void Type(const Terminal& top, const std::string& text) {
    for (const char key : text) top.Press(std::string(1, key));
  }
};

TEST_F(TopChangesTest, SetsALimitAndAPriority) {
  ASSERT_OK_AND_ASSIGN(Client other, Connect("other"));
  ASSERT_OK_AND_ASSIGN(Client trainer, Connect("trainer", Limit(0.5)));
  ASSERT_OK_AND_ASSIGN(const Buffer buffer, trainer.Allocate(40_MiB));
  const std::string title = absl::StrCat("session trainer (id ", trainer.session_id(), ", uid ", getuid(), ")");
  // Readings are an hour apart: changes on the screen come from keys, or from changes made by top.
  ASSERT_OK_AND_ASSIGN(const std::unique_ptr<Terminal> top, Top({"--interval=3600"}));
  ASSERT_TRUE(top->Shows("\ntrainer (id "));

  top->Press("L");
  EXPECT_TRUE(top->Shows(absl::StrCat("The limit of ", title, " is 128.00 MiB on each device.")));
  Type(*top, "lots");
  top->Press("Enter");
  EXPECT_TRUE(top->Shows("'lots' is not a share or a size"));
  for (int i = 0; i < 4; ++i) top->Press("BSpace");
  Type(*top, "64MiB");
  top->Press("Enter");
  EXPECT_TRUE(top->Shows(absl::StrCat("Set the limit of ", title, " to 64.00 MiB on each device?")));
  EXPECT_EQ(SessionNamed("trainer")["devices"][0]["limit_bytes"], 128_MiB) << "nobody has said yes";
  top->Press("y");
  EXPECT_TRUE(top->Shows("): limit 64.00 MiB on device 0, reserved 40.00 MiB; limit 64.00 MiB on device 1"));
  EXPECT_EQ(SessionNamed("trainer")["devices"][0]["limit_bytes"], 64_MiB);
  EXPECT_TRUE(top->Shows("64.0M")) << "read at once";

  top->Press("P");
  EXPECT_TRUE(top->Shows(absl::StrCat("The priority of ", title, " is 0.")));
  Type(*top, "-7");
  top->Press("Enter");
  EXPECT_TRUE(top->Shows(absl::StrCat("Set the priority of ", title, " to -7?")));
  top->Press("y");
  EXPECT_TRUE(top->Shows("): priority -7"));
  EXPECT_EQ(SessionNamed("trainer")["priority"], -7);
  EXPECT_EQ(SessionNamed("other")["priority"], 0);

  // Refusals by the daemon are shown completely.
  Type(*top, "P5000");
  top->Press("Enter");
  top->Press("y");
  EXPECT_TRUE(top->Shows(absl::StrCat("Failed: Set the priority of ", title, " to 5000: priority: ")));
  top->Press("Escape");
  EXPECT_TRUE(top->ShowsNoMore("Failed"));
  top->Press("q");
  EXPECT_EQ(top->End(), "exit=0 plain");
}

TEST_F(TopChangesTest, TrimsAndEnds) {
  ASSERT_OK_AND_ASSIGN(Client trainer, Connect("trainer"));
  ASSERT_OK_AND_ASSIGN(Buffer idle, trainer.Allocate(40_MiB));
  ASSERT_OK_AND_ASSIGN(const Buffer used, trainer.Allocate(30_MiB));
  ASSERT_OK(idle.Reset());
  ASSERT_OK_AND_ASSIGN(const std::unique_ptr<Terminal> top, Top());
  ASSERT_TRUE(top->Shows("\ntrainer (id "));
  top->Press("T");
  EXPECT_TRUE(top->Shows("It gives back what is reclaimable, 40.00 MiB now. y/N"));
  top->Press("n");
  EXPECT_TRUE(top->Shows("Nothing was done."));
  EXPECT_EQ(SessionNamed("trainer")["devices"][0]["reserved_bytes"], 70_MiB);
  top->Press("T");
  EXPECT_TRUE(top->Shows("y/N"));
  top->Press("y");
  EXPECT_TRUE(top->Shows("): 40.00 MiB came back"));
  EXPECT_EQ(SessionNamed("trainer")["devices"][0]["reserved_bytes"], 30_MiB);

  top->Press("E");
  EXPECT_TRUE(top->Shows(absl::StrCat("End session trainer (id ", trainer.session_id(), ", uid ", getuid(),
                                      ")? Its memory is charged until the process")));
  top->Press("Escape");
  EXPECT_TRUE(top->Shows("Nothing was done."));
  EXPECT_FALSE(SessionNamed("trainer").is_null());
  top->Press("E");
  top->Press("y");
  EXPECT_TRUE(top->Shows("): ended; 30.00 MiB stays charged until its process closes it or exits"));
  EXPECT_TRUE(SessionNamed("trainer").is_null());
  top->Press("q");
  EXPECT_EQ(top->End(), "exit=0 plain");
}

TEST_F(TopChangesTest, LeavesAloneWhoTookThePlaceOfASession) {
  std::optional<Client> trainer;
  ASSERT_OK_AND_ASSIGN(trainer, Connect("trainer"));
  ASSERT_OK_AND_ASSIGN(const std::unique_ptr<Terminal> top, Top({"--interval=3600"}));
  ASSERT_TRUE(top->Shows("\ntrainer (id "));
  top->Press("E");
  ASSERT_TRUE(top->Shows("End session trainer (id "));
  // Another session takes the name; top has not read the new session yet.
  trainer.reset();
  ASSERT_TRUE(WaitFor([&] { return SessionNamed("trainer").is_null(); }));
  ASSERT_OK_AND_ASSIGN(trainer, Connect("trainer"));
  top->Press("y");
  EXPECT_TRUE(top->Shows("): the session has ended; nothing was done"));
  ASSERT_TRUE(top->Shows(absl::StrCat("\ntrainer (id ", trainer->session_id(), ")")));
  EXPECT_EQ(SessionNamed("trainer")["id"], trainer->session_id());

  // A session of another daemon takes the id as well.
  top->Press("E");
  ASSERT_TRUE(top->Shows(absl::StrCat("End session trainer (id ", trainer->session_id(), ", ")));
  const uint64_t id = trainer->session_id();
  daemon_->Kill();
  trainer.reset();
  ASSERT_OK(daemon_->Restart());
  std::vector<Client> others;
  while (others.empty() || others.back().session_id() < id) {
    ASSERT_OK_AND_ASSIGN(Client other, Connect(absl::StrCat("other", others.size())));
    others.push_back(std::move(other));
  }
  ASSERT_EQ(others.back().session_id(), id);
  top->Press("y");
  EXPECT_TRUE(top->Shows("): the session has ended; nothing was done"));
  EXPECT_OK(others.back().status());
  top->Press("q");
  EXPECT_EQ(top->End(), "exit=0 plain");
}

TEST_F(TopChangesTest, ASessionThatEndsClosesItsQuestion) {
  std::optional<Client> trainer;
  ASSERT_OK_AND_ASSIGN(trainer, Connect("trainer"));
  ASSERT_OK_AND_ASSIGN(const std::unique_ptr<Terminal> top, Top());
  ASSERT_TRUE(top->Shows("\ntrainer (id "));
  for (const char* key : {"E", "L"}) {
    top->Press("Escape");
    top->Press(key);
    ASSERT_TRUE(top->Shows("session trainer (id "));
    trainer.reset();
    EXPECT_TRUE(top->Shows("Nothing was done: session trainer (id "));
    EXPECT_TRUE(top->Shows("has ended."));
    ASSERT_OK_AND_ASSIGN(trainer, Connect("trainer"));
    ASSERT_TRUE(top->Shows(absl::StrCat("\ntrainer (id ", trainer->session_id(), ")")));
  }
  top->Press("q");
  EXPECT_EQ(top->End(), "exit=0 plain");
}

TEST_F(TopChangesTest, ADaemonThatGoesOrHangsStopsNothing) {
  std::optional<Client> trainer;
  ASSERT_OK_AND_ASSIGN(trainer, Connect("trainer"));
  ASSERT_OK_AND_ASSIGN(const std::unique_ptr<Terminal> top, Top());
  ASSERT_TRUE(top->Shows("\ntrainer (id "));
  top->Press("T");
  ASSERT_TRUE(top->Shows("y/N"));
  daemon_->Kill();
  ASSERT_TRUE(top->Shows("no daemon since "));
  EXPECT_TRUE(top->Shows("y/N"));
  top->Press("y");
  EXPECT_TRUE(top->Shows("Failed: Trim session trainer (id "));
  EXPECT_TRUE(top->Shows("): no vrambrokerd: "));
  ASSERT_OK(daemon_->Restart());
  ASSERT_OK_AND_ASSIGN(trainer, Connect("trainer"));
  ASSERT_TRUE(top->ShowsNoMore("no daemon since "));
  ASSERT_TRUE(top->Shows("\ntrainer (id "));

  top->Press("T");
  ASSERT_TRUE(top->Shows("y/N"));
  daemon_->process().Signal(SIGSTOP);
  top->Press("y");
  EXPECT_TRUE(top->Shows("): waiting for the daemon"));
  top->Press("n");
  EXPECT_TRUE(top->Shows("sorted by name"));
  top->Press("E");
  EXPECT_TRUE(top->Shows("the next change has to wait, too"));
  top->Press("q");  // quits at once, although the change may take as long as --timeout
  EXPECT_EQ(top->End(), "exit=0 plain");
  daemon_->process().Signal(SIGCONT);
}

TEST_F(TopChangesTest, EndsASessionWhoseClientDoesNotAnswer) {
  // A long client_timeout: a change that asked the client first would run out of time.
  ASSERT_OK(StartDaemon({.capacity = "256MiB", .config = "client_timeout: '20s'"}));
  ASSERT_OK_AND_ASSIGN(ClientProcess silent, ConnectProcess("silent"));
  ASSERT_OK(silent.Call(absl::StrCat("alloc ", 2_MiB)));
  silent.process().Signal(SIGSTOP);
  ASSERT_OK_AND_ASSIGN(const std::unique_ptr<Terminal> top, Top({"--timeout=15"}));
  ASSERT_TRUE(top->Shows("\nsilent (id "));
  top->Press("E");
  ASSERT_TRUE(top->Shows("y/N"));
  top->Press("y");
  EXPECT_TRUE(top->Shows("): ended; 20.00 MiB stays charged"));
  top->Press("q");
  EXPECT_EQ(top->End(), "exit=0 plain");
  silent.process().Signal(SIGCONT);
}

TEST_F(TopChangesTest, FollowsTheSizeOfTheTerminal) {
  ASSERT_OK_AND_ASSIGN(Client client, Connect("trainer"));
  const std::string title = absl::StrCat("session trainer (id ", client.session_id(), ", uid ", getuid(), ")");
  ASSERT_OK_AND_ASSIGN(const std::unique_ptr<Terminal> top, Top({}, {"/usr/bin/env", "NO_COLOR=1"}));
  ASSERT_TRUE(top->Shows("\ntrainer (id "));
  const auto shows_across_lines = [&](const std::string& text) {
    return WaitFor([&] { return StrContains(absl::StrReplaceAll(top->Screen(), {{"\n", " "}}), text); });
  };
  top->Press("E");
  const std::string question =
      absl::StrCat("End ", title, "? Its memory is charged until the process gives it back. y/N");
  EXPECT_TRUE(shows_across_lines(question)) << top->Screen();
  top->Resize(40, 5);
  EXPECT_TRUE(top->ShowsNoMore("RECLAIMABLE"));
  EXPECT_TRUE(shows_across_lines(question)) << top->Screen();
  top->Resize(120, 24);
  EXPECT_TRUE(top->Shows("RECLAIMABLE"));
  EXPECT_TRUE(top->Shows(question));
  top->Press("n");
  EXPECT_TRUE(top->Shows("Nothing was done."));
  // Resizing does not close the help either; any key would.
  top->Press("h");
  ASSERT_TRUE(top->Shows("set the session's limit"));
  top->Resize(40, 24);
  EXPECT_TRUE(top->ShowsNoMore("wasted memory"));
  EXPECT_TRUE(top->Shows("set the session's limit"));
  top->Press("h");
  EXPECT_TRUE(top->Shows("\nh help  q quit  L limit  T trim  E end"));
  top->Press("q");
  EXPECT_EQ(top->End(), "exit=0 plain");
}

TEST_F(TopChangesTest, WithoutTheRightItSaysWhoHasIt) {
  if (geteuid() != 0) GTEST_SKIP() << "needs root, to act as somebody else";
  ASSERT_OK(StartDaemon({.capacity = "256MiB", .config = "socket_mode: '0666'"}));
  ASSERT_OK_AND_ASSIGN(Client client, Connect("trainer"));
  ASSERT_OK_AND_ASSIGN(const std::unique_ptr<Terminal> top,
                       Top({}, {"/usr/bin/setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"}));
  ASSERT_TRUE(top->Shows("\ntrainer (id "));
  top->Press("E");
  ASSERT_TRUE(top->Shows("y/N"));
  top->Press("y");
  EXPECT_TRUE(top->Shows(absl::StrCat("Failed: End session trainer (id ", client.session_id(),
                                      ", uid 0): uid 65534 may not change sessions: ")));
  EXPECT_TRUE(top->Shows("only root and users with the ADMIN right"));
  EXPECT_OK(client.status());
  top->Press("q");
  EXPECT_EQ(top->End(), "exit=0 plain");
}

// ---- watch ----

using WatchTest = VramctlViewsTest;

TEST_F(WatchTest, SaysWhatStatusAndSessionsSay) {
  ASSERT_OK_AND_ASSIGN(Client client, Connect("trainer"));
  ASSERT_OK_AND_ASSIGN(const Buffer buffer, client.Allocate(3_MiB));
  const RunResult result = Ctl({"watch", "--count=3", "--interval=0.1"});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  const std::vector<std::string> lines = absl::StrSplit(result.out, '\n', absl::SkipEmpty());
  ASSERT_EQ(lines.size(), 3u) << result.out;
  // The daemon asks a GPU's driver for processes and sensors at any time: processes and sensors may differ between two
  // calls.
  const auto without_processes = [](Json devices) {
    for (Json& device : devices) {
      device.erase("processes");
      device.erase("processes_fault");
      for (const char* sensor : {"use_percent", "temperature_celsius", "power_watts"}) device.erase(sensor);
    }
    return devices;
  };
  // Idle times grow; names and commands may not be known yet.
  const auto without_times = [](Json sessions) {
    for (Json& session : sessions) {
      session.erase("idle_ms");
      session.erase("user");
      session.erase("command");
    }
    return sessions;
  };
  std::string before;
  for (const std::string& line : lines) {
    const Json json = Json::parse(line, nullptr, false);
    ASSERT_FALSE(json.is_discarded()) << line;
    EXPECT_EQ(without_processes(json["devices"]), without_processes(CtlJson({"status"})["devices"]));
    EXPECT_EQ(without_times(json["sessions"]), without_times(CtlJson({"sessions"})["sessions"]));
    EXPECT_EQ(json["daemon_version"], CtlJson({"status"})["daemon_version"]);
    EXPECT_GT(json["time"].get<std::string>(), before);
    before = json["time"];
  }
  EXPECT_EQ(Json::parse(lines[0])["sessions"][0]["devices"][0]["inactive_split_bytes"], 17_MiB);
  EXPECT_EQ(Json::parse(lines[0])["devices"][0]["inactive_split_bytes"], 17_MiB);
}

TEST_F(WatchTest, ALineIsThereAtOnce) {
  ASSERT_OK_AND_ASSIGN(const std::unique_ptr<ChildProcess> watch,
                       ChildProcess::Start(Command({"watch", "--interval=0.1"})));
  ASSERT_OK(watch->ReadLine());
  ASSERT_OK_AND_ASSIGN(Client client, Connect("later"));
  EXPECT_TRUE(WaitFor([&] { return StrContains(watch->ReadLine().value_or(""), "\"later\""); }));
  daemon_->Kill();
  (void)watch->ReadRest();  // reads the rest: watch may wait for its reader
  ASSERT_OK_AND_ASSIGN(const int exit_code, watch->Wait());
  EXPECT_EQ(exit_code, 1);
  EXPECT_THAT(watch->ErrorText(), HasSubstr("vramctl: the daemon stopped answering after "));
}

TEST_F(WatchTest, EndsWithItsReader) {
  // watch ends long before the next line would be due.
  const RunResult result = RunProgram({"/bin/bash", "-c", "\"$@\" | head -n 1 >&2; echo \"${PIPESTATUS[0]}\"", "bash",
                                       VramctlProgram(), "watch", "--interval=3600", "--socket_dir=" + dir()});
  EXPECT_EQ(result.out, "0\n") << result.err;
  EXPECT_THAT(result.err, Not(HasSubstr("vramctl:")));
  EXPECT_THAT(result.err, HasSubstr("{\"time\":"));
}

TEST_F(WatchTest, WrongUse) {
  for (const char* flag : {"--interval=0", "--interval=nan", "--interval=3601", "--count=-1", "--count=x"}) {
    const RunResult result = Ctl({"watch", flag});
    EXPECT_EQ(result.exit_code, 2) << flag << result.err;
  }
}

// ---- map ----

using MapTest = VramctlViewsTest;

TEST_F(MapTest, DrawsSegmentsAndHoles) {
  EXPECT_THAT(Ctl({"map"}).out, HasSubstr("no session holds anything here"));
  ASSERT_OK_AND_ASSIGN(Client trainer, Connect("trainer"));
  ASSERT_OK_AND_ASSIGN(const Buffer first, trainer.Allocate(5_MiB));
  ASSERT_OK_AND_ASSIGN(Buffer hole, trainer.Allocate(5_MiB));
  ASSERT_OK_AND_ASSIGN(const Buffer last, trainer.Allocate(10_MiB));
  ASSERT_OK(hole.Reset());
  ASSERT_OK_AND_ASSIGN(ClientProcess leasing, ConnectProcess("leasing"));
  ASSERT_OK(leasing.Call(absl::StrCat("alloc ", 2_MiB)));

  const RunResult ascii = RunProgram(Command({"map"}), {{"LC_ALL", "C"}, {"COLUMNS", "100"}});
  EXPECT_EQ(ascii.exit_code, 0) << ascii.err;
  EXPECT_THAT(ascii.out, HasSubstr("\ntrainer (id "));
  EXPECT_THAT(ascii.out, HasSubstr("20.00 MiB large [###########"));
  EXPECT_THAT(ascii.out, HasSubstr("2 blocks, a hole of 5.00 MiB"));
  EXPECT_THAT(ascii.out, HasSubstr("\nleasing (id "));
  EXPECT_THAT(ascii.out, HasSubstr("device 1, "));
  EXPECT_THAT(ascii.out, HasSubstr("cells:  # allocated"));
  const std::vector<std::string> lines = absl::StrSplit(ascii.out, '\n');
  for (const std::string& line : lines) EXPECT_LE(line.size(), 100u) << line;
  EXPECT_THAT(ascii.out, Not(HasSubstr("\x1b")));
  const RunResult utf8 = RunProgram(Command({"map", "trainer"}), {{"LC_ALL", "C.UTF-8"}});
  EXPECT_THAT(utf8.out, HasSubstr("20.00 MiB large [█"));
  EXPECT_THAT(utf8.out, Not(HasSubstr("leasing")));
  EXPECT_THAT(Ctl({"map", "--device=1"}).out, HasSubstr("no session holds anything here"));
  EXPECT_THAT(Ctl({"map", "--device=1"}).out, Not(HasSubstr("device 0")));

  // Colours appear only on a terminal; the map has the terminal's width.
  ASSERT_OK_AND_ASSIGN(const std::unique_ptr<Terminal> terminal, Terminal::Start(Command({"map"}), 90, 40));
  EXPECT_TRUE(terminal->Shows("20.00 MiB large [█"));
  EXPECT_EQ(terminal->End(), "exit=0 plain");
  EXPECT_THAT(terminal->Screen(true), HasSubstr("[\x1b[3"));

  const Json json = CtlJson({"map", "trainer"});
  ASSERT_EQ(json["maps"].size(), 1u);
  const Json& segments = json["maps"][0]["segments"];
  ASSERT_EQ(segments.size(), 1u);
  EXPECT_EQ(segments[0]["segment_bytes"], 20_MiB);
  EXPECT_EQ(segments[0]["small_pool"], false);
  std::string states;
  uint64_t bytes = 0;
  for (const Json& block : segments[0]["blocks"]) {
    absl::StrAppend(&states, block["state"].get<std::string>(), " ");
    EXPECT_EQ(block["offset_bytes"], bytes);
    bytes += block["block_bytes"].get<uint64_t>();
  }
  EXPECT_EQ(states, "allocated free allocated ");
  EXPECT_EQ(bytes, json["maps"][0]["reserved_bytes"].get<uint64_t>());
  EXPECT_TRUE(WaitFor([&] {
    return CtlJson({"map", "trainer"})["devices"] == CtlJson({"status"})["devices"];
  })) << "but for what the other session reports meanwhile";
}

TEST_F(MapTest, NoFigureIsLostWhereLinesAreShort) {
  const std::string name(60, 'n');
  ASSERT_OK_AND_ASSIGN(Client client, Connect(name));
  ASSERT_OK_AND_ASSIGN(Buffer cached, client.Allocate(40_MiB));
  ASSERT_OK(cached.Reset());
  ASSERT_OK(client.EmptyCache());
  const std::string scope(70, 's');
  const MemoryScope in_scope(scope);
  ASSERT_OK_AND_ASSIGN(Buffer first, client.Allocate(5_MiB));
  ASSERT_OK_AND_ASSIGN(const Buffer second, client.Allocate(10_MiB));
  ASSERT_OK(first.Reset());
  ASSERT_OK_AND_ASSIGN(Buffer reclaimable, client.Allocate(30_MiB));
  ASSERT_OK(reclaimable.Reset());
  const RunResult result = RunProgram(Command({"map"}), {{"LC_ALL", "C"}});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_THAT(result.out, HasSubstr("# allocated 10.00 MiB   + fragmented 10.00 MiB   - reclaimable 30.00 MiB\n"
                                    "= cached 40.00 MiB   . unreserved 166.00 MiB\n"));
  for (const std::string& part :
       {name, scope, std::string("of its limit of 256.00 MiB, 2 segments\n"), std::string("No\n  session has it.\n"),
        std::string("\n_ unused\n"), std::string("2 holes of 10.00 MiB, largest 5.00 MiB\n")}) {
    EXPECT_THAT(result.out, HasSubstr(part));
  }
}

TEST_F(MapTest, SaysWhoDidNotAnswer) {
  ASSERT_OK(StartDaemon({.config = "client_timeout: '2s'"}));
  ASSERT_OK_AND_ASSIGN(Client trainer, Connect("trainer"));
  ASSERT_OK_AND_ASSIGN(const Buffer buffer, trainer.Allocate(20_MiB));
  ASSERT_OK_AND_ASSIGN(ClientProcess silent, ConnectProcess("silent"));
  ASSERT_OK(silent.Call(absl::StrCat("alloc ", 2_MiB)));
  silent.process().Signal(SIGSTOP);
  const RunResult all = Ctl({"map"});
  EXPECT_EQ(all.exit_code, 0) << all.err;
  EXPECT_THAT(all.out, HasSubstr("20.00 MiB large ["));
  EXPECT_THAT(all.out, HasSubstr("\nsilent (id "));
  EXPECT_THAT(all.out, HasSubstr("is missing here: "));
  EXPECT_EQ(Ctl({"map", "silent"}).exit_code, 1);
  const Json maps = CtlJson({"map"})["maps"];
  ASSERT_EQ(maps.size(), 2u);
  EXPECT_EQ(maps[1]["name"], "silent");
  EXPECT_EQ(maps[1]["error"]["code"], "DEADLINE_EXCEEDED");
  EXPECT_FALSE(maps[1].contains("segments"));
  silent.process().Signal(SIGCONT);
}

TEST_F(MapTest, WrongUse) {
  EXPECT_EQ(Ctl({"map", "nobody"}).exit_code, 1);
  EXPECT_EQ(Ctl({"map", "--device=2"}).exit_code, 1);
  EXPECT_EQ(Ctl({"map", "--device=-1"}).exit_code, 1);
  EXPECT_EQ(Ctl({"map", "a", "b"}).exit_code, 2);
}

}  // namespace
}  // namespace vrambroker::testing_support
