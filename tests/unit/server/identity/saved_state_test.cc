// SPDX-License-Identifier: Apache-2.0
#include "server/identity/saved_state.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

#include "tests/support/util.h"

namespace vrambroker {
namespace {

using ::testing::HasSubstr;

class SavedStateTest : public ::testing::Test {
 protected:
  static std::string OwnerIn(const std::string& dir) {
    const absl::StatusOr<SavedState> state = LoadState(dir);
    EXPECT_TRUE(state.ok()) << state.status();
    return state.ok() ? state->owner : "";
  }

  const std::string dir_ = testing_support::MakeTempDir();
  const std::string path_ = dir_ + "/vrambroker.state";
};

TEST_F(SavedStateTest, TheOwnerOfADirectoryStaysTheSameAndNobodyElseHasIt) {
  const std::string owner = OwnerIn(dir_);
  EXPECT_EQ(owner.size(), 16u);
  EXPECT_EQ(OwnerIn(dir_), owner);
  EXPECT_NE(OwnerIn(testing_support::MakeTempDir()), owner);
  struct stat found = {};
  ASSERT_EQ(stat(path_.c_str(), &found), 0);
  EXPECT_EQ(found.st_mode & 0777, 0600u);
  EXPECT_FALSE(std::filesystem::exists(path_ + ".new"));
}

TEST_F(SavedStateTest, AFileThatCannotBeTrustedIsReplaced) {
  const std::string forged = "0123456789abcdef";
  const auto leave = [&](const std::string& text, mode_t mode) {
    std::filesystem::remove(path_);
    std::ofstream(path_) << text;
    ASSERT_EQ(chmod(path_.c_str(), mode), 0);
  };
  leave("owner " + forged + "\n", 0600);
  EXPECT_EQ(OwnerIn(dir_), forged);
  leave("owner " + forged + "\n", 0644);
  EXPECT_EQ(OwnerIn(dir_), forged) << "others may read it";
  for (const mode_t mode : {0602, 0620}) {
    leave("owner " + forged + "\n", mode);
    EXPECT_NE(OwnerIn(dir_), forged) << std::oct << mode;
  }
  for (const char* damaged : {"", "owner", "owner 0123", "owner 0123456789abcde:\n", "x"}) {
    leave(damaged, 0600);
    const std::string owner = OwnerIn(dir_);
    EXPECT_EQ(owner.size(), 16u) << damaged;
    EXPECT_EQ(OwnerIn(dir_), owner);
  }
  // The daemon does not write to the target of a symbolic link.
  const std::string target = dir_ + "/target";
  std::ofstream(target) << "owner " << forged << "\n";
  ASSERT_EQ(chmod(target.c_str(), 0600), 0);
  std::filesystem::remove(path_);
  std::filesystem::create_symlink(target, path_);
  EXPECT_NE(OwnerIn(dir_), forged);
  EXPECT_FALSE(std::filesystem::is_symlink(path_));
  std::string word;
  std::ifstream(target) >> word >> word;
  EXPECT_EQ(word, forged);
}

// A full file system does not matter while the state is unchanged.
TEST_F(SavedStateTest, WhatHasNotChangedIsNotWritten) {
  const absl::StatusOr<SavedState> state = LoadState(dir_);
  ASSERT_TRUE(state.ok());
  struct stat before = {};
  ASSERT_EQ(stat(path_.c_str(), &before), 0);
  // A directory takes the new file's name, so no write can succeed.
  std::filesystem::create_directory(path_ + ".new");
  EXPECT_TRUE(SaveState(dir_, *state).ok());
  struct stat after = {};
  ASSERT_EQ(stat(path_.c_str(), &after), 0);
  EXPECT_EQ(after.st_ino, before.st_ino);
  EXPECT_FALSE(SaveState(dir_, {.owner = state->owner, .free_bytes = {{"GPU-1", 1}}}).ok());
  EXPECT_EQ(OwnerIn(dir_), state->owner);
}

TEST_F(SavedStateTest, FreeBytesAreOfOneBootOfTheMachine) {
  absl::StatusOr<SavedState> state = LoadState(dir_);
  ASSERT_TRUE(state.ok());
  EXPECT_TRUE(state->free_bytes.empty());
  state->free_bytes = {{"GPU-1", 79 << 20}, {"a name with spaces", ~uint64_t{0}}};
  ASSERT_TRUE(SaveState(dir_, *state).ok());
  const absl::StatusOr<SavedState> again = LoadState(dir_);
  ASSERT_TRUE(again.ok());
  EXPECT_EQ(again->free_bytes, state->free_bytes);
  EXPECT_EQ(again->owner, state->owner);
  std::ifstream file(path_);
  std::string text{std::istreambuf_iterator<char>(file), {}};
  const size_t boot = text.find("boot ");
  ASSERT_NE(boot, std::string::npos);
  text[boot + 5] = text[boot + 5] == '0' ? '1' : '0';
  std::ofstream(path_) << text;
  const absl::StatusOr<SavedState> later = LoadState(dir_);
  ASSERT_TRUE(later.ok());
  EXPECT_TRUE(later->free_bytes.empty());
  EXPECT_EQ(later->owner, state->owner);
}

// A directory in the file's place, or a full disk, does not stop the daemon.
TEST_F(SavedStateTest, WhatCannotBeWrittenHoldsForThisRun) {
  std::filesystem::create_directory(path_);
  const std::string owner = OwnerIn(dir_);
  EXPECT_EQ(owner.size(), 16u);
  EXPECT_NE(OwnerIn(dir_), owner);
  EXPECT_THAT(std::string(SaveState(dir_, {.owner = owner}).message()), HasSubstr("cannot replace " + path_));
  std::filesystem::remove(path_);
  EXPECT_EQ(OwnerIn(dir_), OwnerIn(dir_));
}

}  // namespace
}  // namespace vrambroker
