// SPDX-License-Identifier: Apache-2.0
#include "server/oom/oom_log.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <thread>
#include <vector>

namespace vrambroker {
namespace {

OomEvent Refused(uint64_t number) {
  OomEvent event;
  event.session = SessionId{number};
  event.client = "client";
  event.report.requested_bytes = number;
  return event;
}

TEST(OomLogTest, NewestFirst) {
  OomLog log;
  EXPECT_TRUE(log.NewestFirst().empty());
  for (uint64_t i = 1; i <= 3; ++i) log.Add(Refused(i));
  const auto events = log.NewestFirst();
  ASSERT_EQ(events.size(), 3u);
  EXPECT_EQ(events[0]->report.requested_bytes, 3u);
  EXPECT_EQ(events[1]->report.requested_bytes, 2u);
  EXPECT_EQ(events[2]->report.requested_bytes, 1u);
  EXPECT_EQ(events[2]->session, SessionId{1});
  EXPECT_EQ(log.total(), 3u);
}

TEST(OomLogTest, TheOldestMakesRoom) {
  OomLog log;
  for (uint64_t i = 1; i <= OomLog::kMaxEvents; ++i) log.Add(Refused(i));
  const auto full = log.NewestFirst();
  EXPECT_EQ(full.size(), OomLog::kMaxEvents);
  EXPECT_EQ(full.back()->report.requested_bytes, 1u);
  log.Add(Refused(OomLog::kMaxEvents + 1));
  const auto events = log.NewestFirst();
  ASSERT_EQ(events.size(), OomLog::kMaxEvents);
  EXPECT_EQ(events.front()->report.requested_bytes, OomLog::kMaxEvents + 1);
  EXPECT_EQ(events.back()->report.requested_bytes, 2u);
  EXPECT_EQ(log.total(), OomLog::kMaxEvents + 1);
  // Events of an earlier list stay readable.
  EXPECT_EQ(full.back()->client, "client");
}

TEST(OomLogTest, WhoIsRefusedAllTheTimeKeepsNobodyElsesOut) {
  OomLog log;
  OomEvent other = Refused(0);
  other.uid = 1000;
  other.client = "other";
  log.Add(other);
  OomEvent recorded = Refused(0);
  recorded.uid = 2000;
  recorded.client = "recorded";
  recorded.report.is_recorded = true;
  log.Add(recorded);
  OomEvent first = recorded;
  first.client = "first";
  first.report.is_first_recorded = true;
  log.Add(first);
  const auto has = [&](const std::string& client) {
    const auto events = log.NewestFirst();
    return std::any_of(events.begin(), events.end(), [&](const auto& event) { return event->client == client; });
  };
  for (uint64_t i = 1; i <= 3 * OomLog::kMaxEvents; ++i) {
    OomEvent again = Refused(i);
    again.uid = 2000;
    log.Add(again);
    ASSERT_EQ(log.NewestFirst().front()->report.requested_bytes, i);
  }
  EXPECT_EQ(log.NewestFirst().size(), OomLog::kMaxEvents);
  EXPECT_TRUE(has("other")) << "of another user";
  EXPECT_TRUE(has("recorded")) << "of the same user, and its recording is found by it";
  for (uint64_t i = 1; i <= OomLog::kMaxEvents; ++i) {
    OomEvent again = Refused(i);
    again.uid = 2000;
    again.report.is_recorded = true;
    log.Add(again);
  }
  EXPECT_FALSE(has("recorded"));
  EXPECT_TRUE(has("first")) << "its recording is kept when those of later ones have gone";
  EXPECT_TRUE(has("other"));
  EXPECT_TRUE(has("client")) << "events without a recording keep their share";
}

TEST(OomLogTest, SeveralThreads) {
  constexpr uint64_t kThreads = 4;
  constexpr uint64_t kEach = 500;
  OomLog log;
  std::vector<std::thread> threads;
  threads.reserve(kThreads);
  for (uint64_t i = 0; i < kThreads; ++i) {
    threads.emplace_back([&log, i] {
      for (uint64_t n = 0; n < kEach; ++n) {
        log.Add(Refused(i * kEach + n));
        if (n % 100 == 0) {
          EXPECT_GE(log.NewestFirst().size(), 1u);
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(log.total(), kThreads * kEach);
  // Events of a thread keep the thread's order.
  std::vector<uint64_t> last(kThreads, kEach);
  for (const auto& event : log.NewestFirst()) {
    const uint64_t thread = event->report.requested_bytes / kEach;
    const uint64_t n = event->report.requested_bytes % kEach;
    EXPECT_LT(n, last[thread]);
    last[thread] = n;
  }
}

}  // namespace
}  // namespace vrambroker
