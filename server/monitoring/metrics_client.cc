// SPDX-License-Identifier: Apache-2.0
//
// Metrics of clients (labels client, gpu, tenant) and of tenants (tenant, gpu).
//
// Bounds the series: `max_clients` pairs of client and device have series of their own, at most `max_clients_per_uid`
// for each user, so that no user takes another user's room. Pairs in use come first, by age of the session, then unused
// pairs if room is left. Pairs in use without room are folded into a single client="_other" for each device. "_other"
// has no counters, since a sum over sessions falls when a session ends. A session has a client_info if any of its pairs
// has series of its own.
#include <algorithm>
#include <array>
#include <iterator>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "server/monitoring/metrics.h"

namespace vrambroker {
namespace {

using enum prometheus::MetricType;

constexpr char kOther[] = "_other";

// A session and a device, or the sum of the folded pairs.
struct Row {
  MetricLabels labels;
  const SessionView* session = nullptr;  // none: folded
  const SessionDeviceView* held = nullptr;
  size_t waiting = 0;

  uint64_t reserved() const { return held->account.reserved_bytes; }
  const MemoryStats& stats() const { return held->stats; }
  // Reserved bytes with known blocks.
  uint64_t known() const { return reserved() - held->unknown_bytes; }
  uint64_t cached_free() const { return known() - std::min(known(), stats().active_bytes.all.current); }
};

struct Figure {
  const char* name;
  const char* help;
  uint64_t (*value)(const Row& row);
};

constexpr Figure kGauges[] = {
    {"reserved_bytes", "Memory of the segments charged to the client.", [](const Row& row) { return row.reserved(); }},
    {"allocated_bytes", "Memory in blocks handed out to the client.",
     [](const Row& row) { return row.stats().allocated_bytes.all.current; }},
    {"active_bytes", "Memory in the client's blocks that are in use or wait for a stream event.",
     [](const Row& row) { return row.stats().active_bytes.all.current; }},
    {"requested_bytes", "Memory that the client asked for, before rounding.",
     [](const Row& row) { return row.stats().requested_bytes.all.current; }},
    {"inactive_split_bytes",
     "Fragmented: free memory in the client's partly used segments, which cannot be given back.",
     [](const Row& row) { return row.stats().inactive_split_bytes.all.current; }},
    {"idle_bytes", "Reclaimable: memory of the client's segments that hold no block.",
     [](const Row& row) { return row.held->idle_bytes; }},
    {"cached_free_bytes", "Free memory inside the client's segments.",
     [](const Row& row) { return row.cached_free(); }},
    {"largest_free_block_bytes", "The client's largest free block.",
     [](const Row& row) { return row.stats().free.largest_bytes; }},
    {"limit_bytes", "Upper limit of the client's reserved bytes.",
     [](const Row& row) { return row.held->account.effective_limit_bytes(); }},
    {"guarantee_bytes", "Memory kept free for the client, whether it holds it or not.",
     [](const Row& row) { return row.held->account.guarantee_bytes; }},
    {"carried_over_bytes", "Memory that the client holds from an earlier run of the daemon.",
     [](const Row& row) { return row.held->account.carried_over_bytes; }},
    {"used_bytes", "What the client's process uses of the GPU, with its CUDA context.",
     [](const Row& row) { return row.held->used_bytes; }},
    {"overhead_bytes", "What the client's process uses of the GPU beyond what is charged for memory of its own.",
     [](const Row& row) { return row.held->overhead_bytes; }},
    {"peak_allocated_bytes", "Peak of the client's allocated bytes.",
     [](const Row& row) { return row.stats().allocated_bytes.all.peak; }},
    {"peak_reserved_bytes", "Peak of the bytes that the client's heap reserved.",
     [](const Row& row) { return row.stats().reserved_bytes.all.peak; }},
    {"segments", "Segments leased to the client.", [](const Row& row) { return uint64_t{row.held->account.segments}; }},
    {"blocks", "Blocks that the client holds.", [](const Row& row) { return row.stats().allocation.all.current; }},
    {"waiting_requests", "Requests of the client that wait for others to give memory back.",
     [](const Row& row) { return uint64_t{row.waiting}; }},
};

constexpr Figure kCounters[] = {
    {"allocs_total", "Blocks handed out to the client.",
     [](const Row& row) { return row.stats().allocation.all.allocated; }},
    {"frees_total", "Blocks that the client gave back.",
     [](const Row& row) { return row.stats().allocation.all.freed; }},
    {"alloc_retries_total",
     "Requests that first gave back the client's own cache, whether they then got memory or not.",
     [](const Row& row) { return row.stats().num_alloc_retries; }},
};

bool IsInUse(const SessionDeviceView& held) {
  const auto refused = std::any_of(held.ooms.begin(), held.ooms.end(), [](uint64_t count) { return count > 0; });
  return held.account.reserved_bytes > 0 || held.account.guarantee_bytes > 0 || !held.waiting.empty() || refused ||
         held.stats.reserved_bytes.all.peak > 0;
}

// Room left, in all and for each user.
class Room {
 public:
  Room(size_t in_all, size_t per_uid) : left_(in_all), per_uid_(per_uid) {}

