// SPDX-License-Identifier: Apache-2.0
#include "allocator/device/session_mark.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <linux/capability.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <vector>

#include "allocator/device/file_holders.h"
#include "tests/support/other_process.h"

namespace vrambroker {
namespace {

using testing_support::Child;
using testing_support::kNobody;
using testing_support::kOther;
using testing_support::RunAs;

SessionMark MarkOf(const UniqueFd& fd) {
  const absl::StatusOr<SessionMark> mark = FindSessionMark(getpid(), static_cast<uint32_t>(fd.get()));
  EXPECT_TRUE(mark.ok()) << mark.status();
  return mark.value_or(0);
}

std::vector<pid_t> HoldersOf(const std::vector<SessionMark>& marks, size_t index = 0) {
  const absl::StatusOr<SegmentHolders> found = FindMarkHolders(marks);
  EXPECT_TRUE(found.ok()) << found.status();
  std::vector<pid_t> pids;
  for (const SegmentHolders::Holder& holder : found.ok() ? found->holders : SegmentHolders().holders) {
    if (holder.segment == index) pids.push_back(holder.pid);
  }
  return pids;
}

TEST(SessionMarkTest, IsInheritedByAForkedChild) {
  const UniqueFd one = MakeSessionMark();
  UniqueFd other = MakeSessionMark();
  const std::vector<SessionMark> marks = {0, MarkOf(one), MarkOf(other)};
  EXPECT_NE(marks[1], marks[2]);
  EXPECT_EQ(HoldersOf(marks, 1), std::vector<pid_t>()) << "not this process, which asks";
  {
    const Child child([&] {
      other.Reset();
      Child::Stay();
    });
    EXPECT_EQ(HoldersOf(marks, 0), std::vector<pid_t>());
    EXPECT_EQ(HoldersOf(marks, 1), std::vector<pid_t>{child.pid()});
    EXPECT_EQ(HoldersOf(marks, 2), std::vector<pid_t>()) << "it has closed this one";
  }
  EXPECT_EQ(HoldersOf(marks, 1), std::vector<pid_t>());
}

TEST(SessionMarkTest, IsNotInheritedByAnotherProgram) {
  const UniqueFd mark = MakeSessionMark();
  const SessionMark known = MarkOf(mark);
  std::array<int, 2> input = {};
  std::array<int, 2> started = {};
  ASSERT_EQ(pipe2(input.data(), O_CLOEXEC), 0);
  ASSERT_EQ(pipe2(started.data(), O_CLOEXEC), 0);
  const pid_t child = fork();
  if (child == 0) {
    dup2(input[0], STDIN_FILENO);
    execlp("cat", "cat", nullptr);
    _exit(1);
  }
  close(started[1]);
  char byte = 0;
  EXPECT_EQ(read(started[0], &byte, 1), 0) << "until exec() has closed it";
  EXPECT_EQ(HoldersOf({known}), std::vector<pid_t>());
  for (const int fd : {input[0], input[1], started[0]}) close(fd);
  int status = -1;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0) << "cat ran until the end of its input";
}

TEST(SessionMarkTest, OtherFilesAreNone) {
  const auto code = [](int fd) { return FindSessionMark(getpid(), static_cast<uint32_t>(fd)).status().code(); };
  const UniqueFd memory(memfd_create("vrambroker-another", MFD_CLOEXEC));
  const UniqueFd null(open("/dev/null", O_RDONLY | O_CLOEXEC));
  EXPECT_EQ(code(memory.get()), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code(null.get()), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code(-1), absl::StatusCode::kNotFound);
  UniqueFd mark = MakeSessionMark();
  const int closed = mark.get();
  EXPECT_EQ(code(closed), absl::StatusCode::kOk);
  mark.Reset();
  EXPECT_EQ(code(closed), absl::StatusCode::kNotFound);
}

// A driver's file in a new folder.
struct Driver {
  Driver() {
    EXPECT_NE(mkdtemp(folder.data()), nullptr);
    EXPECT_EQ(chmod(folder.c_str(), 0755), 0);
    fd = UniqueFd(open((folder + "/driver0").c_str(), O_CREAT | O_RDWR | O_CLOEXEC, 0644));
    EXPECT_TRUE(fd.valid());
  }
  ~Driver() {
    (void)unlink((folder + "/driver0").c_str());
    (void)rmdir(folder.c_str());
  }
  std::string files() const { return folder + "/driver"; }

