// SPDX-License-Identifier: Apache-2.0
//
// Streams: the users of a freed block, and the moment of reuse.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_join.h"
#include "allocator/replay/direct_heap.h"
#include "tests/support/fake_device.h"
#include "tests/support/scripted_events.h"
#include "tests/support/simulated_source.h"

namespace vrambroker {
namespace {

class AllocatorStreamsTest : public ::testing::Test {
 protected:
  void TearDown() override {
    EXPECT_EQ(allocator_.CheckInvariants(), absl::OkStatus());
    EXPECT_EQ(device_.used_bytes(), Stats().reserved_bytes.all.current);
  }

  // Allocates a block; a refusal fails the test.
  Block* Get(uint64_t bytes, Stream stream = 0) {
    absl::StatusOr<Block*> block = allocator_.Allocate(bytes, stream);
    EXPECT_TRUE(block.ok()) << block.status();
    return block.ok() ? *block : nullptr;
  }
  // Allocates a block, records its use by `users`, and frees the block.
  Block* GetAndFree(uint64_t bytes, const std::vector<Stream>& users, Stream stream = 0) {
    Block* block = Get(bytes, stream);
    for (const Stream user : users) allocator_.RecordStream(block, user);
    allocator_.Free(block);
    return block;
  }
  MemoryStats Stats() const { return allocator_.GetMemoryStats(); }
  uint64_t Pending() const { return Stats().active.all.current - Stats().allocation.all.current; }

