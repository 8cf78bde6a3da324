// SPDX-License-Identifier: Apache-2.0
#ifndef VRAMBROKER_ALLOCATOR_REPLAY_IN_PARALLEL_H_
#define VRAMBROKER_ALLOCATOR_REPLAY_IN_PARALLEL_H_

#include <cstddef>
#include <functional>

namespace vrambroker {

// Runs `work(0)` to `work(count - 1)`, each once, on `threads` threads, the caller's included. Calls `done` after each
// with the number of calls ended so far, from any of the threads, by one at a time. Returns when all calls have ended.
void InParallel(size_t count, int threads, const std::function<void(size_t)>& work,
                const std::function<void(size_t)>& done);

}  // namespace vrambroker

#endif  // VRAMBROKER_ALLOCATOR_REPLAY_IN_PARALLEL_H_
