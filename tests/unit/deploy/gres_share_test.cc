// SPDX-License-Identifier: Apache-2.0
#include "deploy/slurm/gres_share.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <optional>

namespace vrambroker {
namespace {

std::optional<uint64_t> Count(const char* details) {
  uint64_t count = 0;
  if (!vrambroker_gres_count(details, "vram", &count)) return std::nullopt;
  return count;
}

TEST(GresShareTest, WhatSlurmWritesIsRead) {
  EXPECT_EQ(Count("vram(CNT:8192)"), 8192u);  // form seen in Slurm 22.05
  EXPECT_EQ(Count("vram:a100(CNT:8192)"), 8192u);
  EXPECT_EQ(Count("vram:8192"), 8192u);
  EXPECT_EQ(Count("vram:a100:8192"), 8192u);
  EXPECT_EQ(Count("vram:2(IDX:0-1)"), 2u);
  EXPECT_EQ(Count("vram:a100:2(IDX:0,3)"), 2u);
}

TEST(GresShareTest, OthersDoNotCount) {
  EXPECT_EQ(Count(nullptr), 0u);
  EXPECT_EQ(Count(""), 0u);
  EXPECT_EQ(Count("gpu:2(IDX:0,3)"), 0u);
  EXPECT_EQ(Count("gpu:2(IDX:0,3),vram(CNT:100),nic:1"), 100u);
  EXPECT_EQ(Count("vram2(CNT:7),xvram(CNT:8)"), 0u);
}

TEST(GresShareTest, TypesAddUp) {
  EXPECT_EQ(Count("vram:a(CNT:100),vram:b(CNT:50)"), 150u);
}

TEST(GresShareTest, WhatCannotBeReadIsNotNothing) {
  for (const char* details : {"vram:", "vram(", "vram(CNT:)", "vram:a100", "vram:8G", "vram(CNT:-1)", "vram:-1",
                              "vram(CNT:99999999999999999999)", "vram(CNT:18446744073709551615),vram(CNT:1)"}) {
    EXPECT_EQ(Count(details), std::nullopt) << details;
  }
  EXPECT_EQ(Count("vram"), 0u) << "a resource without a count";
}

}  // namespace
}  // namespace vrambroker
