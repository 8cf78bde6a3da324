// SPDX-License-Identifier: Apache-2.0
#include "server/identity/socket_dir.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <functional>
#include <latch>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/identity/unix_socket.h"
#include "tests/support/util.h"

namespace vrambroker {
namespace {

using ::testing::HasSubstr;

// Runs before each flock() of this thread, unless null.
thread_local const std::function<void()>* before_flock = nullptr;

}  // namespace
}  // namespace vrambroker

// Replaces the C library's flock(): a test can act between the opening of a file and the locking.
extern "C" int flock(int fd, int operation) noexcept {
  if (vrambroker::before_flock != nullptr) (*vrambroker::before_flock)();
  return static_cast<int>(syscall(SYS_flock, fd, operation));
}

namespace vrambroker {
namespace {

constexpr uid_t kNobody = 65534;

class SocketDirTest : public ::testing::Test {
 protected:
  // Leaves the lock of version 0.1.
  void LeaveOldLock() const {
    std::ofstream(path_) << "999999999\n";
    chmod(path_.c_str(), 0644);
  }
  mode_t mode() const {
    struct stat found = {};
    return lstat(path_.c_str(), &found) == 0 ? found.st_mode & 0777 : 0;
  }
  std::string Message() const { return std::string(LockSocketDir(dir_).status().message()); }