  SimulatedDevice device_{1_GiB};
  ScriptedEvents events_{&device_};
  DirectHeap allocator_{&device_, &events_};
};

TEST_F(AllocatorStreamsTest, FreedBlockIsReusedOnItsOwnStreamOnly) {
  Block* block = Get(30_MiB, 1);
  const SegmentId segment = block->segment_id();
  allocator_.Free(block);
  EXPECT_EQ(allocator_.TryAllocate(30_MiB, 0), nullptr);
  EXPECT_EQ(allocator_.TryAllocate(30_MiB, 2), nullptr);
  EXPECT_EQ(Get(30_MiB, 2)->segment_bytes(), 30_MiB);
  Block* again = allocator_.TryAllocate(30_MiB, 1);
  ASSERT_NE(again, nullptr);
  EXPECT_EQ(again->segment_id(), segment);
}

TEST_F(AllocatorStreamsTest, SegmentBelongsToOneStream) {
  const Block* one = Get(512, 1);
  const Block* two = Get(512, 2);
  EXPECT_NE(one->segment_id(), two->segment_id());
  const Block* large_one = Get(2_MiB, 1);
  const Block* large_two = Get(2_MiB, ~uint64_t{0});
  EXPECT_NE(large_one->segment_id(), large_two->segment_id());
  EXPECT_EQ(Stats().segment.all.current, 4u);
}

TEST_F(AllocatorStreamsTest, EmptyCacheServesEveryStream) {
  for (const Stream stream : {0, 1, 2}) allocator_.Free(Get(20_MiB, stream));
  EXPECT_EQ(allocator_.EmptyCache(), 60_MiB);
  // A stream's pools end with the stream's last segment, and begin anew with the next segment.
  allocator_.Free(Get(20_MiB, 1));
  EXPECT_NE(allocator_.TryAllocate(20_MiB, 1), nullptr);
}

TEST_F(AllocatorStreamsTest, ShortMemoryOfOneStreamIsTakenFromAnother) {
  allocator_.Free(Get(600_MiB, 1));
  EXPECT_EQ(Get(600_MiB, 2)->segment_bytes(), 600_MiB);
  EXPECT_EQ(Stats().num_alloc_retries, 1u);
}

TEST_F(AllocatorStreamsTest, RecordedBlockWaitsForTheOtherStream) {
  const Block* block = GetAndFree(30_MiB, {1});
  EXPECT_EQ(block->state, BlockState::kPendingFree);
  EXPECT_EQ(Stats().allocation.all.current, 0u) << "counted at the free";
  EXPECT_EQ(Stats().allocated_bytes.all.current, 0u);
  EXPECT_EQ(Stats().active.all.current, 1u) << "counted when it is complete";
  EXPECT_EQ(Stats().active_bytes.all.current, 30_MiB);
  EXPECT_EQ(Stats().requested_bytes.all.current, 30_MiB);
  EXPECT_EQ(allocator_.TryAllocate(30_MiB), nullptr);
  device_.FinishStream(1);
  EXPECT_EQ(Pending(), 1u) << "nobody has asked yet";
  EXPECT_EQ(allocator_.TryAllocate(30_MiB), block);
  EXPECT_EQ(Stats().active_bytes.all.current, 30_MiB);
  EXPECT_EQ(Stats().active_bytes.all.allocated, 60_MiB);
}

TEST_F(AllocatorStreamsTest, EveryAllocationPolls) {
  GetAndFree(512, {1});
  device_.FinishAll();
  Get(30_MiB, 2);  // a block of another stream and pool
  EXPECT_EQ(Pending(), 0u);
  GetAndFree(512, {1});
  device_.FinishAll();
  EXPECT_EQ(allocator_.TryAllocate(600_MiB), nullptr);
  EXPECT_EQ(Pending(), 0u);
}

// RecordEvent() may call the heap, because the heap holds no lock during the call.
TEST_F(AllocatorStreamsTest, MissingEventsAreRecordedWithoutTheLock) {
  events_.fail_record = true;
  GetAndFree(30_MiB, {1});
  events_.fail_record = false;
  int recorded = 0;
  events_.on_record = [&](Stream) {
    ++recorded;
    EXPECT_EQ(Pending(), 1u);
  };
  EXPECT_EQ(allocator_.TryAllocate(30_MiB), nullptr);
  EXPECT_EQ(recorded, 1);
  allocator_.PollEvents();
  EXPECT_EQ(recorded, 1) << "it has its event by now";
  device_.FinishAll();
  EXPECT_NE(allocator_.TryAllocate(30_MiB), nullptr);
}

TEST_F(AllocatorStreamsTest, FreesDoNotPoll) {
  GetAndFree(512, {1});
  device_.FinishAll();
  Block* other = Get(30_MiB);
  GetAndFree(512, {1});
  device_.FinishAll();
  allocator_.Free(other);
  EXPECT_EQ(Pending(), 1u);
  allocator_.PollEvents();
  EXPECT_EQ(Pending(), 0u);
}

// The heap waits for the work before the free, not only for the work before RecordStream().
TEST_F(AllocatorStreamsTest, EventIsRecordedAtTheFree) {
  Block* block = Get(30_MiB);
  allocator_.RecordStream(block, 1);
  EXPECT_EQ(events_.recorded(1), 0u);
  device_.FinishAll();
  allocator_.Free(block);
  EXPECT_EQ(events_.recorded(1), 1u);
  EXPECT_EQ(allocator_.TryAllocate(30_MiB), nullptr);
  device_.FinishAll();
  EXPECT_NE(allocator_.TryAllocate(30_MiB), nullptr);
}

TEST_F(AllocatorStreamsTest, OwnStreamNeedsNoEvent) {
  Block* block = Get(30_MiB, 5);
  allocator_.RecordStream(block, 5);
  allocator_.Free(block);
  EXPECT_EQ(events_.recorded(5), 0u);
  EXPECT_EQ(block->state, BlockState::kFree);
}

TEST_F(AllocatorStreamsTest, RecordedTwiceIsOnce) {
  const Block* block = GetAndFree(30_MiB, {1, 2, 1, 2, 1});
  EXPECT_EQ(events_.recorded(1), 1u);
  EXPECT_EQ(events_.recorded(2), 1u);
  device_.FinishStream(1, 1);
  allocator_.PollEvents();
  EXPECT_EQ(block->state, BlockState::kPendingFree);
  device_.FinishStream(2, 1);
  allocator_.PollEvents();
  EXPECT_EQ(block->state, BlockState::kFree);
}

TEST_F(AllocatorStreamsTest, UsesEndWithTheBlock) {
  GetAndFree(30_MiB, {1, 2});
  device_.FinishAll();
  Block* again = allocator_.TryAllocate(30_MiB);
  ASSERT_NE(again, nullptr);
  allocator_.Free(again);
  EXPECT_EQ(again->state, BlockState::kFree) << "the new owner has told no stream";
  EXPECT_EQ(events_.recorded(1), 1u);
}

TEST_F(AllocatorStreamsTest, WithoutAnEventSourceNothingIsDeferred) {
  DirectHeap plain(&device_);
  const absl::StatusOr<Block*> block = plain.Allocate(30_MiB);
  ASSERT_TRUE(block.ok());
  plain.RecordStream(*block, 1);
  plain.Free(*block);
  EXPECT_EQ((*block)->state, BlockState::kFree);
  plain.EmptyCache();
}

TEST_F(AllocatorStreamsTest, ForgetsUsesOfBlocksStillHeldAtItsEnd) {
  // AddressSanitizer checks that allocated, pending and free blocks leak no memory.
  DirectHeap ending(&device_, &events_);
  for (const bool frees : {false, true}) {
    const absl::StatusOr<Block*> block = ending.Allocate(30_MiB);
    ASSERT_TRUE(block.ok());
    ending.RecordStream(*block, 1);
    if (frees) ending.Free(*block);
  }
  EXPECT_EQ(ending.GetMemoryStats().active.all.current, 2u);
  device_.ReleaseSegments({{.id = SegmentId{1}, .bytes = 60_MiB}});
}

// Notes the streams of the released segments.
class NotingDevice : public SimulatedDevice {
 public:
  using SimulatedDevice::SimulatedDevice;
  uint64_t ReleaseSegments(absl::Span<const ReleasedSegment> segments) override {
    for (const ReleasedSegment& segment : segments) streams.push_back(segment.stream.value_or(~Stream{0}));
    return SimulatedDevice::ReleaseSegments(segments);
  }
  std::vector<Stream> streams;
};

TEST(AllocatorReleaseTest, ASegmentGoesBackWithItsStream) {
  NotingDevice device(1_GiB);
  ScriptedEvents events(&device);
  DirectHeap allocator(&device, &events);
  for (const bool trims : {false, true}) {
    SCOPED_TRACE(trims ? "a trim" : "a flush");
    for (const Stream stream : {0, 3, 7}) {
      const absl::StatusOr<Block*> block = allocator.Allocate(20_MiB, stream);
      ASSERT_TRUE(block.ok());
      allocator.RecordStream(*block, 5);  // stream 5 is done when the segment goes
      allocator.Free(*block);
    }
    device.FinishAll();
    EXPECT_EQ(trims ? allocator.Trim() : allocator.EmptyCache(), 60_MiB);
    EXPECT_EQ(std::exchange(device.streams, {}), (std::vector<Stream>{0, 3, 7}));
  }
}

// ---- Every order ----

TEST_F(AllocatorStreamsTest, ThreeStreamsInEveryOrder) {
  std::vector<Stream> order = {1, 2, 3};
  do {
    SCOPED_TRACE(absl::StrJoin(order, " "));
    const Block* block = GetAndFree(30_MiB, {2, 3, 1});
    for (const Stream stream : order) {
      EXPECT_EQ(block->state, BlockState::kPendingFree);
      EXPECT_EQ(allocator_.TryAllocate(30_MiB), nullptr);
      device_.FinishStream(stream, 1);
      allocator_.PollEvents();
      EXPECT_EQ(allocator_.CheckInvariants(), absl::OkStatus());
    }
    EXPECT_EQ(block->state, BlockState::kFree);
  } while (std::next_permutation(order.begin(), order.end()));
}

// Three blocks, each used by three streams. After any sequence of finished events, exactly those blocks are free whose
// events have all finished.
TEST_F(AllocatorStreamsTest, NineEventsInEveryInterleaving) {
  std::vector<Stream> order = {1, 1, 1, 2, 2, 2, 3, 3, 3};
  int interleavings = 0;
  do {
    SCOPED_TRACE(absl::StrJoin(order, " "));
    ++interleavings;
    // All blocks exist before the first free, so the blocks are different parts of one segment.
    std::vector<Block*> blocks = {Get(4096), Get(512), Get(1024)};
    Block* const keeps_segment = Get(512);
    for (Block* block : blocks) {
      for (const Stream user : {3, 1, 2}) allocator_.RecordStream(block, user);
    }
    for (Block* block : blocks) allocator_.Free(block);
    std::map<Stream, uint64_t> finished;
    for (const Stream stream : order) {
      device_.FinishStream(stream, 1);
      ++finished[stream];
      allocator_.PollEvents();
      const uint64_t complete = std::min({finished[1], finished[2], finished[3]});
      ASSERT_EQ(Pending(), 3 - complete);
      uint64_t pending_bytes = 0;
      for (uint64_t i = complete; i < blocks.size(); ++i) {
        ASSERT_EQ(blocks[i]->state, BlockState::kPendingFree);
        pending_bytes += blocks[i]->bytes;
      }
      ASSERT_EQ(Stats().active_bytes.all.current, pending_bytes + 512);
      ASSERT_EQ(allocator_.CheckInvariants(), absl::OkStatus());
    }
    allocator_.Free(keeps_segment);
    ASSERT_EQ(Stats().inactive_split.all.current, 0u) << "all joined again";
  } while (std::next_permutation(order.begin(), order.end()));
  EXPECT_EQ(interleavings, 1680);
}

TEST_F(AllocatorStreamsTest, OldestUseOfAStreamHoldsBackTheYoungerOnes) {
  Block* first = Get(30_MiB);
  Block* second = Get(40_MiB, 2);
  allocator_.RecordStream(first, 1);
  allocator_.RecordStream(second, 1);
  allocator_.Free(first);
  allocator_.Free(second);
  device_.FinishStream(1, 1);
  allocator_.PollEvents();
  EXPECT_EQ(first->state, BlockState::kFree);
  EXPECT_EQ(second->state, BlockState::kPendingFree);
}

// ---- Neighbours, flushes ----

TEST_F(AllocatorStreamsTest, PendingBlockDoesNotMerge) {
  Block* below = Get(512);
  Block* block = Get(1024);
  Block* above = Get(512);
  Get(512);
  allocator_.RecordStream(block, 1);
  allocator_.Free(block);
  allocator_.Free(below);
  allocator_.Free(above);
  EXPECT_EQ(Stats().inactive_split.all.current, 3u) << "two, and the rest of the segment";
  EXPECT_EQ(allocator_.TryAllocate(2048)->offset(), 2560u) << "in the rest";
  device_.FinishAll();
  EXPECT_EQ(allocator_.TryAllocate(2048)->offset(), 0u) << "all three together";
}

TEST_F(AllocatorStreamsTest, EmptyCacheWaits) {
  GetAndFree(30_MiB, {1, 2});
  GetAndFree(40_MiB, {2}, 1);
  EXPECT_EQ(allocator_.EmptyCache(), 70_MiB);
  EXPECT_EQ(Stats().num_sync_all_streams, 1u);
  EXPECT_EQ(Stats().active.all.current, 0u);
  EXPECT_EQ(events_.known_done(2), 2u);
  allocator_.EmptyCache();
  EXPECT_EQ(Stats().num_sync_all_streams, 2u) << "counted when there was nothing to wait for, too";
}

TEST_F(AllocatorStreamsTest, RefusalWaitsForPendingSegments) {
  GetAndFree(600_MiB, {1});
  EXPECT_EQ(Get(800_MiB)->segment_bytes(), 800_MiB);
  EXPECT_EQ(Stats().num_alloc_retries, 1u);
  EXPECT_EQ(Stats().num_sync_all_streams, 1u);
}

// PyTorch's allocator refuses here: pytorch/pytorch issue 189504.
TEST_F(AllocatorStreamsTest, BlockThatTheFlushFreesServesTheRequest) {
  Block* pending = Get(8_MiB);
  Get(8_MiB);  // keeps the segment of both blocks
  Get(1000_MiB);
  allocator_.RecordStream(pending, 1);
  allocator_.Free(pending);
  const absl::StatusOr<Block*> block = allocator_.Allocate(8_MiB);
  ASSERT_TRUE(block.ok()) << block.status();
  EXPECT_EQ(*block, pending);
  EXPECT_EQ(Stats().num_alloc_retries, 1u);
  EXPECT_EQ(Stats().num_ooms, 0u);
}

// The last attempt at a segment may wait for a long time.
TEST_F(AllocatorStreamsTest, WhatStreamsFinishDuringTheLastAttemptServesTheRequest) {
  SimulatedSource source(20_MiB);
  DirectHeap allocator(&source, &events_);
  const absl::StatusOr<Block*> held = allocator.Allocate(20_MiB);
  ASSERT_TRUE(held.ok());
  allocator.RecordStream(*held, 1);
  source.on_acquire = [&](int call) {
    if (call != 3) return;  // after the first attempt and the flush
    allocator.Free(*held);
    device_.FinishAll();
  };
  const absl::StatusOr<Block*> block = allocator.Allocate(20_MiB);
  ASSERT_TRUE(block.ok()) << block.status();
  EXPECT_EQ(*block, *held);
  EXPECT_EQ(allocator.GetMemoryStats().num_ooms, 0u);
}

// ---- Failures: never too early, never never ----

TEST_F(AllocatorStreamsTest, EventThatCannotBeRecordedIsRecordedLater) {
  events_.fail_record = true;
  const Block* block = GetAndFree(30_MiB, {1, 2});
  EXPECT_EQ(block->state, BlockState::kPendingFree);
  device_.FinishAll();
  allocator_.PollEvents();
  EXPECT_EQ(allocator_.EmptyCache(), 0u);
  EXPECT_EQ(allocator_.TryAllocate(30_MiB), nullptr);
  EXPECT_EQ(allocator_.CheckInvariants(), absl::OkStatus());

  events_.fail_record = false;
  allocator_.PollEvents();
  EXPECT_EQ(events_.recorded(1), 1u);
  EXPECT_EQ(events_.recorded(2), 1u);
  EXPECT_EQ(block->state, BlockState::kPendingFree) << "the work queued by now is not done";
  device_.FinishStream(1);
  allocator_.PollEvents();
  EXPECT_EQ(block->state, BlockState::kPendingFree);
  device_.FinishStream(2);
  EXPECT_EQ(allocator_.TryAllocate(30_MiB), block);
}

TEST_F(AllocatorStreamsTest, EmptyCacheRecordsWhatCouldNotBeRecorded) {
  events_.fail_record = true;
  GetAndFree(30_MiB, {1});
  EXPECT_EQ(allocator_.EmptyCache(), 0u);
  events_.fail_record = false;
  EXPECT_EQ(allocator_.EmptyCache(), 30_MiB);
  EXPECT_EQ(events_.known_done(1), 1u);
}

TEST_F(AllocatorStreamsTest, EventThatCannotBeAskedIsNotDone) {
  const Block* block = GetAndFree(30_MiB, {1});
  device_.FinishAll();
  events_.fail_query = true;
  allocator_.PollEvents();
  EXPECT_EQ(allocator_.TryAllocate(30_MiB), nullptr);
  events_.fail_query = false;
  EXPECT_EQ(allocator_.TryAllocate(30_MiB), block);
}

TEST_F(AllocatorStreamsTest, EventThatCannotBeWaitedForStaysPending) {
  const Block* first = GetAndFree(30_MiB, {1, 2});
  events_.fail_wait = true;
  EXPECT_EQ(allocator_.EmptyCache(), 0u);
  EXPECT_EQ(first->state, BlockState::kPendingFree);
  EXPECT_EQ(allocator_.CheckInvariants(), absl::OkStatus());
  // The older block keeps its place before a block that is freed later.
  const Block* second = GetAndFree(40_MiB, {1});
  device_.FinishStream(1, 1);
  device_.FinishStream(2, 1);
  allocator_.PollEvents();
  EXPECT_EQ(first->state, BlockState::kFree);
  EXPECT_EQ(second->state, BlockState::kPendingFree);
  events_.fail_wait = false;
  EXPECT_EQ(allocator_.EmptyCache(), 70_MiB);
}

TEST_F(AllocatorStreamsTest, FreeOfAFailedWaitStaysBeforeThoseThatCameMeanwhile) {
  Block* second = Get(40_MiB);
  allocator_.RecordStream(second, 1);
  const Block* first = GetAndFree(30_MiB, {1});
  events_.fail_wait = true;
  events_.on_wait = [&](Stream) { allocator_.Free(second); };
  EXPECT_EQ(allocator_.EmptyCache(), 0u);
  events_.on_wait = nullptr;
  events_.fail_wait = false;
  device_.FinishStream(1, 1);
  allocator_.PollEvents();
  EXPECT_EQ(first->state, BlockState::kFree) << "its event is done, whatever came later";
  EXPECT_EQ(second->state, BlockState::kPendingFree);
  device_.FinishStream(1, 1);
  allocator_.PollEvents();
  EXPECT_EQ(second->state, BlockState::kFree);
}

// The free cannot record its event, for example during the capture of a graph, and later the stream is destroyed.
TEST_F(AllocatorStreamsTest, FreeWhoseStreamIsGoneWaitsForTheDevice) {
  int tries = 0;
  events_.on_record = [&](Stream) { ++tries; };
  events_.fail_record = true;
  const Block* block = GetAndFree(30_MiB, {1});
  events_.fail_record = false;
  events_.lose_streams = true;
  device_.FinishAll();
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(allocator_.TryAllocate(30_MiB), nullptr) << "nobody has waited";
    EXPECT_EQ(allocator_.CheckInvariants(), absl::OkStatus());
  }
  EXPECT_EQ(tries, 2) << "at the free, and once when it was gone: its handle may be another stream's by now";
  events_.fail_wait = true;
  allocator_.WaitForLostStreams();
  EXPECT_EQ(block->state, BlockState::kPendingFree);
  events_.fail_wait = false;
  allocator_.PollEvents();
  EXPECT_EQ(block->state, BlockState::kPendingFree);
  allocator_.WaitForLostStreams();
  EXPECT_EQ(block->state, BlockState::kFree);
  EXPECT_EQ(Stats().num_sync_all_streams, 0u);
  EXPECT_EQ(tries, 2);
}

TEST_F(AllocatorStreamsTest, FreeOfAStreamThatIsGoneHoldsNoOtherBack) {
  Block* second = Get(40_MiB);
  allocator_.RecordStream(second, 1);
  events_.lose_streams = true;
  const Block* first = GetAndFree(30_MiB, {1, 2});
  events_.lose_streams = false;  // the handle now belongs to another stream
  allocator_.Free(second);
  device_.FinishAll();
  allocator_.PollEvents();
  EXPECT_EQ(second->state, BlockState::kFree);
  EXPECT_EQ(first->state, BlockState::kPendingFree);
  EXPECT_EQ(allocator_.EmptyCache(), 70_MiB) << "which waits";
  EXPECT_EQ(Stats().active.all.current, 0u);
}

TEST_F(AllocatorStreamsTest, RefusalWithEventsThatFailIsOutOfMemory) {
  Block* block = GetAndFree(600_MiB, {1});
  events_.fail_wait = true;
  EXPECT_TRUE(absl::IsResourceExhausted(allocator_.Allocate(600_MiB).status()));
  EXPECT_EQ(Stats().num_ooms, 1u);
  EXPECT_EQ(block->state, BlockState::kPendingFree);
  events_.fail_wait = false;
  EXPECT_EQ(Get(600_MiB)->segment_bytes(), 600_MiB);
}

// ---- Several threads ----

// Free() records events between its two locked parts. Meanwhile the block has no owner.
TEST_F(AllocatorStreamsTest, BlockIsOutOfReachWhileItsEventIsRecorded) {
  Gate gate;
  events_.on_record = [&](Stream) { gate.Pass(); };
  Block* block = Get(30_MiB);
  allocator_.RecordStream(block, 1);
  std::thread freeing([&] { allocator_.Free(block); });
  gate.AwaitArrivals(1);
  EXPECT_EQ(Stats().allocation.all.current, 0u);
  EXPECT_EQ(Stats().active.all.current, 1u);
  allocator_.PollEvents();
  EXPECT_EQ(allocator_.TryAllocate(30_MiB), nullptr);
  EXPECT_EQ(allocator_.EmptyCache(), 0u);
  EXPECT_EQ(allocator_.Snapshot().segments.at(0).blocks.at(0).state, BlockState::kPendingFree);
  gate.Open();
  freeing.join();
  EXPECT_EQ(block->state, BlockState::kPendingFree);
  device_.FinishAll();
  EXPECT_EQ(allocator_.TryAllocate(30_MiB), block);
}

// Tracks the users of each byte, to detect memory that is handed out too early. An owner uses a block until the free.
// Streams use the block until the allocator knows that the streams are done.
class Uses {
 public:
  explicit Uses(const ScriptedEvents& events) : events_(events) {}

