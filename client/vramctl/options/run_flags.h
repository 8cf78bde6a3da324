// SPDX-License-Identifier: Apache-2.0
#ifndef VRAMBROKER_CLIENT_VRAMCTL_OPTIONS_RUN_FLAGS_H_
#define VRAMBROKER_CLIENT_VRAMCTL_OPTIONS_RUN_FLAGS_H_

#include <string>
#include <vector>

namespace vrambroker::vramctl {

// vramctl run. Empty: not given.
struct RunFlags {
  std::vector<std::string> program;  // with its arguments
  std::string limit;
  std::string guarantee;
  std::string wait;
  std::string claim;    // an existing claim
  std::string name;     // of the sessions
  std::string managed;  // "count", "refuse"
  std::vector<int> devices;
  bool per_process = false;
  bool report = false;
  bool if_available = false;
};

}  // namespace vrambroker::vramctl

#endif  // VRAMBROKER_CLIENT_VRAMCTL_OPTIONS_RUN_FLAGS_H_
