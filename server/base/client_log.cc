// SPDX-License-Identifier: Apache-2.0
#include "server/base/client_log.h"

namespace vrambroker {

std::optional<uint64_t> LineLimit::Take(std::chrono::steady_clock::time_point now) {
  MutexLock lock(mu_);
  if (!bucket_.Take(now)) {
    ++refused_;
    return std::nullopt;
  }
  return std::exchange(refused_, 0);
}

LineLimit& ClientLineLimit() {
  static auto* const limit = new LineLimit(100, 1000);
  return *limit;
}

bool MayLogClientEvent() {
  const std::optional<uint64_t> left_out = ClientLineLimit().Take(std::chrono::steady_clock::now());
  if (!left_out.has_value()) return false;
  if (*left_out > 0) LogLine("lines about clients were left out").Add("lines", *left_out).Write(spdlog::level::warn);
  return true;
}

LogLine SessionLine(absl::string_view event, SessionId id, absl::string_view name) {
  LogLine line(event);
  line.Add("session", Raw(id)).Add("name", name);
  return line;
}

void LogClientEvent(spdlog::level::level_enum level, const LogLine& line) {
  if (MayLogClientEvent()) line.Write(level);
}

}  // namespace vrambroker
