// SPDX-License-Identifier: Apache-2.0
//
// All devices and sessions, as shown by status, watch and top.
#ifndef VRAMBROKER_CLIENT_VRAMCTL_VIEWS_OVERVIEW_H_
#define VRAMBROKER_CLIENT_VRAMCTL_VIEWS_OVERVIEW_H_

#include <nlohmann/json_fwd.hpp>

#include "client/vramctl/views/bars.h"
#include "vrambroker/v1/admin.pb.h"
#include "vrambroker/v1/broker.pb.h"

namespace vrambroker::vramctl {

// Three answers given sequentially by the daemon: sums may be off by changes in between.
struct Overview {
  v1::GetDevicesResponse devices;
  v1::ListSessionsResponse sessions;
  v1::ListQuarantineResponse quarantine;
};

// Returns the bytes of sessions' blocks on the device.
uint64_t AllocatedBytes(const Overview& overview, const v1::Device& device);

// Returns the bytes reserved by sessions on the device, without the daemon's cache and memory left behind.
uint64_t HeldBySessions(const Overview& overview, const v1::Device& device);

// Splits a session's limit by use. The sum is at least the limit; more if the session holds more.
PartBytes PartsOf(const v1::SessionDevice& device);

// Splits the capacity by use. The sum is at least the capacity.
PartBytes PartsOf(const Overview& overview, const v1::Device& device);

// Returns the value of "devices", for scripts.
nlohmann::ordered_json DevicesJson(const Overview& overview);

}  // namespace vrambroker::vramctl

#endif  // VRAMBROKER_CLIENT_VRAMCTL_VIEWS_OVERVIEW_H_
