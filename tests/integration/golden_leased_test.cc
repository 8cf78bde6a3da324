// SPDX-License-Identifier: Apache-2.0
//
// Recordings of PyTorch's allocator, through a client that leases its segments from a real daemon: every row.
#include <gtest/gtest.h>

#include <filesystem>
#include <map>
#include <set>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "allocator/replay/replay.h"
#include "allocator/replay/trace.h"
#include "tests/support/daemon_test.h"
#include "tests/support/paths.h"
#include "tests/support/raw_client.h"

namespace vrambroker::testing_support {
namespace {

// Streams of the host device are always done, so the host device cannot replay a trace with an unfinished stream. The
// unit tests replay such traces.
const std::set<std::string>& NeedUnfinishedStreams() {
  static const auto& names = *new std::set<std::string>{"record_basic", "record_empty_cache", "record_head_of_line",
                                                        "record_own_stream", "two_stream_overlap"};
  return names;
}

std::string PathOf(const std::string& file) {
  const std::string path = absl::StrCat(paths::kGoldenDir, "/", file);
  return std::filesystem::exists(path) ? path : path + ".gz";
}

std::string Read(const std::string& file) {
  const absl::StatusOr<std::string> text = ReadMaybeGzipped(PathOf(file));
  EXPECT_OK(text);
  return text.value_or("");
}

std::vector<std::string> TraceNames() {
  std::set<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(paths::kGoldenDir)) {
    const std::string name = entry.path().stem();
    if (entry.path().extension() == ".conf" && NeedUnfinishedStreams().count(name) == 0) names.insert(name);
  }
  return {names.begin(), names.end()};
}

// Performs the operations of a trace with a client.
class Player {
 public:
  Player(Client client, RawClient raw) : client_(std::move(client)), raw_(std::move(raw)) {}

  // Returns the result of `op`, and the place of an allocation.
  std::pair<Replay::Result, std::optional<PlacedBlock>> Do(const TraceOp& op) {
    using Kind = TraceOp::Kind;
    switch (op.kind) {
      case Kind::kAllocate:
        return Allocate(op);
      case Kind::kFree: {
        const auto it = buffers_.find(op.id);
        if (it == buffers_.end()) return {Replay::Result::kNothing, {}};
        buffers_.erase(it);
        break;
      }
      case Kind::kEmptyCache:
        EXPECT_OK(client_.EmptyCache());
        break;
      case Kind::kSetFraction: {
        v1::Limit limit;
        limit.set_fraction(op.fraction);
        const absl::StatusOr<v1::Session> session = raw_.SetLimit(Ref(client_.session_id()), limit);
        EXPECT_OK(session);
        EXPECT_TRUE(WaitFor([&] { return client_.limit_bytes() == session->devices(0).limit_bytes(); }));
        break;
      }
      case Kind::kResetPeaks:
        EXPECT_OK(client_.ResetPeakStats());
        break;
      case Kind::kRecordStream:
      case Kind::kSyncAll:
      case Kind::kSyncStream:
        break;
      case Kind::kTrim:
      case Kind::kGiveBack:
        ADD_FAILURE() << "no recorded trace has this";
        break;
    }
    return {Replay::Result::kOk, {}};
  }
  MemoryStats stats() { return client_.GetMemoryStats().value_or(MemoryStats()); }
  uint64_t ReservedByDaemon() { return raw_.GetSession(Ref(client_.session_id()))->devices(0).reserved_bytes(); }

