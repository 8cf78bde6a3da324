// SPDX-License-Identifier: Apache-2.0
//
// IdleDecay: gives a pool's idle segments back to the driver when they have been idle for long or are too many.
#ifndef VRAMBROKER_SERVER_POOL_IDLE_DECAY_H_
#define VRAMBROKER_SERVER_POOL_IDLE_DECAY_H_

#include <chrono>
#include <thread>

#include "allocator/base/mutex.h"
#include "server/pool/segment_pool.h"

namespace vrambroker {

// Runs a thread per device: a slow driver must not hold up clients or other devices.
class IdleDecay {
 public:
  // `pool` outlives this object, its only IdleDecay.
  IdleDecay(SegmentPool* pool, std::chrono::milliseconds decay);
  ~IdleDecay();
  IdleDecay(const IdleDecay&) = delete;
  IdleDecay& operator=(const IdleDecay&) = delete;

 private:
  void Run();
  // Waits until there is something to release. Returns false when stopping.
  bool Await() ABSL_LOCKS_EXCLUDED(mu_);

  SegmentPool& pool_;
  const std::chrono::milliseconds decay_;
  Mutex mu_;
  CondVar changed_;
  bool is_new_ ABSL_GUARDED_BY(mu_) = false;  // changed since the last look
  bool stops_ ABSL_GUARDED_BY(mu_) = false;
  std::thread thread_;
};

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_POOL_IDLE_DECAY_H_
