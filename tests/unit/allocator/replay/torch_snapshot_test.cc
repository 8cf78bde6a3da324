// SPDX-License-Identifier: Apache-2.0
#include "allocator/replay/torch_snapshot.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>
#include <limits>
#include <map>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "allocator/base/bytes.h"
#include "allocator/heap/allocator_options.h"
#include "allocator/heap/size_class.h"
#include "allocator/replay/torch_trace.h"
#include "tests/support/status_macros.h"

namespace vrambroker {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

using Items = PickleValue::Items;
using Pairs = PickleValue::Pairs;

constexpr uint64_t kBase = 0x7f0000000000;

// A heap with one segment of each pool, blocks in every state, and the history of the heap.
HeapSnapshot SampleHeap() {
  HeapSnapshot heap;
  heap.segments.push_back({.id = SegmentId{1},
                           .address = kBase,
                           .bytes = 2_MiB,
                           .pool = PoolKind::kSmall,
                           .stream = 0,
                           .blocks = {{0, 512, 100, BlockState::kAllocated},
                                      {512, 1024, 1000, BlockState::kFree},
                                      {1536, 1024, 1024, BlockState::kPendingFree},
                                      {2560, 2_MiB - 2560, 0, BlockState::kFree}}});
  heap.segments.push_back(
      {.id = SegmentId{2},
       .address = kBase + 2_MiB,
       .bytes = 20_MiB,
       .pool = PoolKind::kLarge,
       .stream = 7,
       .blocks = {{0, 5_MiB, 5_MiB - 1, BlockState::kAllocated}, {5_MiB, 15_MiB, 0, BlockState::kFree}}});
  const auto event = [&](HistoryAction action, uint64_t address, uint64_t bytes, Stream stream) {
    heap.history.push_back({.action = action,
                            .address = address,
                            .bytes = bytes,
                            .stream = stream,
                            .time_us = 1'700'000'000'000'000 + static_cast<int64_t>(heap.history.size())});
  };
  event(HistoryAction::kSegmentAllocate, kBase, 2_MiB, 0);
  event(HistoryAction::kAllocate, kBase, 100, 0);
  event(HistoryAction::kAllocate, kBase + 512, 1000, 0);
  event(HistoryAction::kFreeRequested, kBase + 512, 1000, 0);
  event(HistoryAction::kFreeCompleted, kBase + 512, 1000, 0);
  event(HistoryAction::kSegmentAllocate, kBase + 100_MiB, 30_MiB, 0);
  event(HistoryAction::kAllocate, kBase + 100_MiB, 30_MiB, 0);
  event(HistoryAction::kFreeRequested, kBase + 100_MiB, 30_MiB, 0);
  event(HistoryAction::kAllocate, kBase + 1536, 1024, 0);
  event(HistoryAction::kFreeCompleted, kBase + 100_MiB, 30_MiB, 0);
  event(HistoryAction::kSegmentFree, kBase + 100_MiB, 30_MiB, 0);
  event(HistoryAction::kOutOfMemory, 3_GiB, 40_GiB, 7);
  event(HistoryAction::kSegmentAllocate, kBase + 2_MiB, 20_MiB, 7);
  event(HistoryAction::kAllocate, kBase + 2_MiB, 5_MiB - 1, 7);
  event(HistoryAction::kFreeRequested, kBase + 1536, 1024, 0);
  event(HistoryAction::kSnapshot, 0, 5_MiB + 1536, 0);
  return heap;
}

const PickleValue& At(const PickleValue& value, absl::string_view key) {
  const PickleValue* found = value.Find(key);
  static const auto& missing = *new PickleValue();
  EXPECT_NE(found, nullptr) << key;
  return found != nullptr ? *found : missing;
}

std::vector<std::string> Keys(const PickleValue& dict) {
  std::vector<std::string> keys;
  for (const auto& [key, value] : dict.AsPairs()) keys.push_back(key.AsString());
  return keys;
}

TEST(TorchSnapshotTest, HasEveryKeyThatReadersKnow) {
  HeapSnapshot heap = SampleHeap();
  heap.options.max_split_bytes = 128_MiB;
  heap.options.garbage_collection_threshold = 0.8;
  heap.options.roundup_power2_divisions[1] = 4;
  heap.options.roundup_power2_divisions[15] = 8;
  const PickleValue snapshot = TorchSnapshot({heap});
  EXPECT_THAT(Keys(snapshot), ElementsAre("segments", "device_traces", "allocator_settings", "external_annotations"));
  EXPECT_TRUE(At(snapshot, "external_annotations") == PickleValue::List({}));

  ASSERT_EQ(At(snapshot, "segments").AsItems().size(), 2u);
  const PickleValue& small = At(snapshot, "segments").AsItems()[0];
  EXPECT_EQ(
      WriteJson(small),
      absl::StrCat(
          R"({"device":0,"address":)", kBase,
          R"(,"total_size":2097152,"allocated_size":512,"active_size":1536,"requested_size":1124,)"
          R"("stream":0,"segment_type":"small","segment_pool_id":[0,0],"is_expandable":false,)"
          R"("frames":[],"blocks":[)"
          R"({"address":)",
          kBase, R"(,"size":512,"requested_size":100,"state":"active_allocated","frames":[]},)", R"({"address":)",
          kBase + 512, R"(,"size":1024,"requested_size":1000,"state":"inactive","frames":[]},)", R"({"address":)",
          kBase + 1536, R"(,"size":1024,"requested_size":1024,"state":"active_pending_free","frames":[]},)",
          R"({"address":)", kBase + 2560, R"(,"size":2094592,"requested_size":0,"state":"inactive","frames":[]}]})"));
  EXPECT_EQ(At(small, "segment_pool_id").kind(), PickleValue::Kind::kTuple);
  const PickleValue& large = At(snapshot, "segments").AsItems()[1];
  EXPECT_EQ(At(large, "segment_type").AsString(), "large");
  EXPECT_EQ(At(large, "stream").AsInt(), 7);
  EXPECT_EQ(At(large, "requested_size").AsInt(), static_cast<int64_t>(5_MiB - 1));

  ASSERT_EQ(At(snapshot, "device_traces").AsItems().size(), 1u);
  const Items& entries = At(snapshot, "device_traces").AsItems()[0].AsItems();
  std::vector<std::string> actions;
  for (const PickleValue& entry : entries) actions.push_back(At(entry, "action").AsString());
  EXPECT_THAT(actions, ElementsAre("segment_alloc", "alloc", "alloc", "free_requested", "free_completed",
                                   "segment_alloc", "alloc", "free_requested", "alloc", "free_completed",
                                   "segment_free", "oom", "segment_alloc", "alloc", "free_requested", "snapshot"));
  EXPECT_EQ(WriteJson(entries[1]),
            absl::StrCat(R"({"action":"alloc","addr":)", kBase,
                         R"(,"size":100,"stream":0,"time_us":1700000000000001,"compile_context":"N/A",)"
                         R"("user_metadata":""})"));
  EXPECT_EQ(WriteJson(entries[11]),
            R"({"action":"oom","device_free":3221225472,"size":42949672960,"stream":7,"time_us":1700000000000011,)"
            R"("compile_context":"N/A","user_metadata":""})");

  const PickleValue& settings = At(snapshot, "allocator_settings");
  EXPECT_THAT(Keys(settings), ElementsAre("PYTORCH_CUDA_ALLOC_CONF", "max_split_size", "garbage_collection_threshold",
                                          "expandable_segments", "pinned_num_register_threads",
                                          "release_lock_on_cudamalloc", "pinned_use_cuda_host_register",
                                          "graph_capture_record_stream_reuse", "roundup_power2_divisions"));
  EXPECT_EQ(At(settings, "PYTORCH_CUDA_ALLOC_CONF").AsString(), FormatAllocConf(heap.options));
  EXPECT_EQ(At(settings, "max_split_size").AsInt(), static_cast<int64_t>(128_MiB));
  EXPECT_EQ(At(settings, "garbage_collection_threshold").AsDouble(), 0.8);
  EXPECT_EQ(WriteJson(At(settings, "roundup_power2_divisions")),
            R"({"1":0,"2":4,"4":0,"8":0,"16":0,"32":0,"64":0,"128":0,"256":0,"512":0,"1024":0,"2048":0,"4096":0,)"
            R"("8192":0,"16384":0,"32768":8})");
  EXPECT_EQ(At(At(TorchSnapshot({SampleHeap()}), "allocator_settings"), "max_split_size").AsInt(), -1);
}

TEST(TorchSnapshotTest, EveryDeviceHasAListEvenWithoutHeap) {
  const std::vector<HeapSnapshot> devices = {HeapSnapshot(), SampleHeap()};
  const PickleValue snapshot = TorchSnapshot(devices);
  ASSERT_EQ(At(snapshot, "device_traces").AsItems().size(), 2u);
  EXPECT_THAT(At(snapshot, "device_traces").AsItems()[0].AsItems(), IsEmpty());
  EXPECT_EQ(At(snapshot, "device_traces").AsItems()[1].AsItems().size(), SampleHeap().history.size());
  for (const PickleValue& segment : At(snapshot, "segments").AsItems()) EXPECT_EQ(At(segment, "device").AsInt(), 1);
  EXPECT_THAT(At(TorchSnapshot({}), "segments").AsItems(), IsEmpty());
  EXPECT_THAT(At(TorchSnapshot({}), "device_traces").AsItems(), IsEmpty());
}

TEST(TorchSnapshotTest, NumbersFitInWhatTheViewerCalculatesWith) {
  HeapSnapshot heap;
  heap.history.push_back({.action = HistoryAction::kOutOfMemory,
                          .address = std::numeric_limits<uint64_t>::max(),
                          .bytes = 512,
                          .stream = std::numeric_limits<uint64_t>::max() - 1});
  const PickleValue snapshot = TorchSnapshot({heap});
  const PickleValue& entry = At(snapshot, "device_traces").AsItems()[0].AsItems()[0];
  EXPECT_EQ(At(entry, "device_free").AsInt(), std::numeric_limits<int64_t>::max());
  EXPECT_EQ(At(entry, "stream").AsInt(), -2) << "as PyTorch writes a handle of 2^64 - 2";
}

// The number of the sample's events that stay after `change`.
size_t EventsLeft(void (*change)(HeapSnapshot&)) {
  HeapSnapshot heap = SampleHeap();
  change(heap);
  const PickleValue snapshot = TorchSnapshot({heap});
  return At(snapshot, "device_traces").AsItems()[0].AsItems().size();
}

TEST(TorchSnapshotTest, CutsAHistoryThatTheViewerCannotUndo) {
  EXPECT_EQ(EventsLeft([](HeapSnapshot&) {}), 16u);
  // Event 14 requests the free of a block that does not wait. Only the snapshot's event stays.
  EXPECT_EQ(EventsLeft([](HeapSnapshot& heap) { heap.segments[0].blocks[2].state = BlockState::kFree; }), 1u);
  EXPECT_EQ(EventsLeft([](HeapSnapshot& heap) { heap.segments[0].blocks[2].state = BlockState::kAllocated; }), 1u);
  // A repeated request of a free: only one request can be undone.
  EXPECT_EQ(EventsLeft([](HeapSnapshot& heap) {
              const HistoryEvent again = heap.history[14];
              heap.history.insert(heap.history.begin() + 14, again);
            }),
            2u);
  // Event 12 obtains a segment that is missing, or has another size.
  EXPECT_EQ(EventsLeft([](HeapSnapshot& heap) { heap.segments.pop_back(); }), 3u);
  EXPECT_EQ(EventsLeft([](HeapSnapshot& heap) { heap.segments[1].bytes += 2_MiB; }), 3u);
  // Event 12 obtains a segment that has a block in use, allocated before the segment.
  EXPECT_EQ(EventsLeft([](HeapSnapshot& heap) { heap.segments[1].blocks[1].state = BlockState::kAllocated; }), 3u);
  // Event 10 gives back a segment that overlaps a segment of the heap.
  EXPECT_EQ(EventsLeft([](HeapSnapshot& heap) {
              heap.segments.push_back({SegmentId{3}, kBase + 99_MiB, 2_MiB, PoolKind::kSmall, 0, {{0, 2_MiB}}});
            }),
            5u);
  EXPECT_EQ(EventsLeft([](HeapSnapshot& heap) {
              heap.segments.push_back({SegmentId{3}, kBase + 120_MiB, 2_MiB, PoolKind::kSmall, 0, {{0, 2_MiB}}});
            }),
            5u);
  // Event 9 completes a free in a segment that is missing at the time.
  EXPECT_EQ(EventsLeft([](HeapSnapshot& heap) { heap.history.erase(heap.history.begin() + 10); }), 5u);
  // Event 4 completes the free of a block that is in use afterwards.
  EXPECT_EQ(EventsLeft([](HeapSnapshot& heap) { heap.segments[0].blocks[1].state = BlockState::kAllocated; }), 11u);
  // An allocation of a missing block is no reason to cut.
  EXPECT_EQ(EventsLeft([](HeapSnapshot& heap) { heap.segments[0].blocks[0].state = BlockState::kFree; }), 16u);
}

// Entries in PyTorch's form.
PickleValue Entry(absl::string_view action, uint64_t address, uint64_t bytes, uint64_t stream = 0) {
  return PickleValue::Dict({{PickleValue::String("action"), PickleValue::String(action)},
                            {PickleValue::String(action == "oom" ? "device_free" : "addr"), PickleValue::Uint(address)},
                            {PickleValue::String("size"), PickleValue::Uint(bytes)},
                            {PickleValue::String("stream"), PickleValue::Uint(stream)},
                            {PickleValue::String("time_us"), PickleValue::Int(0)}});
}

PickleValue EntryWithKeys(size_t keys) {
  Pairs pairs = Entry("alloc", 4096, 1).AsPairs();
  while (pairs.size() < keys) pairs.emplace_back(PickleValue::Uint(pairs.size()), PickleValue());
  return PickleValue::Dict(std::move(pairs));
}

PickleValue SnapshotOf(Items entries) {
  return PickleValue::Dict(
      {{PickleValue::String("device_traces"), PickleValue::List({PickleValue::List(std::move(entries))})}});
}

// The text form shows a difference readably.
std::vector<std::string> Lines(const Trace& trace) {
  std::vector<std::string> lines;
  for (const TraceOp& op : trace.ops) {
    switch (op.kind) {
      case TraceOp::Kind::kAllocate:
        lines.push_back(absl::StrCat("a ", op.id, " ", op.bytes, " ", op.stream));
        break;
      case TraceOp::Kind::kFree:
        lines.push_back(absl::StrCat("f ", op.id));
        break;
      case TraceOp::Kind::kRecordStream:
        lines.push_back(absl::StrCat("r ", op.id, " ", op.stream));
        break;
      case TraceOp::Kind::kSyncStream:
        lines.push_back(absl::StrCat("s ", op.stream));
        break;
      case TraceOp::Kind::kTrim:
        lines.emplace_back("t");
        break;
      case TraceOp::Kind::kGiveBack:
        lines.push_back(absl::StrCat("g ", op.id, " ", op.bytes));
        break;
      default:
        lines.emplace_back("?");
        break;
    }
  }
  return lines;
}

constexpr const char* kLast = "18446744073709551615";
constexpr const char* kLastButOne = "18446744073709551614";

TEST(TorchTraceTest, AFreeThatCompletesAtOnceIsAFree) {
  ASSERT_OK_AND_ASSIGN(
      const Trace trace,
      TraceFromTorchSnapshot(
          SnapshotOf({Entry("segment_alloc", 4096, 2_MiB), Entry("alloc", 4096, 100, 5), Entry("alloc", 4608, 200),
                      Entry("free_requested", 4096, 100, 5), Entry("free_completed", 4096, 100, 5),
                      Entry("alloc", 4096, 300, 5), Entry("snapshot", 0, 1), Entry("annotate", 4096, 0)}),
          0));
  EXPECT_THAT(Lines(trace), ElementsAre("a 0 100 5", "a 1 200 0", "f 0", "a 2 300 5"));
  EXPECT_EQ(trace.ids, 3u);
  EXPECT_THAT(trace.notes, ElementsAre(HasSubstr("the snapshot has no segments")));
}

TEST(TorchTraceTest, AFreeThatWaitsIsKeptByAStandIn) {
  ASSERT_OK_AND_ASSIGN(
      const Trace trace,
      TraceFromTorchSnapshot(
          SnapshotOf({Entry("alloc", 4096, 1, 1), Entry("alloc", 8192, 2, 2), Entry("free_requested", 4096, 1, 1),
                      Entry("alloc", 16384, 3), Entry("free_requested", 8192, 2, 2), Entry("alloc", 20480, 4),
                      // The second free completes first: the stand-ins differ.
                      Entry("free_completed", 8192, 2, 2), Entry("alloc", 8192, 5), Entry("free_requested", 8192, 5),
                      Entry("free_completed", 4096, 1, 1), Entry("alloc", 4096, 6)}),
          0));
  EXPECT_THAT(
      Lines(trace),
      ElementsAre("a 0 1 1", "a 1 2 2", absl::StrCat("r 0 ", kLast), "f 0", "a 2 3 0",
                  absl::StrCat("r 1 ", kLastButOne), "f 1", "a 3 4 0", absl::StrCat("s ", kLastButOne), "a 4 5 0",
                  // The free waits to the end. The unused stand-in serves again.
                  absl::StrCat("r 4 ", kLastButOne), "f 4", absl::StrCat("s ", kLast), "a 5 6 0"));
  EXPECT_THAT(trace.notes, ElementsAre(HasSubstr("no segments"), HasSubstr("3 frees had to wait for other streams")));
}

TEST(TorchTraceTest, StandInsAreNoStreamOfTheTrace) {
  ASSERT_OK_AND_ASSIGN(
      const Trace trace,
      TraceFromTorchSnapshot(
          SnapshotOf({Entry("alloc", 4096, 1, std::numeric_limits<uint64_t>::max()), Entry("free_requested", 4096, 1),
                      // PyTorch writes the stream with a sign.
                      PickleValue::Dict({{PickleValue::String("action"), PickleValue::String("alloc")},
                                         {PickleValue::String("addr"), PickleValue::Int(8192)},
                                         {PickleValue::String("size"), PickleValue::Int(2)},
                                         {PickleValue::String("stream"), PickleValue::Int(-2)}}),
                      Entry("free_completed", 4096, 1)}),
          0));
  EXPECT_THAT(Lines(trace), ElementsAre(absl::StrCat("a 0 1 ", kLast), "r 0 18446744073709551613", "f 0",
                                        absl::StrCat("a 1 2 ", kLastButOne), "s 18446744073709551613"));
}

PickleValue BlockEntry(const char* state, uint64_t bytes) {
  return PickleValue::Dict({{PickleValue::String("state"), PickleValue::String(state)},
                            {PickleValue::String("size"), PickleValue::Uint(bytes)}});
}

PickleValue SegmentEntry(uint64_t address, uint64_t bytes, Items blocks, int device = 0, bool expandable = false) {
  return PickleValue::Dict({{PickleValue::String("device"), PickleValue::Int(device)},
                            {PickleValue::String("address"), PickleValue::Uint(address)},
                            {PickleValue::String("total_size"), PickleValue::Uint(bytes)},
                            {PickleValue::String("stream"), PickleValue::Int(0)},
                            {PickleValue::String("segment_type"), PickleValue::String("small")},
                            {PickleValue::String("is_expandable"), PickleValue::Bool(expandable)},
                            {PickleValue::String("blocks"), PickleValue::List(std::move(blocks))}});
}

PickleValue WithSegments(const PickleValue& snapshot, Items segments) {
  Pairs pairs = snapshot.AsPairs();
  pairs.emplace_back(PickleValue::String("segments"), PickleValue::List(std::move(segments)));
  return PickleValue::Dict(std::move(pairs));
}

TEST(TorchTraceTest, ARecordingThatStartsInTheMiddleBeginsWithWhatIsLive) {
  // The recording has no sizes of blocks, like PyTorch's. Blocks of 1 KiB are at 0 (freed in the recording), 1024
  // (stays), 2048 (free requested before the recording, completed inside) and 4096 (new).
  const PickleValue snapshot = WithSegments(
      SnapshotOf({Entry("free_completed", 2048, 600), Entry("free_requested", 0, 1000),
                  Entry("free_completed", 0, 1000), Entry("alloc", 4096, 1024)}),
      {SegmentEntry(0, 2_MiB,
                    {BlockEntry("inactive", 1024), BlockEntry("active_allocated", 1024), BlockEntry("inactive", 2048),
                     BlockEntry("active_allocated", 1024), BlockEntry("inactive", 2_MiB - 5120)}),
       SegmentEntry(4_MiB, 2_MiB, {BlockEntry("active_allocated", 2_MiB)}, /*device=*/1)});
  ASSERT_OK_AND_ASSIGN(const Trace trace, TraceFromTorchSnapshot(snapshot, 0));
  EXPECT_THAT(Lines(trace), ElementsAre(absl::StrCat("s ", kLast), "f 0", "a 3 1024 0"));
  ASSERT_EQ(trace.start.segments.size(), 1u);
  const std::vector<BlockSnapshot>& blocks = trace.start.segments[0].blocks;
  ASSERT_EQ(blocks.size(), 4u);
  using enum BlockState;
  const BlockState states[] = {kAllocated, kAllocated, kPendingFree, kFree};
  for (size_t i = 0; i < blocks.size(); ++i) {
    EXPECT_EQ(blocks[i].offset, i * 1024);
    EXPECT_EQ(blocks[i].state, states[i]) << i;
  }
  EXPECT_EQ(blocks[2].bytes, 1024u) << "600 bytes, rounded";
  EXPECT_EQ(trace.start.waits.at(2), std::numeric_limits<Stream>::max());
  EXPECT_EQ(trace.ids, 4u);
  EXPECT_THAT(trace.notes, ::testing::Contains(
                               HasSubstr("the recording began with 3.00 KiB in use (3 blocks) of 2.00 MiB reserved")));
}

// The fraction refers to a device whose size is missing in the snapshot.
TEST(TorchTraceTest, TheSettingsOfTheRecordingAreKnownWithoutTheirFraction) {
  Pairs pairs = SnapshotOf({Entry("alloc", 4096, 10)}).AsPairs();
  pairs.emplace_back(PickleValue::String("allocator_settings"),
                     PickleValue::Dict({{PickleValue::String("PYTORCH_CUDA_ALLOC_CONF"),
                                         PickleValue::String("max_split_size_mb:64,per_process_memory_fraction:0.5,"
                                                             "pinned_use_background_threads:True")}}));
  ASSERT_OK_AND_ASSIGN(const Trace trace, TraceFromTorchSnapshot(PickleValue::Dict(std::move(pairs)), 0));
  ASSERT_TRUE(trace.recorded_options.has_value());
  EXPECT_EQ(trace.recorded_options->max_split_bytes, 64_MiB);
  EXPECT_EQ(trace.recorded_options->per_process_memory_fraction, 1.0);
  EXPECT_EQ(trace.left_out.per_process_memory_fraction, 0.5);
  EXPECT_THAT(trace.left_out.ignored, HasSubstr("pinned_use_background_threads"));
}

TEST(TorchTraceTest, WhatCannotBeRewoundIsRefused) {
  const Items segments = {
      SegmentEntry(0, 2_MiB, {BlockEntry("active_allocated", 1024), BlockEntry("inactive", 2_MiB - 1024)})};
  const auto refused = [&](Items entries, const std::string& message, const Items& of = {}) {
    const absl::Status status =
        TraceFromTorchSnapshot(WithSegments(SnapshotOf(std::move(entries)), of.empty() ? segments : of), 0).status();
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(message));
  };
  const std::string gap = ": the entries are not of one recording without a gap";
  refused({Entry("alloc", 0, 10), Entry("alloc", 4096, 1)},
          "device_traces[0][1]: allocates the block at address 4096, which is not in use after it" + gap);
  refused({Entry("alloc", 0, 1024)},
          "device_traces[0][0]: allocates the block at address 0, which is freed already after it" + gap,
          {SegmentEntry(0, 2_MiB, {BlockEntry("active_pending_free", 1024), BlockEntry("inactive", 2_MiB - 1024)})});
  refused({Entry("free_requested", 0, 1024)},
          "device_traces[0][0]: frees the block at address 0, which does not wait to be free after it" + gap);
  refused({Entry("free_completed", 0, 1024)}, "device_traces[0][0]: frees a block of 1024 bytes at address 0, where");
  refused({Entry("free_completed", 512, 512)}, "overlaps the one at 0, which is in use after it");
  refused({Entry("free_completed", 4_MiB, 512)}, "a block at address 4194304, where no segment is after it");
  refused({Entry("segment_alloc", 0, 2_MiB)}, "in which a block is in use that no later event allocates");
  refused({Entry("segment_alloc", 2_MiB, 2_MiB)}, "obtains the segment of 2097152 bytes at address 2097152, which is");
  refused({Entry("segment_free", 1_MiB, 20_MiB)}, "overlaps one that is there after it");
  refused({Entry("free_completed", 4096, 512)},
          "began with blocks in use (1 frees are of such, and 0 of them are in use at the end), and the heap of that "
          "moment cannot be known: its segments "
          "are expandable",
          {SegmentEntry(0, 2_MiB, {BlockEntry("inactive", 2_MiB)}, 0, /*expandable=*/true)});
  refused({Entry("alloc", 1_MiB, 512), Entry("free_requested", 1_MiB, 512), Entry("free_completed", 1_MiB, 512)},
          "began with blocks in use (0 frees are of such, and 1 of them are in use at the end)",
          {SegmentEntry(0, 2_MiB, {BlockEntry("active_allocated", 1_MiB), BlockEntry("inactive", 1_MiB)}, 0,
                        /*expandable=*/true)});
  EXPECT_STATUS(TraceFromTorchSnapshot(SnapshotOf({Entry("free_completed", 4096, 512), Entry("alloc", 0, 1)}), 0),
                absl::StatusCode::kInvalidArgument, "cannot be known: the snapshot has no segments");
  EXPECT_STATUS(TraceFromTorchSnapshot(WithSegments(SnapshotOf({}), segments), 0), absl::StatusCode::kInvalidArgument,
                "device_traces[0]: records no events to replay; run `vramctl record SESSION 100000`");
  refused({Entry("alloc", 0, 1024)}, "segments[0].blocks: end at 512 of 2097152 bytes",
          {SegmentEntry(0, 2_MiB, {BlockEntry("inactive", 512)})});
  refused({Entry("alloc", 0, 1024)}, "segments[0].blocks[1]: ends past the segment's 2097152 bytes",
          {SegmentEntry(0, 2_MiB, {BlockEntry("active_allocated", 1024), BlockEntry("inactive", 2_MiB - 1023)})});
  refused({Entry("alloc", 0, 1024)}, "segments: the segment of 2097152 bytes at address 1048576 overlaps",
          {SegmentEntry(0, 2_MiB, {BlockEntry("inactive", 2_MiB)}),
           SegmentEntry(1_MiB, 2_MiB, {BlockEntry("inactive", 2_MiB)})});
}

TEST(TorchTraceTest, AFailedAllocationIsTriedAndFreed) {
  ASSERT_OK_AND_ASSIGN(const Trace trace,
                       TraceFromTorchSnapshot(SnapshotOf({Entry("alloc", 4096, 10), Entry("segment_free", 2_MiB, 2_MiB),
                                                          Entry("oom", 1_GiB, 40_GiB, 3), Entry("alloc", 8192, 20)}),
                                              0));
  EXPECT_THAT(Lines(trace), ElementsAre("a 0 10 0", "a 1 42949672960 3", "f 1", "a 2 20 0"));
  EXPECT_THAT(trace.notes, ElementsAre(HasSubstr("no segments"), HasSubstr("1 failed allocation (oom) is allocated")));
}

TEST(TorchTraceTest, OddEntriesAreLeftOutAndNoted) {
  ASSERT_OK_AND_ASSIGN(const Trace trace,
                       TraceFromTorchSnapshot(
                           SnapshotOf({Entry("alloc", 4096, 1), Entry("alloc", 4096, 2),  // no free between
                                       Entry("free_requested", 4096, 2), Entry("snapshot", 0, 0),
                                       Entry("alloc", 4096, 3),  // no completion
                                       Entry("free_requested", 4096, 3), Entry("free_requested", 4096, 3),  // twice
                                       Entry("alloc", 8192, 0), Entry("oom", 0, 0),                         // no bytes
                                       Entry("segment_map", 0, 1), Entry("segment_unmap", 0, 1), Entry("dance", 0, 0),
                                       Entry("alloc", 8192, 4), Entry("free_completed", 8192, 4)}),  // never requested
                           0));
  EXPECT_THAT(Lines(trace),
              ElementsAre("a 0 1 0", "f 0", "a 1 2 0", absl::StrCat("r 1 ", kLast), "f 1", absl::StrCat("s ", kLast),
                          "a 2 3 0", absl::StrCat("r 2 ", kLast), "f 2", "a 3 4 0", "f 3"));
  EXPECT_THAT(trace.notes,
              ElementsAre(HasSubstr("no segments"), HasSubstr("2 frees had to wait"),
                          HasSubstr("2 blocks were handed out again"), HasSubstr("1 free of a block freed already"),
                          HasSubstr("2 allocations of 0 bytes"), HasSubstr("2 entries are of expandable segments"),
                          HasSubstr("1 entry with an unknown action")));
}

TEST(TorchTraceTest, ErrorsNameThePath) {
  const auto entry = [](Pairs pairs) {
    return SnapshotOf({Entry("alloc", 4096, 1), PickleValue::Dict(std::move(pairs))});
  };
  const auto with_segments = [](PickleValue segments) {
    Pairs pairs = SnapshotOf({}).AsPairs();
    pairs.emplace_back(PickleValue::String("segments"), std::move(segments));
    return PickleValue::Dict(std::move(pairs));
  };
  const PickleValue alloc = PickleValue::String("alloc");
  const PickleValue one = PickleValue::Int(1);
  const PickleValue block = PickleValue::Dict(
      {{PickleValue::String("state"), PickleValue::String("inactive")}, {PickleValue::String("size"), one}});
  const auto segment = [&](PickleValue blocks) {
    return PickleValue::Dict({{PickleValue::String("device"), PickleValue::Int(0)},
                              {PickleValue::String("address"), one},
                              {PickleValue::String("total_size"), one},
                              {PickleValue::String("stream"), one},
                              {PickleValue::String("segment_type"), PickleValue::String("small")},
                              {PickleValue::String("blocks"), std::move(blocks)}});
  };
  const PickleValue shared_blocks = PickleValue::List({block});
  const std::vector<std::pair<PickleValue, std::string>> cases = {
      {PickleValue::List({}), "snapshot: is a list, not a dict"},
      {PickleValue::Dict({}), "device_traces: missing"},
      {PickleValue::Dict({{PickleValue::String("device_traces"), PickleValue::Dict({})}}),
       "device_traces: is a dict, not a list"},
      {PickleValue::Dict({{PickleValue::String("device_traces"), PickleValue::List({})}}),
       "device_traces[0]: missing, the snapshot has 0 devices"},
      {PickleValue::Dict({{PickleValue::String("device_traces"), PickleValue::List({one})}}),
       "device_traces[0]: is an integer, not a list"},
      {SnapshotOf({one}), "device_traces[0][0]: is an integer, not a dict"},
      {entry({}), "device_traces[0][1].action: missing"},
      {entry({{PickleValue::String("action"), one}}), "device_traces[0][1].action: is an integer, not a string"},
      {entry({{PickleValue::String("action"), alloc}}), "device_traces[0][1].addr: missing"},
      {entry({{PickleValue::String("action"), alloc}, {PickleValue::String("addr"), PickleValue()}}),
       "device_traces[0][1].addr: is None, not an integer"},
      {entry({{PickleValue::String("action"), alloc}, {PickleValue::String("addr"), one}}),
       "device_traces[0][1].size: missing"},
      {entry({{PickleValue::String("action"), alloc},
              {PickleValue::String("addr"), one},
              {PickleValue::String("size"), PickleValue::Bool(true)}}),
       "device_traces[0][1].size: is a bool, not an integer"},
      {entry({{PickleValue::String("action"), alloc},
              {PickleValue::String("addr"), one},
              {PickleValue::String("size"), PickleValue::Int(-1)}}),
       "device_traces[0][1].size: is negative"},
      {SnapshotOf({Entry("alloc", 4096, kMaxRequestBytes - 1), Entry("alloc", 8192, kMaxRequestBytes)}),
       "device_traces[0][1].size: 1152921504606846976 is not below 2^60"},
      {SnapshotOf({Entry("oom", 0, std::numeric_limits<uint64_t>::max())}),
       "device_traces[0][0].size: 18446744073709551615 is not below 2^60"},
      {SnapshotOf({EntryWithKeys(256), EntryWithKeys(257)}), "device_traces[0][1]: has 257 keys, more than 256"},
      {entry({{PickleValue::String("action"), alloc},
              {PickleValue::String("addr"), one},
              {PickleValue::String("size"), one}}),
       "device_traces[0][1].stream: missing"},
      {entry({{PickleValue::String("action"), alloc},
              {PickleValue::String("addr"), one},
              {PickleValue::String("size"), one},
              {PickleValue::String("stream"), PickleValue::Double(1)}}),
       "device_traces[0][1].stream: is a float, not an integer"},
      {entry({{PickleValue::String("action"), PickleValue::String("free_requested")}}),
       "device_traces[0][1].addr: missing"},
      {entry({{PickleValue::String("action"), PickleValue::String("free_completed")}}),
       "device_traces[0][1].addr: missing"},
      {entry({{PickleValue::String("action"), PickleValue::String("oom")}}), "device_traces[0][1].size: missing"},
      {with_segments(one), "segments: is an integer, not a list"},
      {with_segments(PickleValue::List({one})), "segments[0]: is an integer, not a dict"},
      {with_segments(PickleValue::List({PickleValue::Dict({})})), "segments[0].device: missing"},
      {with_segments(PickleValue::List({segment(one)})), "segments[0].blocks: is an integer, not a list"},
      {with_segments(PickleValue::List({segment(PickleValue::List({PickleValue::Dict({})}))})),
       "segments[0].blocks[0].state: missing"},
      {with_segments(PickleValue::List({segment(PickleValue::List({BlockEntry("sleepy", 512)}))})),
       "segments[0].blocks[0].state: \"sleepy\"; known: active_allocated, active_pending_free, inactive"},
      {with_segments(PickleValue::List({segment(shared_blocks), segment(shared_blocks)})),
       "segments[1].blocks: is the list of another segment too"},
  };
  for (const auto& [snapshot, message] : cases) {
    const absl::StatusOr<Trace> trace = TraceFromTorchSnapshot(snapshot, 0);
    EXPECT_TRUE(absl::IsInvalidArgument(trace.status())) << trace.status() << message;
    EXPECT_EQ(std::string(trace.status().message()), message);
  }
  EXPECT_STATUS(TraceFromTorchSnapshot(SnapshotOf({}), 1), absl::StatusCode::kInvalidArgument,
                "device_traces[1]: missing, the snapshot has 1 devices");
  EXPECT_STATUS(TraceFromTorchSnapshot(SnapshotOf({}), -1), absl::StatusCode::kInvalidArgument,
                "device_traces[-1]: missing");
}

TEST(TorchTraceTest, OurOwnSnapshotMakesATrace) {
  ASSERT_OK_AND_ASSIGN(const PickleValue snapshot, ReadPickle(WritePickle(TorchSnapshot({SampleHeap()}))));
  ASSERT_OK_AND_ASSIGN(const Trace trace, TraceFromTorchSnapshot(snapshot, 0));
  EXPECT_THAT(Lines(trace), ElementsAre("a 0 100 0", "a 1 1000 0", "f 1", "a 2 31457280 0", absl::StrCat("r 2 ", kLast),
                                        "f 2", "a 3 1024 0", absl::StrCat("s ", kLast), "t", "a 4 42949672960 7", "f 4",
                                        "a 5 5242879 7", absl::StrCat("r 3 ", kLast), "f 3"));
  EXPECT_EQ(trace.ids, 6u);
}

// A heap that gets and gives back segments, blocks and pending blocks at random, and keeps the history.
class RandomHeap {
 public:
  explicit RandomHeap(uint32_t seed) : random_(seed) {}

  HeapSnapshot Make(int steps) {
    for (int i = 0; i < steps; ++i) Step();
    HeapSnapshot heap;
    for (const Segment& segment : segments_) {
      SegmentSnapshot copy = {
          .address = segment.address, .bytes = segment.slots.size() * kSlot, .stream = segment.stream};
      for (size_t i = 0; i < segment.slots.size(); ++i) {
        copy.blocks.push_back({i * kSlot, kSlot, kSlot, segment.slots[i]});
      }
      heap.segments.push_back(std::move(copy));
    }
    // A ring keeps only the last events.
    const size_t kept = history_.size() - Number(history_.size() / 2 + 1);
    heap.history.assign(history_.end() - static_cast<std::ptrdiff_t>(kept), history_.end());
    return heap;
  }

 private:
  static constexpr uint64_t kSlot = 512;
  struct Segment {
    uint64_t address;
    Stream stream;
    std::vector<BlockState> slots;
  };

  size_t Number(size_t below) { return std::uniform_int_distribution<size_t>(0, below - 1)(random_); }
  void Record(HistoryAction action, uint64_t address, uint64_t bytes, Stream stream) {
    history_.push_back({.action = action,
                        .address = address,
                        .bytes = bytes,
                        .stream = stream,
                        .time_us = static_cast<int64_t>(history_.size())});
  }

  void Step() {
    if (segments_.empty() || Number(20) == 0) {
      segments_.push_back({next_address_, Number(3), std::vector<BlockState>(8 + Number(8), BlockState::kFree)});
      next_address_ += 1_MiB;
      Record(HistoryAction::kSegmentAllocate, segments_.back().address, segments_.back().slots.size() * kSlot,
             segments_.back().stream);
      return;
    }
    const size_t index = Number(segments_.size());
    Segment& segment = segments_[index];
    const size_t slot = Number(segment.slots.size());
    const uint64_t address = segment.address + slot * kSlot;
    BlockState& state = segment.slots[slot];
    const bool unused = std::set<BlockState>(segment.slots.begin(), segment.slots.end()) == std::set{BlockState::kFree};
    if (unused && Number(10) == 0) {
      Record(HistoryAction::kSegmentFree, segment.address, segment.slots.size() * kSlot, segment.stream);
      segments_.erase(segments_.begin() + static_cast<std::ptrdiff_t>(index));
    } else if (state == BlockState::kFree) {
      state = BlockState::kAllocated;
      Record(HistoryAction::kAllocate, address, kSlot, segment.stream);
    } else {
      if (state == BlockState::kAllocated) Record(HistoryAction::kFreeRequested, address, kSlot, segment.stream);
      const bool waits = state == BlockState::kAllocated && Number(3) == 0;
      state = waits ? BlockState::kPendingFree : BlockState::kFree;
      if (!waits) Record(HistoryAction::kFreeCompleted, address, kSlot, segment.stream);
    }
  }

  std::mt19937_64 random_;
  uint64_t next_address_ = kBase;
  std::vector<Segment> segments_;
  std::vector<HistoryEvent> history_;
};

TEST(TorchTraceTest, RandomHistoriesAreKeptWholeAndKeepTheirBlocksPending) {
  uint64_t started_in_the_middle = 0;
  for (uint32_t seed = 0; seed < 300; ++seed) {
    SCOPED_TRACE(seed);
    const HeapSnapshot heap = RandomHeap(seed).Make(200);
    const PickleValue snapshot = TorchSnapshot({heap});
    ASSERT_EQ(At(snapshot, "device_traces").AsItems()[0].AsItems().size(), heap.history.size());
    ASSERT_OK_AND_ASSIGN(const Trace trace, TraceFromTorchSnapshot(snapshot, 0));
    // After the trace, the heap has the expected number of allocated and pending blocks.
    std::set<uint32_t> allocated;
    std::map<Stream, uint32_t> pending;  // one block for each stand-in
    std::map<uint32_t, Stream> recorded;
    uint32_t next_id = 0;
    for (const SegmentSnapshot& segment : trace.start.segments) {
      for (const BlockSnapshot& block : segment.blocks) {
        if (block.state == BlockState::kAllocated) allocated.insert(next_id);
        if (block.state == BlockState::kPendingFree) pending.emplace(trace.start.waits.at(next_id), next_id);
        next_id += block.state == BlockState::kFree ? 0 : 1;
      }
    }
    started_in_the_middle += next_id;
    for (const TraceOp& op : trace.ops) {
      if (op.kind == TraceOp::Kind::kTrim || op.kind == TraceOp::Kind::kGiveBack) continue;
      if (op.kind == TraceOp::Kind::kAllocate) {
        ASSERT_TRUE(allocated.insert(op.id).second);
      } else if (op.kind == TraceOp::Kind::kRecordStream) {
        ASSERT_TRUE(allocated.contains(op.id));
        recorded[op.id] = op.stream;
      } else if (op.kind == TraceOp::Kind::kFree) {
        ASSERT_EQ(allocated.erase(op.id), 1u);
        if (const auto use = recorded.find(op.id); use != recorded.end()) {
          ASSERT_TRUE(pending.emplace(use->second, op.id).second) << "a stand-in keeps two blocks";
        }
      } else {
        ASSERT_EQ(op.kind, TraceOp::Kind::kSyncStream);
        ASSERT_EQ(pending.erase(op.stream), 1u) << "nothing waits for this stand-in";
      }
    }
    size_t expected_allocated = 0;
    size_t expected_pending = 0;
    for (const SegmentSnapshot& segment : heap.segments) {
      for (const BlockSnapshot& block : segment.blocks) {
        expected_allocated += block.state == BlockState::kAllocated ? 1 : 0;
        expected_pending += block.state == BlockState::kPendingFree ? 1 : 0;
      }
    }
    EXPECT_EQ(allocated.size(), expected_allocated);
    EXPECT_EQ(pending.size(), expected_pending);
  }
  EXPECT_GT(started_in_the_middle, 1000u) << "too few to mean anything";
}

// Writes files for torch_snapshot_readable.py and PyTorch's own tools to VRAMBROKER_SNAPSHOT_DIR.
TEST(TorchSnapshotTest, WritesFilesForOtherReaders) {
  const char* folder = std::getenv("VRAMBROKER_SNAPSHOT_DIR");
  if (folder == nullptr) GTEST_SKIP() << "VRAMBROKER_SNAPSHOT_DIR is not set";
  const auto write = [&](const std::string& name, const std::vector<HeapSnapshot>& heaps) {
    std::ofstream file(absl::StrCat(folder, "/", name), std::ios::binary);
    file << WritePickle(TorchSnapshot(heaps));
    EXPECT_TRUE(file.flush()) << name;
  };
  write("sample.pickle", {SampleHeap()});
  write("two_devices.pickle", {HeapSnapshot(), SampleHeap()});
  write("empty.pickle", {});
  for (uint32_t seed = 0; seed < 5; ++seed) {
    write(absl::StrCat("random", seed, ".pickle"), {RandomHeap(seed).Make(5000), RandomHeap(seed + 100).Make(300)});
  }
}

}  // namespace
}  // namespace vrambroker
