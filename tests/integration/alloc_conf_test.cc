// SPDX-License-Identifier: Apache-2.0
//
// PyTorch's allocator settings, streams, statistics and snapshots, through the daemon.
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <array>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "allocator/base/bytes.h"
#include "tests/support/buffers.h"
#include "tests/support/daemon_test.h"
#include "tests/support/paths.h"
#include "tests/support/raw_client.h"

namespace vrambroker::testing_support {
namespace {

using Json = nlohmann::json;
using absl::StatusCode;
using absl::StrContains;

// A request size whose block size shows the rounding of requests.
constexpr uint64_t kRequest = 1'200'000;
constexpr uint64_t kPlainBlock = 1'200'128;
constexpr uint64_t kQuarterBlock = 1'310'720;  // roundup_power2_divisions:4 applies

constexpr char kCudaVariable[] = "PYTORCH_CUDA_ALLOC_CONF";
constexpr char kHipVariable[] = "PYTORCH_HIP_ALLOC_CONF";
constexpr char kUnifiedVariable[] = "PYTORCH_ALLOC_CONF";

class AllocConfTest : public DaemonTest {
 protected:
  // Clears the variables, so that the clients of this process get only the settings of each test.
  AllocConfTest() {
    for (const char* variable : {kCudaVariable, kHipVariable, kUnifiedVariable}) unsetenv(variable);
  }

  absl::StatusOr<Client> ConnectWith(const std::string& name, const std::string& alloc_conf,
                                     std::optional<Limit> limit = std::nullopt) {
    ClientOptions options;
    options.socket_dir = dir();
    options.name = name;
    options.limit = limit;
    options.alloc_conf = alloc_conf;
    options.call_timeout = kPatience;
    options.connect_timeout = kPatience;
    return Client::Connect(options);
  }
  static uint64_t BlockBytes(Client& client) {
    const absl::StatusOr<Buffer> buffer = client.Allocate(kRequest);
    EXPECT_OK(buffer);
    return buffer.ok() ? buffer->block_bytes() : 0;
  }
  static OutOfMemory Refusal(Client& client, uint64_t bytes, uint64_t stream = 0) {
    const absl::StatusOr<Buffer> buffer = client.Allocate(bytes, 0, stream);
    EXPECT_EQ(buffer.status().code(), StatusCode::kResourceExhausted) << buffer.status();
    const std::optional<OutOfMemory> oom = GetOutOfMemory(buffer.status());
    EXPECT_TRUE(oom.has_value()) << "no detail in " << buffer.status();
    return oom.value_or(OutOfMemory());
  }

