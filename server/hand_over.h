// SPDX-License-Identifier: Apache-2.0
//
// HandOver: gives connections to gRPC, on threads of its own: gRPC may keep a thread for as long as the connection's
// client sends.
#ifndef VRAMBROKER_SERVER_HAND_OVER_H_
#define VRAMBROKER_SERVER_HAND_OVER_H_

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <set>

#include "allocator/mutex.h"
#include "server/rate_limit.h"
#include "server/worker_pool.h"

namespace vrambroker {

// Thread-safe.
class HandOver {
 public:
  // gRPC sets a connection up in microseconds. A thread that takes longer than this is serving the client by now.
  static constexpr std::chrono::milliseconds kMade{250};

  explicit HandOver(size_t threads) : threads_(threads) {}
  // Returns when all that was submitted is done.
  ~HandOver() { Resume(); }

  // Runs `give` soon, unless paused.
  void Submit(std::function<void()> give) ABSL_LOCKS_EXCLUDED(mu_);
  // None begins any more until Resume(). How many have ever begun, when what gRPC makes for them is made.
  std::optional<intptr_t> Pause(SteadyTime now) ABSL_LOCKS_EXCLUDED(mu_);
  void Resume() ABSL_LOCKS_EXCLUDED(mu_);

 private:
  void Run(const std::function<void()>& give) ABSL_LOCKS_EXCLUDED(mu_);

  Mutex mu_;
  CondVar resumed_;
  bool paused_ ABSL_GUARDED_BY(mu_) = false;
  intptr_t begun_ ABSL_GUARDED_BY(mu_) = 0;
  std::multiset<SteadyTime> began_ ABSL_GUARDED_BY(mu_);  // of those under way
  WorkerPool threads_;
};

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_HAND_OVER_H_
