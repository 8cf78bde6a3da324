// SPDX-License-Identifier: Apache-2.0
//
// Settings, limits, garbage collection and resets of the caching allocator.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <thread>
#include <vector>

#include "allocator/heap/caching_allocator.h"
#include "allocator/replay/direct_heap.h"
#include "tests/support/fake_device.h"
#include "tests/support/simulated_source.h"
#include "tests/unit/allocator/heap/simulated_heap_fixture.h"

namespace vrambroker {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

class AllocatorSettingsTest : public SimulatedHeapTest {};

// ---- max_split_size_mb, max_non_split_rounding_mb ----

TEST_F(AllocatorSettingsTest, OversizeBlockServesOversizeRequestsOnly) {
  Configure("max_split_size_mb:32");
  Cache({40_MiB});
  EXPECT_EQ(allocator_->TryAllocate(2_MiB), nullptr);
  EXPECT_EQ(allocator_->TryAllocate(32_MiB - 512), nullptr) << "just below oversize";
  const Block* block = allocator_->TryAllocate(32_MiB);
  ASSERT_NE(block, nullptr) << "just oversize";
  EXPECT_EQ(block->bytes, 40_MiB) << "not split";
}

TEST_F(AllocatorSettingsTest, BlockOfExactlyTheMaximumIsOversize) {
  Configure("max_split_size_mb:32");
  Cache({32_MiB});
  EXPECT_EQ(Stats().oversize_segments.current, 1u);
  EXPECT_EQ(Stats().oversize_allocations.allocated, 1u);
  EXPECT_EQ(allocator_->TryAllocate(30_MiB), nullptr);
  Configure("max_split_size_mb:33");
  Cache({32_MiB});
  EXPECT_EQ(Stats().oversize_segments.current, 0u);
  EXPECT_NE(allocator_->TryAllocate(30_MiB), nullptr);
}

// The segment of a request just below the maximum may be oversize. The allocator splits the segment all the same.
TEST_F(AllocatorSettingsTest, NewSegmentIsSplitForARequestBelowTheMaximum) {
  Configure("max_split_size_mb:21");
  const Block* block = Get(20_MiB + 512);
  EXPECT_EQ(block->segment_bytes(), 22_MiB);
  EXPECT_EQ(block->bytes, 20_MiB + 512);
  EXPECT_EQ(Stats().inactive_split_bytes.all.current, 2_MiB - 512);
}

TEST_F(AllocatorSettingsTest, SearchDoesNotGoOnPastABlockThatMayNotServe) {
  Configure("max_split_size_mb:32,max_non_split_rounding_mb:20");
  Cache({60_MiB, 100_MiB});
  EXPECT_EQ(allocator_->TryAllocate(36_MiB), nullptr);
  EXPECT_NE(allocator_->TryAllocate(90_MiB), nullptr);
}

TEST_F(AllocatorSettingsTest, OversizeRequestTakesNoMuchLargerBlock) {
  Configure("max_split_size_mb:32,max_non_split_rounding_mb:24");
  Cache({100_MiB});
  EXPECT_EQ(allocator_->TryAllocate(76_MiB), nullptr) << "larger by exactly the rounding";
  EXPECT_NE(allocator_->TryAllocate(76_MiB + 512), nullptr);
  Configure("max_split_size_mb:32");
  Cache({100_MiB});
  EXPECT_EQ(allocator_->TryAllocate(80_MiB), nullptr) << "without the setting: 20 MiB";
  EXPECT_NE(allocator_->TryAllocate(80_MiB + 512), nullptr);
}

TEST_F(AllocatorSettingsTest, RoundingIsOfNoEffectWithoutAMaximum) {
  Configure("max_non_split_rounding_mb:20");
  Cache({100_MiB});
  EXPECT_NE(allocator_->TryAllocate(2_MiB), nullptr);
}

TEST_F(AllocatorSettingsTest, OversizeFiguresRiseAndFall) {
  Configure("max_split_size_mb:32");
  Block* block = Get(40_MiB);
  Get(20_MiB);
  EXPECT_EQ(Stats().oversize_allocations.current, 1u);
  EXPECT_EQ(Stats().oversize_segments.current, 1u);
  EXPECT_EQ(Stats().max_split_bytes, 32_MiB);
  allocator_->Free(block);
  EXPECT_EQ(Stats().oversize_allocations.current, 0u);
  EXPECT_EQ(Stats().oversize_segments.current, 1u);
  allocator_->EmptyCache();
  EXPECT_EQ(Stats().oversize_segments.current, 0u);
  EXPECT_EQ(Stats().oversize_segments.freed, 1u);
}

// ---- large_segment_size_mb, roundup_power2_divisions ----

TEST_F(AllocatorSettingsTest, LargeSegmentSizeIsForRequestsBelowTenMiB) {
  Configure("large_segment_size_mb:64");
  EXPECT_EQ(Get(1_MiB)->segment_bytes(), 2_MiB);
  EXPECT_EQ(Get(1_MiB + 1)->segment_bytes(), 64_MiB);
  EXPECT_EQ(Get(10_MiB - 512, 1)->segment_bytes(), 64_MiB);
  EXPECT_EQ(Get(10_MiB - 511, 2)->segment_bytes(), 10_MiB) << "chosen by the rounded size";
  EXPECT_EQ(Get(11_MiB, 3)->segment_bytes(), 12_MiB);
}

TEST_F(AllocatorSettingsTest, DivisionsRoundRequestsUp) {
  Configure("roundup_power2_divisions:4");
  EXPECT_EQ(Get(1200)->bytes, 1536u) << "not above 512 * 4";
  EXPECT_EQ(Get(5000)->bytes, 5120u);
  EXPECT_EQ(Get(4096)->bytes, 4096u);
  EXPECT_EQ(Get(33_MiB)->bytes, 40_MiB);
  EXPECT_EQ(Get(900_KiB)->bytes, 1_MiB);
  EXPECT_EQ(Stats().requested_bytes.all.current, 1200 + 5000 + 4096 + 33_MiB + 900_KiB);
}

TEST_F(AllocatorSettingsTest, DivisionsGoBySize) {
  Configure("roundup_power2_divisions:[2:0,4:2,>:1]");
  EXPECT_EQ(Get(3_MiB + 1)->bytes, 3_MiB + 512) << "2 to 4 MiB and below: none";
  EXPECT_EQ(Get(5_MiB)->bytes, 6_MiB) << "4 to 8 MiB: halves";
  EXPECT_EQ(Get(9_MiB + 1)->bytes, 9_MiB + 512) << "above";
}

TEST_F(AllocatorSettingsTest, DivisionsMayPushARequestIntoTheLargePool) {
  Configure("roundup_power2_divisions:[1:2,2:1]");
  EXPECT_EQ(Get(1_MiB + 1)->bytes, 3_MiB / 2);
  EXPECT_EQ(Stats().segment.pool[static_cast<int>(PoolKind::kLarge)].current, 1u);
}

// ---- Limits ----

TEST_F(AllocatorSettingsTest, LimitCountsSegments) {
  allocator_->SetLimit(42_MiB);
  Get(20_MiB);
  Get(512);
  EXPECT_EQ(Get(2_MiB)->segment_bytes(), 20_MiB) << "up to the limit";
  EXPECT_TRUE(Refuses(512, 1));
  EXPECT_EQ(Stats().num_ooms, 1u);
  EXPECT_NE(allocator_->TryAllocate(512), nullptr) << "what is held is handed out whatever the limit";
  allocator_->SetLimit(42_MiB + 2_MiB - 1);
  EXPECT_TRUE(Refuses(512, 1));
  allocator_->SetLimit(44_MiB);
  Get(512, 1);
  EXPECT_EQ(Reserved(), 44_MiB);
}

TEST_F(AllocatorSettingsTest, LimitIsTestedBeforeTheSourceIsAsked) {
  allocator_->SetLimit(1_MiB);
  EXPECT_TRUE(Refuses(512));
  EXPECT_EQ(source_->acquire_calls(), 0);
  EXPECT_EQ(Stats().num_alloc_retries, 1u);
}

TEST_F(AllocatorSettingsTest, RefusalByTheLimitNamesIt) {
  allocator_->SetLimit(1_MiB);
  EXPECT_THAT(allocator_->Allocate(512).status().message(), ::testing::HasSubstr("1.00 MiB"));
}

TEST_F(AllocatorSettingsTest, LimitBelowWhatIsHeldTakesNothing) {
  Block* block = Get(100_MiB);
  allocator_->SetLimit(0);
  EXPECT_EQ(Reserved(), 100_MiB);
  allocator_->Free(block);
  EXPECT_NE(allocator_->TryAllocate(100_MiB), nullptr);
  EXPECT_TRUE(Refuses(512));
  allocator_->SetLimit(CachingAllocator::kNoLimit);
  Get(512);
}

TEST_F(AllocatorSettingsTest, LimitFlushesTheCacheFirst) {
  allocator_->SetLimit(50_MiB);
  Cache({40_MiB});
  EXPECT_EQ(Get(50_MiB)->segment_bytes(), 50_MiB);
  EXPECT_EQ(Stats().num_alloc_retries, 1u);
  EXPECT_EQ(Stats().num_ooms, 0u);
}

TEST_F(AllocatorSettingsTest, TwoMissesAtATimeDoNotPassTheLimit) {
  allocator_->SetLimit(30_MiB);
  Gate gate;
  source_->on_acquire = [&](int) { gate.Pass(); };
  std::thread first([&] { Get(20_MiB); });
  gate.AwaitArrivals(1);
  // The second request is refused only after the answer to the first. A failure of the first would leave room.
  std::thread second([&] { EXPECT_TRUE(Refuses(20_MiB, 1)); });
  gate.Open();
  first.join();
  second.join();
  EXPECT_EQ(Reserved(), 20_MiB);
  Get(10_MiB, 1);
}

TEST_F(AllocatorSettingsTest, WhatAnotherThreadIsGivingBackIsWaitedFor) {
  source_->set_limit(30_MiB);
  allocator_->Free(Get(30_MiB));
  Gate gate;
  source_->on_release = [&](int) { gate.Pass(); };
  std::thread flush([&] { allocator_->EmptyCache(); });
  gate.AwaitArrivals(1);
  const int calls = source_->acquire_calls();
  std::thread request([&] { Get(30_MiB, 1); });
  while (source_->acquire_calls() == calls) std::this_thread::yield();
  // The device has refused the request once. A request that does not wait would fail for good during the sleep.
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  gate.Open();
  flush.join();
  request.join();
  EXPECT_EQ(allocator_->GetMemoryStats().num_ooms, 0u);
  EXPECT_EQ(Reserved(), 30_MiB);
}

TEST_F(AllocatorSettingsTest, SegmentThatDidNotComeDoesNotCount) {
  allocator_->SetLimit(30_MiB);
  source_->set_limit(0);
  EXPECT_TRUE(Refuses(30_MiB));
  source_->set_limit(SimulatedSource::kUnlimited);
  Get(30_MiB);
}

TEST_F(AllocatorSettingsTest, FractionIsOfTheCapacityRoundedDown) {
  const uint64_t odd = 20_MiB + 1;
  DirectHeap allocator(source_.get(), nullptr, {}, 2 * odd + 1);
  allocator.SetMemoryFraction(0.5);  // 20 MiB + 1
  const absl::StatusOr<Block*> block = allocator.Allocate(20_MiB);
  ASSERT_EQ(block.status(), absl::OkStatus());
  allocator.Free(*block);
  allocator.EmptyCache();
  DirectHeap smaller(source_.get(), nullptr, {}, 2 * 20_MiB - 1);
  smaller.SetMemoryFraction(0.5);  // half a byte below 20 MiB
  EXPECT_TRUE(absl::IsResourceExhausted(smaller.Allocate(20_MiB).status()));
}

TEST_F(AllocatorSettingsTest, FractionOfOneIsNoLimit) {
  allocator_->SetMemoryFraction(0.0);
  EXPECT_TRUE(Refuses(512));
  allocator_->SetMemoryFraction(1.0);
  Get(900_MiB);
  EXPECT_TRUE(Refuses(200_MiB)) << "the device's own";
  EXPECT_EQ(source_->acquire_calls(), 3);
}

TEST_F(AllocatorSettingsTest, FractionMayComeWithTheSettings) {
  Configure("per_process_memory_fraction:0.04");
  EXPECT_TRUE(Refuses(42_MiB));
  Get(40_MiB);
  allocator_->SetMemoryFraction(0.1);
  Get(60_MiB);
}

// ---- throw_on_cudamalloc_oom ----

TEST_F(AllocatorSettingsTest, RejectionTouchesNothing) {
  Configure("per_process_memory_fraction:0.1,throw_on_cudamalloc_oom:True");
  allocator_->SetMemoryFraction(1.0);
  Cache({60_MiB});
  const absl::Status refusal = allocator_->Allocate(62_MiB).status();
  EXPECT_TRUE(absl::IsResourceExhausted(refusal));
  EXPECT_THAT(refusal.message(), ::testing::HasSubstr("throw_on_cudamalloc_oom"));
  EXPECT_EQ(Stats().num_oom_rejections, 1u);
  EXPECT_EQ(Stats().num_ooms, 0u);
  EXPECT_EQ(Stats().num_alloc_retries, 0u);
  EXPECT_EQ(Stats().num_sync_all_streams, 0u);
  EXPECT_EQ(Reserved(), 60_MiB) << "the cache is kept";
  EXPECT_EQ(source_->acquire_calls(), 1);
  EXPECT_EQ(Get(40_MiB, 1)->bytes, 40_MiB) << "up to the fraction";
  EXPECT_TRUE(Refuses(512, 2));
}

TEST_F(AllocatorSettingsTest, OrdinaryLimitIsTestedBeforeTheRejection) {
  Configure("per_process_memory_fraction:0.1,throw_on_cudamalloc_oom:True");
  Cache({60_MiB});
  EXPECT_EQ(Get(62_MiB)->segment_bytes(), 62_MiB) << "after a flush";
  EXPECT_TRUE(Refuses(62_MiB));
  EXPECT_EQ(Stats().num_oom_rejections, 0u);
  EXPECT_EQ(Stats().num_ooms, 1u);
}

TEST_F(AllocatorSettingsTest, RejectionAfterTheFlushIsOutOfMemory) {
  // The limit refuses the first attempt. Another thread raises the limit during the flush.
  Configure("per_process_memory_fraction:0.1,throw_on_cudamalloc_oom:True");
  Cache({10_MiB});
  source_->on_release = [&](int) { allocator_->SetLimit(CachingAllocator::kNoLimit); };
  EXPECT_TRUE(Refuses(200_MiB));
  EXPECT_EQ(Stats().num_oom_rejections, 1u);
  EXPECT_EQ(Stats().num_ooms, 1u);
}

// ---- Release of oversize blocks ----

TEST_F(AllocatorSettingsTest, OneLargeEnoughOversizeBlockIsReleased) {
  Configure("max_split_size_mb:32");
  Cache({300_MiB, 200_MiB, 400_MiB});
  Cache({20_MiB});
  EXPECT_EQ(Get(170_MiB)->segment_bytes(), 170_MiB) << "200 MiB are too much for 170";
  EXPECT_THAT(source_->released_ids(), ElementsAre(2)) << "the smallest that is large enough; nothing else";
  EXPECT_EQ(Stats().num_alloc_retries, 0u);
  EXPECT_EQ(Stats().num_sync_all_streams, 0u) << "no flush";
}

TEST_F(AllocatorSettingsTest, SeveralOversizeBlocksAreReleasedLargestFirst) {
  Configure("max_split_size_mb:32");
  Cache({200_MiB, 100_MiB, 300_MiB, 32_MiB, 30_MiB});
  Get(300_MiB, 1);
  EXPECT_EQ(Get(480_MiB)->segment_bytes(), 480_MiB);
  EXPECT_THAT(source_->released_ids(), ElementsAre(3, 1)) << "no more than it takes";
  EXPECT_EQ(Stats().num_alloc_retries, 0u);
}

TEST_F(AllocatorSettingsTest, OversizeBlocksThatAreNotEnoughAreGoneAllTheSame) {
  Configure("max_split_size_mb:32");
  Cache({100_MiB, 30_MiB});
  Get(100_MiB, 1);
  EXPECT_TRUE(Refuses(950_MiB));
  EXPECT_THAT(source_->released_ids(), ElementsAre(1, 2)) << "the second by the flush";
  EXPECT_THAT(source_->asked_for(), ElementsAre(100_MiB, 30_MiB, 100_MiB, 950_MiB, 950_MiB))
      << "two attempts, not three";
}

TEST_F(AllocatorSettingsTest, OversizeReleaseThatDoesNotHelpIsFollowedByTheFlush) {
  Configure("max_split_size_mb:32");
  Cache({40_MiB});
  Cache({600_MiB}, 1);
  Get(300_MiB, 2);
  // 60 MiB are left. The 40 MiB block is too small for 660 MiB; the flush gives 600 MiB more.
  EXPECT_EQ(Get(660_MiB)->segment_bytes(), 660_MiB);
  EXPECT_EQ(Stats().num_alloc_retries, 1u);
  Configure("max_split_size_mb:32");
  Cache({100_MiB});
  Cache({600_MiB}, 1);
  Get(290_MiB, 2);
  // 10 MiB are left. The oversize block of 100 MiB alone is enough for 78 MiB.
  EXPECT_EQ(Get(78_MiB)->segment_bytes(), 78_MiB);
  EXPECT_EQ(Stats().num_alloc_retries, 0u);
}

TEST_F(AllocatorSettingsTest, OversizeBlocksOfOtherStreamsAndPoolsAreKept) {
  Configure("max_split_size_mb:32");
  Cache({500_MiB}, 1);
  Get(490_MiB, 2);
  Get(512);
  // The large request of stream 0 finds no oversize block, so the allocator flushes the cache.
  EXPECT_EQ(Get(100_MiB)->segment_bytes(), 100_MiB);
  EXPECT_EQ(Stats().num_alloc_retries, 1u);
}

TEST_F(AllocatorSettingsTest, RequestBelowTheMaximumReleasesAnOversizeBlock) {
  Configure("max_split_size_mb:32");
  Cache({500_MiB, 40_MiB});
  Get(456_MiB, 1);
  EXPECT_EQ(Get(20_MiB)->segment_bytes(), 20_MiB);
  EXPECT_THAT(source_->released_ids(), ElementsAre(2));
  EXPECT_EQ(Stats().num_alloc_retries, 0u);
}

TEST_F(AllocatorSettingsTest, WithoutAMaximumEverythingIsFlushed) {
  Cache({400_MiB, 500_MiB});
  Get(600_MiB);
  EXPECT_THAT(source_->released_ids(), ElementsAre(1, 2));
}

// ---- Garbage collection ----

class GarbageCollectionTest : public AllocatorSettingsTest {
 protected:
  // Makes `searches` searches of the large pool that find a block.
  void PassTime(int searches = 1) {
    for (int i = 0; i < searches; ++i) {
      Block* block = allocator_->TryAllocate(1_MiB + 512, kClock);
      if (block == nullptr) block = Get(1_MiB + 512, kClock);
      allocator_->Free(block);
    }
  }
  // Gets a block for PassTime(), and so keeps a segment of the large pool partly used.
  void StartClock() { Get(2_MiB, kClock); }

