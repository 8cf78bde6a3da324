// SPDX-License-Identifier: Apache-2.0
#include "allocator/heap/size_class.h"

#include <gtest/gtest.h>

#include <vector>

namespace vrambroker {
namespace {

constexpr AllocatorOptions kDefault;

TEST(SizeClassTest, RequestToBlockPoolAndSegment) {
  struct Row {
    uint64_t requested;
    uint64_t block;
    PoolKind pool;
    uint64_t segment;
  };
  const std::vector<Row> cases = {
      {0, 512, PoolKind::kSmall, 2_MiB},
      {1, 512, PoolKind::kSmall, 2_MiB},
      {511, 512, PoolKind::kSmall, 2_MiB},
      {512, 512, PoolKind::kSmall, 2_MiB},
      {513, 1024, PoolKind::kSmall, 2_MiB},
      {1_MiB - 512, 1_MiB - 512, PoolKind::kSmall, 2_MiB},
      {1_MiB - 1, 1_MiB, PoolKind::kSmall, 2_MiB},
      {1_MiB, 1_MiB, PoolKind::kSmall, 2_MiB},
      {1_MiB + 1, 1_MiB + 512, PoolKind::kLarge, 20_MiB},
      {10_MiB - 513, 10_MiB - 512, PoolKind::kLarge, 20_MiB},
      {10_MiB - 512, 10_MiB - 512, PoolKind::kLarge, 20_MiB},
      // The rounded size decides the segment.
      {10_MiB - 1, 10_MiB, PoolKind::kLarge, 10_MiB},
      {10_MiB, 10_MiB, PoolKind::kLarge, 10_MiB},
      {10_MiB + 1, 10_MiB + 512, PoolKind::kLarge, 12_MiB},
      {11_MiB + 1, 11_MiB + 512, PoolKind::kLarge, 12_MiB},
      {12_MiB, 12_MiB, PoolKind::kLarge, 12_MiB},
      {12_MiB + 1, 12_MiB + 512, PoolKind::kLarge, 14_MiB},
      {20_MiB, 20_MiB, PoolKind::kLarge, 20_MiB},
      {kMaxRequestBytes - 1, kMaxRequestBytes, PoolKind::kLarge, kMaxRequestBytes},
  };
  for (const Row& c : cases) {
    SCOPED_TRACE(c.requested);
    EXPECT_EQ(RoundRequest(c.requested, kDefault), c.block);
    EXPECT_EQ(PoolFor(c.block), c.pool);
    EXPECT_EQ(SegmentBytesFor(c.block, kDefault), c.segment);
  }
}

TEST(SizeClassTest, SmallPoolSplitsForTheLeastBlock) {
  EXPECT_FALSE(ShouldSplit(PoolKind::kSmall, 512, 0, kDefault));
  EXPECT_FALSE(ShouldSplit(PoolKind::kSmall, 512, 511, kDefault));
  EXPECT_TRUE(ShouldSplit(PoolKind::kSmall, 512, 512, kDefault));
}

TEST(SizeClassTest, LargePoolSplitsAboveOneMiB) {
  EXPECT_FALSE(ShouldSplit(PoolKind::kLarge, 2_MiB, 0, kDefault));
  EXPECT_FALSE(ShouldSplit(PoolKind::kLarge, 2_MiB, 512, kDefault));
  EXPECT_FALSE(ShouldSplit(PoolKind::kLarge, 2_MiB, 1_MiB, kDefault));
  EXPECT_TRUE(ShouldSplit(PoolKind::kLarge, 2_MiB, 1_MiB + 512, kDefault));
}

TEST(SizeClassTest, EverySegmentIsWholeGranulesAndHoldsItsBlock) {
  for (uint64_t requested = 1; requested < 64_MiB; requested += requested / 7 + 1) {
    const uint64_t block = RoundRequest(requested, kDefault);
    EXPECT_EQ(SegmentBytesFor(block, kDefault) % kSegmentGranuleBytes, 0u) << requested;
    EXPECT_GE(SegmentBytesFor(block, kDefault), block) << requested;
    EXPECT_GE(block, requested);
    EXPECT_LT(block - requested, kMinBlockBytes);
  }
}

}  // namespace
}  // namespace vrambroker
