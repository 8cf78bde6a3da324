// SPDX-License-Identifier: Apache-2.0
//
// plan train, serve and share: their options and help.
#ifndef VRAMBROKER_CLIENT_VRAMCTL_PLAN_ARGUMENTS_H_
#define VRAMBROKER_CLIENT_VRAMCTL_PLAN_ARGUMENTS_H_

#include <CLI/CLI.hpp>
#include <functional>
#include <string>
#include <vector>

#include "client/vramctl/commands/commands.h"

namespace vrambroker::vramctl {

// Adds them to `app`, in its group `group`. `choose` is called with what the command that was given does. `context`
// outlives `app`.
void AddPlan(CLI::App& app, const char* group, Context& context,
             const std::function<void(std::function<absl::Status()>)>& choose);

// For completion: the values that an option of these accepts. Empty: it is none of these, or takes any text.
std::vector<std::string> PlanValues(const CLI::Option& option);

}  // namespace vrambroker::vramctl

#endif  // VRAMBROKER_CLIENT_VRAMCTL_PLAN_ARGUMENTS_H_
