// SPDX-License-Identifier: Apache-2.0
#include "server/base/peer_queue.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace vrambroker {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

class PeerQueueTest : public ::testing::Test {
 protected:
  PeerQueue::EntryId Add(const std::string& peer, const std::string& name, size_t weight = 1) {
    return queue_.Add(
        peer, [this, name] { dropped_.push_back(name); }, weight);
  }

  PeerQueue queue_{5, 3};
  std::vector<std::string> dropped_;
};

TEST_F(PeerQueueTest, OfAPeerWithItsShareTheOldestGoes) {
  for (const char* name : {"a1", "a2", "a3"}) Add("a", name);
  Add("b", "b1");
  EXPECT_THAT(dropped_, IsEmpty());
  Add("a", "a4");
  Add("a", "a5");
  EXPECT_THAT(dropped_, ElementsAre("a1", "a2"));
  EXPECT_EQ(queue_.size(), 4u);
}

TEST_F(PeerQueueTest, WhenAllIsFullTheOldestOfThePeerWithMostGoes) {
  Add("b", "b1");
  for (const char* name : {"a1", "a2", "a3"}) Add("a", name);
  Add("c", "c1");
  EXPECT_THAT(dropped_, IsEmpty());
  Add("d", "d1");
  EXPECT_THAT(dropped_, ElementsAre("a1"));
  Add("b", "b2");
  EXPECT_THAT(dropped_, ElementsAre("a1", "a2"));
  EXPECT_EQ(queue_.size(), 5u);
}

TEST_F(PeerQueueTest, OfPeersWithAsMuchTheOneThatWaitsLongestGoes) {
  for (const char* name : {"c", "a", "b", "e", "d"}) Add(name, name);
  Add("f", "f");
  Add("g", "g");
  EXPECT_THAT(dropped_, ElementsAre("c", "a"));
}

TEST_F(PeerQueueTest, OneThatIsRenewedGoesLast) {
  const PeerQueue::EntryId first = Add("a", "a1");
  Add("a", "a2");
  Add("a", "a3");
  const PeerQueue::EntryId renewed = queue_.Renew(first);
  EXPECT_GT(renewed, first);
  EXPECT_EQ(queue_.Renew(first), 0u) << "under its old id";
  for (const char* name : {"a4", "a5"}) Add("a", name);
  EXPECT_THAT(dropped_, ElementsAre("a2", "a3"));
  Add("a", "a6");
  EXPECT_THAT(dropped_, ElementsAre("a2", "a3", "a1"));
  EXPECT_EQ(queue_.Renew(renewed), 0u);
  EXPECT_EQ(queue_.size(), 3u);
}

TEST_F(PeerQueueTest, OneMayCountAsSeveral) {
  Add("a", "a1");
  Add("a", "a2", 2);
  EXPECT_THAT(dropped_, IsEmpty());
  Add("a", "a3", 2);
  EXPECT_THAT(dropped_, ElementsAre("a1", "a2"));
  Add("b", "b1", 9);  // counts as a peer's whole share
  EXPECT_THAT(dropped_, ElementsAre("a1", "a2")) << "five";
  Add("c", "c1");
  EXPECT_THAT(dropped_, ElementsAre("a1", "a2", "b1"));
}

TEST_F(PeerQueueTest, WhoHasLeftIsNotDropped) {
  const PeerQueue::EntryId first = Add("a", "a1");
  Add("a", "a2");
  queue_.Remove(first);
  queue_.Remove(first);
  queue_.Remove(0);
  EXPECT_EQ(queue_.size(), 1u);
  EXPECT_TRUE(queue_.DropOne());
  EXPECT_FALSE(queue_.DropOne());
  EXPECT_THAT(dropped_, ElementsAre("a2"));
}

// A closed connection leaves the queue, at once or later.
TEST_F(PeerQueueTest, WhoIsDroppedMayLeaveMeanwhile) {
  PeerQueue::EntryId ticket = 0;
  ticket = queue_.Add("a", [&] { queue_.Remove(ticket); });
  EXPECT_TRUE(queue_.DropOne());
  EXPECT_EQ(queue_.size(), 0u);
}

}  // namespace
}  // namespace vrambroker
