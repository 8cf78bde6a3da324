// SPDX-License-Identifier: Apache-2.0
//
// The daemon's configuration: file and flags in, checked values out.
#ifndef VRAMBROKER_SERVER_CONFIG_H_
#define VRAMBROKER_SERVER_CONFIG_H_

#include <sys/types.h>

#include <cstdint>
#include <optional>
#include <string>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "allocator/allocator_options.h"
#include "server/broker.h"
#include "vrambroker/config/v1/config.pb.h"

namespace vrambroker {

enum class DeviceChoice { kAuto, kCuda, kHost };

// Every value checked and every default filled in, but for the capacity, which depends on the device.
struct Config {
  std::string socket_dir;
  mode_t socket_mode = 0;
  DeviceChoice device = DeviceChoice::kAuto;
  std::optional<uint64_t> capacity_bytes;  // per device
  uint64_t headroom_bytes = 0;
  int host_devices = 1;
  std::string http_address;  // empty: no HTTP
  Limit session_limit;
  absl::Duration idle_decay;
  absl::Duration drain_timeout;
  size_t max_sessions_per_uid = 0;
  size_t max_blocks_per_session = 0;
  std::string log_level;
  AllocConf alloc_conf;
  size_t record_events = 0;
};

// A configuration, and where in its file each field stands ("NAME:LINE:COLUMN", by field name: "session_limit.bytes").
struct ConfigText {
  config::v1::DaemonConfig proto;
  absl::flat_hash_map<std::string, std::string> places;
};

// Reads protobuf text format. InvalidArgument lists every error as "NAME:LINE:COLUMN: what".
absl::StatusOr<ConfigText> ParseConfigText(absl::string_view name, const std::string& text);

// ParseConfigText() of a file. NotFound and the like when it cannot be read.
absl::StatusOr<ConfigText> ReadConfigFile(const std::string& path);

// InvalidArgument lists every faulty field, one a line, with its place where that is known.
absl::StatusOr<Config> CheckConfig(const ConfigText& text);

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_CONFIG_H_
