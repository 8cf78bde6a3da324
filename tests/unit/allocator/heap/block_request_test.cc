// SPDX-License-Identifier: Apache-2.0
//
// BlockRequest, step by step: the demands on the owner, and the result of each answer.
#include "allocator/heap/block_request.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/types.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "allocator/base/bytes.h"
#include "allocator/heap/caching_allocator.h"
#include "allocator/heap/owner_segments.h"
#include "allocator/heap/size_class.h"
#include "allocator/replay/simulated_device.h"
#include "tests/support/thread_state.h"

namespace vrambroker {
namespace {

using ::testing::ElementsAre;
using Next = BlockRequest::Next;

// The test owns the heap, and so supplies and releases the segments.
class BlockRequestTest : public ::testing::Test {
 protected:
  BlockRequestTest() { Configure(""); }
  void TearDown() override { EXPECT_EQ(heap_->CheckInvariants(), absl::OkStatus()); }

  void Configure(absl::string_view settings, uint64_t capacity_bytes = 100_MiB) {
    const absl::StatusOr<AllocConf> conf = ParseAllocConf(settings);
    ASSERT_EQ(conf.status(), absl::OkStatus());
    heap_ = std::make_unique<CachingAllocator>(&streams_, conf->options, capacity_bytes);
  }
  AcquiredSegment NewSegment() { return {.id = SegmentId{++segments_}}; }
  static absl::Status NoMemory(const char* why = "no memory") { return absl::ResourceExhaustedError(why); }

  Block* Get(uint64_t bytes, Stream stream = 0) {
    BlockRequest request(heap_.get(), bytes, stream);
    while (request.Advance([](absl::Span<const ReleasedSegment>) {}) == Next::kSegment) request.Supply(NewSegment());
    return request.result().value();
  }
  void Cache(uint64_t bytes, Stream stream = 0) { heap_->Free(Get(bytes, stream)); }
  // Denies segments up to the last demand, after the flush.
  static void DenyUpToTheFlush(BlockRequest& request) {
    while (request.Advance([](absl::Span<const ReleasedSegment>) {}) == Next::kSegment && !request.has_flushed()) {
      request.Deny(NoMemory());
    }
    ASSERT_EQ(request.next(), Next::kSegment);
    ASSERT_TRUE(request.has_flushed());
  }
  static std::vector<uint64_t> Ids(absl::Span<const ReleasedSegment> segments) {
    std::vector<uint64_t> ids;
    for (const ReleasedSegment& segment : segments) ids.push_back(Raw(segment.id));
    return ids;
  }
  MemoryStats Stats() const { return heap_->GetMemoryStats(); }

