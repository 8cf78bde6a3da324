// SPDX-License-Identifier: Apache-2.0
#include "server/monitoring/metric_families.h"

#include <prometheus/text_serializer.h>

#include <iterator>
#include <ostream>
#include <streambuf>

#include "allocator/base/utf8.h"

namespace vrambroker {
namespace {

using prometheus::ClientMetric;
using prometheus::MetricType;

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
  out.exceptions(std::ios::badbit);  // running out of memory must not truncate the page
  prometheus::TextSerializer().Serialize(out, families);
}

}  // namespace vrambroker
