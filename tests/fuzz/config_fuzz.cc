// SPDX-License-Identifier: Apache-2.0
//
// libFuzzer: any bytes as the daemon's configuration file. The parser names each fault on a line with its place. An
// accepted configuration keeps the bounds that the daemon relies on.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <iostream>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "server/config/config.h"

namespace {

void Require(bool holds, absl::string_view rule, absl::string_view text) {
  if (holds) return;
  std::cerr << "violated: " << rule << "; " << text << '\n';
  std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string text(reinterpret_cast<const char*>(data), size);
  const absl::StatusOr<vrambroker::Config> config = vrambroker::CheckConfig(vrambroker::ParseConfigText("file", text));
  if (!config.ok()) {
    const std::string message(config.status().message());
    const std::vector<std::string> lines = absl::StrSplit(message, '\n');
    Require(lines.size() > 1 && absl::StrContains(lines[0], "in the configuration"), "faults are counted", message);
    for (size_t i = 1; i < lines.size(); ++i) {
      Require(absl::StartsWith(lines[i], "  file:"), "a fault names its place", message);
    }
    return 0;
  }
  Require(config->host_devices >= 1 && config->host_devices <= 16, "there are devices", text);
  Require(config->socket_mode <= 0777, "the mode is one", text);
  Require(!config->socket_dir.empty(), "there is a directory", text);
  Require(config->drain_timeout >= absl::ZeroDuration() && config->idle_decay >= absl::ZeroDuration(),
          "durations are none below 0", text);
  Require(config->max_sessions_per_uid > 0 && config->session_bounds.max_blocks > 0 &&
              config->session_bounds.max_segments > 0 && config->max_calls_per_second_per_uid > 0 &&
              config->max_questions_per_uid > 0 && config->max_snapshots_per_uid > 0 && config->max_snapshots > 0 &&
              config->max_waiting_per_uid > 0,
          "a bound of 0 would refuse everything", text);
  Require(config->record_events <= vrambroker::kMaxRecordedEvents, "no more events than can be kept", text);
  return 0;
}
