// SPDX-License-Identifier: Apache-2.0
#include "server/metrics_text.h"

#include <array>
#include <charconv>
#include <system_error>

#include "absl/strings/str_cat.h"

namespace vrambroker {
namespace {

// Bytes of the UTF-8 character that `text` begins with; 0 when it begins with none.
size_t Utf8Length(absl::string_view text) {
  const auto byte = [&](size_t i) { return i < text.size() ? static_cast<unsigned char>(text[i]) : 0U; };
  const auto follows = [&](size_t i) { return (byte(i) & 0xC0) == 0x80; };
  const unsigned int first = byte(0);
  if (first < 0x80) return 1;
  if (first >= 0xC2 && first <= 0xDF && follows(1)) return 2;
  if ((first & 0xF0) == 0xE0 && follows(1) && follows(2)) {
    const bool overlong = first == 0xE0 && byte(1) < 0xA0;
    const bool surrogate = first == 0xED && byte(1) > 0x9F;
    return overlong || surrogate ? 0 : 3;
  }
  if (first >= 0xF0 && first <= 0xF4 && follows(1) && follows(2) && follows(3)) {
    const bool overlong = first == 0xF0 && byte(1) < 0x90;
    const bool too_large = first == 0xF4 && byte(1) > 0x8F;
    return overlong || too_large ? 0 : 4;
  }
  return 0;
}

void AppendEscaped(absl::string_view value, std::string& out) {
  while (!value.empty()) {
    const size_t length = Utf8Length(value);
    if (length == 0) {
      out += "\xEF\xBF\xBD";  // U+FFFD
    } else if (value[0] == '\\' || value[0] == '"') {
      out += '\\';
      out += value[0];
    } else if (value[0] == '\n') {
      out += "\\n";
    } else {
      absl::StrAppend(&out, value.substr(0, length));
    }
    value.remove_prefix(length == 0 ? 1 : length);
  }
}

const char* TypeName(MetricType type) {
  switch (type) {
    case MetricType::kGauge:
      return "gauge";
    case MetricType::kCounter:
      return "counter";
    case MetricType::kHistogram:
      return "histogram";
  }
  return "untyped";
}

}  // namespace

std::string MetricLabels(std::initializer_list<std::pair<absl::string_view, absl::string_view>> labels) {
  std::string text;
  for (const auto& [name, value] : labels) {
    absl::StrAppend(&text, text.empty() ? "" : ",", name, "=\"");
    AppendEscaped(value, text);
    text += '"';
  }
  return text;
}

void MetricsText::Family(absl::string_view name, absl::string_view help, MetricType type) {
  name_ = std::string(name);
  absl::StrAppend(&text_, "# HELP ", name, " ", help, "\n# TYPE ", name, " ", TypeName(type), "\n");
}

void MetricsText::Start(absl::string_view suffix, absl::string_view labels, absl::string_view more_labels) {
  text_.append(name_);
  text_.append(suffix.data(), suffix.size());
  if (!labels.empty() || !more_labels.empty()) {
    text_ += '{';
    text_.append(labels.data(), labels.size());
    if (!labels.empty() && !more_labels.empty()) text_ += ',';
    text_.append(more_labels.data(), more_labels.size());
    text_ += '}';
  }
  text_ += ' ';
}

void MetricsText::Write(uint64_t value) {
  std::array<char, 24> digits;
  const std::to_chars_result end = std::to_chars(digits.begin(), digits.end(), value);
  text_.append(digits.data(), static_cast<size_t>(end.ptr - digits.data()));
}

void MetricsText::Write(double value) {
  std::array<char, 32> digits;
  const std::to_chars_result end = std::to_chars(digits.begin(), digits.end(), value);
  text_.append(digits.data(), static_cast<size_t>(end.ptr - digits.data()));
}

void MetricsText::Sample(absl::string_view labels, uint64_t value) {
  Start("", labels);
  Write(value);
  text_ += '\n';
}

void MetricsText::Sample(absl::string_view labels, double value) {
  Start("", labels);
  Write(value);
  text_ += '\n';
}

void MetricsText::Sample(absl::string_view labels, const HistogramFigures& histogram) {
  uint64_t so_far = 0;
  for (size_t i = 0; i < histogram.counts.size(); ++i) {
    so_far += histogram.counts[i];
    std::string bound = "le=\"+Inf\"";
    if (i < histogram.bounds.size()) bound = absl::StrCat("le=\"", histogram.bounds[i], "\"");
    Start("_bucket", labels, bound);
    Write(so_far);
    text_ += '\n';
  }
  Start("_sum", labels);
  Write(histogram.sum_seconds);
  text_ += '\n';
  Start("_count", labels);
  Write(so_far);
  text_ += '\n';
}

}  // namespace vrambroker