  const std::string dir_ = testing_support::MakeTempDir();
  const std::string path_ = dir_ + "/vrambroker.lock";
};

// Runs `body` as another user, in a thread. The kernel keeps an identity for each thread.
void AsNobody(const std::function<void()>& body) {
  std::thread([&] {
    ASSERT_EQ(syscall(SYS_setresuid, -1, kNobody, -1), 0);
    body();
  }).join();
}

TEST_F(SocketDirTest, NobodyElseMayOpenTheLock) {
  const absl::StatusOr<UniqueFd> lock = LockSocketDir(dir_);
  ASSERT_TRUE(lock.ok()) << lock.status();
  EXPECT_EQ(mode(), 0600u);
  EXPECT_THAT(Message(), HasSubstr(absl::StrCat("another vrambrokerd (pid ", getpid(), ") serves ", dir_)));
}

TEST_F(SocketDirTest, ALockOfADaemonThatIsGoneIsTakenOver) {
  { ASSERT_TRUE(LockSocketDir(dir_).ok()); }
  EXPECT_TRUE(LockSocketDir(dir_).ok());
  EXPECT_EQ(mode(), 0600u);
}

// Version 0.1 leaves a lock that all users can open, and so hold, or wait for until the daemon dies.
TEST_F(SocketDirTest, WhoHoldsAnOldLockKeepsNobodyFromStarting) {
  LeaveOldLock();
  const UniqueFd holder(open(path_.c_str(), O_RDONLY | O_CLOEXEC));
  ASSERT_EQ(flock(holder.get(), LOCK_EX | LOCK_NB), 0);
  const absl::StatusOr<UniqueFd> lock = LockSocketDir(dir_);
  ASSERT_TRUE(lock.ok()) << lock.status();
  EXPECT_EQ(mode(), 0600u);
  EXPECT_FALSE(std::filesystem::exists(path_ + ".new"));
  EXPECT_THAT(Message(), HasSubstr(absl::StrCat("another vrambrokerd (pid ", getpid(), ")")));
}

TEST_F(SocketDirTest, WhoWaitsForAnOldLockDoesNotGetTheNewOne) {
  LeaveOldLock();
  UniqueFd old_daemon(open(path_.c_str(), O_RDWR | O_CLOEXEC));
  ASSERT_EQ(flock(old_daemon.get(), LOCK_EX | LOCK_NB), 0);
  std::latch opened(1);
  std::atomic<bool> done = false;
  std::thread waiting([&] {
    const UniqueFd file(open(path_.c_str(), O_RDONLY | O_CLOEXEC));
    opened.count_down();
    EXPECT_EQ(flock(file.get(), LOCK_EX), 0);
    while (!done) std::this_thread::yield();
  });
  opened.wait();
  old_daemon.Reset();  // the old daemon dies, and the waiting process gets the old lock, sooner or later
  for (int i = 0; i < 3; ++i) {
    const absl::StatusOr<UniqueFd> lock = LockSocketDir(dir_);
    EXPECT_TRUE(lock.ok()) << lock.status();
  }
  done = true;
  waiting.join();
}

TEST_F(SocketDirTest, AnOldDaemonThatServesIsLeftAlone) {
  LeaveOldLock();
  const UniqueFd old_daemon(open(path_.c_str(), O_RDWR | O_CLOEXEC));
  ASSERT_EQ(flock(old_daemon.get(), LOCK_EX | LOCK_NB), 0);
  const absl::StatusOr<ClientSocket> socket = ListenUnix(dir_ + "/vrambroker.sock", SOCK_STREAM, 0600);
  ASSERT_TRUE(socket.ok());
  EXPECT_THAT(Message(), HasSubstr(absl::StrCat("another vrambrokerd (pid ", getpid(), ") serves ", dir_)));
  EXPECT_EQ(mode(), 0644u);
}

TEST_F(SocketDirTest, OfSeveralThatReplaceAnOldLockOneServes) {
  for (int round = 0; round < 50; ++round) {
    LeaveOldLock();
    const UniqueFd holder(open(path_.c_str(), O_RDONLY | O_CLOEXEC));
    ASSERT_EQ(flock(holder.get(), LOCK_EX | LOCK_NB), 0);
    std::latch start(4);
    std::vector<absl::StatusOr<UniqueFd>> locks(4);
    std::vector<std::thread> daemons;
    for (absl::StatusOr<UniqueFd>& lock : locks) {
      daemons.emplace_back([&] {
        start.arrive_and_wait();
        lock = LockSocketDir(dir_);
      });
    }
    for (std::thread& daemon : daemons) daemon.join();
    int served = 0;
    for (const absl::StatusOr<UniqueFd>& lock : locks) {
      served += lock.ok() ? 1 : 0;
      if (!lock.ok()) {
        EXPECT_THAT(std::string(lock.status().message()), HasSubstr("another vrambrokerd"));
      }
    }
    ASSERT_EQ(served, 1);
    EXPECT_EQ(mode(), 0600u);
    std::filesystem::remove(path_);
  }
}

// Other daemons do not see a lock on a removed file.
TEST_F(SocketDirTest, ALockOnAFileThatIsNotThereAnyMoreIsNone) {
  int calls = 0;
  int removed_at = 1;
  std::string removed = path_;
  const std::function<void()> remove = [&] {
    if (++calls == removed_at) std::filesystem::remove(removed);
  };
  const auto lock_with = [&] {
    calls = 0;
    before_flock = &remove;
    absl::StatusOr<UniqueFd> lock = LockSocketDir(dir_);
    before_flock = nullptr;
    EXPECT_TRUE(lock.ok()) << lock.status();
    EXPECT_GT(calls, removed_at) << "it looks again";
    EXPECT_THAT(Message(), HasSubstr(absl::StrCat("another vrambrokerd (pid ", getpid(), ") serves ", dir_)));
  };
  { ASSERT_TRUE(LockSocketDir(dir_).ok()); }
  lock_with();
  // Removes the new file that replaces the old lock.
  LeaveOldLock();
  removed = path_ + ".new";
  removed_at = 2;
  lock_with();
}

TEST_F(SocketDirTest, WhatIsNoFileIsNamedAndLeftAlone) {
  std::ofstream(dir_ + "/precious") << "data";
  std::filesystem::create_symlink(dir_ + "/precious", path_);
  EXPECT_THAT(Message(), HasSubstr(path_ + " is not a regular file; remove it"));
  EXPECT_EQ(std::filesystem::file_size(dir_ + "/precious"), 4u);
  std::filesystem::remove(path_);
  std::filesystem::create_directory(path_);
  EXPECT_THAT(Message(), HasSubstr(path_ + " is not a regular file; remove it"));
  std::filesystem::remove(path_);
  ASSERT_EQ(mkfifo(path_.c_str(), 0600), 0);
  EXPECT_THAT(Message(), HasSubstr(path_ + " is not a regular file; remove it"));
}

// The owner of such a file is no living daemon: a living daemon would hold the lock.
TEST_F(SocketDirTest, AnotherUsersFileThatNobodyHoldsIsReplaced) {
  if (geteuid() != 0) GTEST_SKIP() << "only root can make another user's file";
  std::ofstream(path_) << "1\n";
  ASSERT_EQ(chown(path_.c_str(), kNobody, kNobody), 0);
  ASSERT_EQ(chmod(path_.c_str(), 0600), 0);
  const absl::StatusOr<UniqueFd> lock = LockSocketDir(dir_);
  ASSERT_TRUE(lock.ok()) << lock.status();
  struct stat found = {};
  ASSERT_EQ(lstat(path_.c_str(), &found), 0);
  EXPECT_EQ(found.st_uid, 0u);
}

// A directory may change its owner while a daemon starts, serves or stops in the directory. The new owner must not take
// the lock away, or two daemons would serve there. Only the lock file shows a daemon that starts or stops: such a
// daemon has no socket.
TEST_F(SocketDirTest, TheLockOfAnotherUsersDaemonIsLeftToIt) {
  if (geteuid() != 0) GTEST_SKIP() << "only root can become another user";
  const absl::StatusOr<UniqueFd> of_root = LockSocketDir(dir_);
  ASSERT_TRUE(of_root.ok()) << of_root.status();
  ASSERT_EQ(chown(dir_.c_str(), kNobody, kNobody), 0);
  AsNobody([&] {
    ASSERT_EQ(access(path_.c_str(), F_OK), 0);
    EXPECT_THAT(Message(), HasSubstr(absl::StrCat(path_, " belongs to user root")));
    EXPECT_THAT(Message(), HasSubstr(absl::StrCat("remove ", path_)));
  });
  struct stat found = {};
  ASSERT_EQ(lstat(path_.c_str(), &found), 0);
  EXPECT_EQ(found.st_uid, 0u) << "replaced";
}

// Root can open every file, and so sees the held lock.
TEST_F(SocketDirTest, RootLeavesTheLockToAnotherUsersDaemon) {
  if (geteuid() != 0) GTEST_SKIP() << "only root can become another user";
  ASSERT_EQ(chown(dir_.c_str(), kNobody, kNobody), 0);
  UniqueFd lock;
  AsNobody([&] {
    absl::StatusOr<UniqueFd> locked = LockSocketDir(dir_);
    ASSERT_TRUE(locked.ok()) << locked.status();
    lock = *std::move(locked);
  });
  ASSERT_EQ(chown(dir_.c_str(), 0, 0), 0);
  EXPECT_THAT(Message(), HasSubstr("another vrambrokerd"));
  struct stat found = {};
  ASSERT_EQ(lstat(path_.c_str(), &found), 0);
  EXPECT_EQ(found.st_uid, kNobody) << "replaced";
  lock.Reset();
  EXPECT_TRUE(LockSocketDir(dir_).ok());
}

// A user who may write to the directory could remove every file, including the lock.
TEST_F(SocketDirTest, ADirectoryThatOthersMayWriteToIsRefused) {
  for (const mode_t mode : {0770, 0757, 01777}) {
    ASSERT_EQ(chmod(dir_.c_str(), mode), 0);
    EXPECT_THAT(Message(), HasSubstr("is not a directory that only this user or root can write to"));
    EXPECT_FALSE(std::filesystem::exists(path_));
  }
}

// An owner of the directory can replace the sockets and pose as the daemon: clients would trust the owner's sockets.
TEST_F(SocketDirTest, AnotherUsersDirectoryIsRefused) {
  if (geteuid() != 0) GTEST_SKIP() << "only root gives directories away";
  ASSERT_EQ(chmod(dir_.c_str(), 0755), 0);
  ASSERT_EQ(chown(dir_.c_str(), kNobody, kNobody), 0);
  EXPECT_THAT(Message(), HasSubstr("is not a directory that only this user or root can write to"));
  EXPECT_FALSE(std::filesystem::exists(path_));
  ASSERT_EQ(chown(dir_.c_str(), 0, 0), 0);
  EXPECT_TRUE(LockSocketDir(dir_).ok());
}

TEST_F(SocketDirTest, AnotherUserIsToldWhoServes) {
  if (geteuid() != 0) GTEST_SKIP() << "only root can become another user";
  const absl::StatusOr<UniqueFd> lock = LockSocketDir(dir_);
  ASSERT_TRUE(lock.ok());
  AsNobody([&] {
    EXPECT_EQ(open(path_.c_str(), O_RDONLY | O_CLOEXEC), -1);
    EXPECT_THAT(Message(), HasSubstr(path_ + " belongs to user root, whose vrambrokerd serves or has served"));
  });
  const absl::StatusOr<ClientSocket> socket = ListenUnix(dir_ + "/vrambroker.sock", SOCK_STREAM, 0666);
  ASSERT_TRUE(socket.ok());
  AsNobody([&] {
    EXPECT_THAT(Message(), HasSubstr(absl::StrCat("another vrambrokerd (pid ", getpid(), ", of user root) serves ",
                                                  dir_, "; choose another --socket-dir")));
  });
}

}  // namespace
}  // namespace vrambroker
