// SPDX-License-Identifier: Apache-2.0
#include "server/pool/idle_decay.h"

namespace vrambroker {

IdleDecay::IdleDecay(SegmentPool* pool, std::chrono::milliseconds decay)
    : pool_(*pool), thread_([pool, decay] {
        while (pool->AwaitDecay(decay)) pool->ReleaseIdleSince(std::chrono::steady_clock::now() - decay);
      }) {}

IdleDecay::~IdleDecay() {
  pool_.StopDecay();
  thread_.join();
}

}  // namespace vrambroker
