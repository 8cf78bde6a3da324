// SPDX-License-Identifier: Apache-2.0
#include "server/base/shared_timer.h"

#include <gtest/gtest.h>

#include <chrono>
#include <optional>
#include <vector>

namespace vrambroker {
namespace {

TEST(SharedTimerTest, IsSetToTheEarliestTimeOfItsSources) {
  const SteadyTime now{std::chrono::hours(1)};
  std::vector<SteadyTime> set;
  SharedTimer timer([&](SteadyTime time) { set.push_back(time); });
  std::optional<SteadyTime> first;
  std::optional<SteadyTime> second;
  timer.AddSource([&] { return first; });
  timer.AddSource([&] { return second; });
  timer.Update();
  EXPECT_TRUE(set.empty()) << "nothing is to be done";
  second = now + std::chrono::seconds(2);
  timer.Update();
  ASSERT_EQ(set.size(), 1u);
  EXPECT_EQ(set[0], *second);
  first = now + std::chrono::seconds(3);
  timer.Update();
  ASSERT_EQ(set.size(), 2u);
  EXPECT_EQ(set[1], *second);
  first = now + std::chrono::seconds(1);
  timer.Update();
  ASSERT_EQ(set.size(), 3u);
  EXPECT_EQ(set[2], *first);
}

}  // namespace
}  // namespace vrambroker
