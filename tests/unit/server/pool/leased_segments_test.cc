// SPDX-License-Identifier: Apache-2.0
#include "server/pool/leased_segments.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "allocator/base/bytes.h"

namespace vrambroker {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

constexpr SessionId kAnnsSession{1};
constexpr SessionId kBensSession{2};

LeasedSegment SegmentOf(SessionId holder, uint64_t bytes = 2_MiB) {
  return {.segment = {.bytes = bytes}, .holder = holder};
}

TEST(LeasedSegmentsTest, AreFoundByTheirHoldersAlone) {
  LeasedSegments segments;
  segments.Add(SegmentId{9}, SegmentOf(kAnnsSession));
  segments.Add(SegmentId{4}, SegmentOf(kAnnsSession, 4_MiB));
  segments.Add(SegmentId{5}, SegmentOf(kBensSession));
  EXPECT_EQ(segments.Find(kAnnsSession, SegmentId{5}), nullptr);
  EXPECT_EQ(segments.Find(kAnnsSession, SegmentId{7}), nullptr);
  ASSERT_NE(segments.Find(kAnnsSession, SegmentId{4}), nullptr);
  EXPECT_EQ(segments.Find(kAnnsSession, SegmentId{4})->segment.bytes, 4_MiB);
  EXPECT_THAT(segments.Of(kAnnsSession), ElementsAre(SegmentId{4}, SegmentId{9})) << "by id";
  EXPECT_EQ(segments.CountOf(kAnnsSession), 2u);
  EXPECT_EQ(segments.size(), 3u);

  EXPECT_EQ(segments.Remove(SegmentId{4}).segment.bytes, 4_MiB);
  EXPECT_EQ(segments.Find(kAnnsSession, SegmentId{4}), nullptr);
  EXPECT_THAT(segments.Of(kAnnsSession), ElementsAre(SegmentId{9}));
  segments.Remove(SegmentId{9});
  EXPECT_THAT(segments.Of(kAnnsSession), IsEmpty());
  EXPECT_EQ(segments.CountOf(kAnnsSession), 0u);
  segments.Forget(kAnnsSession);
  EXPECT_THAT(segments.Of(kAnnsSession), IsEmpty());
  EXPECT_THAT(segments.Of(kBensSession), ElementsAre(SegmentId{5}));
}

TEST(LeasedSegmentsTest, OneTicketIsOutForASegmentAtMost) {
  LeasedSegments segments;
  segments.Add(SegmentId{4}, SegmentOf(kAnnsSession));
  segments.Add(SegmentId{5}, SegmentOf(kAnnsSession));
  LeasedSegment& segment = *segments.Find(kAnnsSession, SegmentId{4});
  const FdTicket ticket = segments.IssueTicket(SegmentId{4}, segment).value();
  EXPECT_EQ(segments.IssueTicket(SegmentId{4}, segment).value(), ticket) << "the one that is out";
  LeasedSegment& other = *segments.Find(kAnnsSession, SegmentId{5});
  const FdTicket of_other = segments.IssueTicket(SegmentId{5}, other).value();
  EXPECT_NE(of_other, ticket);
  EXPECT_EQ(segments.FindTicket(ticket), &segment);
  EXPECT_EQ(segments.FindTicket(FdTicket{}), nullptr);
  segments.VoidTicket(segment);
  segments.VoidTicket(segment);  // no ticket is out any more
  EXPECT_EQ(segments.FindTicket(ticket), nullptr);
  EXPECT_EQ(segments.FindTicket(of_other), &other);
  EXPECT_NE(segments.IssueTicket(SegmentId{4}, segment).value(), ticket) << "a new one";
}

TEST(LeasedSegmentsTest, ATicketGoesWithItsSegment) {
  LeasedSegments segments;
  segments.Add(SegmentId{4}, SegmentOf(kAnnsSession));
  const FdTicket ticket = segments.IssueTicket(SegmentId{4}, *segments.Find(kAnnsSession, SegmentId{4})).value();
  segments.Remove(SegmentId{4});
  EXPECT_EQ(segments.FindTicket(ticket), nullptr);
}

}  // namespace
}  // namespace vrambroker
