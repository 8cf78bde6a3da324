// SPDX-License-Identifier: Apache-2.0
//
// Metrics of the daemon itself; metrics_device.cc and metrics_client.cc have the metrics of devices and clients.
#include "server/monitoring/metrics.h"

#include <dirent.h>
#include <sys/resource.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <exception>
#include <fstream>
#include <memory>
#include <utility>

#include "allocator/base/version.h"
#include "allocator/device/process_files.h"

namespace vrambroker {
namespace {

using enum prometheus::MetricType;

void WriteSessionMetrics(const BrokerView& view, MetricFamilies& out) {
  std::array<uint64_t, 3> by_state{};
  for (const SessionView& session : view.sessions) {
    ++by_state[std::min(static_cast<size_t>(session.state), by_state.size() - 1)];  // closed counts as ended
  }
  out.Family("vrambroker_sessions", "Sessions, by state.", Gauge);
  for (size_t state = 0; state < by_state.size(); ++state) {
    out.Sample(MakeLabels({{"state", SessionStateName(static_cast<SessionState>(state))}}), by_state[state]);
  }
  out.Single("vrambroker_sessions_opened_total", "Sessions opened.", Counter, view.counts.opened);
  out.Single("vrambroker_sessions_refused_total", "Sessions that the daemon refused to open.", Counter,
             view.counts.refused);
  out.Family("vrambroker_sessions_closed_total", "Sessions closed, by reason.", Counter);
  for (const CloseReason reason : kCloseReasons) {
    out.Sample(MakeLabels({{"reason", CloseReasonName(reason)}}), view.counts.closed[static_cast<size_t>(reason)]);
  }
}

// Counts entries of /proc/self/fd, except the descriptor reading the directory.
uint64_t OpenFds() {
  const std::unique_ptr<DIR, int (*)(DIR*)> dir(opendir("/proc/self/fd"), closedir);
  uint64_t fds = 0;
  while (dir != nullptr && readdir(dir.get()) != nullptr) ++fds;
  return fds - std::min<uint64_t>(fds, 3);
}

double ProcessStart() {
  timespec now = {};
  timespec since_boot = {};
  clock_gettime(CLOCK_REALTIME, &now);
  clock_gettime(CLOCK_BOOTTIME, &since_boot);
  const auto seconds = [](const timespec& time) {
    return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) / 1e9;
  };
  const auto ticks_per_second = static_cast<double>(sysconf(_SC_CLK_TCK));
  return seconds(now) - seconds(since_boot) + static_cast<double>(StartOf(getpid())) / ticks_per_second;
}

// Uses the metric names common to all Prometheus client libraries.
void WriteProcessMetrics(MetricFamilies& out) {
  timespec cpu = {};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &cpu);
  out.Single("process_cpu_seconds_total", "CPU time of the daemon, user and system.", Counter,
             static_cast<double>(cpu.tv_sec) + static_cast<double>(cpu.tv_nsec) / 1e9);
  uint64_t virtual_pages = 0;
  uint64_t resident_pages = 0;
  std::ifstream("/proc/self/statm") >> virtual_pages >> resident_pages;
  const auto page = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  out.Single("process_virtual_memory_bytes", "Virtual memory of the daemon.", Gauge, virtual_pages * page);
  out.Single("process_resident_memory_bytes", "Resident memory of the daemon.", Gauge, resident_pages * page);
  out.Single("process_open_fds", "File descriptors that the daemon has open.", Gauge, OpenFds());
  rlimit files = {};
  getrlimit(RLIMIT_NOFILE, &files);
  out.Single("process_max_fds", "File descriptors that the daemon may have open.", Gauge,
             static_cast<uint64_t>(files.rlim_cur));
  static const double start = ProcessStart();  // constant across scrapes, even if the clock changes
  out.Single("process_start_time_seconds", "Unix time at which the daemon started.", Gauge, start);
}

void WriteHttpMetrics(const HttpStats& http, MetricFamilies& out) {
  out.Single("vrambroker_http_listen_failures_total",
             "Tries to listen on http_address that failed, because another program has the port.", Counter,
             http.listen_failures.load());
  out.Single("vrambroker_http_connections", "Open connections to the HTTP port.", Gauge, http.connections.load());
  out.Family("vrambroker_http_connections_dropped_total",
             "Connections to the HTTP port that the daemon closed although their clients kept them, by reason.",
             Counter);
  for (const HttpDrop reason : kHttpDrops) {
    out.Sample(MakeLabels({{"reason", HttpDropName(reason)}}), http.dropped[static_cast<size_t>(reason)].load());
  }
}

void WriteErrors(const prometheus::Counter& errors, MetricFamilies& out) {
  out.Single("vrambroker_collect_errors_total", "Scrapes that failed in the daemon.", Counter, errors.Value());
}

}  // namespace

std::vector<prometheus::MetricFamily> Metrics::Collect() const {
  MetricFamilies out;
  const BrokerView view = options_.view();
  out.Family("vrambroker_build_info", "Build information; the value is always 1.", Gauge);
  out.Sample(MakeLabels({{"version", kVersion}, {"revision", kRevision}, {"cuda_version", kCudaVersion}}), uint64_t{1});
  out.Single("vrambroker_ready", "1 while the daemon serves clients, 0 while it starts or stops.", Gauge,
             uint64_t{view.is_serving ? 1U : 0U});
  if (options_.reload != nullptr) {
    out.Single("vrambroker_config_last_reload_successful",
               "1 if the last configuration reload worked or there was none, else 0.", Gauge,
               uint64_t{options_.reload->last_was_successful ? 1U : 0U});
    out.Single("vrambroker_config_last_reload_success_timestamp_seconds",
               "Unix time of the last configuration reload that worked, or of the start.", Gauge,
               static_cast<uint64_t>(options_.reload->last_success));
  }
  WriteProcessMetrics(out);
  WriteSessionMetrics(view, out);
  WriteDeviceMetrics(view, out);
  WriteClaimMetrics(view, options_.max_claims, out);
  WriteClientMetrics(view, options_.max_clients, options_.max_clients_per_uid, out);
  if (options_.rpcs != nullptr) out.Add(options_.rpcs->Collect());
  if (options_.http != nullptr) WriteHttpMetrics(*options_.http, out);
  WriteErrors(errors_, out);
  return out.Take();
}

std::string Metrics::Text() const noexcept {
  const auto start = std::chrono::steady_clock::now();
  try {
    std::string text;
    AppendText(Collect(), text);
    const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - start;
    MetricFamilies last;
    last.Single("vrambroker_collect_duration_seconds", "Time that the daemon took for this scrape.", Gauge,
                taken.count());
    AppendText(last.Take(), text);
    return text;
  } catch (const std::exception&) {
    // Out of memory, most likely; the code below needs almost none.
    errors_.Increment();
  }
  try {
    std::string text;
    MetricFamilies out;
    WriteErrors(errors_, out);
    AppendText(out.Take(), text);
    return text;
  } catch (const std::exception&) {
    return {};
  }
}

}  // namespace vrambroker
