// SPDX-License-Identifier: Apache-2.0
#include "server/pool/idle_segments.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "allocator/base/bytes.h"

namespace vrambroker {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

constexpr char kAnn[] = "uid:1001";
constexpr char kBen[] = "uid:1002";

class IdleSegmentsTest : public ::testing::Test {
 protected:
  // Adds an idle segment. The address tells segments apart; `second` is the time at which the segment became idle.
  void Add(uint64_t address, const std::string& tenant, uint64_t bytes, int second = 0) {
    idle_.Add({.segment = {.bytes = bytes, .address = address}, .tenant = tenant, .since = At(second)});
  }
  static SteadyTime At(int second) { return SteadyTime() + std::chrono::seconds(second); }
  // Returns the address of the segment that Take() gives; 0 without a segment.
  uint64_t Take(const std::string& tenant, uint64_t bytes) {
    const std::optional<IdleSegments::Taken> taken = idle_.Take(tenant, bytes);
    if (!taken.has_value()) return 0;
    EXPECT_EQ(taken->entry.tenant, tenant);
    EXPECT_EQ(taken->entry.segment.bytes, bytes);
    return taken->entry.segment.address;
  }
  static std::vector<uint64_t> Addresses(const std::vector<UnleasedSegment>& entries) {
    std::vector<uint64_t> addresses;
    for (const UnleasedSegment& entry : entries) addresses.push_back(entry.segment.address);
    return addresses;
  }

  IdleSegments idle_;
};

TEST_F(IdleSegmentsTest, IsEmptyAtFirst) {
  EXPECT_EQ(idle_.bytes(), 0u);
  EXPECT_EQ(Take(kAnn, 2_MiB), 0u);
  EXPECT_THAT(idle_.TakeOldest(2_MiB), IsEmpty());
  EXPECT_EQ(idle_.oldest(), std::nullopt);
}

TEST_F(IdleSegmentsTest, TakesTheYoungestOfTheTenantAndSize) {
  Add(1, kAnn, 2_MiB);
  Add(2, kAnn, 2_MiB);
  Add(3, kAnn, 4_MiB);
  Add(4, kBen, 2_MiB);
  EXPECT_EQ(Take(kAnn, 2_MiB), 2u);
  EXPECT_EQ(Take(kAnn, 2_MiB), 1u);
  EXPECT_EQ(Take(kAnn, 2_MiB), 0u);
  EXPECT_EQ(idle_.bytes(), 6_MiB);
}

TEST_F(IdleSegmentsTest, NeverTakesAnotherTenants) {
  Add(1, kAnn, 2_MiB);
  EXPECT_EQ(Take(kBen, 2_MiB), 0u);
  EXPECT_EQ(Take("uid:1000", 2_MiB), 0u);
  EXPECT_EQ(Take("", 2_MiB), 0u);
  EXPECT_EQ(idle_.bytes(), 2_MiB);
}

TEST_F(IdleSegmentsTest, NeverTakesAnotherSize) {
  Add(1, kAnn, 4_MiB);
  EXPECT_EQ(Take(kAnn, 2_MiB), 0u);
  EXPECT_EQ(Take(kAnn, 6_MiB), 0u);
  EXPECT_EQ(Take(kAnn, 4_MiB), 1u);
}

TEST_F(IdleSegmentsTest, TakeOldestStopsWhenItHasEnough) {
  Add(1, kAnn, 2_MiB);
  Add(2, kBen, 4_MiB);
  Add(3, kAnn, 2_MiB);
  EXPECT_THAT(idle_.TakeOldest(0), IsEmpty());
  EXPECT_THAT(Addresses(idle_.TakeOldest(1)), ElementsAre(1));
  EXPECT_EQ(idle_.bytes(), 6_MiB);
  EXPECT_THAT(Addresses(idle_.TakeOldest(4_MiB)), ElementsAre(2));
  EXPECT_THAT(Addresses(idle_.TakeOldest(100_MiB)), ElementsAre(3)) << "all there is";
  EXPECT_EQ(idle_.bytes(), 0u);
}

TEST_F(IdleSegmentsTest, TakeOldestKeepsTheOrderOfWhatWasTakenInBetween) {
  for (uint64_t address = 1; address <= 5; ++address) Add(address, kAnn, 2_MiB);
  EXPECT_EQ(Take(kAnn, 2_MiB), 5u);
  Add(6, kAnn, 2_MiB);
  EXPECT_THAT(Addresses(idle_.TakeOldest(10_MiB)), ElementsAre(1, 2, 3, 4, 6));
  EXPECT_EQ(Take(kAnn, 2_MiB), 0u) << "gone from both orders";
}

TEST_F(IdleSegmentsTest, WhatIsPutBackIsAsOldAsItWas) {
  Add(1, kAnn, 2_MiB, 10);
  Add(2, kAnn, 4_MiB, 20);
  const std::optional<IdleSegments::Taken> oldest = idle_.Take(kAnn, 2_MiB);
  ASSERT_TRUE(oldest.has_value());
  Add(3, kAnn, 2_MiB, 30);
  idle_.PutBack(*oldest);
  EXPECT_EQ(idle_.bytes(), 8_MiB);
  EXPECT_EQ(idle_.oldest(), At(10));
  EXPECT_EQ(Take(kAnn, 2_MiB), 3u) << "the youngest";
  EXPECT_THAT(Addresses(idle_.TakeOldest(1)), ElementsAre(1));
}

TEST_F(IdleSegmentsTest, KnowsTheAgeOfTheOldest) {
  Add(1, kAnn, 2_MiB, 10);
  Add(2, kBen, 4_MiB, 20);
  Add(3, kAnn, 2_MiB, 30);
  EXPECT_EQ(idle_.oldest(), At(10));
  EXPECT_THAT(Addresses(idle_.TakeOldest(1)), ElementsAre(1));
  EXPECT_EQ(idle_.oldest(), At(20));
  EXPECT_EQ(Take(kBen, 4_MiB), 2u);
  EXPECT_EQ(idle_.oldest(), At(30));
  EXPECT_EQ(Take(kAnn, 2_MiB), 3u);
  EXPECT_EQ(idle_.oldest(), std::nullopt);
}

TEST_F(IdleSegmentsTest, KeepsTheHandleWithTheSegment) {
  CudaIpcHandle handle = {};
  handle[7] = 'h';
  idle_.Add({.segment = {.bytes = 2_MiB, .address = 1, .cuda_ipc = handle}, .tenant = kAnn});
  EXPECT_EQ(idle_.Take(kAnn, 2_MiB)->entry.segment.cuda_ipc, handle);
}

}  // namespace
}  // namespace vrambroker
