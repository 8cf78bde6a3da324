// SPDX-License-Identifier: Apache-2.0
//
// Log lines caused by clients. Their number is limited: a client in a loop must not fill the disk, or hold up the
// daemon with writing.
#ifndef VRAMBROKER_SERVER_BASE_CLIENT_LOG_H_
#define VRAMBROKER_SERVER_BASE_CLIENT_LOG_H_

#include <spdlog/spdlog.h>

#include <chrono>
#include <cstdint>
#include <optional>
#include <utility>

#include "allocator/base/ids.h"
#include "allocator/base/mutex.h"
#include "server/base/log_line.h"
#include "server/base/rate_limit.h"

namespace vrambroker {

// Thread-safe.
class LineLimit {
 public:
  LineLimit(double lines_per_second, double burst) : bucket_(lines_per_second, burst) {}

  // Number of lines refused since the last accepted line; nullopt when this line is refused.
  std::optional<uint64_t> Take(std::chrono::steady_clock::time_point now);

 private:
  Mutex mu_;
  TokenBucket bucket_ ABSL_GUARDED_BY(mu_);
  uint64_t refused_ ABSL_GUARDED_BY(mu_) = 0;
};

// Limit used by LogClientEvent(): 100 lines a second, 1000 at once.
LineLimit& ClientLineLimit();

// Takes a line from the limit. False: do not write the line. Logs how many lines were left out before.
bool MayLogClientEvent();

// Starts a line about a session, with the id and the name used in metrics and the API.
LogLine SessionLine(absl::string_view event, SessionId id, absl::string_view name);

// Writes the line, unless there were too many just now; the next written line gives the number of lines left out.
void LogClientEvent(spdlog::level::level_enum level, const LogLine& line);

template <typename... Args>
void LogClientEvent(spdlog::level::level_enum level, spdlog::format_string_t<Args...> format, Args&&... args) {
  if (!MayLogClientEvent()) return;
  spdlog::log(level, format, std::forward<Args>(args)...);
}

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_BASE_CLIENT_LOG_H_