  bool Take(const SessionView& session) {
    if (left_ == 0) return false;
    size_t& taken = of_user_[session.caller.user()];
    if (taken == per_uid_) return false;
    ++taken;
    --left_;
    return true;
  }

 private:
  size_t left_;
  const size_t per_uid_;
  absl::flat_hash_map<UserKey, size_t> of_user_;
};

// Sums for client="_other", by device.
struct Folded {
  std::vector<SessionDeviceView> held;
  std::vector<size_t> waiting;
  std::vector<bool> any;
  absl::flat_hash_set<SessionId> sessions;

  explicit Folded(size_t devices) : held(devices), waiting(devices), any(devices) {}

  void Add(const SessionView& session, size_t device) {
    const SessionDeviceView& from = session.devices[device];
    SessionDeviceView& to = held[device];
    to.account.reserved_bytes += from.account.reserved_bytes;
    to.account.limit_bytes += from.account.effective_limit_bytes();
    to.account.guarantee_bytes += from.account.guarantee_bytes;
    to.account.carried_over_bytes += from.account.carried_over_bytes;
    to.used_bytes += from.used_bytes;
    to.overhead_bytes += from.overhead_bytes;
    to.account.segments += from.account.segments;
    to.idle_bytes += from.idle_bytes;
    to.unknown_bytes += from.unknown_bytes;
    to.stats.Add(from.stats);
    to.fragmentation.bytes_per_second += from.fragmentation.bytes_per_second;
    // Time to the earliest refusal.
    if (const auto& seconds = from.fragmentation.seconds_to_refusal) {
      to.fragmentation.seconds_to_refusal = std::min(*seconds, to.fragmentation.seconds_to_refusal.value_or(*seconds));
    }
    waiting[device] += from.waiting.size();
    any[device] = true;
    sessions.insert(session.id);
  }
};

MetricLabels LabelsOf(const std::string& client, size_t device, const std::string& tenant) {
  return MakeLabels({{"client", client}, {"gpu", absl::StrCat(device)}, {"tenant", tenant}});
}

// Returns the pairs with series of their own, by session and device; adds further pairs in use to `folded`.
std::vector<Row> ChooseRows(const BrokerView& view, Room room, Folded& folded) {
  std::vector<std::pair<size_t, size_t>> pairs;  // session, device
  std::vector<std::pair<size_t, size_t>> unused;
  for (size_t i = 0; i < view.sessions.size(); ++i) {
    for (size_t device = 0; device < view.devices.size(); ++device) {
      if (!IsInUse(view.sessions[i].devices[device])) {
        unused.emplace_back(i, device);
      } else if (room.Take(view.sessions[i])) {
        pairs.emplace_back(i, device);
      } else {
        folded.Add(view.sessions[i], device);
      }
    }
  }
  std::copy_if(unused.begin(), unused.end(), std::back_inserter(pairs),
               [&](const auto& pair) { return room.Take(view.sessions[pair.first]); });
  std::sort(pairs.begin(), pairs.end());
  std::vector<Row> rows;
  rows.reserve(pairs.size() + view.devices.size());
  for (const auto& [i, device] : pairs) {
    const SessionView& session = view.sessions[i];
    const SessionDeviceView& held = session.devices[device];
    rows.push_back({.labels = LabelsOf(session.name, device, session.terms.tenant),
                    .session = &session,
                    .held = &held,
                    .waiting = held.waiting.size()});
  }
  return rows;
}

// REQUIRES: the rows of a session are adjacent.
void WriteInfo(const std::vector<Row>& rows, MetricFamilies& out) {
  out.Family("vrambroker_client_info", "Identity of a session; the value is always 1.", Gauge);
  const SessionView* last = nullptr;
  for (const Row& row : rows) {
    const SessionView& session = *row.session;
    if (std::exchange(last, &session) == &session) continue;
    out.Sample(MakeLabels({{"client", session.name},
                           {"tenant", session.terms.tenant},
                           {"session", absl::StrCat(Raw(session.id))},
                           {"uid", absl::StrCat(session.caller.uid)},
                           {"rule", session.terms.rule},
                           {"placement", PlacementName(session.placement)}}),
               uint64_t{1});
  }
}

void WriteGauges(const std::vector<Row>& rows, MetricFamilies& out) {
  for (const Figure& gauge : kGauges) {
    out.Family(absl::StrCat("vrambroker_client_", gauge.name), gauge.help, Gauge);
    for (const Row& row : rows) out.Sample(row.labels, gauge.value(row));
  }
  out.Family(
      "vrambroker_client_fragmentation_ratio",
      "1 - allocated / reserved, between 0 and 1; 0 when nothing is reserved. Without what a remote session carries "
      "over.",
      Gauge);
  for (const Row& row : rows) {
    out.Sample(row.labels, FragmentationRatio(row.stats().allocated_bytes.all.current, row.known()));
  }
  out.Family("vrambroker_client_external_fragmentation_ratio",
             "1 - largest free block / cached free bytes, between 0 and 1; 0 when nothing is free.", Gauge);
  for (const Row& row : rows) {
    out.Sample(row.labels, ExternalFragmentationRatio(row.stats().free.largest_bytes, row.cached_free()));
  }
  out.Family(
      "vrambroker_client_fragmentation_growth_bytes_per_second",
      "Growth of what the client holds and cannot give back, at equal allocated bytes; 0 when there is no trend.",
      Gauge);
  for (const Row& row : rows) out.Sample(row.labels, row.held->fragmentation.bytes_per_second);
  // Absent without a trend: an alert then ends, and sums and means stay finite.
  out.Family("vrambroker_client_refusal_expected_seconds",
             "Time until fragmentation that grows like this has requests of the client refused; only while it grows.",
             Gauge);
  for (const Row& row : rows) {
    if (const auto& seconds = row.held->fragmentation.seconds_to_refusal) out.Sample(row.labels, *seconds);
  }
  std::array<std::string, FreeSizes::kClasses> sizes;
  for (size_t i = 0; i < sizes.size(); ++i) {
    sizes[i] = absl::StrCat(FreeSizes::ClassBytes(i));
  }
  out.Family("vrambroker_client_free_block_bytes",
             "Memory of the client's free blocks, by the lower bound of their size class in bytes.", Gauge);
  for (const Row& row : rows) {
    for (size_t i = 0; i < sizes.size(); ++i) {
      out.Sample(row.labels, "size", sizes[i], row.stats().free.bytes[i]);
    }
  }
}

void WriteCounters(const std::vector<Row>& rows, MetricFamilies& out) {
  for (const Figure& counter : kCounters) {
    out.Family(absl::StrCat("vrambroker_client_", counter.name), counter.help, Counter);
    for (const Row& row : rows) out.Sample(row.labels, counter.value(row));
  }
  out.Family("vrambroker_client_ooms_total", "Memory requests of the client that were refused, by reason.", Counter);
  for (const Row& row : rows) {
    for (const OomCause cause : kOomCauses) {
      out.Sample(row.labels, "reason", OomCauseName(cause), row.held->ooms[static_cast<size_t>(cause)]);
    }
  }
}

void WriteTenants(const BrokerView& view, size_t max_clients, MetricFamilies& out) {
  struct Sum {
    uint64_t sessions = 0;
    uint64_t reserved = 0;
    uint64_t allocated = 0;
    uint64_t idle = 0;
    uint64_t guarantee = 0;
  };
  // The tenants of the oldest sessions have series of their own.
  std::map<std::string, std::vector<Sum>> tenants;
  for (const SessionView& session : view.sessions) {
    const bool has_room = (tenants.size() + 1) * view.devices.size() <= max_clients;
    const bool is_named = has_room || tenants.contains(session.terms.tenant);
    std::vector<Sum>& sums = tenants[is_named ? session.terms.tenant : kOther];
    sums.resize(view.devices.size());
    for (size_t device = 0; device < sums.size(); ++device) {
      const SessionDeviceView& held = session.devices[device];
      ++sums[device].sessions;
      sums[device].reserved += held.account.reserved_bytes;
      sums[device].allocated += held.stats.allocated_bytes.all.current;
      sums[device].idle += held.idle_bytes;
      sums[device].guarantee += held.account.guarantee_bytes;
    }
  }
  const auto write = [&](const char* name, const char* help, uint64_t Sum::*value) {
    out.Family(name, help, Gauge);
    for (const auto& [tenant, sums] : tenants) {
      for (size_t device = 0; device < sums.size(); ++device) {
        out.Sample(MakeLabels({{"tenant", tenant}, {"gpu", absl::StrCat(device)}}), sums[device].*value);
      }
    }
  };
  write("vrambroker_tenant_sessions", "Sessions of the tenant; each may use every device.", &Sum::sessions);
  write("vrambroker_tenant_reserved_bytes", "Memory charged to the tenant's sessions.", &Sum::reserved);
  write("vrambroker_tenant_allocated_bytes", "Memory in blocks handed out to the tenant's sessions.", &Sum::allocated);
  write("vrambroker_tenant_idle_bytes", "Reclaimable: memory of the tenant's sessions in segments that hold no block.",
        &Sum::idle);
  write("vrambroker_tenant_guarantee_bytes", "Sum of the guarantees of the tenant's sessions.", &Sum::guarantee);
}

// Writes all tenants known to the daemon, so that counters stay when a session ends.
void WriteTenantRefusals(const BrokerView& view, MetricFamilies& out) {
  const auto for_each = [&](const auto& write) {
    for (const auto& [tenant, counts] : view.refusals) {
      for (size_t device = 0; device < counts.size(); ++device) {
        write(MakeLabels({{"tenant", tenant}, {"gpu", absl::StrCat(device)}}), counts[device]);
      }
    }
  };
  out.Family("vrambroker_tenant_ooms_total", "Memory requests of the tenant that were refused, by reason.", Counter);
  for_each([&](const MetricLabels& labels, const TenantRefusals::Counts& counts) {
    for (const OomCause cause : kOomCauses) {
      out.Sample(labels, "reason", OomCauseName(cause), counts.ooms[static_cast<size_t>(cause)]);
    }
  });
  out.Family("vrambroker_tenant_sessions_ended_after_oom_total",
             "Sessions of the tenant that ended within a minute of a request that was refused.", Counter);
  for_each([&](const MetricLabels& labels, const TenantRefusals::Counts& counts) {
    out.Sample(labels, counts.ended_sessions);
  });
}

}  // namespace

void WriteClientMetrics(const BrokerView& view, size_t max_clients, size_t max_clients_per_uid, MetricFamilies& out) {
  Folded folded(view.devices.size());
  std::vector<Row> rows = ChooseRows(view, Room(max_clients, max_clients_per_uid), folded);
  WriteInfo(rows, out);
  WriteCounters(rows, out);
  for (size_t device = 0; device < folded.held.size(); ++device) {
    if (!folded.any[device]) continue;
    rows.push_back({.labels = LabelsOf(kOther, device, kOther),
                    .session = nullptr,
                    .held = &folded.held[device],
                    .waiting = folded.waiting[device]});
  }
  WriteGauges(rows, out);
  WriteTenants(view, max_clients, out);
  WriteTenantRefusals(view, out);
  out.Single("vrambroker_clients_folded", "Sessions with at least one device folded into client=\"_other\".", Gauge,
             uint64_t{folded.sessions.size()});
}

}  // namespace vrambroker
