// SPDX-License-Identifier: Apache-2.0
#include "server/config/config.h"

#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <system_error>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "allocator/base/amounts.h"
#include "allocator/base/bytes.h"
#include "allocator/heap/history.h"
#include "allocator/heap/size_class.h"
#include "server/base/http_address.h"
#include "server/config/config_checker.h"
#include "server/config/config_rules.h"

namespace vrambroker {
namespace {

constexpr uint32_t kMaxMetricsClients = 100'000;
constexpr size_t kMetricsClientsPerUid = 250;
constexpr absl::Duration kLeastFragmentationWindow = absl::Seconds(1);
constexpr absl::Duration kLeastClientTimeout = absl::Milliseconds(10);
constexpr absl::Duration kMostClientTimeout = absl::Seconds(20);

std::string Or(const std::string& value, const char* fallback) {
  return value.empty() ? fallback : value;
}

uint32_t Or(uint32_t value, uint32_t fallback) {
  return value == 0 ? fallback : value;
}

std::optional<Limit> CheckCapacity(const std::string& text, Checker& check) {
  const absl::StatusOr<Limit> capacity = ParseSizeOrShare(text);
  if (!capacity.ok()) {
    check.Fault("capacity", capacity.status().message());
    return std::nullopt;
  }
  const uint64_t* const bytes = std::get_if<uint64_t>(&*capacity);
  if (bytes != nullptr && (*bytes < kSegmentGranuleBytes || *bytes >= kMaxRequestBytes)) {
    check.Fault("capacity", absl::StrCat("'", text, "' is not between 2MiB and 1048575TiB"));
  }
  if (bytes == nullptr && std::get<double>(*capacity) == 0) {
    check.Fault("capacity", absl::StrCat("'", text, "' is nothing of a device"));
  }
  return *capacity;
}

// nullopt where the size depends on the device.
std::optional<uint64_t> BytesOf(const std::optional<Limit>& capacity) {
  if (!capacity.has_value() || !std::holds_alternative<uint64_t>(*capacity)) return std::nullopt;
  return std::get<uint64_t>(*capacity);
}

}  // namespace

absl::StatusOr<Config> CheckConfig(const ConfigText& text) {
  const config::v1::DaemonConfig& proto = text.proto;
  Checker check(text.places, text.faults);
  Config config;
  // Clients and container runtimes get the path, and would resolve a relative path elsewhere.
  std::error_code no_directory;
  config.socket_dir = std::filesystem::absolute(Or(proto.socket_dir(), "/run/vrambroker"), no_directory);
  if (no_directory) {
    check.Fault("socket_dir", absl::StrCat("'", proto.socket_dir(), "' is relative, and the current directory is not ",
                                           "known: ", no_directory.message()));
  }
  config.claims_file = proto.claims_file();
  if (!config.claims_file.empty() && config.claims_file.front() != '/') {
    check.Fault("claims_file", absl::StrCat("'", config.claims_file, "' is not an absolute path"));
  }

  const std::string mode = Or(proto.socket_mode(), "0660");
  unsigned int bits = 0;
  const char* const end = mode.data() + mode.size();
  const auto [parsed, error] = std::from_chars(mode.data(), end, bits, 8);
  if (mode.size() > 4 || error != std::errc() || parsed != end || bits > 0777) {
    check.Fault("socket_mode", absl::StrCat("'", mode, "' is not an octal mode like 0660"));
  }
  config.socket_mode = bits;

  const std::string device = Or(proto.device(), "auto");
  if (device == "auto") {
    config.device = DeviceChoice::kAuto;
  } else if (device == "cuda") {
    config.device = DeviceChoice::kCuda;
  } else if (device == "host") {
    config.device = DeviceChoice::kHost;
  } else {
    check.Fault("device", absl::StrCat("'", device, "' is not auto, cuda or host"));
  }

  const std::string device_lost = Or(proto.device_lost(), "exit");
  config.exits_when_devices_are_lost = device_lost == "exit";
  if (device_lost != "exit" && device_lost != "stay") {
    check.Fault("device_lost", absl::StrCat("'", device_lost, "' is not exit or stay"));
  }

  if (!proto.capacity().empty()) config.capacity = CheckCapacity(proto.capacity(), check);
  config.headroom_bytes = check.Size("headroom", proto.headroom(), 1_GiB);
  config.overhead_allowance_bytes = check.Size("overhead_allowance", proto.overhead_allowance(), 1_GiB);

  config.host_devices = proto.host_devices() == 0 ? 1 : static_cast<int>(proto.host_devices());
  if (proto.host_devices() > 16) check.Fault("host_devices", absl::StrCat(proto.host_devices(), " is above 16"));
  config.host_driver_latency = check.Time("host_driver_latency", proto.host_driver_latency(), absl::ZeroDuration());

  const std::string http = Or(proto.http_address(), "127.0.0.1:9477");
  config.http_address = http == "off" ? "" : http;
  if (!config.http_address.empty()) {
    if (const auto address = ParseHttpAddress(http); !address.ok())
      check.Fault("http_address", address.status().message());
  }

  config.session_limit =
      check.LimitOf("session_limit", proto.has_session_limit() ? &proto.session_limit() : nullptr).value_or(1.0);
  config.user_limit = check.LimitOf("user_limit", proto.has_user_limit() ? &proto.user_limit() : nullptr);
  config.user_guarantee =
      check.LimitOf("user_guarantee", proto.has_user_guarantee() ? &proto.user_guarantee() : nullptr);
  const std::optional<uint64_t> capacity_bytes = BytesOf(config.capacity);
  config.rules = CheckRules(proto, config.session_limit, capacity_bytes, check);

  config.idle_decay = check.Time("idle_decay", proto.idle_decay(), absl::Seconds(10));
  config.idle_limit_bytes = check.Size("idle_limit", proto.idle_limit(), SegmentPoolOptions::kNoIdleLimit);
  config.drain_timeout = check.Time("drain_timeout", proto.drain_timeout(), absl::Seconds(5));
  config.reclaim_timeout = check.Time("reclaim_timeout", proto.reclaim_timeout(), absl::Seconds(2));
  config.max_wait = check.Time("max_wait", proto.max_wait(), absl::Hours(1), absl::Hours(1));
  config.hold_back_time = check.Time("hold_back_time", proto.hold_back_time(), absl::Seconds(1), absl::Minutes(10));
  config.hold_back_limit =
      check.LimitOf("hold_back_limit", proto.has_hold_back_limit() ? &proto.hold_back_limit() : nullptr).value_or(1.0);
  if (!proto.settle_time().empty()) {
    config.settle_time = check.Time("settle_time", proto.settle_time(), absl::ZeroDuration());
  }
  config.max_sessions_per_uid = Or(proto.max_sessions_per_uid(), 1024);
  config.max_claims_per_uid = proto.has_max_claims_per_uid() ? proto.max_claims_per_uid() : 64;
  if (config.max_claims_per_uid > Claims::kMaxClaims) {
    check.Fault("max_claims_per_uid", absl::StrCat(config.max_claims_per_uid, " is more than ", Claims::kMaxClaims,
                                                   ", the most there can be"));
  }
  const absl::Duration client_timeout = check.Time("client_timeout", proto.client_timeout(), absl::Seconds(2));
  if (client_timeout < kLeastClientTimeout || client_timeout > kMostClientTimeout) {
    check.Fault("client_timeout", absl::StrCat(absl::FormatDuration(client_timeout), " is not between ",
                                               absl::FormatDuration(kLeastClientTimeout), " and ",
                                               absl::FormatDuration(kMostClientTimeout)));
  }
  config.session_bounds.client_timeout = absl::ToChronoMilliseconds(client_timeout);
  config.session_bounds.max_blocks = Or(proto.max_blocks_per_session(), 1 << 20);
  config.session_bounds.max_segments = Or(proto.max_segments_per_session(), 1 << 16);
  config.max_calls_per_second_per_uid = Or(proto.max_calls_per_second_per_uid(), 100'000);
  config.max_questions_per_uid = Or(proto.max_questions_per_uid(), 16);
  config.max_snapshots_per_uid = Or(proto.max_snapshots_per_uid(), 4);
  config.max_snapshots = Or(proto.max_snapshots(), 8);
  config.max_recorded_events_per_uid = Or(proto.max_recorded_events_per_uid(), 10'000'000);
  config.max_connections_per_uid = proto.max_connections_per_uid();
  config.max_waiting_per_uid = Or(proto.max_waiting_per_uid(), 4096);

  config.max_metrics_clients = Or(proto.metrics().max_clients(), 1000);
  if (proto.metrics().max_clients() > kMaxMetricsClients) {
    check.Fault("metrics.max_clients", absl::StrCat(proto.metrics().max_clients(), " is above ", kMaxMetricsClients));
  }
  config.max_metrics_clients_per_uid =
      Or(proto.metrics().max_clients_per_uid(),
         static_cast<uint32_t>(std::min(config.max_metrics_clients, kMetricsClientsPerUid)));
  if (config.max_metrics_clients_per_uid > config.max_metrics_clients) {
    check.Fault("metrics.max_clients_per_uid", absl::StrCat(config.max_metrics_clients_per_uid,
                                                            " is above max_clients, ", config.max_metrics_clients));
  }
  config.fragmentation_window = check.Time("metrics.fragmentation_window", proto.metrics().fragmentation_window(),
                                           absl::Minutes(1), absl::Hours(1));
  if (config.fragmentation_window < kLeastFragmentationWindow) {
    check.Fault("metrics.fragmentation_window",
                absl::StrCat(absl::FormatDuration(config.fragmentation_window), " is below ",
                             absl::FormatDuration(kLeastFragmentationWindow)));
  }

  config.log_level = Or(proto.log_level(), "info");
  if (config.log_level != "debug" && config.log_level != "info" && config.log_level != "warn" &&
      config.log_level != "error") {
    check.Fault("log_level", absl::StrCat("'", config.log_level, "' is not debug, info, warn or error"));
  }
  config.log_format = Or(proto.log_format(), "text");
  if (config.log_format != "text" && config.log_format != "json") {
    check.Fault("log_format", absl::StrCat("'", config.log_format, "' is not text or json"));
  }
  if (absl::StatusOr<AllocConf> conf = ParseAllocConf(proto.alloc_conf()); conf.ok()) {
    config.alloc_conf = *std::move(conf);
  } else {
    check.Fault("alloc_conf", conf.status().message());
  }
  config.is_record_events_set = proto.has_record_events();
  config.record_events = proto.has_record_events() ? proto.record_events() : History::kDefaultEvents;
  if (proto.record_events() > kMaxRecordedEvents) {
    check.Fault("record_events", absl::StrCat(proto.record_events(), " is above ", kMaxRecordedEvents));
  }
  if (absl::Status status = check.status(); !status.ok()) return status;
  config.warnings = WarnOfGuarantees(config.rules, config.user_guarantee, config.max_sessions_per_uid, capacity_bytes);
  for (const std::string& warning : config.alloc_conf.warnings) {
    config.warnings.push_back(absl::StrCat("alloc_conf: ", warning));
  }
  return config;
}

std::shared_ptr<const Policy> MakePolicy(const Config& config) {
  return std::make_shared<const Policy>(PolicyOptions{.rules = config.rules,
                                                      .session_limit = config.session_limit,
                                                      .max_wait = absl::ToChronoMilliseconds(config.max_wait),
                                                      .user_limit = config.user_limit,
                                                      .user_guarantee = config.user_guarantee,
                                                      .max_sessions_per_uid = config.max_sessions_per_uid,
                                                      .max_claims_per_uid = config.max_claims_per_uid,
                                                      .daemon_uid = geteuid()});
}

std::vector<std::string> FieldsThatNeedARestart(const Config& running, const Config& wanted) {
  std::vector<std::string> fields;
  const auto compare = [&](const char* field, const auto& value) {
    if (value(running) != value(wanted)) fields.emplace_back(field);
  };
  compare("socket_dir", [](const Config& c) { return c.socket_dir; });
  compare("claims_file", [](const Config& c) { return c.claims_file; });
  compare("socket_mode", [](const Config& c) { return c.socket_mode; });
  compare("device", [](const Config& c) { return c.device; });
  compare("device_lost", [](const Config& c) { return c.exits_when_devices_are_lost; });
  compare("capacity", [](const Config& c) { return c.capacity; });
  compare("headroom", [](const Config& c) { return c.headroom_bytes; });
  compare("overhead_allowance", [](const Config& c) { return c.overhead_allowance_bytes; });
  compare("host_devices", [](const Config& c) { return c.host_devices; });
  compare("http_address", [](const Config& c) { return c.http_address; });
  compare("idle_decay", [](const Config& c) { return c.idle_decay; });
  compare("drain_timeout", [](const Config& c) { return c.drain_timeout; });
  compare("max_blocks_per_session", [](const Config& c) { return c.session_bounds.max_blocks; });
  compare("max_segments_per_session", [](const Config& c) { return c.session_bounds.max_segments; });
  compare("max_calls_per_second_per_uid", [](const Config& c) { return c.max_calls_per_second_per_uid; });
  compare("max_questions_per_uid", [](const Config& c) { return c.max_questions_per_uid; });
  compare("max_snapshots_per_uid", [](const Config& c) { return c.max_snapshots_per_uid; });
  compare("max_snapshots", [](const Config& c) { return c.max_snapshots; });
  compare("max_waiting_per_uid", [](const Config& c) { return c.max_waiting_per_uid; });
  compare("reclaim_timeout", [](const Config& c) { return c.reclaim_timeout; });
  compare("hold_back_time", [](const Config& c) { return c.hold_back_time; });
  compare("hold_back_limit", [](const Config& c) { return c.hold_back_limit; });
  compare("client_timeout", [](const Config& c) { return c.session_bounds.client_timeout; });
  compare("settle_time", [](const Config& c) { return c.settle_time; });
  compare("metrics", [](const Config& c) {
    return std::tuple(c.max_metrics_clients, c.max_metrics_clients_per_uid, c.fragmentation_window);
  });
  compare("log_level", [](const Config& c) { return c.log_level; });
  compare("log_format", [](const Config& c) { return c.log_format; });
  compare("alloc_conf", [](const Config& c) { return FormatAllocConf(c.alloc_conf.options); });
  compare("record_events", [](const Config& c) { return c.record_events; });
  compare("max_recorded_events_per_uid", [](const Config& c) { return c.max_recorded_events_per_uid; });
  compare("max_connections_per_uid", [](const Config& c) { return c.max_connections_per_uid; });
  compare("idle_limit", [](const Config& c) { return c.idle_limit_bytes; });
  compare("host_driver_latency", [](const Config& c) { return c.host_driver_latency; });
  return fields;
}

}  // namespace vrambroker