  SimulatedDevice streams_{0};  // only for events
  std::unique_ptr<CachingAllocator> heap_;
  uint64_t segments_ = 0;
};

TEST_F(BlockRequestTest, AHitNeedsNothing) {
  Cache(30_MiB);
  BlockRequest request(heap_.get(), 30_MiB);
  EXPECT_EQ(request.next(), Next::kDone);
  EXPECT_EQ(request.result().value()->segment_id(), SegmentId{1});
  EXPECT_EQ(Stats().allocated_bytes.all.current, 30_MiB);
}

TEST_F(BlockRequestTest, AMissNeedsASegmentWhichIsSplit) {
  BlockRequest request(heap_.get(), 3_MiB, 5);
  ASSERT_EQ(request.next(), Next::kSegment);
  EXPECT_EQ(request.segment_bytes(), 20_MiB);
  EXPECT_FALSE(request.has_flushed()) << "others need not be asked yet";
  EXPECT_EQ(request.refusal(), absl::OkStatus());
  EXPECT_EQ(Stats().reserved_bytes.all.current, 0u);
  request.Supply(NewSegment());
  EXPECT_EQ(request.next(), Next::kDone);
  EXPECT_EQ(request.result().value()->bytes, 3_MiB);
  EXPECT_EQ(Stats().reserved_bytes.all.current, 20_MiB);
  EXPECT_NE(heap_->TryAllocate(3_MiB, 5), nullptr) << "the rest of the segment";
}

TEST_F(BlockRequestTest, ADenialFlushesTheCacheAndAsksAgain) {
  Cache(30_MiB);
  Cache(512);
  BlockRequest request(heap_.get(), 40_MiB);
  ASSERT_EQ(request.next(), Next::kSegment);
  request.Deny(NoMemory("first"));
  EXPECT_EQ(request.refusal(), NoMemory("first"));
  ASSERT_EQ(request.next(), Next::kWait) << "for the streams of pending frees";
  request.Wait();
  ASSERT_EQ(request.next(), Next::kRelease);
  EXPECT_THAT(Ids(request.segments_to_release()), ElementsAre(1, 2));
  EXPECT_EQ(Stats().reserved_bytes.all.current, 0u) << "the heap has let go of them";
  request.Released();
  ASSERT_EQ(request.next(), Next::kWait) << "for what other threads give back";
  request.Wait();
  ASSERT_EQ(request.next(), Next::kSegment);
  EXPECT_TRUE(request.has_flushed());
  EXPECT_EQ(Stats().num_alloc_retries, 1u);
  request.Supply(NewSegment());
  EXPECT_EQ(request.result().value()->bytes, 40_MiB);
  EXPECT_EQ(Stats().num_ooms, 0u);
}

TEST_F(BlockRequestTest, TheLastDenialIsTheResultAndAnOutOfMemoryEvent) {
  heap_->SetRecording(10);
  BlockRequest request(heap_.get(), 40_MiB - 7, 3, 9);
  DenyUpToTheFlush(request);
  EXPECT_EQ(Stats().num_ooms, 0u);
  request.Deny(NoMemory("last"), /*available_bytes=*/5_MiB);
  EXPECT_EQ(request.next(), Next::kDone);
  EXPECT_EQ(request.result().status(), NoMemory("last"));
  EXPECT_EQ(Stats().num_ooms, 1u);
  const HistoryEvent event = heap_->Snapshot().history.at(0);
  EXPECT_EQ(event.action, HistoryAction::kOutOfMemory);
  EXPECT_EQ(event.address, 5_MiB) << "what the owner had left";
  EXPECT_EQ(event.bytes, 40_MiB) << "rounded";
  EXPECT_EQ(event.stream, 3u);
  EXPECT_EQ(event.scope, 9u);
}

TEST_F(BlockRequestTest, ABlockThatIsFreeByThenServesItInstead) {
  Block* block = Get(40_MiB);
  BlockRequest request(heap_.get(), 40_MiB);
  DenyUpToTheFlush(request);
  heap_->Free(block);
  request.Deny(NoMemory());
  EXPECT_EQ(request.result().value(), block);
  EXPECT_EQ(Stats().num_ooms, 0u);
}

TEST_F(BlockRequestTest, AnyOtherErrorEndsItAtOnce) {
  Cache(30_MiB);
  BlockRequest request(heap_.get(), 40_MiB);
  request.Deny(absl::UnavailableError("gone"));
  EXPECT_EQ(request.next(), Next::kDone);
  EXPECT_EQ(request.result().status(), absl::UnavailableError("gone"));
  EXPECT_EQ(Stats().reserved_bytes.all.current, 30_MiB) << "nothing was flushed";
  EXPECT_EQ(Stats().num_ooms, 0u);
  BlockRequest later(heap_.get(), 40_MiB);
  DenyUpToTheFlush(later);
  later.Deny(absl::CancelledError("given up"));
  EXPECT_EQ(later.result().status(), absl::CancelledError("given up"));
  EXPECT_EQ(Stats().num_ooms, 0u) << "no refusal";
}

TEST_F(BlockRequestTest, WhileItWaitsForASegmentAFreedBlockCanServeIt) {
  Block* block = Get(40_MiB);
  BlockRequest request(heap_.get(), 40_MiB);
  DenyUpToTheFlush(request);
  EXPECT_FALSE(request.IsInCache());
  EXPECT_FALSE(request.SearchAgain());
  EXPECT_EQ(request.next(), Next::kSegment);
  heap_->Free(block);
  EXPECT_TRUE(request.IsInCache());
  EXPECT_EQ(request.next(), Next::kSegment) << "a look takes nothing";
  EXPECT_TRUE(request.SearchAgain());
  EXPECT_EQ(request.next(), Next::kDone);
  EXPECT_EQ(request.result().value(), block);
}

TEST_F(BlockRequestTest, WhatIsSearchedIsItsStreamsAndFinishedStreamsCount) {
  Block* block = Get(40_MiB);
  BlockRequest request(heap_.get(), 40_MiB);
  BlockRequest other(heap_.get(), 40_MiB, 1);
  heap_->RecordStream(block, 1);
  heap_->Free(block);
  EXPECT_FALSE(request.IsInCache());
  EXPECT_FALSE(request.SearchAgain());
  streams_.FinishAll();
  EXPECT_FALSE(other.IsInCache()) << "another stream's";
  EXPECT_TRUE(request.IsInCache());
  EXPECT_TRUE(request.SearchAgain());
}

TEST_F(BlockRequestTest, TheFlushWaitsForPendingFrees) {
  Block* block = Get(30_MiB);
  heap_->RecordStream(block, 1);
  heap_->Free(block);
  BlockRequest request(heap_.get(), 40_MiB);
  request.Deny(NoMemory());
  request.Wait();
  ASSERT_EQ(request.next(), Next::kRelease);
  EXPECT_THAT(Ids(request.segments_to_release()), ElementsAre(1));
  EXPECT_EQ(Stats().num_sync_all_streams, 1u);
  request.Released();
}

TEST_F(BlockRequestTest, GarbageGoesBeforeASegmentIsAskedFor) {
  Configure("garbage_collection_threshold:0.5");
  heap_->SetLimit(100_MiB);
  Cache(30_MiB);
  for (int i = 0; i < 10; ++i) Cache(40_MiB, 1);
  BlockRequest request(heap_.get(), 12_MiB, 2);
  ASSERT_EQ(request.next(), Next::kRelease);
  EXPECT_THAT(Ids(request.segments_to_release()), ElementsAre(1)) << "what was unused for longest";
  request.Released();
  ASSERT_EQ(request.next(), Next::kSegment);
  EXPECT_FALSE(request.has_flushed());
  request.Supply(NewSegment());
}

TEST_F(BlockRequestTest, OversizeSegmentsGoFirstWhenTheyAreEnough) {
  Configure("max_split_size_mb:20");
  Cache(60_MiB);
  Cache(512);
  BlockRequest request(heap_.get(), 30_MiB);
  ASSERT_EQ(request.next(), Next::kSegment) << "60 MiB are too many for 30";
  request.Deny(NoMemory());
  ASSERT_EQ(request.next(), Next::kRelease);
  EXPECT_THAT(Ids(request.segments_to_release()), ElementsAre(1));
  request.Released();
  ASSERT_EQ(request.next(), Next::kSegment) << "asked again without a flush";
  EXPECT_FALSE(request.has_flushed());
  request.Deny(NoMemory());
  EXPECT_EQ(request.next(), Next::kWait) << "now the flush";
}

TEST_F(BlockRequestTest, OversizeSegmentsThatAreNotEnoughGoToo) {
  Configure("max_split_size_mb:20");
  Cache(30_MiB);
  BlockRequest request(heap_.get(), 50_MiB);
  request.Deny(NoMemory());
  ASSERT_EQ(request.next(), Next::kRelease);
  EXPECT_THAT(Ids(request.segments_to_release()), ElementsAre(1));
  request.Released();
  EXPECT_EQ(request.next(), Next::kWait) << "there is no point in asking before the flush";
}

TEST_F(BlockRequestTest, TheLimitIsTheOwnersToEnforce) {
  heap_->SetLimit(30_MiB);
  Get(10_MiB);
  BlockRequest fits(heap_.get(), 20_MiB);
  EXPECT_EQ(fits.passed_limit(), std::nullopt);
  BlockRequest beside(heap_.get(), 2_MiB, 1);
  ASSERT_EQ(beside.next(), Next::kSegment);
  EXPECT_EQ(beside.passed_limit(), 30_MiB) << "what others ask for counts";
  fits.Deny(absl::UnavailableError("not now"));
  BlockRequest after(heap_.get(), 2_MiB, 1);
  EXPECT_EQ(after.passed_limit(), std::nullopt) << "what was denied does not";
  heap_->SetLimit(10_MiB);
  BlockRequest beyond(heap_.get(), 512);
  EXPECT_EQ(beyond.passed_limit(), 10_MiB);
  beyond.Supply(NewSegment());
  EXPECT_TRUE(beyond.result().ok()) << "the owner may know better";
}

TEST_F(BlockRequestTest, WhatPassesTheLimitDoesNotKeepOthersFromIt) {
  heap_->SetLimit(30_MiB);
  BlockRequest beyond(heap_.get(), 40_MiB);
  EXPECT_EQ(beyond.passed_limit(), 30_MiB);
  BlockRequest fits(heap_.get(), 30_MiB);
  EXPECT_EQ(fits.passed_limit(), std::nullopt);
}

TEST_F(BlockRequestTest, ThrowOnOutOfMemoryEndsItBeforeAnySegmentIsAskedFor) {
  Configure("per_process_memory_fraction:0.5,throw_on_cudamalloc_oom:True");
  heap_->SetLimit(CachingAllocator::kNoLimit);
  Cache(30_MiB);
  BlockRequest request(heap_.get(), 40_MiB);
  EXPECT_EQ(request.next(), Next::kDone);
  EXPECT_TRUE(absl::IsResourceExhausted(request.result().status()));
  EXPECT_EQ(Stats().num_oom_rejections, 1u);
  EXPECT_EQ(Stats().num_ooms, 0u);
  EXPECT_EQ(Stats().reserved_bytes.all.current, 30_MiB) << "nothing was flushed";
  EXPECT_EQ(BlockRequest(heap_.get(), 20_MiB, 1).next(), Next::kSegment) << "the fraction itself is allowed";
}

TEST_F(BlockRequestTest, SizesThatNoDeviceHasAreRefusedAtOnce) {
  BlockRequest request(heap_.get(), kMaxRequestBytes);
  EXPECT_EQ(request.next(), Next::kDone);
  EXPECT_TRUE(absl::IsResourceExhausted(request.result().status()));
  EXPECT_EQ(Stats().num_ooms, 0u);
}

TEST_F(BlockRequestTest, GivenUpWhileItAsksItLeavesNothingBehind) {
  heap_->SetLimit(40_MiB);
  {
    BlockRequest request(heap_.get(), 40_MiB);
    ASSERT_EQ(request.next(), Next::kSegment);
  }
  {
    BlockRequest request(heap_.get(), 40_MiB);
    DenyUpToTheFlush(request);  // a leftover of the first request would make the call wait forever
  }
  BlockRequest request(heap_.get(), 40_MiB);
  EXPECT_EQ(request.passed_limit(), std::nullopt);
  EXPECT_EQ(Stats().num_ooms, 0u);
}

TEST_F(BlockRequestTest, IsNotRefusedBeforeWhatOthersGiveBackIsReleased) {
  Cache(40_MiB, 1);
  std::optional<SegmentsToRelease> taken = heap_->TakeFreeSegments();
  ASSERT_THAT(Ids(taken->segments()), ElementsAre(1));
  BlockRequest request(heap_.get(), 40_MiB);
  request.Deny(NoMemory());
  std::atomic<bool> released = false;
  std::atomic<bool> returned = false;
  std::atomic<pid_t> thread = 0;
  std::thread waits([&] {
    thread = gettid();
    request.Wait();
    EXPECT_TRUE(released);
    returned = true;
  });
  while (!returned && StateOfThread(thread) != 'S') std::this_thread::yield();
  released = true;
  taken.reset();
  waits.join();
  EXPECT_EQ(request.next(), Next::kSegment);
  request.Supply(NewSegment());
}

TEST_F(BlockRequestTest, IsNotRefusedBeforeWhatOthersAskForIsThere) {
  BlockRequest asks(heap_.get(), 40_MiB);
  ASSERT_EQ(asks.next(), Next::kSegment);
  BlockRequest request(heap_.get(), 20_MiB);
  request.Deny(NoMemory());
  std::atomic<bool> supplied = false;
  std::atomic<bool> returned = false;
  std::atomic<pid_t> thread = 0;
  std::thread waits([&] {
    thread = gettid();
    request.Wait();
    EXPECT_TRUE(supplied) << "the other may have it back by then";
    returned = true;
  });
  while (!returned && StateOfThread(thread) != 'S') std::this_thread::yield();
  supplied = true;
  asks.Supply(NewSegment());
  waits.join();
  EXPECT_EQ(request.next(), Next::kSegment);
}

TEST_F(BlockRequestTest, OneThatWaitsForOthersMemoryDelaysNobody) {
  BlockRequest waiting(heap_.get(), 40_MiB);
  DenyUpToTheFlush(waiting);
  BlockRequest request(heap_.get(), 20_MiB);
  DenyUpToTheFlush(request);  // a wait for the first request would last forever
  request.Deny(NoMemory());
  EXPECT_EQ(request.next(), Next::kDone);
}

TEST_F(BlockRequestTest, OneThatIsParkedDoesNotCountAsGrowth) {
  heap_->SetLimit(30_MiB);
  BlockRequest parked(heap_.get(), 20_MiB);
  DenyUpToTheFlush(parked);
  EXPECT_EQ(BlockRequest(heap_.get(), 20_MiB).passed_limit(), 30_MiB);
  parked.Park();
  EXPECT_EQ(BlockRequest(heap_.get(), 20_MiB).passed_limit(), std::nullopt);
  parked.Supply(NewSegment());
  EXPECT_TRUE(parked.result().ok());
  EXPECT_EQ(BlockRequest(heap_.get(), 20_MiB, 1).passed_limit(), 30_MiB);
}

TEST_F(BlockRequestTest, ASecondFlushGivesBackWhatBecameFreeSinceTheFirst) {
  Block* block = Get(30_MiB);
  BlockRequest request(heap_.get(), 40_MiB);
  DenyUpToTheFlush(request);
  heap_->Free(block);
  request.FlushAgain();
  ASSERT_EQ(request.next(), Next::kWait);
  request.Wait();
  ASSERT_EQ(request.next(), Next::kRelease);
  EXPECT_THAT(Ids(request.segments_to_release()), ElementsAre(1));
  request.Released();
  request.Wait();
  ASSERT_EQ(request.next(), Next::kSegment);
  EXPECT_TRUE(request.has_flushed());
  EXPECT_EQ(Stats().num_alloc_retries, 2u);
  request.Deny(NoMemory());
  EXPECT_EQ(request.next(), Next::kDone);
  EXPECT_EQ(Stats().num_ooms, 1u);
}

TEST_F(BlockRequestTest, WhatPassesTheLimitIsForTheOwnerToRefuseAndNotRejectedHere) {
  Configure("per_process_memory_fraction:0.5,throw_on_cudamalloc_oom:True", 48_MiB);
  heap_->SetLimit(24_MiB);
  Get(4_MiB);
  BlockRequest request(heap_.get(), 18_MiB);
  EXPECT_EQ(request.next(), Next::kSegment);
  EXPECT_EQ(request.passed_limit(), 24_MiB);
  EXPECT_EQ(Stats().num_oom_rejections, 0u);
}

TEST_F(BlockRequestTest, OneSegmentIsLetGoOfOnlyWhenItIsFree) {
  Block* block = Get(40_MiB);
  Segment* const segment = block->segment;
  EXPECT_TRUE(heap_->TakeSegment(segment).empty());
  heap_->Free(block);
  EXPECT_THAT(Ids(heap_->TakeSegment(segment).segments()), ElementsAre(1));
  EXPECT_EQ(Stats().reserved_bytes.all.current, 0u);
}

TEST_F(BlockRequestTest, IdleSegmentsAreTakenInBatchesUpToWhatIsWanted) {
  std::vector<Block*> blocks;
  for (int i = 0; i < 100; ++i) blocks.push_back(Get(2_MiB + 512, static_cast<Stream>(i)));  // 20 MiB each
  for (Block* block : blocks) heap_->Free(block);
  TrimOptions options{.wanted_bytes = 90 * 20_MiB - 1};
  size_t taken = 0;
  int calls = 0;
  while (true) {
    const SegmentsToRelease idle = heap_->TakeIdleSegments(&options);
    if (idle.empty()) break;
    ++calls;
    taken += idle.segments().size();
  }
  EXPECT_EQ(taken, 90u);
  EXPECT_GT(calls, 1) << "the owner releases in between";
  EXPECT_EQ(options.wanted_bytes, 0u);
}

TEST_F(BlockRequestTest, ATrimEndsAlthoughOthersFreeMoreMeanwhile) {
  Stream stream = 0;
  const auto free_more = [&](size_t segments) {
    for (size_t i = 0; i < segments; ++i) Cache(2_MiB + 512, stream++);  // 20 MiB each
  };
  free_more(100);
  TrimOptions options;
  size_t taken = 0;
  for (int calls = 0; calls < 10 && options.wanted_bytes > 0; ++calls) {
    const size_t released = heap_->TakeIdleSegments(&options).segments().size();
    taken += released;
    free_more(released);
  }
  EXPECT_EQ(taken, 100u) << "as many as were held when it began";
}

}  // namespace
}  // namespace vrambroker
