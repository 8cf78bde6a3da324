// SPDX-License-Identifier: Apache-2.0
//
// SharedTimer: a broker's only timer, set to the earliest time at which a part of the broker has work.
#ifndef VRAMBROKER_SERVER_BASE_SHARED_TIMER_H_
#define VRAMBROKER_SERVER_BASE_SHARED_TIMER_H_

#include <functional>
#include <optional>
#include <utility>
#include <vector>

#include "allocator/base/mutex.h"
#include "server/base/steady_time.h"

namespace vrambroker {

// Thread-safe, once all sources are added.
class SharedTimer {
 public:
  // Time of the source's next work; nullopt: no work. Never blocks.
  using Source = std::function<std::optional<SteadyTime>()>;

  // `set` replaces the time set before.
  explicit SharedTimer(std::function<void(SteadyTime)> set) : set_(std::move(set)) {}

  void AddSource(Source source) { sources_.push_back(std::move(source)); }
  // Call when a source's time may have changed.
  void Update() ABSL_LOCKS_EXCLUDED(mu_) {
    MutexLock lock(mu_);
    std::optional<SteadyTime> next;
    for (const Source& source : sources_) next = Earlier(next, source());
    if (next.has_value()) set_(*next);
  }

 private:
  const std::function<void(SteadyTime)> set_;
  std::vector<Source> sources_;
  Mutex mu_ ABSL_ACQUIRED_AFTER(lock_level::kTimer) ABSL_ACQUIRED_BEFORE(lock_level::kRequest){
      lock_level::kTimer};  // held while the timer is set, so that the earliest time wins
};

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_BASE_SHARED_TIMER_H_
