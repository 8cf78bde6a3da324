// SPDX-License-Identifier: Apache-2.0
//
// Tests of growing fragmentation of sessions as the broker sees the growth, and of the time until room runs out. The
// test controls the broker's clock.
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "tests/unit/server/core/broker_fixture.h"

namespace vrambroker {
namespace {

using std::chrono::seconds;

class BrokerFragmentationTest : public BrokerTest {
 protected:
  static constexpr uint64_t kAllocated = 8_MiB;

  BrokerFragmentationTest() { Start({}); }

  void Start(PolicyOptions policy) {
    BrokerOptions options;
    options.policy = PolicyOf(std::move(policy));
    options.clock = [this] { return now_; };
    Make(std::move(options));
  }
  // Leases a segment of `bytes`. Reports that the client allocates as much as before, and that holes take the rest
  // except for `idle` bytes.
  void Grow(const SessionPtr& session, uint64_t bytes, uint64_t idle = 0) {
    ASSERT_TRUE(LeaseSegments(session, {bytes}).ok());
    Use(session, idle);
  }
  void Use(const SessionPtr& session, uint64_t idle = 0) {
    const uint64_t reserved = pools_[0]->GetAccount(session->id())->reserved_bytes;
    MemoryStats stats;
    stats.allocated_bytes.all.Up(std::min(reserved, kAllocated));
    stats.active_bytes.all.Up(std::min(reserved, kAllocated));
    stats.inactive_split_bytes.all.Up(reserved - std::min(reserved, kAllocated) - idle);
    session->leased()->Report(0, stats);
  }
  void Pass(seconds time) {
    const SteadyTime end = now_ + time;
    while (now_ < end) {
      now_ += seconds(2);
      broker_->fragmentation().Follow(broker_->operator_view().Look());
    }
  }
  // Leases 2 MiB more in each of nine minutes: from 8 MiB to 26 MiB.
  void Fragment(const SessionPtr& session) {
    ASSERT_TRUE(LeaseSegments(session, {kAllocated}).ok());
    for (int minute = 0; minute < 9; ++minute) {
      Grow(session, 2_MiB);
      Pass(seconds(60));
    }
    Pass(seconds(2));
  }
  SessionDeviceView::Fragmentation Of(const SessionPtr& session, size_t device = 0) {
    return broker_->operator_view().Describe(*session).devices[device].fragmentation;
  }
  // Returns the MiB at which the trend expects a refusal.
  double MostMib(const SessionPtr& session) {
    Pass(seconds(2));  // uses the current limits
    const SessionDeviceView::Fragmentation of = Of(session);
    if (!of.seconds_to_refusal.has_value()) return -1;
    const double most = 26.0 * (1 << 20) + of.bytes_per_second * *of.seconds_to_refusal;
    return most / (1 << 20);
  }

