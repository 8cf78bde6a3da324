// SPDX-License-Identifier: Apache-2.0
#include "server/oom/oom_advice.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "allocator/base/bytes.h"

namespace vrambroker {
namespace {

using ::testing::ElementsAre;
using ::testing::FieldsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using Asked = OtherSession::Asked;

// ---- Idle bytes that a request cannot get, and the reasons ----

struct IdleCase {
  const char* name;
  uint64_t reserved_bytes = 0;
  uint64_t guarantee_bytes = 0;
  uint64_t active_bytes = 0;
  uint64_t inactive_split_bytes = 0;
  bool is_connected = true;
  Asked asked = Asked::kNo;
  std::vector<std::pair<uint64_t, IdleWhy>> expected;  // most bytes first
};

class IdleTest : public ::testing::TestWithParam<IdleCase> {};

TEST_P(IdleTest, EachByteHasOneReason) {
  const IdleCase& param = GetParam();
  OtherSession other;
  other.client = "a";
  other.reserved_bytes = param.reserved_bytes;
  other.guarantee_bytes = param.guarantee_bytes;
  other.active_bytes = param.active_bytes;
  other.inactive_split_bytes = param.inactive_split_bytes;
  other.is_connected = param.is_connected;
  other.asked = param.asked;
  OomReport report;
  AddOthers({other}, &report);
  std::vector<std::pair<uint64_t, IdleWhy>> found;
  uint64_t sum = 0;
  for (const OomReport::IdleHolder& holder : report.idle_holders) {
    EXPECT_EQ(holder.client, "a");
    found.emplace_back(holder.idle_bytes, holder.why);
    sum += holder.idle_bytes;
  }
  EXPECT_EQ(found, param.expected);
  EXPECT_EQ(report.idle_elsewhere_bytes, sum);
  EXPECT_EQ(report.detached_bytes, param.is_connected ? 0 : param.reserved_bytes);
  EXPECT_EQ(report.left_behind_bytes, 0u) << "its process lives";
  EXPECT_TRUE(report.names_others);
}

const IdleCase kIdle[] = {
    {.name = "AllInUse", .reserved_bytes = 10_MiB, .active_bytes = 10_MiB, .expected = {}},
    // A client counts its own memory: the client's figures may be of another moment than the pool's figures.
    {.name = "MoreInUseThanReserved", .reserved_bytes = 10_MiB, .active_bytes = 11_MiB, .expected = {}},
    {.name = "NotAsked", .reserved_bytes = 10_MiB, .active_bytes = 4_MiB, .expected = {{6_MiB, IdleWhy::kNotAsked}}},
    {.name = "NoAnswer",
     .reserved_bytes = 10_MiB,
     .active_bytes = 4_MiB,
     .asked = Asked::kNoAnswer,
     .expected = {{6_MiB, IdleWhy::kDidNotAnswer}}},
    {.name = "GaveLess",
     .reserved_bytes = 10_MiB,
     .active_bytes = 4_MiB,
     .asked = Asked::kAnswered,
     .expected = {{6_MiB, IdleWhy::kKept}}},
    {.name = "InPartUsed",
     .reserved_bytes = 10_MiB,
     .active_bytes = 4_MiB,
     .inactive_split_bytes = 5_MiB,
     .expected = {{5_MiB, IdleWhy::kInPartUsed}, {1_MiB, IdleWhy::kNotAsked}}},
    {.name = "InPartUsedIsAtMostWhatIsIdle",
     .reserved_bytes = 10_MiB,
     .active_bytes = 4_MiB,
     .inactive_split_bytes = 9_MiB,
     .expected = {{6_MiB, IdleWhy::kInPartUsed}}},
    {.name = "AllWithinTheGuarantee",
     .reserved_bytes = 10_MiB,
     .guarantee_bytes = 10_MiB,
     .active_bytes = 4_MiB,
     .expected = {{6_MiB, IdleWhy::kWithinGuarantee}}},
    {.name = "TheGuaranteeIsLarger",
     .reserved_bytes = 10_MiB,
     .guarantee_bytes = 99_MiB,
     .active_bytes = 4_MiB,
     .expected = {{6_MiB, IdleWhy::kWithinGuarantee}}},
    // Two MiB may be taken; the guarantee keeps the next four for the session.
    {.name = "AcrossTheGuarantee",
     .reserved_bytes = 10_MiB,
     .guarantee_bytes = 8_MiB,
     .active_bytes = 4_MiB,
     .expected = {{4_MiB, IdleWhy::kWithinGuarantee}, {2_MiB, IdleWhy::kNotAsked}}},
    {.name = "TheGuaranteeIsInUse",
     .reserved_bytes = 10_MiB,
     .guarantee_bytes = 4_MiB,
     .active_bytes = 4_MiB,
     .expected = {{6_MiB, IdleWhy::kNotAsked}}},
    {.name = "Disconnected",
     .reserved_bytes = 10_MiB,
     .guarantee_bytes = 10_MiB,
     .active_bytes = 4_MiB,
     .inactive_split_bytes = 1_MiB,
     .is_connected = false,
     .expected = {{6_MiB, IdleWhy::kDisconnected}}},
};

INSTANTIATE_TEST_SUITE_P(Cases, IdleTest, ::testing::ValuesIn(kIdle), [](const auto& test) { return test.param.name; });

TEST(AddOthersTest, NamesThoseWithMostAndCountsAll) {
  std::vector<OtherSession> others;
  for (uint64_t i = 1; i <= 9; ++i) {
    others.push_back({.client = std::string(1, static_cast<char>('a' + i - 1)), .reserved_bytes = i * 2_MiB});
  }
  OomReport report;
  AddOthers(others, &report);
  EXPECT_EQ(report.idle_elsewhere_bytes, 90_MiB);
  EXPECT_THAT(report.idle_holders,
              ElementsAre(FieldsAre("i", 18_MiB, IdleWhy::kNotAsked),  //
                          FieldsAre("h", 16_MiB, IdleWhy::kNotAsked), FieldsAre("g", 14_MiB, IdleWhy::kNotAsked),
                          FieldsAre("f", 12_MiB, IdleWhy::kNotAsked), FieldsAre("e", 10_MiB, IdleWhy::kNotAsked)));
}

TEST(AddOthersTest, NobodyElse) {
  OomReport report;
  AddOthers({}, &report);
  EXPECT_EQ(report.idle_elsewhere_bytes, 0u);
  EXPECT_THAT(report.idle_holders, IsEmpty());
  EXPECT_TRUE(report.names_others);
}

// ---- Advice ----

// Returns the report of a session that uses 20 MiB and needs 30 MiB more. The device has 100 MiB, 10 MiB of it left;
// the trainer has the rest.
OomReport Needing30(OomCause cause) {
  OomReport report;
  report.cause = cause;
  report.requested_bytes = 30_MiB;
  report.segment_bytes = 30_MiB;
  report.limit_bytes = 100_MiB;
  report.reserved_bytes = report.allocated_bytes = 20_MiB;
  report.capacity_bytes = 100_MiB;
  report.available_bytes = 10_MiB;
  report.largest_holders = {{.client = "trainer", .reserved_bytes = 70_MiB, .allocated_bytes = 65_MiB}};
  report.names_others = true;
  report.knows_holes = true;
  report.holes = {.bytes = 10_MiB, .count = 2, .segments = 2};
  return report;
}

void Hold(OomReport& report, const std::string& client, uint64_t idle_bytes, IdleWhy why) {
  report.idle_elsewhere_bytes += idle_bytes;
  report.idle_holders.push_back({.client = client, .idle_bytes = idle_bytes, .why = why});
}

struct AdviceCase {
  const char* name;
  OomCause cause;
  void (*change)(OomReport& report);
  std::vector<std::string> says;
  std::vector<std::string> says_not{};
};

class AdviceTest : public ::testing::TestWithParam<AdviceCase> {};

TEST_P(AdviceTest, FitsCauseAndFigures) {
  OomReport report = Needing30(GetParam().cause);
  GetParam().change(report);
  const std::string advice = Advice(report);
  for (const std::string& words : GetParam().says) EXPECT_THAT(advice, HasSubstr(words));
  for (const std::string& words : GetParam().says_not) EXPECT_THAT(advice, Not(HasSubstr(words)));
  EXPECT_LE(advice.size(), 400u);
  EXPECT_EQ(advice.back(), '.');
  EXPECT_THAT(advice, Not(HasSubstr(". "))) << "one sentence";
  for (const char* setting : {"max_split_size_mb", "garbage_collection_threshold", "alloc_conf", "roundup"}) {
    EXPECT_THAT(advice, Not(HasSubstr(setting))) << "nobody has tried whether it would help";
  }
}

const AdviceCase kAdvice[] = {
    // Larger than the device: only a smaller request can help.
    {"TooLarge",
     OomCause::kLargerThanDevice,
     [](OomReport& r) { r.segment_bytes = r.requested_bytes = 101_MiB; },
     {"Ask for less at a time", "100.00 MiB", "however long it waits"}},
    {"Overflow",
     OomCause::kLargerThanDevice,
     [](OomReport& r) { r.requested_bytes = ~uint64_t{0} - 511; },
     {"how the size was computed", "negative"}},

    // Fragmentation: the place of the holes, and the amount that would suffice.
    {"FragmentationBelowTheLimit",
     OomCause::kFragmentation,
     [](OomReport& r) {
       r.limit_bytes = 40_MiB;
       r.available_bytes = 50_MiB;
     },
     {"Free the blocks that pin partly used segments (vramctl map",
      "raise the session's limit to 50MiB (vramctl limit)", "vramctl tune"}},
    {"FragmentationAboveALoweredLimit",
     OomCause::kFragmentation,
     [](OomReport& r) {
       r.limit_bytes = 40_MiB;
       r.reserved_bytes = 60_MiB;
       r.available_bytes = 50_MiB;
     },
     {"raise the session's limit to 90MiB"}},
    {"FragmentationBelowTwoBounds",
     OomCause::kFragmentation,
     [](OomReport& r) { r.limit_bytes = 40_MiB; },
     {"raise the session's limit to 50MiB (vramctl limit) and have other sessions give 20.00 MiB back"}},
    {"FragmentationAloneOnTheDevice",
     OomCause::kFragmentation,
     [](OomReport& r) { r.reserved_bytes = 90_MiB; },
     {"(vramctl map shows these), or look for settings"}},
    {"FragmentationOnADeviceThatCouldNeverHoldIt",
     OomCause::kFragmentation,
     [](OomReport& r) {
       r.reserved_bytes = 80_MiB;
       r.available_bytes = 20_MiB;
       r.kept_free_bytes = 15_MiB;
     },
     {"(vramctl map shows these), or look for settings"}},
    {"FragmentationBesideGuarantees",
     OomCause::kFragmentation,
     [](OomReport& r) {
       r.available_bytes = 50_MiB;
       r.kept_free_bytes = 25_MiB;
     },
     {"lower other sessions' guarantees, for which 25.00 MiB is kept free"}},
    {"FragmentationBesideDetached",
     OomCause::kFragmentation,
     [](OomReport& r) { r.detached_bytes = 20_MiB; },
     {"end the processes of sessions that disconnected or were ended, which still hold 20.00 MiB"}},
    {"FragmentationBesideLeftBehind",
     OomCause::kFragmentation,
     [](OomReport& r) { r.left_behind_bytes = 20_MiB; },
     {"or wait until 20.00 MiB of ended processes are free (vramctl quarantine names who has them open)"},
     {"end the processes"}},
    {"FragmentationBesideDetachedAndLeftBehind",
     OomCause::kFragmentation,
     [](OomReport& r) {
       r.detached_bytes = 10_MiB;
       r.left_behind_bytes = 10_MiB;
     },
     {"end processes of disconnected and ended sessions and wait for what ended processes left (vramctl "
      "quarantine)"}},
    {"FragmentationBesideTooLittleInQuarantine",
     OomCause::kFragmentation,
     [](OomReport& r) {
       r.detached_bytes = 10_MiB;
       r.left_behind_bytes = 10_MiB - 1;
     },
     {"have other sessions give 20.00 MiB back (vramctl sessions)"}},
    {"FragmentationBesideOthersAndLeftBehind",
     OomCause::kFragmentation,
     [](OomReport& r) {
       r.reserved_bytes = 70_MiB;
       r.left_behind_bytes = 15_MiB;
     },
     {"have other sessions give 5.00 MiB back and wait for what ended processes left (vramctl quarantine)"}},
    {"FragmentationOutsideTheBroker",
     OomCause::kFragmentation,
     [](OomReport& r) { r.outside_bytes = 60_MiB; },
     {"end programs outside vrambroker"}},
    {"FragmentationInPytorchsCache",
     OomCause::kFragmentation,
     [](OomReport& r) {
       r.holes = {.bytes = 9_MiB};
       r.limit_bytes = 40_MiB;
     },
     {"Free memory that keeps partly used segments", "torch.cuda.memory._dump_snapshot"}},
    {"FragmentationOnAFullDevice",
     OomCause::kFragmentation,
     [](OomReport& r) { r.kept_free_bytes = 3_MiB; },
     {"have other sessions give 23.00 MiB back (vramctl sessions)"}},
    {"FragmentationBelowTheUsersLimit",
     OomCause::kFragmentation,
     [](OomReport& r) {
       r.available_bytes = 50_MiB;
       r.share_limit_bytes = 60_MiB;
       r.share_used_bytes = 50_MiB;
     },
     {"have user_limit raised to 80MiB"}},

    // Limit.
    {"LimitNeverEnough",
     OomCause::kLimit,
     [](OomReport& r) {
       r.limit_bytes = 29_MiB;
       r.available_bytes = 30_MiB;
     },
     {"Raise the session's limit (vramctl limit)", "could never hold"}},
    {"LimitNeverEnoughAndNeitherTheDevice",
     OomCause::kLimit,
     [](OomReport& r) {
       r.limit_bytes = 29_MiB;
       r.available_bytes = 30_MiB - 1;
     },
     {"Ask for less", "could never hold", "a higher limit alone would not help, since the device has only 30.00 MiB"}},
    {"LimitNeverEnoughAndNeitherTheUsers",
     OomCause::kLimit,
     [](OomReport& r) {
       r.limit_bytes = 29_MiB;
       r.available_bytes = 50_MiB;
       r.share_limit_bytes = 60_MiB;
       r.share_used_bytes = 35_MiB;
     },
     {"Ask for less", "a higher limit alone would not help, since user_limit leaves it only 25.00 MiB"}},
    {"LimitThatWouldDoByNow", OomCause::kLimit, [](OomReport&) {}, {"Try again", "throw_on_cudamalloc_oom"}},
    {"LimitWithRoomOnTheDevice",
     OomCause::kLimit,
     [](OomReport& r) {
       r.limit_bytes = 40_MiB;
       r.available_bytes = 50_MiB;
     },
     {"Raise the session's limit (vramctl limit)", "50.00 MiB to spare"}},
    {"LimitWithoutRoomOnTheDevice",
     OomCause::kLimit,
     [](OomReport& r) { r.limit_bytes = 40_MiB; },
     {"Free some of this session's memory", "would not help", "only 10.00 MiB"}},
    {"LimitWithRoomThatIsKept",
     OomCause::kLimit,
     [](OomReport& r) {
       r.limit_bytes = 40_MiB;
       r.available_bytes = 50_MiB;
       r.kept_free_bytes = 45_MiB;
     },
     {"would not help", "only 5.00 MiB"}},

    {"LimitWithoutRoomOfTheUsers",
     OomCause::kLimit,
     [](OomReport& r) {
       r.limit_bytes = 40_MiB;
       r.available_bytes = 50_MiB;
       r.share_limit_bytes = 60_MiB;
       r.share_used_bytes = 35_MiB;
     },
     {"Free some of this session's memory", "would not help, since user_limit leaves it only 25.00 MiB"}},

    // The user's limit: the session has 20 MiB, the user's other sessions have the rest of the user's memory.
    {"UserLimitAndNoOtherSession",
     OomCause::kLimit,
     [](OomReport& r) {
       r.available_bytes = 50_MiB;
       r.share_limit_bytes = 45_MiB;
       r.share_used_bytes = 20_MiB;
     },
     {"Free some of this session's memory, or have user_limit raised in the daemon's configuration."}},
    {"UserLimitAndNoOtherSessionButAGuarantee",
     OomCause::kLimit,
     [](OomReport& r) {
       r.available_bytes = 50_MiB;
       r.guarantee_bytes = 25_MiB;
       r.share_limit_bytes = 45_MiB;
       r.share_used_bytes = 25_MiB;
     },
     {"Free some of this session's memory, or have user_limit raised"}},
    {"UserLimitAndOthersWithEnough",
     OomCause::kLimit,
     [](OomReport& r) {
       r.available_bytes = 50_MiB;
       r.share_limit_bytes = 50_MiB;
       r.share_used_bytes = 45_MiB;
     },
     {"End or trim other sessions of this user (vramctl sessions), or have user_limit raised"}},
    {"ClaimOfAnOperator",
     OomCause::kLimit,
     [](OomReport& r) {
       r.available_bytes = 50_MiB;
       r.claim = "team";
       r.is_in_by_socket = true;
       r.share_limit_bytes = 50_MiB;
       r.share_used_bytes = 45_MiB;
     },
     {"End or trim other sessions of this claim (vramctl claim show team), or have", "raised (vramctl claim set)."}},
    {"ClaimOfARule",
     OomCause::kLimit,
     [](OomReport& r) {
       r.available_bytes = 50_MiB;
       r.claim = "team";
       r.share_limit_bytes = 50_MiB;
       r.share_used_bytes = 45_MiB;
     },
     {"raised (claim_limit in the daemon's configuration, or vramctl claim set)."}},
    {"UserLimitAndOthersWithTooLittle",
     OomCause::kLimit,
     [](OomReport& r) {
       r.available_bytes = 50_MiB;
       r.share_limit_bytes = 45_MiB;
       r.share_used_bytes = 24_MiB;
     },
     {"Free some of this session's memory, or have user_limit raised"}},
    {"UserLimitAndBothInTheWay",
     OomCause::kLimit,
     [](OomReport& r) {
       r.available_bytes = 50_MiB;
       r.share_limit_bytes = 32_MiB;
       r.share_used_bytes = 32_MiB;
     },
     {"Free some of this session's memory and end or trim other sessions of this user (vramctl sessions), or have"}},
    {"UserLimitWithoutRoomOnTheDevice",
     OomCause::kLimit,
     [](OomReport& r) {
       r.share_limit_bytes = 50_MiB;
       r.share_used_bytes = 45_MiB;
     },
     {"End or trim other sessions of this user (vramctl sessions): raising user_limit alone would not help, since the "
      "device has only 10.00 MiB to spare"}},
    {"UserLimitNeverEnough",
     OomCause::kLimit,
     [](OomReport& r) {
       r.available_bytes = 50_MiB;
       r.share_limit_bytes = 29_MiB;
       r.share_used_bytes = 20_MiB;
     },
     {"Have user_limit raised", "or ask for less: it could never hold this request"}},
    {"UserLimitNeverEnoughAndNeitherTheDevice",
     OomCause::kLimit,
     [](OomReport& r) {
       r.share_limit_bytes = 29_MiB;
       r.share_used_bytes = 20_MiB;
     },
     {"Ask for less", "could never hold", "a higher one alone would not help: the device has only 10.00 MiB to spare"}},
    {"UserLimitAndTheSessionsOwnByHoles",
     OomCause::kLimit,
     [](OomReport& r) {
       r.block_bytes = 30_MiB;
       r.limit_bytes = 45_MiB;
       r.allocated_bytes = 10_MiB;
       r.available_bytes = 50_MiB;
       r.share_limit_bytes = 35_MiB;
       r.share_used_bytes = 20_MiB;
     },
     {"Free some of this session's memory, or have user_limit raised in the daemon's configuration and the session's "
      "limit, too (vramctl limit)"}},

    // Capacity.
    {"CapacityBeyondTheLimitByHoles",
     OomCause::kCapacity,
     [](OomReport& r) {
       r.block_bytes = 30_MiB;
       r.limit_bytes = 45_MiB;
       r.allocated_bytes = 10_MiB;
       r.available_bytes = 20_MiB;
       r.kept_free_bytes = 15_MiB;
     },
     {"Free the blocks that pin partly used segments (vramctl map shows these), and lower other sessions' guarantees, "
      "for which 15.00 MiB is kept free"}},
    {"CapacityBeyondTheLimitByHolesAndInUse",
     OomCause::kCapacity,
     [](OomReport& r) {
       r.block_bytes = 30_MiB;
       r.limit_bytes = 45_MiB;
       r.allocated_bytes = 10_MiB;
     },
     {"Free the blocks that pin", "and have other sessions give 10.00 MiB back (vramctl sessions)"}},
    {"CapacityOutsideTheBroker",
     OomCause::kCapacity,
     [](OomReport& r) { r.available_bytes = 30_MiB; },
     {"Try again", "programs outside vrambroker", "nvidia-smi", "30.00 MiB"}},
    {"CapacityThatTheDriverDoesNotHave",
     OomCause::kCapacity,
     [](OomReport& r) { r.outside_bytes = 20_MiB; },
     {"programs outside vrambroker", "CUDA contexts", "20.00 MiB less"}},
    {"CapacityKeptForGuarantees",
     OomCause::kCapacity,
     [](OomReport& r) {
       r.available_bytes = 30_MiB;
       r.kept_free_bytes = 1_MiB;
     },
     {"or lower other sessions' guarantees (vramctl guarantee)", "1.00 MiB"}},
    {"CapacityDetached",
     OomCause::kCapacity,
     [](OomReport& r) {
       r.detached_bytes = 20_MiB;
       r.left_behind_bytes = 1_MiB;
       Hold(r, "ghost", 20_MiB, IdleWhy::kDisconnected);
     },
     {"End the processes of sessions that disconnected or were ended (vramctl sessions): they still hold 20.00 MiB."},
     {"quarantine"}},
    {"CapacityLeftBehind",
     OomCause::kCapacity,
     [](OomReport& r) {
       r.detached_bytes = 1_MiB;
       r.left_behind_bytes = 20_MiB;
     },
     {"Wait for the 20.00 MiB that ended processes left behind", "settle_time", "vramctl quarantine"},
     {"End the processes", "vramctl sessions"}},
    {"CapacityDetachedAndLeftBehind",
     OomCause::kCapacity,
     [](OomReport& r) {
       r.detached_bytes = 8_MiB;
       r.left_behind_bytes = 12_MiB;
     },
     {"End the processes of sessions that disconnected or were ended (vramctl sessions), which still hold 8.00 MiB, "
      "and wait for the 12.00 MiB that ended processes left behind",
      "vramctl quarantine"}},
    {"CapacityTooLittleInQuarantine",
     OomCause::kCapacity,
     [](OomReport& r) {
       r.detached_bytes = 10_MiB;
       r.left_behind_bytes = 10_MiB - 1;
     },
     {"full of memory in use"}},
    {"CapacityIdleUnasked",
     OomCause::kCapacity,
     [](OomReport& r) { Hold(r, "hoarder", 20_MiB, IdleWhy::kNotAsked); },
     {"hoarder holds 20.00 MiB unused", "vramctl trim", "empty_cache"}},
    {"CapacityTooLittleIdle",
     OomCause::kCapacity,
     [](OomReport& r) { Hold(r, "hoarder", 20_MiB - 1, IdleWhy::kNotAsked); },
     {"full of memory in use"}},
    {"CapacityIdleWithinGuarantee",
     OomCause::kCapacity,
     [](OomReport& r) { Hold(r, "server", 20_MiB, IdleWhy::kWithinGuarantee); },
     {"server holds 20.00 MiB unused within its guarantee", "lower that guarantee"}},
    {"CapacityIdleInPartUsed",
     OomCause::kCapacity,
     [](OomReport& r) { Hold(r, "server", 20_MiB, IdleWhy::kInPartUsed); },
     {"server holds 20.00 MiB unused", "in partly used segments", "end or restart it"}},
    {"CapacityIdleUnanswered",
     OomCause::kCapacity,
     [](OomReport& r) { Hold(r, "stuck", 20_MiB, IdleWhy::kDidNotAnswer); },
     {"stuck holds 20.00 MiB unused", "did not answer", "hangs or is stopped"}},
    {"CapacityIdleKept",
     OomCause::kCapacity,
     [](OomReport& r) { Hold(r, "busy", 20_MiB, IdleWhy::kKept); },
     {"busy holds 20.00 MiB unused", "try again"}},
    {"CapacityMainReasonIsTheOneOfMostBytes",
     OomCause::kCapacity,
     [](OomReport& r) {
       Hold(r, "one", 9_MiB, IdleWhy::kWithinGuarantee);
       Hold(r, "two", 8_MiB, IdleWhy::kInPartUsed);
       Hold(r, "three", 7_MiB, IdleWhy::kInPartUsed);
     },
     {"two holds 8.00 MiB unused", "in partly used segments"}},
    {"CapacityInUse",
     OomCause::kCapacity,
     [](OomReport&) {},
     {"Give the request a wait time", "fewer programs", "smaller batches", "trainer uses the most (65.00 MiB)"}},
    {"CapacityInUseAfterWaiting",
     OomCause::kCapacity,
     [](OomReport& r) { r.waited_ms = 1500; },
     {"fewer programs", "trainer uses the most", "waiting for 1500 ms"}},
    {"CapacityOthersUnknown",
     OomCause::kCapacity,
     [](OomReport& r) { r.names_others = false; },
     {"Return free segments and try again"}},
};

INSTANTIATE_TEST_SUITE_P(Cases, AdviceTest, ::testing::ValuesIn(kAdvice),
                         [](const auto& test) { return test.param.name; });

TEST(AdviceLengthTest, LongNamesStayWithinTheBound) {
  const std::string name(70, 'x');  // 63 letters, and a number that makes the name unique
  for (const IdleWhy why : kIdleWhys) {
    OomReport report = Needing30(OomCause::kCapacity);
    Hold(report, name, 20_MiB, why);
    EXPECT_LE(Advice(report).size(), 400u) << Advice(report);
  }
  OomReport report = Needing30(OomCause::kCapacity);
  report.largest_holders.front().client = name;
  EXPECT_LE(Advice(report).size(), 400u);
}

// Combines all advice on fragmentation with the figures of a GPU.
TEST(AdviceLengthTest, EveryBoundInTheWayStaysWithinTheBound) {
  OomReport report = Needing30(OomCause::kFragmentation);
  report.segment_bytes = 70_GiB;
  report.reserved_bytes = 75_GiB;
  report.capacity_bytes = 192_GiB;
  report.limit_bytes = 100_GiB;
  report.share_limit_bytes = report.share_used_bytes = 150_GiB;
  report.refusal = 1'000'000'000;
  struct {
    uint64_t detached, left_behind, outside;
  } const kQuarantines[] = {{70_GiB, 0, 0}, {0, 70_GiB, 0}, {35_GiB, 35_GiB, 0}, {0, 35_GiB, 40_GiB}, {0, 0, 117_GiB}};
  for (const auto& quarantine : kQuarantines) {
    report.detached_bytes = quarantine.detached;
    report.left_behind_bytes = quarantine.left_behind;
    report.outside_bytes = quarantine.outside;
    for (const bool is_recorded : {false, true}) {
      for (const uint64_t holes : {0, 2}) {
        report.is_recorded = is_recorded;
        report.holes.count = holes;
        const std::string advice = Advice(report);
        EXPECT_THAT(advice, HasSubstr("raise the session's limit"));
        EXPECT_THAT(advice, HasSubstr("user_limit raised"));
        EXPECT_LE(advice.size(), 400u) << advice;
      }
    }
  }
}

}  // namespace
}  // namespace vrambroker
