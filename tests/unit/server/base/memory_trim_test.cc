// SPDX-License-Identifier: Apache-2.0
#include "server/base/memory_trim.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstddef>
#include <fstream>
#include <memory>
#include <vector>

#include "tests/support/util.h"

namespace vrambroker {
namespace {

uint64_t ResidentBytes() {
  std::ifstream statm("/proc/self/statm");
  uint64_t size = 0;
  uint64_t resident = 0;
  statm >> size >> resident;
  return resident * static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
}

TEST(MemoryTrimTest, WhatIsFreedBetweenLivingBlocksGoesBack) {
  if (testing_support::kSanitized) GTEST_SKIP() << "sanitizers have an allocator of their own";
  constexpr size_t kBlocks = 100'000;
  constexpr size_t kBlockBytes = 1000;
  MemoryTrim trim;
  trim.Look();  // accounts for memory of earlier tests
  while (trim.Look()) {
  }
  std::vector<std::unique_ptr<std::byte[]>> blocks;
  for (size_t i = 0; i < kBlocks; ++i) blocks.push_back(std::make_unique<std::byte[]>(kBlockBytes));
  EXPECT_TRUE(trim.Look()) << "it has grown";
  const uint64_t grown = ResidentBytes();
  for (size_t i = 0; i < kBlocks; ++i) {
    if (i % 100 != 99) blocks[i].reset();
  }
  EXPECT_TRUE(trim.Look()) << "what made it grow may end later";
  EXPECT_LT(ResidentBytes(), grown - kBlocks * kBlockBytes / 2);
  int looks = 0;
  while (trim.Look()) ++looks;
  EXPECT_LT(looks, MemoryTrim::kMoreLooks);
}

}  // namespace
}  // namespace vrambroker