  SteadyTime now_ = SteadyTime(seconds(1'000'000));
};

TEST_F(BrokerFragmentationTest, IsOfTheSessionAndTheDeviceWhereItGrows) {
  const SessionPtr grows = OpenLeasing("grows");
  const SessionPtr steady = OpenLeasing("steady");
  Grow(steady, 16_MiB);
  EXPECT_EQ(Of(grows).bytes_per_second, 0) << "before the first look";
  Fragment(grows);
  const BrokerView view = broker_->operator_view().Look();
  ASSERT_EQ(view.sessions.size(), 2u);
  const SessionDeviceView::Fragmentation& of = view.sessions[0].devices[0].fragmentation;
  EXPECT_NEAR(of.bytes_per_second, 2_MiB / 60.0, 1000);
  ASSERT_TRUE(of.seconds_to_refusal.has_value());
  EXPECT_NEAR(*of.seconds_to_refusal, (64 - 16 - 26) / 2 * 60, 5) << "of the device's 64 MiB";
  EXPECT_EQ(*of.seconds_to_refusal, Of(grows).seconds_to_refusal);
  for (const SessionDeviceView* other : {&view.sessions[0].devices[1], &view.sessions[1].devices[0]}) {
    EXPECT_EQ(other->fragmentation.bytes_per_second, 0);
    EXPECT_EQ(other->fragmentation.seconds_to_refusal, std::nullopt);
  }
}

TEST_F(BrokerFragmentationTest, TheLeastOfWhatBoundsASessionIsItsRoom) {
  const SessionPtr grows = OpenLeasing("grows", Limit(uint64_t{60_MiB}));
  Fragment(grows);
  EXPECT_NEAR(MostMib(grows), 60, 0.1) << "its own limit";
  ASSERT_TRUE(broker_->limits().SetLimit(grows, Limit(uint64_t{40_MiB})).ok());
  EXPECT_NEAR(MostMib(grows), 40, 0.1);
  const SessionPtr other = OpenLeasing("other", std::nullopt, Process(2, 2000));
  Grow(other, 30_MiB);
  EXPECT_NEAR(MostMib(grows), 34, 0.1) << "what others need of the device";
  Use(other, /*idle=*/10_MiB);
  EXPECT_NEAR(MostMib(grows), 40, 0.1) << "they give up what is idle";
  ASSERT_TRUE(pools_[0]->SetGuarantee(other->id(), 30_MiB).ok());
  EXPECT_NEAR(MostMib(grows), 34, 0.1) << "which is guaranteed to them all the same";
  ASSERT_TRUE(broker_->limits().SetLimit(grows, Limit(uint64_t{20_MiB})).ok());
  EXPECT_EQ(Of(grows).seconds_to_refusal.has_value(), true);
  EXPECT_NEAR(MostMib(grows), 26, 0.1) << "none is left: now";
}

TEST_F(BrokerFragmentationTest, TheLimitOfItsUserBoundsItToo) {
  Start({.user_limit = Limit(uint64_t{50_MiB})});
  const SessionPtr grows = OpenLeasing("grows");
  const SessionPtr stranger = OpenLeasing("stranger", std::nullopt, Process(2, 2000));
  Grow(stranger, 4_MiB);
  Fragment(grows);
  EXPECT_NEAR(MostMib(grows), 50, 0.1);
  const SessionPtr sibling = OpenLeasing("sibling");
  Grow(sibling, 10_MiB);
  EXPECT_NEAR(MostMib(grows), 40, 0.1);
  Use(sibling, /*idle=*/2_MiB);
  EXPECT_NEAR(MostMib(grows), 42, 0.1);
}

TEST_F(BrokerFragmentationTest, ACacheThatGrowsIsNoFragmentation) {
  const SessionPtr session = OpenLeasing("caches");
  ASSERT_TRUE(LeaseSegments(session, {kAllocated}).ok());
  for (int minute = 1; minute <= 20; ++minute) {
    Grow(session, 2_MiB, /*idle=*/static_cast<uint64_t>(minute) * 2_MiB);
    Pass(seconds(60));
    EXPECT_EQ(Of(session).bytes_per_second, 0) << minute;
  }
}

TEST_F(BrokerFragmentationTest, WhoGivesEverythingBackStartsAnew) {
  const SessionPtr session = OpenLeasing("grows");
  Fragment(session);
  EXPECT_GT(Of(session).bytes_per_second, 0);
  session->leased()->ReturnAllBut({});
  Use(session);
  Pass(seconds(2));
  EXPECT_EQ(Of(session).bytes_per_second, 0);
  EXPECT_EQ(Of(session).seconds_to_refusal, std::nullopt);
}

TEST_F(BrokerFragmentationTest, GoesOnWhenTheSessionIsResumedAndEndsWithIt) {
  const SessionPtr session = OpenLeasing("grows");
  Fragment(session);
  broker_->Disconnect(session);
  Pass(seconds(20));
  EXPECT_GT(Of(session).bytes_per_second, 0);
  absl::flat_hash_set<SegmentId> held;
  for (const SegmentView& segment : pools_[0]->GetSegments()) held.insert(SegmentId{segment.id});
  ASSERT_TRUE(Resume(session->leased()->resume_token(), held).ok());
  Use(session);
  for (int minute = 0; minute < 4; ++minute) {
    Grow(session, 2_MiB);
    Pass(seconds(60));
  }
  EXPECT_NEAR(Of(session).bytes_per_second, 2_MiB / 60.0, 6000);
  broker_->Close(session, "goodbye");
  Pass(seconds(2));
  EXPECT_EQ(Of(session).bytes_per_second, 0);
  const SessionPtr next = OpenLeasing("grows");
  Grow(next, 16_MiB);
  Pass(seconds(120));
  EXPECT_EQ(Of(next).bytes_per_second, 0);
}

// The daemon's own heap of the session: every two blocks of half a MiB leave holes that the next block does not fit
// into.
TEST_F(BrokerFragmentationTest, OfARemoteSession) {
  const SessionPtr session = Open("remote");
  std::vector<BlockId> blocks;
  for (int i = 0; i < 64; ++i) {
    const absl::StatusOr<Allocation> block = Allocate(session, 512_KiB);
    ASSERT_TRUE(block.ok()) << block.status();
    blocks.push_back(block->block);
  }
  for (size_t i = 0; i + 2 < 40; i += 4) {  // two holes in each segment
    for (const size_t first : {i, i + 2}) ASSERT_TRUE(broker_->allocations().Free(session, {blocks[first]}).ok());
    ASSERT_TRUE(Allocate(session, 1_MiB).ok());
    Pass(seconds(30));
  }
  Pass(seconds(2));
  EXPECT_EQ(Of(session).bytes_per_second, 0) << "too short for a trend";
  for (size_t i = 40; i + 2 < 64; i += 4) {
    for (const size_t first : {i, i + 2}) ASSERT_TRUE(broker_->allocations().Free(session, {blocks[first]}).ok());
    ASSERT_TRUE(Allocate(session, 1_MiB).ok());
    Pass(seconds(30));
  }
  Pass(seconds(32));
  EXPECT_NEAR(Of(session).bytes_per_second, 2_MiB / 60.0, 6000);
}

}  // namespace
}  // namespace vrambroker
