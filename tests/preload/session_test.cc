// SPDX-License-Identifier: Apache-2.0
//
// A program's session: its end, its children, other waiting programs, lost descriptors, and a restart of the daemon.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <csignal>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "tests/cuda_substitute/machine.h"
#include "tests/preload/preload_fixture.h"
#include "tests/support/client_process.h"
#include "tests/support/util.h"

namespace vrambroker::testing_support {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

class PreloadSession : public PreloadTest {
 protected:
  std::string Sessions() {
    return RunProgram({VramctlProgram(), "sessions", "--socket_dir=" + daemon().socket_dir()}).out;
  }
};

// --- Missing daemons ---

TEST_F(PreloadSession, WithoutADaemonAllocationsAreRefusedAndSaidWhy) {
  Program program = Run("dlsym", {{"VRAMBROKER_SOCKET_DIR", "/nowhere"}});
  EXPECT_EQ(program.Ask("alloc plain 2M"), "2");
  EXPECT_EQ(program.Ask("alloc plain 2M"), "2");
  EXPECT_EQ(program.Ask("errno"), "0 7") << "errno is the program's";
  EXPECT_THAT(program.ErrorText(), HasSubstr("vrambroker: cannot reach the daemon at /nowhere/vram-count.sock"));
  EXPECT_EQ(std::vector<std::string>(absl::StrSplit(program.ErrorText(), '\n')).size(), 2) << "one line, once";
}

TEST_F(PreloadSession, WithoutADaemonGraphsGetNoMemory) {
  const uint64_t before = UsedOnMachine();
  Program program = Run("dlsym", {{"VRAMBROKER_SOCKET_DIR", "/nowhere"}});
  EXPECT_EQ(program.Ask("stream"), "0");
  EXPECT_EQ(program.Ask("graph 20M"), "2");
  EXPECT_EQ(program.Ask("node_graph 20M 0"), "2");
  EXPECT_EQ(UsedOnMachine(), before);
  EXPECT_THAT(program.ErrorText(), HasSubstr("vrambroker: cannot reach the daemon at /nowhere/vram-count.sock"));
}

TEST_F(PreloadSession, IfAvailableMeansThatAProgramRunsWithoutADaemon) {
  Program program = Run("dlsym", {{"VRAMBROKER_SOCKET_DIR", "/nowhere"}, {"VRAMBROKER_IF_AVAILABLE", "1"}});
  EXPECT_EQ(program.Ask("alloc plain 2M"), "0");
  EXPECT_EQ(program.Ask("alloc handle 2M"), "0");
  EXPECT_EQ(program.Ask("stream"), "0");
  EXPECT_EQ(program.Ask("graph 2M"), "0");
  EXPECT_THAT(program.Ask("info"), StartsWith("0 "));
  EXPECT_THAT(program.ErrorText(), HasSubstr("is not counted: VRAMBROKER_IF_AVAILABLE is set"));
}

// The killed daemon leaves its socket behind.
TEST_F(PreloadSession, ADaemonThatWasKilledIsWaitedFor) {
  StartDaemon("64MiB");
  daemon().Kill();
  Program program = Run("dlsym");
  Program hasty = Run("dlsym", {{"VRAMBROKER_RECONNECT", "200ms"}});
  Program uncounted = Run("dlsym", {{"VRAMBROKER_IF_AVAILABLE", "1"}});
  program.Tell("alloc plain 2M");
  EXPECT_EQ(hasty.Ask("alloc plain 2M"), "2");
  EXPECT_EQ(hasty.Ask("alloc plain 2M"), "2");
  EXPECT_THAT(hasty.ErrorText(), HasSubstr("(Connection refused): is vrambrokerd running? It is waited for\n"));
  EXPECT_EQ(std::vector<std::string>(absl::StrSplit(hasty.ErrorText(), "It is waited for")).size(), 2) << "once";
  EXPECT_EQ(uncounted.Ask("alloc plain 2M"), "0") << "it need not be one that comes back";
  ASSERT_TRUE(daemon().Restart().ok());
  EXPECT_EQ(program.Hear(), "0");
}

// The claim's directory has another path, as in a container. The stopped daemon leaves the claim's sockets behind.
TEST_F(PreloadSession, ADaemonThatStopsIsWaitedForInAClaimsDirectory) {
  StartDaemon("64MiB");
  ASSERT_EQ(
      RunProgram({VramctlProgram(), "claim", "create", "team", "--socket_dir=" + daemon().socket_dir()}).exit_code, 0);
  const std::string directory = MakeTempDir() + "/vrambroker";
  ASSERT_EQ(symlink((daemon().socket_dir() + "/claims/team").c_str(), directory.c_str()), 0);
  ASSERT_TRUE(daemon().Stop().ok());
  Program program = Run("dlsym", {{"VRAMBROKER_SOCKET_DIR", directory}});
  Program hasty = Run("dlsym", {{"VRAMBROKER_SOCKET_DIR", directory}, {"VRAMBROKER_RECONNECT", "200ms"}});
  program.Tell("alloc plain 2M");
  EXPECT_EQ(hasty.Ask("alloc plain 2M"), "2");
  ASSERT_TRUE(daemon().Restart().ok());
  EXPECT_EQ(program.Hear(), "0");
}

TEST_F(PreloadSession, AWrongSettingIsSaid) {
  StartDaemon("64MiB");
  Program program = Run("dlsym", {{"VRAMBROKER_LIMIT", "half"}});
  EXPECT_EQ(program.Ask("alloc plain 2M"), "2");
  EXPECT_THAT(
      program.ErrorText(),
      HasSubstr("VRAMBROKER_LIMIT: 'half' is not a share or a size: it does not begin with a number; write 0.4, 40%"));
}

TEST_F(PreloadSession, ANameThatIsNotAllowedIsChangedAndSaid) {
  StartDaemon("64MiB");
  Program program = Run("dlsym", {{"VRAMBROKER_NAME", "my j\u00f6b"}});
  EXPECT_EQ(program.Ask("alloc plain 2M"), "0");
  EXPECT_EQ(program.Ask("alloc plain 2M"), "0");
  EXPECT_THAT(Sessions(), HasSubstr("my_j_b"));
  EXPECT_EQ(program.ErrorText(),
            "vrambroker: the session is called my_j_b: at most 63 letters, digits and . _ - / : @ are allowed\n");
}

TEST_F(PreloadSession, AmountsAreReadAsPeopleWriteThem) {
  StartDaemon("64MiB");
  for (const auto& [limit, wait] : std::vector<std::pair<const char*, const char*>>{
           {"25%", "10min"}, {"16m", "1h30m"}, {"16MiB", "0"}, {"16 mi", "0.5s"}}) {
    Program program = Run("dlsym", {{"VRAMBROKER_LIMIT", limit}, {"VRAMBROKER_WAIT", wait}});
    EXPECT_EQ(program.Ask("info"), Info(16, 16)) << limit << ' ' << program.ErrorText();
  }
  Program program = Run("dlsym", {{"VRAMBROKER_WAIT", "30"}});
  EXPECT_EQ(program.Ask("alloc plain 2M"), "2");
  EXPECT_THAT(program.ErrorText(),
              HasSubstr("VRAMBROKER_WAIT: '30' is not a duration: its unit is missing; write 30s"));
}

TEST_F(PreloadSession, AGuaranteeIsAskedForAsOthersDo) {
  StartDaemon("64MiB", R"(rules { guarantee { bytes: "32MiB" } limit { fraction: 1 } })");
  Program program = Run("dlsym", {{"VRAMBROKER_GUARANTEE", "25%"}});
  EXPECT_EQ(program.Ask("alloc plain 2M"), "0") << program.ErrorText();
  const nlohmann::json session = nlohmann::json::parse(
      RunProgram({VramctlProgram(), "sessions", "--format=json", "--socket_dir=" + daemon().socket_dir()}).out);
  EXPECT_EQ(session["sessions"][0]["devices"][0]["guarantee_bytes"], uint64_t{16} << 20);

  Program greedy = Run("dlsym", {{"VRAMBROKER_GUARANTEE", "33MiB"}});
  EXPECT_EQ(greedy.Ask("alloc plain 2M"), "2");
  EXPECT_THAT(greedy.ErrorText(), HasSubstr("guarantee: 33.00 MiB of device 0; the policy allows 32.00 MiB"));
  Program wrong = Run("dlsym", {{"VRAMBROKER_GUARANTEE", "much"}});
  EXPECT_EQ(wrong.Ask("alloc plain 2M"), "2");
  EXPECT_THAT(wrong.ErrorText(), HasSubstr("VRAMBROKER_GUARANTEE: 'much' is not a share or a size"));
}

// Devices keep guarantees only for programs naming the device. A program's first device is the daemon's device 1.
TEST_F(PreloadSession, AProgramNamesItsDevices) {
  StartDaemon("64MiB", R"(rules { guarantee { fraction: 0.4 } limit { fraction: 1 } })");
  const auto run = [&](const std::string& devices, const std::string& visible) {
    return Run("dlsym",
               {{"VRAMBROKER_DEVICES", devices}, {"VRAMBROKER_GUARANTEE", "0.4"}, {"CUDA_VISIBLE_DEVICES", visible}});
  };
  Program first = run("1", "0");
  Program second = run("1", "0");
  Program third = run("0", "1");
  for (Program* program : {&first, &second, &third}) {
    EXPECT_EQ(program->Ask("alloc plain 24M"), "0") << program->ErrorText();
  }
  Program other = run("0", "0");
  EXPECT_EQ(other.Ask("alloc plain 2M"), "2");
  EXPECT_THAT(other.ErrorText(), HasSubstr("named other devices: 0"));
  EXPECT_EQ(other.Ask("info"), Info(0, 0));
  for (const auto& [devices, error] :
       {std::pair(std::string("7"), "devices: no device 7; the daemon has 0 ("),
        std::pair(std::string(512, '0'), "VRAMBROKER_DEVICES is longer than 511 bytes")}) {
    Program wrong = run(devices, "0");
    EXPECT_EQ(wrong.Ask("alloc plain 2M"), "2");
    EXPECT_THAT(wrong.ErrorText(), HasSubstr(error));
  }
}

TEST_F(PreloadSession, AFractionIsOfTheCapacity) {
  StartDaemon("64MiB");
  for (const char* limit : {"0.25", "0.25 "}) {
    Program program = Run("dlsym", {{"VRAMBROKER_LIMIT", limit}});
    EXPECT_EQ(program.Ask("info"), Info(16, 16));
  }
}

// The session makes the context's memory known as the program's.
TEST_F(PreloadSession, AContextBeginsTheSession) {
  StartDaemon("64MiB");
  for (const std::string how : {"synchronize" /* uses the primary context */, "own_context"}) {
    Program program = Run("dlsym", {{"VRAMBROKER_NAME", how}});
    EXPECT_EQ(program.Ask(how), "0");
    EXPECT_THAT(Sessions(), HasSubstr(how));
  }
}

TEST_F(PreloadSession, AContextNeedsNoDaemon) {
  Program program = Run("dlsym", {{"VRAMBROKER_SOCKET_DIR", "/nowhere"}});
  EXPECT_EQ(program.Ask("own_context"), "0");
  EXPECT_EQ(program.ErrorText(), "");
}

// A running program joins the next daemon without a request.
TEST_F(PreloadSession, AProgramThatHoldsNothingComesBack) {
  StartDaemon("64MiB");
  Program program = Run("dlsym");
  EXPECT_EQ(program.Ask("own_context"), "0");
  daemon().Kill();
  ASSERT_TRUE(daemon().Restart().ok());
  EXPECT_TRUE(WaitFor([&] { return absl::StrContains(Sessions(), "probe"); }));
}

// --- Several processes ---

TEST_F(PreloadSession, ThreadsAndProcessesRaceAndNoneGetsTooMuch) {
  StartDaemon("64MiB");
  const uint64_t before = UsedOnMachine();
  std::vector<Program> programs;
  for (int i = 0; i < 3; ++i) programs.push_back(Run(i == 0 ? "linked" : "proc2"));
  for (Program& program : programs) program.Tell("race 8 20 2M");
  int done = 0;
  for (Program& program : programs) {
    int each = 0;
    const std::vector<std::string> words = absl::StrSplit(program.Hear(), ' ');
    ASSERT_EQ(words.size(), 2);
    ASSERT_TRUE(absl::SimpleAtoi(words[1], &each));
    done += each;
  }
  EXPECT_EQ(done, 32);
  EXPECT_EQ(UsedOnMachine() - before, 64 * kMiB);
}

// The daemon restarts meanwhile.
TEST_F(PreloadSession, WhatThreadsAllocateAndFreeAtRandomAddsUp) {
  StartDaemon("64MiB");
  const uint64_t before = UsedOnMachine();
  std::vector<Program> programs;
  for (int i = 0; i < 3; ++i) programs.push_back(Run("dlsym"));
  for (Program& program : programs) program.Tell("churn 6 3000 3M");
  daemon().Kill();
  ASSERT_TRUE(daemon().Restart().ok());
  for (Program& program : programs) EXPECT_EQ(program.Hear(), "0 0");
  for (Program& program : programs) {
    EXPECT_TRUE(WaitFor([&] { return program.Ask("info") == Info(64, 64); })) << program.Ask("info");
  }
  EXPECT_EQ(UsedOnMachine(), before);
  EXPECT_TRUE(WaitFor([&] { return programs[0].Ask("alloc plain 64M") == "0"; })) << "no slack is kept for long";
}

// A stop within a call would make all other programs wait, unlike on a GPU.
TEST_F(PreloadSession, AProgramIsStoppedOutsideOfTheSubstitutesCalls) {
  Program program = Run("dlsym", {{"LD_PRELOAD", ""}});
  const auto is_in_a_call = [&] { return cuda_substitute::HoldsLock(machine(), program.process().pid()); };
  program.Tell("churn 2 1000000000 1M");
  for (int i = 0; i < 20; ++i) {
    ASSERT_TRUE(WaitFor(is_in_a_call));
    program.process().Signal(SIGSTOP);
    ASSERT_FALSE(is_in_a_call());
    program.process().Signal(SIGCONT);
  }
}

TEST_F(PreloadSession, AKilledProgramGivesEverythingBack) {
  StartDaemon("64MiB");
  Program one = Run("dlsym");
  EXPECT_EQ(one.Ask("alloc plain 60M"), "0");
  Program other = Run("dlsym");
  EXPECT_EQ(other.Ask("alloc plain 60M"), "2");
  one.process().Signal(SIGKILL);
  EXPECT_TRUE(WaitFor([&] { return other.Ask("alloc plain 60M") == "0"; }));
}

TEST_F(PreloadSession, AProgramWaitsUntilAnotherEnds) {
  StartDaemon("64MiB");
  Program one = Run("dlsym");
  EXPECT_EQ(one.Ask("alloc plain 60M"), "0");
  Program other = Run("dlsym", {{"VRAMBROKER_WAIT", "10m"}});
  EXPECT_EQ(other.Ask("alloc plain 2M"), "0");
  other.Tell("alloc plain 60M");
  EXPECT_EQ(one.Ask("alloc plain 4M"), "2") << "it is not passed by";
  one.process().Signal(SIGKILL);
  EXPECT_EQ(other.Hear(), "0");
}

TEST_F(PreloadSession, APoolWaitsUntilAnotherProgramEnds) {
  StartDaemon("64MiB");
  Program one = Run("dlsym");
  EXPECT_EQ(one.Ask("alloc plain 60M"), "0");
  Program other = Run("dlsym", {{"VRAMBROKER_WAIT", "10m"}});
  EXPECT_EQ(other.Ask("stream"), "0");
  other.Tell("alloc async 20M");
  one.process().Signal(SIGKILL);
  EXPECT_EQ(other.Hear(), "0");
}

// Cached memory comes back even for a program without a wait.
TEST_F(PreloadSession, OthersGiveBackWhatTheyOnlyCache) {
  StartDaemon("64MiB");
  absl::StatusOr<ClientProcess> cache = ClientProcess::Connect(daemon().socket_dir(), "cache");
  ASSERT_TRUE(cache.ok()) << cache.status();
  ASSERT_TRUE(cache->Call(absl::StrCat("alloc ", 60 * kMiB)).ok());
  Program program = Run("dlsym", {{"CUDA_VISIBLE_DEVICES", "1"}});  // daemon's first device, also the client's device
  EXPECT_EQ(program.Ask("alloc plain 40M"), "2") << "it is in use";
  ASSERT_TRUE(cache->Call("free 0").ok());
  EXPECT_EQ(program.Ask("alloc plain 40M"), "0");
}

TEST_F(PreloadSession, AWaitEnds) {
  StartDaemon("64MiB");
  Program one = Run("dlsym");
  EXPECT_EQ(one.Ask("alloc plain 60M"), "0");
  Program other = Run("dlsym", {{"VRAMBROKER_WAIT", "50ms"}});
  EXPECT_EQ(other.Ask("alloc plain 60M"), "2");
}

// --- Children ---

TEST_F(PreloadSession, AChildIsASessionOfItsOwn) {
  StartDaemon("64MiB");
  for (const std::string how : {"fork", "clone"}) {
    Program program = Run("dlsym", {{"VRAMBROKER_LIMIT", "16MiB"}});
    // The parent has a session, but has not used the GPU. After the parent's use, a child could not use the GPU.
    EXPECT_THAT(program.Ask("nvml 1"), StartsWith("0 "));
    EXPECT_EQ(program.Ask(how + " alloc plain 16M"), "0");
    EXPECT_EQ(program.Ask(how + " alloc plain 18M"), "2");
    EXPECT_EQ(program.Ask("alloc plain 16M"), "0");
    EXPECT_EQ(program.Ask("info"), Info(0, 16));
    EXPECT_EQ(program.Ask(how + " nvml 1"), absl::StrCat("0 ", 16 * kMiB, " 0 ", 16 * kMiB));
  }
}

TEST_F(PreloadSession, AnotherProgramInTheSameProcessBeginsAnew) {
  StartDaemon("64MiB");
  Program program = Run("dlsym", {{"VRAMBROKER_LIMIT", "16MiB"}});
  EXPECT_EQ(program.Ask("alloc plain 16M"), "0");
  program.Tell("exec");
  EXPECT_EQ(program.Ask("info"), Info(16, 16));
  EXPECT_EQ(program.Ask("alloc plain 16M"), "0");
}

// The next program may never use the GPU, and so never report its state.
TEST_F(PreloadSession, AnotherProgramInTheSameProcessIsNotChargedForTheFirstOne) {
  StartDaemon("64MiB");
  Program program = Run("dlsym");
  Program other = Run("dlsym");
  EXPECT_EQ(program.Ask("alloc plain 60M"), "0");
  EXPECT_EQ(other.Ask("alloc plain 8M"), "2");
  program.Tell("exec /bin/sleep 1000");
  EXPECT_TRUE(WaitFor([&] { return other.Ask("alloc plain 60M") == "0"; })) << Sessions();
  EXPECT_TRUE(program.process().Running());
}

// --- Actions of programs and daemons ---

TEST_F(PreloadSession, AProgramThatClosesAllDescriptorsIsCountedFurther) {
  StartDaemon("64MiB");
  Program program = Run("dlsym", {{"VRAMBROKER_LIMIT", "16MiB"}});
  EXPECT_EQ(program.Ask("alloc plain 8M"), "0");
  EXPECT_EQ(program.Ask("close_all"), "0");
  EXPECT_EQ(program.Ask("free 0"), "0");
  EXPECT_EQ(program.Ask("alloc plain 16M"), "0");
  EXPECT_EQ(program.Ask("alloc plain 2M"), "2");
  EXPECT_EQ(program.Ask("info"), Info(0, 16));
  EXPECT_EQ(program.Ask("heard"), "0 0") << "the program's own sockets get nothing of the library's";
}

TEST_F(PreloadSession, ADaemonThatIsStartedAgainLearnsWhatIsHeld) {
  StartDaemon("64MiB");
  Program program = Run("dlsym", {{"VRAMBROKER_LIMIT", "32MiB"}});
  EXPECT_EQ(program.Ask("alloc plain 8M"), "0");
  EXPECT_EQ(program.Ask("alloc plain 20M"), "0");
  daemon().Kill();
  EXPECT_EQ(program.Ask("free 0"), "0") << "needs no daemon";
  program.Tell("alloc plain 14M");  // waits for a daemon
  ASSERT_TRUE(daemon().Restart().ok());
  EXPECT_EQ(program.Hear(), "2");
  EXPECT_EQ(program.Ask("info"), Info(12, 32));
  EXPECT_EQ(program.Ask("alloc plain 12M"), "0");
  EXPECT_EQ(program.Ask("info"), Info(0, 32));
}

// The program makes no request meanwhile. The library tells the new daemon about the memory by itself.
TEST_F(PreloadSession, AnIdleProgramTellsANewDaemonWhatItHolds) {
  StartDaemon("64MiB");
  Program program = Run("dlsym");
  EXPECT_EQ(program.Ask("alloc plain 60M"), "0");
  daemon().Kill();
  ASSERT_TRUE(daemon().Restart().ok());
  EXPECT_TRUE(WaitFor([&] { return program.ErrorText().find("the daemon is back") != std::string::npos; }));
  EXPECT_EQ(program.Ask("info"), Info(4, 64));
  EXPECT_EQ(program.Ask("alloc plain 6M"), "2");
  Program other = Run("dlsym");
  EXPECT_EQ(other.Ask("alloc plain 6M"), "2") << "it is a part of the capacity";
  EXPECT_EQ(other.Ask("alloc plain 4M"), "0");
}

TEST_F(PreloadSession, AnAllocationWaitsForADaemonOnlyAsLongAsItIsTold) {
  StartDaemon("64MiB");
  Program program = Run("dlsym", {{"VRAMBROKER_RECONNECT", "10ms"}});
  EXPECT_EQ(program.Ask("alloc plain 8M"), "0");
  daemon().Kill();
  EXPECT_EQ(program.Ask("alloc plain 8M"), "2");
  EXPECT_THAT(program.ErrorText(), HasSubstr("cannot reach the daemon"));
}

}  // namespace
}  // namespace vrambroker::testing_support
