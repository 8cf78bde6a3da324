// SPDX-License-Identifier: Apache-2.0
//
// Holders of a memory file, also for a daemon without root.
#include "allocator/device/file_holders.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <linux/capability.h>
#include <linux/kcmp.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "allocator/device/process_files.h"
#include "tests/support/other_process.h"
#include "tests/support/thread_state.h"

namespace vrambroker {
namespace {

using ::testing::HasSubstr;
using testing_support::Child;
using testing_support::kNobody;
using testing_support::kOther;
using testing_support::RunAs;

constexpr char kName[] = "vrambroker-file-holders-test";

struct Seen {
  bool ok = false;
  bool found = false;
  uint64_t unread = 0;
};

// Leaves the process `spare` free descriptors.
void UseUpDescriptors(int spare) {
  const rlimit limit = {.rlim_cur = 256, .rlim_max = 256};
  if (setrlimit(RLIMIT_NOFILE, &limit) != 0) _exit(101);
  int last = -1;
  for (int fd = 0; (fd = dup(0)) >= 0;) last = fd;
  for (int i = 0; i < spare; ++i) close(last - i);
}

// The findings of a process under another user than `holder`: with `spare` free descriptors, or without a limit.
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
  // The holder has the file open, but not mapped.
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
  // The search needs four descriptors: /proc, task, fdinfo, and a file in fdinfo. With fewer, the search must fail,
  // because an empty result would claim that the file has no holder.
  for (const int spare : {0, 1, 2, 3}) EXPECT_FALSE(Look(fd, holder, ptrace, spare).ok) << spare;
  EXPECT_TRUE(Look(fd, holder, ptrace, 4).found);
  kill(holder, SIGKILL);
  EXPECT_EQ(waitpid(holder, nullptr, 0), holder);
  EXPECT_FALSE(Look(fd, holder, ptrace).found);
  close(fd);
}

bool IsHolder(int fd, pid_t pid) {
  const absl::StatusOr<SegmentHolders> holders = FindFileHolders({fd}, kName);
  EXPECT_TRUE(holders.ok()) << holders.status();
  return holders.ok() && std::any_of(holders->holders.begin(), holders->holders.end(),
                                     [pid](const SegmentHolders::Holder& holder) { return holder.pid == pid; });
}

// /proc/PID shows only the main thread. The other threads live on when the main thread ends.
TEST(FileHoldersTest, AProcessWhoseMainThreadHasEndedHoldsWhatItsOthersHold) {
  const int fd = memfd_create(kName, MFD_CLOEXEC);
  ASSERT_GE(fd, 0);
  ASSERT_EQ(ftruncate(fd, 4096), 0);
  const auto end_main_thread = [](pid_t main_thread) {
    std::thread([main_thread] {
      // The main thread is a zombie now, and has no open file.
      while (StateOfThread(main_thread) != 'Z') {
      }
      Child::Stay();
    }).detach();
    syscall(SYS_exit, 0);
  };
  {
    const Child child([&] { end_main_thread(getpid()); });
    EXPECT_TRUE(IsHolder(fd, child.pid())) << "open";
  }
  {
    const Child child([&] {
      if (mmap(nullptr, 4096, PROT_READ, MAP_SHARED, fd, 0) == MAP_FAILED) _exit(1);
      close(fd);
      end_main_thread(getpid());
    });
    EXPECT_TRUE(IsHolder(fd, child.pid())) << "mapped";
  }
  {
    const Child child([&] { close(fd), end_main_thread(getpid()); });
    EXPECT_FALSE(IsHolder(fd, child.pid()));
  }
  close(fd);
}

TEST(FileHoldersTest, AThreadMayHaveDescriptorsOfItsOwn) {
  const int fd = memfd_create(kName, MFD_CLOEXEC);
  ASSERT_GE(fd, 0);
  const Child child([&] {
    std::atomic<bool> has_its_own{false};
    std::thread([&] {
      if (unshare(CLONE_FILES) != 0) _exit(1);
      has_its_own = true;
      for (;;) pause();
    }).detach();
    while (!has_its_own) std::this_thread::yield();
    close(fd);
    Child::Stay();
  });
  EXPECT_TRUE(IsHolder(fd, child.pid()));
  close(fd);
}

uint64_t BytesOf(absl::string_view rest) {
  uint64_t bytes = 0;
  return absl::SimpleAtoi(rest, &bytes) ? bytes : 0;
}

TEST(LeftFilesTest, APidTogetherWithItsStartIsOfOneProcess) {
  EXPECT_GT(StartOf(getpid()), 0u);
  EXPECT_EQ(StartOf(getpid()), StartOf(getpid()));
  const Child child([] {
    (void)prctl(PR_SET_NAME, ") R 1 (x");
    Child::Stay();
  });
  EXPECT_GE(StartOf(child.pid()), StartOf(getpid()));
  EXPECT_EQ(StartOf(0), 0u);
}

TEST(LeftFilesTest, FindsWhatOthersHoldOfAnEarlierProcess) {
  const std::string name = std::string(kName) + ":left:";
  const auto create = [&](const std::string& rest, uint64_t bytes) {
    const int fd = memfd_create((name + rest).c_str(), MFD_CLOEXEC);
    EXPECT_EQ(ftruncate(fd, static_cast<off_t>(bytes)), 0);
    return fd;
  };
  const int open = create("4096", 4096);
  const int mapped = create("8192", 8192);
  const int lying = create("999999", 4096);
  const int other = create("x", 4096);
  struct stat mapped_file = {};
  ASSERT_EQ(fstat(mapped, &mapped_file), 0);
  const Child child([&] {
    // A mapping of half of the file holds the whole file.
    if (mmap(nullptr, 4096, PROT_READ, MAP_SHARED, mapped, 4096) == MAP_FAILED) _exit(1);
    close(mapped);
    Child::Stay();
  });
  for (const int fd : {open, mapped, lying, other}) close(fd);
  const absl::StatusOr<LeftSegments> left = FindLeftFiles(name, BytesOf, RecordedFiles());
  ASSERT_TRUE(left.ok()) << left.status();
  ASSERT_EQ(left->segments.size(), 3u);
  uint64_t sum = 0;
  for (const LeftSegment& segment : left->segments) {
    EXPECT_EQ(segment.holders, std::vector<ProcessId>({{.pid = child.pid(), .started = StartOf(child.pid())}}));
    sum += segment.bytes;
    if (segment.file_inode == mapped_file.st_ino) {
      EXPECT_EQ(segment.bytes, 8192u);
    }
  }
  EXPECT_EQ(sum, 4096u + 8192u + 4096u) << "what the file has, where that can be seen";
}

TEST(LeftFilesTest, AnotherUsersFilesAreNotOurs) {
  if (geteuid() != 0) GTEST_SKIP() << "only root can become other users";
  const std::string name = std::string(kName) + ":forged:";
  const Child child([&] {
    if (setresuid(kOther, kOther, kOther) != 0) _exit(1);
    const int fd = memfd_create((name + "4096").c_str(), MFD_CLOEXEC);
    if (ftruncate(fd, 1 << 30) != 0 || mmap(nullptr, 4096, PROT_READ, MAP_SHARED, fd, 0) == MAP_FAILED) _exit(1);
    Child::Stay();
  });
  const absl::StatusOr<LeftSegments> left = FindLeftFiles(name, BytesOf, RecordedFiles());
  ASSERT_TRUE(left.ok()) << left.status();
  EXPECT_EQ(left->segments.size(), 0u);
}

// Only root and processes with CAP_CHECKPOINT_RESTORE see the owner of a mapped file. Without CAP_CHECKPOINT_RESTORE,
// the search believes a file's name only in processes without a gain from a forged name.
TEST(LeftFilesTest, WithoutTheRightToSeeAFileTheNameCountsOfProcessesOfOurOwn) {
  if (geteuid() != 0) GTEST_SKIP() << "only root can become other users";
  int status = -1;
  constexpr uint64_t kPtrace = uint64_t{1} << CAP_SYS_PTRACE;
  constexpr uint64_t kRestore = uint64_t{1} << 40;  // CAP_CHECKPOINT_RESTORE
  ASSERT_GT(waitpid(RunAs(kNobody, kPtrace, [] {}), &status, 0), 0);
  if (status != 0) GTEST_SKIP() << "this root may not change its user or keep CAP_SYS_PTRACE: a container's?";
  const std::string name = std::string(kName) + ":named:";
  const auto map_as = [&](uid_t uid) {
    return std::make_unique<Child>([&name, uid] {
      if (setresuid(uid, uid, uid) != 0 || prctl(PR_SET_DUMPABLE, 1) != 0) _exit(1);
      const int fd = memfd_create((name + "4096").c_str(), MFD_CLOEXEC);
      if (ftruncate(fd, 1 << 30) != 0 || mmap(nullptr, 4096, PROT_READ, MAP_SHARED, fd, 0) == MAP_FAILED) _exit(1);
      close(fd);
      Child::Stay();
    });
  };
  // Returns 0 for no segment, 1 for the size in the file's name (4096 bytes), 2 for the file's own size.
  const auto found = [&](uint64_t capabilities) {
    const pid_t looker = RunAs(kNobody, capabilities, [&] {
      const absl::StatusOr<LeftSegments> left = FindLeftFiles(name, BytesOf, RecordedFiles());
      _exit(!left.ok() ? 99 : left->segments.empty() ? 0 : left->segments[0].bytes == 4096 ? 1 : 2);
    });
    EXPECT_EQ(waitpid(looker, &status, 0), looker);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  };
  {
    const std::unique_ptr<Child> other = map_as(kOther);
    EXPECT_EQ(found(kPtrace), 0) << "another user may have forged it";
  }
  const std::unique_ptr<Child> own = map_as(kNobody);
  EXPECT_EQ(found(kPtrace), 1);
  const int seen = found(kPtrace | kRestore);
  if (seen == 100) GTEST_SKIP() << "this root has no CAP_CHECKPOINT_RESTORE";
  EXPECT_EQ(seen, 2);
}

TEST(LeftFilesTest, AFileInAFolderIsNoMemoryFile) {
  const std::string name = std::string(kName) + ":path:";
  const std::string path = testing::TempDir() + LinkTo(name) + "4096";
  std::ofstream(path) << std::string(4096, 'x');
  const int fd = open(path.c_str(), O_RDWR | O_CLOEXEC);
  ASSERT_GE(fd, 0);
  const Child child([&] {
    if (mmap(nullptr, 4096, PROT_READ, MAP_SHARED, fd, 0) == MAP_FAILED) _exit(1);
    Child::Stay();
  });
  close(fd);
  const absl::StatusOr<LeftSegments> left = FindLeftFiles(name, BytesOf, RecordedFiles());
  std::filesystem::remove(path);
  ASSERT_TRUE(left.ok()) << left.status();
  EXPECT_EQ(left->segments.size(), 0u);
}

// The service runs under its own user, with two capabilities, and has clients of other users.
class RecordedFilesTest : public ::testing::Test {
 protected:
  // Findings in one process.
  struct Left {
    bool ok = false;
    uint64_t segments = 0;
    uint64_t bytes = 0;
    uint64_t unread = 0;  // count over all processes
  };

