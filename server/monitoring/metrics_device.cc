// SPDX-License-Identifier: Apache-2.0
//
// Metrics of devices: label gpu.
#include <algorithm>
#include <array>
#include <chrono>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/monitoring/metrics.h"

namespace vrambroker {
namespace {

using enum prometheus::MetricType;

constexpr size_t kMaxProcessNames = 20;  // of uncounted processes, with series of their own

// Exported figures of a device, beyond its DeviceView.
struct DeviceRow {
  std::string gpu;
  MetricLabels labels;  // of the device alone
  const DeviceView* info = nullptr;
  uint64_t largest_hole_bytes = 0;  // the largest free block of any session
  FreeSizes free;                   // of the sessions and the daemon's cache
  uint64_t reserved_bytes = 0;
  uint64_t held_bytes = 0;       // by sessions: without cached, left-behind and unknown bytes
  uint64_t free_held_bytes = 0;  // part of held_bytes outside any block
  std::map<std::string, uint64_t> quarantined_bytes;
  std::chrono::milliseconds quarantine_age{0};
};

DeviceRow MakeRow(const BrokerView& view, size_t device) {
  const DeviceView& info = view.devices[device];
  DeviceRow row{
      .gpu = absl::StrCat(device),
      .info = &info,
      .free = info.idle_sizes,
      .quarantined_bytes = {
          {"disconnected", 0}, {"ended", 0}, {"settling", 0}, {"held_open", 0}, {"carried_over", 0}, {"others", 0}}};
  row.labels = MakeLabels({{"gpu", row.gpu}});
  for (const SessionView& session : view.sessions) {
    const SessionDeviceView& held = session.devices[device];
    row.free.Add(held.stats.free);
    row.largest_hole_bytes = std::max(row.largest_hole_bytes, held.stats.free.largest_bytes);
    if (session.state == SessionState::kActive) continue;
    // A session just being closed has ended.
    const SessionState state = std::min(session.state, SessionState::kEnded);
    row.quarantined_bytes[SessionStateName(state)] += held.account.reserved_bytes;
  }
  for (const QuarantinedView& dead : info.quarantine) {
    row.quarantined_bytes[dead.holding.holders.empty() ? "settling" : "held_open"] += dead.holding.bytes;
    row.quarantine_age = std::max(row.quarantine_age, dead.age);
  }
  for (const CarriedOver::Holding& carried : info.carried_over) {
    if (carried.session != kNoSession) continue;
    row.quarantined_bytes[carried.segments > 0 ? "carried_over" : "others"] += carried.bytes;
  }
  // The sessions' own counts may be older.
  row.reserved_bytes = std::max(info.pool.reserved_bytes, row.info->stats.active_bytes.all.current);
  row.held_bytes = std::max(info.leased_bytes - info.unknown_bytes, row.info->stats.active_bytes.all.current);
  row.free_held_bytes = row.held_bytes - row.info->stats.active_bytes.all.current;
  return row;
}

struct DeviceFigure {
  const char* name;
  const char* help;
  prometheus::MetricType type;
  uint64_t (*value)(const DeviceRow& row);
};

constexpr DeviceFigure kFigures[] = {
    {"memory_total_bytes", "Memory of the device, as the driver reports it.", Gauge,
     [](const DeviceRow& row) { return row.info->properties.total_bytes; }},
    {"memory_free_bytes", "Free memory of the device, as the driver reported it at the last health check.", Gauge,
     [](const DeviceRow& row) { return row.info->driver_free_bytes; }},
    {"capacity_bytes", "Memory that the daemon may hand out.", Gauge,
     [](const DeviceRow& row) { return row.info->pool.capacity_bytes; }},
    {"reserved_bytes", "Memory of segments held from the driver: by sessions, cached by the daemon, or left behind.",
     Gauge, [](const DeviceRow& row) { return row.reserved_bytes; }},
    {"leased_bytes", "Memory of segments that sessions hold: allocated, fragmented, reclaimable, or carried over.",
     Gauge, [](const DeviceRow& row) { return row.info->leased_bytes; }},
    {"allocated_bytes", "Memory in blocks handed out to clients.", Gauge,
     [](const DeviceRow& row) { return row.info->stats.allocated_bytes.all.current; }},
    {"active_bytes", "Memory in blocks that are in use or wait for a stream event.", Gauge,
     [](const DeviceRow& row) { return row.info->stats.active_bytes.all.current; }},
    {"requested_bytes", "Memory that clients asked for, before rounding.", Gauge,
     [](const DeviceRow& row) { return row.info->stats.requested_bytes.all.current; }},
    {"inactive_split_bytes",
     "Fragmented: free memory in the sessions' partly used segments, which cannot be given back.", Gauge,
     [](const DeviceRow& row) { return row.info->stats.inactive_split_bytes.all.current; }},
    {"cached_free_bytes", "Free memory in the sessions' segments, and what the daemon caches.", Gauge,
     [](const DeviceRow& row) { return row.free_held_bytes + row.info->pool.idle_bytes; }},
    {"idle_bytes", "Cached by the daemon: memory of segments that no session holds, kept for reuse.", Gauge,
     [](const DeviceRow& row) { return row.info->pool.idle_bytes; }},
    {"largest_free_block_bytes",
     "The largest free block of any session, or the largest segment that the daemon caches.", Gauge,
     [](const DeviceRow& row) { return row.free.largest_bytes; }},
    {"guaranteed_bytes", "Sum of the sessions' guarantees.", Gauge,
     [](const DeviceRow& row) { return row.info->pool.guaranteed_bytes; }},
    {"committed_bytes",
     "Memory that nobody else can get: reserved by sessions, quarantined, or kept free for guarantees.", Gauge,
     [](const DeviceRow& row) { return row.info->pool.committed_bytes; }},
    {"carried_over_bytes", "Memory that processes hold from an earlier run of the daemon.", Gauge,
     [](const DeviceRow& row) { return row.info->pool.carried_over_bytes; }},
    {"outside_bytes",
     "Memory of the capacity that the driver does not have: contexts and programs beyond the headroom, and the next "
     "client's context.",
     Gauge, [](const DeviceRow& row) { return row.info->pool.outside_bytes; }},
    {"held_back_bytes", "Free memory that is kept for a moment for a request that has waited.", Gauge,
     [](const DeviceRow& row) { return row.info->pool.held_back_bytes; }},
    {"unfreed_bytes", "Memory that the driver has refused to take back, so far.", Gauge,
     [](const DeviceRow& row) { return row.info->pool.unfreed_bytes; }},
    {"overhead_bytes",
     "What CUDA contexts and libraries of the daemon and its clients use, which nobody is charged for.", Gauge,
     [](const DeviceRow& row) { return row.info->processes->overhead_bytes; }},
    {"uncounted_bytes", "What processes use that are no clients: nobody counts it.", Gauge,
     [](const DeviceRow& row) { return row.info->processes->uncounted_bytes; }},
    {"processes_known", "1 if the driver tells what each process uses, else 0.", Gauge,
     [](const DeviceRow& row) { return uint64_t{row.info->processes->status.ok() ? 1U : 0U}; }},
    {"segments", "Segments leased to sessions.", Gauge, [](const DeviceRow& row) { return row.info->pool.segments; }},
    {"blocks", "Blocks handed out to clients.", Gauge,
     [](const DeviceRow& row) { return row.info->stats.allocation.all.current; }},
    {"healthy", "1 if the daemon can use the device, else 0.", Gauge,
     [](const DeviceRow& row) { return uint64_t{row.info->health.ok() ? 1U : 0U}; }},
    {"waiting_requests", "Requests that wait for others to give memory back.", Gauge,
     [](const DeviceRow& row) { return uint64_t{row.info->waits.waiting}; }},
    {"alloc_retries_total",
     "Requests that first gave back the session's own cache, whether they then got memory or not.", Counter,
     [](const DeviceRow& row) { return row.info->alloc_retries; }},
    {"segment_allocs_total", "Segments obtained from the driver.", Counter,
     [](const DeviceRow& row) { return row.info->pool.segment_allocs; }},
    {"segment_frees_total", "Segments given back to the driver.", Counter,
     [](const DeviceRow& row) { return row.info->pool.segment_frees; }},
    {"handovers_total", "Segments given to a session from the daemon's cache, without a driver call.", Counter,
     [](const DeviceRow& row) { return row.info->pool.handovers; }},
    {"handover_bytes_total", "Memory given to sessions from the daemon's cache, without a driver call.", Counter,
     [](const DeviceRow& row) { return row.info->pool.handover_bytes; }},
    {"scrubs_total", "Segments overwritten with zeros before a session got them.", Counter,
     [](const DeviceRow& row) { return row.info->calls.scrubs; }},
    {"scrubbed_bytes_total", "Memory overwritten with zeros before a session got it.", Counter,
     [](const DeviceRow& row) { return row.info->calls.scrubbed_bytes; }},
    {"reclaims_total", "Times that a session was asked to give back reclaimable memory for others.", Counter,
     [](const DeviceRow& row) { return row.info->reclaims.reclaims; }},
    {"reclaim_asked_bytes_total", "Memory that sessions were asked to give back.", Counter,
     [](const DeviceRow& row) { return row.info->reclaims.asked_bytes; }},
    {"reclaimed_bytes_total", "Memory that sessions gave back when they were asked.", Counter,
     [](const DeviceRow& row) { return row.info->reclaims.reclaimed_bytes; }},
};

void WriteRatios(const std::vector<DeviceRow>& rows, MetricFamilies& out) {
  out.Family("vrambroker_device_fragmentation_ratio",
             "1 - allocated / reserved of what sessions hold, between 0 and 1; 0 when they hold nothing. Without what "
             "remote sessions carry over.",
             Gauge);
  for (const DeviceRow& row : rows) {
    out.Sample(row.labels, FragmentationRatio(row.info->stats.allocated_bytes.all.current, row.held_bytes));
  }
  out.Family("vrambroker_device_external_fragmentation_ratio",
             "1 - largest free block / free bytes, in the sessions' segments, between 0 and 1; 0 when nothing is free.",
             Gauge);
  for (const DeviceRow& row : rows) {
    out.Sample(row.labels, ExternalFragmentationRatio(row.largest_hole_bytes, row.free_held_bytes));
  }
}

void WriteFreeBlocks(const std::vector<DeviceRow>& rows, MetricFamilies& out) {
  const auto write = [&](const char* name, const char* help,
                         const std::function<uint64_t(const DeviceRow&, size_t)>& value) {
    out.Family(name, help, Gauge);
    for (const DeviceRow& row : rows) {
      for (size_t i = 0; i < FreeSizes::kClasses; ++i) {
        out.Sample(row.labels, "size", absl::StrCat(FreeSizes::ClassBytes(i)), value(row, i));
      }
    }
  };
  write("vrambroker_device_free_blocks",
        "Free blocks and segments that the daemon caches, by the lower bound of their size class in bytes.",
        [](const DeviceRow& row, size_t i) { return row.free.blocks[i]; });
  write(
      "vrambroker_device_free_block_bytes",
      "Memory of free blocks and of segments that the daemon caches, by the lower bound of their size class in bytes.",
      [](const DeviceRow& row, size_t i) { return row.free.bytes[i]; });
}

void WriteQuarantine(const std::vector<DeviceRow>& rows, MetricFamilies& out) {
  out.Family("vrambroker_device_quarantined_bytes",
             "Memory that nobody else may get yet: of clients that are gone, or from an earlier run, by reason.",
             Gauge);
  for (const DeviceRow& row : rows) {
    for (const auto& [reason, bytes] : row.quarantined_bytes) out.Sample(row.labels, "reason", reason, bytes);
  }
  out.Family("vrambroker_device_quarantine_age_seconds",
             "How long the oldest memory of a dead client has been in quarantine.", Gauge);
  for (const DeviceRow& row : rows) {
    out.Sample(row.labels, std::chrono::duration<double>(row.quarantine_age).count());
  }
}

void WriteProcesses(const std::vector<DeviceRow>& rows, MetricFamilies& out) {
  out.Family("vrambroker_device_drift_bytes",
             "How far what processes use and what they are charged for are apart, by kind: used and not charged beyond "
             "the allowance, or charged and not used.",
             Gauge);
  for (const DeviceRow& row : rows) {
    out.Sample(row.labels, "kind", "uncharged", row.info->processes->drift_bytes);
    out.Sample(row.labels, "kind", "unused", row.info->processes->unused_bytes);
  }
  out.Family("vrambroker_device_uncounted_process_bytes",
             "What processes use that are no clients, by command: the largest, and the others as _other.", Gauge);
  for (const DeviceRow& row : rows) {
    std::map<std::string, uint64_t> by_name;
    for (const ProcessView& process : row.info->processes->processes) {
      if (process.kind == ProcessView::Kind::kUncounted) by_name[process.name] += process.used_bytes;
    }
    std::vector<std::pair<uint64_t, std::string>> largest;
    largest.reserve(by_name.size());
    for (const auto& [name, bytes] : by_name) largest.emplace_back(bytes, name);
    std::sort(largest.rbegin(), largest.rend());
    uint64_t others = 0;
    for (size_t i = kMaxProcessNames; i < largest.size(); ++i) others += largest[i].first;
    largest.resize(std::min(largest.size(), kMaxProcessNames));
    for (const auto& [bytes, name] : largest) out.Sample(row.labels, "process", name, bytes);
    if (others > 0) out.Sample(row.labels, "process", "_other", others);
  }
}

void WriteRequests(const std::vector<DeviceRow>& rows, MetricFamilies& out) {
  out.Family("vrambroker_device_ooms_total", "Memory requests that were refused, by reason.", Counter);
  for (const DeviceRow& row : rows) {
    for (const OomCause cause : kOomCauses) {
      out.Sample(row.labels, "reason", OomCauseName(cause), row.info->ooms[static_cast<size_t>(cause)]);
    }
  }
  out.Family("vrambroker_device_oldest_waiting_timestamp_seconds",
             "Unix time at which the oldest waiting request began to wait; 0 when none waits.", Gauge);
  const std::chrono::duration<double> now = std::chrono::system_clock::now().time_since_epoch();
  for (const DeviceRow& row : rows) {
    const std::chrono::duration<double> waited = row.info->longest_waiting;
    out.Sample(row.labels, row.info->waits.waiting == 0 ? 0.0 : (now - waited).count());
  }
  out.Family("vrambroker_device_wait_duration_seconds",
             "Waits of requests for which others were asked to give memory back, by outcome.", Histogram);
  for (const DeviceRow& row : rows) {
    for (const WaitOutcome outcome : kWaitOutcomes) {
      out.Sample(row.labels, "outcome", WaitOutcomeName(outcome),
                 row.info->waits.durations[static_cast<size_t>(outcome)]);
    }
  }
  out.Family("vrambroker_device_reclaim_duration_seconds",
             "Time from asking a session to give memory back until it answered.", Histogram);
  for (const DeviceRow& row : rows) out.Sample(row.labels, row.info->reclaims.durations);
}

void WriteDriverCalls(const std::vector<DeviceRow>& rows, MetricFamilies& out) {
  out.Family("vrambroker_device_call_errors_total", "Driver calls that failed, by call.", Counter);
  for (const DeviceRow& row : rows) {
    for (size_t call = 0; call < row.info->calls.calls.size(); ++call) {
      out.Sample(row.labels, "call", DeviceCallName(static_cast<DeviceCall>(call)), row.info->calls.calls[call].errors);
    }
  }
  out.Family("vrambroker_device_call_duration_seconds", "Duration of driver calls, by call.", Histogram);
  for (const DeviceRow& row : rows) {
    for (size_t call = 0; call < row.info->calls.calls.size(); ++call) {
      out.Sample(row.labels, "call", DeviceCallName(static_cast<DeviceCall>(call)),
                 row.info->calls.calls[call].durations);
    }
  }
}

}  // namespace

void WriteDeviceMetrics(const BrokerView& view, MetricFamilies& out) {
  std::vector<DeviceRow> rows;
  rows.reserve(view.devices.size());
  for (size_t device = 0; device < view.devices.size(); ++device) rows.push_back(MakeRow(view, device));
  out.Family("vrambroker_device_info", "Identity of a device; the value is always 1.", Gauge);
  for (const DeviceRow& row : rows) {
    const DeviceProperties& properties = row.info->properties;
    out.Sample(
        MakeLabels({{"gpu", row.gpu}, {"uuid", properties.uuid}, {"name", properties.name}, {"kind", properties.kind}}),
        uint64_t{1});
  }
  for (const DeviceFigure& figure : kFigures) {
    out.Family(absl::StrCat("vrambroker_device_", figure.name), figure.help, figure.type);
    for (const DeviceRow& row : rows) out.Sample(row.labels, figure.value(row));
  }
  WriteRatios(rows, out);
  WriteFreeBlocks(rows, out);
  WriteQuarantine(rows, out);
  WriteProcesses(rows, out);
  WriteRequests(rows, out);
  WriteDriverCalls(rows, out);
}

}  // namespace vrambroker
