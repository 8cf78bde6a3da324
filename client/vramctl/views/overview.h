// SPDX-License-Identifier: Apache-2.0
//
// All devices and sessions, as status, watch and top show them.
#ifndef VRAMBROKER_CLIENT_VRAMCTL_VIEWS_OVERVIEW_H_
#define VRAMBROKER_CLIENT_VRAMCTL_VIEWS_OVERVIEW_H_

#include <nlohmann/json_fwd.hpp>

#include "client/vramctl/views/bars.h"
#include "vrambroker/v1/admin.pb.h"
#include "vrambroker/v1/broker.pb.h"

namespace vrambroker::vramctl {

// Three answers that the daemon gave one after the other: sums of theirs may be off by what happened in between.
struct Overview {
  v1::GetDevicesResponse devices;
  v1::ListSessionsResponse sessions;
  v1::ListQuarantineResponse quarantine;
};

// Bytes of blocks that sessions have on it.
uint64_t AllocatedBytes(const Overview& overview, const v1::Device& device);

// Bytes that sessions have reserved on it: without what the daemon caches and what was left behind.
uint64_t HeldBySessions(const Overview& overview, const v1::Device& device);

// What a session's limit is used for. Together at least the limit; more when it holds more.
PartBytes PartsOf(const v1::SessionDevice& device);

// What the capacity is used for. Together at least the capacity.
PartBytes PartsOf(const Overview& overview, const v1::Device& device);

// The value of "devices", as scripts get it.
nlohmann::ordered_json DevicesJson(const Overview& overview);

}  // namespace vrambroker::vramctl

#endif  // VRAMBROKER_CLIENT_VRAMCTL_VIEWS_OVERVIEW_H_
