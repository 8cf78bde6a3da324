// SPDX-License-Identifier: Apache-2.0
#include "server/queue/first_fit.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <map>
#include <optional>
#include <random>

namespace vrambroker {
namespace {

TEST(FirstFitTest, TheFirstInOrderThatNeedsNoMore) {
  std::minstd_rand random(1);
  FirstFit fit(&random);
  EXPECT_TRUE(fit.empty());
  EXPECT_EQ(fit.First(std::numeric_limits<uint64_t>::max()), std::nullopt);
  fit.Insert({0, 1}, 8);
  fit.Insert({0, 2}, 4);
  fit.Insert({-5, 3}, 6);
  EXPECT_EQ(fit.First(3), std::nullopt);
  EXPECT_EQ(fit.First(4), Place(0, 2));
  EXPECT_EQ(fit.First(7), Place(-5, 3));
  EXPECT_EQ(fit.First(std::numeric_limits<uint64_t>::max()), Place(-5, 3));
  fit.Erase({-5, 3});
  EXPECT_EQ(fit.First(8), Place(0, 1));
  EXPECT_FALSE(fit.empty());
}

// Compares FirstFit with a map that a search reads from the beginning.
TEST(FirstFitTest, FindsWhatASearchFinds) {
  std::mt19937_64 dice(7);
  std::minstd_rand random(7);
  FirstFit fit(&random);
  std::map<Place, uint64_t> model;
  for (uint64_t step = 1; step <= 20000; ++step) {
    if (model.empty() || dice() % 100 < (step / 4000 % 2 == 0 ? 60 : 40)) {
      const Place place(static_cast<int>(dice() % 7) - 3, step);
      const uint64_t bytes = dice() % 1000;
      fit.Insert(place, bytes);
      model.emplace(place, bytes);
    } else {
      auto it = model.begin();
      std::advance(it, static_cast<std::ptrdiff_t>(dice() % model.size()));
      fit.Erase(it->first);
      model.erase(it);
    }
    ASSERT_EQ(fit.empty(), model.empty());
    const uint64_t most = dice() % 1000 / (1 + dice() % 50);
    std::optional<Place> expected;
    for (const auto& [place, bytes] : model) {
      if (bytes > most) continue;
      expected = place;
      break;
    }
    ASSERT_EQ(fit.First(most), expected) << "step " << step;
  }
}

}  // namespace
}  // namespace vrambroker