  void HandedOut(const Block& block) {
    MutexLock lock(mu_);
    auto& uses = segments_[Raw(block.segment_id())];
    for (auto it = uses.begin(); it != uses.end();) {
      const bool done = !it->owned && std::all_of(it->after.begin(), it->after.end(), [&](const auto& use) {
        return events_.known_done(use.first) > use.second;
      });
      if (done) {
        it = uses.erase(it);
        continue;
      }
      if (it->begin < block.offset() + block.bytes && block.offset() < it->end) ++overlaps_;
      ++it;
    }
    uses.push_back({.begin = block.offset(), .end = block.offset() + block.bytes});
  }
  // Called right before the free: later events end the use.
  void Freed(const Block& block, const std::vector<Stream>& streams) {
    MutexLock lock(mu_);
    for (Use& use : segments_[Raw(block.segment_id())]) {
      if (use.begin != block.offset() || !use.owned) continue;
      use.owned = false;
      for (const Stream stream : streams) use.after.emplace_back(stream, events_.recorded(stream));
    }
  }
  int overlaps() const {
    MutexLock lock(mu_);
    return overlaps_;
  }

 private:
  struct Use {
    uint64_t begin = 0;
    uint64_t end = 0;
    bool owned = true;
    std::vector<std::pair<Stream, uint64_t>> after = {};  // streams, and the number of their events before the free
  };
  const ScriptedEvents& events_;
  mutable Mutex mu_{lock_level::kRequest};
  std::map<uint64_t, std::vector<Use>> segments_ ABSL_GUARDED_BY(mu_);
  int overlaps_ ABSL_GUARDED_BY(mu_) = 0;
};

TEST_F(AllocatorStreamsTest, ThreadsAndStreamsNeverShareMemory) {
  constexpr int kThreads = 4;
  constexpr int kSteps = 2500;
  allocator_.SetLimit(160_MiB);  // small enough for flushes and refusals
  events_.on_record = [](Stream) { std::this_thread::yield(); };
  Uses uses(events_);
  std::atomic<int> ooms = 0, deferred = 0;
  std::atomic<bool> done = false;
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      std::mt19937_64 random(static_cast<uint64_t>(t) + 7);
      // Each stream has two threads.
      const Stream own = static_cast<Stream>(t) % 2;
      struct Held {
        Block* block;
        std::vector<Stream> users;
      };
      std::vector<Held> held;
      const auto free_one = [&] {
        std::swap(held[random() % held.size()], held.back());
        deferred += held.back().users.empty() ? 0 : 1;
        uses.Freed(*held.back().block, held.back().users);
        allocator_.Free(held.back().block);
        held.pop_back();
      };
      for (int step = 0; step < kSteps; ++step) {
        const uint64_t dice = random() % 100;
        if (dice < 50) {
          const uint64_t bytes = dice < 40 ? random() % 200'000 + 1 : random() % 16_MiB + 1;
          const absl::StatusOr<Block*> block = allocator_.Allocate(bytes, own);
          if (!block.ok()) {
            EXPECT_TRUE(absl::IsResourceExhausted(block.status())) << block.status();
            ++ooms;
            continue;
          }
          uses.HandedOut(**block);
          held.push_back({.block = *block, .users = {}});
          for (const Stream user : {2, 3}) {
            if (random() % 4 != 0) continue;
            allocator_.RecordStream(*block, user);
            held.back().users.push_back(user);
          }
        } else if (dice < 98) {
          if (!held.empty()) free_one();
        } else if (dice < 99) {
          allocator_.PollEvents();
        } else {
          allocator_.EmptyCache();
        }
      }
      while (!held.empty()) free_one();
    });
  }
  std::thread finisher([&] {
    std::mt19937_64 random(1);
    while (!done) {
      device_.FinishStream(2 + random() % 2, random() % 3);
      // Failures change only the time of reuse.
      events_.fail_record = random() % 16 == 0;
      events_.fail_query = random() % 16 == 0;
      events_.fail_wait = random() % 16 == 0;
      std::this_thread::yield();
    }
  });
  for (std::thread& thread : threads) thread.join();
  done = true;
  finisher.join();
  events_.fail_record = events_.fail_query = events_.fail_wait = false;
  EXPECT_EQ(uses.overlaps(), 0);
  EXPECT_GT(deferred, 100);
  EXPECT_EQ(allocator_.CheckInvariants(), absl::OkStatus());
  EXPECT_EQ(Stats().num_ooms, static_cast<uint64_t>(ooms));
  EXPECT_EQ(Stats().allocation.all.current, 0u);
  allocator_.EmptyCache();
  EXPECT_EQ(Stats().active.all.current, 0u) << "every free completes in the end";
  EXPECT_EQ(device_.used_bytes(), 0u);
}

