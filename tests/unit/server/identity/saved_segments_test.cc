// SPDX-License-Identifier: Apache-2.0
#include "server/identity/saved_segments.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <linux/capability.h>
#include <spdlog/sinks/ostream_sink.h>
#include <spdlog/spdlog.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <sstream>
#include <string>

#include "allocator/base/bytes.h"
#include "allocator/device/file_holders.h"
#include "allocator/device/host_device.h"
#include "tests/support/other_process.h"
#include "tests/support/util.h"

namespace vrambroker {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Pair;
using ::testing::UnorderedElementsAre;
using testing_support::kOther;
using testing_support::RunAs;

constexpr char kOwner[] = "0123456789abcdef";
constexpr uintmax_t kHeaderBytes = 128;

class SavedSegmentsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    spdlog::set_default_logger(
        std::make_shared<spdlog::logger>("test", std::make_shared<spdlog::sinks::ostream_sink_mt>(log_)));
  }
  void TearDown() override { spdlog::set_default_logger(before_); }

  // Returns the files that the next daemon finds.
  RecordedFiles LeftIn(const std::string& owner = kOwner, int ordinal = 0) const {
    return SavedSegments(dir_, ordinal, owner).Left();
  }
  // Returns the log since the last call.
  std::string TakeLog() {
    std::string text = log_.str();
    log_.str("");
    return text;
  }
  std::string Text() const {
    std::ifstream file(path_);
    return {std::istreambuf_iterator<char>(file), {}};
  }

  const std::string dir_ = testing_support::MakeTempDir();
  const std::string path_ = dir_ + "/vrambroker.segments.0";
  std::ostringstream log_;
  const std::shared_ptr<spdlog::logger> before_ = spdlog::default_logger();
};

TEST_F(SavedSegmentsTest, TheNextDaemonHasWhatThisOneDidNotFree) {
  {
    SavedSegments first(dir_, 0, kOwner);
    EXPECT_THAT(first.Left(), IsEmpty());
    first.Add(1, 2_MiB);
    first.Add(2, 4_MiB);
    first.Add(uint64_t{1} << 40, 6_MiB);
    first.Remove(1);
    first.Remove(7);
    EXPECT_THAT(first.Left(), IsEmpty()) << "its own are not those of earlier ones";
  }
  struct stat found = {};
  ASSERT_EQ(stat(path_.c_str(), &found), 0);
  EXPECT_EQ(found.st_mode & 0777, 0600u);
  {
    SavedSegments second(dir_, 0, kOwner);
    EXPECT_THAT(second.Left(), UnorderedElementsAre(Pair(2, 4_MiB), Pair(uint64_t{1} << 40, 6_MiB)));
    second.Add(3, 8_MiB);
  }
  EXPECT_THAT(LeftIn(), UnorderedElementsAre(Pair(2, 4_MiB), Pair(uint64_t{1} << 40, 6_MiB), Pair(3, 8_MiB)));
  EXPECT_EQ(std::filesystem::file_size(path_), kHeaderBytes + 3 * 16) << "free slots are used first";
  EXPECT_THAT(LeftIn(kOwner, 1), IsEmpty()) << "each device has its own";
  EXPECT_EQ(TakeLog(), "");
}

TEST_F(SavedSegmentsTest, OnlyWhatIsFoundIsKeptForTheNextDaemon) {
  {
    SavedSegments first(dir_, 0, kOwner);
    for (const uint64_t inode : {1, 2, 3}) first.Add(inode, 2_MiB);
  }
  SavedSegments second(dir_, 0, kOwner);
  second.Add(4, 2_MiB);
  second.KeepFound({2});
  EXPECT_THAT(LeftIn(), UnorderedElementsAre(Pair(2, 2_MiB), Pair(4, 2_MiB)));
  EXPECT_EQ(second.Left().size(), 3u) << "a descriptor may be on its way";
  second.KeepFound({2, 3});
  EXPECT_THAT(LeftIn(), UnorderedElementsAre(Pair(2, 2_MiB), Pair(3, 2_MiB), Pair(4, 2_MiB)));
  // A new file with an earlier file's number is a different file.
  second.Add(1, 4_MiB);
  second.KeepFound({});
  EXPECT_THAT(LeftIn(), UnorderedElementsAre(Pair(1, 4_MiB), Pair(4, 2_MiB)));
  EXPECT_THAT(second.Left(), UnorderedElementsAre(Pair(2, 2_MiB), Pair(3, 2_MiB)));
}

TEST_F(SavedSegmentsTest, WhatAnotherBootOrOwnerLeftIsVoid) {
  SavedSegments(dir_, 0, kOwner).Add(1, 2_MiB);
  EXPECT_THAT(LeftIn(), UnorderedElementsAre(Pair(1, 2_MiB)));
  std::string text = Text();
  const size_t boot = text.find("boot ");
  ASSERT_NE(boot, std::string::npos);
  text[boot + 5] = text[boot + 5] == '0' ? '1' : '0';
  std::ofstream(path_) << text;
  EXPECT_THAT(LeftIn(), IsEmpty());
  EXPECT_EQ(std::filesystem::file_size(path_), kHeaderBytes);
  SavedSegments(dir_, 0, kOwner).Add(1, 2_MiB);
  EXPECT_THAT(LeftIn("another"), IsEmpty());
  EXPECT_THAT(LeftIn(), IsEmpty());
  EXPECT_EQ(TakeLog(), "") << "nothing is wrong";
}

