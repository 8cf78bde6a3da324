// SPDX-License-Identifier: Apache-2.0
#include "server/oom/out_of_memory.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <numeric>
#include <optional>
#include <ostream>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/cord.h"
#include "absl/strings/str_cat.h"
#include "allocator/base/bytes.h"
#include "server/oom/oom_advice.h"
#include "server/oom/oom_log.h"
#include "server/wire/convert.h"
#include "vrambroker/v1/types.pb.h"

namespace vrambroker {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

std::string Message(const absl::Status& status) {
  return std::string(status.message());
}

TEST(SegmentRefusedTest, CarriesItsCause) {
  for (const OomCause cause : kOomCauses) {
    const absl::Status status = SegmentRefused(cause, "no");
    EXPECT_TRUE(absl::IsResourceExhausted(status));
    EXPECT_EQ(Message(status), "no");
    EXPECT_EQ(SegmentRefusalCause(status), cause);
  }
}

TEST(SegmentRefusedTest, OtherStatusesHaveNoCause) {
  EXPECT_EQ(SegmentRefusalCause(absl::OkStatus()), std::nullopt);
  EXPECT_EQ(SegmentRefusalCause(absl::ResourceExhaustedError("too many blocks")), std::nullopt);
  EXPECT_EQ(SegmentRefusalCause(OutOfMemoryError(OomReport())), std::nullopt);
}

TEST(OomCauseTest, NamesDiffer) {
  std::set<std::string> names;
  for (const OomCause cause : kOomCauses) names.insert(OomCauseName(cause));
  EXPECT_EQ(names, (std::set<std::string>{"limit", "capacity", "fragmentation", "larger_than_device"}));
}

// ---- Cause and explanation ----

// The session has a limit of 420 MiB, 400 MiB reserved and 200 MiB in use. The device has 1000 MiB, 600 MiB of it left.
struct CauseCase {
  const char* name;
  OomCause refusal;
  uint64_t block_bytes;
  uint64_t segment_bytes;
  void (*change)(OomReport& report);
  OomCause cause;
  std::vector<std::string> says = {};
};

void PrintTo(const CauseCase& param, std::ostream* out) {
  *out << param.name;
}

OomReport HalfUsed(const CauseCase& param) {
  OomReport report;
  report.limit_bytes = 420_MiB;
  report.reserved_bytes = 400_MiB;
  report.allocated_bytes = 200_MiB;
  report.capacity_bytes = 1000_MiB;
  report.available_bytes = 600_MiB;
  report.pool_free_bytes = 200_MiB;
  report.largest_free_block_bytes = 4_MiB;
  report.holes = {.bytes = 200_MiB,
                  .count = 50,
                  .segments = 20,
                  .most_bytes = {{.address = 1,
                                  .bytes = 20_MiB,
                                  .hole_bytes = 12_MiB,
                                  .largest_hole_bytes = 4_MiB,
                                  .pinning_blocks = 2,
                                  .longest_held = {{.address = 2, .bytes = 4_MiB, .held_seconds = 125}}}}};
  report.knows_holes = true;
  report.names_others = true;
  param.change(report);
  report.requested_bytes = report.block_bytes = param.block_bytes;
  report.segment_bytes = param.segment_bytes;
  report.cause = CauseOf(report, param.refusal);
  return report;
}

class CauseTest : public ::testing::TestWithParam<CauseCase> {};

TEST_P(CauseTest, IsWhatTheFiguresSay) {
  const OomReport report = HalfUsed(GetParam());
  EXPECT_STREQ(OomCauseName(report.cause), OomCauseName(GetParam().cause));
  const std::string explanation = Explanation(report);
  for (const std::string& words : GetParam().says) EXPECT_THAT(explanation, HasSubstr(words));
  const absl::Status status = OutOfMemoryError(report);
  EXPECT_THAT(Message(status), HasSubstr(explanation));
  EXPECT_EQ(ToProto(report).explanation(), explanation);
}

void AsIs(OomReport&) {}
void AboveItsLimit(OomReport& report) {
  report.limit_bytes = 300_MiB;
}
void LimitedByTheDevice(OomReport& report) {
  report.limit_bytes = 1000_MiB;
  report.available_bytes = 20_MiB;
}
void KeptForOthers(OomReport& report) {
  LimitedByTheDevice(report);
  report.kept_free_bytes = 10_MiB;
}
// The limit is the device's capacity, and 600 MiB of both is left. The device keeps 50 MiB of the rest for guarantees
// of other sessions.
void KeptForOthersWithoutALimit(OomReport& report) {
  report.limit_bytes = 1000_MiB;
  report.kept_free_bytes = 50_MiB;
}
void LimitedByItsUser(OomReport& report) {
  report.limit_bytes = 1000_MiB;
  report.share_limit_bytes = 500_MiB;
  report.share_used_bytes = 490_MiB;
}

const CauseCase kCauses[] = {
    // 200 MiB is allocated: up to 220 MiB more fits the limit.
    {"LessThanWhatIsFree",
     OomCause::kLimit,
     199_MiB,
     200_MiB,
     AsIs,
     OomCause::kFragmentation,
     {"what is allocated and 199.00 MiB more would fit within the limit of 420.00 MiB", "needs a segment of 200.00 MiB",
      "only 20.00 MiB can still be reserved; 200.00 MiB is fragmented",
      "200.00 MiB is fragmented: 50 holes between used blocks, in 20 segments", "12.00 MiB of 20.00 MiB in holes",
      "pinned by 2 blocks, one of 4.00 MiB held for 2 min", "the largest free block is 4.00 MiB"}},
    {"MoreThanWhatIsFree", OomCause::kLimit, 201_MiB, 202_MiB, AsIs, OomCause::kFragmentation, {"201.00 MiB more"}},
    {"JustWithinTheLimit", OomCause::kLimit, 220_MiB, 220_MiB, AsIs, OomCause::kFragmentation},
    {"JustBeyondTheLimit",
     OomCause::kLimit,
     220_MiB + 512,
     222_MiB,
     AsIs,
     OomCause::kLimit,
     {"needs a segment of 222.00 MiB, but only 20.00 MiB of the limit is left"}},
    // The limit that refused the request has more room by now.
    {"TheSegmentWouldFitByNow",
     OomCause::kLimit,
     11_MiB,
     20_MiB,
     AsIs,
     OomCause::kLimit,
     {"which did not fit; by now 20.00 MiB of the limit is left"}},
    // The block of 3 MiB has room; the shared segment of 20 MiB for blocks of that size has no room. No block of the
    // pool is free.
    {"OnlyTheSegmentOfASmallBlockIsTooLarge",
     OomCause::kLimit,
     3_MiB,
     20_MiB,
     [](OomReport& report) {
       report.limit_bytes = 418_MiB;
       report.reserved_bytes = 402_MiB;
       report.allocated_bytes = 402_MiB - 512;
       report.holes = {.bytes = 512, .count = 1, .segments = 1};
       report.pool_free_bytes = 0;
     },
     OomCause::kLimit,
     {"needs a segment of 20.00 MiB, but only 16.00 MiB of the limit is left"}},
    {"ASmallBlockBesideHolesOfItsPool", OomCause::kLimit, 3_MiB, 20_MiB,
     [](OomReport& report) {
       report.limit_bytes = 418_MiB;
       report.pool_free_bytes = 4_MiB;
     },
     OomCause::kFragmentation},
    {"NoHoles",
     OomCause::kLimit,
     3_MiB,
     20_MiB,
     [](OomReport& report) { report.reserved_bytes = report.allocated_bytes = 402_MiB; },
     OomCause::kLimit,
     {"18.00 MiB"}},
    {"TheLimitCouldNeverHoldTheSegment", OomCause::kLimit, 2_MiB, 20_MiB,
     [](OomReport& report) {
       report.limit_bytes = 18_MiB;
       report.reserved_bytes = 4_MiB;
       report.allocated_bytes = 2_MiB;
     },
     OomCause::kLimit},
    {"JustWithinALoweredLimit",
     OomCause::kLimit,
     100_MiB,
     100_MiB,
     AboveItsLimit,
     OomCause::kFragmentation,
     {"only 0 B can still be reserved"}},
    {"JustBeyondALoweredLimit", OomCause::kLimit, 100_MiB + 512, 102_MiB, AboveItsLimit, OomCause::kLimit},

    {"JustWithinTheDevice",
     OomCause::kCapacity,
     220_MiB,
     220_MiB,
     LimitedByTheDevice,
     OomCause::kFragmentation,
     {"would fit within the 420.00 MiB that the device's capacity of 1000.00 MiB leaves this session",
      "only 20.00 MiB can still be reserved"}},
    {"JustBeyondTheDevice",
     OomCause::kCapacity,
     220_MiB + 512,
     222_MiB,
     LimitedByTheDevice,
     OomCause::kCapacity,
     {"20.00 MiB of the device's 1000.00 MiB is left"}},
    {"JustWithinWhatIsNotKept", OomCause::kCapacity, 210_MiB, 210_MiB, KeptForOthers, OomCause::kFragmentation},
    {"JustBeyondWhatIsNotKept",
     OomCause::kCapacity,
     210_MiB + 512,
     212_MiB,
     KeptForOthers,
     OomCause::kCapacity,
     {"10.00 MiB more is kept for other sessions' guarantees"}},
    // The reserved bytes and the segment exceed the limit. The excess decides only where the allocated bytes and the
    // block exceed the limit, too.
    {"JustBeyondTheDeviceAndBeyondTheLimitByHoles",
     OomCause::kLimit,
     750_MiB + 512,
     752_MiB,
     KeptForOthersWithoutALimit,
     OomCause::kCapacity,
     {"550.00 MiB of the device's 1000.00 MiB is left, and 50.00 MiB more is kept "
      "for other sessions' guarantees"}},
    {"JustWithinTheDeviceAndBeyondTheLimitByHoles", OomCause::kLimit, 750_MiB, 750_MiB, KeptForOthersWithoutALimit,
     OomCause::kFragmentation},
    {"JustWithinTheLimitAndBeyondTheDevice", OomCause::kLimit, 800_MiB, 800_MiB, KeptForOthersWithoutALimit,
     OomCause::kCapacity},
    {"JustBeyondTheLimitAndTheDevice",
     OomCause::kLimit,
     800_MiB + 512,
     802_MiB,
     KeptForOthersWithoutALimit,
     OomCause::kLimit,
     {"but only 600.00 MiB of the limit is left"}},
    {"JustWithinTheLimitAndBeyondTheUsersByHoles",
     OomCause::kLimit,
     220_MiB,
     220_MiB,
     [](OomReport& report) {
       report.share_limit_bytes = 500_MiB;
       report.share_used_bytes = 490_MiB;
     },
     OomCause::kLimit,
     {"this user's sessions already have 490.00 MiB of the 500.00 MiB that user_limit allows"}},
    {"BeyondTheUsersLimitOfWhichNothingIsUsed",
     OomCause::kLimit,
     220_MiB,
     220_MiB,
     [](OomReport& report) {
       LimitedByItsUser(report);
       report.share_limit_bytes = 200_MiB;
       report.share_used_bytes = report.reserved_bytes = report.allocated_bytes = 0;
     },
     OomCause::kLimit,
     {"but user_limit allows this user's sessions 200.00 MiB together"}},
    {"JustBeyondTheLimitAndTheUsersByHoles",
     OomCause::kLimit,
     220_MiB + 512,
     222_MiB,
     [](OomReport& report) {
       report.share_limit_bytes = 500_MiB;
       report.share_used_bytes = 490_MiB;
     },
     OomCause::kLimit,
     {"but only 20.00 MiB of the limit is left"}},
    // The segment fits the user's limit only without holes, and the device has too little room.
    {"WithinTheUsersLimitButForHolesAndBeyondTheDevice", OomCause::kCapacity, 205_MiB, 206_MiB,
     [](OomReport& report) {
       LimitedByItsUser(report);
       report.available_bytes = 4_MiB;
     },
     OomCause::kCapacity},
    // The session's own guarantee is part of the user's memory.
    {"JustWithinAGuaranteeOfTheUsers",
     OomCause::kLimit,
     300_MiB,
     300_MiB,
     [](OomReport& report) {
       LimitedByItsUser(report);
       report.guarantee_bytes = 490_MiB;
     },
     OomCause::kFragmentation,
     {"within the 500.00 MiB that user_limit, 500.00 MiB, leaves this session",
      "only 100.00 MiB can still be reserved"}},
    {"JustWithinTheUsersLimit",
     OomCause::kLimit,
     210_MiB,
     210_MiB,
     LimitedByItsUser,
     OomCause::kFragmentation,
     {"would fit within the 410.00 MiB that user_limit, 500.00 MiB, leaves this session",
      "only 10.00 MiB can still be reserved"}},
    {"JustBeyondTheUsersLimit",
     OomCause::kLimit,
     210_MiB + 512,
     212_MiB,
     LimitedByItsUser,
     OomCause::kLimit,
     {"this user's sessions already have 490.00 MiB of the 500.00 MiB that user_limit allows"}},
    {"TheUsersLimitWhileItWaitedForTheDevice", OomCause::kCapacity, 210_MiB + 512, 212_MiB, LimitedByItsUser,
     OomCause::kLimit},

    {"LargerThanTheDevice",
     OomCause::kLargerThanDevice,
     1001_MiB,
     1002_MiB,
     AsIs,
     OomCause::kLargerThanDevice,
     {"the device's capacity is 1000.00 MiB"}},
    {"LargerThanAnything", OomCause::kLargerThanDevice, ~uint64_t{0}, ~uint64_t{0}, AsIs, OomCause::kLargerThanDevice},
    // A client may report any figures of its own.
    {"MoreAllocatedThanReserved", OomCause::kLimit, ~uint64_t{0}, 30_MiB,
     [](OomReport& report) { report.allocated_bytes = ~uint64_t{0}; }, OomCause::kLimit},
    {"ABlockOfAnySize", OomCause::kLimit, ~uint64_t{0}, 30_MiB, AsIs, OomCause::kLimit},
    // The daemon knows how much of PyTorch's own cache is free, but not where.
    {"HolesOfAnotherAllocator",
     OomCause::kLimit,
     30_MiB,
     30_MiB,
     [](OomReport& report) { report.holes = {.bytes = 200_MiB}; },
     OomCause::kFragmentation,
     {"200.00 MiB is unused beside memory in use"}},
    // The session's segments are idle as a whole: no hole pins a segment.
    {"NoHolesBesideIdleSegments", OomCause::kLimit, 30_MiB, 30_MiB, [](OomReport& report) { report.holes = {}; },
     OomCause::kLimit},
    {"AClientThatKnowsOfNoHoles",
     OomCause::kLimit,
     30_MiB,
     30_MiB,
     [](OomReport& report) {
       report.holes = {};
       report.knows_holes = false;
     },
     OomCause::kFragmentation,
     {"200.00 MiB is unused beside memory in use"}},
    {"MoreHolesThanMemory",
     OomCause::kLimit,
     30_MiB,
     30_MiB,
     [](OomReport& report) { report.holes = {.bytes = ~uint64_t{0}}; },
     OomCause::kFragmentation,
     {"200.00 MiB is unused beside memory in use"}},
    {"HolesOfAnotherStream",
     OomCause::kLimit,
     30_MiB,
     30_MiB,
     [](OomReport& report) { report.pool_free_bytes = report.largest_free_block_bytes = 0; },
     OomCause::kFragmentation,
     {"in 20 segments, all of another stream or size than this request"}},
    {"HolesInPartOfAnotherStream",
     OomCause::kLimit,
     30_MiB,
     30_MiB,
     [](OomReport& report) { report.pool_free_bytes = 8_MiB; },
     OomCause::kFragmentation,
     {"in 20 segments, 8.00 MiB of it for this stream and size, and the largest free block is 4.00 MiB"}},
    {"OneHole",
     OomCause::kLimit,
     30_MiB,
     30_MiB,
     [](OomReport& report) {
       report.holes = {.bytes = 200_MiB,
                       .count = 1,
                       .segments = 1,
                       .most_bytes = {{.bytes = 400_MiB,
                                       .hole_bytes = 200_MiB,
                                       .pinning_blocks = 1,
                                       .longest_held = {{.bytes = 200_MiB, .held_seconds = 3 * 3600}}}}};
     },
     OomCause::kFragmentation,
     {"1 hole between used blocks, in 1 segment,", "pinned by 1 block of 200.00 MiB held for 3 h"}},
};

INSTANTIATE_TEST_SUITE_P(Cases, CauseTest, ::testing::ValuesIn(kCauses),
                         [](const auto& test) { return test.param.name; });

OomReport Sample(OomCause cause) {
  OomReport report;
  report.cause = cause;
  report.device = 1;
  report.requested_bytes = 3_MiB + 1;
  report.segment_bytes = 20_MiB;
  report.limit_bytes = 40_MiB;
  report.reserved_bytes = 22_MiB;
  report.allocated_bytes = 5_MiB;
  report.largest_free_block_bytes = 2_MiB;
  report.capacity_bytes = 100_MiB;
  report.available_bytes = 18_MiB;
  report.largest_holders = {{.client = "trainer", .reserved_bytes = 60_MiB, .allocated_bytes = 50_MiB},
                            {.client = "notebook", .reserved_bytes = 22_MiB, .allocated_bytes = 5_MiB}};
  report.guarantee_bytes = 10_MiB;
  report.inactive_split_bytes = 4_MiB;
  report.kept_free_bytes = 6_MiB;
  report.device_idle_bytes = 7_MiB;
  report.detached_bytes = 3_MiB;
  report.left_behind_bytes = 5_MiB;
  report.idle_elsewhere_bytes = 15_MiB;
  report.idle_holders = {{.client = "trainer", .idle_bytes = 9_MiB, .why = IdleWhy::kInPartUsed},
                         {.client = "server", .idle_bytes = 6_MiB, .why = IdleWhy::kWithinGuarantee}};
  report.waited_ms = 250;
  report.names_others = true;
  report.block_bytes = 3_MiB + 512;
  report.knows_holes = true;
  report.pool_free_bytes = 3_MiB;
  report.holes = {.bytes = 4_MiB,
                  .count = 3,
                  .segments = 2,
                  .most_bytes = {{.address = 11,
                                  .bytes = 20_MiB,
                                  .hole_bytes = 3_MiB,
                                  .largest_hole_bytes = 2_MiB,
                                  .pinning_blocks = 5,
                                  .longest_held = {{.address = 12, .bytes = 1_MiB, .held_seconds = 13}}}}};
  return report;
}

v1::OutOfMemory Payload(const absl::Status& status) {
  v1::OutOfMemory proto;
  const absl::optional<absl::Cord> payload = status.GetPayload("type.googleapis.com/vrambroker.v1.OutOfMemory");
  EXPECT_TRUE(payload.has_value());
  EXPECT_TRUE(payload.has_value() && proto.ParseFromString(std::string(*payload)));
  return proto;
}

TEST(OutOfMemoryErrorTest, CarriesEveryFigure) {
  const absl::Status status = OutOfMemoryError(Sample(OomCause::kLimit));
  EXPECT_TRUE(absl::IsResourceExhausted(status));
  const v1::OutOfMemory proto = Payload(status);
  EXPECT_EQ(proto.cause(), v1::OutOfMemory::CAUSE_LIMIT);
  EXPECT_EQ(proto.device(), 1u);
  EXPECT_EQ(proto.requested_bytes(), 3_MiB + 1);
  EXPECT_EQ(proto.segment_bytes(), 20_MiB);
  EXPECT_EQ(proto.limit_bytes(), 40_MiB);
  EXPECT_EQ(proto.reserved_bytes(), 22_MiB);
  EXPECT_EQ(proto.allocated_bytes(), 5_MiB);
  EXPECT_EQ(proto.idle_bytes(), 17_MiB);
  EXPECT_EQ(proto.largest_free_block_bytes(), 2_MiB);
  EXPECT_EQ(proto.device_capacity_bytes(), 100_MiB);
  EXPECT_EQ(proto.device_available_bytes(), 18_MiB);
  ASSERT_EQ(proto.largest_holders_size(), 2);
  EXPECT_EQ(proto.largest_holders(0).client(), "trainer");
  EXPECT_EQ(proto.largest_holders(0).reserved_bytes(), 60_MiB);
  EXPECT_EQ(proto.largest_holders(0).allocated_bytes(), 50_MiB);
  EXPECT_EQ(proto.largest_holders(1).client(), "notebook");
  EXPECT_NE(proto.advice(), "");
  EXPECT_EQ(proto.guarantee_bytes(), 10_MiB);
  EXPECT_EQ(proto.inactive_split_bytes(), 4_MiB);
  EXPECT_EQ(proto.device_kept_free_bytes(), 6_MiB);
  EXPECT_EQ(proto.device_idle_bytes(), 7_MiB);
  EXPECT_EQ(proto.device_quarantined_bytes(), 8_MiB) << "detached, and quarantined";
  EXPECT_EQ(proto.idle_elsewhere_bytes(), 15_MiB);
  ASSERT_EQ(proto.idle_holders_size(), 2);
  EXPECT_EQ(proto.idle_holders(0).client(), "trainer");
  EXPECT_EQ(proto.idle_holders(0).idle_bytes(), 9_MiB);
  EXPECT_EQ(proto.idle_holders(0).why(), v1::OutOfMemory::IdleHolder::WHY_IN_PART_USED);
  EXPECT_EQ(proto.idle_holders(1).why(), v1::OutOfMemory::IdleHolder::WHY_WITHIN_GUARANTEE);
  EXPECT_EQ(proto.waited_ms(), 250u);
  EXPECT_EQ(proto.block_bytes(), 3_MiB + 512);
  EXPECT_EQ(proto.room_bytes(), 12_MiB) << "18 MiB of the device, less 6 that are kept";
  EXPECT_EQ(proto.holes().hole_bytes(), 4_MiB);
  EXPECT_EQ(proto.holes().holes(), 3u);
  EXPECT_EQ(proto.holes().segments(), 2u);
  ASSERT_EQ(proto.holes().most_bytes_size(), 1);
  EXPECT_EQ(proto.holes().most_bytes(0).address(), 11u);
  EXPECT_EQ(proto.holes().most_bytes(0).segment_bytes(), 20_MiB);
  EXPECT_EQ(proto.holes().most_bytes(0).hole_bytes(), 3_MiB);
  EXPECT_EQ(proto.holes().most_bytes(0).largest_hole_bytes(), 2_MiB);
  EXPECT_EQ(proto.holes().most_bytes(0).pinning_blocks(), 5u);
  ASSERT_EQ(proto.holes().most_bytes(0).longest_held_size(), 1);
  EXPECT_EQ(proto.holes().most_bytes(0).longest_held(0).address(), 12u);
  EXPECT_EQ(proto.holes().most_bytes(0).longest_held(0).block_bytes(), 1_MiB);
  EXPECT_EQ(proto.holes().most_bytes(0).longest_held(0).held_seconds(), 13u);
}

TEST(OutOfMemoryErrorTest, EachReasonHasItsCode) {
  using IdleHolder = v1::OutOfMemory::IdleHolder;
  const std::vector<std::pair<IdleWhy, IdleHolder::Why>> reasons = {
      {IdleWhy::kWithinGuarantee, IdleHolder::WHY_WITHIN_GUARANTEE},
      {IdleWhy::kInPartUsed, IdleHolder::WHY_IN_PART_USED},
      {IdleWhy::kDidNotAnswer, IdleHolder::WHY_DID_NOT_ANSWER},
      {IdleWhy::kDisconnected, IdleHolder::WHY_DISCONNECTED},
      {IdleWhy::kNotAsked, IdleHolder::WHY_NOT_ASKED},
      {IdleWhy::kKept, IdleHolder::WHY_KEPT}};
  EXPECT_EQ(reasons.size(), kIdleWhys.size());
  for (const auto& [why, code] : reasons) {
    OomReport report;
    report.idle_holders = {{.client = "a", .idle_bytes = 1, .why = why}};
    EXPECT_EQ(ToProto(report).idle_holders(0).why(), code);
  }
}

// Returns a report with the most names, the longest names and the largest figures. Names of scopes repeat `scope_name`.
OomReport Largest(OomCause cause, absl::string_view scope_name = "s") {
  const std::string name = std::string(63, 'x') + "-1234567";
  const uint64_t bytes = uint64_t{1} << 59;
  OomReport report = Sample(cause);
  report.requested_bytes = report.segment_bytes = report.limit_bytes = report.reserved_bytes = bytes;
  report.allocated_bytes = report.largest_free_block_bytes = report.capacity_bytes = bytes;
  report.available_bytes = report.guarantee_bytes = report.inactive_split_bytes = bytes - 1;
  report.kept_free_bytes = report.device_idle_bytes = bytes - 1;
  report.idle_elsewhere_bytes = report.waited_ms = bytes;
  report.block_bytes = report.share_limit_bytes = report.share_used_bytes = bytes;
  std::string names;
  while (names.size() < kMaxReportedScopeBytes) absl::StrAppend(&names, scope_name);
  const std::string scope = CleanScopeText(names, kMaxReportedScopeBytes);
  const PinningBlock block{.address = bytes, .bytes = bytes, .held_seconds = bytes, .scope = scope};
  report.holes = {.bytes = bytes, .count = bytes, .segments = bytes};
  report.holes.most_bytes.assign(Holes::kMaxSegments, {.address = bytes,
                                                       .bytes = bytes,
                                                       .hole_bytes = bytes,
                                                       .largest_hole_bytes = bytes,
                                                       .pinning_blocks = bytes,
                                                       .longest_held = {Holes::kMaxBlocks, block}});
  report.scope = scope;
  report.scopes.assign(
      ScopeUse::kMaxInReport,
      {.scope = scope, .allocated_bytes = bytes, .bytes_at_peak = bytes, .blocks = bytes, .pinned_hole_bytes = bytes});
  report.largest_holders.assign(kMaxHolders, {.client = name, .reserved_bytes = bytes, .allocated_bytes = bytes});
  report.idle_holders.assign(kMaxIdleHolders, {.client = name, .idle_bytes = bytes, .why = IdleWhy::kNotAsked});
  return report;
}

// Returns the size of a message on gRPC's wire: gRPC percent-encodes '%' and all but printable ASCII, three bytes for a
// character.
size_t BytesOnTheWire(absl::string_view message) {
  return std::accumulate(message.begin(), message.end(), size_t{0},
                         [](size_t bytes, char c) { return bytes + (c < 0x20 || c > 0x7E || c == '%' ? 3 : 1); });
}

// Returns the size of a status's two metadata entries. HTTP/2 counts the key and 32 bytes for each entry; base64 takes
// 4 bytes for 3.
size_t MetadataBytes(const absl::Status& refusal) {
  const grpc::Status status = ToGrpc(refusal);
  return BytesOnTheWire(status.error_message()) + (status.error_details().size() + 2) / 3 * 4 +
         std::string("grpc-message").size() + std::string("grpc-status-details-bin").size() + 2 * 32;
}

// Scopes may have names in any language.
constexpr const char* kScopeNames[] = {
    "s", "%", "\"", "\\", " ", "\xc3\xa4", "\xe5\xb1\xa4", "\xf0\x9f\x92\xa5", "100% \"\xe5\xb1\xa4\""};

TEST(OutOfMemoryErrorTest, StaysBelowTheMetadataOfGrpc) {
  for (const OomCause cause : kOomCauses) {
    for (const char* name : kScopeNames) {
      const OomReport report = Largest(cause, name);
      const absl::Status status = OutOfMemoryError(report);
      EXPECT_LE(MetadataBytes(status), 7u * 1024) << status;
      EXPECT_GE(RefusalMetadataBytes(status.message(), Payload(status).ByteSizeLong()), MetadataBytes(status));
      EXPECT_LE(Explanation(report).size(), kMaxExplanation);
    }
  }
}

// Calls `visit` with a report for each explanation and advice, with figures of `bytes`.
void ForEachText(uint64_t bytes, const char* scope_name, const std::function<void(const OomReport&)>& visit) {
  for (const OomCause cause : kOomCauses) {
    for (unsigned choice = 0; choice < 512; ++choice) {
      const auto chosen = [&](int bit) { return (choice >> bit & 1) != 0; };
      OomReport report = Largest(cause, scope_name);
      report.requested_bytes = report.segment_bytes = report.block_bytes = report.capacity_bytes = bytes;
      report.largest_free_block_bytes = report.pool_free_bytes = report.guarantee_bytes = bytes;
      report.device_idle_bytes = report.idle_elsewhere_bytes = bytes;
      report.limit_bytes = chosen(0) ? 2 * bytes : bytes;
      report.reserved_bytes = report.inactive_split_bytes = bytes - 1;
      report.allocated_bytes = bytes - 2;
      report.available_bytes = chosen(1) ? bytes : 0;
      report.kept_free_bytes = chosen(2) ? bytes : 1;
      const uint64_t quarantined = chosen(3) && chosen(8) ? (bytes + 1) / 2 : bytes;
      report.detached_bytes = chosen(3) ? quarantined : 0;
      report.left_behind_bytes = chosen(8) ? quarantined : 0;
      report.outside_bytes = chosen(4) ? bytes : 0;
      report.share_limit_bytes = chosen(5) ? bytes - 1 : 0;
      report.share_used_bytes = chosen(6) ? bytes - 2 : bytes / 2;
      report.is_recorded = chosen(7);
      report.refusal = 1'000'000'000;
      report.waited_ms = 86'400'000;
      report.names_others = true;
      for (OomReport::Holder& holder : report.largest_holders) holder.reserved_bytes = holder.allocated_bytes = bytes;
      for (OomReport::IdleHolder& holder : report.idle_holders) holder.idle_bytes = bytes;
      const uint64_t blocks = bytes / 512;
      for (ScopeUse& use : report.scopes) {
        use.allocated_bytes = use.bytes_at_peak = use.pinned_hole_bytes = bytes;
        use.blocks = blocks;
      }
      report.holes.bytes = bytes;
      report.holes.count = report.holes.segments = blocks;
      for (PinnedSegment& segment : report.holes.most_bytes) {
        segment.address = uint64_t{1} << 47;
        segment.bytes = segment.hole_bytes = segment.largest_hole_bytes = bytes;
        segment.pinning_blocks = blocks;
        for (PinningBlock& block : segment.longest_held) {
          block = {.address = uint64_t{1} << 47, .bytes = bytes, .held_seconds = 10'000'000, .scope = block.scope};
        }
      }
      visit(report);
    }
  }
}

TEST(OutOfMemoryErrorTest, NoTextMakesItTooLarge) {
  for (const char* name : kScopeNames) {
    ForEachText(kMaxRequestBytes - 1, name, [](const OomReport& report) {
      const absl::Status status = OutOfMemoryError(report);
      ASSERT_LE(MetadataBytes(status), 7u * 1024) << status;
      ASSERT_LE(Explanation(report).size(), kMaxExplanation) << status;
      // The message keeps its subject.
      const v1::OutOfMemory proto = Payload(status);
      ASSERT_THAT(Message(status), HasSubstr(proto.explanation()));
      ASSERT_EQ(proto.explanation(), Explanation(report));
      ASSERT_EQ(proto.scopes_size(), 3);
      ASSERT_EQ(proto.largest_holders_size(), static_cast<int>(kMaxHolders));
      ASSERT_GE(proto.holes().most_bytes(0).longest_held_size(), 1);
    });
  }
}

// The figures of a GPU leave no part of a refusal out, whatever the names of scopes and the number of names.
TEST(OutOfMemoryErrorTest, ARefusalOfARealDeviceIsWhole) {
  for (const char* name : kScopeNames) {
    ForEachText(80_GiB, name, [](const OomReport& report) {
      const absl::Status status = OutOfMemoryError(report);
      ASSERT_EQ(Payload(status).SerializeAsString(), ToProto(report).SerializeAsString()) << status;
    });
  }
}

TEST(OutOfMemoryErrorTest, AFullLogFitsInOneAnswer) {
  v1::ListOutOfMemoryResponse response;
  for (size_t i = 0; i < OomLog::kMaxEvents; ++i) {
    OomEvent event;
    event.time = std::chrono::system_clock::now();
    event.session = SessionId{~uint64_t{0}};
    event.client = std::string(63, 'x') + "-1234567";
    event.uid = ~uid_t{0};
    event.report = Largest(OomCause::kCapacity);
    *response.add_events() = ToProto(event, RefusalRecordings());
  }
  EXPECT_LE(response.ByteSizeLong(), 3u << 20);  // gRPC's clients take 4 MiB
}

TEST(OutOfMemoryErrorTest, MessageNamesWhatWasKeptIdleAndWaitedFor) {
  const std::string message = Message(OutOfMemoryError(Sample(OomCause::kCapacity)));
  EXPECT_THAT(message, HasSubstr("and 6.00 MiB more is kept for other sessions' guarantees"));
  EXPECT_THAT(message, HasSubstr("unused in other sessions 15.00 MiB"));
  EXPECT_THAT(message, HasSubstr("waited 250 ms"));
  const std::string bare = Message(OutOfMemoryError(OomReport()));
  EXPECT_THAT(bare, Not(HasSubstr("kept for")));
  EXPECT_THAT(bare, Not(HasSubstr("idle in")));
  EXPECT_THAT(bare, Not(HasSubstr("waited")));
}

TEST(OutOfMemoryErrorTest, EachCauseHasItsCodeAndAdvice) {
  const std::vector<std::pair<OomCause, v1::OutOfMemory::Cause>> causes = {
      {OomCause::kLimit, v1::OutOfMemory::CAUSE_LIMIT},
      {OomCause::kCapacity, v1::OutOfMemory::CAUSE_CAPACITY},
      {OomCause::kFragmentation, v1::OutOfMemory::CAUSE_FRAGMENTATION},
      {OomCause::kLargerThanDevice, v1::OutOfMemory::CAUSE_LARGER_THAN_DEVICE}};
  std::set<std::string> advice;
  for (const auto& [cause, code] : causes) {
    const absl::Status status = OutOfMemoryError(Sample(cause));
    EXPECT_EQ(Payload(status).cause(), code);
    EXPECT_THAT(Message(status), HasSubstr(OomCauseName(cause)));
    EXPECT_THAT(Message(status), HasSubstr(Payload(status).advice()));
    advice.insert(Payload(status).advice());
  }
  EXPECT_EQ(advice.size(), 4u);
}

TEST(OutOfMemoryErrorTest, MessageNamesWhatDecides) {
  EXPECT_THAT(Message(OutOfMemoryError(Sample(OomCause::kLimit))), HasSubstr("segment of 20.00 MiB"));
  EXPECT_THAT(Message(OutOfMemoryError(Sample(OomCause::kLimit))), HasSubstr("limit 40.00 MiB"));
  EXPECT_THAT(Message(OutOfMemoryError(Sample(OomCause::kLimit))), HasSubstr("3145729 B (3.00 MiB) requested"));
  EXPECT_THAT(Message(OutOfMemoryError(Sample(OomCause::kCapacity))), HasSubstr("only 12.00 MiB of"));
  EXPECT_THAT(Message(OutOfMemoryError(Sample(OomCause::kFragmentation))), HasSubstr("largest free block is 2.00 MiB"));
  EXPECT_THAT(Message(OutOfMemoryError(Sample(OomCause::kLargerThanDevice))), HasSubstr("capacity is 100.00 MiB"));
}

TEST(OutOfMemoryErrorTest, FiguresOfDifferentMomentsDoNotWrapAround) {
  OomReport report = Sample(OomCause::kLimit);
  report.allocated_bytes = report.reserved_bytes + 512;
  EXPECT_EQ(Payload(OutOfMemoryError(report)).idle_bytes(), 0u);
}

}  // namespace
}  // namespace vrambroker
