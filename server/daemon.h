// SPDX-License-Identifier: Apache-2.0
//
// Daemon: builds all parts in order, runs until told to stop, and takes the parts down in reverse.
#ifndef VRAMBROKER_SERVER_DAEMON_H_
#define VRAMBROKER_SERVER_DAEMON_H_

#include <functional>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/config/config.h"

namespace vrambroker {

// Reads and checks the configuration again; may block. Empty: there is no file.
using ConfigReader = std::function<absl::StatusOr<Config>()>;

// Serves until SIGTERM or SIGINT; DataLoss: until no device could be used any more (device_lost). SIGHUP and
// Admin.ReloadConfig apply the result of `read_again` to sessions opened later. REQUIRES: all three signals are blocked
// in every thread of the process.
absl::Status RunDaemon(const Config& config, const ConfigReader& read_again);

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_DAEMON_H_
