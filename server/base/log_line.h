// SPDX-License-Identifier: Apache-2.0
//
// Log lines with keys: for people as text, for programs as JSON, with the same keys.
#ifndef VRAMBROKER_SERVER_BASE_LOG_LINE_H_
#define VRAMBROKER_SERVER_BASE_LOG_LINE_H_

#include <spdlog/spdlog.h>

#include <concepts>
#include <cstdint>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace vrambroker {

enum class LogFormat { kText, kJson };

// The format of all lines of this process from now on, of those that are plain text, too: in JSON these have a
// "message". To be called before other threads log. `times`: whether lines of text carry the time.
void SetLogFormat(LogFormat format, bool times);

// An event and what belongs to it, in order:
//
//   text:  session closed session=3 name=train reason=goodbye why="its process has ended"
//   JSON:  {"time":"...","level":"info","event":"session closed","session":3,"name":"train",...}
//
// Values may be anything: in text those with spaces and the like are quoted and escaped, in JSON what is no UTF-8 is
// replaced. Keys and events are words of ours.
class LogLine {
 public:
  explicit LogLine(absl::string_view event);

  LogLine& Add(absl::string_view key, absl::string_view value);
  LogLine& Add(absl::string_view key, const char* value) { return Add(key, absl::string_view(value)); }
  LogLine& Add(absl::string_view key, bool value) { return AddBare(key, value ? "true" : "false"); }
  template <std::integral Number>
  LogLine& Add(absl::string_view key, Number value) {
    return AddBare(key, absl::StrCat(value));
  }

  void Write(spdlog::level::level_enum level) const;
  // As it would be written, without time and level. For tests.
  const std::string& text() const { return text_; }

 private:
  LogLine& AddBare(absl::string_view key, absl::string_view value);

  std::string text_;
};

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_BASE_LOG_LINE_H_
