// SPDX-License-Identifier: Apache-2.0
//
// Log lines with keys: for people as text, for programs as JSON, with equal keys.
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

// Sets the format of all later lines of this process, including plain text: in JSON, plain text becomes "message". Call
// before other threads log. `times`: whether lines of text carry the time.
void SetLogFormat(LogFormat format, bool times);

// An event and its values, in order:
//
//   text:  session closed session=3 name=train reason=goodbye why="its process has ended"
//   JSON:  {"time":"...","level":"info","event":"session closed","session":3,"name":"train",...}
//
// Values may be anything: text quotes and escapes values with spaces and the like; JSON replaces bytes that are not
// UTF-8. Keys and events are fixed words of the code.
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
  // The line as written, without time and level. For tests.
  const std::string& text() const { return text_; }

 private:
  LogLine& AddBare(absl::string_view key, absl::string_view value);

  std::string text_;
};

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_BASE_LOG_LINE_H_
