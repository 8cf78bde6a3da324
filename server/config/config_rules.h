// SPDX-License-Identifier: Apache-2.0
//
// The rules of the configuration: text and names of users in, checked numbers out.
#ifndef VRAMBROKER_SERVER_CONFIG_CONFIG_RULES_H_
#define VRAMBROKER_SERVER_CONFIG_CONFIG_RULES_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "server/config/config_checker.h"
#include "server/identity/policy.h"
#include "vrambroker/config/v1/config.pb.h"

namespace vrambroker {

inline constexpr int kMaxRules = 1000;

// Reports every fault to `check`. `session_limit` is the limit of rules without a limit, `capacity_bytes` the capacity
// of a device where configured. Looks up users and groups, and so may wait for the machine's name services.
std::vector<PolicyRule> CheckRules(const config::v1::DaemonConfig& config, const Limit& session_limit,
                                   std::optional<uint64_t> capacity_bytes, Checker& check);

// Returns a sentence for each rule whose guarantee, times a user's sessions with the rule, exceeds the capacity: idle
// sessions of one user could then keep the device from all other users.
std::vector<std::string> WarnOfGuarantees(const std::vector<PolicyRule>& rules,
                                          const std::optional<Limit>& user_guarantee, size_t max_sessions_per_uid,
                                          std::optional<uint64_t> capacity_bytes);

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_CONFIG_CONFIG_RULES_H_
