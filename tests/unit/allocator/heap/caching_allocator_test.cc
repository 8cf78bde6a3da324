// SPDX-License-Identifier: Apache-2.0
#include "allocator/heap/caching_allocator.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <map>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/cord.h"
#include "allocator/replay/direct_heap.h"
#include "tests/support/fake_device.h"
#include "tests/support/simulated_source.h"

namespace vrambroker {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

class CachingAllocatorTest : public ::testing::Test {
 protected:
  void TearDown() override {
    EXPECT_EQ(allocator_.CheckInvariants(), absl::OkStatus());
    EXPECT_EQ(source_.misuse(), "");
  }

  // Allocates a block; a refusal fails the test.
  Block* Get(uint64_t bytes) {
    absl::StatusOr<Block*> block = allocator_.Allocate(bytes);
    EXPECT_TRUE(block.ok()) << block.status();
    return block.ok() ? *block : nullptr;
  }
  MemoryStats Stats() const { return allocator_.GetMemoryStats(); }

  SimulatedSource source_{1_GiB};
  DirectHeap allocator_{&source_};
};

TEST_F(CachingAllocatorTest, MissTakesASegmentOfTheRightSize) {
  const Block* small = Get(1);
  EXPECT_EQ(small->offset(), 0u);
  EXPECT_EQ(small->bytes, 512u);
  EXPECT_EQ(small->requested_bytes, 1u);
  EXPECT_EQ(small->segment_bytes(), 2_MiB);
  const Block* large = Get(1_MiB + 1);
  EXPECT_EQ(large->bytes, 1_MiB + 512);
  EXPECT_EQ(large->segment_bytes(), 20_MiB);
  const Block* own = Get(21_MiB + 1);
  EXPECT_EQ(own->bytes, 22_MiB) << "a rest of less than 1 MiB stays with the block";
  EXPECT_EQ(own->segment_bytes(), 22_MiB);
  EXPECT_THAT(source_.asked_for(), ElementsAre(2_MiB, 20_MiB, 22_MiB));
}

TEST_F(CachingAllocatorTest, SplitHandsOutTheLowerPart) {
  const Block* first = Get(1000);
  const Block* second = Get(512);
  EXPECT_EQ(second->segment_id(), first->segment_id());
  EXPECT_EQ(first->offset(), 0u);
  EXPECT_EQ(second->offset(), 1024u);
  const MemoryStats stats = Stats();
  EXPECT_EQ(stats.inactive_split.all.current, 1u);
  EXPECT_EQ(stats.inactive_split_bytes.all.current, 2_MiB - 1536);
  EXPECT_EQ(stats.requested_bytes.all.current, 1512u);
}

TEST_F(CachingAllocatorTest, SmallBlockIsSplitDownToTheLast512Bytes) {
  Get(1_MiB);
  const Block* block = Get(1_MiB - 512);
  EXPECT_EQ(block->bytes, 1_MiB - 512);
  const Block* last = Get(1);
  EXPECT_EQ(last->segment_id(), block->segment_id());
  EXPECT_EQ(last->offset(), 2_MiB - 512);
  EXPECT_EQ(source_.acquire_calls(), 1);
}

TEST_F(CachingAllocatorTest, LargeBlockIsSplitOnlyAboveOneMiBOfRest) {
  EXPECT_EQ(Get(19_MiB)->bytes, 20_MiB) << "rest of exactly 1 MiB";
  EXPECT_EQ(Get(19_MiB - 512)->bytes, 19_MiB - 512) << "rest of 1 MiB + 512";
}

TEST_F(CachingAllocatorTest, FreeMergesWithBothNeighbours) {
  Block* a = Get(512);
  Block* b = Get(512);
  Block* c = Get(512);
  allocator_.Free(a);
  allocator_.Free(c);
  EXPECT_EQ(Stats().inactive_split.all.current, 2u);
  allocator_.Free(b);
  const std::vector<SegmentSnapshot> segments = allocator_.Snapshot().segments;
  ASSERT_EQ(segments.size(), 1u);
  ASSERT_EQ(segments[0].blocks.size(), 1u);
  EXPECT_EQ(segments[0].blocks[0].bytes, 2_MiB);
  EXPECT_EQ(segments[0].blocks[0].state, BlockState::kFree);
  EXPECT_EQ(Stats().inactive_split.all.current, 0u);
  EXPECT_EQ(Stats().inactive_split_bytes.all.current, 0u);
}

TEST_F(CachingAllocatorTest, FreeMergesWithTheLowerNeighbourAlone) {
  Block* a = Get(512);
  Block* b = Get(1024);
  Get(512);
  allocator_.Free(a);
  allocator_.Free(b);
  const Block* both = Get(1536);
  EXPECT_EQ(both->offset(), 0u);
}

TEST_F(CachingAllocatorTest, FreeKeepsTheSegment) {
  allocator_.Free(Get(30_MiB));
  EXPECT_EQ(source_.release_calls(), 0);
  EXPECT_EQ(Stats().reserved_bytes.all.current, 30_MiB);
  EXPECT_EQ(Stats().allocated_bytes.all.current, 0u);
  Get(30_MiB);
  EXPECT_EQ(source_.acquire_calls(), 1);
}

TEST_F(CachingAllocatorTest, ReusesTheSmallestThatFits) {
  Block* big = Get(64_MiB);
  Block* fitting = Get(32_MiB);
  Block* too_small = Get(30_MiB);
  const SegmentId wanted = fitting->segment_id();
  allocator_.Free(big);
  allocator_.Free(too_small);
  allocator_.Free(fitting);
  EXPECT_EQ(Get(31_MiB)->segment_id(), wanted);
}

TEST_F(CachingAllocatorTest, AmongEqualsTheOldestSegmentIsReused) {
  Block* first = Get(32_MiB);
  Block* second = Get(32_MiB);
  Block* third = Get(32_MiB);
  const SegmentId oldest = first->segment_id();
  allocator_.Free(third);
  allocator_.Free(first);
  allocator_.Free(second);
  EXPECT_EQ(Get(32_MiB)->segment_id(), oldest);
}

TEST_F(CachingAllocatorTest, AmongEqualsOfASegmentTheLowestOffsetIsReused) {
  std::vector<Block*> blocks;
  for (int i = 0; i < 6; ++i) blocks.push_back(Get(4096));
  allocator_.Free(blocks[3]);
  allocator_.Free(blocks[1]);
  EXPECT_EQ(Get(4096)->offset(), 4096u);
  EXPECT_EQ(Get(4096)->offset(), 3u * 4096);
}

TEST_F(CachingAllocatorTest, AgeOfASegmentIsItsAcquisitionNotItsId) {
  // The first segment goes back. A later segment is younger than all kept segments.
  Block* gone = Get(40_MiB);
  Block* kept = Get(32_MiB);
  const SegmentId wanted = kept->segment_id();
  allocator_.Free(gone);
  allocator_.EmptyCache();
  Block* young = Get(32_MiB);
  allocator_.Free(young);
  allocator_.Free(kept);
  EXPECT_EQ(Get(32_MiB)->segment_id(), wanted);
}

TEST_F(CachingAllocatorTest, PoolsDoNotMix) {
  allocator_.Free(Get(20_MiB));
  EXPECT_EQ(allocator_.TryAllocate(1_MiB), nullptr) << "a small request is not served from a large segment";
  Block* small = Get(512);
  EXPECT_EQ(small->segment_bytes(), 2_MiB);
  EXPECT_EQ(Stats().segment.pool[static_cast<int>(PoolKind::kSmall)].current, 1u);
  EXPECT_EQ(Stats().segment.pool[static_cast<int>(PoolKind::kLarge)].current, 1u);
}

TEST_F(CachingAllocatorTest, TryAllocateNeverAsksTheSource) {
  EXPECT_EQ(allocator_.TryAllocate(512), nullptr);
  EXPECT_EQ(source_.acquire_calls(), 0);
  allocator_.Free(Get(512));
  EXPECT_NE(allocator_.TryAllocate(512), nullptr);
  EXPECT_EQ(source_.acquire_calls(), 1);
  EXPECT_EQ(Stats().num_ooms, 0u);
}

TEST_F(CachingAllocatorTest, RefusalFlushesTheCacheAndTriesAgain) {
  source_.set_limit(44_MiB);
  Block* a = Get(20_MiB);
  Block* b = Get(22_MiB);
  Block* small = Get(512);
  allocator_.Free(small);
  allocator_.Free(b);
  allocator_.Free(a);
  EXPECT_EQ(Get(40_MiB)->segment_bytes(), 40_MiB);
  EXPECT_THAT(source_.released_ids(), ElementsAre(1, 2, 3)) << "large pool first, smallest first, then the small pool";
  EXPECT_EQ(Stats().num_alloc_retries, 1u);
  EXPECT_EQ(Stats().num_ooms, 0u);
  EXPECT_EQ(Stats().num_device_alloc, 4u);
  EXPECT_EQ(Stats().num_device_free, 3u);
}

TEST_F(CachingAllocatorTest, OutOfMemoryKeepsWhatIsHeld) {
  source_.set_limit(22_MiB);
  Block* held = Get(20_MiB);
  Block* small = Get(512);
  const MemoryStats before = Stats();
  const absl::StatusOr<Block*> refused = allocator_.Allocate(2_MiB);
  EXPECT_TRUE(absl::IsResourceExhausted(refused.status())) << refused.status();
  const MemoryStats after = Stats();
  EXPECT_EQ(after.num_ooms, 1u);
  EXPECT_EQ(after.num_alloc_retries, 1u);
  EXPECT_EQ(after.allocated_bytes.all.current, before.allocated_bytes.all.current);
  EXPECT_EQ(after.allocated_bytes.all.allocated, before.allocated_bytes.all.allocated);
  EXPECT_EQ(after.reserved_bytes.all.current, before.reserved_bytes.all.current);
  EXPECT_EQ(held->segment_bytes(), 20_MiB);
  // The allocator goes on working.
  EXPECT_NE(allocator_.TryAllocate(512), nullptr);
  allocator_.Free(held);
  EXPECT_NE(allocator_.TryAllocate(20_MiB), nullptr);
  allocator_.Free(small);
}

TEST_F(CachingAllocatorTest, OutOfMemoryReportsTheSourcesLastWord) {
  absl::Status last = absl::ResourceExhaustedError("second");
  last.SetPayload("test/cause", absl::Cord("why"));
  source_.AnswerNext({absl::ResourceExhaustedError("first"), last});
  EXPECT_EQ(allocator_.Allocate(512).status(), last) << "the payload included";
}

TEST_F(CachingAllocatorTest, CacheIsSearchedAgainAfterTheFlush) {
  source_.set_limit(20_MiB);
  Block* held = Get(18_MiB);
  // Another thread frees the held block while the request waits for the second answer.
  source_.on_acquire = [&](int call) {
    if (call == 3) allocator_.Free(held);
  };
  const absl::StatusOr<Block*> block = allocator_.Allocate(18_MiB);
  ASSERT_TRUE(block.ok()) << block.status();
  EXPECT_EQ((*block)->segment_id(), SegmentId{1});
  EXPECT_EQ(Stats().num_ooms, 0u);
  EXPECT_EQ(Stats().num_alloc_retries, 1u);
}

TEST_F(CachingAllocatorTest, OtherErrorEndsTheRequestAtOnce) {
  allocator_.Free(Get(20_MiB));
  source_.AnswerNext({absl::AbortedError("the session has ended")});
  EXPECT_EQ(allocator_.Allocate(40_MiB).status(), absl::AbortedError("the session has ended"));
  EXPECT_EQ(source_.acquire_calls(), 2) << "no second try";
  EXPECT_EQ(source_.release_calls(), 0) << "no flush";
  EXPECT_EQ(Stats().num_alloc_retries, 0u);
  EXPECT_EQ(Stats().num_ooms, 0u);
}

TEST_F(CachingAllocatorTest, OtherErrorOfTheSecondTryIsNoOutOfMemory) {
  source_.AnswerNext({absl::ResourceExhaustedError("full"), absl::InternalError("driver")});
  EXPECT_EQ(allocator_.Allocate(512).status(), absl::InternalError("driver"));
  EXPECT_EQ(Stats().num_alloc_retries, 1u);
  EXPECT_EQ(Stats().num_ooms, 0u);
}

TEST_F(CachingAllocatorTest, EmptyCacheKeepsSegmentsInUse) {
  Block* in_use = Get(2_MiB);  // in a segment of 20 MiB
  Block* whole = Get(30_MiB);
  allocator_.Free(whole);
  EXPECT_EQ(allocator_.EmptyCache(), 30_MiB);
  EXPECT_THAT(source_.released_ids(), ElementsAre(2));
  EXPECT_EQ(Stats().reserved_bytes.all.current, 20_MiB);
  EXPECT_EQ(source_.used_bytes(), 20_MiB);
  allocator_.Free(in_use);
  EXPECT_EQ(allocator_.EmptyCache(), 20_MiB);
  EXPECT_THAT(allocator_.Snapshot().segments, IsEmpty());
}

TEST_F(CachingAllocatorTest, EmptyCacheOfNothingLeavesTheSourceAlone) {
  Get(512);
  EXPECT_EQ(allocator_.EmptyCache(), 0u);
  EXPECT_EQ(source_.release_calls(), 0);
}

TEST_F(CachingAllocatorTest, EmptyCacheReportsWhatTheSourceSays) {
  allocator_.Free(Get(30_MiB));
  source_.set_release_reports(false);
  EXPECT_EQ(allocator_.EmptyCache(), 0u);
  EXPECT_EQ(Stats().num_device_free, 1u);
  EXPECT_EQ(Stats().reserved_bytes.all.current, 0u);
}

TEST_F(CachingAllocatorTest, ResetPeaksKeepsEverythingElse) {
  Block* a = Get(30_MiB);
  Block* b = Get(512);
  allocator_.Free(a);
  EXPECT_EQ(Stats().allocated_bytes.all.peak, 30_MiB + 512);
  allocator_.ResetPeakStats();
  const MemoryStats stats = Stats();
  EXPECT_EQ(stats.allocated_bytes.all.peak, 512u);
  EXPECT_EQ(stats.allocated_bytes.pool[static_cast<int>(PoolKind::kLarge)].peak, 0u);
  EXPECT_EQ(stats.reserved_bytes.all.peak, 32_MiB);
  EXPECT_EQ(stats.allocated_bytes.all.allocated, 30_MiB + 512);
  EXPECT_EQ(stats.allocated_bytes.all.freed, 30_MiB);
  allocator_.Free(b);
}

TEST_F(CachingAllocatorTest, RefusalsFromElsewhereCanBeCounted) {
  allocator_.SetRecording(10);
  allocator_.CountOutOfMemory();
  EXPECT_EQ(Stats().num_ooms, 1u);
  EXPECT_EQ(Stats().num_alloc_retries, 0u);
  EXPECT_EQ(allocator_.Snapshot().history.size(), 1u) << "the snapshot: no block of a heap was asked for";
}

TEST_F(CachingAllocatorTest, SnapshotTilesEverySegment) {
  std::vector<Block*> blocks;
  for (const uint64_t bytes : {uint64_t{1}, uint64_t{700}, 1_MiB, 3_MiB, 4_MiB, 50_MiB}) blocks.push_back(Get(bytes));
  allocator_.Free(blocks[1]);
  allocator_.Free(blocks[3]);
  const std::vector<SegmentSnapshot> segments = allocator_.Snapshot().segments;
  ASSERT_EQ(segments.size(), 3u);
  uint64_t allocated_bytes = 0;
  for (size_t i = 0; i < segments.size(); ++i) {
    EXPECT_EQ(segments[i].id, SegmentId{i + 1}) << "by id";
    EXPECT_EQ(segments[i].bytes, source_.BytesOf(segments[i].id));
    uint64_t offset = 0;
    for (const BlockSnapshot& block : segments[i].blocks) {
      EXPECT_EQ(block.offset, offset);
      offset += block.bytes;
      if (block.state == BlockState::kAllocated) allocated_bytes += block.bytes;
    }
    EXPECT_EQ(offset, segments[i].bytes);
  }
  EXPECT_EQ(segments[0].pool, PoolKind::kSmall);
  EXPECT_EQ(segments[1].pool, PoolKind::kLarge);
  EXPECT_EQ(allocated_bytes, Stats().allocated_bytes.all.current);
  const BlockSnapshot& freed = segments[0].blocks[1];
  EXPECT_EQ(freed.state, BlockState::kFree);
  EXPECT_EQ(freed.requested_bytes, 700u) << "of the last owner";
}

// PyTorch's allocator, too, keeps the last requested size in a free block.
TEST_F(CachingAllocatorTest, FreeBlocksRememberTheLastRequest) {
  const auto requested = [&] {
    std::vector<uint64_t> sizes;
    const HeapSnapshot snapshot = allocator_.Snapshot();
    for (const BlockSnapshot& block : snapshot.segments.at(0).blocks) sizes.push_back(block.requested_bytes);
    return sizes;
  };
  Block* a = Get(100);
  Block* b = Get(700);
  Block* c = Get(1500);
  Block* d = Get(513);
  EXPECT_THAT(requested(), ElementsAre(100, 700, 1500, 513, 0)) << "nobody asked for the rest yet";
  allocator_.Free(b);
  allocator_.Free(a);
  EXPECT_THAT(requested(), ElementsAre(100, 1500, 513, 0)) << "of the block that was freed, not of the one above it";
  allocator_.Free(c);
  EXPECT_THAT(requested(), ElementsAre(1500, 513, 0)) << "nor of the one below it";
  Block* part = Get(300);
  EXPECT_THAT(requested(), ElementsAre(300, 1500, 513, 0)) << "the rest of a split keeps it";
  allocator_.Free(d);
  EXPECT_THAT(requested(), ElementsAre(300, 513)) << "with neighbours on both sides";
  EXPECT_EQ(Stats().requested_bytes.all.current, 300u);
  allocator_.Free(part);
  EXPECT_THAT(requested(), ElementsAre(300));
}

TEST_F(CachingAllocatorTest, ExplainFitLooksAtThePoolThatWouldServe) {
  FitReport fit = allocator_.ExplainFit(3_MiB + 1);
  EXPECT_EQ(fit.block_bytes, 3_MiB + 512);
  EXPECT_EQ(fit.segment_bytes, 20_MiB);
  EXPECT_EQ(fit.pool_free_bytes, 0u);
  EXPECT_EQ(fit.pool_largest_bytes, 0u);

  Block* a = Get(9_MiB);
  Block* b = Get(9_MiB);  // 2 MiB of the segment of `a` and `b` are left
  Get(9_MiB);             // 11 MiB of another segment are left
  Get(512);
  allocator_.Free(a);
  fit = allocator_.ExplainFit(15_MiB);
  EXPECT_EQ(fit.segment_bytes, 16_MiB);
  EXPECT_EQ(fit.pool_free_bytes, 22_MiB) << "large pool only";
  EXPECT_EQ(fit.pool_largest_bytes, 11_MiB);
  allocator_.Free(b);
  EXPECT_EQ(allocator_.ExplainFit(512).pool_largest_bytes, 2_MiB - 512);
}

TEST_F(CachingAllocatorTest, ExplainFitNamesTheHolesAndWhatPinsThem) {
  EXPECT_EQ(allocator_.ExplainFit(20_MiB).holes.segments, 0u);
  // Segments: A has five blocks of 4 MiB, one block fills B, C has small blocks, D is wholly free, E has one small
  // block.
  std::vector<Block*> a;
  for (int i = 0; i < 5; ++i) a.push_back(Get(4_MiB));
  Get(30_MiB);
  Block* small[3];
  for (Block*& block : small) block = Get(512_KiB);
  Block* whole = Get(40_MiB);
  allocator_.Free(a[0]);
  allocator_.Free(a[1]);
  allocator_.Free(a[3]);
  allocator_.Free(small[1]);
  allocator_.Free(whole);
  const Holes holes = allocator_.ExplainFit(20_MiB).holes;
  EXPECT_EQ(holes.bytes, 12_MiB + 1_MiB) << "C has 512 KiB between blocks and as many at its end";
  EXPECT_EQ(holes.bytes, Stats().inactive_split_bytes.all.current);
  EXPECT_EQ(holes.count, 4u);
  EXPECT_EQ(holes.count, Stats().inactive_split.all.current);
  EXPECT_EQ(holes.segments, 2u) << "not those that a trim returns, nor those that are full";
  ASSERT_EQ(holes.most_bytes.size(), 2u);
  const PinnedSegment& most = holes.most_bytes[0];
  EXPECT_EQ(most.address, a[2]->address - 8_MiB);
  EXPECT_EQ(most.bytes, 20_MiB);
  EXPECT_EQ(most.hole_bytes, 12_MiB);
  EXPECT_EQ(most.largest_hole_bytes, 8_MiB);
  EXPECT_EQ(most.pinning_blocks, 2u);
  ASSERT_EQ(most.longest_held.size(), 2u);
  std::set<uint64_t> pinning;
  for (const PinningBlock& block : most.longest_held) {
    EXPECT_EQ(block.bytes, 4_MiB);
    pinning.insert(block.address);
  }
  EXPECT_EQ(pinning, (std::set<uint64_t>{a[2]->address, a[4]->address}));
  EXPECT_EQ(holes.most_bytes[1].hole_bytes, 1_MiB);
}

TEST_F(CachingAllocatorTest, ExplainFitNamesAFewSegmentsAndBlocks) {
  // Segment i of 20 MiB has 13 blocks of 1.5 MiB, and i + 1 free blocks.
  std::vector<std::vector<Block*>> segments(6);
  for (std::vector<Block*>& blocks : segments) {
    for (int i = 0; i < 13; ++i) blocks.push_back(Get(3_MiB / 2));
  }
  for (size_t i = 0; i < segments.size(); ++i) {
    for (size_t k = 0; k <= i; ++k) allocator_.Free(segments[i][2 * k]);
  }
  const Holes holes = allocator_.ExplainFit(20_MiB).holes;
  EXPECT_EQ(holes.segments, 6u);
  ASSERT_EQ(holes.most_bytes.size(), Holes::kMaxSegments);
  for (size_t i = 0; i < Holes::kMaxSegments; ++i) {
    EXPECT_EQ(holes.most_bytes[i].address, segments[5 - i][0]->segment->address) << i;
    EXPECT_EQ(holes.most_bytes[i].longest_held.size(), Holes::kMaxBlocks);
    EXPECT_GE(holes.most_bytes[i].pinning_blocks, 7u);
  }
}

TEST_F(CachingAllocatorTest, BlocksAreHeldSinceTheyWereHandedOut) {
  Block* old = Get(4_MiB);
  const auto held = [&](const Block* block) {
    const Holes holes = allocator_.ExplainFit(20_MiB).holes;
    for (const PinningBlock& pinning : holes.most_bytes.at(0).longest_held) {
      if (pinning.address == block->address) return pinning.held_seconds;
    }
    ADD_FAILURE() << "the block pins nothing";
    return uint64_t{0};
  };
  while (!HasFailure() && held(old) < 2) std::this_thread::sleep_for(std::chrono::milliseconds(20));
  allocator_.NoteTime();
  Block* young = Get(4_MiB);
  EXPECT_LT(held(young), held(old));
  EXPECT_EQ(allocator_.ExplainFit(20_MiB).holes.most_bytes.at(0).longest_held.at(0).address, old->address);
  // The age of a block begins anew with the next allocation.
  allocator_.Free(old);
  ASSERT_EQ(Get(4_MiB), old);
  EXPECT_LE(held(old), held(young));
}

TEST_F(CachingAllocatorTest, ServesMoreBlocksThanOneSlabHolds) {
  std::set<std::pair<uint64_t, uint64_t>> places;
  std::vector<Block*> blocks;
  for (int i = 0; i < 5000; ++i) {
    blocks.push_back(Get(512));
    places.insert({Raw(blocks.back()->segment_id()), blocks.back()->offset()});
  }
  EXPECT_EQ(places.size(), 5000u) << "no two at one place";
  for (Block* block : blocks) allocator_.Free(block);
  EXPECT_EQ(allocator_.EmptyCache(), 4_MiB);
}

// ---- Several threads ----

TEST_F(CachingAllocatorTest, HitsProceedWhileTheSourceIsBusy) {
  allocator_.Free(Get(512));
  Gate gate;
  source_.on_acquire = [&](int) { gate.Pass(); };
  std::thread slow([&] { EXPECT_NE(Get(100_MiB), nullptr); });
  gate.AwaitArrivals(1);
  // The gate opens only after the following checks. A lock held during the source's call would hang the test.
  Block* hit = allocator_.TryAllocate(512);
  EXPECT_NE(hit, nullptr);
  allocator_.Free(hit);
  EXPECT_EQ(Stats().allocated_bytes.all.current, 0u);
  EXPECT_EQ(allocator_.Snapshot().segments.size(), 1u);
  EXPECT_EQ(allocator_.ExplainFit(512).pool_free_bytes, 2_MiB);
  EXPECT_EQ(allocator_.CheckInvariants(), absl::OkStatus());
  gate.Open();
  slow.join();
  EXPECT_EQ(Stats().allocated_bytes.all.current, 100_MiB);
}

TEST_F(CachingAllocatorTest, HitsProceedWhileTheCacheIsEmptied) {
  Block* kept = Get(512);
  Get(1024);
  allocator_.Free(Get(100_MiB));
  Gate gate;
  source_.on_release = [&](int) { gate.Pass(); };
  std::thread slow([&] { EXPECT_EQ(allocator_.EmptyCache(), 100_MiB); });
  gate.AwaitArrivals(1);
  EXPECT_EQ(allocator_.TryAllocate(100_MiB), nullptr) << "what is going back is not handed out";
  allocator_.Free(kept);
  EXPECT_NE(allocator_.TryAllocate(512), nullptr);
  gate.Open();
  slow.join();
}

TEST_F(CachingAllocatorTest, TwoMissesAtATimeGetSegmentsOfTheirOwn) {
  Gate gate;
  source_.on_acquire = [&](int) { gate.Pass(); };
  std::vector<Block*> blocks(2, nullptr);
  std::vector<std::thread> threads;
  for (int i = 0; i < 2; ++i) threads.emplace_back([&, i] { blocks[i] = Get(512); });
  gate.AwaitArrivals(2);
  gate.Open();
  for (std::thread& thread : threads) thread.join();
  EXPECT_NE(blocks[0]->segment_id(), blocks[1]->segment_id());
}

// Claims of all threads on memory; reports overlaps.
class Claims {
 public:
  void Add(const Block& block) {
    MutexLock lock(mu_);
    auto& blocks = segments_[Raw(block.segment_id())];
    const auto next = blocks.lower_bound(block.offset());
    if (next != blocks.end() && next->first < block.offset() + block.bytes) ++overlaps_;
    if (next != blocks.begin() && std::prev(next)->second > block.offset()) ++overlaps_;
    blocks[block.offset()] = block.offset() + block.bytes;
  }
  void Remove(const Block& block) {
    MutexLock lock(mu_);
    segments_[Raw(block.segment_id())].erase(block.offset());
  }
  int overlaps() const {
    MutexLock lock(mu_);
    return overlaps_;
  }

