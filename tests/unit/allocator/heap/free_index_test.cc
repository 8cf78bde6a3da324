// SPDX-License-Identifier: Apache-2.0
//
// FreeIndex against std::set: same order and same answers, for all sizes and numbers of blocks.
#include "allocator/heap/free_index.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "allocator/base/bytes.h"

namespace vrambroker {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

struct BySizeAndAddress {
  bool operator()(const Block* a, const Block* b) const {
    return a->bytes != b->bytes ? a->bytes < b->bytes : a->address < b->address;
  }
};

class FreeIndexTest : public ::testing::Test {
 protected:
  Block* Make(uint64_t bytes, uint64_t address) {
    blocks_.push_back(std::make_unique<Block>());
    blocks_.back()->bytes = bytes;
    blocks_.back()->address = address;
    return blocks_.back().get();
  }
  Block* Insert(uint64_t bytes, uint64_t address) {
    Block* block = Make(bytes, address);
    index_.Insert(block);
    return block;
  }

  std::vector<std::unique_ptr<Block>> blocks_;
  FreeIndex index_;
};

TEST_F(FreeIndexTest, EmptyHasNothing) {
  EXPECT_EQ(index_.FirstAtLeast(512), nullptr);
  EXPECT_EQ(index_.FirstAtLeast(uint64_t{1} << 60), nullptr);
  EXPECT_EQ(index_.size(), 0u);
  EXPECT_THAT(index_.InOrder(), IsEmpty());
  EXPECT_FALSE(index_.Contains(Make(512, 1)));
}

TEST_F(FreeIndexTest, SizesAreThoseOfAllBlocks) {
  EXPECT_EQ(index_.GetSizes(), FreeSizes());
  std::mt19937_64 random(7);
  std::vector<Block*> in;
  for (uint64_t i = 0; i < 20'000; ++i) {
    if (!in.empty() && random() % 5 < 2) {
      std::swap(in[random() % in.size()], in.back());
      index_.Erase(in.back());
      in.pop_back();
    } else {
      // Sizes come from all classes, many of the same size.
      const uint64_t bytes = 512 * ((random() % 3 + 1) << (random() % 24));
      in.push_back(Insert(bytes, i));
    }
    if (i % 500 != 0) continue;
    FreeSizes expected;
    for (const Block* block : in) expected.Add(block->bytes);
    ASSERT_EQ(index_.GetSizes(), expected) << i;
  }
  for (Block* block : in) index_.Erase(block);
  EXPECT_EQ(index_.GetSizes(), FreeSizes());
}

TEST(FreeSizesTest, ClassesAreEightTimesAsLargeEach) {
  EXPECT_EQ(FreeSizes::ClassBytes(0), 512u);
  EXPECT_EQ(FreeSizes::ClassBytes(7), 1_GiB);
  for (size_t i = 0; i < FreeSizes::kClasses; ++i) {
    EXPECT_EQ(FreeSizes::ClassOf(FreeSizes::ClassBytes(i)), i);
    if (i > 0) {
      EXPECT_EQ(FreeSizes::ClassOf(FreeSizes::ClassBytes(i) - 512), i - 1);
    }
  }
  EXPECT_EQ(FreeSizes::ClassOf(uint64_t{1} << 59), 7u) << "the last has no end";
}

TEST_F(FreeIndexTest, OneBlockComesAndGoes) {
  Block* block = Insert(1024, 1);
  EXPECT_EQ(index_.FirstAtLeast(512), block);
  EXPECT_EQ(index_.FirstAtLeast(1024), block);
  EXPECT_EQ(index_.FirstAtLeast(1025), nullptr) << "sizes between multiples of 512, too";
  EXPECT_TRUE(index_.Contains(block));
  EXPECT_FALSE(index_.Contains(Make(1024, 1))) << "another block with the same key";
  index_.Erase(block);
  EXPECT_FALSE(index_.Contains(block));
  EXPECT_EQ(index_.FirstAtLeast(512), nullptr);
  EXPECT_EQ(index_.size(), 0u);
}

TEST_F(FreeIndexTest, LowestAddressAmongEquals) {
  Block* third = Insert(4096, 30);
  Block* first = Insert(4096, 10);
  Block* second = Insert(4096, 20);
  EXPECT_THAT(index_.InOrder(), ElementsAre(first, second, third));
  index_.Erase(first);
  EXPECT_EQ(index_.FirstAtLeast(4096), second);
}

// Edges of bins: up to 64 units of 512 bytes, each size has a bin. Above, each power of two has 64 bins.
TEST_F(FreeIndexTest, EveryBinEdgeIsFound) {
  std::set<uint64_t> sizes;
  for (int bit = 9; bit <= 60; ++bit) {
    const uint64_t power = uint64_t{1} << bit;
    const uint64_t step = std::max<uint64_t>(power / 64, 512);
    for (const uint64_t base : {power, power + step, power + 63 * step, power - step}) {
      for (const uint64_t size : {base - 512, base, base + 512}) {
        if (size >= 512 && size <= uint64_t{1} << 60 && size % 512 == 0) sizes.insert(size);
      }
    }
  }
  ASSERT_GT(sizes.size(), 300u);
  // Each size is alone, or beside a smaller size that the index must not take.
  for (const uint64_t size : sizes) {
    Block* block = Insert(size, 1);
    Block* smaller = size > 512 ? Insert(size - 512, 2) : nullptr;
    EXPECT_EQ(index_.FirstAtLeast(size), block) << size;
    EXPECT_EQ(index_.FirstAtLeast(size - 1), block) << size;
    EXPECT_EQ(index_.FirstAtLeast(size + 1), nullptr) << size;
    index_.Erase(block);
    if (smaller != nullptr) index_.Erase(smaller);
  }
  EXPECT_EQ(index_.size(), 0u);
  // All sizes together.
  for (const uint64_t size : sizes) Insert(size, size);
  for (const uint64_t size : sizes) {
    ASSERT_NE(index_.FirstAtLeast(size), nullptr) << size;
    EXPECT_EQ(index_.FirstAtLeast(size)->bytes, size);
    const auto next = sizes.upper_bound(size);
    const Block* found = index_.FirstAtLeast(size + 1);
    EXPECT_EQ(found == nullptr ? 0 : found->bytes, next == sizes.end() ? 0 : *next) << size;
  }
  EXPECT_EQ(index_.InOrder().size(), sizes.size());
}

// The number of blocks at a time, and the way to draw sizes.
struct Load {
  size_t blocks;
  int sizes;
};

class FreeIndexRandomTest : public ::testing::TestWithParam<Load> {
 protected:
  uint64_t DrawSize() {
    switch (GetParam().sizes) {
      case 0:  // one size
        return 20_MiB;
      case 1:  // one bin, few sizes
        return 1_MiB + 512 * (random_() % 16);
      case 2:  // all sizes
        return 512 * (1 + random_() % (uint64_t{1} << (random_() % 52)));
      default:  // small sizes
        return 512 * (1 + random_() % 300);
    }
  }

