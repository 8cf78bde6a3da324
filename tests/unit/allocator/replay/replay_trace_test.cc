// SPDX-License-Identifier: Apache-2.0
//
// Traces in text form, files with traces, and promises of the replay.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>
#include <zlib.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "allocator/replay/replay.h"
#include "allocator/replay/trace.h"

namespace vrambroker {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

TEST(ParseTraceTextTest, ReadsEveryOperation) {
  const absl::StatusOr<Trace> trace = ParseTraceText(
      "# a comment\n"
      "a x 1000 18446744073709551615\n"
      "\n"
      "  r\tx 3  # another\r\n"
      "f x\n"
      "s\n"
      "s 5\n"
      "e\n"
      "p\n"
      "frac 0.25\n"
      "t\n"
      "g 3 2097152\n"
      "a 7 1152921504606846975 0\n"
      "a x 0 0");
  ASSERT_EQ(trace.status(), absl::OkStatus());
  const std::vector<TraceOp>& ops = trace->ops;
  using enum TraceOp::Kind;
  const TraceOp::Kind kinds[] = {kAllocate,   kRecordStream, kFree, kSyncAll,  kSyncStream, kEmptyCache,
                                 kResetPeaks, kSetFraction,  kTrim, kGiveBack, kAllocate,   kAllocate};
  ASSERT_EQ(ops.size(), std::size(kinds));
  for (size_t i = 0; i < ops.size(); ++i) EXPECT_EQ(ops[i].kind, kinds[i]) << i;
  EXPECT_EQ(ops[0].bytes, 1000u);
  EXPECT_EQ(ops[0].stream, ~uint64_t{0});
  EXPECT_EQ(ops[1].stream, 3u);
  EXPECT_EQ(ops[4].stream, 5u);
  EXPECT_EQ(ops[7].fraction, 0.25);
  EXPECT_EQ(ops[9].id, 3u);
  EXPECT_EQ(ops[9].bytes, 2_MiB);
  EXPECT_EQ(ops[10].bytes, kMaxRequestBytes - 1);
  EXPECT_EQ(ops[0].id, 0u);
  EXPECT_EQ(ops[1].id, 0u);
  EXPECT_EQ(ops[2].id, 0u);
  EXPECT_EQ(ops[10].id, 1u) << "in order of appearance";
  EXPECT_EQ(ops[11].id, 0u) << "a freed id may be used again";
  EXPECT_EQ(trace->ids, 2u);
}

TEST(ParseTraceTextTest, ReadsTheHeapAtTheStart) {
  const std::string text =
      "seg 2097152 7 small\n"
      "b 512 0 100\n"
      "b 1024\n"
      "b 2095616 1 2000000 9\n"
      "seg 20971520 0 large\n"
      "b 20971520\n"
      "r 0 3\n"
      "f 0\n"
      "s 9\n"
      "a 2 4096 7\n"
      "g 1 20971520\n"
      "t\n"
      "frac 0.25\n"
      "s\n"
      "e\n"
      "p\n";
  const absl::StatusOr<Trace> trace = ParseTraceText(text);
  ASSERT_EQ(trace.status(), absl::OkStatus());
  ASSERT_EQ(trace->start.segments.size(), 2u);
  EXPECT_EQ(trace->start.ReservedBytes(), 22_MiB);
  const SegmentSnapshot& small = trace->start.segments[0];
  EXPECT_EQ(small.pool, PoolKind::kSmall);
  EXPECT_EQ(small.stream, 7u);
  ASSERT_EQ(small.blocks.size(), 3u);
  EXPECT_EQ(small.blocks[0].requested_bytes, 100u);
  EXPECT_EQ(small.blocks[0].state, BlockState::kAllocated);
  EXPECT_EQ(small.blocks[1].state, BlockState::kFree);
  EXPECT_EQ(small.blocks[2].offset, 1536u);
  EXPECT_EQ(small.blocks[2].state, BlockState::kPendingFree);
  EXPECT_EQ(trace->start.waits, (std::map<uint32_t, Stream>{{1, 9}}));
  EXPECT_EQ(trace->ids, 3u);
  EXPECT_EQ(FormatTrace(*trace), text);

  Replay replay({}, *trace);
  EXPECT_EQ(replay.start_status(), absl::OkStatus());
  const MemoryStats before = replay.allocator().GetMemoryStats();
  EXPECT_EQ(before.reserved_bytes.all.peak, 22_MiB);
  EXPECT_EQ(before.allocated_bytes.all.peak, 512u) << "the other one was freed already";
  EXPECT_EQ(before.active_bytes.all.current, 512u + 2095616u);
  EXPECT_EQ(before.num_device_alloc, 0u);
  for (const TraceOp& op : trace->ops) replay.Do(op);
  const MemoryStats after = replay.allocator().GetMemoryStats();
  EXPECT_EQ(after.allocated_bytes.all.current, 4096u);
  EXPECT_EQ(after.num_device_free, 1u);
  EXPECT_EQ(after.reserved_bytes.all.current, 2_MiB);
  EXPECT_EQ(replay.device().used_bytes(), 2_MiB);
  EXPECT_EQ(replay.allocator().CheckInvariants(), absl::OkStatus());
}

TEST(ReplayTest, OtherSettingsGiveBackAsManyBytes) {
  // The trace gives back other sizes than the sizes of the replay's segments 0 to 2.
  const absl::StatusOr<Trace> trace = ParseTraceText(
      "seg 20971520 0 large\nb 20971520\nseg 20971520 0 large\nb 20971520\nseg 20971520 0 large\nb 20971520\n"
      "g 0 12582912\ng 1 8388608\ng 2 2097152\na 0 512 0\ng 2 2097152\n");
  ASSERT_EQ(trace.status(), absl::OkStatus());
  const uint64_t reserved[] = {40_MiB, 40_MiB, 20_MiB, 22_MiB, 2_MiB};
  Replay replay({}, *trace);
  for (size_t i = 0; i < trace->ops.size(); ++i) {
    replay.Do(trace->ops[i]);
    EXPECT_EQ(replay.allocator().GetMemoryStats().reserved_bytes.all.current, reserved[i]) << i;
  }
}

TEST(ParseTraceTextTest, EmptyTextIsAnEmptyTrace) {
  for (const char* text : {"", "\n", "#", "\n\n# only\n"}) {
    const absl::StatusOr<Trace> trace = ParseTraceText(text);
    ASSERT_EQ(trace.status(), absl::OkStatus());
    EXPECT_TRUE(trace->ops.empty());
    EXPECT_EQ(trace->ids, 0u);
  }
}

struct BadText {
  const char* text;
  const char* message;
};

class BadTraceTest : public ::testing::TestWithParam<BadText> {};

TEST_P(BadTraceTest, IsRefusedWithItsLine) {
  const absl::Status status = ParseTraceText(GetParam().text).status();
  EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
  EXPECT_THAT(std::string(status.message()), StartsWith(GetParam().message));
}

INSTANTIATE_TEST_SUITE_P(
    Texts, BadTraceTest,
    ::testing::Values(
        BadText{"x 1",
                "line 1: unknown operation \"x\"; known: a, f, r, s, e, p, t, g, frac, and seg, b for the start"},
        BadText{"\n\n# c\nA 0 1 0", "line 4: unknown operation \"A\""},
        BadText{"e\r\ne\r\nee\r\n", "line 3: unknown operation \"ee\""},
        BadText{"a", "line 1: has 1 words; expected: a ID BYTES STREAM"},
        BadText{"a 0 512", "line 1: has 3 words; expected: a ID BYTES STREAM"},
        BadText{"a 0 512 0 0", "line 1: has 5 words; expected: a ID BYTES STREAM"},
        BadText{"a 0 512 # 0", "line 1: has 3 words"},
        BadText{"a 0 -1 0", "line 1: BYTES is \"-1\"; accepted: whole numbers from 0 to 1152921504606846975"},
        BadText{"a 0 1152921504606846976 0", "line 1: BYTES is \"1152921504606846976\""},
        BadText{"a 0 18446744073709551616 0", "line 1: BYTES is \"18446744073709551616\""},
        BadText{"a 0 1.5 0", "line 1: BYTES is \"1.5\""}, BadText{"a 0 0x10 0", "line 1: BYTES is \"0x10\""},
        BadText{"a 0 512 -1", "line 1: STREAM is \"-1\"; accepted: whole numbers from 0 to 18446744073709551615"},
        BadText{"a 0 512 18446744073709551616", "line 1: STREAM is"},
        BadText{"f 0", "line 1: id \"0\" was never allocated"},
        BadText{"a 0 1 0\nf 1", "line 2: id \"1\" was never allocated"},
        BadText{"a 0 1 0\nf 0 0", "line 2: has 3 words; expected: f ID"},
        BadText{"r 0 1", "line 1: id \"0\" was never allocated"},
        BadText{"a 0 1 0\nr 0", "line 2: has 2 words; expected: r ID STREAM"},
        BadText{"a 0 1 0\nr 0 one", "line 2: STREAM is \"one\""}, BadText{"s one", "line 1: STREAM is \"one\""},
        BadText{"s 1 2", "line 1: has 3 words; expected: s [STREAM]"},
        BadText{"e 1", "line 1: has 2 words; expected: e"}, BadText{"p 1", "line 1: has 2 words; expected: p"},
        BadText{"t 1", "line 1: has 2 words; expected: t"}, BadText{"g 1", "line 1: has 2 words; expected: g N BYTES"},
        BadText{"g 4294967296 1", "line 1: N is \"4294967296\"; accepted: whole numbers from 0 to 4294967295"},
        BadText{"g 0 x", "line 1: BYTES is \"x\""},
        BadText{"seg 512 0", "line 1: has 3 words; expected: seg BYTES STREAM small|large"},
        BadText{"seg 512 0 tiny", "line 1: the pool is \"tiny\"; accepted: small, large"},
        BadText{"b 512", "line 1: a block before the first segment"},
        BadText{"seg 1024 0 small\nb 512 x", "line 2: has 3 words; expected: b BYTES ID REQUESTED"},
        BadText{"seg 1024 0 small\nb 1536", "line 2: BYTES is \"1536\"; accepted: whole numbers from 0 to 1024"},
        BadText{"seg 1024 0 small\nb 512 x 513", "line 2: REQUESTED is \"513\""},
        BadText{"seg 1024 0 small\nb 512 x 1\nb 512 x 1", "line 3: id \"x\" names another block"},
        BadText{"seg 1024 0 small\nb 512 x 1 one", "line 2: STREAM is \"one\""},
        BadText{"seg 1024 0 small\nb 512\ne", "line 3: the start before it: segment 0: its blocks have 512 of 1024"},
        BadText{"seg 1024 0 small\nb 512\nb 512", "line 3: the start before it: segment 0: two free neighbours at"},
        BadText{"seg 1000 0 small\nb 1000\ne", "line 3: the start before it: segment 0: has 1000 bytes; expected a"},
        BadText{"seg 1024 0 small\nb 0\nb 1024", "line 3: the start before it: segment 0: a block of 0 bytes at"},
        BadText{"seg 1024 0 small\nb 1024\ne\nseg 1024 0 small", "line 4: the start of the heap comes before all"},
        BadText{"e\nb 512", "line 2: the start of the heap comes before all operations"},
        BadText{"frac", "line 1: has 1 words; expected: frac X"},
        BadText{"frac 1.01", "line 1: X is \"1.01\"; accepted: 0 to 1"}, BadText{"frac -0.1", "line 1: X is \"-0.1\""},
        BadText{"frac nan", "line 1: X is \"nan\""}, BadText{"frac inf", "line 1: X is \"inf\""},
        BadText{"frac half", "line 1: X is \"half\""}));

TEST(ParseTraceTextTest, LongRubbishIsCutInTheMessage) {
  const absl::Status status = ParseTraceText(std::string(100'000, 'x')).status();
  EXPECT_LT(status.message().size(), 200u);
}

// ---- Files ----

class TraceFileTest : public ::testing::Test {
 protected:
  TraceFileTest() { std::filesystem::create_directories(folder_); }
  ~TraceFileTest() override { std::filesystem::remove_all(folder_); }

  std::string Write(const std::string& name, const std::string& bytes) {
    std::ofstream(folder_ / name, std::ios::binary) << bytes;
    return folder_ / name;
  }
  std::string WritePacked(const std::string& name, const std::string& bytes) {
    const std::string path = folder_ / name;
    gzFile file = gzopen(path.c_str(), "wb");
    EXPECT_EQ(gzwrite(file, bytes.data(), static_cast<unsigned>(bytes.size())), static_cast<int>(bytes.size()));
    EXPECT_EQ(gzclose(file), Z_OK);
    return path;
  }

  const std::filesystem::path folder_ =
      std::filesystem::temp_directory_path() / absl::StrCat("vrambroker_trace_test_", getpid());
};

TEST_F(TraceFileTest, PlainAndPackedAreTheSame) {
  std::string text;
  for (int i = 0; i < 50'000; ++i) absl::StrAppend(&text, "a ", i, " ", i * 7, " 0\n");
  for (const std::string& path : {Write("plain", text), WritePacked("packed", text)}) {
    const absl::StatusOr<std::string> bytes = ReadMaybeGzipped(path);
    ASSERT_EQ(bytes.status(), absl::OkStatus());
    EXPECT_TRUE(*bytes == text) << path;
    const absl::StatusOr<Trace> trace = ReadTraceFile(path);
    ASSERT_EQ(trace.status(), absl::OkStatus());
    EXPECT_EQ(trace->ops.size(), 50'000u);
  }
}

TEST_F(TraceFileTest, EmptyFileIsAnEmptyTrace) {
  const absl::StatusOr<Trace> trace = ReadTraceFile(Write("empty", ""));
  ASSERT_EQ(trace.status(), absl::OkStatus());
  EXPECT_TRUE(trace->ops.empty());
}

TEST_F(TraceFileTest, ErrorsNameFileAndPlace) {
  const std::string missing = folder_ / "missing";
  EXPECT_TRUE(absl::IsNotFound(ReadTraceFile(missing).status()));
  EXPECT_THAT(std::string(ReadTraceFile(missing).status().message()), StartsWith(missing + ": "));
  const absl::Status folder = ReadTraceFile(folder_).status();
  EXPECT_TRUE(absl::IsInvalidArgument(folder)) << folder;
  EXPECT_THAT(std::string(folder.message()), HasSubstr("directory"));
  const std::string bad = Write("bad", "e\nq\n");
  EXPECT_THAT(std::string(ReadTraceFile(bad).status().message()), StartsWith(bad + ": line 2: "));
  const std::string pickle = Write("pickle", "\x80\x02]q");
  EXPECT_THAT(std::string(ReadTraceFile(pickle).status().message()), StartsWith(pickle + ": byte "));
}

TEST_F(TraceFileTest, PackedFileMustBeWhole) {
  std::string text;
  for (int i = 0; i < 50'000; ++i) absl::StrAppend(&text, "a ", i, " ", i * 7, " 0\n");
  const std::string path = WritePacked("packed", text);
  const auto size = std::filesystem::file_size(path);
  for (const auto kept : {size - 1, size - 8, size / 2, uintmax_t{10}}) {
    std::filesystem::resize_file(path, kept);
    const absl::Status status = ReadTraceFile(path).status();
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << kept << ": " << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("unpacked")) << kept;
  }
}

// ---- Configuration ----

TEST(ParseReplayConfTest, ReadsItsKeysAndLeavesOthers) {
  const absl::StatusOr<ReplayConfig> config = ParseReplayConf(
      "# note\r\n\nalloc_conf=max_split_size_mb:128\r\ndevice_bytes=1GiB\nfraction=0.5\ntrace=other=x\n");
  ASSERT_EQ(config.status(), absl::OkStatus());
  EXPECT_EQ(config->options.max_split_bytes, 128_MiB);
  EXPECT_EQ(config->device_bytes, 1_GiB);
  EXPECT_EQ(config->fraction, 0.5);
  EXPECT_EQ(*ParseReplayConf(""), ReplayConfig());
  EXPECT_EQ(ParseReplayConf("fraction=0.5\nfraction=-1\n")->fraction, std::nullopt);
  EXPECT_EQ(ParseReplayConf("fraction=0\n")->fraction, 0.0);
}

TEST(ParseReplayConfTest, ErrorsNameTheLine) {
  const BadText cases[] = {
      {"nothing", "line 1: \"nothing\" is not KEY=VALUE"},
      {"# c\n\nalloc_conf=max_split_size_mb:1", "line 3: "},
      {"device_bytes=", "line 1: device_bytes: "},
      {"device_bytes=1GiB\ndevice_bytes=-1", "line 2: device_bytes: "},
      {"fraction=", "line 1: fraction: "},
      {"fraction=2",
       "line 1: fraction: '2' is not a share: a share is at most 1.0, or 100%; write 0.4 or 40%, or -1 for none"},
      {"fraction=-0.5", "line 1: fraction: "},
      {"fraction=nan", "line 1: fraction: "},
  };
  for (const BadText& bad : cases) {
    const absl::Status status = ParseReplayConf(bad.text).status();
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << bad.text;
    EXPECT_THAT(std::string(status.message()), StartsWith(bad.message));
  }
}

// ---- Replay ----

Trace Parsed(absl::string_view text) {
  absl::StatusOr<Trace> trace = ParseTraceText(text);
  EXPECT_EQ(trace.status(), absl::OkStatus());
  return trace.ok() ? *std::move(trace) : Trace();
}

TEST(ReplayTest, ResultsTellWhatHappened) {
  const Trace trace = Parsed("a 0 1000 0\na 1 20000000000 0\nf 1\nr 1 2\nf 0\nf 0\n");
  using Result = Replay::Result;
  const Result results[] = {Result::kOk,      Result::kOutOfMemory, Result::kNothing,
                            Result::kNothing, Result::kOk,          Result::kNothing};
  Replay replay({.device_bytes = 1_GiB}, trace);
  for (size_t i = 0; i < trace.ops.size(); ++i) {
    EXPECT_EQ(replay.Do(trace.ops[i]), results[i]) << i;
    if (i == 0) {
      EXPECT_EQ(PerOpRow(0, trace.ops[0], results[0], replay),
                "0,a,ok,0,0,2097152,1024,1024,1,1024,1,2097152,1,2096128,1,1000,0,0");
    }
  }
  EXPECT_EQ(PerOpRow(5, trace.ops[5], Result::kNothing, replay), "5,f,nop,,,,,0,0,0,0,2097152,1,0,0,0,1,1")
      << "the segment is kept";
}

TEST(ReplayTest, AnIdThatIsAllocatedAgainNamesTheNewBlock) {
  const Trace trace = Parsed("a 0 512 0\na 0 1024 0\nf 0\nf 0\n");
  Replay replay({}, trace);
  for (const TraceOp& op : trace.ops) replay.Do(op);
  EXPECT_EQ(replay.allocator().GetMemoryStats().allocated_bytes.all.current, 512u) << "the first one stays";
}

TEST(ReplayTest, AnIdWhoseNewAllocationFailsNamesNothing) {
  const Trace trace = Parsed("a 0 512 0\na 0 20000000000 0\nr 0 1\nf 0\n");
  using Result = Replay::Result;
  const Result results[] = {Result::kOk, Result::kOutOfMemory, Result::kNothing, Result::kNothing};
  Replay replay({.device_bytes = 1_GiB}, trace);
  for (size_t i = 0; i < trace.ops.size(); ++i) EXPECT_EQ(replay.Do(trace.ops[i]), results[i]) << i;
  EXPECT_EQ(replay.allocator().GetMemoryStats().allocated_bytes.all.current, 512u) << "the first one stays";
}

TEST(ReplayTest, SummaryPeaksAreOfTheWholeTrace) {
  const Trace trace =
      Parsed("a 0 104857600 0\nf 0\ne\np\na 1 512 0\nf 1\na 2 9000000000 0\nf 2\np\nfrac 0\na 3 200000000 0\n");
  const ReplaySummary summary = SummarizeReplay(trace, {.device_bytes = 1_GiB});
  EXPECT_EQ(summary.ops, 11u);
  EXPECT_EQ(summary.allocations, 4u);
  EXPECT_EQ(summary.peak_allocated_bytes, 100_MiB);
  EXPECT_EQ(summary.peak_reserved_bytes, 100_MiB);
  EXPECT_EQ(summary.fragmentation_at_peak, 0);
  EXPECT_EQ(summary.ooms, 2u);
  EXPECT_EQ(summary.device_calls, 4u);
  EXPECT_EQ(summary.stats.allocated_bytes.all.peak, 0u) << "reset in the trace";
}

TEST(ReplayTest, RejectionsAreOutOfMemory) {
  AllocatorOptions options;
  options.per_process_memory_fraction = 0.5;
  options.reject_without_retry = true;
  const ReplaySummary summary =
      SummarizeReplay(Parsed("a 0 600000000 0\n"), {.options = options, .device_bytes = 1_GiB, .fraction = 1.0});
  EXPECT_EQ(summary.ooms, 1u);
  EXPECT_EQ(summary.stats.num_ooms, 0u);
}

TEST(ReplayTest, FractionOfTheConfigurationWins) {
  AllocatorOptions options;
  options.per_process_memory_fraction = 0.1;
  const Trace trace = Parsed("a 0 600000000 0\n");
  EXPECT_EQ(SummarizeReplay(trace, {.options = options, .device_bytes = 1_GiB}).ooms, 1u);
  EXPECT_EQ(SummarizeReplay(trace, {.options = options, .device_bytes = 1_GiB, .fraction = 0.9}).ooms, 0u);
}

TEST(ReplayTest, MeasuringAnEmptyTraceTakesNoTime) {
  EXPECT_EQ(MeasureReplay(Trace(), {}), 0);
  EXPECT_GT(MeasureReplay(Parsed("e\n"), {}), 0);
}

}  // namespace
}  // namespace vrambroker