 private:
  mutable Mutex mu_;
  std::map<uint64_t, std::map<uint64_t, uint64_t>> segments_ ABSL_GUARDED_BY(mu_);  // offset to end
  int overlaps_ ABSL_GUARDED_BY(mu_) = 0;
};

TEST_F(CachingAllocatorTest, FourThreadsNeverShareABlock) {
  constexpr int kThreads = 4;
  constexpr int kSteps = 3000;
  source_.set_limit(200_MiB);  // small enough for flushes and refusals
  source_.on_acquire = [](int call) {
    for (int i = 0; i < call % 64; ++i) std::this_thread::yield();
  };
  Claims claims;
  std::atomic<uint64_t> ooms = 0;
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      std::mt19937_64 random(static_cast<uint64_t>(t) + 1);
      std::vector<Block*> held;
      for (int step = 0; step < kSteps; ++step) {
        const uint64_t dice = random() % 100;
        if (dice < 52) {
          const uint64_t bytes = dice < 40 ? random() % 200000 + 1 : random() % 20_MiB + 1;
          const absl::StatusOr<Block*> block = allocator_.Allocate(bytes);
          if (!block.ok()) {
            EXPECT_TRUE(absl::IsResourceExhausted(block.status())) << block.status();
            ++ooms;
            continue;
          }
          claims.Add(**block);
          held.push_back(*block);
        } else if (dice < 98) {
          if (held.empty()) continue;
          std::swap(held[random() % held.size()], held.back());
          claims.Remove(*held.back());
          allocator_.Free(held.back());
          held.pop_back();
        } else {
          allocator_.EmptyCache();
        }
      }
      for (Block* block : held) {
        claims.Remove(*block);
        allocator_.Free(block);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(claims.overlaps(), 0);
  EXPECT_EQ(allocator_.CheckInvariants(), absl::OkStatus());
  EXPECT_EQ(Stats().num_ooms, ooms);
  EXPECT_EQ(Stats().allocated_bytes.all.current, 0u);
  EXPECT_EQ(Stats().reserved_bytes.all.current, source_.used_bytes());
  allocator_.EmptyCache();
  EXPECT_EQ(source_.used_bytes(), 0u);
}

}  // namespace
}  // namespace vrambroker
