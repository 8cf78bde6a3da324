// SPDX-License-Identifier: Apache-2.0
//
// SimThreads: runs the daemon's slow tasks one at a time. The simulation says where tasks stop and continue, so that a
// run repeats exactly.
#ifndef VRAMBROKER_TESTS_FAULT_SIM_THREADS_H_
#define VRAMBROKER_TESTS_FAULT_SIM_THREADS_H_

#include <deque>
#include <functional>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "allocator/base/mutex.h"
#include "server/base/worker_pool.h"

namespace vrambroker::fault {

// A thread that runs only while its owner waits for it.
class SimThread {
 public:
  SimThread() : thread_([this] { Loop(); }) {}
  ~SimThread() {
    body_ = nullptr;
    Switch(/*to_thread=*/true, /*wait=*/false);
    thread_.join();
  }

  // Runs `body` until it yields or ends. Returns true when `body` has ended.
  bool Start(std::function<void()> body) {
    body_ = std::move(body);
    return Resume();
  }
  bool Resume() {
    ended_ = false;
    Switch(/*to_thread=*/true, /*wait=*/true);
    return ended_;
  }
  // Returns from a body to the owner of the thread. Does nothing on other threads.
  static void Yield() {
    if (current == nullptr) return;
    current->Switch(/*to_thread=*/false, /*wait=*/true);
  }

 private:
  void Loop() {
    current = this;
    Await(/*thread=*/true);
    while (body_) {
      body_();
      ended_ = true;
      Switch(/*to_thread=*/false, /*wait=*/true);
    }
  }
  void Switch(bool to_thread, bool wait) {
    {
      MutexLock lock(mu_);
      threads_turn_ = to_thread;
      changed_.NotifyAll();
    }
    if (wait) Await(!to_thread);
  }
  void Await(bool thread) {
    MutexLock lock(mu_);
    while (threads_turn_ != thread) changed_.Wait(mu_);
  }

  static inline thread_local SimThread* current = nullptr;

  // Members handed over with the turn.
  std::function<void()> body_;
  bool ended_ = false;

  Mutex mu_;
  CondVar changed_;
  bool threads_turn_ ABSL_GUARDED_BY(mu_) = false;
  std::thread thread_;
};

// Workers of the daemon. Tasks begin and continue in any order that the simulation chooses.
class SimThreads : public Executor {
 public:
  void Submit(std::function<void()> task) override { queued_.push_back(std::move(task)); }
  void SubmitFirst(std::function<void()> task) override { first_.push_back(std::move(task)); }
  // Refuses: waiting for a client would stop the simulation. Tasks proceed as if too many tasks waited.
  absl::StatusOr<UserSlots::Slot> StartWaiting(const UserKey& /*user*/) override {
    return absl::ResourceExhaustedError("the simulation waits for nobody");
  }

  size_t size() const { return queued_.size() + running_.size() + first_.size(); }
  size_t running() const { return running_.size(); }

  // Runs all tasks of SubmitFirst(), which never stop in the middle. Called before time passes: by then a real worker
  // would have run the tasks.
  void RunFirst() {
    while (!first_.empty()) {
      const std::function<void()> task = std::move(first_.front());
      first_.pop_front();
      task();
    }
  }

  // Begins or continues task number `which`, or runs the tasks of SubmitFirst(). REQUIRES: which < size().
  void Step(size_t which) {
    if (which >= running_.size() + queued_.size()) return RunFirst();
    if (which < running_.size()) {
      std::unique_ptr<SimThread> thread = std::move(running_[which]);
      running_.erase(running_.begin() + static_cast<std::ptrdiff_t>(which));
      Keep(std::move(thread), [](SimThread& t) { return t.Resume(); });
      return;
    }
    const auto task = queued_.begin() + static_cast<std::ptrdiff_t>(which - running_.size());
    std::function<void()> body = std::move(*task);
    queued_.erase(task);
    std::unique_ptr<SimThread> thread;
    if (spare_.empty()) {
      thread = std::make_unique<SimThread>();
    } else {
      thread = std::move(spare_.back());
      spare_.pop_back();
    }
    Keep(std::move(thread), [&](SimThread& t) { return t.Start(std::move(body)); });
  }

 private:
  void Keep(std::unique_ptr<SimThread> thread, const std::function<bool(SimThread&)>& run) {
    const bool ended = run(*thread);
    (ended ? spare_ : running_).push_back(std::move(thread));
  }

  std::deque<std::function<void()>> first_;
  std::deque<std::function<void()>> queued_;
  std::vector<std::unique_ptr<SimThread>> running_;  // threads stopped in the middle
  std::vector<std::unique_ptr<SimThread>> spare_;
};

}  // namespace vrambroker::fault

#endif  // VRAMBROKER_TESTS_FAULT_SIM_THREADS_H_
