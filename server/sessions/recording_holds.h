// SPDX-License-Identifier: Apache-2.0
//
// RecordingHolds: how many additional events a session keeps for traces.
#ifndef VRAMBROKER_SERVER_SESSIONS_RECORDING_HOLDS_H_
#define VRAMBROKER_SERVER_SESSIONS_RECORDING_HOLDS_H_

#include <cstdint>
#include <functional>
#include <set>

#include "allocator/base/mutex.h"

namespace vrambroker {

// Thread-safe.
class RecordingHolds {
 public:
  void Add(uint64_t events) ABSL_LOCKS_EXCLUDED(mu_) {
    MutexLock lock(mu_);
    events_.insert(events);
  }
  // REQUIRES: `events` was added.
  void Remove(uint64_t events) ABSL_LOCKS_EXCLUDED(mu_) {
    MutexLock lock(mu_);
    events_.erase(events_.find(events));
  }
  // Number of events needed for all holds; 0: no holds.
  uint64_t Most() const ABSL_LOCKS_EXCLUDED(mu_) {
    MutexLock lock(mu_);
    return MostOf();
  }
  // Calls `apply` with Most(), serialised, so changes are applied in order. `apply` must not wait, and may take any
  // lock below kRecordings.
  void Apply(const std::function<void(uint64_t most)>& apply) const ABSL_LOCKS_EXCLUDED(mu_) {
    MutexLock lock(mu_);
    apply(MostOf());
  }

 private:
  uint64_t MostOf() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return events_.empty() ? 0 : *events_.rbegin(); }

  mutable Mutex mu_ ABSL_ACQUIRED_AFTER(lock_level::kRecordings)
      ABSL_ACQUIRED_BEFORE(lock_level::kClient){lock_level::kRecordings};
  std::multiset<uint64_t> events_ ABSL_GUARDED_BY(mu_);
};

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_SESSIONS_RECORDING_HOLDS_H_
