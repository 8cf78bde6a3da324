// SPDX-License-Identifier: Apache-2.0
#include "server/base/worker_pool.h"

#include <system_error>
#include <utility>

namespace vrambroker {

WorkerPool::WorkerPool(size_t max_threads, size_t max_waiting_per_uid)
    : max_threads_(max_threads),
      waiting_({.what = "unanswered questions to clients",
                .per_uid = max_waiting_per_uid,
                .per_uid_bound = "max_questions_per_uid",
                .in_all = max_threads / 2,
                .in_all_bound = "the number of its workers"}) {}

WorkerPool::~WorkerPool() {
  std::vector<std::thread> threads;
  {
    MutexLock lock(mu_);
    stopping_ = true;
    threads.swap(threads_);
  }
  changed_.NotifyAll();
  for (std::thread& thread : threads) thread.join();
}

void WorkerPool::Submit(std::function<void()> task) {
  MutexLock lock(mu_);
  tasks_.push_back(std::move(task));
  Added();
}

void WorkerPool::SubmitFirst(std::function<void()> task) {
  MutexLock lock(mu_);
  tasks_.push_front(std::move(task));
  Added();
}

void WorkerPool::Added() {
  if (tasks_.size() > idle_threads_ && threads_.size() < max_threads_ && !stopping_) {
    try {
      threads_.emplace_back([this] { Run(); });
    } catch (const std::system_error&) {
      if (threads_.empty()) throw;  // the machine allows no more threads; the running threads do the work
    }
  }
  changed_.NotifyOne();
}

void WorkerPool::Run() {
  while (true) {
    std::function<void()> task;
    {
      MutexLock lock(mu_);
      ++idle_threads_;
      while (tasks_.empty() && !stopping_) changed_.Wait(mu_);
      --idle_threads_;
      if (tasks_.empty()) return;
      task = std::move(tasks_.front());
      tasks_.pop_front();
    }
    task();
  }
}

bool SerialQueue::Submit(std::function<void()> task) {
  return Submit(std::move(task), /*first=*/false);
}

bool SerialQueue::SubmitFirst(std::function<void()> task) {
  return Submit(std::move(task), /*first=*/true);
}

bool SerialQueue::Submit(std::function<void()> task, bool first) {
  {
    MutexLock lock(mu_);
    if (first_.size() + tasks_.size() >= kMaxTasks) return false;
    (first ? first_ : tasks_).push_back(std::move(task));
    if (running_) return true;
    running_ = true;
  }
  workers_.Submit([self = shared_from_this()] { self->RunNext(); });
  return true;
}

void SerialQueue::RunNext() {
  std::function<void()> task;
  {
    MutexLock lock(mu_);
    std::deque<std::function<void()>>& next = first_.empty() ? tasks_ : first_;
    if (next.empty()) {
      running_ = false;
      return;
    }
    task = std::move(next.front());
    next.pop_front();
  }
  task();
  // Back to the end of the workers' queue: fair to other sessions.
  workers_.Submit([self = shared_from_this()] { self->RunNext(); });
}

}  // namespace vrambroker