  void SetUp() override {
    if (geteuid() != 0) GTEST_SKIP() << "only root can become other users";
    for (const auto& [uid, capabilities] : {std::pair(kNobody, kOfTheService), std::pair(kOther, uint64_t{0})}) {
      int status = -1;
      ASSERT_GT(waitpid(RunAs(uid, capabilities, [] {}), &status, 0), 0);
      if (status != 0) GTEST_SKIP() << "this root may not become uid " << uid << ", or lacks a capability";
    }
    const int fd = memfd_create(kName, MFD_CLOEXEC);
    const bool has_inodes = IdentityOf(fd).mounted.has_value();
    close(fd);
    if (!has_inodes) GTEST_SKIP() << "needs Linux 5.14";
  }

  // A file of `bytes` with a segment's name, and the file's inode.
  std::pair<int, uint64_t> CreateFile(off_t bytes, unsigned flags = 0) const {
    const int fd = memfd_create((name_ + "4096").c_str(), MFD_CLOEXEC | flags);
    struct stat file = {};
    if (fd >= 0 && (ftruncate(fd, bytes) != 0 || fstat(fd, &file) != 0)) return {-1, 0};
    return {fd, file.st_ino};
  }

  // A process of another user that has the file only mapped.
  static std::unique_ptr<Child> MapAsOther(int fd) {
    auto child = std::make_unique<Child>([&] {
      if (setresuid(kOther, kOther, kOther) != 0 ||
          mmap(nullptr, 4096, PROT_READ, MAP_SHARED | MAP_NORESERVE, fd, 0) == MAP_FAILED) {
        _exit(1);
      }
      close(fd);
      Child::Stay();
    });
    close(fd);
    return child;
  }

