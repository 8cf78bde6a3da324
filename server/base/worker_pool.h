// SPDX-License-Identifier: Apache-2.0
//
// Threads for work that may wait: driver calls, and clients closing their mappings. RPC threads never wait.
#ifndef VRAMBROKER_SERVER_BASE_WORKER_POOL_H_
#define VRAMBROKER_SERVER_BASE_WORKER_POOL_H_

#include <deque>
#include <functional>
#include <limits>
#include <memory>
#include <thread>
#include <vector>

#include "allocator/base/mutex.h"
#include "server/base/user_slots.h"

namespace vrambroker {

// Runs tasks that may take time: on threads, or in a simulation. Thread-safe.
class Executor {
 public:
  virtual ~Executor() = default;

  virtual void Submit(std::function<void()> task) = 0;
  // Puts `task` before all tasks not yet begun. For short and rare tasks.
  virtual void SubmitFirst(std::function<void()> task) = 0;

  // For tasks that wait for a client of `user` rather than for the driver, as long as the task keeps the slot.
  // ResourceExhausted when too many tasks wait already, or too many for clients of this user; the task must then go on
  // without waiting. Deliberately slow clients can neither block everyone else's tasks, nor keep everyone else's
  // clients from being asked.
  virtual absl::StatusOr<UserSlots::Slot> StartWaiting(const UserKey& user) = 0;
};

// Runs tasks on up to `max_threads` threads, started when needed. Half of them may wait for clients.
class WorkerPool : public Executor {
 public:
  explicit WorkerPool(size_t max_threads, size_t max_waiting_per_uid = std::numeric_limits<size_t>::max());
  // Runs all submitted tasks, then stops.
  ~WorkerPool() override;

  void Submit(std::function<void()> task) override;
  void SubmitFirst(std::function<void()> task) override;
  absl::StatusOr<UserSlots::Slot> StartWaiting(const UserKey& user) override { return waiting_.Take(user); }

 private:
  void Run();
  // Starts or wakes a thread for an added task.
  void Added() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const size_t max_threads_;
  UserSlots waiting_;
  Mutex mu_;
  CondVar changed_;
  std::deque<std::function<void()>> tasks_ ABSL_GUARDED_BY(mu_);
  std::vector<std::thread> threads_ ABSL_GUARDED_BY(mu_);
  size_t idle_threads_ ABSL_GUARDED_BY(mu_) = 0;
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
};

// Runs tasks in sequence on an Executor, so that a session keeps at most one thread busy. Thread-safe.
class SerialQueue : public std::enable_shared_from_this<SerialQueue> {
 public:
  static constexpr size_t kMaxTasks = 256;

  // `workers` outlives all tasks.
  explicit SerialQueue(Executor* workers) : workers_(*workers) {}
  // False, and the task is dropped, when kMaxTasks are queued.
  bool Submit(std::function<void()> task);
  // Like Submit(), ahead of all tasks of Submit(), and behind earlier tasks of SubmitFirst().
  bool SubmitFirst(std::function<void()> task);

 private:
  bool Submit(std::function<void()> task, bool first);
  void RunNext();

  Executor& workers_;
  Mutex mu_;
  std::deque<std::function<void()>> first_ ABSL_GUARDED_BY(mu_);
  std::deque<std::function<void()>> tasks_ ABSL_GUARDED_BY(mu_);
  bool running_ ABSL_GUARDED_BY(mu_) = false;
};

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_BASE_WORKER_POOL_H_
