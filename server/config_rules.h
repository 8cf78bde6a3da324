// SPDX-License-Identifier: Apache-2.0
//
// The rules of the configuration: text and names of users in, checked numbers out.
#ifndef VRAMBROKER_SERVER_CONFIG_RULES_H_
#define VRAMBROKER_SERVER_CONFIG_RULES_H_

#include <cstdint>
#include <optional>
#include <vector>

#include "server/config_checker.h"
#include "server/policy.h"
#include "vrambroker/config/v1/config.pb.h"

namespace vrambroker {

inline constexpr int kMaxRules = 1000;

// Tells `check` of every fault. `session_limit` is what rules without a limit give, `capacity_bytes` that of a device
// where it is configured. Looks up users and groups, and so may wait for the machine's name services.
std::vector<PolicyRule> CheckRules(const config::v1::DaemonConfig& config, const Limit& session_limit,
                                   std::optional<uint64_t> capacity_bytes, Checker& check);

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_CONFIG_RULES_H_
