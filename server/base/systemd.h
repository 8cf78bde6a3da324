// SPDX-License-Identifier: Apache-2.0
#ifndef VRAMBROKER_SERVER_BASE_SYSTEMD_H_
#define VRAMBROKER_SERVER_BASE_SYSTEMD_H_

#include <string>

namespace vrambroker {

// Tells the service manager about the state of this process ("READY=1", "STOPPING=1", "WATCHDOG=1", several lines
// joined by newlines), by the protocol of sd_notify(3). Does nothing when not started by systemd.
void NotifySystemd(const std::string& state);

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_BASE_SYSTEMD_H_
