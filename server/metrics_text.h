// SPDX-License-Identifier: Apache-2.0
//
// MetricsText: writes Prometheus' text exposition format 0.0.4.
#ifndef VRAMBROKER_SERVER_METRICS_TEXT_H_
#define VRAMBROKER_SERVER_METRICS_TEXT_H_

#include <cstdint>
#include <initializer_list>
#include <string>
#include <utility>

#include "absl/strings/string_view.h"
#include "server/histogram.h"

namespace vrambroker {

enum class MetricType { kGauge, kCounter, kHistogram };

// `gpu="0",reason="limit"`, for MetricsText. Values may be anything: what is no UTF-8 is replaced.
std::string MetricLabels(std::initializer_list<std::pair<absl::string_view, absl::string_view>> labels);

class MetricsText {
 public:
  // The samples that follow are of this metric.
  void Family(absl::string_view name, absl::string_view help, MetricType type);
  void Sample(absl::string_view labels, uint64_t value);
  void Sample(absl::string_view labels, double value);
  void Sample(absl::string_view labels, const HistogramFigures& histogram);
  // A metric of one sample without labels.
  template <typename Value>
  void Single(absl::string_view name, absl::string_view help, MetricType type, Value value) {
    Family(name, help, type);
    Sample("", value);
  }

  std::string Take() { return std::move(text_); }

 private:
  void Start(absl::string_view suffix, absl::string_view labels, absl::string_view more_labels = "");
  void Write(uint64_t value);
  void Write(double value);

  std::string text_;
  std::string name_;
};

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_METRICS_TEXT_H_
