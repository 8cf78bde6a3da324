// SPDX-License-Identifier: Apache-2.0
#include "server/metric_families.h"

#include <prometheus/text_serializer.h>

#include <iterator>
#include <ostream>
#include <streambuf>

#include "absl/strings/str_cat.h"

namespace vrambroker {
namespace {

using prometheus::ClientMetric;
using prometheus::MetricType;

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

std::string ToUtf8(absl::string_view value) {
  std::string text;
  text.reserve(value.size());
  while (!value.empty()) {
    const size_t length = Utf8Length(value);
    absl::StrAppend(&text, length == 0 ? "\xEF\xBF\xBD" : value.substr(0, length));  // U+FFFD
    value.remove_prefix(length == 0 ? 1 : length);
  }
  return text;
}

// The serializer writes most of a page byte by byte: a std::stringbuf takes a quarter longer.
class StringAppender : public std::streambuf {
 public:
  explicit StringAppender(std::string* text) : text_(*text) {}

 protected:
  std::streamsize xsputn(const char* bytes, std::streamsize count) override {
    text_.append(bytes, static_cast<size_t>(count));
    return count;
  }
  int_type overflow(int_type byte) override {
    text_.push_back(traits_type::to_char_type(byte));
    return byte;
  }

 private:
  std::string& text_;
};

}  // namespace

MetricLabels MakeLabels(std::initializer_list<std::pair<absl::string_view, absl::string_view>> labels) {
  MetricLabels made;
  made.reserve(labels.size());
  for (const auto& [name, value] : labels) made.push_back({std::string(name), ToUtf8(value)});
  return made;
}

void MetricFamilies::Family(std::string name, std::string help, MetricType type) {
  families_.push_back({.name = std::move(name), .help = std::move(help), .type = type, .metric = {}});
}

ClientMetric& MetricFamilies::Append(MetricLabels labels) {
  ClientMetric& metric = families_.back().metric.emplace_back();
  metric.label = std::move(labels);
  return metric;
}

void MetricFamilies::Sample(MetricLabels labels, double value) {
  const MetricType type = families_.back().type;
  ClientMetric& metric = Append(std::move(labels));
  (type == MetricType::Counter ? metric.counter.value : metric.gauge.value) = value;
}

void MetricFamilies::Sample(MetricLabels labels, ClientMetric::Histogram histogram) {
  Append(std::move(labels)).histogram = std::move(histogram);
}

MetricLabels MetricFamilies::With(const MetricLabels& labels, absl::string_view name, absl::string_view value) {
  MetricLabels more;
  more.reserve(labels.size() + 1);
  more = labels;
  more.push_back({std::string(name), std::string(value)});
  return more;
}

void MetricFamilies::Add(std::vector<prometheus::MetricFamily> families) {
  families_.insert(families_.end(), std::make_move_iterator(families.begin()), std::make_move_iterator(families.end()));
}

void AppendText(const std::vector<prometheus::MetricFamily>& families, std::string& text) {
  StringAppender appender(&text);
  std::ostream out(&appender);
  out.exceptions(std::ios::badbit);  // memory that runs out is not a page that ends early
  prometheus::TextSerializer().Serialize(out, families);
}

}  // namespace vrambroker
