/* SPDX-License-Identifier: Apache-2.0
 *
 * A lock built only on the kernel's futexes: the library providing pthread_mutex_trylock depends on the C library's
 * version. A zeroed lock is free, so that a child after fork() can reset its locks.
 */
#ifndef VRAMBROKER_CLIENT_PRELOAD_LOCK_H_
#define VRAMBROKER_CLIENT_PRELOAD_LOCK_H_

#include <errno.h>
#include <linux/futex.h>
#include <stddef.h>
#include <sys/syscall.h>
#include <unistd.h>

struct lock {
  int state; /* 0 free, 1 held, 2 held with possible waiters */
};

static inline int try_lock(struct lock* lock) {
  int expected = 0;
  return __atomic_compare_exchange_n(&lock->state, &expected, 1, 0, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED);
}

static inline void lock(struct lock* lock) {
  if (try_lock(lock)) return;
  const int error = errno; /* the program's errno */
  while (__atomic_exchange_n(&lock->state, 2, __ATOMIC_ACQUIRE) != 0) {
    syscall(SYS_futex, &lock->state, FUTEX_WAIT_PRIVATE, 2, NULL, NULL, 0);
  }
  errno = error;
}

static inline void unlock(struct lock* lock) {
  if (__atomic_exchange_n(&lock->state, 0, __ATOMIC_RELEASE) == 2) {
    syscall(SYS_futex, &lock->state, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0);
  }
}

#endif /* VRAMBROKER_CLIENT_PRELOAD_LOCK_H_ */
