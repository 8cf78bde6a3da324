// SPDX-License-Identifier: Apache-2.0
#ifndef VRAMBROKER_CLIENT_VRAMCTL_VIEWS_CLAIM_OUTPUT_H_
#define VRAMBROKER_CLIENT_VRAMCTL_VIEWS_CLAIM_OUTPUT_H_

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "vrambroker/v1/admin.pb.h"

namespace vrambroker::vramctl {

using UserNames = std::function<std::string(uint32_t uid)>;

// Describes who may connect to the claim's sockets: "alice", "alice:100", "any"; "-" for a rule's claim, without
// sockets.
std::string OwnerText(const v1::Claim& claim, const UserNames& user_name);

// Returns the claim's refused requests on the device; all of the claim's with a daemon too old to count by device.
uint64_t RefusalsOn(const v1::Claim& claim, const v1::ClaimDevice& device);

// Returns the table of vramctl claim ls: a row for each claim and each of its devices.
std::string ClaimsTable(const v1::ListClaimsResponse& claims, const UserNames& user_name);

// Describes a claim, a fact per line: vramctl claim show.
std::string ClaimText(const v1::Claim& claim, const UserNames& user_name);

// Returns "limit 8.00 GiB on device 0, reserved 1.00 GiB", for each of the claim's devices.
std::vector<std::string> ClaimLines(const v1::Claim& claim);

}  // namespace vrambroker::vramctl

#endif  // VRAMBROKER_CLIENT_VRAMCTL_VIEWS_CLAIM_OUTPUT_H_
