// SPDX-License-Identifier: Apache-2.0
#ifndef VRAMBROKER_CLIENT_CONNECTION_CALL_GATE_H_
#define VRAMBROKER_CLIENT_CONNECTION_CALL_GATE_H_

#include <algorithm>
#include <thread>
#include <vector>

#include "allocator/base/mutex.h"

namespace vrambroker::client_internal {

// Lets calls through to an object until the gate is closed; the object may then go away. Thread-safe.
class CallGate {
 public:
  // Runs `call`, which may throw, unless the gate is closed.
  template <typename Call>
  void Run(const Call& call) ABSL_LOCKS_EXCLUDED(mu_) {
    {
      MutexLock lock(mu_);
      if (closed_) return;
      inside_.push_back(std::this_thread::get_id());
    }
    const Leaver leaver{*this};
    call();
  }

  // True when this thread is inside a call through the gate.
  bool IsInside() ABSL_LOCKS_EXCLUDED(mu_) {
    MutexLock lock(mu_);
    return std::find(inside_.begin(), inside_.end(), std::this_thread::get_id()) != inside_.end();
  }

  // Lets no further call begin, and waits for running calls, except a call on this thread, left to end by itself.
  void Close() ABSL_LOCKS_EXCLUDED(mu_) {
    MutexLock lock(mu_);
    closed_ = true;
    while (OthersInside()) changed_.Wait(mu_);
  }

 private:
  struct Leaver {
    CallGate& gate;
    ~Leaver() { gate.Leave(); }
  };

  void Leave() ABSL_LOCKS_EXCLUDED(mu_) {
    MutexLock lock(mu_);
    inside_.erase(std::find(inside_.begin(), inside_.end(), std::this_thread::get_id()));
    changed_.NotifyAll();
  }

  bool OthersInside() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    const std::thread::id self = std::this_thread::get_id();
    return std::any_of(inside_.begin(), inside_.end(), [self](std::thread::id id) { return id != self; });
  }

  Mutex mu_;
  CondVar changed_;
  bool closed_ ABSL_GUARDED_BY(mu_) = false;
  std::vector<std::thread::id> inside_ ABSL_GUARDED_BY(mu_);
};

}  // namespace vrambroker::client_internal

#endif  // VRAMBROKER_CLIENT_CONNECTION_CALL_GATE_H_
