// SPDX-License-Identifier: Apache-2.0
//
// The command lines of vramctl and vrambrokerd: help, wrong use, messages to people, completion.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "allocator/base/bytes.h"
#include "allocator/device/host_device.h"
#include "tests/support/daemon_test.h"
#include "tests/support/paths.h"
#include "tests/support/vramctl_test.h"

namespace vrambroker::testing_support {
namespace {

using absl::StrContains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::UnorderedElementsAre;

RunResult Vramctl(Arguments arguments) {
  arguments.insert(arguments.begin(), VramctlProgram());
  return RunProgram(arguments);
}

RunResult Vrambrokerd(Arguments arguments) {
  arguments.insert(arguments.begin(), DaemonProgram());
  return RunProgram(arguments);
}

std::vector<std::string> Lines(const std::string& text) {
  return absl::StrSplit(text, '\n', absl::SkipEmpty());
}

// ---- Help ----

void ExpectGoodHelp(const RunResult& help) {
  EXPECT_EQ(help.exit_code, 0) << help.err;
  EXPECT_EQ(help.err, "");
  EXPECT_TRUE(absl::StartsWith(help.out, "Usage: vram")) << help.out;
  EXPECT_THAT(help.out, Not(HasSubstr(absl::StrCat(paths::kSourceDir, "/"))));
  EXPECT_THAT(help.out, Not(HasSubstr("main.cc")));
  for (const std::string& line : Lines(help.out)) {
    EXPECT_LE(line.size(), 90u) << line;
    for (const absl::string_view word : absl::StrSplit(line, ' ')) {
      EXPECT_FALSE(absl::StartsWith(word, "--") && absl::StrContains(word, "_")) << line;
    }
    for (const absl::string_view word : absl::StrSplit(line, absl::ByAnyChar(" ,.:;()"))) {
      EXPECT_FALSE(absl::EqualsIgnoreCase(word, "idle")) << line << "\ndeploy/GLOSSARY.md says which memory is meant";
    }
  }
}

std::vector<std::string> Commands() {
  std::vector<std::string> commands;
  for (const std::string& name : Lines(Vramctl({"__complete", ""}).out)) {
    if (name != "policy") commands.push_back(name);
  }
  return commands;
}

TEST(HelpTest, EveryFormOfAskingGivesTheSame) {
  const RunResult help = Vramctl({"--help"});
  ExpectGoodHelp(help);
  for (const Arguments& form : std::vector<Arguments>{{"-h"}, {"help"}, {"--format=json", "--help"}}) {
    EXPECT_EQ(Vramctl(form).out, help.out);
  }
  ASSERT_GE(Commands().size(), 20u);
  for (const std::string& command : Commands()) {
    EXPECT_THAT(help.out, HasSubstr(absl::StrCat("\n  ", command, " ")));
    const RunResult own = Vramctl({command, "--help"});
    ExpectGoodHelp(own);
    EXPECT_TRUE(absl::StartsWith(own.out, absl::StrCat("Usage: vramctl ", command))) << own.out;
    EXPECT_EQ(Vramctl({command, "-h"}).out, own.out);
    EXPECT_EQ(Vramctl({"help", command}).out, own.out);
  }
  EXPECT_THAT(Vramctl({"help", "policy", "explain"}).out, HasSubstr("Usage: vramctl policy explain"));
  for (const char* command : {"train", "serve", "share"}) {
    const RunResult own = Vramctl({"plan", command, "--help"});
    ExpectGoodHelp(own);
    EXPECT_TRUE(absl::StartsWith(own.out, absl::StrCat("Usage: vramctl plan ", command))) << own.out;
    EXPECT_EQ(Vramctl({"help", "plan", command}).out, own.out);
  }
  EXPECT_EQ(Vramctl({"help", "nonsense"}).exit_code, 2);
}

TEST(HelpTest, OfACommandIsOfThatCommand) {
  const std::string trim = Vramctl({"trim", "--help"}).out;
  EXPECT_THAT(trim, HasSubstr("--socket-dir"));
  EXPECT_THAT(trim, Not(HasSubstr("--limit")));
  EXPECT_THAT(Vramctl({"hold", "--help"}).out, HasSubstr("--limit"));
}

TEST(HelpTest, Versions) {
  const std::string version = Vramctl({"--version"}).out;
  EXPECT_THAT(version, ::testing::MatchesRegex("vramctl [0-9.]+ \\([0-9a-z]+\\)\n"));
  EXPECT_EQ(Vramctl({"version"}).out, version);
  EXPECT_THAT(Vrambrokerd({"--version"}).out, ::testing::MatchesRegex("vrambrokerd [0-9.]+ \\([0-9a-z]+\\)\n"));
}

TEST(HelpTest, OfTheDaemon) {
  const RunResult help = Vrambrokerd({"--help"});
  ExpectGoodHelp(help);
  EXPECT_EQ(Vrambrokerd({"-h"}).out, help.out);
}

TEST(HelpTest, OfTheDemos) {
  for (const auto& [name, path] :
       std::vector<std::pair<std::string, std::string>>{{"vrambroker-demo", paths::kDemo},
                                                        {"vrambroker-fragmentation", paths::kFragmentation},
                                                        {"vrambroker-job", paths::kJob},
                                                        {"vrambroker-step-8847", paths::kStep8847}}) {
    const RunResult help = RunProgram({path, "--help"});
    ExpectGoodHelp(help);
    EXPECT_TRUE(absl::StartsWith(help.out, absl::StrCat("Usage: ", name, " [OPTIONS]\n"))) << help.out;
    const RunResult wrong = RunProgram({path, "--nonsense"});
    EXPECT_EQ(wrong.exit_code, 2);
    EXPECT_EQ(wrong.err, absl::StrCat(name, ": unknown option --nonsense; see ", name, " --help\n"));
  }
}

// ---- Wrong use ----

TEST(WrongUseTest, IsSaidAndChangesNothing) {
  for (const auto& [arguments, message] : std::vector<std::pair<Arguments, std::string>>{
           {{}, "no command given; see vramctl --help"},
           {{"statsu"}, "no command 'statsu'; did you mean stats?"},
           {{"help", "limt"}, "no command 'limt'; did you mean limit?"},
           {{"claim", "creat", "a"}, "claim: no command 'creat'; did you mean create?"},
           {{"hold", "1MiB", "--limt=0.5"}, "unknown option --limt; did you mean --limit?"},
           {{"version", "--foo"},
            "unknown option --foo; see vramctl version --help"},  // no command has an option --foo
           {{"hold", "1MiB", "--limt", "0.5"}, "unknown option --limt; did you mean --limit?"},
           {{"status", "--pid", "3"}, "status takes no --pid (policy explain does); see vramctl status --help"},
           {{"status", "--limit", "0.5"},
            "status takes no --limit (claim create, claim set, run, hold do); see vramctl status --help"},
           {{"sessions", "-o", "json"},
            "sessions takes no -o (claim cdi, snapshot, trace, replay, plan train, plan serve, plan share do); see "
            "vramctl sessions --help"},
           {{"claim", "cdi", "a", "-o", ""}, "--output: the name of a file is needed; see vramctl claim cdi --help"},
           {{"--limit", "0.5", "hold", "1MiB"}, "--limit must follow its command; see vramctl hold --help"},
           {{"trim", "--no_such"}, "unknown option --no_such; see vramctl trim --help"},
           {{"trim"}, "SESSION is required; see vramctl trim --help"},
           {{"trim", "a", "b"}, "unexpected argument 'b'; see vramctl trim --help"},
           {{"status", "--timeout", "0"}, "--timeout: 0 is not a number from 0.01 to 86400; see vramctl status --help"},
           {{"status", "--timeout=nan"}, "--timeout: nan is not a number"},
           {{"ooms", "--last", "-1"}, "--last: -1 is not a number from 0 to 4294967295"},
           {{"status", "--format"}, "--format needs a value; see vramctl status --help"},
           {{"status", "--format=xml"}, "--format: "},
           {{"hold", "1MiB", "--name", "--limit", "0.5"}, "--name needs a value before --limit; see vramctl --help"},
           {{"hold", "1MiB", "--limit="}, "--limit: it is empty"},
           {{"hold", "1.0"}, "'1.0' is not a size: it has a fraction, and no unit"},
           {{"run", "--wait", "", "--", "true"}, "--wait: it is empty"},
           {{"hold", "1MiB", "--device=first"},
            "--device: 'first' is not a number in its range; see vramctl hold --help"}}) {
    const RunResult result = Vramctl(arguments);
    EXPECT_EQ(result.exit_code, 2) << message;
    EXPECT_EQ(result.out, "");
    EXPECT_THAT(result.err, HasSubstr(absl::StrCat("vramctl: ", message)));
    EXPECT_EQ(std::count(result.err.begin(), result.err.end(), '\n'), 1) << result.err;
  }
}

TEST(WrongUseTest, IsAlsoAWrongVariable) {
  for (const auto& [variable, value] :
       Environment{{"VRAMBROKER_LIMIT", "lots"}, {"VRAMBROKER_GUARANTEE", "lots"}, {"VRAMBROKER_WAIT", "soon"}}) {
    const RunResult result = RunProgram({VramctlProgram(), "hold", "1MiB"}, {{variable, value}});
    EXPECT_EQ(result.exit_code, 2) << variable;
    EXPECT_THAT(result.err, HasSubstr(absl::StrCat("vramctl: ", variable, ": '", value, "' is not a ")));
  }
}

TEST(WrongUseTest, IsJsonForScripts) {
  for (const Arguments& arguments : std::vector<Arguments>{
           {"trim", "--format=json"}, {"--format", "json", "status", "--no"}, {"--format=json", "hold", "lots"}}) {
    const RunResult result = Vramctl(arguments);
    EXPECT_EQ(result.exit_code, 2);
    const nlohmann::json error = nlohmann::json::parse(result.err, nullptr, /*allow_exceptions=*/false);
    ASSERT_FALSE(error.is_discarded()) << result.err;
    EXPECT_EQ(error["error"]["code"], "INVALID_ARGUMENT");
  }
}

class CommandLineTest : public VramctlDaemonTest {
 protected:
  void SetUp() override { ASSERT_OK(StartDaemon({.capacity = "256MiB"})); }
};

TEST_F(CommandLineTest, WhatTheDaemonRefusesIsNoWrongUse) {
  ASSERT_OK_AND_ASSIGN(Client client, Connect("c"));
  for (const Arguments& arguments : std::vector<Arguments>{
           {"priority", "c", "5000"}, {"record", "nobody", "1"}, {"record", "c", "1000001"}, {"trim", "nobody"}}) {
    const RunResult result = Ctl(arguments);
    EXPECT_EQ(result.exit_code, 1) << result.err;
    EXPECT_EQ(result.out, "");
    // gRPC's codes are for programs, not for people.
    for (const char* code : {"INVALID_ARGUMENT", "NOT_FOUND", "FAILED_PRECONDITION", "OUT_OF_RANGE"}) {
      EXPECT_THAT(result.err, Not(HasSubstr(code)));
    }
  }
}

TEST_F(CommandLineTest, JsonOfTextThatIsNotUtf8) {
  ASSERT_OK_AND_ASSIGN(Client client, Connect("c"));
  const std::string file = MakeTempDir() + "/\xff.json";
  EXPECT_THAT(CtlJson({"snapshot", "c", "-o", file})["file"].get<std::string>(), HasSubstr("\xEF\xBF\xBD"));
  EXPECT_TRUE(std::filesystem::exists(file));
  const std::string trace = MakeTempDir() + "/\xff.trace";
  std::ofstream(trace) << "a 0 512 0\n";
  for (const char* command : {"replay", "tune"}) {
    EXPECT_THAT(CtlJson({command, trace})["trace"].get<std::string>(), HasSubstr("\xEF\xBF\xBD"));
  }
  const RunResult missing = Ctl({"replay", trace + ".gone", "--format=json"});
  EXPECT_EQ(missing.exit_code, 2);
  EXPECT_THAT(missing.err, HasSubstr("\xEF\xBF\xBD.trace.gone: cannot be opened"));
}

TEST_F(CommandLineTest, TextThatTheDaemonCannotReadIsRefusedHere) {
  for (const Arguments& arguments : std::vector<Arguments>{{"trim", "\xff"},
                                                           {"ooms", "--session=\xff"},
                                                           {"hold", "1MiB", "--name", "\xff"},
                                                           {"policy", "explain", "--cgroup", "\xff"}}) {
    const RunResult result = Ctl(arguments);
    EXPECT_EQ(result.exit_code, 2);
    EXPECT_THAT(result.err, HasSubstr("the text is not UTF-8"));
  }
  EXPECT_THAT(Ctl({"trim", std::string(70000, 'x')}).err, HasSubstr("70000 characters; at most 8192"));
  EXPECT_EQ(Ctl({"map", ""}).exit_code, 1) << "no session has that name";
}

TEST_F(CommandLineTest, OptionsStandAnywhereWithDashesOrUnderscores) {
  ASSERT_OK_AND_ASSIGN(Client client, Connect("c"));
  for (const Arguments& arguments :
       std::vector<Arguments>{{"--socket_dir", dir(), "sessions"},
                              {"--socket-dir=" + dir(), "sessions"},
                              {"sessions", "--socket_dir=" + dir()},
                              {"--socket-dir=/nowhere", "sessions", "--socket-dir", dir()}}) {
    EXPECT_EQ(Vramctl(arguments).exit_code, 0) << ::testing::PrintToString(arguments);
  }
  // Text after = is the value, whatever the text is.
  EXPECT_EQ(CtlJson({"policy", "explain", "--name=--all"})["name"], "--all");
  EXPECT_THAT(Vramctl({"--socket-dir=", "status"}).err, HasSubstr("/vrambroker.sock"));
  EXPECT_THAT(Vramctl({"--timeout=", "status"}).err, HasSubstr("--timeout:  is not a number"));
  EXPECT_EQ(Ctl({"priority", "c", "-5"}).out, "c: priority -5\n");
  EXPECT_THAT(Vramctl({"trim", "--socket-dir", dir(), "--", "--c"}).err, HasSubstr("no session is named '--c'"));
}

TEST_F(CommandLineTest, ASilentDaemonIsWaitedForAloudAndAsLongAsWanted) {
  daemon_->process().Signal(SIGSTOP);
  EXPECT_THAT(Ctl({"status", "--timeout=300ms"}).err, HasSubstr("did not answer within 300ms"));
  const RunResult given_up = Ctl({"status", "--timeout=0.3"});
  EXPECT_EQ(given_up.exit_code, 1);
  EXPECT_THAT(given_up.err, HasSubstr("did not answer within 300ms"));

  ASSERT_OK_AND_ASSIGN(const std::unique_ptr<ChildProcess> status,
                       ChildProcess::Start({VramctlProgram(), "status", "--socket-dir=" + dir(), "--timeout=600"}));
  EXPECT_TRUE(WaitFor([&] { return StrContains(status->ErrorText(), "waiting for up to 10m (--timeout)"); }));
  daemon_->process().Signal(SIGCONT);
  EXPECT_EQ(status->Wait().value_or(-1), 0) << status->ErrorText();

  // The timeout is longer than the silence before the notice. Scripts get no notice.
  daemon_->process().Signal(SIGSTOP);
  const RunResult json = Ctl({"status", "--timeout=3.5", "--format=json"});
  daemon_->process().Signal(SIGCONT);
  EXPECT_EQ(json.exit_code, 1);
  EXPECT_FALSE(Json::parse(json.err, nullptr, /*allow_exceptions=*/false).is_discarded()) << json.err;
}

TEST_F(CommandLineTest, HoldIsInterruptedWhileItWaits) {
  daemon_->process().Signal(SIGSTOP);
  for (const int signal : {SIGINT, SIGTERM}) {
    ASSERT_OK_AND_ASSIGN(
        const std::unique_ptr<ChildProcess> hold,
        ChildProcess::Start({VramctlProgram(), "hold", "1MiB", "--socket-dir=" + dir(), "--timeout=600"}));
    ASSERT_TRUE(WaitFor([&] { return StrContains(hold->ErrorText(), "waiting for up to"); })) << hold->ErrorText();
    hold->Signal(signal);
    EXPECT_EQ(hold->Wait().value_or(-1), 128 + signal) << hold->ErrorText();
  }
  daemon_->process().Signal(SIGCONT);
}

TEST_F(CommandLineTest, HoldSaysWhatItIsCalledAndThatNobodyReadsIt) {
  ASSERT_OK_AND_ASSIGN(Client client, Connect("c"));
  const RunResult full = RunProgram(
      {"/bin/sh", "-c", absl::StrCat(VramctlProgram(), " hold 1MiB --name c --socket-dir ", dir(), " > /dev/full")});
  EXPECT_EQ(full.exit_code, 1);
  EXPECT_THAT(full.err, HasSubstr("the name c is taken; this session is called c-2"));
  EXPECT_THAT(full.err, HasSubstr("the output was not written"));
}

TEST_F(CommandLineTest, WhatIsClosedIsNotTakenForASocket) {
  const auto with = [&](const std::string& command, const std::string& redirection) {
    return RunProgram(
        {"/bin/sh", "-c",
         absl::StrCat("exec ", VramctlProgram(), " ", command, " --socket-dir=", dir(), " ", redirection)});
  };
  const RunResult no_output = with("status", ">&-");
  EXPECT_EQ(no_output.exit_code, 1);
  EXPECT_THAT(no_output.err, HasSubstr("the output was not written: Bad file descriptor"));
  const RunResult no_errors = with("status", "2>&-");
  EXPECT_EQ(no_errors.exit_code, 0);
  EXPECT_EQ(no_errors.out, Ctl({"status"}).out);
  EXPECT_EQ(with("ls --nonsense", "2>&-").exit_code, 2);
  const RunResult nothing = with("status", "<&- >&- 2>&-");
  EXPECT_EQ(nothing.exit_code, 1);
  EXPECT_EQ(nothing.err, "");
  const RunResult no_input = RunProgram({"/bin/sh", "-c", absl::StrCat("exec ", VramctlProgram(), " replay - <&-")});
  EXPECT_EQ(no_input.exit_code, 2);
  EXPECT_THAT(no_input.err, HasSubstr("Bad file descriptor"));
}

TEST_F(CommandLineTest, ADaemonWithNoDescriptorsAtAllServes) {
  const std::string folder = MakeTempDir();
  ASSERT_OK_AND_ASSIGN(
      const std::unique_ptr<ChildProcess> daemon,
      ChildProcess::Start({"/bin/sh", "-c",
                           absl::StrCat("exec ", DaemonProgram(),
                                        " --device=host --capacity=64MiB --socket_dir=", folder, " <&- >&- 2>&-")}));
  const auto status = [&] { return RunProgram({VramctlProgram(), "status", "--socket-dir=" + folder}); };
  ASSERT_TRUE(WaitFor([&] { return status().exit_code == 0; }));
  for (int descriptor = 0; descriptor < 3; ++descriptor) {
    EXPECT_EQ(std::filesystem::read_symlink(absl::StrCat("/proc/", daemon->pid(), "/fd/", descriptor)), "/dev/null");
  }
}

TEST_F(CommandLineTest, NamesTheGroupThatMayConnect) {
  if (geteuid() != 0) GTEST_SKIP() << "needs root, to become another user";
  const std::string socket = dir() + "/vrambroker.sock";
  ASSERT_EQ(chown(socket.c_str(), 0, 3), 0);
  ASSERT_EQ(chmod(socket.c_str(), 0660), 0);
  const Arguments status = {"/usr/bin/setpriv", "--reuid=65534", "--regid=65534",        "--clear-groups",
                            VramctlProgram(),   "status",        "--socket-dir=" + dir()};
  const RunResult refused = RunProgram(status);
  EXPECT_EQ(refused.exit_code, 1);
  EXPECT_THAT(refused.err, HasSubstr(absl::StrCat("user nobody may not connect to ", socket)));
  EXPECT_THAT(refused.err, HasSubstr("belongs to user root and group sys; join the group (sudo adduser nobody sys)"));

  ASSERT_EQ(chown(socket.c_str(), 0, 0), 0);
  EXPECT_THAT(RunProgram(status).err,
              AllOf(HasSubstr("run the daemon with a group for its users"), Not(HasSubstr("adduser"))));
  ASSERT_EQ(chmod(socket.c_str(), 0600), 0);
  EXPECT_THAT(RunProgram(status).err, HasSubstr("let its group in (socket_mode: \"0660\""));
  ASSERT_EQ(chmod(dir().c_str(), 0700), 0);
  EXPECT_THAT(RunProgram(status).err, HasSubstr("ask root for a folder of sockets that others may enter"));
}

TEST_F(CommandLineTest, SessionsFitInAHundredColumns) {
  std::vector<Client> clients;
  for (const char* name : {"a-session-with-a-name-that-is-as-long-as-names-may-be-63-letter", "short"}) {
    ASSERT_OK_AND_ASSIGN(Client client, Connect(name));
    ASSERT_OK(client.Allocate(1_MiB));
    clients.push_back(std::move(client));
  }
  ASSERT_EQ(Ctl({"guarantee", "short", "64MiB"}).exit_code, 0);
  EXPECT_THAT(Ctl({"status"}).out, HasSubstr(" free\n  62.00 MiB more is kept free for guarantees\n"));
  ASSERT_EQ(Ctl({"priority", "short", "-1000"}).exit_code, 0);
  ASSERT_EQ(Ctl({"limit", "short", "1MiB"}).exit_code, 1) << "below its guarantee";
  const std::string text = Ctl({"sessions"}).out;
  for (const std::string& line : Lines(text)) EXPECT_LE(line.size(), 100u) << text;
  for (const char* heading : {" AGE ", " GUARANTEE "}) EXPECT_THAT(text, HasSubstr(heading));
  EXPECT_THAT(text, Not(HasSubstr("WAITS FOR"))) << "nobody waits";
  std::string wide;
  EXPECT_TRUE(WaitFor([&] {  // the daemon reads the command's name some time later
    wide = RunProgram({"/usr/bin/env", "COLUMNS=200", VramctlProgram(), "sessions", "--socket_dir=" + dir()}).out;
    return StrContains(wide, " command_line_test ");
  })) << wide;
  for (const char* part : {" PRIO ", " USER ", " COMMAND ", " LAST USE ", "may-be-63-letter "}) {
    EXPECT_THAT(wide, HasSubstr(part));
  }
}

// ---- Completion ----

TEST_F(CommandLineTest, Completes) {
  ASSERT_OK_AND_ASSIGN(Client trainer, Connect("trainer"));
  ASSERT_OK_AND_ASSIGN(Client tuner, Connect("tuner"));
  const auto complete = [&](Arguments words) {
    words.insert(words.begin(), {VramctlProgram(), "__complete"});
    return Lines(RunProgram(words, {{"VRAMBROKER_SOCKET_DIR", dir()}}).out);
  };
  EXPECT_THAT(complete({"sn"}), ElementsAre("snapshot"));
  EXPECT_THAT(complete({"limit", "t"}), UnorderedElementsAre("trainer", "tuner"));
  EXPECT_THAT(complete({"limit", "trainer", ""}), ElementsAre());
  EXPECT_THAT(complete({"ooms", "--session", "tr"}), ElementsAre("trainer"));
  EXPECT_THAT(complete({"--format", "json", "trim", "tu"}), ElementsAre("tuner"));
  EXPECT_THAT(complete({"sessions", "--form"}), ElementsAre("--format"));
  EXPECT_THAT(complete({"sessions", "--format", ""}), ElementsAre("text", "json"));
  EXPECT_THAT(complete({"top", "--sort", "res"}), ElementsAre("reserved"));
  EXPECT_THAT(complete({"replay", ""}), ElementsAre(":files"));
  for (const char* command : {"map", "diagnose"}) {
    EXPECT_THAT(complete({command, "tr"}), ElementsAre("trainer"));
    EXPECT_THAT(complete({command, "./tr"}), ElementsAre(":files"));
  }
  EXPECT_THAT(complete({"run", "--managed", "r"}), ElementsAre("refuse"));
  EXPECT_THAT(complete({"policy", "e"}), ElementsAre("explain"));
  EXPECT_THAT(complete({"help", "sum"}), ElementsAre("summary"));
  EXPECT_THAT(complete({"help", "policy", ""}), ElementsAre("explain"));
  EXPECT_THAT(complete({"ooms", "--session=tr"}), ElementsAre("--session=trainer"));
  EXPECT_THAT(complete({"trim", "--socket-dir", "/nowhere", "t"}), ElementsAre());
  EXPECT_THAT(complete({"trim", "--socket_dir=/nowhere", "t"}), ElementsAre());
}

// Runs the scripts in real shells, as a user's keys do.
TEST_F(CommandLineTest, TheShellsComplete) {
  ASSERT_OK_AND_ASSIGN(Client trainer, Connect("trainer"));
  const std::string folder = absl::StrCat(paths::kSourceDir, "/client/vramctl/");
  const Environment environment = {{"VRAMBROKER_SOCKET_DIR", dir()}};
  const std::string bash =
      absl::StrCat("source ", folder, "completion.bash; COMP_WORDS=(", VramctlProgram(),
                   " limit tr); COMP_CWORD=2; _vramctl; echo \"${COMPREPLY[*]}\"; "
                   "COMP_WORDS=(",
                   VramctlProgram(),
                   " ooms --session = tr); COMP_CWORD=4; _vramctl; echo \"${COMPREPLY[*]}\"; "
                   "COMP_WORDS=(",
                   VramctlProgram(), "); COMP_WORDS+=(''); COMP_CWORD=1; _vramctl; echo \"${#COMPREPLY[*]}\"");
  const RunResult in_bash = RunProgram({"/bin/bash", "-uc", bash}, environment);
  ASSERT_EQ(Lines(in_bash.out).size(), 3u) << in_bash.out << in_bash.err;
  EXPECT_EQ(Lines(in_bash.out)[0], "trainer");
  EXPECT_EQ(Lines(in_bash.out)[1], "trainer");
  EXPECT_GE(std::atoi(Lines(in_bash.out)[2].c_str()), 20);

  if (!std::filesystem::exists("/bin/zsh")) {
    ASSERT_EQ(std::getenv("CI"), nullptr) << "no zsh: deploy/packages.sh test installs it";
    GTEST_SKIP() << "no zsh";
  }
  const std::string zsh = absl::StrCat("compadd() { print -l -- ${(P)2} }; words=(", VramctlProgram(),
                                       " limit tr); CURRENT=3; source ", folder, "completion.zsh");
  const RunResult in_zsh = RunProgram({"/bin/zsh", "-fc", zsh}, environment);
  EXPECT_EQ(in_zsh.out, "trainer\n") << in_zsh.err;
}

// Words after -- are another program's command line.
TEST(CompletionTest, OfWhatIsRunIsItsOwn) {
  const std::string folder = absl::StrCat(paths::kSourceDir, "/client/vramctl/");
  const std::string bash =
      absl::StrCat("source ", folder,
                   "completion.bash; complete_here() { COMP_WORDS=(\"$@\"); COMP_CWORD=$(($# - 1)); COMPREPLY=(); "
                   "_vramctl; echo \"${COMPREPLY[0]}\"; }; cd ",
                   paths::kSourceDir, "; complete_here ", VramctlProgram(),
                   " run --limit = 0.4 -- mkfif; complete_here ", VramctlProgram(),
                   " run -- cat READM; "
                   "_command_offset() { COMPREPLY=(\"from ${COMP_WORDS[$1]}\"); }; complete_here ",
                   VramctlProgram(), " run -- cat x");
  const RunResult in_bash = RunProgram({"/bin/bash", "-uc", bash});
  EXPECT_EQ(in_bash.out, "mkfifo\nREADME.md\nfrom cat\n") << in_bash.err;

  if (!std::filesystem::exists("/bin/zsh")) {
    ASSERT_EQ(std::getenv("CI"), nullptr) << "no zsh: deploy/packages.sh test installs it";
    GTEST_SKIP() << "no zsh";
  }
  const std::string zsh =
      absl::StrCat("_normal() { print -r -- $CURRENT $words }; complete_here() { words=(\"$@\"); CURRENT=$#; source ",
                   folder, "completion.zsh }; complete_here ", VramctlProgram(),
                   " run --limit=0.4 -- cat READM; "
                   "complete_here ",
                   VramctlProgram(), " run -- mkfif");
  const RunResult in_zsh = RunProgram({"/bin/zsh", "-fc", zsh});
  EXPECT_EQ(in_zsh.out, "2 cat READM\n1 mkfif\n") << in_zsh.err;
}

// ---- The daemon ----

// Starts a daemon with `arguments`. The daemon ends with the returned process.
absl::StatusOr<std::unique_ptr<ChildProcess>> StartWith(Arguments arguments) {
  arguments.insert(arguments.begin(), {DaemonProgram(), "--device=host", "--socket-dir=" + MakeTempDir()});
  absl::StatusOr<std::unique_ptr<ChildProcess>> daemon = ChildProcess::Start(arguments);
  if (!daemon.ok()) return daemon.status();
  const bool ready =
      WaitFor([&] { return StrContains((*daemon)->ErrorText(), "daemon ready") || !(*daemon)->Running(); });
  if (!ready || !(*daemon)->Running()) return absl::InternalError((*daemon)->ErrorText());
  return daemon;
}

TEST(DaemonCommandLineTest, ServesHttpOnLocalhostAndIpv6) {
  ASSERT_OK_AND_ASSIGN(const std::unique_ptr<ChildProcess> localhost,
                       StartWith({"--capacity=64MiB", "--http-address=localhost:0"}));
  EXPECT_THAT(localhost->ErrorText(), ::testing::ContainsRegex("http=http://(127.0.0.1|\\[::1\\]):[1-9]"));

  const UniqueFd probe(socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in6 address = {};
  address.sin6_family = AF_INET6;
  address.sin6_addr = in6addr_loopback;
  if (bind(probe.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0) {
    GTEST_SKIP() << "this machine has no IPv6";
  }
  ASSERT_OK_AND_ASSIGN(const std::unique_ptr<ChildProcess> ipv6,
                       StartWith({"--capacity=64MiB", "--http-address=[::1]:0"}));
  const std::string log = ipv6->ErrorText();
  const std::string start = "http=http://[::1]:";
  ASSERT_TRUE(StrContains(log, start)) << log;
  address.sin6_port = htons(static_cast<uint16_t>(std::atoi(log.c_str() + log.find(start) + start.size())));
  const UniqueFd connection(socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC, 0));
  ASSERT_EQ(connect(connection.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address), 0);
  const std::string request =
      absl::StrCat("GET /healthz HTTP/1.1\r\nHost: [::1]:", ntohs(address.sin6_port), "\r\n\r\n");
  ASSERT_EQ(write(connection.get(), request.data(), request.size()), static_cast<ssize_t>(request.size()));
  std::string answer(1 << 12, '\0');
  answer.resize(static_cast<size_t>(std::max<ssize_t>(0, read(connection.get(), answer.data(), answer.size()))));
  EXPECT_TRUE(absl::StartsWith(answer, "HTTP/1.1 200 OK")) << answer;
}

TEST(DaemonCommandLineTest, WrongUse) {
  for (const auto& [arguments, message] : std::vector<std::pair<Arguments, std::string>>{
           {{"--capacity"}, "--capacity needs a value"},
           {{"surplus"}, "unexpected argument 'surplus'; see vrambrokerd --help"},
           {{"--capcity", "4GiB"}, "unknown option --capcity; did you mean --capacity?"},
           {{"--http_adress=off"}, "unknown option --http_adress; did you mean --http-address?"},
           {{"--quite-another", "4GiB"}, "unknown option --quite-another; see vrambrokerd --help"},
           {{"--check-config=false"}, "check-config was given"},
           {{"--http-address=*:9477", "--check-config"}, "0.0.0.0:9477 (all addresses)"}}) {
    const RunResult result = Vrambrokerd(arguments);
    EXPECT_EQ(result.exit_code, 2) << message;
    EXPECT_THAT(result.err, HasSubstr(message));
  }
}

TEST(DaemonCommandLineTest, WarnsOfMoreMemoryThanTheMachineHas) {
  ASSERT_OK_AND_ASSIGN(const std::unique_ptr<ChildProcess> too_much,
                       StartWith({"--capacity=1000TiB", "--http-address=off"}));
  EXPECT_THAT(too_much->ErrorText(), HasSubstr("of memory that this machine has"));
  ASSERT_OK_AND_ASSIGN(const std::unique_ptr<ChildProcess> modest,
                       StartWith({"--capacity=64MiB", "--http-address=off"}));
  EXPECT_THAT(modest->ErrorText(), Not(HasSubstr("of memory that this machine has")));
}

TEST(DaemonCommandLineTest, ACapacityMayBeAShareOfTheMachine) {
  for (const char* half : {"50%", "0.5"}) {
    ASSERT_OK_AND_ASSIGN(const std::unique_ptr<ChildProcess> daemon,
                         StartWith({absl::StrCat("--capacity=", half), "--http-address=off"}));
    EXPECT_THAT(daemon->ErrorText(), HasSubstr(absl::StrCat(" capacity=", DefaultHostBytes(), " ")));
  }
}

TEST(DaemonCommandLineTest, ChecksAWholeConfiguration) {
  const std::string file = MakeTempDir() + "/c.textproto";
  std::ofstream(file) << "capcity: '8GiB'\nidle_decay: 10\nlog_level: 'loud'\n";
  const RunResult result = Vrambrokerd({"--check-config", "--config", file, "--idle-limit=1PB"});
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_THAT(Lines(result.err),
              ElementsAre("vrambrokerd: 4 faults in the configuration:",
                          absl::StrCat("  ", file, ":1:1: unknown field 'capcity'; did you mean 'capacity'?"),
                          absl::StrCat("  ", file, ":2:13: idle_decay: a text in quotes is needed, not 10"),
                          HasSubstr("  --idle-limit: idle_limit: '1PB' is not a size: its unit is unknown"),
                          HasSubstr(absl::StrCat("  ", file, ":3:1: log_level: 'loud' is not"))));
}

TEST(DaemonCommandLineTest, AReloadWithoutAFileRaisesNoAlert) {
  const std::string dir = MakeTempDir();
  ASSERT_OK_AND_ASSIGN(const std::unique_ptr<ChildProcess> bare,
                       ChildProcess::Start({DaemonProgram(), "--device=host", "--capacity=64MiB", "--socket-dir=" + dir,
                                            "--http-address=127.0.0.1:0"}));
  ASSERT_TRUE(WaitFor([&] { return StrContains(bare->ErrorText(), "daemon ready"); })) << bare->ErrorText();
  const std::string log = bare->ErrorText();
  const std::string start = "http=http://127.0.0.1:";
  const int port = std::atoi(log.c_str() + log.find(start) + start.size());
  const RunResult reload = Vramctl({"reload", "--socket-dir=" + dir});
  EXPECT_EQ(reload.exit_code, 1);
  EXPECT_THAT(reload.err, HasSubstr("started without --config"));
  ASSERT_OK_AND_ASSIGN(const HttpAnswer metrics, HttpGet(port, "/metrics"));
  EXPECT_THAT(metrics.body, HasSubstr("\nvrambroker_config_last_reload_successful 1\n"));
}

}  // namespace
}  // namespace vrambroker::testing_support
