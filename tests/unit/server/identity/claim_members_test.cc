// SPDX-License-Identifier: Apache-2.0
#include "server/identity/claim_members.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

#include "absl/strings/str_cat.h"
#include "allocator/device/process_files.h"
#include "tests/support/util.h"

namespace vrambroker {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::Pair;

class ClaimMembersTest : public ::testing::Test {
 protected:
  static ProcessId Alive(pid_t pid) { return {.pid = pid, .started = StartOf(pid)}; }
  std::string Text() const {
    std::ifstream file(path_);
    return {std::istreambuf_iterator<char>(file), {}};
  }

  const std::string path_ = testing_support::MakeTempDir() + "/members";
  const ProcessId self_ = Alive(getpid());
  const ProcessId parent_ = Alive(getppid());
};

TEST_F(ClaimMembersTest, TheNextDaemonKnowsThoseThatRunStill) {
  {
    ClaimMembers members(path_);
    EXPECT_THAT(members.TakeOver(), IsEmpty());
    members.Note(self_, "team");
    members.Note(parent_, "other");
    members.Note(self_, "team");
    members.Note({.pid = self_.pid, .started = self_.started + 1}, "ended");  // a different process with the number
    members.Note({.pid = 5, .started = 0}, "unknown");
  }
  ClaimMembers next(path_);
  EXPECT_THAT(next.TakeOver(), ::testing::UnorderedElementsAre(Pair(self_, "team"), Pair(parent_, "other")));
  EXPECT_THAT(Text(), ::testing::Not(::testing::HasSubstr("ended")));
  next.Note(self_, "moved");
  ClaimMembers last(path_);
  EXPECT_THAT(last.TakeOver(), ::testing::Contains(Pair(self_, "moved")));
}

// Leaves the file of a daemon that was killed while writing.
TEST_F(ClaimMembersTest, HalfALineIsNotRead) {
  const std::string whole = absl::StrCat(self_.pid, " ", self_.started, " team\n");
  std::ofstream(path_) << whole << parent_.pid << " " << parent_.started << " tea";
  ASSERT_EQ(chmod(path_.c_str(), 0600), 0);
  ClaimMembers members(path_);
  EXPECT_THAT(members.TakeOver(), ElementsAre(Pair(self_, "team")));
  EXPECT_EQ(Text(), whole);
}

// Lines after half a line would be lost together with the half.
TEST_F(ClaimMembersTest, AfterHalfALineTheFileIsWrittenAnew) {
  ClaimMembers members(path_);
  (void)members.TakeOver();
  members.Note(self_, "team");
  rlimit before = {};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  const rlimit full{.rlim_cur = std::filesystem::file_size(path_) + 3, .rlim_max = before.rlim_max};
  const auto on_full = signal(SIGXFSZ, SIG_IGN);
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &full), 0);
  members.Note(parent_, "other");  // three bytes of the line fit
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &before), 0);
  signal(SIGXFSZ, on_full);
  members.Note(self_, "moved");
  ClaimMembers next(path_);
  EXPECT_THAT(next.TakeOver(), ::testing::UnorderedElementsAre(Pair(self_, "moved"), Pair(parent_, "other")));
}

TEST_F(ClaimMembersTest, TheFileDoesNotGrowWithProcessesThatHaveEnded) {
  ClaimMembers members(path_);
  (void)members.TakeOver();
  members.Note(self_, "team");
  for (uint64_t i = 1; i < 20'000; ++i) members.Note({.pid = self_.pid, .started = self_.started + i}, "team");
  EXPECT_LT(std::filesystem::file_size(path_), 200'000u);
  ClaimMembers next(path_);
  EXPECT_THAT(next.TakeOver(), ElementsAre(Pair(self_, "team")));
}

TEST_F(ClaimMembersTest, AClaimThatIsRemovedIsForgotten) {
  ClaimMembers members(path_);
  (void)members.TakeOver();
  members.Note(self_, "team");
  members.Note(parent_, "other");
  members.Forget("team");
  ClaimMembers next(path_);
  EXPECT_THAT(next.TakeOver(), ElementsAre(Pair(parent_, "other")));
}

TEST_F(ClaimMembersTest, WhatOthersCouldHaveWrittenIsNotBelieved) {
  std::ofstream(path_) << self_.pid << " " << self_.started << " team\n";
  ASSERT_EQ(chmod(path_.c_str(), 0666), 0);
  ClaimMembers members(path_);
  EXPECT_THAT(members.TakeOver(), IsEmpty());
}

}  // namespace
}  // namespace vrambroker
