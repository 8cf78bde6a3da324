// SPDX-License-Identifier: Apache-2.0
#include "server/base/log_line.h"

#include <spdlog/pattern_formatter.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <ctime>
#include <memory>
#include <nlohmann/json.hpp>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_format.h"

namespace vrambroker {
namespace {

std::atomic<LogFormat> log_format{LogFormat::kText};

// First byte of a LogLine in JSON: tells the formatter that the line is JSON already, not plain text.
constexpr char kReady = '\x01';

std::string JsonString(absl::string_view text) {
  // Replaces bytes that are not UTF-8 with U+FFFD; never throws for such bytes.
  return nlohmann::json(std::string(text)).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

std::string TextValue(absl::string_view value) {
  const bool is_plain = !value.empty() && std::all_of(value.begin(), value.end(), [](unsigned char c) {
    return absl::ascii_isgraph(c) && c != '"' && c != '\\' && c != '=';
  });
  // Tools for key=value understand JSON's quoting.
  return is_plain ? std::string(value) : JsonString(value);
}

class JsonFormatter : public spdlog::formatter {
 public:
  void format(const spdlog::details::log_msg& message, spdlog::memory_buf_t& out) override {
    const std::time_t seconds = std::chrono::system_clock::to_time_t(message.time);
    const auto since = std::chrono::duration_cast<std::chrono::microseconds>(message.time.time_since_epoch());
    std::tm utc = {};
    gmtime_r(&seconds, &utc);
    const absl::string_view payload(message.payload.data(), message.payload.size());
    const bool is_ready = !payload.empty() && payload[0] == kReady;
    const auto level = spdlog::level::to_string_view(message.level);
    std::string line =
        absl::StrFormat(R"({"time":"%04d-%02d-%02dT%02d:%02d:%02d.%06dZ","level":"%s",)", utc.tm_year + 1900,
                        utc.tm_mon + 1, utc.tm_mday, utc.tm_hour, utc.tm_min, utc.tm_sec, since.count() % 1'000'000,
                        level.data() == nullptr ? "" : std::string(level.data(), level.size()));
    if (is_ready) {
      absl::StrAppend(&line, payload.substr(1), "}\n");
    } else {
      absl::StrAppend(&line, "\"message\":", JsonString(payload), "}\n");
    }
    out.append(line.data(), line.data() + line.size());
  }
  std::unique_ptr<spdlog::formatter> clone() const override { return std::make_unique<JsonFormatter>(); }
};

}  // namespace

void SetLogFormat(LogFormat format, bool times) {
  log_format = format;
  if (format == LogFormat::kJson) {
    spdlog::set_formatter(std::make_unique<JsonFormatter>());
  } else {
    spdlog::set_pattern(times ? "%Y-%m-%dT%H:%M:%S.%e %^%l%$ %v" : "%l %v");
  }
}

LogLine::LogLine(absl::string_view event) {
  if (log_format == LogFormat::kJson) {
    text_ = absl::StrCat("\"event\":", JsonString(event));
  } else {
    text_ = std::string(event);
  }
}

LogLine& LogLine::AddBare(absl::string_view key, absl::string_view value) {
  if (log_format == LogFormat::kJson) {
    absl::StrAppend(&text_, ",\"", key, "\":", value);
  } else {
    absl::StrAppend(&text_, " ", key, "=", value);
  }
  return *this;
}

LogLine& LogLine::Add(absl::string_view key, absl::string_view value) {
  return AddBare(key, log_format == LogFormat::kJson ? JsonString(value) : TextValue(value));
}

void LogLine::Write(spdlog::level::level_enum level) const {
  const std::string line = log_format == LogFormat::kJson ? kReady + text_ : text_;
  spdlog::log(level, "{}", line);
}

}  // namespace vrambroker
