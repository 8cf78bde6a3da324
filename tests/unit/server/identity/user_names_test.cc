// SPDX-License-Identifier: Apache-2.0
#include "server/identity/user_names.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <pwd.h>
#include <unistd.h>

#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"

namespace vrambroker {
namespace {

using ::testing::ElementsAre;

// Runs tasks when the test says so.
class Tasks : public Executor {
 public:
  void Submit(std::function<void()> task) override { tasks_.push_back(std::move(task)); }
  void SubmitFirst(std::function<void()> task) override { tasks_.push_front(std::move(task)); }
  absl::StatusOr<UserSlots::Slot> StartWaiting(const UserKey& /*user*/) override { return UserSlots::Slot(); }

  size_t size() const { return tasks_.size(); }
  void Run() {
    while (!tasks_.empty()) {
      const std::function<void()> task = std::move(tasks_.front());
      tasks_.pop_front();
      task();
    }
  }

 private:
  std::deque<std::function<void()>> tasks_;
};

class UserNamesTest : public ::testing::Test {
 protected:
  Tasks workers_;
  std::vector<uid_t> asked_;
  bool can_tell_ = true;
  std::string suffix_;
  SteadyTime now_{std::chrono::hours(1)};
  const std::shared_ptr<UserNames> names_ = std::make_shared<UserNames>(
      &workers_,
      [this](uid_t uid) -> std::optional<std::string> {
        asked_.push_back(uid);
        if (!can_tell_) return std::nullopt;
        return uid == 7 ? "" : absl::StrCat("user", uid, suffix_);
      },
      [this] { return now_; });
};

TEST_F(UserNamesTest, AWorkerLooksEachUserUpOnce) {
  EXPECT_EQ(names_->Get(1000), "") << "nobody waits for it";
  EXPECT_EQ(names_->Get(1000), "");
  EXPECT_EQ(names_->Get(7), "");
  EXPECT_EQ(workers_.size(), 1u) << "a name service that hangs keeps one worker";
  EXPECT_TRUE(asked_.empty());
  workers_.Run();
  EXPECT_EQ(names_->Get(1000), "user1000");
  EXPECT_EQ(names_->Get(7), "") << "has no name";
  EXPECT_THAT(asked_, ElementsAre(1000, 7));
  EXPECT_EQ(workers_.size(), 0u);
}

TEST_F(UserNamesTest, OldNamesAreLookedUpAgainAndStandMeanwhile) {
  names_->Get(1000);
  workers_.Run();
  now_ += UserNames::kAge - std::chrono::seconds(1);
  EXPECT_EQ(names_->Get(1000), "user1000");
  EXPECT_EQ(workers_.size(), 0u);
  now_ += std::chrono::seconds(1);
  suffix_ = "b";
  EXPECT_EQ(names_->Get(1000), "user1000");
  EXPECT_EQ(workers_.size(), 1u);
  workers_.Run();
  EXPECT_EQ(names_->Get(1000), "user1000b");

  can_tell_ = false;
  now_ += UserNames::kAge;
  names_->Get(1000);
  workers_.Run();
  EXPECT_EQ(names_->Get(1000), "user1000b") << "nobody could tell";
}

TEST_F(UserNamesTest, TheFirstOnesAreForgottenForNewOnes) {
  for (uid_t uid = 0; uid < UserNames::kMostUsers; ++uid) {
    names_->Get(uid);
    now_ += std::chrono::milliseconds(1);
  }
  workers_.Run();
  EXPECT_EQ(names_->size(), UserNames::kMostUsers);
  names_->Get(5000);
  EXPECT_EQ(names_->size(), UserNames::kMostUsers);
  EXPECT_EQ(names_->Get(1), "user1");
  EXPECT_EQ(names_->Get(0), "") << "the oldest one made room";
}

TEST(LookUpUserNameTest, AsThisMachineKnowsIt) {
  const passwd* const entry = getpwuid(geteuid());
  EXPECT_EQ(LookUpUserName(geteuid()), entry == nullptr ? "" : entry->pw_name);
  EXPECT_EQ(LookUpUserName(4'000'000'123), "") << "a user without a name";
}

}  // namespace
}  // namespace vrambroker