TEST_F(SavedSegmentsTest, AFileThatCannotBeTrustedIsReplaced) {
  const auto expect_replaced = [&](const std::string& what) {
    SavedSegments(dir_, 0, kOwner).Add(9, 2_MiB);
    EXPECT_THAT(TakeLog(), HasSubstr(path_ + " is damaged, or others than this user may write it")) << what;
    EXPECT_THAT(LeftIn(), UnorderedElementsAre(Pair(9, 2_MiB))) << what;
    EXPECT_EQ(TakeLog(), "") << what;
  };
  SavedSegments(dir_, 0, kOwner).Add(1, 2_MiB);
  const std::string good = Text();
  for (const std::string& damaged : {std::string(), std::string("x"), std::string(4096, '\0'), good.substr(0, 100),
                                     "x" + good, good + std::string(17 << 20, '\0')}) {
    std::ofstream(path_) << damaged;
    expect_replaced(damaged.substr(0, 20));
  }
  for (const mode_t mode : {0602, 0620}) {
    std::ofstream(path_) << good;
    ASSERT_EQ(chmod(path_.c_str(), mode), 0);
    expect_replaced("mode");
  }
  if (geteuid() == 0) {
    std::ofstream(path_) << good;
    ASSERT_EQ(chown(path_.c_str(), kOther, kOther), 0);
    expect_replaced("another user's");
  }
  // The daemon does not write to the target of a symbolic link.
  const std::string target = dir_ + "/target";
  std::ofstream(target) << good;
  ASSERT_EQ(chmod(target.c_str(), 0600), 0);
  std::filesystem::remove(path_);
  std::filesystem::create_symlink(target, path_);
  expect_replaced("symbolic link");
  EXPECT_FALSE(std::filesystem::is_symlink(path_));
  std::ifstream file(target);
  EXPECT_EQ(std::string(std::istreambuf_iterator<char>(file), {}), good);
  std::filesystem::remove(path_);
  ASSERT_EQ(mkfifo(path_.c_str(), 0600), 0);
  expect_replaced("pipe");
}

TEST_F(SavedSegmentsTest, OfDamagedEntriesTheOthersAreKept) {
  {
    SavedSegments first(dir_, 0, kOwner);
    for (const uint64_t inode : {1, 2, 3, 4, 5}) first.Add(inode, 2_MiB);
    first.Add(6, 2_MiB + 1);
    first.Add(7, uint64_t{1} << 62);
  }
  std::string text = Text();
  text[kHeaderBytes + 1 * 16] = 1;                   // an inode that another entry has
  text.replace(kHeaderBytes + 2 * 16, 8, 8, '\0');   // bytes without an inode
  text.replace(kHeaderBytes + 3 * 16, 16, 16, 'x');  // no valid segment size
  std::ofstream(path_) << text << "rest";
  EXPECT_THAT(LeftIn(), UnorderedElementsAre(Pair(1, 2_MiB), Pair(5, 2_MiB)));
  EXPECT_THAT(TakeLog(), HasSubstr(path_ + " has 5 damaged entries"));
  EXPECT_THAT(LeftIn(), UnorderedElementsAre(Pair(1, 2_MiB), Pair(5, 2_MiB)));
  EXPECT_EQ(TakeLog(), "") << "they are gone";
}

TEST_F(SavedSegmentsTest, WithoutAFileEverythingElseWorks) {
  std::filesystem::create_directory(path_);
  std::ofstream(path_ + "/x") << "it cannot be replaced";
  SavedSegments record(dir_, 0, kOwner);
  EXPECT_THAT(TakeLog(), HasSubstr("cannot replace " + path_));
  record.Add(1, 2_MiB);
  record.Remove(1);
  record.KeepFound({1});
  EXPECT_THAT(record.Left(), IsEmpty());
  EXPECT_EQ(TakeLog(), "");
  SavedSegments(dir_ + "/missing", 0, kOwner).Add(1, 2_MiB);
  EXPECT_THAT(TakeLog(), HasSubstr("will not count after a restart"));
}

