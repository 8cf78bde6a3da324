// SPDX-License-Identifier: Apache-2.0
#ifndef VRAMBROKER_TESTS_SUPPORT_HTTP_H_
#define VRAMBROKER_TESTS_SUPPORT_HTTP_H_

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace vrambroker::testing_support {

struct HttpAnswer {
  int code = 0;
  std::string headers;
  std::string body;
};

// Sends a GET to 127.0.0.1 over a new connection.
absl::StatusOr<HttpAnswer> HttpGet(int port, const std::string& path);

using Labels = std::map<std::string, std::string>;

// A page in Prometheus' text format.
class MetricsPage {
 public:
  explicit MetricsPage(const std::string& text);

  // Returns the value of the only series with this name and at least these labels; no value when there is no such
  // series, or more than one series.
  std::optional<double> Value(const std::string& name, const Labels& labels = {}) const;
  // Sum() and Count() return the sum and the number of all matching series.
  double Sum(const std::string& name, const Labels& labels = {}) const;
  size_t Count(const std::string& name, const Labels& labels = {}) const;

 private:
  struct Sample {
    std::string name;
    Labels labels;
    double value = 0;
  };
  std::vector<const Sample*> Find(const std::string& name, const Labels& labels) const;

  std::vector<Sample> samples_;
};

}  // namespace vrambroker::testing_support

#endif  // VRAMBROKER_TESTS_SUPPORT_HTTP_H_
