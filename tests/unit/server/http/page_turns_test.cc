// SPDX-License-Identifier: Apache-2.0
#include "server/http/page_turns.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"

namespace vrambroker {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

class PageTurnsTest : public ::testing::Test {
 protected:
  void Add(const std::string& peer, const std::string& name) {
    turns_.Add(peer,
               {.make = [this, name] { made_.push_back(name); }, .refuse = [this, name] { refused_.push_back(name); }});
  }
  // Returns the pages begun since the last call.
  std::vector<std::string> Made() { return std::exchange(made_, {}); }

  PageTurns turns_{6, 16};
  std::vector<std::string> made_;
  std::vector<std::string> refused_;
};

TEST_F(PageTurnsTest, APeerHasHalfOfThePlaces) {
  for (const char* name : {"a1", "a2", "a3", "a4"}) Add("a", name);
  EXPECT_THAT(Made(), ElementsAre("a1", "a2", "a3"));
  Add("b", "b1");
  EXPECT_THAT(Made(), ElementsAre("b1"));
  turns_.Done("b");
  EXPECT_THAT(Made(), IsEmpty()) << "a has its share";
  turns_.Done("a");
  EXPECT_THAT(Made(), ElementsAre("a4"));
}

TEST_F(PageTurnsTest, PeersTakeTurns) {
  for (const char* name : {"a1", "a2", "a3", "a4", "a5", "a6"}) Add("a", name);
  for (const char* name : {"b1", "b2", "b3", "b4", "b5"}) Add("b", name);
  EXPECT_THAT(Made(), ElementsAre("a1", "a2", "a3", "b1", "b2", "b3"));
  Add("c", "c1");
  turns_.Done("a");
  EXPECT_THAT(Made(), ElementsAre("c1")) << "a has just had its turn, and b has its share";
  turns_.Done("a");
  EXPECT_THAT(Made(), ElementsAre("a4"));
  turns_.Done("b");
  EXPECT_THAT(Made(), ElementsAre("a5"));
  turns_.Done("b");
  EXPECT_THAT(Made(), ElementsAre("b4"));
}

// A peer that asks again after each page does not go before a waiting peer.
TEST_F(PageTurnsTest, WhoComesAgainAndAgainKeepsNobodyWaiting) {
  PageTurns one(1, 16);
  std::vector<std::string> made;
  const auto add = [&](const std::string& peer) {
    one.Add(peer, {.make = [&made, peer] { made.push_back(peer); }, .refuse = [] {}});
  };
  add("a");
  for (int i = 0; i < 4; ++i) add("b");
  for (int i = 0; i < 7; ++i) {
    const std::string last = made.back();
    one.Done(last);
    if (last == "a") add("a");
  }
  EXPECT_THAT(made, ElementsAre("a", "b", "a", "b", "a", "b", "a", "b"));
}

TEST_F(PageTurnsTest, APeerWithAQuarterOfTheWaitingIsRefused) {
  for (int i = 1; i <= 9; ++i) Add("a", absl::StrCat("a", i));
  EXPECT_THAT(refused_, ElementsAre("a8", "a9"));
  turns_.Done("a");
  Add("a", "a10");
  EXPECT_THAT(refused_, ElementsAre("a8", "a9"));
}

TEST_F(PageTurnsTest, WhenTooManyWaitThePeerWithMostIsRefused) {
  for (const char* peer : {"a", "b"}) {
    for (int i = 1; i <= 7; ++i) Add(peer, absl::StrCat(peer, i));
  }
  for (const char* peer : {"c", "d"}) {
    for (int i = 1; i <= 4; ++i) Add(peer, absl::StrCat(peer, i));
  }
  EXPECT_THAT(refused_, IsEmpty());
  Add("e", "e1");
  EXPECT_THAT(refused_, ElementsAre("a7"));
  Add("e", "e2");
  EXPECT_THAT(refused_, ElementsAre("a7", "b7"));
}

TEST_F(PageTurnsTest, APageMayBeMadeAtOnce) {
  PageTurns one(1, 16);
  int made = 0;
  for (int i = 0; i < 5; ++i) {
    one.Add("a", {.make =
                      [&] {
                        ++made;
                        one.Done("a");
                      },
                  .refuse = [] {}});
  }
  EXPECT_EQ(made, 5);
}

}  // namespace
}  // namespace vrambroker
