// SPDX-License-Identifier: Apache-2.0
#ifndef VRAMBROKER_CLIENT_VRAMCTL_VIEWS_SESSION_OUTPUT_H_
#define VRAMBROKER_CLIENT_VRAMCTL_VIEWS_SESSION_OUTPUT_H_

#include <cstdint>
#include <string>

#include "client/vrambroker/client.h"
#include "vrambroker/v1/admin.pb.h"

namespace vrambroker::vramctl {

// Describes sessions for people; for scripts see allocator/wire/admin_json.

// Returns "over limit" for a session over its limit.
const char* StateOn(const v1::Session& session, const v1::SessionDevice& device);

bool IsOverLimit(const v1::SessionDevice& device);
// Explains a grant below the request: " (asked for 100.00 GiB; the device's capacity is 4.00 GiB)". Else empty.
std::string AskedFor(const Limit& asked, uint64_t granted_bytes, uint64_t capacity_bytes);

// Describes a session's waiting request: "2.00 GiB for 3.1s (place 1)", and how many more there are; "-": none.
std::string Waiting(const v1::SessionDevice& device);

}  // namespace vrambroker::vramctl

#endif  // VRAMBROKER_CLIENT_VRAMCTL_VIEWS_SESSION_OUTPUT_H_
