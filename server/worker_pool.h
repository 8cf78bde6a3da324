// SPDX-License-Identifier: Apache-2.0
//
// Threads for what may wait: driver calls, and clients closing their mappings. RPC threads never do.
#ifndef VRAMBROKER_SERVER_WORKER_POOL_H_
#define VRAMBROKER_SERVER_WORKER_POOL_H_

#include <deque>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "allocator/mutex.h"

namespace vrambroker {

// Runs tasks on up to `max_threads` threads, started when needed. Thread-safe.
class WorkerPool {
 public:
  explicit WorkerPool(size_t max_threads) : max_threads_(max_threads) {}
  // Runs what was submitted, then stops.
  ~WorkerPool();

  void Submit(std::function<void()> task);

  // For tasks that wait for a client rather than for the driver: false when half of the threads do so already, and the
  // task must go on without waiting. Clients that are slow on purpose cannot keep everyone else's tasks from running.
  bool TryStartWaiting();
  void StopWaiting();

 private:
  void Run();

  const size_t max_threads_;
  Mutex mu_;
  CondVar changed_;
  std::deque<std::function<void()>> tasks_ ABSL_GUARDED_BY(mu_);
  std::vector<std::thread> threads_ ABSL_GUARDED_BY(mu_);
  size_t idle_threads_ ABSL_GUARDED_BY(mu_) = 0;
  size_t waiting_ ABSL_GUARDED_BY(mu_) = 0;  // tasks between TryStartWaiting() and StopWaiting()
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
};

// Runs its tasks one after the other on a WorkerPool, so that one session keeps at most one thread busy. Thread-safe.
class SerialQueue : public std::enable_shared_from_this<SerialQueue> {
 public:
  static constexpr size_t kMaxTasks = 256;

  // `workers` outlives all tasks.
  explicit SerialQueue(WorkerPool* workers) : workers_(*workers) {}
  // False, and the task is dropped, when kMaxTasks are queued.
  bool Submit(std::function<void()> task);

 private:
  void RunNext();

  WorkerPool& workers_;
  Mutex mu_;
  std::deque<std::function<void()>> tasks_ ABSL_GUARDED_BY(mu_);
  bool running_ ABSL_GUARDED_BY(mu_) = false;
};

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_WORKER_POOL_H_
