// SPDX-License-Identifier: Apache-2.0
//
// Signals during a program's wait, its standard error, and its end, with a played daemon.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <csignal>
#include <cstdint>
#include <fstream>
#include <iterator>
#include <optional>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "absl/synchronization/notification.h"
#include "tests/preload/played_daemon.h"
#include "tests/preload/preload_fixture.h"
#include "tests/support/util.h"

namespace vrambroker::testing_support {
namespace {

using ::testing::HasSubstr;

constexpr uint32_t kCodeOk = 0;
constexpr uint32_t kCodeNotFound = 5;

class PreloadSignals : public PreloadTest {
 protected:
  PlayedDaemon daemon_{"GPU-11111111-1111-1111-1111-111111111111", 8 * kMiB};

  Environment Surroundings(const std::string& socket_dir, const Environment& more = {}) const {
    Environment environment = {{"LD_PRELOAD", paths::kPreload},
                               {"LD_LIBRARY_PATH", FolderOf(paths::kPreloadPackingDriver)},
                               {"VRAMBROKER_SOCKET_DIR", socket_dir}};
    environment.insert(environment.end(), more.begin(), more.end());
    return environment;
  }
  Program RunPacking(const Environment& more = {}) const {
    return Program(
        ChildProcess::Start({paths::kPreloadProbe, "dlsym"}, Surroundings(daemon_.socket_dir(), more)).value());
  }
  // Runs a probe with the descriptors left by the script `before`, and with `redirections` in shell syntax.
  Program RunRedirected(const std::string& socket_dir, const std::string& before,
                        const std::string& redirections) const {
    const std::string script = absl::StrCat(before, "exec env LD_PRELOAD=", paths::kPreload, " ", paths::kPreloadProbe,
                                            " dlsym ", redirections);
    return Program(
        ChildProcess::Start({"/bin/sh", "-c", script}, Surroundings(socket_dir, {{"LD_PRELOAD", ""}})).value());
  }
  // Makes the daemon give no answer to this call.
  void BeSilentTo(uint32_t call) {
    daemon_.set_distort([call](const PlayedDaemon::Request& request, const PlayedDaemon::Answer& answer) {
      return request.call == call ? std::nullopt : std::optional(PlayedDaemon::Bytes(answer));
    });
  }
  void Speak() { daemon_.set_distort(nullptr); }
};

std::string Contents(const std::string& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

// --- Signals ---

TEST_F(PreloadSignals, CtrlCEndsAWaitForMemory) {
  BeSilentTo(VRAMBROKER_COUNT_WAIT);
  Program program = RunPacking({{"VRAMBROKER_WAIT", "10m"}});
  EXPECT_EQ(program.Ask("alloc plain 2M"), "0");
  EXPECT_EQ(program.Ask(absl::StrCat("handle ", SIGINT)), "0");
  program.Tell("alloc plain 16M");
  ASSERT_TRUE(WaitFor([&] { return daemon_.Calls(VRAMBROKER_COUNT_WAIT) == 1; }));
  program.process().Signal(SIGINT);
  EXPECT_EQ(program.Hear(), absl::StrCat("signal 0", SIGINT));
  EXPECT_EQ(program.Hear(), "2");
  EXPECT_THAT(program.ErrorText(), HasSubstr("cuMemAlloc of 16.0 MiB refused: a signal has ended the wait"));
  EXPECT_EQ(program.Ask("alloc plain 2M"), "0");
  EXPECT_EQ(daemon_.charged(), 4 * kMiB);
}

TEST_F(PreloadSignals, CtrlCEndsAWaitForADaemon) {
  Program program = RunPacking({{"VRAMBROKER_RECONNECT", "1h"}});
  EXPECT_EQ(program.Ask("alloc plain 2M"), "0");
  EXPECT_EQ(program.Ask(absl::StrCat("handle ", SIGTERM)), "0");
  BeSilentTo(VRAMBROKER_COUNT_CHARGE);
  program.Tell("alloc plain 4M");
  ASSERT_TRUE(WaitFor([&] { return daemon_.Calls(VRAMBROKER_COUNT_CHARGE) > 1; }));
  program.process().Signal(SIGTERM);
  EXPECT_EQ(program.Hear(), absl::StrCat("signal ", SIGTERM));
  EXPECT_EQ(program.Hear(), "2");
}

// Profilers, timers and ending children send such signals.
TEST_F(PreloadSignals, OtherSignalsAreHandledAndTheWaitGoesOn) {
  std::atomic<bool> waits = false;
  absl::Notification go;
  daemon_.set_distort([&](const PlayedDaemon::Request& request, PlayedDaemon::Answer answer) {
    if (request.call == VRAMBROKER_COUNT_WAIT) {
      waits = true;
      go.WaitForNotification();
      answer.code = kCodeOk;
    }
    return PlayedDaemon::Bytes(answer);
  });
  Program program = RunPacking({{"VRAMBROKER_WAIT", "10m"}});
  EXPECT_EQ(program.Ask(absl::StrCat("handle ", SIGALRM)), "0");
  program.Tell("alloc plain 16M");
  EXPECT_TRUE(WaitFor([&] { return waits.load(); }));
  for (int i = 0; i < 3; ++i) {
    program.process().Signal(SIGALRM);
    EXPECT_EQ(program.Hear(), absl::StrCat("signal ", SIGALRM));
  }
  go.Notify();
  EXPECT_EQ(program.Hear(), "0");
}

// Reads a number from /proc/PID/status.
uint64_t StatusOf(Program& program, const std::string& name, bool is_hexadecimal = false) {
  std::ifstream file(absl::StrCat("/proc/", program.process().pid(), "/status"));
  uint64_t number = 0;
  for (std::string line; std::getline(file, line);) {
    absl::string_view value = line;
    if (!absl::ConsumePrefix(&value, name + ":\t")) continue;
    EXPECT_TRUE(is_hexadecimal ? absl::SimpleHexAtoi(value, &number) : absl::SimpleAtoi(value, &number)) << line;
  }
  return number;
}

// A program under nohup ignores the hangup of its terminal. The signal stays pending during a call to the daemon.
TEST_F(PreloadSignals, AnIgnoredSignalEndsNoCall) {
  Program program = RunPacking();
  EXPECT_EQ(program.Ask("alloc plain 2M"), "0");
  EXPECT_EQ(program.Ask(absl::StrCat("ignore ", SIGHUP)), "0");
  const int calls = daemon_.Calls(VRAMBROKER_COUNT_CHARGE);
  daemon_.HoldBack(VRAMBROKER_COUNT_CHARGE);
  program.Tell("alloc plain 4M");
  ASSERT_TRUE(WaitFor([&] { return daemon_.Calls(VRAMBROKER_COUNT_CHARGE) > calls; }));
  program.process().Signal(SIGHUP);
  ASSERT_TRUE(WaitFor([&] { return (StatusOf(program, "ShdPnd", true) & 1) != 0; }));
  const uint64_t looks = StatusOf(program, "voluntary_ctxt_switches");
  ASSERT_TRUE(WaitFor([&] { return StatusOf(program, "voluntary_ctxt_switches") > looks + 2; }));
  daemon_.SendHeldBack();
  EXPECT_EQ(program.Hear(), "0");
  EXPECT_EQ(daemon_.Calls(VRAMBROKER_COUNT_HELLO), 1);
}

TEST_F(PreloadSignals, AHandlerThatJumpsOutOfACallLeavesNoLock) {
  Program program = RunPacking({{"VRAMBROKER_RECONNECT", "1s"}});
  EXPECT_EQ(program.Ask("alloc plain 2M"), "0");
  BeSilentTo(VRAMBROKER_COUNT_CHARGE);
  program.Tell(absl::StrCat("jump ", SIGUSR1, " 2"));
  ASSERT_TRUE(WaitFor([&] { return daemon_.Calls(VRAMBROKER_COUNT_CHARGE) > 1; }));
  program.process().Signal(SIGUSR1);
  EXPECT_EQ(program.Hear(), "jumped");
  Speak();
  EXPECT_EQ(program.Ask("alloc plain 4M"), "0");
}

// The thread's next wait closes the abandoned wait.
TEST_F(PreloadSignals, AWaitThatAHandlerHasLeftIsGivenUp) {
  StartDaemon("64MiB");
  Program one = Run("dlsym");
  EXPECT_EQ(one.Ask("alloc plain 60M"), "0");
  Program other = Run("dlsym", {{"VRAMBROKER_WAIT", "10m"}});
  EXPECT_EQ(other.Ask("alloc plain 2M"), "0");
  const auto waits = [&] {  // sessions, with the amount of each wait
    return RunProgram({VramctlProgram(), "sessions", "--socket_dir=" + daemon().socket_dir()}).out;
  };
  other.Tell(absl::StrCat("jump ", SIGUSR1, " 20"));
  ASSERT_TRUE(WaitFor([&] { return absl::StrContains(waits(), "20.0M"); })) << waits();
  other.process().Signal(SIGUSR1);
  EXPECT_EQ(other.Hear(), "jumped");
  other.Tell("alloc plain 8M");
  ASSERT_TRUE(WaitFor([&] { return !absl::StrContains(waits(), "20.0M"); })) << waits();
  one.process().Signal(SIGKILL);
  EXPECT_EQ(other.Hear(), "0");
  EXPECT_EQ(other.Ask("info"), Info(54, 64));
}

// An inherited connection would hide the end of the parent's wait from the daemon.
TEST_F(PreloadSignals, AChildHasNoConnectionOfItsParentsThreads) {
  BeSilentTo(VRAMBROKER_COUNT_WAIT);
  Program program = RunPacking({{"VRAMBROKER_WAIT", "10m"}});
  EXPECT_EQ(program.Ask("alloc plain 2M"), "0");
  const std::string of_child = program.Ask("fork census");
  EXPECT_EQ(program.Ask("array_thread 16M"), "0");
  ASSERT_TRUE(WaitFor([&] { return daemon_.Calls(VRAMBROKER_COUNT_WAIT) == 1; }));
  EXPECT_EQ(program.Ask("fork census"), of_child);
}

// The driver's functions are no cancellation points.
TEST_F(PreloadSignals, AThreadIsNotCancelledWhileItWaits) {
  Program program = RunPacking({{"VRAMBROKER_WAIT", "10m"}});
  daemon_.HoldBack(VRAMBROKER_COUNT_WAIT);
  EXPECT_EQ(program.Ask("array_thread 16M"), "0");
  ASSERT_TRUE(WaitFor([&] { return daemon_.Calls(VRAMBROKER_COUNT_WAIT) == 1; }));
  EXPECT_EQ(program.Ask("cancel_worker"), "0");
  daemon_.SendHeldBack();
  EXPECT_EQ(program.Ask("join"), "2") << "what it was told";
}

// --- Standard error ---

TEST_F(PreloadSignals, AFullStandardErrorHoldsNobody) {
  const std::string pipe = MakeTempDir() + "/pipe";
  Program program = RunRedirected("/nowhere",
                                  absl::StrCat("mkfifo ", pipe, "; exec 3<> ", pipe, "; dd if=/dev/zero of=", pipe,
                                               " oflag=nonblock bs=4096 2> /dev/null; "),
                                  "2>&3");
  EXPECT_EQ(program.Ask("alloc plain 2M"), "2");
  EXPECT_EQ(program.Ask("alloc plain 2M"), "2");
}

TEST_F(PreloadSignals, AFileOfTheProgramGetsNoLine) {
  const std::string file = MakeTempDir() + "/data";
  Program program = RunRedirected("/nowhere", "", "2>&-");
  EXPECT_EQ(program.Ask("open " + file), "0 2");
  EXPECT_EQ(program.Ask("alloc plain 2M"), "2");
  EXPECT_EQ(Contents(file), "");
}

TEST_F(PreloadSignals, ALogOfTheProgramGetsLines) {
  const std::string log = MakeTempDir() + "/log";
  Program program = RunRedirected("/nowhere", "", "2>&-");
  EXPECT_EQ(program.Ask("open " + log + " append"), "0 2");
  EXPECT_EQ(program.Ask("alloc plain 2M"), "2");
  EXPECT_THAT(Contents(log), HasSubstr("vrambroker: cannot reach the daemon"));
}

// --- Ends ---

TEST_F(PreloadSignals, AProgramEndsWithItsLastThread) {
  Program program = RunPacking();
  EXPECT_EQ(program.Ask("alloc plain 2M"), "0");
  program.Tell("pthread_exit");
  EXPECT_EQ(program.Hear(), "at exit");
  EXPECT_EQ(program.process().Wait().value_or(-1), 0);
}

TEST_F(PreloadSignals, ATokenThatIsNotKnownAnyMoreIsAskedForAgain) {
  std::atomic<int> joins = 0;
  daemon_.set_distort([&](const PlayedDaemon::Request& request, PlayedDaemon::Answer answer) {
    if (request.call == VRAMBROKER_COUNT_JOIN && joins++ == 0) answer.code = kCodeNotFound;
    if (request.call == VRAMBROKER_COUNT_WAIT) answer.code = kCodeOk;
    return PlayedDaemon::Bytes(answer);
  });
  Program program = RunPacking();
  EXPECT_EQ(program.Ask("alloc plain 16M"), "0");
  EXPECT_EQ(joins, 2);
}

}  // namespace
}  // namespace vrambroker::testing_support
