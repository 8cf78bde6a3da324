// SPDX-License-Identifier: Apache-2.0
//
// The daemon's metrics, made at scrape time from the broker's figures. All of them: deploy/METRICS.md.
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

// What became of the configuration. Synchronises itself.
struct ReloadState {
  std::atomic<bool> last_was_successful{true};
  std::atomic<int64_t> last_success{std::time(nullptr)};  // unix time; the start is one
};

struct MetricsOptions {
  std::function<BrokerView()> view;
  const prometheus::Collectable* rpcs = nullptr;  // outlives the metrics
  const ReloadState* reload = nullptr;            // outlives the metrics
  const HttpStats* http = nullptr;                // outlives the metrics
  size_t max_clients = 1000;                      // pairs of client and device that have series of their own
  size_t max_clients_per_uid = 250;               // of them, of one user
  size_t max_claims = 1000;                       // that have series of their own
};

class Metrics : public prometheus::Collectable {
 public:
  explicit Metrics(MetricsOptions options) : options_(std::move(options)) {}

  // All but the time that the scrape takes. Thread-safe. Throws when memory runs out.
  std::vector<prometheus::MetricFamily> Collect() const override;

  // A scrape: text exposition format 0.0.4. Thread-safe. Never throws; when collecting fails, it is all but empty, and
  // vrambroker_collect_errors_total says so.
  std::string Text() const noexcept;

 private:
  const MetricsOptions options_;
  mutable prometheus::Counter errors_;
};

// The parts of a scrape. For Metrics.
void WriteDeviceMetrics(const BrokerView& view, MetricFamilies& out);
// Of claims; so many of them have series of their own.
void WriteClaimMetrics(const BrokerView& view, size_t max_claims, MetricFamilies& out);
// Of clients and tenants. The bounds are those of MetricsOptions.
void WriteClientMetrics(const BrokerView& view, size_t max_clients, size_t max_clients_per_uid, MetricFamilies& out);

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_MONITORING_METRICS_H_
