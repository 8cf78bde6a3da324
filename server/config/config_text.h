// SPDX-License-Identifier: Apache-2.0
//
// The configuration file as text: protobuf text format.
#ifndef VRAMBROKER_SERVER_CONFIG_CONFIG_TEXT_H_
#define VRAMBROKER_SERVER_CONFIG_CONFIG_TEXT_H_

#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "vrambroker/config/v1/config.pb.h"

namespace vrambroker {

// Replaces control characters, so that a message quoting the file stays on one line.
std::string OneLine(absl::string_view text);

struct ConfigText {
  // Places of fields, "NAME:LINE:COLUMN", by name: "session_limit.bytes", "rules[0].uid".
  using Places = absl::flat_hash_map<std::string, std::string>;

  config::v1::DaemonConfig proto;  // values from the readable lines
  Places places;
  std::vector<std::string> faults;  // "NAME:LINE:COLUMN: what is wrong"
};

// Parsing goes on after faults, so that CheckConfig() can report faults of text and values together.
ConfigText ParseConfigText(absl::string_view name, const std::string& text);

// ParseConfigText() of a file. NotFound and the like when the file cannot be read.
absl::StatusOr<ConfigText> ReadConfigFile(const std::string& path);

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_CONFIG_CONFIG_TEXT_H_
