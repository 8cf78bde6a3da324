// SPDX-License-Identifier: Apache-2.0
#include "server/oom/refusal_recordings.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <string>

#include "allocator/base/bytes.h"

namespace vrambroker {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

HeapSnapshot Heap(uint64_t bytes) {
  HeapSnapshot heap;
  heap.history.resize(bytes / sizeof(HistoryEvent));
  return heap;
}

using KeptAs = RefusalRecordings::Place;

TEST(RefusalRecordingsTest, ASessionHasItsFirstAndItsLast) {
  RefusalRecordings recordings;
  EXPECT_THAT(recordings.Of(SessionId{1}), IsEmpty());
  EXPECT_EQ(recordings.Add(7, SessionId{1}, 1000, Heap(1_MiB)), KeptAs::kFirst);
  EXPECT_EQ(recordings.Add(8, SessionId{2}, 1000, Heap(2_MiB)), KeptAs::kFirst);
  ASSERT_NE(recordings.Find(7), nullptr);
  EXPECT_EQ(recordings.Find(7)->history.size(), 1_MiB / sizeof(HistoryEvent));
  EXPECT_EQ(recordings.Add(9, SessionId{1}, 1000, Heap(1_MiB)), KeptAs::kLater);
  EXPECT_NE(recordings.Find(7), nullptr) << "the first";
  EXPECT_EQ(recordings.Add(10, SessionId{1}, 1000, Heap(1_MiB)), KeptAs::kLater);
  EXPECT_NE(recordings.Find(7), nullptr) << "the first";
  EXPECT_NE(recordings.Find(8), nullptr);
  EXPECT_EQ(recordings.Find(9), nullptr) << "made room";
  EXPECT_NE(recordings.Find(10), nullptr) << "the last";
  EXPECT_THAT(recordings.Of(SessionId{1}), ElementsAre(7, 10));
  EXPECT_EQ(recordings.Find(1), nullptr);
}

TEST(RefusalRecordingsTest, AUserMakesRoomForItself) {
  RefusalRecordings recordings;
  constexpr uint64_t kThird = RefusalRecordings::kMaxBytesOfUser / 3 - 1_MiB;
  EXPECT_EQ(recordings.Add(1, SessionId{1}, 2000, Heap(1_MiB)), KeptAs::kFirst);
  EXPECT_EQ(recordings.Add(2, SessionId{2}, 1000, Heap(kThird)), KeptAs::kFirst);
  EXPECT_EQ(recordings.Add(3, SessionId{3}, 1000, Heap(kThird)), KeptAs::kFirst);
  EXPECT_EQ(recordings.Add(4, SessionId{3}, 1000, Heap(kThird)), KeptAs::kLater);
  EXPECT_EQ(recordings.Add(5, SessionId{3}, 1000, Heap(kThird)), KeptAs::kLater);
  EXPECT_NE(recordings.Find(2), nullptr) << "the session's own was enough";
  EXPECT_EQ(recordings.Find(4), nullptr);
  EXPECT_EQ(recordings.Add(6, SessionId{4}, 1000, Heap(kThird)), KeptAs::kFirst);
  EXPECT_NE(recordings.Find(2), nullptr) << "older, but the session's first";
  EXPECT_NE(recordings.Find(3), nullptr);
  EXPECT_EQ(recordings.Find(5), nullptr) << "the last of a session whose first is kept";
  EXPECT_EQ(recordings.Add(7, SessionId{5}, 1000, Heap(kThird)), KeptAs::kFirst);
  EXPECT_EQ(recordings.Find(2), nullptr) << "the oldest";
  EXPECT_NE(recordings.Find(3), nullptr);
  EXPECT_NE(recordings.Find(1), nullptr) << "another user's";
}

TEST(RefusalRecordingsTest, AFirstMakesNoRoomForItsLast) {
  RefusalRecordings recordings;
  constexpr uint64_t kMost = RefusalRecordings::kMaxBytesOfUser / 3 * 2;
  EXPECT_EQ(recordings.Add(1, SessionId{1}, 1000, Heap(kMost)), KeptAs::kFirst);
  EXPECT_EQ(recordings.Add(2, SessionId{2}, 1000, Heap(1_MiB)), KeptAs::kFirst);
  EXPECT_EQ(recordings.Add(3, SessionId{1}, 1000, Heap(1_MiB)), KeptAs::kLater);
  EXPECT_EQ(recordings.Add(4, SessionId{1}, 1000, Heap(kMost)), KeptAs::kNone);
  for (const uint64_t refusal : {1, 2, 3}) EXPECT_NE(recordings.Find(refusal), nullptr) << "nothing is lost for it";
  // Another session's recording makes room.
  EXPECT_EQ(recordings.Add(5, SessionId{2}, 1000, Heap(kMost)), KeptAs::kLater);
  EXPECT_EQ(recordings.Find(1), nullptr);
  EXPECT_THAT(recordings.Of(SessionId{2}), ElementsAre(2, 5));
  // The next recording is the first kept recording of its session.
  EXPECT_EQ(recordings.Add(6, SessionId{1}, 1000, Heap(1_MiB)), KeptAs::kFirst);
  EXPECT_THAT(recordings.Of(SessionId{1}), ElementsAre(6));
}

TEST(RefusalRecordingsTest, OthersMakeRoomForALastWithinTheTotal) {
  RefusalRecordings recordings;
  constexpr uint64_t kHalf = RefusalRecordings::kMaxBytesOfUser / 2 - 1_MiB;
  for (uint64_t i = 1; i <= 4; ++i) {
    EXPECT_EQ(recordings.Add(i, SessionId{i}, static_cast<uid_t>(1000 + i), Heap(kHalf)), KeptAs::kFirst);
  }
  // All users hold the same amount. User 1001 could lose only the last recording.
  EXPECT_EQ(recordings.Add(5, SessionId{1}, 1001, Heap(kHalf)), KeptAs::kLater);
  EXPECT_THAT(recordings.Of(SessionId{1}), ElementsAre(1, 5));
  uint64_t kept = 0;
  for (uint64_t refusal = 2; refusal <= 4; ++refusal) kept += recordings.Find(refusal) == nullptr ? 0 : 1;
  EXPECT_EQ(kept, 2u);
}

TEST(RefusalRecordingsTest, AllTogetherAreBounded) {
  RefusalRecordings recordings;
  constexpr uint64_t kMost = RefusalRecordings::kMaxBytesOfUser - 1_MiB;
  for (uint64_t i = 1; i <= 5; ++i) {
    EXPECT_EQ(recordings.Add(i, SessionId{i}, static_cast<uid_t>(1000 + i), Heap(kMost)), KeptAs::kFirst);
    uint64_t kept = 0;
    for (uint64_t refusal = 1; refusal <= i; ++refusal) kept += recordings.Find(refusal) == nullptr ? 0 : 1;
    EXPECT_EQ(kept, std::min<uint64_t>(i, RefusalRecordings::kMaxBytes / kMost));
    EXPECT_NE(recordings.Find(i), nullptr) << "the newest";
  }
}

TEST(RefusalRecordingsTest, WhoHasMostMakesRoom) {
  RefusalRecordings recordings;
  constexpr uint64_t kMost = RefusalRecordings::kMaxBytesOfUser - 1_MiB;
  EXPECT_EQ(recordings.Add(1, SessionId{1}, 1000, Heap(8_MiB)), KeptAs::kFirst);
  for (uint64_t i = 2; i <= 6; ++i) {
    EXPECT_EQ(recordings.Add(i, SessionId{i}, static_cast<uid_t>(1000 + i), Heap(kMost)), KeptAs::kFirst);
    EXPECT_NE(recordings.Find(1), nullptr) << "it is the oldest, and small";
    EXPECT_NE(recordings.Find(i), nullptr) << "the newest";
  }
}

// A client may send the longest names, and few events.
TEST(RefusalRecordingsTest, NamesOfScopesTakeRoomToo) {
  const auto heap = [] {
    HeapSnapshot named = Heap(1000);
    named.scopes.assign(4000, {.name = std::string(128, 'n'), .file = std::string(256, 'f')});
    return named;
  };
  RefusalRecordings recordings;
  constexpr uint64_t kMany = RefusalRecordings::kMaxBytesOfUser / 1_MiB + 1;
  for (uint64_t i = 1; i <= kMany; ++i) EXPECT_EQ(recordings.Add(i, SessionId{i}, 1000, heap()), KeptAs::kFirst);
  EXPECT_EQ(recordings.Find(1), nullptr) << "made room";
  EXPECT_NE(recordings.Find(kMany), nullptr);
}

TEST(RefusalRecordingsTest, WhatIsTooLargeIsNotKeptAndLosesNothing) {
  RefusalRecordings recordings;
  EXPECT_EQ(recordings.Add(1, SessionId{1}, 1000, Heap(1_MiB)), KeptAs::kFirst);
  EXPECT_EQ(recordings.Add(2, SessionId{1}, 1000, Heap(RefusalRecordings::kMaxBytesOfUser + 1_MiB)), KeptAs::kNone);
  EXPECT_EQ(recordings.Find(2), nullptr);
  EXPECT_NE(recordings.Find(1), nullptr);
  // A reader keeps a recording that makes room for a later recording.
  EXPECT_EQ(recordings.Add(3, SessionId{1}, 1000, Heap(1_MiB)), KeptAs::kLater);
  const auto read = recordings.Find(3);
  EXPECT_EQ(recordings.Add(4, SessionId{1}, 1000, Heap(1_MiB)), KeptAs::kLater);
  EXPECT_EQ(recordings.Find(3), nullptr);
  EXPECT_EQ(read->history.size(), 1_MiB / sizeof(HistoryEvent));
}

}  // namespace
}  // namespace vrambroker
