// SPDX-License-Identifier: Apache-2.0
#include "server/pool/carried_over.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <vector>

#include "allocator/base/bytes.h"

namespace vrambroker {
namespace {

using ::testing::ElementsAre;

constexpr SessionId kFirst{1};
constexpr SessionId kSecond{2};
constexpr ProcessId kProcess{.pid = 10, .started = 1};
constexpr ProcessId kChild{.pid = 11, .started = 2};

LeftSegment File(uint64_t inode, uint64_t bytes, std::vector<ProcessId> holders = {kProcess}) {
  return {.file_device = 1, .file_inode = inode, .bytes = bytes, .holders = std::move(holders)};
}

class CarriedOverTest : public ::testing::Test {
 protected:
  // Applies changes, and checks that each uncharge follows a charge.
  void Apply(const CarriedOver::Changes& changes) {
    for (const CarriedOver::Change& change : changes) {
      uint64_t& charged = charged_[change.session];
      if (!change.is_charged) {
        EXPECT_GE(charged, change.bytes);
      }
      charged = change.is_charged ? charged + change.bytes : charged - change.bytes;
    }
    uint64_t sum = 0;
    for (const auto& [session, bytes] : charged_) sum += bytes;
    EXPECT_EQ(sum, carried_.bytes());
  }
  void Find(const std::vector<LeftSegment>& segments, SessionId session_of_pid = kNoSession) {
    carried_.StartLook();
    EXPECT_FALSE(carried_.next_look().has_value()) << "one at a time";
    Apply(carried_.Found(segments, [&](const ProcessId& process) {
      const bool is_known = process == kProcess && session_of_pid != kNoSession;
      return is_known ? std::optional(CarriedOver::Holder{.session = session_of_pid}) : std::nullopt;
    }));
    carried_.EndLook(now_);
  }
  void Declare(SessionId session, const std::vector<CarriedSegment>& segments, uint64_t most = kAll) {
    Apply(carried_.Declared({.session = session}, kProcess, segments, most));
  }

