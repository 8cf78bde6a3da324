// SPDX-License-Identifier: Apache-2.0
//
// vramctl run with the library: the limit of a tree of processes, waits, figures, and the end of a claim with its
// program.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <csignal>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "tests/preload/preload_fixture.h"
#include "tests/support/thread_state.h"
#include "tests/support/util.h"

namespace vrambroker::testing_support {
namespace {

using ::testing::HasSubstr;

class PreloadRun : public PreloadTest {
 protected:
  using Json = nlohmann::json;
  static constexpr int kDevice = 1;  // number of a program's first device in the daemon

  // Returns a program's environment without the library, because vramctl finds the library.
  Environment Plain() const {
    Environment environment = Preloaded();
    std::erase_if(environment, [](const auto& variable) { return variable.first == "LD_PRELOAD"; });
    return environment;
  }
  static std::string Probe() { return absl::StrCat(paths::kPreloadProbe, " dlsym"); }
  // Runs a shell script in a claim.
  Program RunScript(const Arguments& flags, const std::string& script) const {
    Arguments command = {VramctlProgram(), "run"};
    command.insert(command.end(), flags.begin(), flags.end());
    command.insert(command.end(), {"--", "/bin/sh", "-c", script});
    return Program(ChildProcess::Start(command, Plain()).value());
  }
  Json Ctl(Arguments arguments) const {
    arguments.insert(arguments.begin(), VramctlProgram());
    arguments.push_back("--format=json");
    const RunResult result = RunProgram(arguments, Plain());
    EXPECT_EQ(result.exit_code, 0) << result.err;
    return Json::parse(result.out, nullptr, /*allow_exceptions=*/false);
  }
};

TEST_F(PreloadRun, ItsProcessesShareOneLimitAndSeeIt) {
  StartDaemon("64MiB");
  // The first probe ends after three lines. A second probe runs after the first probe's allocation.
  const std::string script =
      absl::StrCat("sed -u 3q | ", Probe(), " | while read -r line; do echo \"$line\"; [ \"$line\" != 0 ] || ",
                   "printf 'alloc plain 16M\\nalloc plain 8M\\n' | ", Probe(), "; done");
  Program program = RunScript({"--limit=24MiB", "--name=server", "--report"}, script);
  EXPECT_EQ(program.Ask("info"), Info(24, 24)) << "before anything is charged";
  EXPECT_EQ(program.Ask("alloc plain 16M"), "0");
  EXPECT_EQ(program.Hear(), "2") << "the second has what the first leaves";
  EXPECT_EQ(program.Hear(), "0");
  const Json claim = Ctl({"claim", "ls"})["claims"][0];
  EXPECT_EQ(claim["devices"][kDevice]["peak_bytes"], 24 * kMiB) << claim;
  EXPECT_THAT(Ctl({"sessions"})["sessions"][0]["name"].get<std::string>(), HasSubstr("server"));
  program.Tell("info");
  EXPECT_THAT(program.Hear(), HasSubstr("0 "));
  EXPECT_EQ(program.process().Wait().value_or(-1), 0);
  EXPECT_THAT(program.ErrorText(), HasSubstr("vramctl: device 1: peak 24.00 MiB of 24.00 MiB"));
  EXPECT_THAT(program.ErrorText(), HasSubstr("vramctl: 1 request refused"));
  EXPECT_TRUE(WaitFor([&] { return Ctl({"claim", "ls"})["claims"].empty(); }));
}

TEST_F(PreloadRun, AProgramWaitsForAnotherAndTheReportSaysSo) {
  StartDaemon("64MiB");
  Program first = RunScript({}, "exec " + Probe());
  EXPECT_EQ(first.Ask("alloc plain 60M"), "0");
  Program second = RunScript({"--wait=10m", "--report", "--format=json"}, "sed -u 1q | " + Probe());
  second.Tell("alloc plain 32M");
  EXPECT_TRUE(WaitFor([&] {
    const Json claims = Ctl({"claim", "ls"})["claims"];
    for (const Json& claim : claims) {
      if (claim["devices"][kDevice]["waiting"] == 1) return true;
    }
    return false;
  }));
  first.process().Signal(SIGTERM);
  EXPECT_EQ(first.process().Wait().value_or(-1), 128 + SIGTERM);
  EXPECT_EQ(second.Hear(), "0");
  EXPECT_EQ(second.process().Wait().value_or(-1), 0);
  const Json report = Json::parse(second.ErrorText(), nullptr, /*allow_exceptions=*/false)["report"];
  EXPECT_EQ(report["devices"][kDevice]["waits"], 1) << report;
  EXPECT_EQ(report["devices"][kDevice]["peak_bytes"], 32 * kMiB);
  EXPECT_EQ(report["refusals"], 0);
}

TEST_F(PreloadRun, TwoProgramsInOneClaimShareItsLimit) {
  StartDaemon("64MiB");
  ASSERT_EQ(RunProgram({VramctlProgram(), "claim", "create", "team", "--limit=32MiB"}, Plain()).exit_code, 0);
  Program first = RunScript({"--claim=team"}, "exec " + Probe());
  Program second = RunScript({"--claim=team", "--limit=8MiB"}, "exec " + Probe());
  EXPECT_EQ(first.Ask("alloc plain 20M"), "0");
  EXPECT_EQ(second.Ask("alloc plain 10M"), "2") << "its own limit";
  EXPECT_EQ(second.Ask("alloc plain 8M"), "0");
  EXPECT_EQ(first.Ask("alloc plain 6M"), "2");
  EXPECT_EQ(first.Ask("alloc plain 4M"), "0");
}

// A program still unknown to the new daemon holds most of the claim's limit.
TEST_F(PreloadRun, ARestartedDaemonGivesNobodyWhatOthersHold) {
  StartDaemon("64MiB");
  ASSERT_EQ(RunProgram({VramctlProgram(), "claim", "create", "team", "--limit=40MiB"}, Plain()).exit_code, 0);
  Program holder = RunScript({"--claim=team"}, "exec " + Probe());
  Program other = RunScript({"--claim=team"}, "exec " + Probe());
  EXPECT_EQ(holder.Ask("alloc plain 30M"), "0");
  EXPECT_EQ(other.Ask("alloc plain 2M"), "0");
  int pid = 0;
  ASSERT_TRUE(absl::SimpleAtoi(absl::StripPrefix(holder.Ask("getpid"), "0 "), &pid));
  kill(pid, SIGSTOP);
  daemon().Kill();
  other.Tell("alloc plain 20M");
  ASSERT_TRUE(daemon().Restart().ok());
  // Reads the log, and starts no program: the daemon awaits known sessions only for a time.
  EXPECT_TRUE(WaitFor([&] { return absl::StrContains(daemon().log(), "session opened"); })) << "it comes, and waits";
  kill(pid, SIGCONT);
  EXPECT_EQ(other.Hear(), "2");
  EXPECT_EQ(other.Ask("alloc plain 8M"), "0");
  EXPECT_EQ(holder.Ask("alloc plain 2M"), "2");
}

// The daemon still counts the program, and gives the program's memory to no other program.
TEST_F(PreloadRun, AfterAKillOfVramctlTheProgramIsCountedUntilItEnds) {
  StartDaemon("64MiB");
  Program program = RunScript({"--limit=24MiB"}, Probe() + "; true");
  EXPECT_EQ(program.Ask("alloc plain 8M"), "0");
  kill(program.process().pid(), SIGKILL);
  (void)program.process().Wait();
  EXPECT_EQ(program.Ask("alloc plain 20M"), "2");
  EXPECT_EQ(program.Ask("alloc plain 16M"), "0");
  EXPECT_EQ(Ctl({"claim", "ls"})["claims"].size(), 1u);
  const Json session = Ctl({"sessions"})["sessions"][0];
  kill(session["pid"].get<int>(), SIGKILL);
  EXPECT_TRUE(WaitFor([&] { return Ctl({"claim", "ls"})["claims"].empty(); }));
}

// The program first uses the GPU while the daemon is away. The limit still holds, and no error occurs.
TEST_F(PreloadRun, AProgramThatBeginsWhileTheDaemonStartsAgainWaitsForIt) {
  for (const Arguments& flags : std::vector<Arguments>{{"--limit=8MiB"}, {"--limit=8MiB", "--if-available"}}) {
    StartDaemon("64MiB");
    Program program = RunScript(flags, "echo ready; read line; exec " + Probe());
    EXPECT_EQ(program.Hear(), "ready");
    daemon().Kill();
    program.Tell("go\ngetpid\nalloc plain 4M");
    const std::string pid(absl::StripPrefix(program.Hear(), "0 "));
    // The program allocates next. Then the program sleeps, waiting for the daemon or for the next command.
    EXPECT_TRUE(WaitFor([&] { return StateOfThread(pid, pid) == 'S'; }));
    ASSERT_TRUE(daemon().Restart().ok());
    EXPECT_EQ(program.Hear(), "0") << program.ErrorText();
    EXPECT_EQ(program.Ask("alloc plain 8M"), "2");
    EXPECT_EQ(program.ErrorText().find("not counted"), std::string::npos) << program.ErrorText();
  }
}

TEST_F(PreloadRun, WhatAProgramLeavesBehindHasNoClaimAnyMoreAndIsToldSo) {
  StartDaemon("64MiB");
  Program program = RunScript({"--limit=8MiB", "--if-available"},
                              absl::StrCat("exec 3<&0; { read line <&3; exec ", Probe(), " <&3; } & exit 0"));
  EXPECT_EQ(program.process().Wait().value_or(-1), 0);
  EXPECT_TRUE(WaitFor([&] { return Ctl({"claim", "ls"})["claims"].empty(); }));
  program.Tell("go");
  EXPECT_EQ(program.Ask("alloc plain 4M"), "2");
  EXPECT_THAT(program.ErrorText(), HasSubstr("is no more: vramctl claim ls shows"));
}

TEST_F(PreloadRun, ItUsesTheDevicesOfItsClaimAndThoseThatItNames) {
  StartDaemon("64MiB");
  for (const char* device : {"--device=0", "--device=1"}) {
    Program program = RunScript({device, "--limit=24MiB"}, "exec " + Probe());
    EXPECT_EQ(program.Ask("info"), Info(24, 24)) << device;
  }
  for (const char* device : {"--device=0", "--device=1"}) {
    Program program = RunScript({device, device, "--limit=24MiB", "--per-process"}, "exec " + Probe());
    EXPECT_EQ(program.Ask("info"), Info(24, 24)) << device;
  }
  // A program choosing other devices is refused, with a reason: the daemon's device 0 is the program's second device.
  Program named = RunScript({"--device=0", "--per-process"}, "CUDA_VISIBLE_DEVICES=0 exec " + Probe());
  EXPECT_EQ(named.Ask("alloc plain 4M"), "2");
  EXPECT_THAT(named.ErrorText(), HasSubstr("named other devices: 0"));
  Program other = RunScript({"--device=0", "--limit=24MiB"}, "CUDA_VISIBLE_DEVICES=0 exec " + Probe());
  EXPECT_EQ(other.Ask("alloc plain 4M"), "2");
  EXPECT_THAT(other.ErrorText(), HasSubstr("has nothing of this device"));
  EXPECT_THAT(other.ErrorText(), HasSubstr("Use a device that it has (vramctl claim show "));
}

TEST_F(PreloadRun, WithoutADaemonItRunsIfThatIsWanted) {
  StartDaemon("64MiB");
  ASSERT_TRUE(daemon().Stop().ok());
  Program program = RunScript({"--if-available", "--limit=8MiB"}, "exec " + Probe());
  EXPECT_EQ(program.Ask("alloc plain 20M"), "0");
  EXPECT_THAT(program.ErrorText(), HasSubstr("the program runs without it"));
}

}  // namespace
}  // namespace vrambroker::testing_support
