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

// Adds, to the rows of all sessions, one for each claim and each device on which it has such a row, holds something or
// is promised something. Claims without any of these have none.
void AddClaims(std::vector<TopRow>& rows, const v1::ListClaimsResponse& claims, const UserNames& user_name,
               absl::Time now);

// Each session comes below its claim's row of the same device, in the order of `rows`. Those of `collapsed` claims are
// left out. The rows show it: "- team-a" and "  trainer" below it, or "+ team-a".
void GroupByClaim(std::vector<TopRow>& rows, const std::set<std::string>& collapsed);

}  // namespace vrambroker::vramctl

#endif  // VRAMBROKER_CLIENT_VRAMCTL_VIEWS_TOP_CLAIMS_H_
