// SPDX-License-Identifier: Apache-2.0
#include "allocator/base/bytes.h"

#include <gtest/gtest.h>

#include <limits>

namespace vrambroker {
namespace {

constexpr uint64_t kMax = std::numeric_limits<uint64_t>::max();

TEST(BytesTest, LiteralsArePowersOfTwo) {
  EXPECT_EQ(1_KiB, uint64_t{1024});
  EXPECT_EQ(3_MiB, uint64_t{3} * 1024 * 1024);
  EXPECT_EQ(5_GiB, uint64_t{5} * 1024 * 1024 * 1024);
}

TEST(BytesTest, RoundUpToKeepsMultiples) {
  EXPECT_EQ(RoundUpTo(0, 512), 0u);
  EXPECT_EQ(RoundUpTo(1, 512), 512u);
  EXPECT_EQ(RoundUpTo(512, 512), 512u);
  EXPECT_EQ(RoundUpTo(513, 512), 1024u);
}

TEST(BytesTest, FormatBytesTakesTheLargestUnitThatIsAtLeastOne) {
  EXPECT_EQ(FormatBytes(0), "0 B");
  EXPECT_EQ(FormatBytes(512), "512 B");
  EXPECT_EQ(FormatBytes(1_KiB - 1), "1023 B");
  EXPECT_EQ(FormatBytes(1_KiB), "1.00 KiB");
  EXPECT_EQ(FormatBytes(1536), "1.50 KiB");
  EXPECT_EQ(FormatBytes(1_MiB), "1.00 MiB");
  EXPECT_EQ(FormatBytes(20_MiB), "20.00 MiB");
  EXPECT_EQ(FormatBytes(1_GiB), "1.00 GiB");
  EXPECT_EQ(FormatBytes(1024_GiB), "1.00 TiB");
  EXPECT_EQ(FormatBytes(kMax), "16777216.00 TiB");
}

TEST(BytesTest, FormatBytesExactlyShowsEveryByte) {
  EXPECT_EQ(FormatBytesExactly(512), "512 B");
  EXPECT_EQ(FormatBytesExactly(1_KiB), "1.00 KiB");
  EXPECT_EQ(FormatBytesExactly(1_GiB + 256_MiB), "1.25 GiB");
  EXPECT_EQ(FormatBytesExactly(1_GiB + 5_MiB), "1078984704 B (1.00 GiB)");
  EXPECT_EQ(FormatBytesExactly(uint64_t{3} << 60), "3145728.00 TiB");
  EXPECT_EQ(FormatBytesExactly(2_GiB + 1), "2147483649 B (2.00 GiB)");
}

}  // namespace
}  // namespace vrambroker
