// SPDX-License-Identifier: Apache-2.0
#include "allocator/base/lock_order.h"

#ifdef VRAMBROKER_CHECKS_LOCK_ORDER

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdio>
#include <cstdlib>

namespace vrambroker {
namespace {

struct Held {
  const void* mutex;
  const LockLevel* level;
};

// Each lock held by a thread is deeper than the lock before, so a thread holds no more locks than there are levels. Has
// no destructor: locks are also taken while a thread ends.
thread_local std::array<Held, 32> held_locks;
thread_local size_t held_count = 0;

}  // namespace

void LockOrder::WillLock(const void* mutex, const LockLevel& level) {
  for (size_t i = 0; i < held_count; ++i) {
    if (held_locks[i].level->depth < level.depth) continue;
    std::fprintf(stderr, "lock order: a lock of level '%s' is taken while one of level '%s' is held (lock_order.h)\n",
                 level.name, held_locks[i].level->name);
    std::abort();
  }
  held_locks[held_count++] = {mutex, &level};
}

void LockOrder::HasUnlocked(const void* mutex) {
  const auto end = held_locks.begin() + static_cast<ptrdiff_t>(held_count);
  const auto held = std::find_if(held_locks.begin(), end, [mutex](const Held& lock) { return lock.mutex == mutex; });
  if (held == end) {
    std::fprintf(stderr, "lock order: a lock is released by a thread that does not hold it\n");
    std::abort();
  }
  std::copy(held + 1, end, held);
  --held_count;
}

}  // namespace vrambroker

#endif  // VRAMBROKER_CHECKS_LOCK_ORDER
