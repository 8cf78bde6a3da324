// SPDX-License-Identifier: Apache-2.0
#include "allocator/base/bytes.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <string>
#include <utility>
#include <vector>

namespace vrambroker {
namespace {

using ::testing::HasSubstr;

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

TEST(BytesTest, ParseBytesReadsEverySpelling) {
  const std::vector<std::pair<std::string, uint64_t>> cases = {
      {"0", 0},
      {"1", 1},
      {"2097152", 2_MiB},
      {"2097152B", 2_MiB},
      {"2097152 B", 2_MiB},
      {"1KiB", 1_KiB},
      {"512MiB", 512_MiB},
      {"512 MiB", 512_MiB},
      {"  512MiB\t", 512_MiB},
      {"512mib", 512_MiB},
      {"512MIB", 512_MiB},
      {"8GiB", 8_GiB},
      {"1.5GiB", 1536_MiB},
      {"1.50GiB", 1536_MiB},
      {"0.5KiB", 512},
      {"0.001953125KiB", 2},
      {"1.0", 1},
      {"3TiB", 3072_GiB},
      {"0TiB", 0},
      {"007KiB", 7_KiB},
      {"16777215TiB", uint64_t{16777215} << 40},
      {"18446744073709551615", kMax},
      {"18446744073709551615B", kMax},
  };
  for (const auto& [text, bytes] : cases) {
    SCOPED_TRACE(text);
    const absl::StatusOr<uint64_t> parsed = ParseBytes(text);
    ASSERT_TRUE(parsed.ok()) << parsed.status();
    EXPECT_EQ(*parsed, bytes);
  }
}

TEST(BytesTest, ParseBytesRefusesWhatIsNoSize) {
  for (const char* text : {"",      " ",        "B",       "MiB",      " GiB", "x",     "12x",     "-1",  "+1", "-1MiB",
                           "1e3",   "0x10",     "1,5GiB",  "1 000",    "8G",   "8GB",   "8KB",     "8kB", "1.", "1.GiB",
                           ".5GiB", "1.5.5GiB", "1.-5GiB", "1.5e1GiB", "GiB8", "8GiBB", "8 GiB x", "nan", "inf"}) {
    SCOPED_TRACE(text);
    const absl::StatusOr<uint64_t> parsed = ParseBytes(text);
    EXPECT_TRUE(absl::IsInvalidArgument(parsed.status())) << parsed.status();
    EXPECT_THAT(std::string(parsed.status().message()), HasSubstr(std::string("'") + text + "'"))
        << "the message names the text";
  }
}

TEST(BytesTest, ParseBytesDoesNotRoundFractions) {
  for (const char* text : {"0.99999999999999999999GiB", "1.99999999999999999999KiB", "0.99999999999999999999"}) {
    EXPECT_TRUE(absl::IsInvalidArgument(ParseBytes(text).status())) << text;
  }
}

TEST(BytesTest, ParseBytesRefusesPartsOfAByte) {
  for (const char* text : {"0.5", "1.5B", "0.1KiB", "1.0001KiB", "0.3GiB", "0.999999999999999999GiB"}) {
    SCOPED_TRACE(text);
    const absl::Status status = ParseBytes(text).status();
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("whole number of bytes"));
  }
}

TEST(BytesTest, ParseBytesRefusesWhatDoesNotFit) {
  for (const char* text : {"18446744073709551616", "99999999999999999999999", "16777216TiB", "17179869184GiB",
                           "18014398509481984KiB", "17592186044416MiB"}) {
    SCOPED_TRACE(text);
    const absl::Status status = ParseBytes(text).status();
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("64 bits"));
  }
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
  EXPECT_EQ(FormatBytesExactly(1_KiB), "1024 B (1.00 KiB)");
  EXPECT_EQ(FormatBytesExactly(2_GiB + 1), "2147483649 B (2.00 GiB)");
}

TEST(BytesTest, WhatIsPrintedCanBeRead) {
  for (const uint64_t bytes : {uint64_t{0}, uint64_t{511}, 1_KiB, 1536_MiB, 20_MiB, 80_GiB}) {
    EXPECT_EQ(ParseBytes(FormatBytes(bytes)).value_or(kMax), bytes);
  }
}

}  // namespace
}  // namespace vrambroker