  std::string folder = "/tmp/vrambroker-driver-XXXXXX";
  UniqueFd fd;
};

// Data loaders of Megatron-LM close the driver, and so hold none of their parent's memory.
TEST(SessionMarkTest, WhoHasClosedTheDriverHoldsNothing) {
  const UniqueFd mark = MakeSessionMark();
  const SessionMark known = MarkOf(mark);
  Driver driver;
  const auto holders = [&] {
    const absl::StatusOr<SegmentHolders> found = FindMarkHolders({known}, driver.files());
    EXPECT_TRUE(found.ok()) << found.status();
    std::vector<pid_t> pids;
    for (const auto& holder : found.value_or(SegmentHolders()).holders) pids.push_back(holder.pid);
    return pids;
  };
  const Child keeper([] { Child::Stay(); });
  const Child closer([&] {
    driver.fd.Reset();
    Child::Stay();
  });
  EXPECT_EQ(holders(), std::vector<pid_t>{keeper.pid()});
  driver.fd.Reset();
  EXPECT_EQ(holders().size(), 2u) << "where this process has no such file, the driver has others";
}

// Outside the chroot, the driver's path begins with the chroot's path.
TEST(SessionMarkTest, ADriverInAChrootIsTheDriver) {
  const UniqueFd mark = MakeSessionMark();
  const SessionMark known = MarkOf(mark);
  Driver driver;
  const std::string root = driver.folder + "/chroot";
  std::filesystem::create_directories(root + driver.folder);
  UniqueFd inside(open((root + driver.files() + "0").c_str(), O_CREAT | O_RDWR | O_CLOEXEC, 0644));
  ASSERT_TRUE(inside.valid());
  const Child child([&] {
    driver.fd.Reset();
    Child::Stay();
  });
  inside.Reset();
  const absl::StatusOr<SegmentHolders> found = FindMarkHolders({known}, driver.files());
  std::filesystem::remove_all(root);
  ASSERT_TRUE(found.ok()) << found.status();
  ASSERT_EQ(found->holders.size(), 1u);
  EXPECT_EQ(found->holders[0].pid, child.pid());
}

TEST(SessionMarkTest, CapSysPtraceIsEnough) {
  if (geteuid() != 0) GTEST_SKIP() << "only root can become other users";
  const UniqueFd mark = MakeSessionMark();
  if (!IdentityOf(mark.get()).mounted.has_value()) GTEST_SKIP() << "needs Linux 5.14";
  const UniqueFd null(open("/dev/null", O_RDONLY | O_CLOEXEC));
  const SessionMark known = MarkOf(mark);
  Driver driver;
  const auto become_other = [] {
    if (setresuid(kOther, kOther, kOther) != 0 || prctl(PR_SET_DUMPABLE, 1) != 0) _exit(1);
    Child::Stay();
  };
  const Child child(become_other);
  const Child without_driver([&] {
    driver.fd.Reset();
    become_other();
  });
  // Exit codes of the looker. 0: finds only the child that has the driver. 1: misses the child, or finds another. 2:
  // has no permission to look for the mark. 3: takes another file for the mark. 4: finds no mark.
  const auto look = [&](uint64_t capabilities) {
    int status = -1;
    const pid_t looker = RunAs(kNobody, capabilities, [&] {
      const absl::StatusOr<SessionMark> found = FindSessionMark(child.pid(), static_cast<uint32_t>(mark.get()));
      if (absl::IsPermissionDenied(found.status())) _exit(2);
      if (FindSessionMark(child.pid(), static_cast<uint32_t>(null.get())).ok()) _exit(3);
      if (!found.ok() || *found != known) _exit(4);
      const absl::StatusOr<SegmentHolders> holders = FindMarkHolders({known}, driver.files());
      const auto is_holder = [&](const Child& process) {
        return std::any_of(holders->holders.begin(), holders->holders.end(),
                           [&](const auto& holder) { return holder.pid == process.pid(); });
      };
      _exit(holders.ok() && is_holder(child) && !is_holder(without_driver) ? 0 : 1);
    });
    EXPECT_EQ(waitpid(looker, &status, 0), looker);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  };
  const int seen = look(uint64_t{1} << CAP_SYS_PTRACE);
  if (seen == 100) GTEST_SKIP() << "this root may not change its user or keep CAP_SYS_PTRACE: a container's?";
  EXPECT_EQ(seen, 0);
  EXPECT_EQ(look(0), 2);
}

}  // namespace
}  // namespace vrambroker
