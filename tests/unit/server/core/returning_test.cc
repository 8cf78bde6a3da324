// SPDX-License-Identifier: Apache-2.0
#include "server/core/returning.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include "allocator/device/process_files.h"

namespace vrambroker {
namespace {

constexpr pid_t kOther = 1;  // pid of the asking process

class ReturningTest : public ::testing::Test {
 protected:
  SteadyTime At(int second) const { return start_ + std::chrono::seconds(second); }

  const SteadyTime start_ = std::chrono::steady_clock::now();
  const ProcessId self_{.pid = getpid(), .started = StartOf(getpid())};
  SessionRegistry sessions_{/*devices=*/2, /*max_recorded_events_per_uid=*/0};
  Returning returning_{&sessions_};
};

TEST_F(ReturningTest, AProcessIsAwaitedUntilItHasSaidWhatItHolds) {
  EXPECT_FALSE(returning_.AreAwaited(0, kOther, At(0)));
  returning_.Await({self_}, At(10));
  EXPECT_TRUE(returning_.AreAwaited(0, kOther, At(1)));
  EXPECT_FALSE(returning_.AreAwaited(0, getpid(), At(1))) << "not by itself";
  returning_.HasSaid(getpid(), 0);
  EXPECT_FALSE(returning_.AreAwaited(0, kOther, At(1)));
  EXPECT_TRUE(returning_.AreAwaited(1, kOther, At(1))) << "it has not spoken of this device";
  EXPECT_FALSE(returning_.AreAwaited(1, kOther, At(10)));
  EXPECT_FALSE(returning_.AreAwaited(1, kOther, At(1))) << "from then on nobody is";
}

TEST_F(ReturningTest, WhoHasEndedIsNotAwaited) {
  returning_.Await({{.pid = self_.pid, .started = self_.started + 1}}, At(10));
  EXPECT_FALSE(returning_.AreAwaited(0, kOther, At(1))) << "another process has its number";
}

}  // namespace
}  // namespace vrambroker
