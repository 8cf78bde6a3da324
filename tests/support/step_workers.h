// SPDX-License-Identifier: Apache-2.0
//
// StepWorkers: workers that run on the test's thread, only when the test calls Step() or Settle().
#ifndef VRAMBROKER_TESTS_SUPPORT_STEP_WORKERS_H_
#define VRAMBROKER_TESTS_SUPPORT_STEP_WORKERS_H_

#include <deque>
#include <functional>
#include <utility>

#include "server/base/worker_pool.h"

namespace vrambroker {

class StepWorkers : public Executor {
 public:
  ~StepWorkers() override { Settle(); }

  void Submit(std::function<void()> task) override { tasks_.push_back(std::move(task)); }
  void SubmitFirst(std::function<void()> task) override { tasks_.push_front(std::move(task)); }
  absl::StatusOr<UserSlots::Slot> StartWaiting(const UserKey& user) override { return waiting_.Take(user); }

  size_t waiting() const { return tasks_.size(); }
  // Runs the waiting tasks, and tasks that these tasks submit.
  void Settle() {
    while (!tasks_.empty()) Step();
  }
  // Runs the first waiting task. REQUIRES: a task waits.
  void Step() {
    const std::function<void()> task = std::move(tasks_.front());
    tasks_.pop_front();
    task();
  }

 private:
  UserSlots waiting_{{.what = "questions", .per_uid = 8, .per_uid_bound = "8", .in_all = 8, .in_all_bound = "8"}};
  std::deque<std::function<void()>> tasks_;
};

}  // namespace vrambroker

#endif  // VRAMBROKER_TESTS_SUPPORT_STEP_WORKERS_H_
