// SPDX-License-Identifier: Apache-2.0
#include "allocator/replay/in_parallel.h"

#include <atomic>
#include <system_error>
#include <thread>
#include <vector>

#include "allocator/base/mutex.h"

namespace vrambroker {

void InParallel(size_t count, int threads, const std::function<void(size_t)>& work,
                const std::function<void(size_t)>& done) {
  std::atomic<size_t> next{0};
  Mutex mu;
  size_t finished = 0;
  const auto loop = [&] {
    for (size_t i = next++; i < count; i = next++) {
      work(i);
      MutexLock lock(mu);
      done(++finished);
    }
  };
  std::vector<std::thread> helpers;
  helpers.reserve(static_cast<size_t>(threads));
  try {
    for (int i = 1; i < threads; ++i) helpers.emplace_back(loop);
    // The machine allows no more threads: the existing threads do the work.
  } catch (const std::system_error&) {  // NOLINT(bugprone-empty-catch)
  }
  loop();
  for (std::thread& helper : helpers) helper.join();
}

}  // namespace vrambroker
