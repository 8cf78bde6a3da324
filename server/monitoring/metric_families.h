// SPDX-License-Identifier: Apache-2.0
//
// MetricFamilies: builds what a scrape collects, as families of prometheus-cpp.
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

// Values may be anything: bytes that are not UTF-8 are replaced, because Prometheus refuses a whole page for one of
// them.
MetricLabels MakeLabels(std::initializer_list<std::pair<absl::string_view, absl::string_view>> labels);

class MetricFamilies {
 public:
  // The samples that follow are of this metric.
  void Family(std::string name, std::string help, prometheus::MetricType type);
  void Sample(MetricLabels labels, double value);
  void Sample(MetricLabels labels, uint64_t value) { Sample(std::move(labels), static_cast<double>(value)); }
  void Sample(MetricLabels labels, prometheus::ClientMetric::Histogram histogram);
  // The same, with one more label.
  template <typename Value>
  void Sample(const MetricLabels& labels, absl::string_view name, absl::string_view value, Value sample) {
    Sample(With(labels, name, value), std::move(sample));
  }
  // A metric of one sample without labels.
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

// Appends them to `text` in Prometheus' text exposition format 0.0.4.
void AppendText(const std::vector<prometheus::MetricFamily>& families, std::string& text);

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_MONITORING_METRIC_FAMILIES_H_
