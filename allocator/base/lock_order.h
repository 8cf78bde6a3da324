// SPDX-License-Identifier: Apache-2.0
//
// The nesting order of locks in daemon and client. A thread holding a lock may take only locks further down the list,
// so no two threads ever wait for each other.
//
// Two checks. clang (-Wthread-safety-beta) sees two locks taken by one function, if both have a level: declare a mutex
// ABSL_ACQUIRED_AFTER its own level and ABSL_ACQUIRED_BEFORE the next level. Builds with a sanitizer see every lock
// taken by a thread, through all calls (LockOrder), and abort on a breach of the order.
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

// Reading the configuration again.
inline constexpr LockLevel kReload{0, "reload"};
// Connections on their way to gRPC.
inline constexpr LockLevel kServer ABSL_ACQUIRED_AFTER(kReload){1, "server"};
// Client: PyTorch's calls while connecting.
inline constexpr LockLevel kConnect ABSL_ACQUIRED_AFTER(kServer){2, "connect"};
// Client: statistics being sent.
inline constexpr LockLevel kReports ABSL_ACQUIRED_AFTER(kConnect){3, "reports"};
// Limits being changed.
inline constexpr LockLevel kLimits ABSL_ACQUIRED_AFTER(kReports){4, "limits"};
// The broker's only timer, while being set.
inline constexpr LockLevel kTimer ABSL_ACQUIRED_AFTER(kLimits){5, "timer"};
// A request for memory.
inline constexpr LockLevel kRequest ABSL_ACQUIRED_AFTER(kTimer){6, "request"};
// Requests waiting for a device.
inline constexpr LockLevel kQueue ABSL_ACQUIRED_AFTER(kRequest){7, "queue"};
// Number of events recorded by a session.
inline constexpr LockLevel kRecordings ABSL_ACQUIRED_AFTER(kQueue){8, "recordings"};
// Client: connections to the daemon.
inline constexpr LockLevel kClient ABSL_ACQUIRED_AFTER(kRecordings){9, "client"};
// Messages between a session and its client, at either end.
inline constexpr LockLevel kStream ABSL_ACQUIRED_AFTER(kClient){10, "stream"};
// A session, in the daemon.
inline constexpr LockLevel kSession ABSL_ACQUIRED_AFTER(kStream){11, "session"};
// A caching allocator.
inline constexpr LockLevel kHeap ABSL_ACQUIRED_AFTER(kSession){12, "heap"};
// Accounts and segments of a device.
inline constexpr LockLevel kPool ABSL_ACQUIRED_AFTER(kHeap){13, "pool"};
// Devices and streams, while being opened.
inline constexpr LockLevel kDevice ABSL_ACQUIRED_AFTER(kPool){14, "device"};
// Every mutex without a level: while holding a leaf, a thread takes no lock.
inline constexpr LockLevel kLeaf ABSL_ACQUIRED_AFTER(kDevice){15, "leaf"};

}  // namespace lock_level

#ifdef VRAMBROKER_CHECKS_LOCK_ORDER
// Locks held by the calling thread. Aborts with both names when a lock is taken in the wrong order.
class LockOrder {
 public:
  static void WillLock(const void* mutex, const LockLevel& level);
  static void HasUnlocked(const void* mutex);
};
#endif

}  // namespace vrambroker

#endif  // VRAMBROKER_ALLOCATOR_BASE_LOCK_ORDER_H_
