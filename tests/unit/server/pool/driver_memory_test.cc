// SPDX-License-Identifier: Apache-2.0
#include "server/pool/driver_memory.h"

#include <gtest/gtest.h>

#include "allocator/base/bytes.h"

namespace vrambroker {
namespace {

// Models a GPU of 100 MiB: 84 MiB for segments, 12 MiB for clients' contexts, and 4 MiB for the daemon's own context.
class DriverMemoryTest : public ::testing::Test {
 protected:
  DriverMemoryTest() { memory_.Update(/*free=*/96_MiB, /*at_least=*/0, /*at_most=*/0); }

  // Sets the driver's free bytes, and returns the unowned memory. `from_driver`: the bytes that the pool has from the
  // driver.
  const DriverMemory::Unowned& Free(uint64_t free, uint64_t from_driver, const DriverMemory::Known& known = {}) {
    memory_.Update(free, from_driver, from_driver);
    return memory_.Settle(known);
  }

  const DeviceProperties device_{.total_bytes = 100_MiB, .has_other_programs = true};
  DriverMemory memory_{device_, /*capacity=*/84_MiB, /*headroom=*/12_MiB};
};

TEST_F(DriverMemoryTest, NobodyIsChargedForContextsWithinTheHeadroom) {
  EXPECT_EQ(Free(96_MiB, 0).outside, 0u);
  EXPECT_EQ(Free(52_MiB, 40_MiB, {.clients = 1}).outside, 0u) << "one context of 4 MiB";
  EXPECT_EQ(Free(88_MiB, 0, {.clients = 2}).outside, 0u) << "two of 4 MiB; the next one has 4 left";
}

TEST_F(DriverMemoryTest, WhatContextsTakeBeyondItAndTheNextOneNeedsIsNotHandedOut) {
  EXPECT_EQ(Free(84_MiB, 0, {.clients = 3}).outside, 4_MiB) << "three of 4 MiB, and none left for the next one";
  EXPECT_EQ(Free(30_MiB, 50_MiB, {.clients = 4}).outside, 8_MiB);
  EXPECT_EQ(Free(96_MiB, 0).outside, 0u) << "they have ended";
}

TEST_F(DriverMemoryTest, TheNextContextIsLikeThoseThatAreKnown) {
  EXPECT_EQ(Free(72_MiB, 0, {.clients = 1}).outside, 24_MiB) << "28 in use: all of it could be its context";
  memory_.SetContexts(4_MiB, 1);
  EXPECT_EQ(memory_.Settle({.clients = 1}).outside, 16_MiB) << "it is not: 4 for the next one are enough";
  memory_.SetContexts(30_MiB, 2);
  EXPECT_EQ(memory_.Settle({.clients = 2}).outside, 24_MiB) << "never more than the headroom";
}

TEST_F(DriverMemoryTest, WhatChangedHandsMeanwhileCountsAsTheDrivers) {
  memory_.Update(/*free=*/40_MiB, /*at_least=*/30_MiB, /*at_most=*/56_MiB);
  EXPECT_EQ(memory_.Settle({}).outside, 0u) << "40 and 56, or less";
  EXPECT_EQ(memory_.free(), 40_MiB);
}

TEST_F(DriverMemoryTest, ARefusalBoundsWhatIsHandedOutUntilTheNextUpdate) {
  memory_.Refused(/*bytes=*/20_MiB, /*free=*/60_MiB, /*from_driver=*/30_MiB);
  EXPECT_EQ(memory_.Settle({}).outside, 84_MiB - 48_MiB) << "it did not have 20; it may have 18";
  memory_.Refused(/*bytes=*/20_MiB, /*free=*/4_MiB, /*from_driver=*/30_MiB);
  EXPECT_EQ(memory_.Settle({}).outside, 84_MiB - 34_MiB);
  memory_.Refused(/*bytes=*/20_MiB, /*free=*/std::nullopt, /*from_driver=*/30_MiB);
  EXPECT_EQ(memory_.Settle({}).outside, 84_MiB - 48_MiB) << "nor does it say what is free";
  memory_.UpdateMost(/*free=*/66_MiB, /*at_most=*/30_MiB);
  EXPECT_EQ(memory_.Settle({}).outside, 0u);
}

TEST_F(DriverMemoryTest, ARefusedSegmentOfTheLeastSizeLeavesNothing) {
  memory_.Refused(/*bytes=*/2_MiB, /*free=*/60_MiB, /*from_driver=*/30_MiB);
  EXPECT_EQ(memory_.Settle({}).outside, 54_MiB);
}

TEST_F(DriverMemoryTest, WhatWasInUseAtTheStartIsNobodysUntilItIsDeclared) {
  memory_.Update(/*free=*/56_MiB, 0, 0);  // 40 MiB beyond the daemon's context
  memory_.StartWithOthers();
  EXPECT_EQ(memory_.foreign(), 44_MiB);
  EXPECT_EQ(memory_.Settle({}).elsewhere, 40_MiB);
  EXPECT_EQ(memory_.unowned().outside, 0u) << "charged once";
  // The rest may be contexts, and fits the headroom.
  EXPECT_EQ(memory_.Settle({.declared = 20_MiB, .carried_over = 20_MiB}).elsewhere, 20_MiB);
  EXPECT_EQ(memory_.Settle({.declared = 28_MiB, .carried_over = 28_MiB}).elsewhere, 0u);
  EXPECT_EQ(memory_.unowned().beyond_capacity, 0u);
  // Declarations beyond the memory in use take no room from other sessions.
  EXPECT_EQ(memory_.Settle({.declared = 50_MiB, .carried_over = 50_MiB}).beyond_capacity, 10_MiB);
}

TEST_F(DriverMemoryTest, WhatWasInUseAtTheStartOnlyFalls) {
  memory_.Update(/*free=*/56_MiB, 0, 0);
  memory_.StartWithOthers();
  EXPECT_EQ(Free(76_MiB, 0).elsewhere, 20_MiB);
  EXPECT_EQ(Free(56_MiB, 0).elsewhere, 20_MiB) << "others came later: outside";
  EXPECT_EQ(memory_.unowned().outside, 84_MiB - 20_MiB - (56_MiB - 12_MiB)) << "and one like them may follow";
}

TEST(DriverMemoryOnHostTest, NothingIsOutside) {
  const DeviceProperties device{.total_bytes = 100_MiB};
  DriverMemory memory(device, /*capacity=*/84_MiB, /*headroom=*/0);
  memory.Update(/*free=*/10_MiB, 0, 0);
  EXPECT_EQ(memory.Settle({.declared = 50_MiB}).outside, 0u);
  EXPECT_EQ(memory.unowned().beyond_capacity, 0u);
}

TEST(DriverMemoryOfGivenCapacityTest, ContextsHaveNoHeadroom) {
  const DeviceProperties device{.total_bytes = 100_MiB, .has_other_programs = true};
  DriverMemory memory(device, /*capacity=*/84_MiB, /*headroom=*/0);
  memory.Update(/*free=*/84_MiB, 0, 0);
  EXPECT_EQ(memory.Settle({.clients = 1}).outside, 0u);
  memory.Update(/*free=*/80_MiB, 0, 0);
  EXPECT_EQ(memory.Settle({.clients = 1}).outside, 4_MiB);
}

// The capacity is less than the free memory was: memory that clients hold is part of the capacity, not beside it.
TEST(DriverMemoryOfGivenCapacityTest, WhatClientsHaveCarriedOverIsAPartOfIt) {
  const DeviceProperties device{.total_bytes = 100_MiB, .has_other_programs = true};
  DriverMemory memory(device, /*capacity=*/40_MiB, /*headroom=*/0, /*most_free=*/96_MiB);
  memory.Update(/*free=*/66_MiB, 0, 0);
  memory.StartWithOthers();
  EXPECT_EQ(memory.Settle({.declared = 30_MiB, .carried_over = 30_MiB}).beyond_capacity, 0u);
  EXPECT_EQ(memory.unowned().outside, 0u);
  EXPECT_EQ(memory.Settle({.declared = 34_MiB, .carried_over = 34_MiB}).beyond_capacity, 4_MiB)
      << "no more than others have come to use";
}

}  // namespace
}  // namespace vrambroker
