// SPDX-License-Identifier: Apache-2.0
//
// Recorded events of a heap, its snapshots, and the view of a request on the heap.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <vector>

#include "allocator/heap/heap_snapshot.h"
#include "allocator/heap/history.h"
#include "allocator/replay/direct_heap.h"
#include "tests/unit/allocator/heap/simulated_heap_fixture.h"

namespace vrambroker {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::SizeIs;

class HistoryTest : public SimulatedHeapTest {
 protected:
  using Action = HistoryAction;
  std::vector<HistoryEvent> Events() {
    std::vector<HistoryEvent> events = allocator_->Snapshot().history;
    // The last event belongs to the snapshot itself, and is dropped.
    if (!events.empty()) {
      EXPECT_EQ(events.back().action, Action::kSnapshot);
      events.pop_back();
    }
    return events;
  }
  std::vector<Action> Actions() {
    std::vector<Action> actions;
    for (const HistoryEvent& event : Events()) actions.push_back(event.action);
    return actions;
  }
};

TEST_F(HistoryTest, IsOffUntilAskedFor) {
  Get(512);
  EXPECT_THAT(allocator_->Snapshot().history, IsEmpty());
}

TEST_F(HistoryTest, TellsWhatHappenedInOrder) {
  allocator_->SetRecording(100);
  Block* block = Get(1000, 7);
  const uint64_t address = block->address;
  allocator_->Free(block);
  allocator_->EmptyCache();
  const std::vector<HistoryEvent> events = Events();
  ASSERT_THAT(events, SizeIs(5));
  const std::vector<Action> actions = {Action::kSegmentAllocate, Action::kAllocate, Action::kFreeRequested,
                                       Action::kFreeCompleted, Action::kSegmentFree};
  for (size_t i = 0; i < events.size(); ++i) {
    EXPECT_EQ(events[i].action, actions[i]);
    EXPECT_EQ(events[i].address, address);
    EXPECT_EQ(events[i].stream, 7u);
    const bool is_segment = i == 0 || i == 4;
    EXPECT_EQ(events[i].bytes, is_segment ? 2_MiB : 1000) << "of blocks what was asked for";
    EXPECT_GT(events[i].time_us, int64_t{1'600'000'000'000'000}) << "microseconds since 1970";
    if (i > 0) {
      EXPECT_GE(events[i].time_us, events[i - 1].time_us);
    }
  }
}

TEST_F(HistoryTest, FreeIsCompletedWhenStreamsAreDone) {
  allocator_->SetRecording(100);
  Block* kept = Get(512);
  Block* block = Get(512);
  const uint64_t address = block->address;
  allocator_->Free(kept);  // the next block merges with `kept`; the history keeps the block's own address
  allocator_->RecordStream(block, 1);
  allocator_->Free(block);
  EXPECT_THAT(Actions().back(), Action::kFreeRequested);
  streams_.FinishAll();
  allocator_->PollEvents();
  const HistoryEvent last = Events().back();
  EXPECT_EQ(last.action, Action::kFreeCompleted);
  EXPECT_EQ(last.address, address);
  EXPECT_EQ(last.bytes, 512u);
}

TEST_F(HistoryTest, OutOfMemoryTellsWhatWasLeft) {
  source_->set_limit(0);
  allocator_->SetRecording(100);
  EXPECT_TRUE(Refuses(1000, 3));
  const std::vector<HistoryEvent> events = Events();
  ASSERT_THAT(events, SizeIs(1));
  EXPECT_EQ(events[0].action, Action::kOutOfMemory);
  EXPECT_EQ(events[0].bytes, 1024u) << "rounded";
  EXPECT_EQ(events[0].stream, 3u);
  EXPECT_EQ(events[0].address, 0u) << "what a SimulatedSource says to have left";
  SimulatedDevice device(100_MiB);
  DirectHeap allocator(&device);
  allocator.SetRecording(1);
  EXPECT_FALSE(allocator.Allocate(200_MiB).ok());
  allocator.SetRecording(10);
  EXPECT_FALSE(allocator.Allocate(200_MiB).ok());
  EXPECT_EQ(allocator.Snapshot().history.at(0).address, 100_MiB);
}

TEST_F(HistoryTest, SnapshotTellsTheActiveBytes) {
  allocator_->SetRecording(100);
  Get(1024);
  allocator_->Free(Get(512));
  const std::vector<HistoryEvent> history = allocator_->Snapshot().history;
  EXPECT_EQ(history.back().action, Action::kSnapshot);
  EXPECT_EQ(history.back().bytes, 1024u);
}

TEST_F(HistoryTest, KeepsTheLatest) {
  Block* block = Get(512);
  allocator_->Free(block);
  for (const size_t most : {1, 2, 3, 4, 5, 6, 7, 8}) {
    SCOPED_TRACE(most);
    allocator_->SetRecording(0);
    allocator_->SetRecording(most);
    for (const uint64_t bytes : {1, 2, 3}) allocator_->Free(Get(bytes));
    const HeapSnapshot snapshot = allocator_->Snapshot();
    EXPECT_EQ(snapshot.max_events, most);
    // A free that completes at once counts as one event, but reads as two events.
    std::vector<std::pair<Action, uint64_t>> all;
    size_t left = most - 1;  // without the snapshot's event
    for (const uint64_t bytes : {3, 2, 1}) {
      if (left > 0) {
        all.emplace_back(Action::kFreeCompleted, bytes);
        all.emplace_back(Action::kFreeRequested, bytes);
        --left;
      }
      if (left > 0) {
        all.emplace_back(Action::kAllocate, bytes);
        --left;
      }
    }
    std::reverse(all.begin(), all.end());
    all.emplace_back(Action::kSnapshot, 0);
    const std::vector<HistoryEvent>& history = snapshot.history;
    ASSERT_THAT(history, SizeIs(all.size()));
    for (size_t i = 0; i < all.size(); ++i) {
      EXPECT_EQ(history[i].action, all[i].first) << i;
      EXPECT_EQ(history[i].bytes, all[i].second) << i;
    }
  }
}

TEST_F(HistoryTest, ManyEventsStayInOrder) {
  // Each allocation of 1, 2, 3, ... bytes is freed: several rounds of rings of several thousand events.
  uint64_t bytes = 0;
  const auto work = [&](uint64_t count) {
    for (uint64_t i = 0; i < count; ++i) allocator_->Free(Get(++bytes));
  };
  // Expects the last `count` events to be the last allocations and frees. No event stands before the first.
  const auto expect_last = [&](size_t count) {
    const std::vector<HistoryEvent> events = Events();
    size_t kept = 0;
    uint64_t expected = bytes;
    for (size_t i = events.size(); i > 0; --i) {
      if (events[i - 1].action == Action::kFreeRequested) continue;  // the completion counts the request
      if (events[i - 1].action == Action::kSegmentAllocate || events[i - 1].action == Action::kSnapshot) continue;
      ASSERT_EQ(events[i - 1].action, kept % 2 == 0 ? Action::kFreeCompleted : Action::kAllocate) << i;
      ASSERT_EQ(events[i - 1].bytes, expected) << i;
      if (++kept % 2 == 0) --expected;
    }
    EXPECT_EQ(kept, count);
  };
  allocator_->SetRecording(5000);
  for (const uint64_t count : {1, 511, 512, 513, 900, 2000, 1, 2500}) {
    SCOPED_TRACE(bytes);
    work(count);
    // The snapshot's event has one place, and the previous snapshot's event another.
    const std::vector<HistoryEvent> events = Events();
    EXPECT_LE(events.size(), 2 * 5000u);
  }
  work(5000);
  expect_last(4999);               // and the snapshot
  allocator_->SetRecording(3001);  // keeps the last 3001
  expect_last(2999);               // and two snapshots
  allocator_->SetRecording(100'000);
  work(10);
  expect_last(2999 + 20);
  allocator_->SetRecording(1024);
  work(600);
  expect_last(1023);
}

TEST_F(HistoryTest, ChangeOfTheNumberKeepsWhatThereIs) {
  allocator_->SetRecording(10);
  Get(512);
  allocator_->SetRecording(20, /*exact_times=*/false);
  EXPECT_THAT(Actions(), ElementsAre(Action::kSegmentAllocate, Action::kAllocate));
  allocator_->SetRecording(2);
  Get(512);
  EXPECT_THAT(Actions(), ElementsAre(Action::kAllocate));
  allocator_->SetRecording(0);
  Get(512);
  const HeapSnapshot off = allocator_->Snapshot();
  EXPECT_THAT(off.history, IsEmpty());
  EXPECT_EQ(off.max_events, 0u);
  allocator_->SetRecording(5);
  EXPECT_THAT(Actions(), IsEmpty());
}

TEST_F(HistoryTest, TimesThatAreNotExactAreThoseOfTheLastLook) {
  allocator_->SetRecording(100, /*exact_times=*/false);
  Block* block = Get(512);
  allocator_->Free(block);
  const std::vector<HistoryEvent> events = Events();
  ASSERT_THAT(events, SizeIs(4));
  for (const HistoryEvent& event : events) EXPECT_EQ(event.time_us, events[0].time_us) << "of the segment";
  allocator_->NoteTime();
  int64_t now = events[0].time_us;
  while (now == events[0].time_us) {
    allocator_->NoteTime();
    Get(512);
    now = Events().back().time_us;
  }
  EXPECT_GT(now, events[0].time_us);
}

TEST_F(HistoryTest, AHoldKeepsWhatSetRecordingWouldDrop) {
  allocator_->SetRecording(3, /*exact_times=*/false);
  const auto get_six = [&] {
    for (int i = 0; i < 6; ++i) allocator_->Free(Get(512));
    return allocator_->Snapshot();
  };
  EXPECT_EQ(get_six().max_events, 3u);
  allocator_->HoldRecording(100);
  HeapSnapshot held = get_six();
  EXPECT_EQ(held.max_events, 100u);
  EXPECT_GE(held.history.size(), 3u + 18u) << "and those that there were";
  allocator_->SetRecording(2);
  EXPECT_GT(allocator_->Snapshot().history.size(), held.history.size());
  allocator_->HoldRecording(200);
  EXPECT_EQ(allocator_->Snapshot().max_events, 200u);
  allocator_->HoldRecording(0);
  held = allocator_->Snapshot();
  EXPECT_EQ(held.max_events, 2u) << "what was set last";
  EXPECT_LE(held.history.size(), 4u);
  allocator_->HoldRecording(1);
  EXPECT_EQ(allocator_->Snapshot().max_events, 2u) << "never less";
  allocator_->SetRecording(0);
  EXPECT_EQ(allocator_->Snapshot().max_events, 1u);
  allocator_->HoldRecording(0);
  EXPECT_THAT(allocator_->Snapshot().history, IsEmpty());
}

class HeapSnapshotTest : public SimulatedHeapTest {};

TEST_F(HeapSnapshotTest, SnapshotShowsEveryState) {
  Configure("max_split_size_mb:32");
  Block* used = Get(700, 4);
  Block* pending = Get(512, 4);
  Block* freed = Get(600, 4);
  Get(30_MiB);
  allocator_->RecordStream(pending, 1);
  allocator_->Free(pending);
  allocator_->Free(freed);
  const HeapSnapshot snapshot = allocator_->Snapshot();
  EXPECT_EQ(snapshot.options.max_split_bytes, 32_MiB);
  ASSERT_THAT(snapshot.segments, SizeIs(2));
  const SegmentSnapshot& segment = snapshot.segments[0];
  EXPECT_EQ(segment.stream, 4u);
  EXPECT_EQ(segment.pool, PoolKind::kSmall);
  EXPECT_EQ(segment.address, used->address);
  EXPECT_EQ(segment.id, used->segment_id());
  ASSERT_THAT(segment.blocks, SizeIs(3));
  const BlockState states[] = {BlockState::kAllocated, BlockState::kPendingFree, BlockState::kFree};
  const uint64_t requested[] = {700, 512, 600};
  const uint64_t offsets[] = {0, 1024, 1536};
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(segment.blocks[i].state, states[i]) << i;
    EXPECT_EQ(segment.blocks[i].requested_bytes, requested[i]) << i;
    EXPECT_EQ(segment.blocks[i].offset, offsets[i]) << i;
  }
  EXPECT_EQ(segment.blocks[2].bytes, 2_MiB - 1536) << "joined with the rest";
  EXPECT_EQ(snapshot.segments[1].stream, 0u);
  EXPECT_EQ(snapshot.segments[1].blocks.at(0).bytes, 30_MiB);
}

TEST_F(HeapSnapshotTest, AddressesGrowAndAreNotReused) {
  uint64_t last = 0;
  for (int i = 0; i < 3; ++i) {
    Block* block = Get(40_MiB + 1);
    EXPECT_GE(block->address, last + 42_MiB * (i > 0 ? 1 : 0));
    EXPECT_EQ(block->address % 2_MiB, 0u);
    last = block->address;
    allocator_->Free(block);
    allocator_->EmptyCache();
  }
}

TEST_F(HeapSnapshotTest, ExplainFitLooksAtOneStream) {
  Cache({40_MiB}, 1);
  EXPECT_EQ(allocator_->ExplainFit(30_MiB, 0).pool_free_bytes, 0u);
  EXPECT_EQ(allocator_->ExplainFit(30_MiB, 1).pool_free_bytes, 40_MiB);
}

}  // namespace
}  // namespace vrambroker
