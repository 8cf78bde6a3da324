// SPDX-License-Identifier: Apache-2.0
#include "server/identity/user_names.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <pwd.h>
#include <unistd.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "allocator/base/mutex.h"
#include "tests/support/util.h"

namespace vrambroker {
namespace {

using ::testing::ElementsAre;
using testing_support::WaitFor;

// Stands in for a name service that answers on the test's command.
struct NameService {
  std::optional<std::string> LookUp(uid_t uid) {
    MutexLock lock(mu);
    asked.push_back(uid);
    while (!answers) changed.Wait(mu);
    if (!can_tell) return std::nullopt;
    return uid == 7 ? "" : absl::StrCat("user", uid, suffix);
  }
  void Set(bool NameService::*field, bool value) {
    MutexLock lock(mu);
    this->*field = value;
    changed.NotifyAll();
  }
  std::vector<uid_t> Asked() {
    MutexLock lock(mu);
    return asked;
  }

  Mutex mu;
  CondVar changed;
  std::vector<uid_t> asked;
  bool answers = true;
  bool can_tell = true;
  std::string suffix;
};

class UserNamesTest : public ::testing::Test {
 protected:
  // Tests share the service with lookups, which may outlive a test.
  const std::shared_ptr<NameService> service_ = std::make_shared<NameService>();
  SteadyTime now_{std::chrono::hours(1)};
  std::shared_ptr<UserNames> names_ = std::make_shared<UserNames>(
      [service = service_](uid_t uid) { return service->LookUp(uid); }, [this] { return now_; });
};

TEST_F(UserNamesTest, NobodyWaitsAndEachUserIsLookedUpOnce) {
  service_->Set(&NameService::answers, false);
  EXPECT_EQ(names_->Get(1000), "");
  EXPECT_EQ(names_->Get(1000), "");
  EXPECT_EQ(names_->Get(7), "");
  service_->Set(&NameService::answers, true);
  EXPECT_TRUE(WaitFor([&] { return names_->Get(1000) == "user1000"; }));
  EXPECT_TRUE(WaitFor([&] { return service_->Asked().size() == 2; }));
  EXPECT_THAT(service_->Asked(), ElementsAre(1000, 7));
  EXPECT_EQ(names_->Get(7), "") << "has no name";
}

TEST_F(UserNamesTest, EndsWhileTheNameServiceHangs) {
  service_->Set(&NameService::answers, false);
  names_->Get(1000);
  EXPECT_TRUE(WaitFor([&] { return service_->Asked().size() == 1; }));
  names_.reset();
  service_->Set(&NameService::answers, true);
}

TEST_F(UserNamesTest, OldNamesAreLookedUpAgainAndStandMeanwhile) {
  names_->Get(1000);
  EXPECT_TRUE(WaitFor([&] { return names_->Get(1000) == "user1000"; }));
  now_ += UserNames::kAge - std::chrono::seconds(1);
  EXPECT_EQ(names_->Get(1000), "user1000");
  EXPECT_THAT(service_->Asked(), ElementsAre(1000));
  {
    MutexLock lock(service_->mu);
    service_->suffix = "b";
  }
  now_ += std::chrono::seconds(1);
  EXPECT_EQ(names_->Get(1000), "user1000");
  EXPECT_TRUE(WaitFor([&] { return names_->Get(1000) == "user1000b"; }));

  service_->Set(&NameService::can_tell, false);
  now_ += UserNames::kAge;
  names_->Get(1000);
  EXPECT_TRUE(WaitFor([&] { return service_->Asked().size() == 3; }));
  service_->Set(&NameService::can_tell, true);
  names_->Get(8);  // the lookup of 8 comes after the lookup of 1000
  EXPECT_TRUE(WaitFor([&] { return names_->Get(8) == "user8b"; }));
  EXPECT_EQ(names_->Get(1000), "user1000b") << "nobody could tell";
}

TEST_F(UserNamesTest, TheFirstOnesAreForgottenForNewOnes) {
  for (uid_t uid = 0; uid < UserNames::kMostUsers; ++uid) {
    names_->Get(uid);
    now_ += std::chrono::milliseconds(1);
  }
  EXPECT_TRUE(WaitFor([&] { return names_->Get(UserNames::kMostUsers - 1) != ""; }));
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