  static constexpr uint64_t kAll = ~uint64_t{0};
  SteadyTime now_{std::chrono::hours(1)};
  CarriedOver carried_;
  std::map<SessionId, uint64_t> charged_;
};

TEST_F(CarriedOverTest, IsNobodysUntilItsProcessOpensASession) {
  Find({File(1, 2_MiB), File(2, 4_MiB), File(3, 8_MiB, {kChild})});
  EXPECT_EQ(charged_[kNoSession], 14_MiB);
  Apply(carried_.Opened({.session = kFirst}, kProcess));
  EXPECT_EQ(charged_[kFirst], 6_MiB);
  EXPECT_EQ(charged_[kNoSession], 8_MiB);
  Apply(carried_.Opened({.session = kSecond}, kProcess));
  EXPECT_EQ(charged_[kSecond], 0u) << "it is the first one's already";
  const std::vector<CarriedOver::Holding> holdings = carried_.Holdings();
  ASSERT_EQ(holdings.size(), 2u);
  EXPECT_THAT(holdings[0].holders, ElementsAre(kChild));
  EXPECT_EQ(holdings[1].segments, 2u);
}

// Ended sessions leave memory in quarantine to their claim in the same way.
TEST_F(CarriedOverTest, WhatAnEndedSessionHeldStaysChargedToItsClaim) {
  constexpr ClaimId kClaim{3};
  Find({File(1, 2_MiB)});
  Apply(carried_.Opened({.session = kFirst, .share = kClaim}, kProcess));
  const CarriedOver::Changes changes = carried_.Closed(kFirst);
  ASSERT_EQ(changes.size(), 2u);
  EXPECT_EQ(changes[1].session, kNoSession);
  EXPECT_EQ(changes[1].share, ShareId(kClaim));
  Apply(changes);
}

// Making the claim fails while the daemon looks.
TEST_F(CarriedOverTest, WhatIsFoundForAClaimThatIsNoMoreIsItsHoldersUsers) {
  constexpr ClaimId kClaim{3};
  LeftSegment file = File(1, 2_MiB);
  file.holder_uid = 7;
  Apply(carried_.Found({file}, [&](const ProcessId&) { return CarriedOver::Holder{.share = kClaim}; }));
  const CarriedOver::Changes changes = carried_.ClaimClosed(kClaim);
  ASSERT_EQ(changes.size(), 2u);
  EXPECT_EQ(changes[1].share, ShareId(uid_t{7}));
  Apply(changes);
}

// The daemon's last look was some seconds ago.
TEST_F(CarriedOverTest, AProcessThatHasThePidOfAnotherNowHoldsNothingOfIt) {
  constexpr ProcessId kNext{.pid = kProcess.pid, .started = kProcess.started + 1};
  Find({File(1, 2_MiB)});
  Apply(carried_.Opened({.session = kFirst}, kNext));
  Apply(carried_.Declared({.session = kFirst}, kNext, {{.id = 7, .bytes = 2_MiB, .file_device = 1, .file_inode = 1}},
                          kAll));
  EXPECT_EQ(charged_[kFirst], 0u);
  EXPECT_EQ(charged_[kNoSession], 2_MiB);
}

TEST_F(CarriedOverTest, SessionsOfAProcessTellTheirsApart) {
  Find({File(1, 2_MiB), File(2, 4_MiB)});
  Apply(carried_.Opened({.session = kFirst}, kProcess));
  Declare(kFirst, {{.id = 7, .bytes = 2_MiB, .file_device = 1, .file_inode = 1}});
  Declare(kSecond, {{.id = 8, .bytes = 4_MiB, .file_device = 1, .file_inode = 2},
                    {.id = 9, .bytes = 2_MiB, .file_device = 1, .file_inode = 1}});
  EXPECT_EQ(charged_[kFirst], 2_MiB);
  EXPECT_EQ(charged_[kSecond], 4_MiB) << "not what the first one has declared";
}

TEST_F(CarriedOverTest, NobodyTakesOverWhatAnotherProcessHolds) {
  Find({File(1, 2_MiB, {kChild})});
  Declare(kFirst, {{.id = 7, .bytes = 2_MiB, .file_device = 1, .file_inode = 1}});
  EXPECT_EQ(charged_[kFirst], 0u);
  EXPECT_EQ(charged_[kNoSession], 2_MiB);
}

TEST_F(CarriedOverTest, FilesAreGoneWhenTheyAreNotFoundTwice) {
  Find({File(1, 2_MiB), File(2, 4_MiB)});
  Apply(carried_.Opened({.session = kFirst}, kProcess));
  Declare(kFirst, {{.id = 7, .bytes = 2_MiB, .file_device = 1, .file_inode = 1}});
  Apply(carried_.Freed(kFirst, std::vector<uint64_t>{7}));
  EXPECT_EQ(charged_[kFirst], 6_MiB) << "it is looked for, not believed";
  EXPECT_TRUE(carried_.is_settling());
  EXPECT_LT(*carried_.next_look(), now_ + std::chrono::seconds(1));
  Find({File(2, 4_MiB)});
  EXPECT_EQ(charged_[kFirst], 6_MiB) << "it may have passed from one process to another meanwhile";
  EXPECT_TRUE(carried_.is_settling());
  Find({File(2, 4_MiB)});
  EXPECT_EQ(charged_[kFirst], 4_MiB);
  EXPECT_FALSE(carried_.is_settling());
  EXPECT_EQ(*carried_.next_look(), now_ + std::chrono::seconds(5));
  Find({});
  Find({File(2, 4_MiB, {kChild})});
  EXPECT_EQ(charged_[kFirst], 4_MiB) << "a forked child has it now";
  Find({});
  Find({});
  EXPECT_EQ(carried_.bytes(), 0u);
  EXPECT_FALSE(carried_.next_look().has_value());
}

TEST_F(CarriedOverTest, WhatASessionLeavesIsNobodysUntilItIsGone) {
  Find({File(1, 2_MiB)});
  Apply(carried_.Opened({.session = kFirst}, kProcess));
  Declare(kFirst, {{.id = 1, .bytes = 4_MiB}});
  EXPECT_EQ(charged_[kFirst], 6_MiB);
  Apply(carried_.Closed(kFirst));
  EXPECT_EQ(charged_[kFirst], 0u);
  EXPECT_EQ(charged_[kNoSession], 2_MiB);
  EXPECT_TRUE(carried_.is_settling());
  Apply(carried_.Opened({.session = kSecond}, kProcess));
  EXPECT_EQ(charged_[kSecond], 2_MiB);
}

TEST_F(CarriedOverTest, WhatIsFoundLaterIsChargedToo) {
  Find({}, kFirst);
  Find({File(1, 2_MiB), File(2, 4_MiB, {kChild, kProcess}), File(3, 8_MiB, {kChild})}, kFirst);
  EXPECT_EQ(charged_[kFirst], 6_MiB);
  EXPECT_EQ(charged_[kNoSession], 8_MiB);
}

TEST_F(CarriedOverTest, WhatIsSaidWhileSomebodyLooksIsForTheNextLook) {
  Find({File(1, 2_MiB)});
  Apply(carried_.Opened({.session = kFirst}, kProcess));
  Declare(kFirst, {{.id = 7, .bytes = 2_MiB, .file_device = 1, .file_inode = 1}});
  carried_.StartLook();
  Apply(carried_.Freed(kFirst, std::vector<uint64_t>{7}));
  Apply(carried_.Found({File(1, 2_MiB)}, [](const ProcessId&) { return std::nullopt; }));
  carried_.EndLook(now_);
  EXPECT_TRUE(carried_.is_settling());
  EXPECT_TRUE(carried_.IsClosing(kFirst));
  EXPECT_LT(*carried_.next_look(), now_ + std::chrono::seconds(1));
}

TEST_F(CarriedOverTest, IsClosingUntilALookTells) {
  Find({File(1, 2_MiB), File(2, 2_MiB)});
  Apply(carried_.Opened({.session = kFirst}, kProcess));
  Declare(kFirst, {{.id = 7, .bytes = 2_MiB, .file_device = 1, .file_inode = 1},
                   {.id = 8, .bytes = 2_MiB, .file_device = 1, .file_inode = 2}});
  EXPECT_FALSE(carried_.IsClosing(kFirst));
  Apply(carried_.Freed(kFirst, std::vector<uint64_t>{7}));
  EXPECT_TRUE(carried_.IsClosing(kFirst));
  EXPECT_FALSE(carried_.IsClosing(kSecond));
  Find({File(2, 2_MiB)});
  EXPECT_TRUE(carried_.IsClosing(kFirst)) << "it is gone when it was missed twice";
  Find({File(2, 2_MiB)});
  EXPECT_FALSE(carried_.IsClosing(kFirst));
  EXPECT_EQ(charged_[kFirst], 2_MiB);
  Apply(carried_.Freed(kFirst, std::vector<uint64_t>{8}));
  Find({File(2, 2_MiB, {kChild})});
  EXPECT_FALSE(carried_.IsClosing(kFirst)) << "a child has it still";
  Apply(carried_.Freed(kFirst, std::vector<uint64_t>{8}));
  EXPECT_FALSE(carried_.IsClosing(kFirst)) << "it is not believed twice";
}

TEST_F(CarriedOverTest, NobodyWaitsForLooksThatCannotTell) {
  Find({File(1, 2_MiB)});
  Apply(carried_.Opened({.session = kFirst}, kProcess));
  Declare(kFirst, {{.id = 7, .bytes = 2_MiB, .file_device = 1, .file_inode = 1}});
  Apply(carried_.Freed(kFirst, std::vector<uint64_t>{7}));
  carried_.StartLook();
  EXPECT_TRUE(carried_.IsClosing(kFirst));
  carried_.CannotTell();
  carried_.EndLook(now_);
  EXPECT_FALSE(carried_.is_settling());
  EXPECT_FALSE(carried_.IsClosing(kFirst));
  EXPECT_EQ(*carried_.next_look(), now_ + std::chrono::seconds(5));
  Find({});
  Find({});
  EXPECT_EQ(charged_[kFirst], 0u);
}

TEST_F(CarriedOverTest, WhoSaysWrongThingsIsLookedAtLessAndLessOften) {
  std::vector<LeftSegment> files;
  std::vector<CarriedSegment> segments;
  for (uint64_t i = 1; i <= 20; ++i) {
    files.push_back(File(i, 2_MiB));
    segments.push_back({.id = i, .bytes = 2_MiB, .file_device = 1, .file_inode = i});
  }
  Find(files);
  Apply(carried_.Opened({.session = kFirst}, kProcess));
  Declare(kFirst, segments);
  SteadyTime::duration last{0};
  for (uint64_t i = 1; i <= 20; ++i) {
    Apply(carried_.Freed(kFirst, std::vector<uint64_t>{i}));
    EXPECT_GE(*carried_.next_look() - now_, last);
    last = *carried_.next_look() - now_;
    now_ = *carried_.next_look();
    Find(files);
  }
  EXPECT_EQ(last, std::chrono::seconds(5));
}

TEST_F(CarriedOverTest, WhoSaysTheSameAgainAndAgainIsBelievedOnce) {
  Find({File(1, 2_MiB)});
  Apply(carried_.Opened({.session = kFirst}, kProcess));
  Declare(kFirst, {{.id = 7, .bytes = 2_MiB, .file_device = 1, .file_inode = 1}});
  for (int i = 0; i < 3; ++i) {
    carried_.StartLook();
    Apply(carried_.Freed(kFirst, std::vector<uint64_t>{7}));  // the running look may have missed the free
    Apply(carried_.Found({File(1, 2_MiB)}, [](const ProcessId&) { return std::nullopt; }));
    carried_.EndLook(now_);
    EXPECT_EQ(carried_.IsClosing(kFirst), i == 0);
  }
  EXPECT_EQ(*carried_.next_look(), now_ + std::chrono::seconds(5));
  // A further session of the process starts anew.
  Apply(carried_.Closed(kFirst));
  Find({File(1, 2_MiB)});
  Apply(carried_.Opened({.session = kSecond}, kProcess));
  Declare(kSecond, {{.id = 7, .bytes = 2_MiB, .file_device = 1, .file_inode = 1}});
  Apply(carried_.Freed(kSecond, std::vector<uint64_t>{7}));
  EXPECT_TRUE(carried_.IsClosing(kSecond));
}

// The daemon looks for itself instead of trusting the client.
TEST_F(CarriedOverTest, WhoClosesSomethingAfterAQuietTimeIsLookedAtSoon) {
  Find({File(1, 2_MiB)}, kFirst);
  for (int i = 0; i < 20; ++i) {
    const std::optional<SteadyTime> next = carried_.next_look();
    ASSERT_TRUE(next.has_value());
    now_ = *next;
    Find({File(1, 2_MiB)}, kFirst);
  }
  carried_.LookSoon();
  EXPECT_LE(carried_.next_look(), now_ + std::chrono::milliseconds(20));
}

TEST_F(CarriedOverTest, WhatASessionSaidOfAFileDoesNotCountOnceItIsSeen) {
  Declare(kFirst, {{.id = 7, .bytes = 2_MiB, .file_device = 1, .file_inode = 1}});
  EXPECT_EQ(charged_[kFirst], 2_MiB);
  Find({File(1, 1_GiB)}, kSecond);
  EXPECT_EQ(charged_[kFirst], 0u);
  EXPECT_EQ(charged_[kSecond], 1_GiB);
  EXPECT_EQ(carried_.declared_bytes(), 0u);
  Declare(kFirst, {{.id = 8, .bytes = 4_MiB, .file_inode = 1}, {.id = 0, .bytes = 4_MiB}});
  EXPECT_EQ(charged_[kFirst], 8_MiB) << "no file";
}

// The daemon cannot see declared memory that has no file.
TEST_F(CarriedOverTest, WhatIsOnlySaidIsBelievedUpToABound) {
  Declare(kFirst, {{.id = 1, .bytes = 4_MiB}, {.id = 2, .bytes = 8_MiB}, {.id = 3, .bytes = 2_MiB}}, 10_MiB);
  EXPECT_EQ(charged_[kFirst], 6_MiB);
  EXPECT_EQ(carried_.declared_bytes(), 6_MiB);
  Declare(kFirst, {{.id = 1, .bytes = 4_MiB}});
  EXPECT_EQ(charged_[kFirst], 6_MiB) << "once";
  Apply(carried_.Freed(kSecond, std::vector<uint64_t>{1}));
  Apply(carried_.Freed(kFirst, std::vector<uint64_t>{2, 3}));
  EXPECT_EQ(charged_[kFirst], 4_MiB);
  EXPECT_FALSE(carried_.next_look().has_value());
  Apply(carried_.Closed(kFirst));
  EXPECT_EQ(carried_.bytes(), 0u);
}

TEST_F(CarriedOverTest, WhatIsNotSaidAgainIsFreed) {
  Find({File(9, 16_MiB)});
  Apply(carried_.Opened({.session = kFirst}, kProcess));
  Declare(kFirst, {{.id = 1, .bytes = 4_MiB}, {.id = 2, .bytes = 8_MiB}});
  Declare(kFirst, {{.id = 9, .bytes = 16_MiB, .file_device = 1, .file_inode = 9}});
  Declare(kSecond, {{.id = 1, .bytes = 2_MiB}});
  EXPECT_EQ(charged_[kFirst], 28_MiB);
  // Sends a declaration in two messages. Memory in either message stays charged in between.
  carried_.BeginDeclaration(kFirst);
  Declare(kFirst, {{.id = 2, .bytes = 8_MiB}});
  EXPECT_EQ(charged_[kFirst], 28_MiB);
  Declare(kFirst, {{.id = 3, .bytes = 2_MiB}});
  Apply(carried_.EndDeclaration(kFirst));
  EXPECT_EQ(charged_[kFirst], 26_MiB) << "the file is looked for";
  EXPECT_TRUE(carried_.is_settling());
  EXPECT_EQ(charged_[kSecond], 2_MiB);
  // A declaration breaks off, and another declaration follows.
  carried_.BeginDeclaration(kFirst);
  Declare(kFirst, {{.id = 2, .bytes = 8_MiB}});
  carried_.BeginDeclaration(kFirst);
  Declare(kFirst, {{.id = 3, .bytes = 2_MiB}});
  Apply(carried_.EndDeclaration(kFirst));
  EXPECT_EQ(charged_[kFirst], 18_MiB);
  Apply(carried_.EndDeclaration(kFirst));
  EXPECT_EQ(charged_[kFirst], 18_MiB) << "without a beginning it ends nothing";
  carried_.BeginDeclaration(kFirst);
  Apply(carried_.Closed(kFirst));
  Apply(carried_.EndDeclaration(kFirst));
  EXPECT_EQ(charged_[kFirst], 0u);
  Find({});
  Find({});
  carried_.BeginDeclaration(kSecond);
  Apply(carried_.EndDeclaration(kSecond));
  EXPECT_EQ(carried_.bytes(), 0u);
}

}  // namespace
}  // namespace vrambroker
