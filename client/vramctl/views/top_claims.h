// SPDX-License-Identifier: Apache-2.0
//
// Claims in the table of vramctl top: each has a row, with its sessions below. Pure: no terminal, no daemon.
#ifndef VRAMBROKER_CLIENT_VRAMCTL_VIEWS_TOP_CLAIMS_H_
#define VRAMBROKER_CLIENT_VRAMCTL_VIEWS_TOP_CLAIMS_H_

#include <set>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "client/vramctl/views/claim_output.h"
#include "client/vramctl/views/top_table.h"
#include "vrambroker/v1/admin.pb.h"

namespace vrambroker::vramctl {

// Adds rows for claims to the rows of all sessions: a row for each device on which the claim has a session's row, holds
// memory or is promised memory. Omits unused claims.
void AddClaims(std::vector<TopRow>& rows, const v1::ListClaimsResponse& claims, const UserNames& user_name,
               absl::Time now);

// Moves each session below the row of its claim on the same device, in the order of `rows`. Omits sessions of
// `collapsed` claims. Marks the rows: "- team-a" with "  trainer" below, or "+ team-a".
void GroupByClaim(std::vector<TopRow>& rows, const std::set<std::string>& collapsed);

}  // namespace vrambroker::vramctl

#endif  // VRAMBROKER_CLIENT_VRAMCTL_VIEWS_TOP_CLAIMS_H_
