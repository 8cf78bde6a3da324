// SPDX-License-Identifier: Apache-2.0
#include "server/identity/process_watch.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <optional>
#include <string>
#include <thread>

#include "allocator/device/process_files.h"
#include "server/identity/process_info.h"
#include "tests/support/util.h"

namespace vrambroker {
namespace {

using testing_support::WaitFor;

pid_t Child() {
  const pid_t child = fork();
  if (child == 0) {
    pause();
    _exit(0);
  }
  return child;
}

void Kill(pid_t child) {
  kill(child, SIGKILL);
  EXPECT_EQ(waitpid(child, nullptr, 0), child);
}

TEST(ProcessStatTest, TheNameMayHaveAnythingInIt) {
  const std::string rest = " 1 1 0 -1 4194560 2 0 0 0 0 0 0 0 20 0 3 0 4711 2 0\n";
  for (const char* name : {"cat", "a b", ") Z 1 (", ""}) {
    const std::optional<ProcessStat> stat = ParseProcessStat(std::string("12 (") + name + ") S 1" + rest);
    ASSERT_TRUE(stat.has_value()) << name;
    EXPECT_EQ(stat->state, 'S');
    EXPECT_EQ(stat->threads, 3u);
    EXPECT_EQ(stat->started, 4711u);
  }
  for (const char* text :
       {"", "12", "12 (cat", "12 (cat) S 1 1", "12 (cat) S 1 1 1 0 -1 4194560 2 0 0 0 0 0 0 0 20 0 x 0 4711 2"}) {
    EXPECT_FALSE(ParseProcessStat(text).has_value()) << text;
  }
}

TEST(ProcessStatTest, OfThisProcess) {
  EXPECT_FALSE(HasEnded(ProcessId{.pid = getpid(), .started = StartOf(getpid())}));
  EXPECT_TRUE(HasEnded(ProcessId{.pid = getpid(), .started = 1})) << "another that had its pid";
}

// A process may choose any name.
TEST(ProcessStatTest, OfAProcessWithLineBreaksInItsName) {
  const std::string name = "a\n1) Z\n2";
  const pid_t child = fork();
  if (child == 0) {
    prctl(PR_SET_NAME, name.c_str());
    pause();
    _exit(0);
  }
  EXPECT_TRUE(WaitFor([&] { return ReadProcessFile(child, "comm") == name + "\n"; }));
  const uint64_t started = StartOf(child);
  EXPECT_GE(started, StartOf(getpid()));
  EXPECT_FALSE(HasEnded(ProcessId{.pid = child, .started = started}));
  EXPECT_TRUE(HasEnded(ProcessId{.pid = child, .started = started + 1})) << "another that had its pid";
  EXPECT_TRUE(ImageOf(child).has_value());
  Kill(child);
}

TEST(ProcessStatTest, AZombieHasEnded) {
  const pid_t child = Child();
  const ProcessId process{.pid = child, .started = StartOf(child)};
  EXPECT_FALSE(HasEnded(process));
  kill(child, SIGKILL);
  siginfo_t info;
  ASSERT_EQ(waitid(P_PID, static_cast<id_t>(child), &info, WEXITED | WNOWAIT), 0);
  EXPECT_TRUE(HasEnded(process));
  Kill(child);
  EXPECT_TRUE(HasEnded(process));
}

// The memory of such a process is in use.
TEST(ProcessStatTest, AProcessWhoseMainThreadHasEndedLives) {
  std::array<int, 2> ends = {};
  ASSERT_EQ(pipe2(ends.data(), O_CLOEXEC), 0);
  const pid_t child = fork();
  if (child == 0) {
    std::thread([] { pause(); }).detach();
    (void)!write(ends[1], "x", 1);
    syscall(SYS_exit, 0);  // ends only this thread; pthread_exit() would unwind through the test
  }
  char ready = 0;
  ASSERT_EQ(read(ends[0], &ready, 1), 1);
  const ProcessId process{.pid = child, .started = StartOf(child)};
  ASSERT_TRUE(WaitFor([&] {
    std::string text(4096, '\0');
    const UniqueFd file(open(("/proc/" + std::to_string(child) + "/stat").c_str(), O_RDONLY | O_CLOEXEC));
    text.resize(static_cast<size_t>(std::max<ssize_t>(read(file.get(), text.data(), text.size()), 0)));
    return ParseProcessStat(text).value_or(ProcessStat()).state == 'Z';
  }));
  EXPECT_FALSE(HasEnded(process));
  Kill(child);
  EXPECT_TRUE(HasEnded(process));
  close(ends[0]);
  close(ends[1]);
}

class ProcessWatchTest : public ::testing::Test {
 protected:
  ProcessWatch watch_{/*use_pidfds=*/false};
};

// A watch without pidfds needs no socket. Tests with a daemon make connections, and cover pidfds.
TEST_F(ProcessWatchTest, EachDescriptorTellsOfTheEnd) {
  EXPECT_FALSE(watch_.has_pidfds());
  const pid_t child = Child();
  const pid_t other = Child();
  const auto first = watch_.OfPeer(-1, child);
  const auto second = watch_.OfPeer(-1, child);
  const auto others = watch_.OfPeer(-1, other);
  ASSERT_TRUE(first.ok() && second.ok() && others.ok()) << first.status() << second.status() << others.status();
  const UniqueFd copy(fcntl((*first)->get(), F_DUPFD_CLOEXEC, 0));
  EXPECT_FALSE(HasEnded(**first));
  Kill(child);
  EXPECT_TRUE(WaitFor([&] { return HasEnded(**first) && HasEnded(**second) && HasEnded(copy); }));
  EXPECT_FALSE(HasEnded(**others));
  Kill(other);
  EXPECT_TRUE(WaitFor([&] { return HasEnded(**others); }));
}

TEST_F(ProcessWatchTest, AProcessThatHasGoneIsNotWatched) {
  const pid_t child = Child();
  Kill(child);
  EXPECT_TRUE(absl::IsNotFound(watch_.OfPeer(-1, child).status()));
}

TEST_F(ProcessWatchTest, EndsWhileItWatches) {
  const pid_t child = Child();
  { const auto forgotten = watch_.OfPeer(-1, child); }
  const auto kept = watch_.OfPeer(-1, child);
  EXPECT_TRUE(kept.ok());
  Kill(child);
}

}  // namespace
}  // namespace vrambroker
