// SPDX-License-Identifier: Apache-2.0
#ifndef VRAMBROKER_CLIENT_VRAMCTL_OPTIONS_CLAIM_FLAGS_H_
#define VRAMBROKER_CLIENT_VRAMCTL_OPTIONS_CLAIM_FLAGS_H_

#include <optional>
#include <string>
#include <vector>

namespace vrambroker::vramctl {

// vramctl claim. Empty: not given.
struct ClaimFlags {
  std::string name;
  std::string limit;
  std::string guarantee;
  std::optional<int> priority;
  std::string tenant;
  std::string max_wait;
  std::optional<std::string> owner;  // "USER", "USER:GROUP", "any"
  std::vector<int> devices;
  std::vector<std::string> labels;  // "KEY=VALUE"
  bool no_labels = false;
  bool revoke = false;
  bool wait = false;
  bool preload = false;
};

}  // namespace vrambroker::vramctl

#endif  // VRAMBROKER_CLIENT_VRAMCTL_OPTIONS_CLAIM_FLAGS_H_
