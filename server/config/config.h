// SPDX-License-Identifier: Apache-2.0
//
// The daemon's configuration: file and flags in, checked values out.
#ifndef VRAMBROKER_SERVER_CONFIG_CONFIG_H_
#define VRAMBROKER_SERVER_CONFIG_CONFIG_H_

#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "allocator/heap/allocator_options.h"
#include "server/config/config_text.h"
#include "server/core/broker.h"
#include "server/identity/policy.h"
#include "vrambroker/config/v1/config.pb.h"

namespace vrambroker {

enum class DeviceChoice { kAuto, kCuda, kHost };

// Every value checked and every default filled in, except the capacity: its default depends on the device.
struct Config {
  std::string socket_dir;
  mode_t socket_mode = 0;
  std::string claims_file;  // empty: vrambroker.claims in socket_dir
  DeviceChoice device = DeviceChoice::kAuto;
  bool exits_when_devices_are_lost = true;
  // Per device: bytes, or a share of the device's memory, on host of the machine's.
  std::optional<Limit> capacity;
  uint64_t headroom_bytes = 0;
  uint64_t overhead_allowance_bytes = 0;  // see Reconciliation
  int host_devices = 1;
  absl::Duration host_driver_latency;
  std::string http_address;  // empty: no HTTP
  Limit session_limit;
  std::vector<PolicyRule> rules;
  absl::Duration idle_decay;
  uint64_t idle_limit_bytes = SegmentPoolOptions::kNoIdleLimit;  // per device
  absl::Duration drain_timeout;
  absl::Duration reclaim_timeout;
  absl::Duration max_wait;
  std::optional<Limit> user_limit;
  std::optional<Limit> user_guarantee;
  absl::Duration hold_back_time;
  Limit hold_back_limit = 1.0;
  std::optional<absl::Duration> settle_time;  // none: by the kind of device
  size_t max_sessions_per_uid = 0;
  size_t max_claims_per_uid = 0;
  SessionBounds session_bounds;
  uint32_t max_calls_per_second_per_uid = 0;
  size_t max_questions_per_uid = 0;
  size_t max_snapshots_per_uid = 0;
  size_t max_snapshots = 0;
  size_t max_waiting_per_uid = 0;
  std::string log_level;
  std::string log_format;
  size_t max_metrics_clients = 0;  // pairs of client and device
  size_t max_metrics_clients_per_uid = 0;
  absl::Duration fragmentation_window;
  AllocConf alloc_conf;
  size_t record_events = 0;
  bool is_record_events_set = false;
  std::vector<std::string> warnings;  // about settings that are valid but probably not meant
  uint64_t max_recorded_events_per_uid = 0;
  size_t max_connections_per_uid = 0;  // 0: by the daemon's limit of file descriptors
};

// InvalidArgument lists every fault, including faults of the text, each on a line, with the place where known.
absl::StatusOr<Config> CheckConfig(const ConfigText& text);

// Makes the configured policy, for a daemon running as this process's user.
std::shared_ptr<const Policy> MakePolicy(const Config& config);

// Changes made to a running daemon by a reload of its configuration.
struct ReloadReport {
  size_t rules = 0;                        // in the policy now
  std::vector<std::string> needs_restart;  // changed fields that the running daemon cannot change
};

// Names of the fields for ReloadReport::needs_restart.
std::vector<std::string> FieldsThatNeedARestart(const Config& running, const Config& wanted);

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_CONFIG_CONFIG_H_
