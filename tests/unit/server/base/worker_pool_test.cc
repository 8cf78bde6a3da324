// SPDX-License-Identifier: Apache-2.0
#include "server/base/worker_pool.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "tests/support/fake_device.h"

namespace vrambroker {
namespace {

TEST(WorkerPoolTest, RunsTasksOnOtherThreads) {
  std::atomic<bool> other = false;
  {
    WorkerPool pool(1);
    pool.Submit([&, caller = std::this_thread::get_id()] { other = std::this_thread::get_id() != caller; });
  }
  EXPECT_TRUE(other);
}

TEST(WorkerPoolTest, DestructorRunsEverything) {
  std::atomic<int> runs = 0;
  {
    WorkerPool pool(3);
    for (int i = 0; i < 1000; ++i) pool.Submit([&] { ++runs; });
  }
  EXPECT_EQ(runs, 1000);
}

TEST(WorkerPoolTest, DestructorRunsWhatTasksSubmit) {
  std::atomic<int> runs = 0;
  {
    WorkerPool pool(2);
    pool.Submit([&] {
      ++runs;
      pool.Submit([&] {
        ++runs;
        pool.Submit([&] { ++runs; });
      });
    });
  }
  EXPECT_EQ(runs, 3);
}

TEST(WorkerPoolTest, SomeTasksComeBeforeThoseThatHaveNotBegun) {
  std::vector<std::string> ran;
  {
    Gate gate;
    WorkerPool pool(1);
    pool.Submit([&] { gate.Pass(); });
    gate.AwaitArrivals(1);
    pool.Submit([&] { ran.emplace_back("last"); });
    pool.SubmitFirst([&] { ran.emplace_back("first"); });
    gate.Open();
  }
  EXPECT_THAT(ran, testing::ElementsAre("first", "last"));
}

TEST(WorkerPoolTest, UnusedPoolEnds) {
  WorkerPool pool(4);
}

TEST(WorkerPoolTest, RunsAsManyTasksAtATimeAsItMay) {
  Gate gate;
  WorkerPool pool(3);
  for (int i = 0; i < 3; ++i) pool.Submit([&] { gate.Pass(); });
  gate.AwaitArrivals(3);  // the call would never return with fewer threads
  gate.Open();
}

TEST(WorkerPoolTest, ABusyThreadDoesNotHoldUpTheNextTask) {
  Gate slow;
  Gate quick;
  quick.Open();
  WorkerPool pool(2);
  // A thread becomes idle, and then takes the slow task.
  pool.Submit([&] { quick.Pass(); });
  quick.AwaitArrivals(1);
  pool.Submit([&] { slow.Pass(); });
  pool.Submit([&] { quick.Pass(); });
  quick.AwaitArrivals(2);
  slow.Open();
}

TEST(WorkerPoolTest, NeverRunsMoreThanItMay) {
  std::atomic<int> running = 0;
  std::atomic<int> most = 0;
  Mutex mu;
  std::set<std::thread::id> threads;
  {
    WorkerPool pool(2);
    for (int i = 0; i < 500; ++i) {
      pool.Submit([&] {
        const int now = ++running;
        int seen = most;
        while (now > seen && !most.compare_exchange_weak(seen, now)) {
        }
        {
          MutexLock lock(mu);
          threads.insert(std::this_thread::get_id());
        }
        std::this_thread::yield();
        --running;
      });
    }
  }
  EXPECT_LE(most, 2);
  EXPECT_LE(threads.size(), 2u);
}

TEST(SerialQueueTest, RunsInOrderOneAtATime) {
  std::vector<int> order;  // guarded by the queue, which runs a task at a time
  std::atomic<int> running = 0;
  {
    WorkerPool pool(4);
    const auto queue = std::make_shared<SerialQueue>(&pool);
    for (int i = 0; i < 500; ++i) {
      const auto task = [&, i] {
        EXPECT_EQ(++running, 1);
        order.push_back(i);
        std::this_thread::yield();
        --running;
      };
      while (!queue->Submit(task)) std::this_thread::yield();  // the queue is full
    }
  }
  ASSERT_EQ(order.size(), 500u);
  EXPECT_TRUE(std::is_sorted(order.begin(), order.end()));
}

TEST(SerialQueueTest, KeepsOneThreadBusyAtMost) {
  Gate gate;
  Gate other;
  other.Open();
  WorkerPool pool(2);
  const auto blocked = std::make_shared<SerialQueue>(&pool);
  const auto free = std::make_shared<SerialQueue>(&pool);
  for (int i = 0; i < 10; ++i) blocked->Submit([&] { gate.Pass(); });
  gate.AwaitArrivals(1);
  // These tasks would never run if the blocked queue took both threads.
  for (int i = 0; i < 10; ++i) free->Submit([&] { other.Pass(); });
  other.AwaitArrivals(10);
  gate.Open();
}

TEST(SerialQueueTest, TakesTurnsWithOtherQueues) {
  std::vector<char> order;
  {
    Gate gate;
    WorkerPool pool(1);
    pool.Submit([&] { gate.Pass(); });
    gate.AwaitArrivals(1);
    const auto a = std::make_shared<SerialQueue>(&pool);
    const auto b = std::make_shared<SerialQueue>(&pool);
    for (int i = 0; i < 100; ++i) a->Submit([&] { order.push_back('a'); });
    b->Submit([&] { order.push_back('b'); });
    gate.Open();
  }
  ASSERT_EQ(order.size(), 101u);
  EXPECT_EQ(std::string(order.begin(), order.begin() + 3), "aba") << "one of a hundred, then the other session";
}

TEST(SerialQueueTest, IsUsableAgainWhenItHasRunDry) {
  Gate gate;
  gate.Open();
  WorkerPool pool(2);
  const auto queue = std::make_shared<SerialQueue>(&pool);
  for (int round = 1; round <= 200; ++round) {
    queue->Submit([&] { gate.Pass(); });
    gate.AwaitArrivals(round);
  }
}

TEST(SerialQueueTest, SomeAreRunBeforeAllOthersInTheirOrder) {
  std::string order;
  {
    Gate gate;
    WorkerPool pool(1);
    const auto queue = std::make_shared<SerialQueue>(&pool);
    queue->Submit([&] { gate.Pass(); });
    gate.AwaitArrivals(1);
    for (const char task : {'c', 'd'}) queue->Submit([&order, task] { order += task; });
    for (const char task : {'a', 'b'}) queue->SubmitFirst([&order, task] { order += task; });
    gate.Open();
  }
  EXPECT_EQ(order, "abcd");
}

TEST(SerialQueueTest, RefusesWhatItCannotQueue) {
  Gate gate;
  std::atomic<size_t> runs = 0;
  {
    WorkerPool pool(1);
    const auto queue = std::make_shared<SerialQueue>(&pool);
    EXPECT_TRUE(queue->Submit([&] { gate.Pass(); }));
    gate.AwaitArrivals(1);
    for (size_t i = 0; i < SerialQueue::kMaxTasks; ++i) EXPECT_TRUE(queue->Submit([&] { ++runs; }));
    EXPECT_FALSE(queue->Submit([&] { ++runs; }));
    EXPECT_FALSE(queue->SubmitFirst([&] { ++runs; }));
    gate.Open();
  }
  EXPECT_EQ(runs, SerialQueue::kMaxTasks) << "what was refused is not run";
}

TEST(WorkerPoolTest, HalfOfTheThreadsMayWaitForClients) {
  WorkerPool pool(4);
  const auto first = pool.StartWaiting(1);
  {
    const auto second = pool.StartWaiting(1);
    EXPECT_TRUE(first.ok() && second.ok());
    EXPECT_TRUE(absl::IsResourceExhausted(pool.StartWaiting(2).status()));
  }
  EXPECT_TRUE(pool.StartWaiting(1).ok());
}

TEST(WorkerPoolTest, OneUserLeavesRoomForQuestionsToOthers) {
  WorkerPool pool(8, /*max_waiting_per_uid=*/2);
  const auto first = pool.StartWaiting(1);
  const auto second = pool.StartWaiting(1);
  EXPECT_TRUE(first.ok() && second.ok());
  const absl::Status refused = pool.StartWaiting(1).status();
  EXPECT_TRUE(absl::IsResourceExhausted(refused));
  EXPECT_THAT(std::string(refused.message()), ::testing::HasSubstr("max_questions_per_uid"));
  EXPECT_TRUE(pool.StartWaiting(2).ok());
}

TEST(SerialQueueTest, OutlivesItsOwnersReference) {
  std::atomic<int> runs = 0;
  {
    WorkerPool pool(1);
    auto queue = std::make_shared<SerialQueue>(&pool);
    for (int i = 0; i < 10; ++i) queue->Submit([&] { ++runs; });
    queue.reset();
  }
  EXPECT_EQ(runs, 10);
}

}  // namespace
}  // namespace vrambroker
