// SPDX-License-Identifier: Apache-2.0
//
// vramctl run: environment of the program, signals and exit codes passed through, and the claim that ends with the
// program.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "allocator/base/bytes.h"
#include "tests/support/any_library.h"
#include "tests/support/test_device.h"
#include "tests/support/util.h"
#include "tests/support/vramctl_test.h"

namespace vrambroker::testing_support {
namespace {

using absl::StatusCode;
using ::testing::HasSubstr;
using ::testing::Not;

class RunTest : public VramctlDaemonTest {
 protected:
  void Begin(DaemonOptions options = {}) { ASSERT_OK(StartDaemon(options)); }

  Arguments RunCommand(const Arguments& flags, const Arguments& program) const {
    Arguments command = {VramctlProgram(), "run", "--socket-dir=" + dir()};
    command.insert(command.end(), flags.begin(), flags.end());
    command.push_back("--");
    command.insert(command.end(), program.begin(), program.end());
    return command;
  }
  RunResult Run(const Arguments& flags, const Arguments& program, const Environment& environment = {}) const {
    return RunProgram(RunCommand(flags, program), environment_ + environment);
  }
  RunResult RunShell(const Arguments& flags, const std::string& script, const Environment& environment = {}) const {
    return Run(flags, {"/bin/sh", "-c", script}, environment);
  }
  absl::StatusOr<std::unique_ptr<ChildProcess>> StartShell(const std::string& script,
                                                           const Arguments& flags = {}) const {
    return ChildProcess::Start(RunCommand(flags, {"/bin/sh", "-c", script}), environment_.all);
  }
  size_t Claims() { return CtlJson({"claim", "ls"})["claims"].size(); }

