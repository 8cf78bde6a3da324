// SPDX-License-Identifier: Apache-2.0
#include "server/metrics.h"

#include <prometheus/text_serializer.h>

#include <algorithm>
#include <initializer_list>
#include <sstream>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/version.h"

namespace vrambroker {
namespace {

using prometheus::ClientMetric;
using prometheus::MetricFamily;
using prometheus::MetricType;

MetricFamily Family(const char* name, const char* help, MetricType type) {
  MetricFamily family;
  family.name = absl::StrCat("vrambroker_", name);
  family.help = help;
  family.type = type;
  return family;
}

void Add(MetricFamily& family, const std::vector<std::pair<const char*, std::string>>& labels, double value) {
  ClientMetric metric;
  for (const auto& [name, text] : labels) {
    ClientMetric::Label label;
    label.name = name;
    label.value = text;
    metric.label.push_back(std::move(label));
  }
  if (family.type == MetricType::Counter) {
    metric.counter.value = value;
  } else {
    metric.gauge.value = value;
  }
  family.metric.push_back(std::move(metric));
}

double Number(uint64_t value) {
  return static_cast<double>(value);
}

// The figures that devices and clients share, for one row of labels.
struct HeapFamilies {
  MetricFamily reserved, allocated, active, requested, inactive_split, fragmentation;

  HeapFamilies(const std::string& level, const char* whose)
      : reserved(Family((level + "_reserved_bytes").c_str(),
                        level == "device" ? "Memory held from the driver in segments, leased or idle."
                                          : "Memory of the segments charged to the client.",
                        MetricType::Gauge)),
        allocated(Family((level + "_allocated_bytes").c_str(),
                         absl::StrCat("Memory in blocks handed out ", whose).c_str(), MetricType::Gauge)),
        active(Family((level + "_active_bytes").c_str(),
                      absl::StrCat("Memory in blocks in use or waiting for a stream event ", whose).c_str(),
                      MetricType::Gauge)),
        requested(Family((level + "_requested_bytes").c_str(),
                         absl::StrCat("Memory asked for, before rounding, ", whose).c_str(), MetricType::Gauge)),
        inactive_split(Family((level + "_inactive_split_bytes").c_str(),
                              absl::StrCat("Free memory in split segments that cannot be given back ", whose).c_str(),
                              MetricType::Gauge)),
        fragmentation(Family((level + "_fragmentation_ratio").c_str(),
                             "1 - allocated / reserved, between 0 and 1; 0 when nothing is reserved.",
                             MetricType::Gauge)) {}

  void Fill(const std::vector<std::pair<const char*, std::string>>& labels, uint64_t reserved_bytes,
            const MemoryStats& stats) {
    Add(reserved, labels, Number(reserved_bytes));
    Add(allocated, labels, Number(stats.allocated_bytes.all.current));
    Add(active, labels, Number(stats.active_bytes.all.current));
    Add(requested, labels, Number(stats.requested_bytes.all.current));
    Add(inactive_split, labels, Number(stats.inactive_split_bytes.all.current));
    Add(fragmentation, labels, FragmentationRatio(stats.allocated_bytes.all.current, reserved_bytes));
  }

  void MoveTo(std::vector<MetricFamily>& out) {
    for (MetricFamily* family : {&reserved, &allocated, &active, &requested, &inactive_split, &fragmentation}) {
      out.push_back(std::move(*family));
    }
  }
};

}  // namespace

std::vector<MetricFamily> Metrics::Collect() const {
  const std::vector<SessionInfo> sessions = broker_.ListSessions();
  HeapFamilies device_heap("device", "to clients.");
  HeapFamilies client_heap("client", "of the client.");
  MetricFamily capacity =
      Family("device_capacity_bytes", "Memory the broker may hand out on the device.", MetricType::Gauge);
  MetricFamily cached_free =
      Family("device_cached_free_bytes", "Free memory inside segments held by the broker.", MetricType::Gauge);
  MetricFamily ooms = Family("device_ooms_total", "Allocation requests refused, by reason.", MetricType::Counter);
  MetricFamily limit = Family("client_limit_bytes", "Upper bound on the client's reserved bytes.", MetricType::Gauge);

  for (size_t device = 0; device < broker_.pools().size(); ++device) {
    const std::string gpu = absl::StrCat(device);
    MemoryStats sum;
    for (const SessionInfo& session : sessions) {
      const SessionDeviceInfo& held = session.devices[device];
      sum.Add(held.stats);
      client_heap.Fill({{"client", session.name}, {"gpu", gpu}}, held.account.reserved_bytes, held.stats);
      Add(limit, {{"client", session.name}, {"gpu", gpu}}, Number(held.account.limit_bytes));
    }
    const PoolFigures figures = broker_.pools()[device]->GetFigures();
    // Sessions and pool are read one after the other: a segment may be obtained or given back in between.
    const uint64_t active = sum.active_bytes.all.current;
    const uint64_t reserved = std::max(figures.reserved_bytes, active);
    device_heap.Fill({{"gpu", gpu}}, reserved, sum);
    Add(capacity, {{"gpu", gpu}}, Number(figures.capacity_bytes));
    Add(cached_free, {{"gpu", gpu}}, Number(reserved - active));
    for (const OomCause cause : kOomCauses) {
      Add(ooms, {{"gpu", gpu}, {"reason", OomCauseName(cause)}},
          Number(broker_.OomCount(static_cast<int>(device), cause)));
    }
  }

  MetricFamily open_sessions = Family("sessions", "Open sessions.", MetricType::Gauge);
  Add(open_sessions, {}, Number(sessions.size()));
  MetricFamily build = Family("build_info", "Build information; the value is always 1.", MetricType::Gauge);
  Add(build, {{"version", kVersion}, {"revision", kRevision}, {"cuda_version", kCudaVersion}}, 1);

  std::vector<MetricFamily> families;
  families.push_back(std::move(capacity));
  device_heap.MoveTo(families);
  families.push_back(std::move(cached_free));
  families.push_back(std::move(ooms));
  families.push_back(std::move(limit));
  client_heap.MoveTo(families);
  families.push_back(std::move(open_sessions));
  families.push_back(std::move(build));
  return families;
}

std::string Metrics::Text() const {
  std::ostringstream out;
  prometheus::TextSerializer().Serialize(out, Collect());
  return out.str();
}

}  // namespace vrambroker
