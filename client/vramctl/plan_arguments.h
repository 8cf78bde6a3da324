// SPDX-License-Identifier: Apache-2.0
//
// Options and help of plan train, serve and share.
#ifndef VRAMBROKER_CLIENT_VRAMCTL_PLAN_ARGUMENTS_H_
#define VRAMBROKER_CLIENT_VRAMCTL_PLAN_ARGUMENTS_H_

#include <CLI/CLI.hpp>
#include <functional>
#include <string>
#include <vector>

#include "client/vramctl/commands/commands.h"

namespace vrambroker::vramctl {

// Adds the commands to `app`, in group `group`. The given command passes its action to `choose`. `context` outlives
// `app`.
void AddPlan(CLI::App& app, const char* group, Context& context,
             const std::function<void(std::function<absl::Status()>)>& choose);

// Returns the values accepted by a plan option, for completion. Empty: any text, or not a plan option.
std::vector<std::string> PlanValues(const CLI::Option& option);

}  // namespace vrambroker::vramctl

#endif  // VRAMBROKER_CLIENT_VRAMCTL_PLAN_ARGUMENTS_H_
