// SPDX-License-Identifier: Apache-2.0
#include "server/client_log.h"

#include <algorithm>

namespace vrambroker {

std::optional<uint64_t> LineLimit::Take(std::chrono::steady_clock::time_point now) {
  MutexLock lock(mu_);
  tokens_ = std::min(burst_, tokens_ + rate_ * std::chrono::duration<double>(now - last_).count());
  last_ = now;
  if (tokens_ < 1) {
    ++refused_;
    return std::nullopt;
  }
  tokens_ -= 1;
  return std::exchange(refused_, 0);
}

LineLimit& ClientLineLimit() {
  static auto* const limit = new LineLimit(100, 1000);
  return *limit;
}

}  // namespace vrambroker