  std::mt19937_64 random_{GetParam().blocks * 10 + static_cast<uint64_t>(GetParam().sizes)};
};

TEST_P(FreeIndexRandomTest, AnswersLikeASet) {
  const size_t most = GetParam().blocks;
  std::vector<Block> storage(most);
  std::vector<Block*> out, in;
  for (Block& block : storage) out.push_back(&block);
  FreeIndex index;
  std::set<Block*, BySizeAndAddress> set;
  const size_t steps = std::max<size_t>(most * 5 / 2, 2000);
  for (size_t step = 0; step < steps; ++step) {
    SCOPED_TRACE(step);
    // The index fills up first, then stays about half full, and becomes empty in the end.
    const bool insert = step < most ? true : step >= steps - most ? false : random_() % 2 == 0;
    std::vector<Block*>& from = insert ? out : in;
    if (!from.empty()) {
      std::swap(from[random_() % from.size()], from.back());
      Block* block = from.back();
      from.pop_back();
      (insert ? in : out).push_back(block);
      if (insert) {
        block->bytes = DrawSize();
        do {
          block->address = 512 * (random_() % (8 * most + 8));
        } while (set.contains(block));
        index.Insert(block);
        set.insert(block);
      } else {
        index.Erase(block);
        set.erase(block);
      }
      ASSERT_EQ(index.Contains(block), insert);
    }
    Block probe;
    probe.bytes = random_() % 4 == 0 ? DrawSize() - 1 : DrawSize();
    const auto expected = set.lower_bound(&probe);
    ASSERT_EQ(index.FirstAtLeast(probe.bytes), expected == set.end() ? nullptr : *expected);
    ASSERT_EQ(index.size(), set.size());
    if (most <= 10 || step % (steps / 8) == 0) {
      ASSERT_EQ(index.InOrder(), std::vector<Block*>(set.begin(), set.end()));
    }
  }
  while (!in.empty()) {
    index.Erase(in.back());
    in.pop_back();
  }
  EXPECT_EQ(index.size(), 0u);
  EXPECT_EQ(index.FirstAtLeast(0), nullptr);
}

std::string NameOf(const ::testing::TestParamInfo<Load>& info) {
  static const char* const kSizes[] = {"OneSize", "OneBin", "AllSizes", "SmallSizes"};
  return kSizes[info.param.sizes] + std::to_string(info.param.blocks);
}

INSTANTIATE_TEST_SUITE_P(Loads, FreeIndexRandomTest,
                         ::testing::Values(Load{1, 2}, Load{10, 0}, Load{10, 1}, Load{10, 2}, Load{1000, 3},
                                           Load{100'000, 0}, Load{100'000, 1}, Load{100'000, 2}),
                         NameOf);

}  // namespace
}  // namespace vrambroker
