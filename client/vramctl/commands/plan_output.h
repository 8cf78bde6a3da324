// SPDX-License-Identifier: Apache-2.0
//
// Shared by plan train and plan serve: the model described by the options, and parts of memory as rows and as JSON.
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

// Reads the model from --config, or from --params and related options. InvalidArgument names the option, or the file
// and its error. Warnings about the file go to standard error.
absl::StatusOr<plan::ModelShape> ModelOf(const PlanFlags& flags);

// Parses a whole number. Empty: 0. InvalidArgument names the option.
absl::StatusOr<uint64_t> NumberOf(const char* option, const std::string& text);

// Like NumberOf(), but rejects a given 0.
absl::StatusOr<uint64_t> CountOf(const char* option, const std::string& text);

// Like ReplayConfigOf(), but rejects a device of 0 bytes (InvalidArgument): no plan has a use for it.
absl::StatusOr<ReplayConfig> PlanConfigOf(const ReplayFlags& flags);

// Warns on standard error when sequences exceed the model's maximum length.
void WarnOfLength(const plan::ModelShape& shape, uint64_t seq);

// Call before any computation. InvalidArgument if `path` (empty: not given) is one of `inputs`, else as
// CheckSnapshotPath().
absl::Status CheckPlanOutput(const std::string& path, const std::vector<std::string>& inputs);

// Returns the name, size and source of a part.
std::vector<std::string> RowOf(const plan::Part& part);
nlohmann::ordered_json JsonOf(const plan::Part& part);
nlohmann::ordered_json JsonOf(const std::vector<plan::Part>& parts);
// "llama, 6738415616 parameters".
std::string Described(const plan::ModelShape& shape);
nlohmann::ordered_json JsonOf(const plan::ModelShape& shape);

}  // namespace vrambroker::vramctl

#endif  // VRAMBROKER_CLIENT_VRAMCTL_COMMANDS_PLAN_OUTPUT_H_