  static constexpr Stream kClock = 99;
};

TEST_F(GarbageCollectionTest, ReleasesTheOldestUntilBelowTheThreshold) {
  Configure("garbage_collection_threshold:0.5");
  allocator_->SetLimit(400_MiB);
  StartClock();  // 20 MiB, never garbage
  Block* old = Get(100_MiB);
  Block* young = Get(60_MiB);
  allocator_->Free(old);
  PassTime(10);
  allocator_->Free(young);
  PassTime(2);
  // 180 MiB are held, below the threshold of 200 MiB.
  Get(30_MiB, 1);
  EXPECT_THAT(source_->released_ids(), IsEmpty());
  // 210 MiB are held, 10 MiB above the threshold: the older segment goes.
  Get(32_MiB, 2);
  EXPECT_THAT(source_->released_ids(), ElementsAre(2));
  EXPECT_EQ(Stats().num_device_free, 1u);
  EXPECT_EQ(Stats().num_alloc_retries, 0u);
  EXPECT_EQ(Stats().num_sync_all_streams, 0u) << "without waiting";
}

TEST_F(GarbageCollectionTest, ExactlyAtTheThresholdNothingHappens) {
  Configure("garbage_collection_threshold:0.5");
  allocator_->SetLimit(400_MiB);
  Cache({200_MiB});
  Get(10_MiB, 1);
  EXPECT_THAT(source_->released_ids(), IsEmpty());
  Get(10_MiB, 2);
  EXPECT_THAT(source_->released_ids(), ElementsAre(1));
}

TEST_F(GarbageCollectionTest, EquallyOldOnesAllGo) {
  Configure("garbage_collection_threshold:0.1");
  allocator_->SetLimit(400_MiB);
  Cache({30_MiB, 40_MiB, 50_MiB});
  Get(60_MiB);
  EXPECT_THAT(source_->released_ids(), ::testing::UnorderedElementsAre(1, 2, 3)) << "an age equal to the mean is old";
}

TEST_F(GarbageCollectionTest, GoesOnInRounds) {
  Configure("garbage_collection_threshold:0.5");
  allocator_->SetLimit(400_MiB);
  StartClock();
  std::vector<Block*> blocks;
  for (int i = 0; i < 4; ++i) blocks.push_back(Get(50_MiB));
  const std::vector<int> ages = {100, 10, 2, 1};  // searches between the frees
  for (size_t i = 0; i < blocks.size(); ++i) {
    allocator_->Free(blocks[i]);
    PassTime(ages[i]);
  }
  Get(40_MiB, 3);
  // 260 MiB are held, 60 MiB above the threshold. Round 1 takes the segment with age 113; 50 MiB are not enough. The
  // ages 13, 3 and 1 are left, and round 2 takes 13.
  source_->on_acquire = [&](int) { EXPECT_THAT(source_->released_ids(), ElementsAre(2, 3)); };
  Get(90_MiB, 4);
}

TEST_F(GarbageCollectionTest, RoundIsNotCutShort) {
  Configure("garbage_collection_threshold:0.5");
  allocator_->SetLimit(400_MiB);
  StartClock();
  std::vector<Block*> blocks;
  for (int i = 0; i < 4; ++i) blocks.push_back(Get(50_MiB));
  allocator_->Free(blocks[0]);
  allocator_->Free(blocks[1]);
  PassTime(100);
  allocator_->Free(blocks[2]);
  allocator_->Free(blocks[3]);
  PassTime();
  Get(80_MiB, 3);
  // 220 MiB were held, so one segment would have been enough.
  EXPECT_THAT(source_->released_ids(), ::testing::UnorderedElementsAre(2, 3));
}

TEST_F(GarbageCollectionTest, NeedsALimit) {
  Configure("garbage_collection_threshold:0.1");
  Cache({300_MiB});
  Get(310_MiB, 1);
  EXPECT_THAT(source_->released_ids(), IsEmpty());
}

TEST_F(GarbageCollectionTest, LeavesSmallPoolAndSplitSegmentsAlone) {
  Configure("garbage_collection_threshold:0.01");
  allocator_->SetLimit(400_MiB);
  Cache({512});
  Get(2_MiB);  // a segment of 20 MiB
  Get(30_MiB, 1);
  EXPECT_THAT(source_->released_ids(), IsEmpty());
}

TEST_F(GarbageCollectionTest, TakesFromEveryStream) {
  Configure("garbage_collection_threshold:0.1");
  allocator_->SetLimit(400_MiB);
  Cache({50_MiB}, 1);
  Get(60_MiB, 2);
  EXPECT_THAT(source_->released_ids(), ElementsAre(1));
}

TEST_F(GarbageCollectionTest, PendingBlocksAreNoGarbage) {
  Configure("garbage_collection_threshold:0.1");
  allocator_->SetLimit(400_MiB);
  Block* block = Get(50_MiB);
  allocator_->RecordStream(block, 1);
  allocator_->Free(block);
  Get(60_MiB, 2);
  EXPECT_THAT(source_->released_ids(), IsEmpty());
}

// The age counts searches of the large pool, from the moment when the whole segment became free.
TEST_F(GarbageCollectionTest, AgeBeginsAnewWithEveryUse) {
  Configure("garbage_collection_threshold:0.5");
  allocator_->SetLimit(400_MiB);
  StartClock();
  Block* first = Get(100_MiB);
  Block* second = Get(100_MiB);
  allocator_->Free(first);
  PassTime(50);
  allocator_->Free(second);
  PassTime(5);
  // A new use makes the older segment the younger segment.
  Block* again = allocator_->TryAllocate(100_MiB);
  ASSERT_EQ(again, first) << "the lowest address among equals";
  allocator_->Free(again);
  for (int i = 0; i < 20; ++i) allocator_->Free(Get(512));  // searches of the small pool do not count
  Get(30_MiB, 3);
  EXPECT_THAT(source_->released_ids(), ElementsAre(3));
}

TEST_F(GarbageCollectionTest, MissOfTryAllocateIsNotCountedTwice) {
  // The mean of the ages tells whether a miss of TryAllocate() counts. Without misses, the ages are 3, 1 and 1 (mean
  // 5/3), and the collection takes only the first segment. With misses, the ages would be 3 + 3, 1 + 3 and 1 (mean
  // 11/3), and the second segment would go, too.
  Configure("garbage_collection_threshold:0.5");
  allocator_->SetLimit(400_MiB);
  std::vector<Block*> blocks = {Get(80_MiB), Get(80_MiB), Get(80_MiB)};
  Get(2_MiB, kClock);
  allocator_->Free(blocks[0]);
  PassTime(2);
  allocator_->Free(blocks[1]);
  for (int i = 0; i < 3; ++i) EXPECT_EQ(allocator_->TryAllocate(300_MiB), nullptr);
  allocator_->Free(blocks[2]);
  Get(100_MiB);
  EXPECT_THAT(source_->released_ids(), ElementsAre(1));
}

// ---- Resets ----

TEST_F(AllocatorSettingsTest, ResetOfTotalsKeepsWhatIsHeldAndPeaks) {
  Configure("max_split_size_mb:32");
  Block* large = Get(40_MiB);
  Block* small = Get(1000);
  allocator_->Free(small);
  EXPECT_TRUE(Refuses(990_MiB));
  EXPECT_EQ(Stats().num_ooms, 1u);
  allocator_->ResetAccumulatedStats();
  MemoryStats stats = Stats();
  EXPECT_EQ(stats.allocated_bytes.all.current, 40_MiB);
  EXPECT_EQ(stats.allocated_bytes.all.peak, 40_MiB + 1024);
  EXPECT_EQ(stats.num_ooms, 0u);
  EXPECT_EQ(stats.num_alloc_retries, 0u);
  EXPECT_EQ(stats.num_device_alloc, 0u);
  EXPECT_EQ(stats.num_device_free, 0u);
  EXPECT_EQ(stats.num_sync_all_streams, 0u);
  EXPECT_EQ(stats.max_split_bytes, 32_MiB) << "a setting, not a total";
  stats.ForEach([](const char* name, const PoolStat& stat) {
    EXPECT_EQ(stat.all.allocated, 0u) << name;
    EXPECT_EQ(stat.all.freed, 0u) << name;
  });
  EXPECT_EQ(stats.oversize_allocations.current, 1u);
  EXPECT_EQ(stats.oversize_allocations.allocated, 0u);
  // The totals count on from the reset.
  allocator_->Free(large);
  Get(2048);
  stats = Stats();
  EXPECT_EQ(stats.allocated_bytes.all.freed, 40_MiB);
  EXPECT_EQ(stats.allocated_bytes.all.allocated, 2048u);
  EXPECT_EQ(stats.allocated_bytes.pool[static_cast<int>(PoolKind::kLarge)].freed, 40_MiB);
  EXPECT_EQ(stats.allocated_bytes.pool[static_cast<int>(PoolKind::kSmall)].allocated, 2048u);
  EXPECT_EQ(stats.oversize_allocations.freed, 1u);
}

TEST_F(AllocatorSettingsTest, ResetOfRejections) {
  Configure("per_process_memory_fraction:0.1,throw_on_cudamalloc_oom:True");
  allocator_->SetMemoryFraction(1);
  EXPECT_TRUE(Refuses(200_MiB));
  allocator_->ResetAccumulatedStats();
  EXPECT_EQ(Stats().num_oom_rejections, 0u);
}

TEST_F(AllocatorSettingsTest, ResetOfPeaksIncludesOversizeAndBothPools) {
  Configure("max_split_size_mb:32");
  Cache({40_MiB, 512, 50_MiB});
  allocator_->EmptyCache();
  Get(512);
  EXPECT_EQ(Stats().oversize_allocations.peak, 2u);
  EXPECT_EQ(Stats().oversize_segments.peak, 2u);
  allocator_->ResetPeakStats();
  const MemoryStats stats = Stats();
  stats.ForEach([](const char* name, const PoolStat& stat) {
    EXPECT_EQ(stat.all.peak, stat.all.current) << name;
    for (const Stat& pool : stat.pool) EXPECT_EQ(pool.peak, pool.current) << name;
  });
  EXPECT_EQ(stats.oversize_allocations.peak, 0u);
  EXPECT_EQ(stats.oversize_segments.peak, 0u);
}

TEST_F(AllocatorSettingsTest, PeakOfTheWholeIsNotTheSumOfThePoolsPeaks) {
  allocator_->Free(Get(40_MiB));
  Get(1_MiB);
  EXPECT_EQ(Stats().allocated_bytes.all.peak, 40_MiB);
  EXPECT_EQ(Stats().allocated_bytes.pool[static_cast<int>(PoolKind::kSmall)].peak, 1_MiB);
}

}  // namespace
}  // namespace vrambroker