// ---- SimulatedDevice itself ----

TEST(SimulatedDeviceTest, StreamsFinishAsFarAsTold) {
  SimulatedDevice device(1_GiB);
  std::vector<std::unique_ptr<Event>> events;
  for (const Stream stream : {1, 1, 1, 2}) events.push_back(*device.RecordEvent(stream));
  const auto done = [&] {
    std::string text;
    for (const auto& event : events) text += *event->Query() ? '1' : '0';
    return text;
  };
  EXPECT_EQ(done(), "0000");
  device.FinishStream(3);
  EXPECT_EQ(done(), "0000");
  device.FinishStream(1, 1);
  EXPECT_EQ(done(), "1000");
  device.FinishStream(1, 0);
  EXPECT_EQ(done(), "1000");
  EXPECT_EQ(events[2]->Wait(), absl::OkStatus());
  EXPECT_EQ(done(), "1110") << "and all earlier ones of the stream";
  device.FinishStream(2, 100);
  EXPECT_EQ(done(), "1111");
  events.push_back(*device.RecordEvent(2));
  EXPECT_EQ(done(), "11110") << "finishing more than there is, is no credit";
  device.FinishAll();
  EXPECT_EQ(done(), "11111");
}

TEST(SimulatedDeviceTest, HandsOutItsBytesAndNoMore) {
  SimulatedDevice device(5_MiB);
  EXPECT_EQ(device.AcquireSegment(2_MiB)->id, SegmentId{1});
  EXPECT_EQ(device.AcquireSegment(3_MiB)->id, SegmentId{2});
  EXPECT_EQ(device.AvailableBytes(), 0u);
  EXPECT_TRUE(absl::IsResourceExhausted(device.AcquireSegment(1).status()));
  EXPECT_EQ(device.ReleaseSegments({{.id = SegmentId{1}, .bytes = 2_MiB}}), 2_MiB);
  EXPECT_EQ(device.used_bytes(), 3_MiB);
  EXPECT_EQ(device.AcquireSegment(2_MiB)->id, SegmentId{3}) << "ids are not reused";
}

}  // namespace
}  // namespace vrambroker
