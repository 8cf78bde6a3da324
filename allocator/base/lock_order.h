// SPDX-License-Identifier: Apache-2.0
//
// The order in which locks nest, of daemon and client. A thread that holds a lock may take only locks further down in
// this list, so no two threads ever wait for each other.
//
// Two checks. clang (-Wthread-safety-beta) sees two locks that one function takes: a mutex with a level is declared
// ABSL_ACQUIRED_AFTER its own level and ABSL_ACQUIRED_BEFORE the next one. Builds with a sanitizer see every lock that
// a thread takes, through all calls (LockOrder): they abort where it would break the order.
#ifndef VRAMBROKER_ALLOCATOR_BASE_LOCK_ORDER_H_
#define VRAMBROKER_ALLOCATOR_BASE_LOCK_ORDER_H_

#include <cstdint>

#include "absl/base/config.h"
#include "absl/base/thread_annotations.h"

#if defined(ABSL_HAVE_ADDRESS_SANITIZER) || defined(ABSL_HAVE_THREAD_SANITIZER)
#define VRAMBROKER_CHECKS_LOCK_ORDER 1
#endif

namespace vrambroker {

struct ABSL_LOCKABLE LockLevel {
  uint8_t depth;
  const char* name;
};

namespace lock_level {

inline constexpr LockLevel kReload{0, "reload"};  // the configuration, while it is read again
inline constexpr LockLevel kReports ABSL_ACQUIRED_AFTER(kReload){1, "reports"};  // client: statistics being sent
inline constexpr LockLevel kLimits ABSL_ACQUIRED_AFTER(kReports){2, "limits"};   // limits being changed
inline constexpr LockLevel kTimer ABSL_ACQUIRED_AFTER(kLimits){3, "timer"};  // the broker's one timer, while it is set
inline constexpr LockLevel kRequest ABSL_ACQUIRED_AFTER(kTimer){4, "request"};  // one request for memory
inline constexpr LockLevel kQueue ABSL_ACQUIRED_AFTER(kRequest){5, "queue"};    // the requests that wait for a device
inline constexpr LockLevel kStream ABSL_ACQUIRED_AFTER(kQueue){6, "stream"};    // messages to a client
inline constexpr LockLevel kSession ABSL_ACQUIRED_AFTER(kStream){7, "session"};
inline constexpr LockLevel kHeap ABSL_ACQUIRED_AFTER(kSession){8, "heap"};  // a caching allocator
inline constexpr LockLevel kPool ABSL_ACQUIRED_AFTER(kHeap){9, "pool"};     // one device's accounts and segments
// Every mutex without a level: no lock is taken while one of them is held.
inline constexpr LockLevel kLeaf ABSL_ACQUIRED_AFTER(kPool){10, "leaf"};

}  // namespace lock_level

#ifdef VRAMBROKER_CHECKS_LOCK_ORDER
// What the calling thread holds. Aborts with both names when a lock is taken in the wrong order.
class LockOrder {
 public:
  static void WillLock(const void* mutex, const LockLevel& level);
  static void HasUnlocked(const void* mutex);
};
#endif

}  // namespace vrambroker

#endif  // VRAMBROKER_ALLOCATOR_BASE_LOCK_ORDER_H_
