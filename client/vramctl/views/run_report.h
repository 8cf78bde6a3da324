// SPDX-License-Identifier: Apache-2.0
//
// What vramctl run --report says at the end: what the program's processes had of the devices together.
#ifndef VRAMBROKER_CLIENT_VRAMCTL_VIEWS_RUN_REPORT_H_
#define VRAMBROKER_CLIENT_VRAMCTL_VIEWS_RUN_REPORT_H_

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "vrambroker/v1/admin.pb.h"

namespace vrambroker::vramctl {

// The claim at the end, its counts less those `before` the program ran. Its peak may be an earlier one.
v1::Claim ClaimSince(const v1::Claim& before, v1::Claim after);

// "device 0: peak 1.20 GiB of 4.00 GiB; 2 requests waited, 4.2s in all", for each device; and the refusals.
std::vector<std::string> RunReportLines(const v1::Claim& claim);

nlohmann::ordered_json RunReportJson(const v1::Claim& claim, int exit_code);

}  // namespace vrambroker::vramctl

#endif  // VRAMBROKER_CLIENT_VRAMCTL_VIEWS_RUN_REPORT_H_
