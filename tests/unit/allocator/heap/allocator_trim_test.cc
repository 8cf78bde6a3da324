// SPDX-License-Identifier: Apache-2.0
//
// Trim(): wholly free segments go back to the source in the background, the oldest first.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <thread>
#include <vector>

#include "allocator/replay/direct_heap.h"
#include "tests/support/fake_device.h"
#include "tests/support/scripted_events.h"
#include "tests/support/simulated_source.h"

namespace vrambroker {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

class AllocatorTrimTest : public ::testing::Test {
 protected:
  void TearDown() override {
    EXPECT_EQ(allocator_.CheckInvariants(), absl::OkStatus());
    EXPECT_EQ(source_.misuse(), "");
    EXPECT_EQ(source_.used_bytes(), Stats().reserved_bytes.all.current);
  }

  // Allocates a block; a refusal fails the test.
  Block* Get(uint64_t bytes) {
    absl::StatusOr<Block*> block = allocator_.Allocate(bytes);
    EXPECT_TRUE(block.ok()) << block.status();
    return block.ok() ? *block : nullptr;
  }
  MemoryStats Stats() const { return allocator_.GetMemoryStats(); }

  SimulatedSource source_{8_GiB};
  SimulatedDevice streams_{0};  // only for events
  ScriptedEvents events_{&streams_};
  DirectHeap allocator_{&source_, &events_};
};

TEST_F(AllocatorTrimTest, EverythingThatIsWhollyFreeGoes) {
  Block* in_use = Get(2_MiB);  // in a segment of 20 MiB
  Block* large = Get(30_MiB);
  Block* small = Get(512);
  allocator_.Free(large);
  allocator_.Free(small);
  EXPECT_EQ(allocator_.Trim(), 32_MiB);
  EXPECT_THAT(source_.released_ids(), ElementsAre(2, 3));
  EXPECT_EQ(Stats().num_device_free, 2u);
  allocator_.Free(in_use);
  EXPECT_EQ(allocator_.Trim(), 20_MiB);
  EXPECT_THAT(allocator_.Snapshot().segments, IsEmpty());
}

TEST_F(AllocatorTrimTest, TrimOfNothingLeavesTheSourceAlone) {
  Get(512);
  EXPECT_EQ(allocator_.Trim(), 0u);
  allocator_.Free(Get(30_MiB));
  EXPECT_EQ(allocator_.Trim({.wanted_bytes = 0}), 0u);
  EXPECT_EQ(source_.release_calls(), 0);
}

TEST_F(AllocatorTrimTest, LongestFreeFirstAndNoMoreThanWanted) {
  Block* first = Get(30_MiB);
  Block* second = Get(40_MiB);
  Block* third = Get(50_MiB);
  allocator_.Free(third);
  allocator_.Free(first);
  allocator_.Free(second);
  EXPECT_EQ(allocator_.Trim({.wanted_bytes = 1}), 50_MiB);
  EXPECT_THAT(source_.released_ids(), ElementsAre(3));
  EXPECT_EQ(allocator_.Trim({.wanted_bytes = 30_MiB}), 30_MiB);
  EXPECT_THAT(source_.released_ids(), ElementsAre(3, 1));
  EXPECT_EQ(allocator_.Trim({.wanted_bytes = 1_GiB}), 40_MiB);
}

TEST_F(AllocatorTrimTest, UseStartsTheAgeAnew) {
  Block* first = Get(40_MiB);
  Block* second = Get(30_MiB);
  allocator_.Free(first);
  allocator_.Free(second);
  allocator_.Free(Get(40_MiB));  // a use of a part of the segment would do, too
  EXPECT_EQ(allocator_.Trim({.wanted_bytes = 1}), 30_MiB);
  EXPECT_EQ(allocator_.Trim({.wanted_bytes = 1}), 40_MiB);
}

TEST_F(AllocatorTrimTest, PartOfASegmentKeepsTheWhole) {
  allocator_.Free(Get(18_MiB));
  allocator_.Free(Get(30_MiB));
  Block* lower = Get(4_MiB);
  Block* upper = Get(4_MiB);
  EXPECT_EQ(allocator_.Trim({.wanted_bytes = 1}), 30_MiB);
  allocator_.Free(lower);
  EXPECT_EQ(allocator_.Trim(), 0u);
  allocator_.Free(upper);
  EXPECT_EQ(allocator_.Trim(), 18_MiB);
}

TEST_F(AllocatorTrimTest, OnlyWhatIsFreeForSoManyTicks) {
  Block* first = Get(30_MiB);
  Block* second = Get(40_MiB);
  allocator_.Free(first);
  EXPECT_EQ(allocator_.Trim({.min_idle_ticks = 1}), 0u);
  allocator_.Tick();
  allocator_.Free(second);
  EXPECT_EQ(allocator_.Trim({.min_idle_ticks = 2}), 0u);
  EXPECT_EQ(allocator_.Trim({.min_idle_ticks = 1}), 30_MiB);
  EXPECT_EQ(source_.release_calls(), 1);
  allocator_.Tick();
  allocator_.Free(Get(40_MiB));
  EXPECT_EQ(allocator_.Trim({.min_idle_ticks = 1}), 0u) << "used since";
  allocator_.Tick();
  allocator_.Tick();
  EXPECT_EQ(allocator_.Trim({.wanted_bytes = 0, .min_idle_ticks = 2}), 0u);
  EXPECT_EQ(allocator_.Trim({.min_idle_ticks = 2}), 40_MiB);
}

TEST_F(AllocatorTrimTest, SourceIsAskedInBatches) {
  std::vector<Block*> blocks;
  blocks.reserve(130);
  for (int i = 0; i < 130; ++i) blocks.push_back(Get(20_MiB));
  for (Block* block : blocks) allocator_.Free(block);
  EXPECT_EQ(allocator_.Trim({.wanted_bytes = 128 * 20_MiB}), 128 * 20_MiB);
  EXPECT_EQ(source_.release_calls(), 2);
  EXPECT_EQ(allocator_.Trim(), 40_MiB);
  EXPECT_EQ(source_.release_calls(), 3);
}

TEST_F(AllocatorTrimTest, ReportsWhatTheSourceSays) {
  Block* first = Get(30_MiB);
  Block* second = Get(40_MiB);
  allocator_.Free(first);
  allocator_.Free(second);
  source_.set_release_reports(false);
  EXPECT_EQ(allocator_.Trim({.wanted_bytes = 1}), 0u);
  EXPECT_EQ(Stats().reserved_bytes.all.current, 40_MiB) << "what it has taken counts as given back";
}

TEST_F(AllocatorTrimTest, PollsButDoesNotWait) {
  std::vector<Block*> blocks = {Get(30_MiB), Get(40_MiB)};
  for (Block* block : blocks) {
    allocator_.RecordStream(block, 1);
    allocator_.Free(block);
  }
  EXPECT_EQ(allocator_.Trim(), 0u);
  streams_.FinishStream(1, 1);
  EXPECT_EQ(allocator_.Trim(), 30_MiB);
  EXPECT_EQ(Stats().num_sync_all_streams, 0u);
  streams_.FinishAll();
  EXPECT_EQ(allocator_.Trim(), 40_MiB);
}

TEST_F(AllocatorTrimTest, LastSegmentOfAStreamGoesToo) {
  const absl::StatusOr<Block*> block = allocator_.Allocate(30_MiB, /*stream=*/5);
  ASSERT_TRUE(block.ok());
  allocator_.Free(*block);
  EXPECT_EQ(allocator_.Trim(), 30_MiB);
  EXPECT_TRUE(allocator_.Allocate(30_MiB, 5).ok());
}

// ---- Several threads ----

TEST_F(AllocatorTrimTest, HitsProceedWhileTheSourceTakesABatch) {
  Block* kept = Get(512);
  Get(1024);
  allocator_.Free(Get(100_MiB));
  Gate gate;
  source_.on_release = [&](int) { gate.Pass(); };
  std::thread trimming([&] { EXPECT_EQ(allocator_.Trim(), 100_MiB); });
  gate.AwaitArrivals(1);
  EXPECT_EQ(allocator_.TryAllocate(100_MiB), nullptr) << "what is going back is not handed out";
  allocator_.Free(kept);
  EXPECT_NE(allocator_.TryAllocate(512), nullptr);
  EXPECT_EQ(allocator_.CheckInvariants(), absl::OkStatus());
  gate.Open();
  trimming.join();
}

TEST_F(AllocatorTrimTest, RequestIsNotRefusedWhileABatchIsOnItsWay) {
  source_.set_limit(30_MiB);
  allocator_.Free(Get(30_MiB));
  Gate gate;
  source_.on_release = [&](int) { gate.Pass(); };
  std::thread trimming([&] { allocator_.Trim(); });
  gate.AwaitArrivals(1);
  std::thread asking([&] { EXPECT_NE(Get(24_MiB), nullptr); });
  // The request is refused once and flushes, but the flush finds no segment.
  while (Stats().num_sync_all_streams == 0) std::this_thread::yield();
  gate.Open();
  trimming.join();
  asking.join();
}

TEST_F(AllocatorTrimTest, EndsAlthoughOthersGoOnFreeing) {
  allocator_.Free(Get(30_MiB));
  source_.on_release = [&](int) { allocator_.Free(Get(30_MiB)); };
  EXPECT_EQ(allocator_.Trim(), 30_MiB);
  EXPECT_EQ(source_.release_calls(), 1);
  source_.on_release = nullptr;
  EXPECT_EQ(allocator_.Trim(), 30_MiB);
}

TEST_F(AllocatorTrimTest, WhatBecomesFreeDuringTheReleaseStays) {
  Block* held = Get(40_MiB);
  allocator_.Free(Get(30_MiB));
  source_.on_release = [&](int call) {
    if (call == 1) allocator_.Free(held);
  };
  EXPECT_EQ(allocator_.Trim({.wanted_bytes = 8_GiB}), 30_MiB);
  EXPECT_EQ(source_.release_calls(), 1);
}

TEST_F(AllocatorTrimTest, ThreadsWorkWhileOneTrims) {
  constexpr int kThreads = 3;
  constexpr int kSteps = 3000;
  source_.set_limit(400_MiB);  // small enough for refusals, too
  std::atomic<bool> done = false;
  std::atomic<uint64_t> ooms = 0;
  std::thread trimmer([&] {
    for (uint64_t turn = 0; !done; ++turn) {
      allocator_.Tick();
      allocator_.Trim({.wanted_bytes = turn % 3 == 0 ? 30_MiB : 8_GiB, .min_idle_ticks = turn % 4});
      std::this_thread::yield();
    }
  });
  std::vector<std::thread> threads;
  threads.reserve(kThreads);
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      std::vector<Block*> held;
      for (int step = 0; step < kSteps; ++step) {
        if (held.size() < 8) {
          const uint64_t bytes = step % 3 == 0 ? 512 : 1_MiB * static_cast<uint64_t>(step % 40 + 1);
          const absl::StatusOr<Block*> block = allocator_.Allocate(bytes, static_cast<Stream>(t % 2));
          ooms += block.ok() ? 0 : 1;
          if (block.ok()) held.push_back(*block);
        }
        if (held.size() == 8 || (step % 50 > 40 && !held.empty())) {
          std::swap(held[static_cast<size_t>(step) % held.size()], held.back());
          allocator_.Free(held.back());
          held.pop_back();
        }
      }
      for (Block* block : held) allocator_.Free(block);
    });
  }
  for (std::thread& thread : threads) thread.join();
  done = true;
  trimmer.join();
  EXPECT_EQ(allocator_.CheckInvariants(), absl::OkStatus());
  EXPECT_EQ(Stats().num_ooms, ooms);
  EXPECT_GT(Stats().num_device_free, 0u);
  allocator_.Trim();
  EXPECT_EQ(source_.used_bytes(), 0u);
}

}  // namespace
}  // namespace vrambroker
