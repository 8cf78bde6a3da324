// SPDX-License-Identifier: Apache-2.0
#include "server/base/detached_threads.h"

#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <utility>

#include "tests/support/fake_device.h"
#include "tests/support/util.h"

namespace vrambroker {
namespace {

using testing_support::WaitFor;

// Counts calls of the task, and holds each call at the gate. Tests share the struct with threads, which may outlive a
// test.
struct HeldTask {
  Gate gate;
  std::atomic<int> begun = 0;
  std::atomic<int> done = 0;
};

std::function<void()> TaskOf(const std::shared_ptr<HeldTask>& task) {
  return [task] {
    ++task->begun;
    task->gate.Pass();
    ++task->done;
  };
}

TEST(DetachedThreadsTest, NoMoreThreadsAndTasksThanAllowed) {
  const auto task = std::make_shared<HeldTask>();
  DetachedThreads threads(2, 3);
  for (int i = 1; i <= 2; ++i) {
    EXPECT_TRUE(threads.Submit(TaskOf(task)));
    task->gate.AwaitArrivals(i);
  }
  for (int i = 0; i < 3; ++i) EXPECT_TRUE(threads.Submit(TaskOf(task)));
  EXPECT_FALSE(threads.Submit(TaskOf(task))) << "three wait";
  EXPECT_EQ(task->begun, 2) << "both threads hang";
  task->gate.Open();
  EXPECT_TRUE(WaitFor([&] { return task->done == 5; }));
  EXPECT_TRUE(threads.Submit(TaskOf(task))) << "there is room again";
  EXPECT_TRUE(WaitFor([&] { return task->done == 6; }));
}

TEST(DetachedThreadsTest, NobodyWaitsForThemAtTheEnd) {
  const auto task = std::make_shared<HeldTask>();
  std::optional<DetachedThreads> threads(std::in_place, 1, 2);
  for (int i = 0; i < 2; ++i) EXPECT_TRUE(threads->Submit(TaskOf(task)));
  task->gate.AwaitArrivals(1);
  threads.reset();
  task->gate.Open();
  EXPECT_TRUE(WaitFor([&] { return task->done == 2; })) << "what was submitted is done";
}

}  // namespace
}  // namespace vrambroker
