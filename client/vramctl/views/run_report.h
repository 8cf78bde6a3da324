// SPDX-License-Identifier: Apache-2.0
//
// The final output of vramctl run --report: device memory used by all processes of the program together.
#ifndef VRAMBROKER_CLIENT_VRAMCTL_VIEWS_RUN_REPORT_H_
#define VRAMBROKER_CLIENT_VRAMCTL_VIEWS_RUN_REPORT_H_

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "vrambroker/v1/admin.pb.h"

namespace vrambroker::vramctl {

// Returns the claim at the end with its counts since `before` the program ran. The peak may be an earlier peak.
v1::Claim ClaimSince(const v1::Claim& before, v1::Claim after);

// Returns "device 0: peak 1.20 GiB of 4.00 GiB; 2 requests waited, 4.2s in all", for each device; and the refusals.
std::vector<std::string> RunReportLines(const v1::Claim& claim);

nlohmann::ordered_json RunReportJson(const v1::Claim& claim, int exit_code);

}  // namespace vrambroker::vramctl

#endif  // VRAMBROKER_CLIENT_VRAMCTL_VIEWS_RUN_REPORT_H_
