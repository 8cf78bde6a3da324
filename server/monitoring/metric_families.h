// SPDX-License-Identifier: Apache-2.0
//
// MetricFamilies: builds the metrics of a scrape, as families of prometheus-cpp.
#ifndef VRAMBROKER_SERVER_MONITORING_METRIC_FAMILIES_H_
#define VRAMBROKER_SERVER_MONITORING_METRIC_FAMILIES_H_

#include <prometheus/client_metric.h>
#include <prometheus/metric_family.h>

#include <cstdint>
#include <initializer_list>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/string_view.h"

namespace vrambroker {

using MetricLabels = std::vector<prometheus::ClientMetric::Label>;

// Accepts any bytes as values: replaces invalid UTF-8, because Prometheus refuses a whole page for a single invalid
// value.
MetricLabels MakeLabels(std::initializer_list<std::pair<absl::string_view, absl::string_view>> labels);

class MetricFamilies {
 public:
  // Starts a metric; the following samples belong to this metric.
  void Family(std::string name, std::string help, prometheus::MetricType type);
  void Sample(MetricLabels labels, double value);
  void Sample(MetricLabels labels, uint64_t value) { Sample(std::move(labels), static_cast<double>(value)); }
  void Sample(MetricLabels labels, prometheus::ClientMetric::Histogram histogram);
  // Like the overloads above, with an additional label.
  template <typename Value>
  void Sample(const MetricLabels& labels, absl::string_view name, absl::string_view value, Value sample) {
    Sample(With(labels, name, value), std::move(sample));
  }
  // Adds a metric of a single sample without labels.
  template <typename Value>
  void Single(std::string name, std::string help, prometheus::MetricType type, Value value) {
    Family(std::move(name), std::move(help), type);
    Sample({}, value);
  }

  void Add(std::vector<prometheus::MetricFamily> families);

  std::vector<prometheus::MetricFamily> Take() { return std::move(families_); }

 private:
  static MetricLabels With(const MetricLabels& labels, absl::string_view name, absl::string_view value);
  prometheus::ClientMetric& Append(MetricLabels labels);

  std::vector<prometheus::MetricFamily> families_;
};

// Appends `families` to `text` in Prometheus' text exposition format 0.0.4.
void AppendText(const std::vector<prometheus::MetricFamily>& families, std::string& text);

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_MONITORING_METRIC_FAMILIES_H_
