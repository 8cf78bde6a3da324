// SPDX-License-Identifier: Apache-2.0
//
// What plan train and plan serve share: the model that the options describe, and parts of memory as rows and as JSON.
#ifndef VRAMBROKER_CLIENT_VRAMCTL_COMMANDS_PLAN_OUTPUT_H_
#define VRAMBROKER_CLIENT_VRAMCTL_COMMANDS_PLAN_OUTPUT_H_

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "client/vramctl/commands/commands.h"
#include "client/vramctl/plan/model_config.h"
#include "client/vramctl/plan/training_memory.h"

namespace vrambroker::vramctl {

// --config, or --params and the others. InvalidArgument names the file and what is wrong in it, or the option. Warnings
// of the file go to standard error.
absl::StatusOr<plan::ModelShape> ModelOf(const PlanFlags& flags);

// A whole number. Empty: 0. InvalidArgument names the option.
absl::StatusOr<uint64_t> NumberOf(const char* option, const std::string& text);

// The same of what there is at least one of, when it is given.
absl::StatusOr<uint64_t> CountOf(const char* option, const std::string& text);

// As ReplayConfigOf(), but a device of nothing is InvalidArgument: no plan has a use for it.
absl::StatusOr<ReplayConfig> PlanConfigOf(const ReplayFlags& flags);

// Warns on standard error when sequences are longer than the model takes.
void WarnOfLength(const plan::ModelShape& shape, uint64_t seq);

// Before anything is worked out: InvalidArgument when `path` (empty: none was given) is one of `inputs`, else as
// CheckSnapshotPath().
absl::Status CheckPlanOutput(const std::string& path, const std::vector<std::string>& inputs);

// A name, a size, and where it comes from.
std::vector<std::string> RowOf(const plan::Part& part);
nlohmann::ordered_json JsonOf(const plan::Part& part);
nlohmann::ordered_json JsonOf(const std::vector<plan::Part>& parts);
// "llama, 6738415616 parameters".
std::string Described(const plan::ModelShape& shape);
nlohmann::ordered_json JsonOf(const plan::ModelShape& shape);

}  // namespace vrambroker::vramctl

#endif  // VRAMBROKER_CLIENT_VRAMCTL_COMMANDS_PLAN_OUTPUT_H_