  struct Variables {
    Environment all;
    Environment operator+(const Environment& more) const {
      Environment sum = all;
      sum.insert(sum.end(), more.begin(), more.end());
      return sum;
    }
  };
  const Variables environment_{{{"VRAMBROKER_PRELOAD", AnyLibrary()}}};
};

TEST_F(RunTest, ItsProgramHasAClaimOfItsOwn) {
  ASSERT_NO_FATAL_FAILURE(Begin());
  const RunResult result =
      RunShell({"--limit=0.25", "--guarantee=16MiB", "--wait=1.5s", "--name=server", "--managed=refuse"},
               absl::StrCat("printenv VRAMBROKER_SOCKET_DIR VRAMBROKER_WAIT VRAMBROKER_NAME VRAMBROKER_MANAGED "
                            "LD_PRELOAD && printenv VRAMBROKER_LIMIT; ",
                            VramctlProgram(), " claim ls --format=json --socket-dir=", dir()),
               {{"VRAMBROKER_LIMIT", "0.1"}, {"LD_PRELOAD", "/nowhere.so"}});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  const std::vector<std::string> lines = absl::StrSplit(result.out, absl::MaxSplits('\n', 5));
  ASSERT_EQ(lines.size(), 6u) << result.out;
  EXPECT_THAT(lines[0], HasSubstr(absl::StrCat(dir(), "/claims/u", geteuid(), ".run-")));
  EXPECT_EQ(lines[1], "1500ms");
  EXPECT_EQ(lines[2], "server");
  EXPECT_EQ(lines[3], "refuse");
  EXPECT_EQ(lines[4], AnyLibrary() + ":/nowhere.so");
  const Json claim = Json::parse(lines[5])["claims"][0];  // VRAMBROKER_LIMIT is unset and printed no line
  EXPECT_EQ(claim["socket_dir"], lines[0]);
  EXPECT_EQ(claim["devices"][0]["limit_bytes"], 64_MiB);
  EXPECT_EQ(claim["devices"][0]["guarantee_bytes"], 16_MiB);
  EXPECT_EQ(claim["maker_pid"].get<int>() > 0, true);
  EXPECT_EQ(Claims(), 0u);
}

TEST_F(RunTest, AmountsAndNamesAreReadAsPeopleWriteThem) {
  ASSERT_NO_FATAL_FAILURE(Begin());
  const RunResult result = RunShell({"--limit=25%", "--wait=10min", "--name=my serv\u00e9r"},
                                    absl::StrCat("printenv VRAMBROKER_WAIT VRAMBROKER_NAME; ", VramctlProgram(),
                                                 " claim ls --format=json --socket-dir=", dir()));
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_TRUE(absl::EndsWith(
      result.err, "vramctl: the session is called my_serv_r: at most 63 letters, digits and . _ - / : @ are allowed\n"))
      << result.err;
  const std::vector<std::string> lines = absl::StrSplit(result.out, absl::MaxSplits('\n', 2));
  ASSERT_EQ(lines.size(), 3u) << result.out;
  EXPECT_EQ(lines[0], "600000ms");
  EXPECT_EQ(lines[1], "my_serv_r");
  EXPECT_EQ(Json::parse(lines[2])["claims"][0]["devices"][0]["limit_bytes"], 64_MiB);
}

// The claim has the limit and the guarantee. Sessions in the claim ask for neither.
TEST_F(RunTest, AProgramWithTheLibraryUsesTheClaimAlone) {
  ASSERT_NO_FATAL_FAILURE(Begin());
  ASSERT_OK_AND_ASSIGN(
      const auto running,
      ChildProcess::Start(RunCommand({"--limit=64MiB", "--guarantee=8MiB", "--name=mine"},
                                     {VramctlProgram(), "hold", "1MiB", "--format=json"}),
                          environment_ + Environment{{"VRAMBROKER_LIMIT", "4MiB"}, {"VRAMBROKER_GUARANTEE", "2MiB"}}));
  ASSERT_OK_AND_ASSIGN(const std::string line, running->ReadLine());
  EXPECT_EQ(Json::parse(line)["name"], "mine");
  EXPECT_EQ(Json::parse(line)["limit_bytes"], 64_MiB);
  const Json session = CtlJson({"sessions"})["sessions"][0];
  EXPECT_EQ(session["devices"][0]["guarantee_bytes"], 0);
  running->Signal(SIGTERM);
  ASSERT_OK_AND_ASSIGN(const int exit_code, running->Wait());
  EXPECT_EQ(exit_code, 0);
}

TEST_F(RunTest, AGuaranteeOfTheEnvironmentDoesNotCountInAClaim) {
  ASSERT_NO_FATAL_FAILURE(Begin());
  const auto run = [&](const Arguments& flags) {
    return RunProgram(RunCommand(flags, {"/bin/sh", "-c", "printenv VRAMBROKER_GUARANTEE"}),
                      environment_ + Environment{{"VRAMBROKER_GUARANTEE", "2MiB"}});
  };
  RunResult result = run({});
  EXPECT_EQ(result.out, "");
  EXPECT_THAT(result.err,
              HasSubstr("VRAMBROKER_GUARANTEE does not count in a claim, which may have one (--guarantee)\n"));
  result = run({"--guarantee=8MiB"});
  EXPECT_EQ(result.out, "");
  EXPECT_THAT(result.err, Not(HasSubstr("VRAMBROKER_GUARANTEE")));
  result = run({"--per-process"});
  EXPECT_EQ(result.out, "2MiB\n") << "each process has its own";
}

TEST_F(RunTest, DevicesAreTheClaimsOrNamedByEachProcess) {
  ASSERT_NO_FATAL_FAILURE(Begin());
  const auto named = [&](const Arguments& flags) {
    return RunShell(flags, "printenv VRAMBROKER_DEVICES", {{"VRAMBROKER_DEVICES", "5"}}).out;
  };
  EXPECT_EQ(named({"--device=0"}), "");
  EXPECT_EQ(named({"--device=0", "--device=1", "--per-process"}), "0,1\n");
  EXPECT_EQ(named({}), "5\n");
}

TEST_F(RunTest, SessionsOfItsProcessesShareTheLimit) {
  ASSERT_NO_FATAL_FAILURE(Begin());
  ASSERT_OK_AND_ASSIGN(const auto running, StartShell("echo $VRAMBROKER_SOCKET_DIR; read line", {"--limit=64MiB"}));
  ASSERT_OK_AND_ASSIGN(const std::string in, running->ReadLine());
  ASSERT_OK_AND_ASSIGN(ClientProcess first, ClientProcess::Connect(in, "first"));
  ASSERT_OK_AND_ASSIGN(ClientProcess second, ClientProcess::Connect(in, "second"));
  ASSERT_OK(first.Call(absl::StrCat("alloc ", 40_MiB)));
  EXPECT_STATUS(second.Call(absl::StrCat("alloc ", 40_MiB)), StatusCode::kResourceExhausted, "the sessions of claim ");
  // Sessions living on in the background keep the claim.
  ASSERT_OK(running->WriteLine("end"));
  ASSERT_OK_AND_ASSIGN(const int exit_code, running->Wait());
  EXPECT_EQ(exit_code, 0);
  EXPECT_EQ(CtlJson({"claim", "ls"})["claims"][0]["state"], "draining");
  EXPECT_OK(first.Call(absl::StrCat("alloc ", 2_MiB)));
  ASSERT_OK(first.Call("goodbye"));
  ASSERT_OK(second.Call("goodbye"));
  EXPECT_TRUE(WaitFor([&] { return Claims() == 0; }));
}

// Paths are absolute: a container may have the daemon's directory elsewhere, and programs may change their own
// directory.
TEST_F(RunTest, TheProgramReachesTheDaemonAsVramctlDoes) {
  ASSERT_NO_FATAL_FAILURE(Begin());
  const std::string here = MakeTempDir();
  ASSERT_EQ(symlink(dir().c_str(), (here + "/there").c_str()), 0);
  const std::string run = absl::StrCat("cd ", here, " && ", VramctlProgram(), " run --socket-dir=there");
  const auto directory = [&](const std::string& flags) {
    return RunProgram({"/bin/sh", "-c", absl::StrCat(run, flags, " -- printenv VRAMBROKER_SOCKET_DIR")},
                      environment_.all)
        .out;
  };
  EXPECT_THAT(directory(""), HasSubstr(absl::StrCat(here, "/there/claims/u", geteuid(), ".run-")));
  EXPECT_EQ(directory(" --per-process"), here + "/there\n");
  daemon_->Kill();
  EXPECT_EQ(directory(" --if-available"), here + "/there\n");
}

TEST_F(RunTest, TheLibraryUnderstandsEachLimit) {
  ASSERT_NO_FATAL_FAILURE(Begin());
  const std::map<std::string, std::string> limits = {
      {"50%", "0.5"}, {" 8MiB", "8388608B"}, {"1.0", "1.0"}, {"0.0625", "0.0625"}, {"1.5GiB", "1610612736B"}};
  for (const auto& [given, read] : limits) {
    const RunResult result = RunShell({"--per-process", "--limit=" + given}, "printenv VRAMBROKER_LIMIT");
    EXPECT_EQ(result.out, read + "\n") << given << result.err;
  }
}

TEST_F(RunTest, AClaimThatIsThereIsJoinedAndStays) {
  ASSERT_NO_FATAL_FAILURE(Begin());
  ASSERT_EQ(Ctl({"claim", "create", "team", "--limit=64MiB"}).exit_code, 0);
  const RunResult result = RunShell({"--claim=team", "--limit=0.1"}, "printenv VRAMBROKER_SOCKET_DIR VRAMBROKER_LIMIT");
  EXPECT_EQ(result.out, absl::StrCat(dir(), "/claims/team\n0.1\n")) << result.err;
  EXPECT_EQ(Claims(), 1u);
  const RunResult other = RunShell({"--claim=other"}, "echo never");
  EXPECT_EQ(other.exit_code, 125);
  EXPECT_EQ(other.out, "");
  EXPECT_THAT(other.err, HasSubstr("no claim is named 'other'"));
}

TEST_F(RunTest, WithoutAClaimTheLimitIsEachProcesss) {
  ASSERT_NO_FATAL_FAILURE(Begin());
  const RunResult result =
      RunShell({"--per-process", "--limit=8MiB"}, "printenv VRAMBROKER_SOCKET_DIR VRAMBROKER_LIMIT");
  EXPECT_EQ(result.out, absl::StrCat(dir(), "\n8388608B\n")) << result.err;
}

TEST_F(RunTest, ItIsTransparent) {
  ASSERT_NO_FATAL_FAILURE(Begin());
  // Arguments that look like options of vramctl or like lists, and empty arguments.
  const RunResult words = Run({}, {"printf", "%s|", "--limit", "2", "[a,b]", "", "--", "--help", "-o"});
  EXPECT_EQ(words.out, "--limit|2|[a,b]||--|--help|-o|") << words.err;
  EXPECT_EQ(words.exit_code, 0);
  // vramctl writes a line if the daemon serves no GPU whose use could be counted.
  const std::string said = OnCuda() ? ""
                                    : "vramctl: the daemon serves no GPU: of what the program allocates, only what "
                                      "it asks the daemon for is counted\n";
  EXPECT_EQ(words.err, said);
  EXPECT_EQ(RunShell({}, "exit 3").exit_code, 3);
  EXPECT_EQ(RunShell({}, "echo out; echo err >&2; exit 1").err, said + "err\n");
  EXPECT_EQ(RunShell({}, "echo out; echo err >&2; exit 1").out, "out\n");
  EXPECT_EQ(RunShell({}, "kill -TERM $$").exit_code, 128 + SIGTERM);
  EXPECT_EQ(RunShell({}, "kill -KILL $$").exit_code, 128 + SIGKILL);
  // vramctl passes no descriptor to the program.
  const std::string list = "ls /proc/self/fd | tr '\\n' ' '";
  EXPECT_EQ(RunShell({}, list).out, RunProgram({"/bin/sh", "-c", list}).out);
  // vramctl passes no signal mask and no ignored signals either.
  const std::string signals = "grep -E '^Sig(Blk|Ign)' /proc/self/status";
  EXPECT_EQ(RunShell({}, signals).out, RunProgram({"/bin/sh", "-c", signals}).out);
  const std::string ignoring =
      absl::StrCat("trap '' INT CHLD TERM; exec ",
                   absl::StrJoin(RunCommand({}, {"grep", "-E", "^SigIgn", "/proc/self/status"}), " "));
  EXPECT_EQ(RunProgram({"/bin/sh", "-c", ignoring}, environment_.all).out,
            RunProgram({"/bin/sh", "-c", "trap '' INT CHLD TERM; exec grep -E ^SigIgn /proc/self/status"}).out);
  ASSERT_OK_AND_ASSIGN(const auto reader, StartShell("read line; echo got $line"));
  ASSERT_OK(reader->WriteLine("this"));
  EXPECT_EQ(reader->ReadLine().value_or(""), "got this");
}

TEST_F(RunTest, ProgramsAreFoundAsShellsFindThem) {
  ASSERT_NO_FATAL_FAILURE(Begin());
  const std::string folder = MakeTempDir();
  std::ofstream(folder + "/plain") << "echo plain $1\n";
  std::ofstream(folder + "/closed") << "echo never\n";
  std::filesystem::permissions(folder + "/plain", std::filesystem::perms(0755));
  const Environment path = {{"PATH", folder + ":/usr/bin:/bin"}};
  EXPECT_EQ(Run({}, {"plain", "one"}, path).out, "plain one\n") << "a script of the shell's, without #!";
  const RunResult missing = Run({}, {"no-such-program"}, path);
  EXPECT_EQ(missing.exit_code, 127);
  EXPECT_THAT(missing.err, HasSubstr("no-such-program: there is no such program in $PATH"));
  EXPECT_EQ(Run({}, {folder + "/missing"}).exit_code, 127);
  EXPECT_EQ(Run({}, {"closed"}, path).exit_code, 126);
  const RunResult closed = Run({}, {folder + "/closed"});
  EXPECT_EQ(closed.exit_code, 126);
  EXPECT_THAT(closed.err, HasSubstr("closed: Permission denied"));
  EXPECT_EQ(Run({}, {folder}).exit_code, 126);
  EXPECT_EQ(Claims(), 0u);
}

TEST_F(RunTest, WhatALibraryCannotBeLoadedIntoIsSaid) {
  ASSERT_NO_FATAL_FAILURE(Begin());
  const std::string folder = MakeTempDir();
  // An ELF file without a program header has no interpreter.
  std::ifstream shell("/bin/sh", std::ios::binary);
  std::string elf(64, '\0');
  shell.read(elf.data(), static_cast<std::streamsize>(elf.size()));
  elf[56] = elf[57] = 0;  // e_phnum
  std::ofstream(folder + "/static", std::ios::binary) << elf;
  std::ofstream(folder + "/script") << "#!" << folder << "/static -x\n";
  std::filesystem::copy_file(std::filesystem::canonical("/bin/true"), folder + "/setuid");
  for (const char* name : {"static", "script"}) {
    std::filesystem::permissions(absl::StrCat(folder, "/", name), std::filesystem::perms(0755));
  }
  EXPECT_THAT(Run({}, {folder + "/static"}).err,
              HasSubstr("static is statically linked: the library cannot be loaded"));
  EXPECT_THAT(Run({}, {folder + "/script"}).err, HasSubstr("which is statically linked"));
  EXPECT_THAT(Run({}, {"/bin/true"}).err, Not(HasSubstr("library")));
  if (geteuid() != 0) GTEST_SKIP() << "needs root, for another user's setuid program";
  ASSERT_EQ(chown((folder + "/setuid").c_str(), 65534, 65534), 0);
  ASSERT_EQ(chmod((folder + "/setuid").c_str(), 04755), 0);
  const RunResult setuid_program = Run({}, {folder + "/setuid"});
  EXPECT_THAT(setuid_program.err, HasSubstr("setuid is setuid: "));
  EXPECT_EQ(setuid_program.exit_code, 0) << "it runs";
}

TEST_F(RunTest, SignalsReachTheProgram) {
  ASSERT_NO_FATAL_FAILURE(Begin());
  for (const char* signal : {"INT", "TERM", "HUP", "QUIT", "USR1", "USR2", "WINCH", "ALRM", "XCPU", "40"}) {
    ASSERT_OK_AND_ASSIGN(const auto running, StartShell(absl::StrCat("trap 'echo got; exit 9' ", signal,
                                                                     "; echo ready; while :; do sleep 0.05; done")));
    EXPECT_EQ(running->ReadLine().value_or(""), "ready");
    const RunResult sent = RunProgram({"/bin/sh", "-c", absl::StrCat("kill -", signal, " ", running->pid())});
    EXPECT_EQ(sent.exit_code, 0);
    EXPECT_EQ(running->ReadLine().value_or(""), "got") << signal;
    EXPECT_EQ(running->Wait().value_or(-1), 9) << signal;
  }
  // SIGTERM ends a program without a handler.
  ASSERT_OK_AND_ASSIGN(const auto running, StartShell("echo ready; exec sleep 1000"));
  EXPECT_EQ(running->ReadLine().value_or(""), "ready");
  running->Signal(SIGTERM);
  EXPECT_EQ(running->Wait().value_or(-1), 128 + SIGTERM);
  EXPECT_EQ(Claims(), 0u);
}

TEST_F(RunTest, ItStopsAndGoesOnWithTheProgram) {
  ASSERT_NO_FATAL_FAILURE(Begin());
  // Starts vramctl in a new process group, like a shell. The kernel does not stop a process group whose parents are all
  // in the group or in another session, because no process could continue the group.
  Arguments command = {"/usr/bin/perl", "-e", "setpgrp; exec @ARGV or die"};
  const Arguments run = RunCommand({}, {"/bin/sh", "-c", "echo $$; read line; echo got $line"});
  command.insert(command.end(), run.begin(), run.end());
  ASSERT_OK_AND_ASSIGN(const auto running, ChildProcess::Start(command, environment_.all));
  ASSERT_OK_AND_ASSIGN(const std::string program, running->ReadLine());
  const auto state = [&](const std::string& pid) {
    std::ifstream stat(absl::StrCat("/proc/", pid, "/stat"));
    std::string text;
    std::getline(stat, text);
    return text.substr(text.rfind(')') + 2, 1);
  };
  const std::string own = absl::StrCat(running->pid());
  kill(running->pid(), SIGTSTP);
  EXPECT_TRUE(WaitFor([&] { return state(program) == "T" && state(own) == "T"; }));
  kill(running->pid(), SIGCONT);
  EXPECT_TRUE(WaitFor([&] { return state(program) == "S"; }));
  int pid = 0;
  ASSERT_TRUE(absl::SimpleAtoi(program, &pid));
  // Continues vramctl before vramctl has seen the program stop.
  kill(running->pid(), SIGSTOP);
  EXPECT_TRUE(WaitFor([&] { return state(own) == "T"; }));
  kill(pid, SIGTSTP);
  EXPECT_TRUE(WaitFor([&] { return state(program) == "T"; }));
  kill(running->pid(), SIGWINCH);  // arrives first: vramctl looks at the program before reading SIGCONT
  kill(running->pid(), SIGCONT);
  EXPECT_TRUE(WaitFor([&] { return state(program) == "S"; }));
  // SIGSTOP to the program alone does not stop vramctl; the sender continues the program alone.
  kill(pid, SIGSTOP);
  EXPECT_TRUE(WaitFor([&] { return state(program) == "T"; }));
  kill(pid, SIGCONT);
  ASSERT_OK(running->WriteLine("this"));
  EXPECT_EQ(running->ReadLine().value_or(""), "got this");
  EXPECT_EQ(running->Wait().value_or(-1), 0);
}

// A shell ends its loop after ^C, like without vramctl.
TEST_F(RunTest, ItEndsByTheSignalThatEndsTheProgram) {
  ASSERT_NO_FATAL_FAILURE(Begin());
  for (const int signal : {SIGINT, SIGKILL, SIGSEGV}) {
    Arguments command = {"/usr/bin/perl", "-e", "system @ARGV; print $? & 127"};
    const Arguments run = RunCommand({}, {"/bin/sh", "-c", absl::StrCat("kill -", signal, " $$")});
    command.insert(command.end(), run.begin(), run.end());
    EXPECT_EQ(RunProgram(command, environment_.all).out, absl::StrCat(signal));
  }
  EXPECT_EQ(Claims(), 0u);
}

TEST_F(RunTest, AfterAKillTheProgramGoesOnAndItsClaimGoesWithItsLastSession) {
  ASSERT_NO_FATAL_FAILURE(Begin());
  ASSERT_OK_AND_ASSIGN(const auto running, StartShell("echo $VRAMBROKER_SOCKET_DIR; read line; echo went on"));
  ASSERT_OK_AND_ASSIGN(const std::string in, running->ReadLine());
  ASSERT_OK_AND_ASSIGN(ClientProcess member, ClientProcess::Connect(in, "member"));
  kill(running->pid(), SIGKILL);
  ASSERT_OK(running->Wait());
  ASSERT_OK(running->WriteLine("go on"));
  EXPECT_EQ(running->ReadLine().value_or(""), "went on");
  // Processes of the claim can still connect while a session remains.
  ASSERT_OK_AND_ASSIGN(ClientProcess late, ClientProcess::Connect(in, "late"));
  EXPECT_EQ(Claims(), 1u);
  ASSERT_OK(member.Call("goodbye"));
  ASSERT_OK(late.Call("goodbye"));
  EXPECT_TRUE(WaitFor([&] { return Claims() == 0; }));
}

TEST_F(RunTest, TheNextDaemonHasTheClaimIfTheProgramRuns) {
  ASSERT_NO_FATAL_FAILURE(Begin());
  ASSERT_OK_AND_ASSIGN(const auto stays, StartShell("echo $VRAMBROKER_SOCKET_DIR; read line"));
  ASSERT_OK_AND_ASSIGN(const auto goes, StartShell("echo ready; read line"));
  ASSERT_OK_AND_ASSIGN(const std::string in, stays->ReadLine());
  ASSERT_OK(goes->ReadLine());
  daemon_->Kill();
  kill(goes->pid(), SIGKILL);
  ASSERT_OK(goes->Wait());
  ASSERT_OK(daemon_->Restart());
  EXPECT_TRUE(WaitFor([&] { return Claims() == 1; }));
  EXPECT_OK(ClientProcess::Connect(in, "member"));
  ASSERT_OK(stays->WriteLine("end"));
  EXPECT_EQ(stays->Wait().value_or(-1), 0);
  EXPECT_TRUE(WaitFor([&] { return Claims() == 0; }));
  // The claim also disappears when no process tells the daemon that the program has ended.
  ASSERT_OK_AND_ASSIGN(const auto last, StartShell("echo ready; read line"));
  ASSERT_OK(last->ReadLine());
  daemon_->Kill();
  ASSERT_OK(last->WriteLine("end"));
  EXPECT_EQ(last->Wait().value_or(-1), 0);
  ASSERT_OK(daemon_->Restart());
  EXPECT_TRUE(WaitFor([&] { return Claims() == 0; }));
}

TEST_F(RunTest, WithoutADaemonItSaysWhatToDo) {
  ASSERT_NO_FATAL_FAILURE(Begin());
  ASSERT_OK(daemon_->Stop());
  const RunResult refused = RunShell({"--limit=0.4"}, "echo never");
  EXPECT_EQ(refused.exit_code, 125);
  EXPECT_EQ(refused.out, "");
  EXPECT_THAT(refused.err, HasSubstr("start the daemon"));
  EXPECT_THAT(refused.err, HasSubstr("--if-available runs the program without it"));
  const RunResult ran = RunShell({"--limit=0.4", "--if-available"},
                                 "printenv VRAMBROKER_SOCKET_DIR VRAMBROKER_LIMIT VRAMBROKER_IF_AVAILABLE; exit 4");
  EXPECT_EQ(ran.exit_code, 4);
  EXPECT_EQ(ran.out, absl::StrCat(dir(), "\n0.4\n1\n"));
  EXPECT_THAT(ran.err, HasSubstr("the program runs without it"));
}

TEST_F(RunTest, TheReportSaysWhatItsProcessesHad) {
  ASSERT_NO_FATAL_FAILURE(Begin());
  const std::string hold = absl::StrCat(VramctlProgram(), " hold --socket-dir=$VRAMBROKER_SOCKET_DIR ");
  const std::string script =
      absl::StrCat(hold, "40MiB > /dev/null & holder=$!; while ! ", VramctlProgram(),
                   " sessions --socket-dir=$VRAMBROKER_SOCKET_DIR | grep -q ' 40.0M '; do sleep 0.05; done; ", hold,
                   "41MiB 2> /dev/null; kill $holder; wait; exit 3");
  const RunResult text = RunShell({"--limit=64MiB", "--report"}, script);
  EXPECT_EQ(text.exit_code, 3);
  EXPECT_THAT(text.err, HasSubstr("vramctl: device 0: peak 40.00 MiB of 64.00 MiB"));
  EXPECT_THAT(text.err, HasSubstr("vramctl: 1 request refused\n"));
  const RunResult json = RunShell({"--limit=64MiB", "--report", "--format=json"}, script);
  // The report is the last line; earlier lines are for people.
  const std::vector<std::string> lines = absl::StrSplit(json.err, '\n', absl::SkipEmpty());
  ASSERT_FALSE(lines.empty());
  const Json report = Json::parse(lines.back(), nullptr, /*allow_exceptions=*/false)["report"];
  EXPECT_EQ(report["exit_code"], 3);
  EXPECT_EQ(report["refusals"], 1);
  EXPECT_EQ(report["devices"][0]["peak_bytes"], 40_MiB);
  // An existing claim's report counts only this run's refusals.
  ASSERT_EQ(Ctl({"claim", "create", "team", "--limit=64MiB"}).exit_code, 0);
  EXPECT_THAT(RunShell({"--claim=team", "--report"}, script).err, HasSubstr("1 request refused"));
  EXPECT_THAT(RunShell({"--claim=team", "--report"}, "true").err, HasSubstr("0 requests refused"));
  EXPECT_EQ(CtlJson({"claim", "show", "team"})["claim"]["devices"][0]["peak_bytes"], 40_MiB);
  ASSERT_OK(daemon_->Stop());
  EXPECT_THAT(RunShell({"--if-available", "--report"}, "true").err, HasSubstr("no report: "));
}

// The next daemon may have counted as many refusals as the daemon before, although the program caused no refusal.
TEST_F(RunTest, TheReportCountsFromTheNextDaemonOn) {
  ASSERT_NO_FATAL_FAILURE(Begin());
  ASSERT_EQ(Ctl({"claim", "create", "team", "--limit=64MiB"}).exit_code, 0);
  const auto refuse = [&] {
    ASSERT_OK_AND_ASSIGN(ClientProcess member, ClientProcess::Connect(dir() + "/claims/team", "member"));
    EXPECT_FALSE(member.Call(absl::StrCat("alloc ", 65_MiB)).ok());
  };
  ASSERT_NO_FATAL_FAILURE(refuse());
  ASSERT_OK_AND_ASSIGN(const auto running, StartShell("echo ready; read line", {"--claim=team", "--report"}));
  ASSERT_OK(running->ReadLine());
  daemon_->Kill();
  ASSERT_OK(daemon_->Restart());
  ASSERT_NO_FATAL_FAILURE(refuse());
  ASSERT_OK(running->WriteLine("end"));
  EXPECT_EQ(running->Wait().value_or(-1), 0);
  EXPECT_THAT(running->ErrorText(), HasSubstr("1 request refused"));
}

// Runs commands as another user, who has only default rights.
class RunAsUserTest : public RunTest {
 protected:
  void SetUp() override {
    if (geteuid() != 0) GTEST_SKIP() << "needs root, to become another user";
    if (RunProgram(As({VramctlProgram(), "--version"})).exit_code != 0) GTEST_SKIP() << "not to be read by other users";
  }
  static Arguments As(Arguments command) {
    const Arguments before = {"/usr/bin/setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"};
    command.insert(command.begin(), before.begin(), before.end());
    return command;
  }
  RunResult RunAs(const Arguments& flags, const std::string& script) const {
    return RunProgram(As(RunCommand(flags, {"/bin/sh", "-c", script})), environment_.all);
  }
  RunResult CtlAs(Arguments arguments) const {
    arguments.insert(arguments.begin(), VramctlProgram());
    arguments.push_back("--socket-dir=" + dir());
    return RunProgram(As(arguments));
  }
};

TEST_F(RunAsUserTest, ClaimsOfUsersLeaveDescriptorsToOthers) {
  ASSERT_NO_FATAL_FAILURE(Begin({.config = "socket_mode: '0666'", .descriptors = 1024}));
  int made = 0;
  RunResult last = CtlAs({"claim", "create", "u65534.0"});
  while (last.exit_code == 0 && made < 20) last = CtlAs({"claim", "create", absl::StrCat("u65534.", ++made)});
  EXPECT_EQ(made, 6);
  EXPECT_THAT(last.err, HasSubstr("each may have half as many as are free"));
  EXPECT_THAT(last.err, HasSubstr("LimitNOFILE"));
}

TEST_F(RunAsUserTest, AUserRunsProgramsWithinItsRule) {
  ASSERT_NO_FATAL_FAILURE(
      Begin({.config = "socket_mode: '0666' max_claims_per_uid: 2 rules { name: 'users' uid: '65534' "
                       "limit { bytes: '64MiB' } }"}));
  const std::string hold = absl::StrCat(VramctlProgram(), " hold --socket-dir=$VRAMBROKER_SOCKET_DIR ");
  const RunResult result = RunAs({}, absl::StrCat(hold, "65MiB"));
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(result.err, HasSubstr("64.00 MiB of the limit is left")) << "the limit of its rule";
  EXPECT_EQ(RunAs({"--limit=16MiB"}, "exit 5").exit_code, 5);
  EXPECT_EQ(Claims(), 0u);
  const RunResult more = RunAs({"--limit=65MiB"}, "echo never");
  EXPECT_EQ(more.exit_code, 125);
  EXPECT_THAT(more.err, HasSubstr("that the policy's rule users gives; more takes the right ADMIN"));
  EXPECT_THAT(RunAs({"--guarantee=1MiB"}, "echo never").err, HasSubstr("guarantee: a claim of one's own has none"));
  // Claims that the user makes for longer.
  EXPECT_EQ(CtlAs({"claim", "create", "u65534.a", "--limit=16MiB"}).exit_code, 0);
  EXPECT_EQ(CtlAs({"claim", "create", "u65534.b"}).exit_code, 0);
  EXPECT_THAT(RunAs({}, "echo never").err, HasSubstr("the most that max_claims_per_uid allows"));
  EXPECT_EQ(CtlJson({"claim", "show", "u65534.b"})["claim"]["devices"][0]["limit_bytes"], 64_MiB);
  EXPECT_EQ(CtlJson({"claim", "show", "u65534.b"})["claim"]["own"], true);
  EXPECT_THAT(CtlAs({"claim", "create", "team"}).err, HasSubstr("name: a claim of one's own is called u65534.NAME;"));
  EXPECT_THAT(CtlAs({"claim", "set", "u65534.a", "--limit=0.9"}).err, HasSubstr("limit: "));
  EXPECT_EQ(CtlAs({"claim", "set", "u65534.a", "--limit=32MiB"}).exit_code, 0);
  ASSERT_EQ(Ctl({"claim", "create", "team", "--owner=65534"}).exit_code, 0);
  EXPECT_THAT(CtlAs({"claim", "rm", "team"}).err, HasSubstr("no claim of its own of that name"));
  EXPECT_EQ(RunAs({"--claim=team"}, "exit 6").exit_code, 6) << "it may use that";
  EXPECT_EQ(CtlAs({"claim", "rm", "u65534.a"}).exit_code, 0);
  // A program inside a claim cannot make another claim.
  EXPECT_THAT(RunAs({}, absl::StrCat(VramctlProgram(), " run -- echo never")).err,
              HasSubstr("through the sockets of claim"));
}

TEST_F(RunAsUserTest, AClaimOfAnotherUserIsSaidBeforeTheProgramRuns) {
  ASSERT_NO_FATAL_FAILURE(Begin({.config = "socket_mode: '0666'"}));
  ASSERT_EQ(Ctl({"claim", "create", "mine"}).exit_code, 0);
  const RunResult result = RunAs({"--claim=mine"}, "echo never");
  EXPECT_EQ(result.exit_code, 125);
  EXPECT_EQ(result.out, "");
  EXPECT_THAT(result.err, HasSubstr("the claim 'mine' is not for this user"));
}

TEST_F(RunAsUserTest, WhereThePolicyBoundsTheUserItRunsWithoutAClaim) {
  ASSERT_NO_FATAL_FAILURE(Begin({.config = "socket_mode: '0666' rules { name: 'users' uid: '65534' "
                                           "user_limit { bytes: '64MiB' } }"}));
  const RunResult refused = RunAs({"--limit=8MiB"}, "echo never");
  EXPECT_EQ(refused.exit_code, 125);
  EXPECT_THAT(refused.err, HasSubstr("bounds what it may have in all (user_limit)"));
  EXPECT_THAT(refused.err, HasSubstr("--per-process makes no claim"));
  EXPECT_EQ(RunAs({"--limit=8MiB", "--per-process"}, "echo $VRAMBROKER_LIMIT").out, "8388608B\n");
}

TEST_F(RunTest, WrongUseIsSaid) {
  ASSERT_NO_FATAL_FAILURE(Begin());
  const auto error = [&](const Arguments& flags, int exit_code, const Environment& environment = {}) {
    const RunResult result = Run(flags, {"echo", "never"}, environment);
    EXPECT_EQ(result.exit_code, exit_code) << result.out << result.err;
    EXPECT_EQ(result.out, "");
    return result.err;
  };
  EXPECT_THAT(error({"--limit=2"}, 2), HasSubstr("--limit: '2' is ambiguous"));
  EXPECT_THAT(error({"--wait=2h"}, 2), HasSubstr("--wait: '2h' is longer than an hour"));
  EXPECT_THAT(error({"--managed=perhaps"}, 2), HasSubstr("--managed"));
  EXPECT_THAT(error({"--claim=a", "--guarantee=1MiB"}, 2), HasSubstr("--guarantee: cannot be combined with --claim"));
  EXPECT_THAT(error({"--claim=a", "--device=0"}, 2), HasSubstr("--device: cannot be combined with --claim"));
  EXPECT_THAT(error({"--claim=a", "--per-process"}, 2), HasSubstr("--per-process: cannot be combined"));
  EXPECT_THAT(error({"--per-process", "--guarantee=1MiB"}, 2), HasSubstr("--guarantee: needs a claim"));
  EXPECT_THAT(error({"--guarantee=1TiB"}, 125), HasSubstr("guarantee: "));
  EXPECT_THAT(error({"--device=7"}, 125), HasSubstr("there is no device 7; the daemon has "));
  const std::string missing = MakeTempDir() + "/missing.so";
  EXPECT_THAT(error({}, 125, {{"VRAMBROKER_PRELOAD", missing}}), HasSubstr("there is no library " + missing));
  EXPECT_THAT(error({"surplus"}, 2), HasSubstr("'surplus' stands before --"));
  EXPECT_THAT(error({"python", "serve.py"}, 2), HasSubstr("'python' stands before --"));
  const RunResult nothing = RunProgram({VramctlProgram(), "run", "--socket-dir=" + dir()});
  EXPECT_EQ(nothing.exit_code, 2);
  EXPECT_THAT(nothing.err, HasSubstr("no program given: vramctl run [OPTIONS] -- PROGRAM"));
  EXPECT_EQ(RunProgram({VramctlProgram(), "run", "echo", "never"}).exit_code, 2);
  // Other commands keep the usual meaning of `--`.
  EXPECT_EQ(RunProgram({VramctlProgram(), "help", "--", "run"}).exit_code, 0);
}

}  // namespace
}  // namespace vrambroker::testing_support
