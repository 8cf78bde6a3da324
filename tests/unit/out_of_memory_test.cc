// SPDX-License-Identifier: Apache-2.0
#include "server/out_of_memory.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/cord.h"
#include "allocator/bytes.h"
#include "vrambroker/v1/types.pb.h"

namespace vrambroker {
namespace {

using ::testing::HasSubstr;

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
