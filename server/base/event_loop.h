// SPDX-License-Identifier: Apache-2.0
//
// EventLoop: a thread waiting for file descriptors (epoll). Accepts connections, reads signals, sees processes end.
#ifndef VRAMBROKER_SERVER_BASE_EVENT_LOOP_H_
#define VRAMBROKER_SERVER_BASE_EVENT_LOOP_H_

#include <sys/epoll.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "allocator/base/mutex.h"
#include "allocator/base/unique_fd.h"

namespace vrambroker {

// Watch and Unwatch: from any thread. Callbacks run on the thread in Run() and must not block.
class EventLoop {
 public:
  EventLoop();

  // Calls `ready` whenever `events` (EPOLLIN, ...) hold for `fd`, until Unwatch. The loop owns the descriptor.
  absl::Status Watch(UniqueFd fd, uint32_t events, std::function<void()> ready) {
    return Watch(std::make_shared<const UniqueFd>(std::move(fd)), events, std::move(ready));
  }
  // Like Watch() above, for a descriptor with further owners. A descriptor has one watch at a time.
  absl::Status Watch(std::shared_ptr<const UniqueFd> fd, uint32_t events, std::function<void()> ready)
      ABSL_LOCKS_EXCLUDED(mu_);
  // Waits for `events` of a watched `fd` from now on. Errors and hang-ups of `fd` are always waited for.
  void Change(int fd, uint32_t events) ABSL_LOCKS_EXCLUDED(mu_);
  // Forgets `fd`, and closes the descriptor unless it has further owners. Allowed inside the descriptor's own callback.
  void Unwatch(int fd) ABSL_LOCKS_EXCLUDED(mu_);

  // Runs until Stop(). Calls `tick` about every `period`.
  void Run(std::chrono::milliseconds period, const std::function<void()>& tick);
  // Callable from a callback or any thread.
  void Stop();

 private:
  struct Watched {
    std::shared_ptr<const UniqueFd> fd;
    std::shared_ptr<const std::function<void()>> ready;
  };

  UniqueFd epoll_;
  UniqueFd wake_;
  std::atomic<bool> stop_{false};
  Mutex mu_;
  uint64_t next_serial_ ABSL_GUARDED_BY(mu_) = 1;
  absl::flat_hash_map<uint64_t, Watched> watched_
      ABSL_GUARDED_BY(mu_);  // by serial: distinguishes a descriptor from its reuse
  absl::flat_hash_map<int, uint64_t> serial_of_ ABSL_GUARDED_BY(mu_);
};

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_BASE_EVENT_LOOP_H_
