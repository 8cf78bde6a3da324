// SPDX-License-Identifier: Apache-2.0
//
// StepWorkers: workers that run on the test's own thread, when it says so. Nothing happens in between.
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
  // Runs what waits, and what that submits.
  void Settle() {
    while (!tasks_.empty()) Step();
  }
  // Runs the first that waits. REQUIRES: there is one.
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
