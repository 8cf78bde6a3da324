// SPDX-License-Identifier: Apache-2.0
//
// The daemon's metrics, computed at scrape time from the broker's figures. deploy/METRICS.md lists all metrics.
#ifndef VRAMBROKER_SERVER_MONITORING_METRICS_H_
#define VRAMBROKER_SERVER_MONITORING_METRICS_H_

#include <prometheus/collectable.h>
#include <prometheus/counter.h>

#include <atomic>
#include <cstdint>
#include <ctime>
#include <functional>
#include <string>
#include <vector>

#include "server/core/broker.h"
#include "server/http/http_server.h"
#include "server/monitoring/metric_families.h"

namespace vrambroker {

// Result of the last reload of the configuration. Thread-safe.
struct ReloadState {
  std::atomic<bool> last_was_successful{true};
  std::atomic<int64_t> last_success{std::time(nullptr)};  // unix time; the start counts as a success
};

struct MetricsOptions {
  std::function<BrokerView()> view;
  const prometheus::Collectable* rpcs = nullptr;  // outlives the metrics
  const ReloadState* reload = nullptr;            // outlives the metrics
  const HttpStats* http = nullptr;                // outlives the metrics
  size_t max_clients = 1000;                      // pairs of client and device with series of their own
  size_t max_clients_per_uid = 250;               // part of max_clients for a single user
  size_t max_claims = 1000;                       // claims with series of their own
};

class Metrics : public prometheus::Collectable {
 public:
  explicit Metrics(MetricsOptions options) : options_(std::move(options)) {}

  // Returns all metrics but the duration of the scrape. Thread-safe. Throws when memory runs out.
  std::vector<prometheus::MetricFamily> Collect() const override;

  // Returns a scrape in text exposition format 0.0.4. Thread-safe. Never throws: when collecting fails, the scrape is
  // nearly empty, and counts the failure in vrambroker_collect_errors_total.
  std::string Text() const noexcept;

 private:
  const MetricsOptions options_;
  mutable prometheus::Counter errors_;
};

// The parts of a scrape. For Metrics.
void WriteDeviceMetrics(const BrokerView& view, MetricFamilies& out);
// Writes claims; up to `max_claims` claims have series of their own.
void WriteClaimMetrics(const BrokerView& view, size_t max_claims, MetricFamilies& out);
// Writes clients and tenants, with the bounds of MetricsOptions.
void WriteClientMetrics(const BrokerView& view, size_t max_clients, size_t max_clients_per_uid, MetricFamilies& out);

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_MONITORING_METRICS_H_
