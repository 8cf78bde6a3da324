// SPDX-License-Identifier: Apache-2.0
//
// Mutex, MutexLock and CondVar: std::mutex with clang's thread-safety annotations, and the order of lock_order.h.
//
// absl::Mutex does not fit, because distributions ship Abseil without ThreadSanitizer hooks: a TSan build would see a
// race at every use. std::mutex is a pthread mutex, known to TSan.
#ifndef VRAMBROKER_ALLOCATOR_BASE_MUTEX_H_
#define VRAMBROKER_ALLOCATOR_BASE_MUTEX_H_

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>

#include "absl/base/config.h"
#include "absl/base/thread_annotations.h"
#include "allocator/base/lock_order.h"

namespace vrambroker {

class ABSL_LOCKABLE Mutex {
 public:
  // Innermost: a thread holding the mutex takes no other lock.
  Mutex() : Mutex(lock_level::kLeaf) {}
  // `level` is one of lock_level. Only builds with a check of the order keep the level.
#ifdef VRAMBROKER_CHECKS_LOCK_ORDER
  explicit Mutex(const LockLevel& level) : level_(level) {}
#else
  explicit Mutex(const LockLevel& /*level*/) {}
#endif

  void Lock() ABSL_EXCLUSIVE_LOCK_FUNCTION() {
#ifdef VRAMBROKER_CHECKS_LOCK_ORDER
    LockOrder::WillLock(this, level_);
#endif
    if (!mu_.try_lock()) LockContended();
  }
  void Unlock() ABSL_UNLOCK_FUNCTION() {
#ifdef VRAMBROKER_CHECKS_LOCK_ORDER
    LockOrder::HasUnlocked(this);
#endif
    mu_.unlock();
  }
  // Guesses whether a thread waits in Lock(). For a background thread that takes the lock again and again: a mutex is
  // not fair, and the unlocking thread may well lock again before a waiting thread has woken up.
  bool IsWanted() const {
    return waiting_.load(std::memory_order_relaxed) > 0;
  }

 private:
  friend class CondVar;

  // Spins for a microsecond first: sleeping and waking up takes longer than most locks are held.
  void LockContended() {
    waiting_.fetch_add(1, std::memory_order_relaxed);
    bool locked = false;
    for (int i = 0; i < kSpins && !locked; ++i) {
      SpinPause();
      locked = mu_.try_lock();
    }
    if (!locked) mu_.lock();
    waiting_.fetch_sub(1, std::memory_order_relaxed);
  }
  static void SpinPause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("isb");
#endif
  }

  static constexpr int kSpins = 64;
#ifdef VRAMBROKER_CHECKS_LOCK_ORDER
  const LockLevel& level_;
#endif
  std::mutex mu_;
  std::atomic<int> waiting_{0};
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

// Wakeups may be spurious: wait in a loop over the condition.
class CondVar {
 public:
  void NotifyOne() { cv_.notify_one(); }
  void NotifyAll() { cv_.notify_all(); }

  void Wait(Mutex& mu) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu) {
    std::unique_lock<std::mutex> lock(mu.mu_, std::adopt_lock);
    cv_.wait(lock);
    lock.release();
  }

  // Returns false when `deadline` has passed. Follows the steady clock: setting the system's clock changes nothing.
  bool WaitUntil(Mutex& mu, std::chrono::steady_clock::time_point deadline) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu) {
    std::unique_lock<std::mutex> lock(mu.mu_, std::adopt_lock);
#if defined(ABSL_HAVE_THREAD_SANITIZER)
    // TSan does not know pthread_cond_clockwait(), needed for the steady clock, and would miss that the mutex is
    // unlocked meanwhile.
    const auto left = std::min<std::chrono::steady_clock::duration>(deadline - std::chrono::steady_clock::now(),
                                                                    std::chrono::hours(24));
    const bool in_time = cv_.wait_until(lock, std::chrono::system_clock::now() + left) == std::cv_status::no_timeout;
#else
    const bool in_time = cv_.wait_until(lock, deadline) == std::cv_status::no_timeout;
#endif
    lock.release();
    return in_time || std::chrono::steady_clock::now() < deadline;
  }

 private:
  std::condition_variable cv_;
};

}  // namespace vrambroker

#endif  // VRAMBROKER_ALLOCATOR_BASE_MUTEX_H_