  RunResult Ctl(Arguments arguments, const Environment& environment = {}) const {
    arguments.insert(arguments.begin(), VramctlProgram());
    arguments.push_back("--socket_dir=" + dir());
    return RunProgram(arguments, environment);
  }
  // Runs `vramctl hold`. Returns the JSON on standard output, and the text on standard error.
  std::pair<Json, std::string> Hold(const Environment& environment, const Arguments& flags = {}) const {
    Arguments arguments = {VramctlProgram(), "hold", absl::StrCat(kRequest), "--format=json", "--socket_dir=" + dir()};
    arguments.insert(arguments.end(), flags.begin(), flags.end());
    const absl::StatusOr<std::unique_ptr<ChildProcess>> hold = ChildProcess::Start(arguments, environment);
    EXPECT_OK(hold);
    if (!hold.ok()) return {};
    const std::string line = (*hold)->ReadLine().value_or("null");
    return {Json::parse(line, nullptr, false), (*hold)->ErrorText()};
  }
};

// ---- Sources of settings ----

TEST_F(AllocConfTest, TheDaemonsSettingsApplyToWhoBringsNone) {
  for (const DaemonOptions& options : {DaemonOptions{.config = "alloc_conf: \"roundup_power2_divisions:4\""},
                                       DaemonOptions{.flags = {"--alloc_conf=roundup_power2_divisions:4"}},
                                       DaemonOptions{.config = "alloc_conf: \"max_split_size_mb:64\"",
                                       .flags = {"--alloc_conf=roundup_power2_divisions:4"}}}) {
    ASSERT_OK(StartDaemon(options));
    ASSERT_OK_AND_ASSIGN(Client none, Connect("none"));
    EXPECT_EQ(BlockBytes(none), kQuarterBlock);
    ASSERT_OK_AND_ASSIGN(const MemoryStats stats, none.GetMemoryStats());
    EXPECT_EQ(stats.max_split_bytes, ~uint64_t{0}) << "a flag replaces the field as a whole";
    ASSERT_OK_AND_ASSIGN(Client empty, ConnectWith("empty", ""));
    EXPECT_EQ(BlockBytes(empty), kQuarterBlock);
    ASSERT_OK_AND_ASSIGN(Client own, ConnectWith("own", "max_split_size_mb:32"));
    EXPECT_EQ(BlockBytes(own), kPlainBlock) << "its own settings replace the daemon's as a whole";
    ASSERT_OK_AND_ASSIGN(const MemoryStats own_stats, own.GetMemoryStats());
    EXPECT_EQ(own_stats.max_split_bytes, 32_MiB);
  }
}

TEST_F(AllocConfTest, TheEnvironmentIsRead) {
  ASSERT_OK(StartDaemon({.config = "alloc_conf: \"roundup_power2_divisions:2\""}));
  constexpr uint64_t kHalfBlock = 1'572'864;
  const std::string four = "roundup_power2_divisions:4";
  const std::string plain = "roundup_power2_divisions:1";
  struct Case {
    Environment environment;
    Arguments flags;
    uint64_t block_bytes;
    std::string warning;
  };
  for (const Case& c : std::vector<Case>{
           {{}, {}, kHalfBlock, ""},
           {{{kCudaVariable, four}}, {}, kQuarterBlock, ""},
           {{{kHipVariable, four}}, {}, kQuarterBlock, ""},
           {{{kUnifiedVariable, four}}, {}, kQuarterBlock, ""},
           {{{kUnifiedVariable, four}, {kCudaVariable, four}}, {}, kQuarterBlock, ""},
           {{{kUnifiedVariable, four}, {kCudaVariable, plain}}, {}, kPlainBlock, "PYTORCH_ALLOC_CONF is ignored"},
           {{{kUnifiedVariable, plain}, {kCudaVariable, four}}, {}, kQuarterBlock, "PYTORCH_ALLOC_CONF is ignored"},
           {{{kUnifiedVariable, four}, {kCudaVariable, ""}}, {}, kHalfBlock, "PYTORCH_ALLOC_CONF is ignored"},
           {{{kUnifiedVariable, four}}, {"--alloc-conf=" + plain}, kPlainBlock, ""},
           {{{kUnifiedVariable, "backend:cudaMallocAsync,roundup_power2_divisions:4"}},
            {},
            kQuarterBlock,
            "PYTORCH_ALLOC_CONF: backend:cudaMallocAsync has no effect"}}) {
    std::string trace;
    for (const auto& [name, value] : c.environment) absl::StrAppend(&trace, name, "='", value, "' ");
    SCOPED_TRACE(trace);
    const auto [json, err] = Hold(c.environment, c.flags);
    ASSERT_TRUE(json.is_object()) << err;
    EXPECT_EQ(json["block_bytes"], c.block_bytes);
    if (c.warning.empty()) {
      EXPECT_EQ(err, "");
    } else {
      EXPECT_TRUE(StrContains(err, c.warning)) << err;
    }
  }
}

TEST_F(AllocConfTest, WarningsReachTheClientAndTheLog) {
  ASSERT_OK(StartDaemon({.config = "alloc_conf: \"pinned_use_background_threads:True\""}));
  EXPECT_TRUE(StrContains(daemon_->log(), "alloc_conf: pinned_use_background_threads has no effect")) << daemon_->log();
  ASSERT_OK_AND_ASSIGN(Client quiet, Connect("quiet"));
  EXPECT_TRUE(quiet.warnings().empty()) << "the daemon's settings are not the client's matter";
  ASSERT_OK_AND_ASSIGN(Client client, ConnectWith("c", "expandable_segments:True,max_split_size_mb:64"));
  ASSERT_EQ(client.warnings().size(), 1u);
  EXPECT_TRUE(StrContains(client.warnings()[0], "alloc_conf: expandable_segments:True has no effect"));
}

TEST_F(AllocConfTest, BadSettingsAreRefusedAndNothingIsLost) {
  ASSERT_OK(StartDaemon());
  ASSERT_OK_AND_ASSIGN(Client other, Connect("other"));
  ASSERT_OK_AND_ASSIGN(Buffer held, other.Allocate(1_MiB));
  Fill(held, 5);

  for (const auto& [text, part] : std::vector<std::pair<std::string, std::string>>{
           {"max_split_size_mb:19", "alloc_conf: max_split_size_mb: \"19\" is not a whole number from 20"},
           {"max_split_size_mb", "alloc_conf: max_split_size_mb: \"\""},
           {"roundup_power2_divisions:3", "alloc_conf: roundup_power2_divisions: \"3\""},
           {"max_split:64", "alloc_conf: unknown key \"max_split\""},
           {"per_process_memory_fraction:1.5", "alloc_conf: per_process_memory_fraction: \"1.5\""},
           {"max_split_size_mb:\xff", "alloc_conf: "},
           {std::string(4097, ','), "alloc_conf: 4097 characters; at most 4096"},
           // A message with the whole text would break the connection.
           {absl::StrCat(std::string(4000, 'x'), ":1"), "alloc_conf: unknown key"},
           {absl::StrCat("max_split_size_mb:", std::string(4000, 'x')), "alloc_conf: max_split_size_mb: "}}) {
    EXPECT_STATUS(ConnectWith("bad", text), StatusCode::kInvalidArgument, part);
  }
  for (const char* name : {kCudaVariable, kHipVariable, kUnifiedVariable}) {
    const RunResult hold = Ctl({"hold", "1MiB"}, {{name, "max_split_size_mb:5"}});
    EXPECT_EQ(hold.exit_code, 1);
    EXPECT_EQ(hold.out, "");
    EXPECT_TRUE(StrContains(hold.err, absl::StrCat(name, ": max_split_size_mb: \"5\" is not a whole number from 20")))
        << hold.err;
  }
  const RunResult flag = Ctl({"hold", "1MiB", "--alloc-conf", "max_split_size_mb:5"});
  EXPECT_EQ(flag.exit_code, 2);
  EXPECT_TRUE(StrContains(flag.err, "--alloc-conf: max_split_size_mb: \"5\"")) << flag.err;

  EXPECT_OK(other.status());
  EXPECT_TRUE(Holds(held, 5));
  EXPECT_OK(other.Allocate(1_MiB));
  ASSERT_OK_AND_ASSIGN(RawClient raw, RawClient::Connect(dir()));
  ASSERT_OK_AND_ASSIGN(const v1::ListSessionsResponse sessions, raw.ListSessions());
  EXPECT_EQ(sessions.sessions_size(), 1) << "no session is left of the refused ones";
}

TEST(DaemonAllocConfTest, BadConfigurationsAreRefused) {
  const std::string file = MakeTempDir() + "/c.textproto";
  std::ofstream(file) << "device: \"host\"\n  alloc_conf: \"garbage_collection_threshold:2\"\nrecord_events: 1000001\n";
  const RunResult config = RunProgram({DaemonProgram(), "--config=" + file, "--check_config"});
  EXPECT_EQ(config.exit_code, 2);
  EXPECT_TRUE(StrContains(config.err, file + ":2:3: alloc_conf: garbage_collection_threshold: \"2\"")) << config.err;
  EXPECT_TRUE(StrContains(config.err, file + ":3:1: record_events: 1000001 is above 1000000")) << config.err;
  const RunResult flag = RunProgram({DaemonProgram(), "--alloc_conf=foo:1", "--check_config"});
  EXPECT_EQ(flag.exit_code, 2);
  EXPECT_TRUE(StrContains(flag.err, "--alloc-conf: alloc_conf: unknown key \"foo\"")) << flag.err;
  const RunResult warned = RunProgram({DaemonProgram(), "--alloc_conf=expandable_segments:True", "--check_config"});
  EXPECT_EQ(warned.exit_code, 0);
  EXPECT_TRUE(StrContains(warned.err, "alloc_conf: expandable_segments:True has no effect")) << warned.err;
}

// ---- Effects of settings ----

TEST_F(AllocConfTest, AFractionIsALimit) {
  ASSERT_OK(StartDaemon({.capacity = "256MiB"}));
  ASSERT_OK_AND_ASSIGN(Client client, ConnectWith("c", "per_process_memory_fraction:0.25"));
  EXPECT_EQ(client.limit_bytes(), 64_MiB);
  const OutOfMemory oom = Refusal(client, 64_MiB + 1);
  EXPECT_EQ(oom.cause, OutOfMemory::Cause::kLimit);
  EXPECT_EQ(oom.limit_bytes, 64_MiB);
  EXPECT_EQ(oom.device_capacity_bytes, 256_MiB);
  EXPECT_EQ(Refusal(client, 300_MiB).cause, OutOfMemory::Cause::kLargerThanDevice);
  EXPECT_OK(client.Allocate(64_MiB));
  ASSERT_OK_AND_ASSIGN(Client lower, ConnectWith("lower", "per_process_memory_fraction:0.25", Limit(10_MiB)));
  EXPECT_EQ(lower.limit_bytes(), 10_MiB);
  ASSERT_EQ(Ctl({"limit", "c", "0.5"}).exit_code, 0);
  EXPECT_OK(client.Allocate(100_MiB)) << "an operator may raise it";
}

TEST_F(AllocConfTest, RefusalsWithoutRetryAreTyped) {
  ASSERT_OK(StartDaemon({.capacity = "256MiB"}));
  ASSERT_OK_AND_ASSIGN(Client client, ConnectWith("c", "throw_on_cudamalloc_oom:True"));
  EXPECT_EQ(Refusal(client, 257_MiB).cause, OutOfMemory::Cause::kLargerThanDevice);
  { ASSERT_OK_AND_ASSIGN(const Buffer cached, client.Allocate(200_MiB)); }
  const OutOfMemory oom = Refusal(client, 210_MiB);
  EXPECT_EQ(oom.cause, OutOfMemory::Cause::kLimit);
  EXPECT_EQ(oom.reserved_bytes, 200_MiB) << "the cache was not emptied for it";
  ASSERT_OK_AND_ASSIGN(const MemoryStats stats, client.GetMemoryStats());
  EXPECT_EQ(stats.num_oom_rejections, 2u);
  EXPECT_EQ(stats.num_alloc_retries, 0u);
}

TEST_F(AllocConfTest, GarbageIsCollectedBelowALimit) {
  ASSERT_OK(StartDaemon({.capacity = "256MiB"}));
  for (const auto& [limit, freed, left] :
       std::vector<std::array<uint64_t, 3>>{{44_MiB, 1, 30_MiB}, {200_MiB, 0, 42_MiB}, {256_MiB, 0, 42_MiB}}) {
    SCOPED_TRACE(limit);
    ASSERT_OK_AND_ASSIGN(Client client, ConnectWith("c", "garbage_collection_threshold:0.5", Limit(limit)));
    for (const uint64_t bytes : {12_MiB, 14_MiB}) {
      ASSERT_OK_AND_ASSIGN(Buffer buffer, client.Allocate(bytes));
      ASSERT_OK(buffer.Reset());
    }
    ASSERT_OK_AND_ASSIGN(const Buffer buffer, client.Allocate(16_MiB));
    ASSERT_OK_AND_ASSIGN(const MemoryStats stats, client.GetMemoryStats());
    EXPECT_EQ(stats.num_device_free, freed);
    EXPECT_EQ(stats.num_alloc_retries, 0u);
    EXPECT_EQ(stats.reserved_bytes.all.current, left);
  }
}

TEST_F(AllocConfTest, StreamsDoNotShareFreedBlocks) {
  placement_ = Placement::kRemote;
  ASSERT_OK(StartDaemon());
  ASSERT_OK_AND_ASSIGN(Client client, Connect("c", Limit(4_MiB)));
  constexpr uint64_t kStreams[] = {0, 7, ~uint64_t{0}};
  std::map<uint64_t, uint64_t> segments;
  for (const uint64_t stream : {kStreams[1], kStreams[2]}) {
    ASSERT_OK_AND_ASSIGN(Buffer buffer, client.Allocate(1000, 0, stream));
    segments[stream] = buffer.segment_id();
    EXPECT_OK(buffer.Reset());
  }
  EXPECT_NE(segments[7], segments[~uint64_t{0}]);
  for (const auto& [stream, segment] : segments) {
    ASSERT_OK_AND_ASSIGN(const Buffer again, client.Allocate(1000, 0, stream));
    EXPECT_EQ(again.segment_id(), segment);
  }
  // The default stream needs a new segment. A free segment of another stream makes room.
  ASSERT_OK_AND_ASSIGN(const Buffer seven, client.Allocate(1000, 0, 7));
  ASSERT_OK_AND_ASSIGN(const Buffer zero, client.Allocate(1000));
  EXPECT_NE(zero.segment_id(), segments[7]);
  EXPECT_NE(zero.segment_id(), segments[~uint64_t{0}]);
  EXPECT_EQ(Refusal(client, 1000, 9).cause, OutOfMemory::Cause::kFragmentation)
      << "nearly all is free, of other streams";

  // A unary Allocate call keeps streams apart, too.
  ASSERT_OK_AND_ASSIGN(RawClient raw, RawClient::Connect(dir()));
  v1::AllocateRequest request;
  request.set_session_id(client.session_id());
  request.set_requested_bytes(1000);
  for (const auto& [stream, ok] : std::vector<std::pair<uint64_t, bool>>{{7, true}, {9, false}}) {
    request.set_stream(stream);
    grpc::ClientContext context;
    v1::AllocateResponse response;
    EXPECT_EQ(raw.broker().Allocate(&context, request, &response).ok(), ok) << stream;
    if (ok) {
      EXPECT_EQ(response.segment_id(), seven.segment_id());
    }
  }
}

// ---- Statistics ----

TEST_F(AllocConfTest, StatisticsAreComplete) {
  ASSERT_OK(StartDaemon());
  ASSERT_OK_AND_ASSIGN(Client client, ConnectWith("split", "max_split_size_mb:32"));
  ASSERT_OK_AND_ASSIGN(Buffer large, client.Allocate(40_MiB));
  const auto json = [&](Arguments arguments) {
    arguments.push_back("--format=json");
    return Json::parse(Ctl(arguments).out, nullptr, false);
  };
  const Json stats = json({"stats", "split"});
  EXPECT_EQ(stats["max_split_size"], 32_MiB);
  EXPECT_EQ(stats["oversize_allocations.current"], 1);
  EXPECT_EQ(stats["oversize_segments.allocated"], 1);
  for (const char* key : {"num_oom_rejections", "num_sync_all_streams", "oversize_allocations.freed",
                          "oversize_segments.peak", "num_device_alloc", "requested_bytes.large_pool.peak"}) {
    EXPECT_TRUE(stats.contains(key)) << key;
  }
  EXPECT_EQ(json({"stats"})["max_split_size"], 32_MiB) << "all sessions have the same";
  ASSERT_OK_AND_ASSIGN(const Client plain, Connect("plain"));
  EXPECT_EQ(json({"stats", "plain"})["max_split_size"], -1);
  EXPECT_EQ(json({"stats"})["max_split_size"], -1);
  EXPECT_TRUE(StrContains(Ctl({"stats", "plain"}).out, "\nmax_split_size -1\n"));
  EXPECT_TRUE(StrContains(Ctl({"summary", "split"}).out, "Oversize GPU segments"));

  EXPECT_OK(large.Reset());
  EXPECT_OK(client.EmptyCache());
  EXPECT_EQ(json({"stats", "split"})["num_sync_all_streams"], 1);
  ASSERT_OK(client.ResetPeakStats());
  ASSERT_OK_AND_ASSIGN(MemoryStats after, client.GetMemoryStats());
  EXPECT_EQ(after.allocated_bytes.all.peak, 0u);
  EXPECT_EQ(after.allocated_bytes.all.allocated, 40_MiB);
  EXPECT_EQ(after.num_device_alloc, 1u);
  ASSERT_OK(client.ResetStats());
  ASSERT_OK_AND_ASSIGN(after, client.GetMemoryStats());
  EXPECT_EQ(after.allocated_bytes.all.allocated, 0u);
  EXPECT_EQ(after.oversize_allocations.allocated, 0u);
  EXPECT_EQ(after.num_device_alloc, 0u);
}

// ---- Snapshots ----

class SnapshotTest : public AllocConfTest {
 protected:
  std::string File(const std::string& name) const { return absl::StrCat(folder_, "/", name); }
  static std::string Contents(const std::string& path) {
    std::stringstream text;
    text << std::ifstream(path).rdbuf();
    return text.str();
  }
  static void ExpectReadable(const std::string& path) {
    const RunResult check =
        RunProgram({"/usr/bin/env", "python3",
                    absl::StrCat(paths::kSourceDir, "/tests/integration/torch_snapshot_readable.py"), path});
    EXPECT_EQ(check.exit_code, 0) << check.out << check.err;
  }

