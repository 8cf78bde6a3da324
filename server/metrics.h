// SPDX-License-Identifier: Apache-2.0
//
// The daemon's metrics, made at scrape time from the broker's figures.
#ifndef VRAMBROKER_SERVER_METRICS_H_
#define VRAMBROKER_SERVER_METRICS_H_

#include <prometheus/collectable.h>

#include <string>
#include <vector>

#include "server/broker.h"

namespace vrambroker {

// name (all with the prefix vrambroker_)           labels         meaning
// device_capacity_bytes                            gpu            what the broker may hand out
// device_reserved_bytes                            gpu            held from the driver in segments, leased or idle
// device_{allocated,active,requested}_bytes        gpu            sums over the sessions
// device_inactive_split_bytes                      gpu            free, but beside a used block of the same segment
// device_cached_free_bytes                         gpu            reserved - active
// device_fragmentation_ratio                       gpu            1 - allocated / reserved
// device_ooms_total                                gpu, reason    refusals
// client_limit_bytes                               client, gpu    upper bound on the reserved bytes
// client_reserved_bytes                            client, gpu    charged against the limit
// client_{allocated,active,requested,inactive_split}_bytes, client_fragmentation_ratio
//                                                  client, gpu    as for the device
// sessions                                                        open sessions
// build_info                                       version, revision, cuda_version
//
// `client` is a session's name, unique among live sessions. Series of ended sessions are gone with the session.
class Metrics : public prometheus::Collectable {
 public:
  // `broker` outlives this object.
  explicit Metrics(const Broker* broker) : broker_(*broker) {}

  // Thread-safe. Never throws: prometheus-cpp would end the process.
  std::vector<prometheus::MetricFamily> Collect() const override;

  // Collect() as text exposition format 0.0.4.
  std::string Text() const;

 private:
  const Broker& broker_;
};

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_METRICS_H_
