// SPDX-License-Identifier: Apache-2.0
#include "server/identity/process_info.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <vector>

#include "tests/support/util.h"

namespace vrambroker {
namespace {

using ::testing::ElementsAre;

TEST(ProcessInfoTest, TheCgroupOfVersion2IsTaken) {
  EXPECT_EQ(ParseCgroup("0::/user.slice/a:b.scope\n"), "/user.slice/a:b.scope");
  EXPECT_EQ(ParseCgroup("12:cpu,cpuacct:/v1\n1:name=systemd:/x\n0::/\n"), "/");
  EXPECT_EQ(ParseCgroup("12:cpu,cpuacct:/v1\n10::/x\n"), std::nullopt);
  EXPECT_EQ(ParseCgroup(""), std::nullopt);
  EXPECT_EQ(ParseCgroup("0::\n"), std::nullopt);
  EXPECT_EQ(ParseCgroup("0::/a\033[1m\xff z\n"), "/a?[1m? z") << "what a terminal or a message would choke on";
}

TEST(ProcessInfoTest, TheEffectiveUserAndAllGroupsAreTaken) {
  const std::optional<ProcessUser> user =
      ParseProcessUser("Name:\tUid: 5\nUid:\t1000\t1001\t1002\t1003\nGid:\t20\t21\t22\t23\nGroups:\t4 21 27 \n");
  ASSERT_TRUE(user.has_value());
  EXPECT_EQ(user->uid, 1001u);
  EXPECT_THAT(user->gids, ElementsAre(21, 4, 27));
  EXPECT_FALSE(ParseProcessUser("").has_value());
  EXPECT_FALSE(ParseProcessUser("Uid:\t1000\nGid:\t1 1 1 1\n").has_value());
  EXPECT_FALSE(ParseProcessUser("Uid:\t1 1 1 1\n").has_value());
}

TEST(ProcessInfoTest, WhatIsInAContainerHasSeveralNumbers) {
  EXPECT_FALSE(ParseHasInnerPid("Name:\tx\nNStgid:\t5\t1\nNSpid:\t4711\nNSpgid:\t5\n"));
  EXPECT_TRUE(ParseHasInnerPid("Name:\tx\nNSpid:\t4711\t20\nNSpgid:\t5\n"));
  EXPECT_FALSE(ParseHasInnerPid("Name:\tx\n")) << "an old kernel does not say";
  EXPECT_FALSE(IsInInnerPidNamespace(getpid()));
}

TEST(ProcessInfoTest, ACommandIsAProgramAndItsScript) {
  const auto command = [](const std::vector<std::string>& arguments) {
    std::string text;
    for (const std::string& argument : arguments) text += argument + std::string(1, '\0');
    return ParseCommand(text);
  };
  struct Case {
    std::vector<std::string> arguments;
    std::string expected;
  };
  const std::string secret = "--token=hf_secret";
  const std::vector<Case> cases = {
      {{"vramctl", "hold", "1GiB"}, "vramctl"},
      {{"/usr/bin/python3", "/home/ann/train.py", secret}, "python3 train.py"},
      {{"python3", "-u", "-W", "ignore", "-X", "dev", "train.py", "eval.py"}, "python3 train.py"},
      {{"python3.11", "-m", "vllm.entrypoints.openai.api_server", secret},
       "python3.11 -m vllm.entrypoints.openai.api_server"},
      {{"python3", "-OO", "-m", "torch.distributed.run", "train.py"}, "python3 -m torch.distributed.run"},
      {{"python3", "train.py", "-m", "secret"}, "python3 train.py"},
      {{"/usr/bin/python3", "/usr/bin/vllm", "serve", "-m", "secret"}, "python3 vllm"},
      {{"python3", "/usr/bin/torchrun", "--nproc=2", "jobs/train.py"}, "python3 train.py"},
      {{"python3", "-c", "import os; os.system('secret.sh')", "secret.py"}, "python3"},
      {{"python3", "-m"}, "python3"},
      {{"python3"}, "python3"},
      {{"torchrun", "--nproc-per-node", "2", "train.py"}, "torchrun train.py"},
      {{"node", "-m", "secret", "server.js"}, "node server.js"},
      {{"bash", "-c", "TOKEN=secret ./run.sh"}, "bash"},
      {{"tool", secret + ".py", "KEY=secret.sh", "x$y.py"}, "tool"},
      {{"julia", "fit.jl"}, "julia fit.jl"},
      {{"Rscript", "fit.R"}, "Rscript fit.R"},
      {{"ray::train (x=secret/y)"}, "ray::train"},
      {{"/opt/a\nb", "\xD0\xB0\x1b.py", "\xD0\xB0.py"}, "a_b \xD0\xB0.py"},
      {{std::string(100, 'x'), std::string(70, 'y') + ".py"}, std::string(64, 'x') + " " + std::string(64, 'y')},
      {{"", "train.py"}, ""},
      {{}, ""},
  };
  for (const Case& each : cases) EXPECT_EQ(command(each.arguments), each.expected);
}

TEST(ProcessInfoTest, TheCommandOfAProcess) {
  const pid_t child = fork();
  if (child == 0) {
    execl("/bin/sleep", "/opt/nvidia/sleep", "1000", nullptr);
    _exit(1);
  }
  EXPECT_TRUE(testing_support::WaitFor([child] { return CommandOf(child) == "sleep"; })) << CommandOf(child);
  kill(child, SIGKILL);
  ASSERT_EQ(waitpid(child, nullptr, 0), child);
  EXPECT_EQ(CommandOf(child), "") << "it has gone";
}

TEST(ProcessInfoTest, AnExecMakesAnotherImage) {
  const std::optional<ProcessImage> own = ImageOf(getpid());
  ASSERT_TRUE(own.has_value());
  const pid_t child = fork();
  if (child == 0) {
    execl("/bin/sleep", "sleep", "1000", nullptr);
    _exit(1);
  }
  // The kernel may report the new stack before the new code during exec().
  EXPECT_TRUE(testing_support::WaitFor(
      [child] { return CommandName(child) == "sleep" && ImageOf(child).value_or(ProcessImage()).code != 0; }));
  EXPECT_NE(ImageOf(child), own);
  EXPECT_EQ(ImageOf(child), ImageOf(child));
  kill(child, SIGKILL);
  siginfo_t info = {};
  ASSERT_EQ(waitid(P_PID, static_cast<id_t>(child), &info, WEXITED | WNOWAIT), 0);
  EXPECT_EQ(ImageOf(child), std::nullopt) << "it has ended";
  waitpid(child, nullptr, 0);
  EXPECT_EQ(ImageOf(child), std::nullopt) << "it has gone";
}

TEST(ProcessInfoTest, OtherUsersAreNotToldOfTheImage) {
  if (geteuid() != 0) GTEST_SKIP() << "needs root, to become another user";
  const pid_t child = fork();
  if (child == 0) _exit(setuid(65534) == 0 && !ImageOf(getppid()).has_value() ? 0 : 1);
  int status = 0;
  waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
}

TEST(ProcessInfoTest, ThisProcess) {
  const absl::StatusOr<ProcessUser> user = UserOf(getpid());
  ASSERT_TRUE(user.ok()) << user.status();
  EXPECT_EQ(user->uid, geteuid());
  EXPECT_EQ(user->gids.front(), getegid());
  std::vector<gid_t> groups(static_cast<size_t>(getgroups(0, nullptr)));
  ASSERT_EQ(getgroups(static_cast<int>(groups.size()), groups.data()), static_cast<int>(groups.size()));
  for (const gid_t gid : groups) EXPECT_NE(std::count(user->gids.begin(), user->gids.end(), gid), 0) << gid;
  EXPECT_EQ(CommandName(getpid()), "server_test");
}

TEST(ProcessInfoTest, AProcessThatHasGone) {
  const pid_t child = fork();
  if (child == 0) {
    pause();
    _exit(0);
  }
  const UniqueFd pidfd(static_cast<int>(syscall(SYS_pidfd_open, child, 0)));
  ASSERT_TRUE(pidfd.valid());
  EXPECT_FALSE(HasEnded(pidfd));
  kill(child, SIGKILL);
  ASSERT_EQ(waitpid(child, nullptr, 0), child);
  EXPECT_TRUE(HasEnded(pidfd));
  EXPECT_TRUE(absl::IsNotFound(UserOf(child).status()));
  EXPECT_EQ(CommandName(child), "client");
  EXPECT_EQ(CgroupOf(child), std::nullopt);
}

}  // namespace
}  // namespace vrambroker
