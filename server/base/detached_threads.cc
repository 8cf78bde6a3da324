// SPDX-License-Identifier: Apache-2.0
#include "server/base/detached_threads.h"

#include <deque>
#include <system_error>
#include <thread>
#include <utility>

#include "allocator/base/mutex.h"

namespace vrambroker {

struct DetachedThreads::State {
  Mutex mu;
  std::deque<std::function<void()>> waiting ABSL_GUARDED_BY(mu);
  size_t threads ABSL_GUARDED_BY(mu) = 0;
};

DetachedThreads::DetachedThreads(size_t most_threads, size_t most_waiting)
    : most_threads_(most_threads), most_waiting_(most_waiting), state_(std::make_shared<State>()) {}

bool DetachedThreads::Submit(std::function<void()> task) {
  MutexLock lock(state_->mu);
  if (state_->waiting.size() >= most_waiting_) return false;
  if (state_->threads < most_threads_) {
    try {
      std::thread([state = state_] { RunAll(*state); }).detach();
      ++state_->threads;
    } catch (const std::system_error&) {
      if (state_->threads == 0) return false;  // else the running threads do the work
    }
  }
  state_->waiting.push_back(std::move(task));
  return true;
}

void DetachedThreads::RunAll(State& state) {
  while (true) {
    std::function<void()> task;
    {
      MutexLock lock(state.mu);
      if (state.waiting.empty()) {
        --state.threads;
        return;
      }
      task = std::move(state.waiting.front());
      state.waiting.pop_front();
    }
    task();
  }
}

}  // namespace vrambroker