TEST_F(SavedSegmentsTest, AFullDiskIsSaidOnceAndOnlyWhatDoesNotFitIsLost) {
  auto record = std::make_unique<SavedSegments>(dir_, 0, kOwner);
  SavedSegments* const file = record.get();
  const std::unique_ptr<Device> device =
      MakeHostDevice(0, 64_MiB, std::chrono::nanoseconds(0), kOwner, std::move(record));
  const auto allocate = [&] {
    const absl::StatusOr<DeviceSegment> segment = device->AllocateSegment(2_MiB);
    EXPECT_TRUE(segment.ok()) << segment.status();
    return segment.value_or(DeviceSegment());
  };
  const DeviceSegment first = allocate();
  rlimit all = {};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &all), 0);
  rlimit few = all;
  few.rlim_cur = kHeaderBytes + 16 + 8;  // half of a further entry fits
  const auto before = signal(SIGXFSZ, SIG_IGN);
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &few), 0);
  file->Add(1001, 2_MiB);
  file->Add(1002, 2_MiB);
  file->Remove(1001);
  EXPECT_TRUE(device->FreeSegment(first).ok());
  file->Add(1003, 2_MiB);
  file->Add(1004, 2_MiB);
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &all), 0);
  signal(SIGXFSZ, before);
  const std::string log = TakeLog();
  EXPECT_THAT(log, HasSubstr("cannot write " + path_));
  EXPECT_EQ(log.find("cannot write"), log.rfind("cannot write")) << log;
  EXPECT_THAT(LeftIn(), UnorderedElementsAre(Pair(1003, 2_MiB))) << "it had the room of the first";
  const DeviceSegment later = allocate();
  EXPECT_EQ(LeftIn().size(), 2u);
  EXPECT_TRUE(device->FreeSegment(later).ok());
  EXPECT_EQ(LeftIn().size(), 1u);
}

// A whole record names each file that processes can hold of earlier runs. Once the daemon has found all recorded files,
// a process that the daemon may not inspect can hold no further file.
TEST_F(SavedSegmentsTest, ARecordSaysWhetherItIsWhole) {
  EXPECT_FALSE(SavedSegments(dir_, 0, kOwner).IsWhole()) << "somebody has removed it";
  EXPECT_TRUE(SavedSegments(dir_, 0, kOwner).IsWhole());
  EXPECT_TRUE(SavedSegments(dir_, 0, "fedcba9876543210").IsWhole()) << "of another owner: void";
  EXPECT_TRUE(SavedSegments(dir_, 1, kOwner, /*is_new_owner=*/true).IsWhole());
  std::ofstream(path_) << "damaged";
  EXPECT_FALSE(SavedSegments(dir_, 0, kOwner).IsWhole());
}

// The daemon has the service's capabilities. A client of another user holds the memory by a mapping only.
TEST_F(SavedSegmentsTest, ADeviceOfAnUnprivilegedDaemonFindsWhatAnotherUserHolds) {
  if (geteuid() != 0) GTEST_SKIP() << "only root can become other users";
  constexpr uint64_t kOfTheService = uint64_t{1} << CAP_SYS_PTRACE | uint64_t{1} << 40;  // CAP_CHECKPOINT_RESTORE
  int status = -1;
  ASSERT_GT(waitpid(RunAs(testing_support::kNobody, kOfTheService, [] {}), &status, 0), 0);
  if (status != 0) GTEST_SKIP() << "this root may not change its user or keep these capabilities: a container's?";
  ASSERT_GT(waitpid(RunAs(kOther, 0, [] {}), &status, 0), 0);
  if (status != 0) GTEST_SKIP() << "this root may not become uid " << kOther;
  const auto make_device = [&] {
    return MakeHostDevice(0, 64_MiB, std::chrono::nanoseconds(0), kOwner,
                          std::make_unique<SavedSegments>(dir_, 0, kOwner));
  };
  const std::unique_ptr<Device> device = make_device();
  const absl::StatusOr<DeviceSegment> left = device->AllocateSegment(4_MiB);
  const absl::StatusOr<DeviceSegment> freed = device->AllocateSegment(8_MiB);
  ASSERT_TRUE(left.ok() && freed.ok());
  if (!IdentityOf(left->fd).mounted.has_value()) GTEST_SKIP() << "needs Linux 5.14";
  const testing_support::Child holder([&] {
    if (setresuid(kOther, kOther, kOther) != 0) _exit(1);
    for (const DeviceSegment& segment : {*left, *freed}) {
      if (mmap(nullptr, 4096, PROT_READ, MAP_SHARED, segment.fd, 0) == MAP_FAILED) _exit(1);
      close(segment.fd);
    }
    testing_support::Child::Stay();
  });
  EXPECT_TRUE(device->FreeSegment(*freed).ok());
  device->LeaveSegments();
  EXPECT_TRUE(device->FreeSegment(*left).ok());
  ASSERT_EQ(chown(dir_.c_str(), testing_support::kNobody, testing_support::kNobody), 0);
  ASSERT_EQ(chown(path_.c_str(), testing_support::kNobody, testing_support::kNobody), 0);
  // Returns the MiB that the next daemon finds.
  const auto find = [&] {
    const pid_t daemon = RunAs(testing_support::kNobody, kOfTheService, [&] {
      const absl::StatusOr<LeftSegments> found = make_device()->FindLeftSegments();
      if (!found.ok()) _exit(99);
      uint64_t bytes = 0;
      for (const LeftSegment& segment : found->segments) {
        if (segment.holders.size() == 1 && segment.holders[0].pid == holder.pid()) bytes += segment.bytes;
      }
      _exit(static_cast<int>(bytes >> 20));
    });
    EXPECT_EQ(waitpid(daemon, &status, 0), daemon);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  };
  EXPECT_EQ(find(), 4);
  EXPECT_EQ(find(), 4) << "and the one after it";
}

}  // namespace
}  // namespace vrambroker
