// SPDX-License-Identifier: Apache-2.0
#include "server/out_of_memory.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/cord.h"
#include "allocator/bytes.h"
#include "server/convert.h"
#include "server/oom_advice.h"
#include "server/oom_log.h"
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

TEST(FinalCauseTest, EnoughFreeBytesMeanFragmentation) {
  const FitReport enough{.block_bytes = 4_MiB, .pool_free_bytes = 4_MiB};
  const FitReport short_by_a_block{.block_bytes = 4_MiB, .pool_free_bytes = 4_MiB - 512};
  EXPECT_EQ(FinalCause(OomCause::kLimit, enough), OomCause::kFragmentation);
  EXPECT_EQ(FinalCause(OomCause::kLimit, short_by_a_block), OomCause::kLimit);
  EXPECT_EQ(FinalCause(OomCause::kCapacity, enough), OomCause::kFragmentation);
  EXPECT_EQ(FinalCause(OomCause::kCapacity, short_by_a_block), OomCause::kCapacity);
}

TEST(FinalCauseTest, TooLargeIsTooLarge) {
  EXPECT_EQ(FinalCause(OomCause::kLargerThanDevice, {.block_bytes = 1, .pool_free_bytes = 9}),
            OomCause::kLargerThanDevice);
  // A request that was refused unseen has no fit: all figures are 0.
  EXPECT_EQ(FinalCause(OomCause::kLargerThanDevice, FitReport()), OomCause::kLargerThanDevice);
}

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
  report.quarantined_bytes = 8_MiB;
  report.idle_elsewhere_bytes = 15_MiB;
  report.idle_holders = {{.client = "trainer", .idle_bytes = 9_MiB, .why = IdleWhy::kInPartUsed},
                         {.client = "server", .idle_bytes = 6_MiB, .why = IdleWhy::kWithinGuarantee}};
  report.waited_ms = 250;
  report.names_others = true;
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
  EXPECT_EQ(proto.device_quarantined_bytes(), 8_MiB);
  EXPECT_EQ(proto.idle_elsewhere_bytes(), 15_MiB);
  ASSERT_EQ(proto.idle_holders_size(), 2);
  EXPECT_EQ(proto.idle_holders(0).client(), "trainer");
  EXPECT_EQ(proto.idle_holders(0).idle_bytes(), 9_MiB);
  EXPECT_EQ(proto.idle_holders(0).why(), v1::OutOfMemory::IdleHolder::WHY_IN_PART_USED);
  EXPECT_EQ(proto.idle_holders(1).why(), v1::OutOfMemory::IdleHolder::WHY_WITHIN_GUARANTEE);
  EXPECT_EQ(proto.waited_ms(), 250u);
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

// A report that names as many as there may be, with names as long as they get and figures as large.
OomReport Largest(OomCause cause) {
  const std::string name = std::string(63, 'x') + "-1234567";
  const uint64_t bytes = uint64_t{1} << 59;
  OomReport report = Sample(cause);
  report.requested_bytes = report.segment_bytes = report.limit_bytes = report.reserved_bytes = bytes;
  report.allocated_bytes = report.largest_free_block_bytes = report.capacity_bytes = bytes;
  report.available_bytes = report.guarantee_bytes = report.inactive_split_bytes = bytes - 1;
  report.kept_free_bytes = report.device_idle_bytes = report.quarantined_bytes = bytes - 1;
  report.idle_elsewhere_bytes = report.waited_ms = bytes;
  report.quarantined_bytes = 0;
  report.largest_holders.assign(kMaxHolders, {.client = name, .reserved_bytes = bytes, .allocated_bytes = bytes});
  report.idle_holders.assign(kMaxIdleHolders, {.client = name, .idle_bytes = bytes, .why = IdleWhy::kNotAsked});
  return report;
}

TEST(OutOfMemoryErrorTest, StaysFarBelowTheMetadataOfGrpc) {
  for (const OomCause cause : kOomCauses) {
    const absl::Status status = OutOfMemoryError(Largest(cause));
    // grpc-message, and all of it again in grpc-status-details-bin, which takes 4 bytes for 3.
    const size_t bytes = status.message().size() + ToProto(status).ByteSizeLong() * 4 / 3;
    EXPECT_LE(bytes, 6u * 1024) << status;
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
    *response.add_events() = ToProto(event);
  }
  EXPECT_LE(response.ByteSizeLong(), 3u << 20);  // gRPC's clients take 4 MiB
}

TEST(OutOfMemoryErrorTest, MessageNamesWhatWasKeptIdleAndWaitedFor) {
  const std::string message = Message(OutOfMemoryError(Sample(OomCause::kCapacity)));
  EXPECT_THAT(message, HasSubstr("with 6291456 B (6.00 MiB) kept for other sessions' guarantees"));
  EXPECT_THAT(message, HasSubstr("idle in other sessions 15728640 B (15.00 MiB)"));
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
  EXPECT_THAT(Message(OutOfMemoryError(Sample(OomCause::kLimit))), HasSubstr("segment of 20971520 B (20.00 MiB)"));
  EXPECT_THAT(Message(OutOfMemoryError(Sample(OomCause::kLimit))), HasSubstr("limit 41943040 B (40.00 MiB)"));
  EXPECT_THAT(Message(OutOfMemoryError(Sample(OomCause::kLimit))), HasSubstr("3145729 B (3.00 MiB) requested"));
  EXPECT_THAT(Message(OutOfMemoryError(Sample(OomCause::kCapacity))), HasSubstr("18874368 B (18.00 MiB) of"));
  EXPECT_THAT(Message(OutOfMemoryError(Sample(OomCause::kFragmentation))),
              HasSubstr("largest free block is 2097152 B (2.00 MiB)"));
  EXPECT_THAT(Message(OutOfMemoryError(Sample(OomCause::kLargerThanDevice))),
              HasSubstr("capacity is 104857600 B (100.00 MiB)"));
}

TEST(OutOfMemoryErrorTest, FiguresOfDifferentMomentsDoNotWrapAround) {
  OomReport report = Sample(OomCause::kLimit);
  report.allocated_bytes = report.reserved_bytes + 512;
  EXPECT_EQ(Payload(OutOfMemoryError(report)).idle_bytes(), 0u);
}

}  // namespace
}  // namespace vrambroker
