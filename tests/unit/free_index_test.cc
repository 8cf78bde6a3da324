// SPDX-License-Identifier: Apache-2.0
#include "allocator/free_index.h"

#include <gtest/gtest.h>

#include <random>
#include <set>
#include <utility>
#include <vector>

#include "allocator/size_class.h"

namespace vrambroker {
namespace {

struct ByBytesAndAddress {
  bool operator()(const Block* a, const Block* b) const {
    return std::pair(a->bytes, a->address) < std::pair(b->bytes, b->address);
  }
};

// The smallest size, in units of 512 bytes, and how many sizes there are: few sizes make deep trees.
class FreeIndexTest : public ::testing::TestWithParam<std::pair<uint64_t, uint64_t>> {};

TEST_P(FreeIndexTest, AgreesWithASet) {
  const uint64_t first_units = GetParam().first;
  const uint64_t sizes = GetParam().second;
  std::mt19937_64 random(1);
  std::vector<Block> blocks(20000);
  for (size_t i = 0; i < blocks.size(); ++i) {
    blocks[i].bytes = (first_units + random() % sizes) * kMinBlockBytes;
    blocks[i].address = i * kMinBlockBytes;
  }
  FreeIndex index;
  std::set<Block*, ByBytesAndAddress> expected;
  const auto check = [&] {
    const uint64_t wanted = (first_units + random() % (sizes + 1)) * kMinBlockBytes;
    Block key;
    key.bytes = wanted;
    const auto it = expected.lower_bound(&key);
    ASSERT_EQ(index.FirstAtLeast(wanted), it == expected.end() ? nullptr : *it);
    ASSERT_EQ(index.size(), expected.size());
  };
  // Fills up, then empties: four of five steps one way, the others back.
  for (const uint64_t insert_of_5 : {4, 1}) {
    for (size_t step = 0; step < 60000; ++step) {
      Block* block = &blocks[random() % blocks.size()];
      const bool is_in = expected.contains(block);
      ASSERT_EQ(index.Contains(block), is_in);
      if (!is_in && random() % 5 < insert_of_5) {
        index.Insert(block);
        expected.insert(block);
      } else if (is_in && random() % 5 >= insert_of_5) {
        index.Erase(block);
        expected.erase(block);
      }
      check();
    }
    EXPECT_EQ(index.InOrder(), std::vector<Block*>(expected.begin(), expected.end()));
  }
  while (!expected.empty()) {
    Block* block = index.FirstAtLeast(0);
    ASSERT_EQ(block, *expected.begin());
    index.Erase(block);
    expected.erase(block);
  }
  EXPECT_EQ(index.FirstAtLeast(0), nullptr);
  EXPECT_EQ(index.InOrder().size(), 0);
}

INSTANTIATE_TEST_SUITE_P(Sizes, FreeIndexTest,
                         ::testing::Values(std::pair{1, 1}, std::pair{1, 100}, std::pair{1000, 1}, std::pair{1000, 20},
                                           std::pair{1, 1000000}));

}  // namespace
}  // namespace vrambroker