 private:
  std::pair<Replay::Result, std::optional<PlacedBlock>> Allocate(const TraceOp& op) {
    const MemoryStats before = stats();
    absl::StatusOr<Buffer> buffer = client_.Allocate(op.bytes, 0, op.stream);
    if (!buffer.ok()) {
      EXPECT_TRUE(absl::IsResourceExhausted(buffer.status())) << buffer.status();
      return {Replay::Result::kOutOfMemory, {}};
    }
    const MemoryStats after = stats();
    if (after.num_device_alloc > before.num_device_alloc) {
      uint64_t bytes = after.reserved_bytes.all.current - before.reserved_bytes.all.current;
      if (after.num_device_free > before.num_device_free) bytes = SegmentBytes(buffer->segment_id());
      segments_[buffer->segment_id()] = {.segment = after.num_device_alloc - 1, .segment_bytes = bytes};
    }
    PlacedBlock placed = segments_.at(buffer->segment_id());
    placed.offset = buffer->offset_bytes();
    placed.block_bytes = buffer->block_bytes();
    buffers_[op.id] = *std::move(buffer);
    return {Replay::Result::kOk, placed};
  }
  // Reads the size of a segment from a snapshot.
  uint64_t SegmentBytes(uint64_t id) {
    const absl::StatusOr<std::vector<v1::GetSnapshotResponse>> parts = raw_.GetSnapshot(Ref(client_.session_id()), 0);
    EXPECT_OK(parts);
    for (const v1::GetSnapshotResponse& part : *parts) {
      for (const auto& segment : part.segments()) {
        if (segment.id() == id) return segment.segment_bytes();
      }
    }
    return 0;
  }

  Client client_;
  RawClient raw_;
  std::map<uint32_t, Buffer> buffers_;
  std::map<uint64_t, PlacedBlock> segments_;  // order and size of segments by id
};

class GoldenLeasedTest : public DaemonTest, public ::testing::WithParamInterface<std::string> {};

TEST_P(GoldenLeasedTest, EveryRowIsAsRecorded) {
  const std::string conf = Read(GetParam() + ".conf");
  ASSERT_OK_AND_ASSIGN(const ReplayConfig config, ParseReplayConf(conf));
  std::string name = GetParam();
  for (absl::string_view line : absl::StrSplit(conf, '\n')) {
    if (absl::ConsumePrefix(&line, "trace=")) name = std::string(line);
  }
  ASSERT_OK_AND_ASSIGN(const Trace trace, ReadTraceFile(PathOf(name + ".trace")));
  const std::string expected_text = Read(GetParam() + ".expected");
  const std::vector<absl::string_view> expected = absl::StrSplit(absl::StripSuffix(expected_text, "\n"), '\n');
  ASSERT_EQ(expected.size(), trace.ops.size() + 2);

  // The test touches no byte of the memory: the capacity may exceed the machine's memory.
  const uint64_t capacity = std::min(config.device_bytes, uint64_t{1} << 40);
  ASSERT_OK(StartDaemon({.capacity = absl::StrCat(capacity)}));
  ClientOptions options;
  options.socket_dir = dir();
  options.alloc_conf = FormatAllocConf(config.options);
  if (config.fraction.has_value()) options.limit = Limit(*config.fraction);
  options.call_timeout = kPatience;
  ASSERT_OK_AND_ASSIGN(Client client, Client::Connect(options));
  ASSERT_OK_AND_ASSIGN(RawClient raw, RawClient::Connect(dir()));
  Player player(std::move(client), std::move(raw));
  for (size_t i = 0; i < trace.ops.size(); ++i) {
    const auto [result, placed] = player.Do(trace.ops[i]);
    ASSERT_EQ(PerOpRow(i, trace.ops[i], result, placed, player.stats()), expected[i + 1]) << "columns: " << expected[0];
  }
  EXPECT_EQ(FinalLine(player.stats(), player.ReservedByDaemon()), expected.back());
}

TEST(GoldenLeasedFilesTest, AreAllThere) {
  EXPECT_EQ(TraceNames().size(), 39u) << "44 but those of unfinished streams";
}

INSTANTIATE_TEST_SUITE_P(Traces, GoldenLeasedTest, ::testing::ValuesIn(TraceNames()),
                         [](const auto& param) { return param.param; });

}  // namespace
}  // namespace vrambroker::testing_support
