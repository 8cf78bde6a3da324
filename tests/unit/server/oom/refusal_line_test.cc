// SPDX-License-Identifier: Apache-2.0
#include "server/oom/refusal_line.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>

#include "allocator/base/bytes.h"
#include "server/oom/oom_advice.h"

namespace vrambroker {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

// Returns a report with every part that a report may name, and with scopes named `scope`.
OomReport Named(OomCause cause, const std::string& scope) {
  OomReport report;
  report.cause = cause;
  report.requested_bytes = report.block_bytes = report.segment_bytes = 30_MiB;
  report.limit_bytes = 40_MiB;
  report.reserved_bytes = 24_MiB;
  report.allocated_bytes = 9_MiB;
  report.capacity_bytes = 100_MiB;
  report.available_bytes = 76_MiB;
  report.idle_elsewhere_bytes = 3_MiB;
  report.names_others = report.knows_holes = true;
  report.refusal = 7;
  report.pool_free_bytes = 15_MiB;
  const PinningBlock block{.address = 0xabc, .bytes = 3_MiB, .held_seconds = 125, .scope = scope};
  report.holes = {.bytes = 15_MiB, .count = 5, .segments = 3};
  report.holes.most_bytes.assign(Holes::kMaxSegments, {.address = 0xa00,
                                                       .bytes = 8_MiB,
                                                       .hole_bytes = 5_MiB,
                                                       .largest_hole_bytes = 4_MiB,
                                                       .pinning_blocks = 3,
                                                       .longest_held = {Holes::kMaxBlocks, block}});
  report.scope = scope;
  report.scopes.assign(
      ScopeUse::kMaxInReport,
      {.scope = scope, .allocated_bytes = 9_MiB, .bytes_at_peak = 10_MiB, .blocks = 3, .pinned_hole_bytes = 15_MiB});
  return report;
}

TEST(RefusalLineTest, SaysAllThatTheErrorSays) {
  for (const OomCause cause : kOomCauses) {
    const OomReport report = Named(cause, "forward/layer3");
    const std::string line = RefusalLine(SessionId{3}, "train", report).text();
    EXPECT_THAT(line, HasSubstr("refused cause="));
    EXPECT_THAT(line, HasSubstr(" session=3 name=train "));
    EXPECT_THAT(line, HasSubstr(" unused_elsewhere=3145728 "));
    EXPECT_THAT(line, HasSubstr(" refusal=7 why=\"" + Explanation(report) + "\""));
    EXPECT_THAT(line, HasSubstr(" advice=\"" + Advice(report) + "\""));
    EXPECT_THAT(line,
                HasSubstr(" pinned=\"segment a00: 5.00 MiB of 8.00 MiB in holes, the largest 4.00 MiB; 3 blocks in "
                          "use, held longest: 3.00 MiB at abc for 125 s in forward/layer3, 3.00 MiB"));
    EXPECT_THAT(line, HasSubstr(" scope=forward/layer3 scopes=\"forward/layer3: 9.00 MiB in 3 blocks, 10.00 MiB at the "
                                "peak, pins holes of 15.00 MiB | "));
  }
}

TEST(RefusalLineTest, LeavesOutWhatThereIsNot) {
  const std::string line = RefusalLine(SessionId{3}, "train", OomReport()).text();
  for (const char* key : {" pinned=", " scope=", " scopes="}) EXPECT_THAT(line, Not(HasSubstr(key)));
  EXPECT_THAT(line, HasSubstr(" advice="));
}

// Clients may choose any name for a scope, and figures of any size.
TEST(RefusalLineTest, IsOneLineWithinABound) {
  for (const std::string& part : {std::string("s"), std::string("\\"), std::string("\""), std::string("\xe5\xb1\xa4"),
                                  std::string("a\nrefused cause=limit\n")}) {
    std::string scope;
    while (scope.size() < kMaxReportedScopeBytes) scope += part;
    scope.resize(kMaxReportedScopeBytes);
    for (const OomCause cause : kOomCauses) {
      OomReport report = Named(cause, scope);
      const uint64_t most = kMaxRequestBytes - 1;
      report.requested_bytes = report.block_bytes = report.segment_bytes = report.limit_bytes = most;
      report.reserved_bytes = report.allocated_bytes = report.capacity_bytes = report.available_bytes = most;
      report.holes.bytes = report.holes.count = report.holes.segments = report.pool_free_bytes = most;
      for (PinnedSegment& pinned : report.holes.most_bytes) {
        pinned.address = pinned.bytes = pinned.hole_bytes = pinned.largest_hole_bytes = pinned.pinning_blocks = most;
        for (PinningBlock& block : pinned.longest_held) block.address = block.bytes = block.held_seconds = most;
      }
      for (ScopeUse& use : report.scopes) {
        use.allocated_bytes = use.bytes_at_peak = use.blocks = use.pinned_hole_bytes = most;
      }
      const std::string line = RefusalLine(SessionId{~uint64_t{0}}, std::string(71, 'x'), report).text();
      EXPECT_LE(line.size(), kMaxRefusalLine) << line;
      EXPECT_EQ(std::count(line.begin(), line.end(), '\n'), 0) << line;
    }
  }
}

}  // namespace
}  // namespace vrambroker