  Left Look(pid_t holder, const RecordedFiles& recorded) const {
    std::array<int, 2> pipe_fds = {};
    EXPECT_EQ(pipe(pipe_fds.data()), 0);
    const pid_t looker = RunAs(kNobody, kOfTheService, [&] {
      const absl::StatusOr<LeftSegments> left = FindLeftFiles(name_, BytesOf, recorded);
      Left seen;
      seen.ok = left.ok();
      if (left.ok()) {
        seen.unread = left->unread_processes;
        for (const LeftSegment& segment : left->segments) {
          if (segment.holders.size() != 1 || segment.holders[0].pid != holder) continue;
          ++seen.segments;
          seen.bytes += segment.bytes;
        }
      }
      (void)!write(pipe_fds[1], &seen, sizeof seen);
    });
    Left seen;
    close(pipe_fds[1]);
    EXPECT_EQ(read(pipe_fds[0], &seen, sizeof seen), static_cast<ssize_t>(sizeof seen));
    close(pipe_fds[0]);
    EXPECT_EQ(waitpid(looker, nullptr, 0), looker);
    EXPECT_TRUE(seen.ok);
    return seen;
  }

  static constexpr uint64_t kOfTheService = uint64_t{1} << CAP_SYS_PTRACE | uint64_t{1} << 40;  // CHECKPOINT_RESTORE
  // The name differs between tests that run at the same time.
  const std::string name_ = std::string(kName) + ":" + std::to_string(getpid()) + ":";
};

TEST_F(RecordedFilesTest, CountInProcessesOfOtherUsersThatHaveThemOnlyMapped) {
  const auto [fd, inode] = CreateFile(8192);
  ASSERT_GE(fd, 0);
  const std::unique_ptr<Child> holder = MapAsOther(fd);
  const Left unknown = Look(holder->pid(), {{~uint64_t{0}, 8192}});
  EXPECT_EQ(unknown.segments, 0u);
  const Left left = Look(holder->pid(), {{inode, 8192}});
  EXPECT_EQ(left.segments, 1u);
  EXPECT_EQ(left.bytes, 8192u) << "as recorded: the name and the mapping say less";
  EXPECT_EQ(unknown.unread, left.unread + 1) << "what cannot be told is said";
}

TEST_F(RecordedFilesTest, CountInProcessesOfOtherUsersThatHaveThemOnlyOpen) {
  const auto [fd, inode] = CreateFile(8192);
  ASSERT_GE(fd, 0);
  const Child holder([] {
    if (setresuid(kOther, kOther, kOther) != 0) _exit(1);
    Child::Stay();
  });
  close(fd);
  const Left left = Look(holder.pid(), {{inode, 8192}});
  EXPECT_EQ(left.segments, 1u);
  EXPECT_EQ(left.bytes, 8192u);
}

// A user who wants to take memory away from others gives a file the name of a segment.
TEST_F(RecordedFilesTest, AnotherFileOfTheirNameDoesNotCount) {
  const std::pair<int, uint64_t> file = CreateFile(8192);
  const int segment = file.first;
  ASSERT_GE(segment, 0);
  uint64_t unread = 0;
  {
    const Child idle([] { Child::Stay(); });
    unread = Look(idle.pid(), {}).unread;
  }
  const Child liar([&] {
    close(segment);
    if (setresuid(kOther, kOther, kOther) != 0 || prctl(PR_SET_DUMPABLE, 1) != 0) _exit(1);
    const int fd = CreateFile(1 << 30).first;
    for (int i = 0; i < 3; ++i) {
      if (mmap(nullptr, 4096, PROT_READ, MAP_SHARED, fd, 0) == MAP_FAILED) _exit(1);
    }
    Child::Stay();
  });
  close(segment);
  const Left left = Look(liar.pid(), {{file.second, 8192}});
  EXPECT_EQ(left.segments, 0u);
  EXPECT_EQ(left.unread, unread + 1) << "one process";
}

// Files of huge pages have the names of memory files, too, but inodes of another file system.
TEST_F(RecordedFilesTest, AFileOfHugePagesDoesNotCount) {
  const auto [fd, inode] = CreateFile(2 << 20, MFD_HUGETLB);
  if (fd < 0) GTEST_SKIP() << "no huge pages here";
  const std::unique_ptr<Child> liar = MapAsOther(fd);
  EXPECT_EQ(Look(liar->pid(), {{inode, 8192}}).segments, 0u);
}

TEST(HowToLookIntoProcessesTest, NamesWhatIsMissing) {
  EXPECT_EQ(HowToLookIntoProcesses(1000, /*has_ptrace=*/false, /*is_in_user_namespace=*/false),
            "run the daemon as root, or with CAP_SYS_PTRACE on Linux 5.14 or newer");
  EXPECT_THAT(HowToLookIntoProcesses(0, false, false), HasSubstr("is root, but lacks the capability CAP_SYS_PTRACE"));
  EXPECT_THAT(HowToLookIntoProcesses(0, true, true), HasSubstr("in a user namespace of its own"));
  EXPECT_THAT(HowToLookIntoProcesses(0, true, false), HasSubstr("is root and has CAP_SYS_PTRACE"));
  EXPECT_THAT(HowToLookIntoProcesses(1000, true, false), HasSubstr("on older ones run it as root"));
}

}  // namespace
}  // namespace vrambroker
