// SPDX-License-Identifier: Apache-2.0
//
// Log lines that clients cause. Their number is limited: a client in a loop must not fill the disk, or hold up the
// daemon with writing.
#ifndef VRAMBROKER_SERVER_CLIENT_LOG_H_
#define VRAMBROKER_SERVER_CLIENT_LOG_H_

#include <spdlog/spdlog.h>

#include <chrono>
#include <cstdint>
#include <optional>
#include <utility>

#include "allocator/mutex.h"

namespace vrambroker {

// A token bucket. Thread-safe.
class LineLimit {
 public:
  LineLimit(double lines_per_second, double burst) : rate_(lines_per_second), burst_(burst), tokens_(burst) {}

  // How many lines were refused since the last one that was not; nullopt when this one is refused.
  std::optional<uint64_t> Take(std::chrono::steady_clock::time_point now);

 private:
  const double rate_;
  const double burst_;
  Mutex mu_;
  double tokens_ ABSL_GUARDED_BY(mu_);
  std::chrono::steady_clock::time_point last_ ABSL_GUARDED_BY(mu_);
  uint64_t refused_ ABSL_GUARDED_BY(mu_) = 0;
};

// The one that LogClientEvent() uses: 100 lines a second, 1000 at once.
LineLimit& ClientLineLimit();

template <typename... Args>
void LogClientEvent(spdlog::level::level_enum level, spdlog::format_string_t<Args...> format, Args&&... args) {
  const std::optional<uint64_t> left_out = ClientLineLimit().Take(std::chrono::steady_clock::now());
  if (!left_out.has_value()) return;
  if (*left_out > 0) spdlog::warn("{} lines about clients were left out: too many at once", *left_out);
  spdlog::log(level, format, std::forward<Args>(args)...);
}

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_CLIENT_LOG_H_
