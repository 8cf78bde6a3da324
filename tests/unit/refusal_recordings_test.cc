// SPDX-License-Identifier: Apache-2.0
#include "server/refusal_recordings.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <string>

#include "allocator/bytes.h"

namespace vrambroker {
namespace {

HeapSnapshot Heap(uint64_t bytes) {
  HeapSnapshot heap;
  heap.history.resize(bytes / sizeof(HistoryEvent));
  return heap;
}

TEST(RefusalRecordingsTest, ASessionHasOne) {
  RefusalRecordings recordings;
  EXPECT_EQ(recordings.LastOf(SessionId{1}), 0u);
  EXPECT_TRUE(recordings.Add(7, SessionId{1}, 1000, Heap(1_MiB)));
  EXPECT_TRUE(recordings.Add(8, SessionId{2}, 1000, Heap(2_MiB)));
  ASSERT_NE(recordings.Find(7), nullptr);
  EXPECT_EQ(recordings.Find(7)->history.size(), 1_MiB / sizeof(HistoryEvent));
  EXPECT_TRUE(recordings.Add(9, SessionId{1}, 1000, Heap(1_MiB)));
  EXPECT_EQ(recordings.Find(7), nullptr) << "made room";
  EXPECT_NE(recordings.Find(8), nullptr);
  EXPECT_NE(recordings.Find(9), nullptr);
  EXPECT_EQ(recordings.LastOf(SessionId{1}), 9u);
  EXPECT_EQ(recordings.Find(1), nullptr);
}

TEST(RefusalRecordingsTest, AUserMakesRoomForItself) {
  RefusalRecordings recordings;
  constexpr uint64_t kHalf = RefusalRecordings::kMaxBytesOfUser / 2 - 1_MiB;
  EXPECT_TRUE(recordings.Add(1, SessionId{1}, 2000, Heap(1_MiB)));
  EXPECT_TRUE(recordings.Add(2, SessionId{2}, 1000, Heap(kHalf)));
  EXPECT_TRUE(recordings.Add(3, SessionId{3}, 1000, Heap(kHalf)));
  EXPECT_TRUE(recordings.Add(4, SessionId{4}, 1000, Heap(kHalf)));
  EXPECT_TRUE(recordings.Add(5, SessionId{4}, 1000, Heap(kHalf)));
  EXPECT_NE(recordings.Find(3), nullptr) << "the session's own was enough";
  EXPECT_EQ(recordings.Find(4), nullptr);
  EXPECT_TRUE(recordings.Add(4, SessionId{4}, 1000, Heap(kHalf)));
  EXPECT_NE(recordings.Find(1), nullptr) << "another user's";
  EXPECT_EQ(recordings.Find(2), nullptr) << "the oldest";
  EXPECT_NE(recordings.Find(3), nullptr);
  EXPECT_NE(recordings.Find(4), nullptr);
}

TEST(RefusalRecordingsTest, AllTogetherAreBounded) {
  RefusalRecordings recordings;
  constexpr uint64_t kMost = RefusalRecordings::kMaxBytesOfUser - 1_MiB;
  for (uint64_t i = 1; i <= 5; ++i) {
    EXPECT_TRUE(recordings.Add(i, SessionId{i}, static_cast<uid_t>(1000 + i), Heap(kMost)));
    uint64_t kept = 0;
    for (uint64_t refusal = 1; refusal <= i; ++refusal) kept += recordings.Find(refusal) == nullptr ? 0 : 1;
    EXPECT_EQ(kept, std::min<uint64_t>(i, RefusalRecordings::kMaxBytes / kMost));
    EXPECT_NE(recordings.Find(i), nullptr) << "the newest";
  }
}

TEST(RefusalRecordingsTest, WhoHasMostMakesRoom) {
  RefusalRecordings recordings;
  constexpr uint64_t kMost = RefusalRecordings::kMaxBytesOfUser - 1_MiB;
  EXPECT_TRUE(recordings.Add(1, SessionId{1}, 1000, Heap(8_MiB)));
  for (uint64_t i = 2; i <= 6; ++i) {
    EXPECT_TRUE(recordings.Add(i, SessionId{i}, static_cast<uid_t>(1000 + i), Heap(kMost)));
    EXPECT_NE(recordings.Find(1), nullptr) << "it is the oldest, and small";
    EXPECT_NE(recordings.Find(i), nullptr) << "the newest";
  }
}

// A client may send the longest names there are, and next to no events.
TEST(RefusalRecordingsTest, NamesOfScopesTakeRoomToo) {
  const auto heap = [] {
    HeapSnapshot named = Heap(1000);
    named.scopes.assign(4000, {.name = std::string(128, 'n'), .file = std::string(256, 'f')});
    return named;
  };
  RefusalRecordings recordings;
  constexpr uint64_t kMany = RefusalRecordings::kMaxBytesOfUser / 1_MiB + 1;
  for (uint64_t i = 1; i <= kMany; ++i) EXPECT_TRUE(recordings.Add(i, SessionId{i}, 1000, heap()));
  EXPECT_EQ(recordings.Find(1), nullptr) << "made room";
  EXPECT_NE(recordings.Find(kMany), nullptr);
}

TEST(RefusalRecordingsTest, WhatIsTooLargeIsNotKeptAndLosesNothing) {
  RefusalRecordings recordings;
  EXPECT_TRUE(recordings.Add(1, SessionId{1}, 1000, Heap(1_MiB)));
  EXPECT_FALSE(recordings.Add(2, SessionId{1}, 1000, Heap(RefusalRecordings::kMaxBytesOfUser + 1_MiB)));
  EXPECT_EQ(recordings.Find(2), nullptr);
  EXPECT_NE(recordings.Find(1), nullptr);
  // A reader keeps its recording when that makes room.
  const auto read = recordings.Find(1);
  EXPECT_TRUE(recordings.Add(3, SessionId{1}, 1000, Heap(1_MiB)));
  EXPECT_EQ(recordings.Find(1), nullptr);
  EXPECT_EQ(read->history.size(), 1_MiB / sizeof(HistoryEvent));
}

}  // namespace
}  // namespace vrambroker
