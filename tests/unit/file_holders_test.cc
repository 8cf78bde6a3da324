// SPDX-License-Identifier: Apache-2.0
//
// Who holds a memory file, for a daemon that is not root.
#include "allocator/file_holders.h"

#include <gtest/gtest.h>
#include <linux/capability.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <csignal>
#include <fstream>
#include <functional>
#include <iterator>
#include <optional>
#include <string>

namespace vrambroker {
namespace {

constexpr char kName[] = "vrambroker-file-holders-test";
constexpr uid_t kNobody = 65534;
constexpr uid_t kOther = 54321;

// Runs `body` in a child process, as `uid` with these capabilities alone; returns its process id.
pid_t RunAs(uid_t uid, uint64_t capabilities, const std::function<void()>& body) {
  const pid_t child = fork();
  if (child != 0) return child;
  __user_cap_header_struct header = {.version = _LINUX_CAPABILITY_VERSION_3, .pid = 0};
  std::array<__user_cap_data_struct, 2> sets = {};
  sets[0].effective = sets[0].permitted = static_cast<uint32_t>(capabilities);
  if (prctl(PR_SET_KEEPCAPS, 1) != 0 || setresgid(uid, uid, uid) != 0 || setresuid(uid, uid, uid) != 0 ||
      syscall(SYS_capset, &header, sets.data()) != 0 || prctl(PR_SET_DUMPABLE, 1) != 0) {
    _exit(100);
  }
  body();
  _exit(0);
}

struct Seen {
  bool ok = false;
  bool found = false;
  uint64_t unread = 0;
};

// Leaves this process `spare` descriptors.
void UseUpDescriptors(int spare) {
  const rlimit limit = {.rlim_cur = 256, .rlim_max = 256};
  if (setrlimit(RLIMIT_NOFILE, &limit) != 0) _exit(101);
  int last = -1;
  for (int fd = 0; (fd = dup(0)) >= 0;) last = fd;
  for (int i = 0; i < spare; ++i) close(last - i);
}

// What a process of another user than `holder` finds; with `spare` descriptors, or as many as it likes.
Seen Look(int fd, pid_t holder, uint64_t capabilities, std::optional<int> spare = std::nullopt) {
  std::array<int, 2> pipe_fds = {};
  EXPECT_EQ(pipe(pipe_fds.data()), 0);
  const pid_t child = RunAs(kNobody, capabilities, [&] {
    if (spare.has_value()) UseUpDescriptors(*spare);
    const absl::StatusOr<SegmentHolders> holders = FindFileHolders({fd}, kName);
    Seen seen;
    seen.ok = holders.ok();
    if (holders.ok()) {
      for (const SegmentHolders::Holder& found : holders->holders) seen.found = seen.found || found.pid == holder;
      seen.unread = holders->unread_processes;
    }
    (void)!write(pipe_fds[1], &seen, sizeof seen);
  });
  Seen seen;
  close(pipe_fds[1]);
  EXPECT_EQ(read(pipe_fds[0], &seen, sizeof seen), static_cast<ssize_t>(sizeof seen));
  close(pipe_fds[0]);
  EXPECT_EQ(waitpid(child, nullptr, 0), child);
  return seen;
}

TEST(FileHoldersTest, CapSysPtraceIsEnough) {
  if (geteuid() != 0) GTEST_SKIP() << "only root can become other users";
  const int fd = memfd_create(kName, MFD_CLOEXEC);
  ASSERT_GE(fd, 0);
  std::ifstream info("/proc/self/fdinfo/" + std::to_string(fd));
  const std::string lines((std::istreambuf_iterator<char>(info)), std::istreambuf_iterator<char>());
  if (lines.find("ino:") == std::string::npos) GTEST_SKIP() << "needs Linux 5.14";
  int status = -1;
  ASSERT_GT(waitpid(RunAs(kNobody, uint64_t{1} << CAP_SYS_PTRACE, [] {}), &status, 0), 0);
  if (status != 0) GTEST_SKIP() << "this root may not change its user or keep CAP_SYS_PTRACE: a container's?";
  ASSERT_GT(waitpid(RunAs(kOther, 0, [] {}), &status, 0), 0);
  if (status != 0) GTEST_SKIP() << "this root may not become uid " << kOther;
  // Open, and not mapped.
  const pid_t holder = RunAs(kOther, 0, [] { pause(); });
  ASSERT_GT(holder, 0);
  const uint64_t ptrace = uint64_t{1} << CAP_SYS_PTRACE;
  const absl::StatusOr<SegmentHolders> root = FindFileHolders({fd}, kName);
  ASSERT_TRUE(root.ok()) << root.status();
  EXPECT_TRUE(Look(fd, holder, ptrace).found);
  EXPECT_EQ(Look(fd, holder, ptrace).unread, root->unread_processes)
      << "some virtual machines hide their first process";
  const Seen without = Look(fd, holder, 0);
  EXPECT_FALSE(without.found);
  EXPECT_GT(without.unread, root->unread_processes) << "what cannot be told is said";
  // /proc, fdinfo, and one of its files: with fewer than three, it must not seem that nobody holds the file.
  for (const int spare : {0, 1, 2}) EXPECT_FALSE(Look(fd, holder, ptrace, spare).ok) << spare;
  EXPECT_TRUE(Look(fd, holder, ptrace, 3).found);
  kill(holder, SIGKILL);
  EXPECT_EQ(waitpid(holder, nullptr, 0), holder);
  EXPECT_FALSE(Look(fd, holder, ptrace).found);
  close(fd);
}

}  // namespace
}  // namespace vrambroker
