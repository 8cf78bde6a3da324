// SPDX-License-Identifier: Apache-2.0
//
// Mutex, MutexLock and CondVar: std::mutex with clang's thread-safety annotations.
//
// Not absl::Mutex, because distributions ship Abseil without ThreadSanitizer hooks: under a TSan build every use of
// it would look like a race. std::mutex is a pthread mutex, which TSan knows.
#ifndef VRAMBROKER_ALLOCATOR_MUTEX_H_
#define VRAMBROKER_ALLOCATOR_MUTEX_H_

#include <chrono>
#include <condition_variable>
#include <mutex>

#include "absl/base/thread_annotations.h"

namespace vrambroker {

class ABSL_LOCKABLE Mutex {
 public:
  void Lock() ABSL_EXCLUSIVE_LOCK_FUNCTION() { mu_.lock(); }
  void Unlock() ABSL_UNLOCK_FUNCTION() { mu_.unlock(); }

 private:
  friend class CondVar;
  std::mutex mu_;
};

class ABSL_SCOPED_LOCKABLE MutexLock {
 public:
  explicit MutexLock(Mutex& mu) ABSL_EXCLUSIVE_LOCK_FUNCTION(mu) : mu_(mu) { mu_.Lock(); }
  ~MutexLock() ABSL_UNLOCK_FUNCTION() { mu_.Unlock(); }
  MutexLock(const MutexLock&) = delete;
  MutexLock& operator=(const MutexLock&) = delete;

 private:
  Mutex& mu_;
};

// Wakes may be spurious: wait in a loop over the condition.
class CondVar {
 public:
  void NotifyOne() { cv_.notify_one(); }
  void NotifyAll() { cv_.notify_all(); }

  void Wait(Mutex& mu) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu) {
    std::unique_lock<std::mutex> lock(mu.mu_, std::adopt_lock);
    cv_.wait(lock);
    lock.release();
  }

  // Returns false when `deadline` has passed.
  bool WaitUntil(Mutex& mu, std::chrono::steady_clock::time_point deadline) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu) {
    std::unique_lock<std::mutex> lock(mu.mu_, std::adopt_lock);
    // A wait on the system clock: TSan does not know the call that libstdc++ makes for the steady one.
    const auto left = deadline - std::chrono::steady_clock::now();
    const bool in_time =
        cv_.wait_until(lock, std::chrono::system_clock::now() +
                                 std::chrono::duration_cast<std::chrono::system_clock::duration>(left)) ==
        std::cv_status::no_timeout;
    lock.release();
    return in_time || std::chrono::steady_clock::now() < deadline;
  }

 private:
  std::condition_variable cv_;
};

}  // namespace vrambroker

#endif  // VRAMBROKER_ALLOCATOR_MUTEX_H_
