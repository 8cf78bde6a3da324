// SPDX-License-Identifier: Apache-2.0
//
// Programs with their own allocators over whole segments: the daemon's view of the programs' use, and the return of
// idle memory.
#include <gtest/gtest.h>

#include <filesystem>
#include <limits>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "allocator/base/bytes.h"
#include "tests/support/daemon_test.h"
#include "tests/support/raw_client.h"

namespace vrambroker::testing_support {
namespace {

class WholeSegmentsTest : public DaemonTest {
 protected:
  void SetUp() override { ASSERT_OK(StartDaemon()); }

  v1::SessionDevice Listed(const std::string& name) { return ListedDevice(dir(), name); }
  // Leases `count` segments of 20 MiB.
  static absl::StatusOr<std::vector<void*>> Lease(Client& client, int count) {
    std::vector<void*> segments;
    for (int i = 0; i < count; ++i) {
      const absl::StatusOr<void*> segment = client.LeaseSegment(20_MiB);
      if (!segment.ok()) return segment.status();
      segments.push_back(*segment);
    }
    return segments;
  }
};

TEST_F(WholeSegmentsTest, TheDaemonShowsWhatTheProgramMakesOfThem) {
  ASSERT_OK_AND_ASSIGN(Client client, Connect("program"));
  ASSERT_OK_AND_ASSIGN(const std::vector<void*> segments, Lease(client, 4));
  WaitFor([&] { return Listed("program").stats().allocated_bytes().all().current() == 80_MiB; });
  EXPECT_EQ(Listed("program").idle_bytes(), 0u);
  EXPECT_OK(client.ReportSegmentUse(
      {.allocated_bytes = 30_MiB, .requested_bytes = 29_MiB, .inactive_split_bytes = 8_MiB, .idle_bytes = 40_MiB}));
  WaitFor([&] { return Listed("program").idle_bytes() == 40_MiB; });
  EXPECT_EQ(Listed("program").stats().allocated_bytes().all().current(), 30_MiB);
  // A returned segment counts as idle, and a leased segment as used, until the next report.
  EXPECT_OK(client.ReturnSegment(segments[0]));
  EXPECT_OK(client.LeaseSegment(2_MiB).status());
  ASSERT_OK_AND_ASSIGN(const MemoryStats stats, client.GetMemoryStats());
  EXPECT_EQ(stats.reserved_bytes.all.current, 62_MiB);
  EXPECT_EQ(stats.allocated_bytes.all.current, 32_MiB);
  EXPECT_EQ(stats.requested_bytes.all.current, 31_MiB);
  EXPECT_EQ(stats.active_bytes.all.current, 34_MiB);
  EXPECT_EQ(stats.inactive_split_bytes.all.current, 8_MiB);
  stats.ForEach([](const char* name, const PoolStat& stat) {
    EXPECT_EQ(stat.all.current, stat.all.allocated - stat.all.freed) << name;
    EXPECT_GE(stat.all.peak, stat.all.current) << name;
  });
  WaitFor([&] { return Listed("program").idle_bytes() == 20_MiB; });
}

TEST_F(WholeSegmentsTest, ThePeakOfWhatIsUsedIsTheProgramsOwn) {
  ASSERT_OK_AND_ASSIGN(Client client, Connect("program"));
  ASSERT_OK_AND_ASSIGN(const std::vector<void*> segments, Lease(client, 4));
  const auto peak_after = [&](const SegmentUse& use) {
    EXPECT_OK(client.ReportSegmentUse(use));
    const MemoryStats stats = client.GetMemoryStats().value_or(MemoryStats());
    EXPECT_EQ(stats.reserved_bytes.all.peak, 80_MiB);
    stats.ForEach([](const char* name, const PoolStat& stat) { EXPECT_GE(stat.all.peak, stat.all.current) << name; });
    return stats.allocated_bytes.all.peak;
  };
  EXPECT_EQ(peak_after({.allocated_bytes = 30_MiB, .requested_bytes = 20_MiB, .idle_bytes = 20_MiB}), 30_MiB);
  EXPECT_EQ(peak_after({.allocated_bytes = 10_MiB, .requested_bytes = 10_MiB, .idle_bytes = 60_MiB}), 30_MiB);
  EXPECT_EQ(peak_after({.allocated_bytes = 10_MiB, .allocated_bytes_peak = 50_MiB}), 50_MiB) << "between two reports";
  ASSERT_OK_AND_ASSIGN(const MemoryStats stats, client.GetMemoryStats());
  EXPECT_EQ(stats.requested_bytes.all.peak, 20_MiB);
  EXPECT_EQ(stats.active_bytes.all.peak, 80_MiB);
  EXPECT_OK(client.ResetPeakStats());
  EXPECT_EQ(peak_after({.allocated_bytes = 12_MiB, .allocated_bytes_peak = 50_MiB}), 12_MiB) << "it was before";
  EXPECT_EQ(peak_after({.allocated_bytes = 12_MiB, .allocated_bytes_peak = 55_MiB}), 55_MiB);
  EXPECT_EQ(peak_after({.allocated_bytes_peak = std::numeric_limits<uint64_t>::max()}), 80_MiB);
}

// A program's use of whole segments is not recorded, and vramctl says so at once.
TEST_F(WholeSegmentsTest, ThereIsNothingToRecord) {
  ASSERT_OK_AND_ASSIGN(Client client, Connect("program"));
  ASSERT_OK_AND_ASSIGN(const std::vector<void*> segments, Lease(client, 3));
  const std::string file = absl::StrCat(MakeTempDir(), "/program.pickle");
  for (const std::vector<std::string>& command : std::vector<std::vector<std::string>>{
           {"trace", "program", "-o", file, "--until-oom"}, {"diagnose", "program"}}) {
    std::vector<std::string> arguments = command;
    arguments.insert(arguments.begin(), VramctlProgram());
    arguments.push_back(absl::StrCat("--socket-dir=", dir()));
    const RunResult result = RunProgram(arguments);
    EXPECT_EQ(result.exit_code, 1) << result.out;
    EXPECT_TRUE(absl::StrContains(result.err,
                                  "program leases whole segments: the blocks are cut by an allocator of the "
                                  "application's own"))
        << result.err;
  }
  EXPECT_FALSE(std::filesystem::exists(file));
  // A program that also allocates blocks has a recording of the blocks.
  EXPECT_OK(client.Allocate(1_MiB).status());
  const RunResult mixed =
      RunProgram({VramctlProgram(), "diagnose", "program", absl::StrCat("--socket-dir=", dir()), "--for=torch-2.6"});
  EXPECT_EQ(mixed.exit_code, 0) << mixed.err;
  EXPECT_FALSE(absl::StrContains(mixed.out, "not sure")) << "no setting is about whole segments";
}

// The map shows the peak of GetMemoryStats().
TEST_F(WholeSegmentsTest, WhatWasHeldAtThePeakIsNotLost) {
  ASSERT_OK_AND_ASSIGN(Client client, Connect("program"));
  ASSERT_OK_AND_ASSIGN(const std::vector<void*> segments, Lease(client, 3));
  ASSERT_OK(client.ReturnSegment(segments[0]));
  const auto none = [&] {
    const RunResult map = RunProgram({VramctlProgram(), "map", "program", absl::StrCat("--socket-dir=", dir())});
    EXPECT_EQ(map.exit_code, 0) << map.err;
    return map.out;
  };
  const MemoryScope scope("forward");  // scopes exist from now on
  EXPECT_TRUE(absl::StrContains(none(), "40.00 MiB  60.00 MiB       2         0 B  (none)")) << none();
  ASSERT_OK_AND_ASSIGN(const Buffer block, client.Allocate(30_MiB));
  EXPECT_TRUE(absl::StrContains(none(), "40.00 MiB  60.00 MiB       2         0 B  (none)")) << none();
  EXPECT_TRUE(absl::StrContains(none(), "30.00 MiB  30.00 MiB       1         0 B  forward")) << none();
}

TEST_F(WholeSegmentsTest, WhatCannotBeIsNotBelieved) {
  ASSERT_OK_AND_ASSIGN(Client client, Connect("program"));
  ASSERT_OK(Lease(client, 2).status());
  constexpr uint64_t kMost = std::numeric_limits<uint64_t>::max();
  EXPECT_OK(client.ReportSegmentUse(
      {.allocated_bytes = kMost, .requested_bytes = kMost, .inactive_split_bytes = kMost, .idle_bytes = 10_MiB}));
  ASSERT_OK(Lease(client, 1).status());
  ASSERT_OK_AND_ASSIGN(const MemoryStats stats, client.GetMemoryStats());
  EXPECT_EQ(stats.reserved_bytes.all.current, 60_MiB);
  EXPECT_LE(stats.allocated_bytes.all.current, stats.active_bytes.all.current);
  EXPECT_EQ(stats.active_bytes.all.current + stats.inactive_split_bytes.all.current, 50_MiB);
  EXPECT_STATUS(client.ReportSegmentUse({}, 9), absl::StatusCode::kNotFound, "no device 9");
}

TEST_F(WholeSegmentsTest, IdleSegmentsGoToWhoNeedsThem) {
  ASSERT_OK_AND_ASSIGN(Client holder, Connect("holder"));
  ASSERT_OK_AND_ASSIGN(std::vector<void*> segments, Lease(holder, 12));  // 240 of 256 MiB
  ASSERT_OK(holder.ReportSegmentUse({.idle_bytes = 240_MiB}));
  ASSERT_TRUE(WaitFor([&] { return Listed("holder").idle_bytes() == 240_MiB; })) << "the daemon goes by what it knows";
  ASSERT_OK(holder.ServeTrims(true));
  uint64_t asked = 0;
  std::thread giver([&] {
    // Returns as much as requested, without ending the trim: the daemon knows when enough came back.
    const absl::StatusOr<TrimRequest> trim = holder.WaitForTrim(kPatience);
    ASSERT_OK(trim);
    asked = trim->bytes;
    for (uint64_t returned = 0; returned < trim->bytes; returned += 20_MiB) {
      EXPECT_OK(holder.ReturnSegment(segments.back()));
      segments.pop_back();
    }
  });
  ASSERT_OK_AND_ASSIGN(Client taker, Connect("taker"));
  EXPECT_OK(taker.LeaseSegment(100_MiB).status());
  giver.join();
  EXPECT_EQ(asked, 84_MiB);
  EXPECT_EQ(segments.size(), 7u);
}

TEST_F(WholeSegmentsTest, AnOperatorSeesAtOnceWhatTheProgramGivesBack) {
  ASSERT_OK_AND_ASSIGN(Client program, Connect("program"));
  ASSERT_OK_AND_ASSIGN(const std::vector<void*> segments, Lease(program, 4));
  ASSERT_OK(program.ServeTrims(true));
  // The client has just reported its figures, and reports by itself only about a second later.
  ASSERT_TRUE(WaitFor([&] { return Listed("program").stats().num_device_alloc() == 4; }));
  std::thread giver([&] {
    const absl::StatusOr<TrimRequest> trim = program.WaitForTrim(kPatience);
    ASSERT_OK(trim);
    for (size_t i = 0; i < 2; ++i) EXPECT_OK(program.ReturnSegment(segments[i]));
    EXPECT_OK(program.EndTrim(trim->number));
  });
  absl::StatusOr<RawClient> raw = RawClient::Connect(dir());
  const absl::StatusOr<uint64_t> trimmed = raw.ok() ? raw->TrimSession(Ref("program")) : raw.status();
  const v1::SessionDevice after = Listed("program");
  giver.join();
  EXPECT_EQ(trimmed.value_or(0), 40_MiB) << trimmed.status();
  EXPECT_EQ(after.reserved_bytes(), 40_MiB);
  EXPECT_EQ(after.stats().num_device_free(), 2u);
}

TEST_F(WholeSegmentsTest, NobodyWaitsForAProgramThatDoesNothing) {
  ASSERT_OK(StartDaemon({.config = "client_timeout: '2s' reclaim_timeout: '500ms'"}));
  ASSERT_OK_AND_ASSIGN(Client holder, Connect("holder"));
  ASSERT_OK(Lease(holder, 12).status());
  ASSERT_OK(holder.ReportSegmentUse({.idle_bytes = 240_MiB}));
  ASSERT_OK(holder.ServeTrims(true));
  ASSERT_OK_AND_ASSIGN(RawClient raw, RawClient::Connect(dir()));
  // The library answers the trim instead of the program before the daemon stops waiting. The answer may be late on a
  // busy machine: the test then trims again.
  const auto trim = [&] {
    absl::StatusOr<uint64_t> released;
    WaitFor([&] { return !absl::IsDeadlineExceeded((released = raw.TrimSession(Ref("holder"))).status()); });
    return released;
  };
  ASSERT_OK_AND_ASSIGN(const uint64_t trimmed, trim());
  EXPECT_EQ(trimmed, 0u);
  ASSERT_OK_AND_ASSIGN(Client taker, Connect("taker"));
  EXPECT_STATUS(taker.LeaseSegment(100_MiB), absl::StatusCode::kResourceExhausted, "out of memory (capacity)");
  EXPECT_OK(taker.LeaseSegment(16_MiB).status());
  // A program that has stopped serving trims delays no trim either.
  ASSERT_OK(holder.ServeTrims(false));
  EXPECT_STATUS(holder.WaitForTrim(kPatience), absl::StatusCode::kCancelled, "");
  EXPECT_OK(trim());
}

TEST_F(WholeSegmentsTest, WhatIsFreeNowIsHadWithoutAskingAnybody) {
  ASSERT_OK_AND_ASSIGN(Client holder, Connect("holder"));
  ASSERT_OK(Lease(holder, 12).status());
  ASSERT_OK(holder.ReportSegmentUse({.idle_bytes = 240_MiB}));
  ASSERT_OK(holder.ServeTrims(true));
  ClientOptions options;
  options.socket_dir = dir();
  options.wait = absl::Hours(1);
  options.call_timeout = options.connect_timeout = kPatience;
  ASSERT_OK_AND_ASSIGN(Client taker, Client::Connect(options));
  EXPECT_TRUE(absl::IsResourceExhausted(taker.TryLeaseSegment(100_MiB).status()));
  EXPECT_STATUS(holder.WaitForTrim(absl::ZeroDuration()), absl::StatusCode::kDeadlineExceeded, "");
  ASSERT_OK_AND_ASSIGN(const MemoryStats stats, taker.GetMemoryStats());
  EXPECT_EQ(stats.num_ooms, 0u);
  EXPECT_OK(taker.TryLeaseSegment(16_MiB).status());
}

TEST_F(WholeSegmentsTest, ARemoteSessionHasNone) {
  ClientOptions options;
  options.socket_dir = dir();
  options.placement = Placement::kRemote;
  ASSERT_OK_AND_ASSIGN(Client client, Client::Connect(options));
  EXPECT_STATUS(client.ReportSegmentUse({}), absl::StatusCode::kFailedPrecondition, "");
  EXPECT_STATUS(client.TryLeaseSegment(1), absl::StatusCode::kFailedPrecondition, "");
  EXPECT_STATUS(client.ServeTrims(true), absl::StatusCode::kFailedPrecondition, "");
  EXPECT_STATUS(client.WaitForTrim(kPatience), absl::StatusCode::kFailedPrecondition, "");
  EXPECT_STATUS(client.EndTrim(1), absl::StatusCode::kFailedPrecondition, "");
}

}  // namespace
}  // namespace vrambroker::testing_support