  const std::string folder_ = MakeTempDir();
};

TEST_F(SnapshotTest, OfALiveSessionCanBeReadAndReplayed) {
  ASSERT_OK(StartDaemon({.config = "record_events: 0", .devices = 2}));
  ASSERT_OK_AND_ASSIGN(Client client, ConnectWith("trainer", "roundup_power2_divisions:4"));
  const RunResult record = Ctl({"record", "trainer", "1000"});
  EXPECT_EQ(record.exit_code, 0) << record.err;
  EXPECT_EQ(record.out, "trainer: keeps its last 1000 events on each device\n");
  ASSERT_OK_AND_ASSIGN(const Buffer a, client.Allocate(kRequest));
  ASSERT_OK_AND_ASSIGN(const Buffer b, client.Allocate(1000, 0, 3));
  ASSERT_OK_AND_ASSIGN(const Buffer c, client.Allocate(2000, 1));
  { ASSERT_OK_AND_ASSIGN(const Buffer freed, client.Allocate(5000)); }
  EXPECT_FALSE(client.Allocate(255_MiB).ok());

  const std::string pickle = File("trainer.pickle");
  const RunResult snapshot = Ctl({"snapshot", "trainer", "-o", pickle});
  EXPECT_EQ(snapshot.exit_code, 0) << snapshot.err;
  ExpectReadable(pickle);
  const RunResult replay = RunProgram({VramctlProgram(), "replay", pickle, "--format=json"});
  EXPECT_EQ(replay.exit_code, 0) << replay.err;
  const Json replayed = Json::parse(replay.out, nullptr, false);
  EXPECT_EQ(replayed["allocations"], 4) << "two that are held, a freed one, and the one that was refused";

  const std::string json_file = File("trainer.json");
  const RunResult as_json = Ctl({"snapshot", "trainer", "--output", json_file, "--format=json"});
  ASSERT_EQ(as_json.exit_code, 0) << as_json.err;
  const Json said = Json::parse(as_json.out, nullptr, false);
  EXPECT_EQ(said["session"], "trainer");
  EXPECT_EQ(said["file"], json_file);
  const Json tree = Json::parse(Contents(json_file), nullptr, false);
  ASSERT_TRUE(tree.is_object());
  EXPECT_EQ(tree["allocator_settings"]["PYTORCH_CUDA_ALLOC_CONF"], "roundup_power2_divisions:4");
  ASSERT_EQ(tree["device_traces"].size(), 2u);
  EXPECT_EQ(said["segments"], tree["segments"].size());
  std::map<std::string, int> actions;
  for (const Json& entry : tree["device_traces"][0]) ++actions[entry["action"].get<std::string>()];
  EXPECT_EQ(actions["alloc"], 3);
  EXPECT_EQ(actions["free_requested"], 1);
  EXPECT_EQ(actions["free_completed"], 1);
  EXPECT_EQ(actions["oom"], 1);
  EXPECT_EQ(actions["snapshot"], 3) << "and the daemon's, of the refusal";
  EXPECT_GE(actions["segment_alloc"], 2);
  EXPECT_GE(tree["device_traces"][1].size(), 2u) << "a segment and a block";
  bool found = false;
  for (const Json& segment : tree["segments"]) {
    if (segment["stream"] != 3) continue;
    found = true;
    EXPECT_EQ(segment["device"], 0);
    EXPECT_EQ(segment["segment_type"], "small");
    EXPECT_EQ(segment["blocks"][0]["requested_size"], 1000);
    EXPECT_EQ(segment["blocks"][0]["state"], "active_allocated");
    EXPECT_EQ(segment["blocks"][1]["state"], "inactive");
  }
  EXPECT_TRUE(found);

  const RunResult out = Ctl({"snapshot", "trainer", "-o", "-"});
  EXPECT_EQ(out.exit_code, 0) << out.err;
  EXPECT_EQ(out.err, "");
  EXPECT_EQ(Json::parse(out.out, nullptr, false)["segments"], tree["segments"]);
}

TEST_F(SnapshotTest, RecordingCanBeOnFromTheStart) {
  ASSERT_OK(StartDaemon({.config = "record_events: 3"}));
  ASSERT_OK_AND_ASSIGN(Client client, Connect("c"));
  ASSERT_OK_AND_ASSIGN(const Buffer a, client.Allocate(1000));
  const auto events = [&] {
    const RunResult snapshot = Ctl({"snapshot", "c", "-o", "-"});
    return Json::parse(snapshot.out, nullptr, false)["device_traces"][0].size();
  };
  EXPECT_EQ(events(), 3u) << "a segment, a block, a snapshot";
  ASSERT_OK_AND_ASSIGN(const Buffer b, client.Allocate(1000));
  EXPECT_EQ(events(), 3u) << "the last ones";
  ASSERT_EQ(Ctl({"record", "c", "0"}).exit_code, 0);
  EXPECT_EQ(events(), 0u);
}

TEST_F(SnapshotTest, LargeOnesComeInParts) {
  ASSERT_OK(StartDaemon({.config = "record_events: 0"}));
  ASSERT_OK_AND_ASSIGN(RawClient raw, RawClient::Connect(dir()));
  ASSERT_OK_AND_ASSIGN(Client client, Connect("c"));
  ASSERT_OK_AND_ASSIGN(std::vector<v1::GetSnapshotResponse> parts, raw.GetSnapshot(Ref("c"), 0));
  ASSERT_EQ(parts.size(), 1u) << "an empty heap has settings, too";
  EXPECT_EQ(parts[0].segments_size() + parts[0].events_size(), 0);

  ASSERT_OK(raw.SetRecording(Ref("c"), 1000000));
  constexpr int kBlocks = 5000;
  std::vector<Buffer> buffers;
  ASSERT_OK_AND_ASSIGN(buffers.emplace_back(), client.Allocate(3_MiB));
  for (int i = 0; i < kBlocks; ++i) {
    ASSERT_OK_AND_ASSIGN(buffers.emplace_back(), client.Allocate(512));
  }
  ASSERT_OK_AND_ASSIGN(parts, raw.GetSnapshot(Ref("c"), 0));
  EXPECT_EQ(parts.size(), 3u);
  std::map<uint64_t, uint64_t> ends;  // segment id -> end of the segment's last block
  std::map<uint64_t, int> pieces;
  int blocks = 0;
  int events = 0;
  for (const v1::GetSnapshotResponse& part : parts) {
    int items = part.events_size();
    for (const auto& segment : part.segments()) {
      items += segment.blocks_size();
      ++pieces[segment.id()];
      for (const auto& block : segment.blocks()) {
        EXPECT_EQ(block.offset_bytes(), ends[segment.id()]);
        ends[segment.id()] += block.block_bytes();
        if (block.state() == v1::GetSnapshotResponse::BLOCK_STATE_ALLOCATED) ++blocks;
      }
      EXPECT_LE(ends[segment.id()], segment.segment_bytes());
    }
    events += part.events_size();
    EXPECT_LE(items, 4096);
    EXPECT_LE(part.ByteSizeLong(), size_t{1} << 20);
  }
  EXPECT_EQ(blocks, kBlocks + 1);
  EXPECT_EQ(events, kBlocks + 1 + 3 + 1) << "blocks, segments, the snapshot";
  EXPECT_EQ(pieces.size(), 3u);
  EXPECT_EQ(pieces[buffers[1].segment_id()], 2) << "one segment goes over the end of a part";

  const RunResult snapshot = Ctl({"snapshot", "c", "-o", File("large.pickle")});
  EXPECT_TRUE(StrContains(snapshot.out, "c: wrote 3 segments, 5003 blocks and 5006 events to ")) << snapshot.out;
  ExpectReadable(File("large.pickle"));
}

TEST_F(SnapshotTest, FilesAreReplacedAsAWholeOrNotAtAll) {
  ASSERT_OK(StartDaemon());
  ASSERT_OK_AND_ASSIGN(const Client client, Connect("c"));
  const std::string file = File("c.json");
  std::ofstream(file) << std::string(100000, 'x');
  EXPECT_EQ(Ctl({"snapshot", "c", "-o", file}).exit_code, 0);
  EXPECT_TRUE(Json::parse(Contents(file), nullptr, false).is_object());

  const std::string before = Contents(file);
  EXPECT_EQ(Ctl({"snapshot", "nobody", "-o", file}).exit_code, 1);
  EXPECT_EQ(Contents(file), before);
  const RunResult folder = Ctl({"snapshot", "c", "-o", folder_});
  EXPECT_EQ(folder.exit_code, 2);
  EXPECT_TRUE(StrContains(folder.err, "is not a file")) << folder.err;
  EXPECT_EQ(Ctl({"snapshot", "c", "-o", "/dev/null"}).exit_code, 2);
  const RunResult nowhere = Ctl({"snapshot", "c", "-o", File("no/such/folder.pickle")});
  EXPECT_EQ(nowhere.exit_code, 1);
  EXPECT_TRUE(StrContains(nowhere.err, "no/such/folder.pickle")) << nowhere.err;
  size_t files = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator(folder_)) ++files;
  EXPECT_EQ(files, 1u) << "no temporary file is left";
}

TEST_F(SnapshotTest, WrongUse) {
  ASSERT_OK(StartDaemon());
  ASSERT_OK_AND_ASSIGN(const Client client, Connect("c"));
  for (const Arguments& arguments : std::vector<Arguments>{{"snapshot", "c"},
                                                           {"snapshot", "c", "-o"},
                                                           {"snapshot", "-o", "x"},
                                                           {"record", "c"},
                                                           {"record", "c", "many"},
                                                           {"record", "c", "-1"},
                                                           {"record", "c", "5000000000"}}) {
    const RunResult result = Ctl(arguments);
    EXPECT_EQ(result.exit_code, 2) << ::testing::PrintToString(arguments) << result.err;
  }
  EXPECT_EQ(Ctl({"record", "nobody", "5"}).exit_code, 1);
  const RunResult too_many = Ctl({"record", "c", "1000001"});
  EXPECT_EQ(too_many.exit_code, 1) << "the daemon refuses it";
  EXPECT_TRUE(StrContains(too_many.err, "max_events: 1000001 is above 1000000")) << too_many.err;
}

}  // namespace
}  // namespace vrambroker::testing_support
