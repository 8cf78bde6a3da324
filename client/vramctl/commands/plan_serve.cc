// SPDX-License-Identifier: Apache-2.0
#include <cstdio>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "allocator/base/amounts.h"
#include "allocator/base/bytes.h"
#include "allocator/wire/admin_json.h"
#include "client/vramctl/commands/commands.h"
#include "client/vramctl/commands/plan_output.h"
#include "client/vramctl/commands/snapshot_file.h"
#include "client/vramctl/plan/serving_memory.h"
#include "client/vramctl/plan/serving_trace.h"
#include "client/vramctl/plan/step_trace.h"
#include "client/vramctl/views/output.h"

namespace vrambroker::vramctl {
namespace {

absl::StatusOr<plan::ServingOptions> ServingOptionsOf(const plan::ModelShape& shape, const Context& context) {
  const PlanFlags& flags = context.plan;
  plan::ServingOptions options;
  const struct {
    const char* option;
    const std::string& text;
    uint64_t& number;
    bool is_optional = false;  // 0 stands for "not given", so users cannot pass 0
  } numbers[] = {{"--seq", flags.seq, options.seq, true},
                 {"--sequences", flags.sequences, options.sequences},
                 {"--prefill-tokens", flags.prefill_tokens, options.prefill_tokens, true}};
  for (const auto& [option, text, number, is_optional] : numbers) {
    const absl::StatusOr<uint64_t> read = is_optional ? CountOf(option, text) : NumberOf(option, text);
    if (!read.ok()) return read.status();
    number = *read;
  }
  const auto quantization = plan::ParseQuantization(flags.quantization);
  if (!quantization.ok()) {
    return absl::InvalidArgumentError(absl::StrCat("--quantization: ", quantization.status().message()));
  }
  options.quantization = *quantization;
  const auto kv = plan::ParseQuantization(flags.kv);
  if (!kv.ok() || *kv == plan::Quantization::kInt4) {
    return absl::InvalidArgumentError(absl::StrCat("--kv: \"", flags.kv, "\"; accepted: fp32, bf16, fp16, fp8, int8"));
  }
  options.kv_bytes = *kv == plan::Quantization::kFp32 ? 4 : *kv == plan::Quantization::kBf16 ? 2 : 1;
  options.utilization = ParseShare(flags.utilization).value_or(-1);
  const absl::StatusOr<ReplayConfig> config = PlanConfigOf({.device_bytes = context.replay.device_bytes});
  if (!config.ok()) return config.status();
  if (config->device_bytes != ReplayConfig::kUnlimitedBytes) options.device_bytes = config->device_bytes;
  return plan::CheckServing(shape, options);
}

}  // namespace

absl::Status PlanServe(const Context& context) {
  if (absl::Status status = CheckPlanOutput(context.output, {context.plan.config}); !status.ok()) return status;
  const absl::StatusOr<plan::ModelShape> shape = ModelOf(context.plan);
  if (!shape.ok()) return shape.status();
  const absl::StatusOr<plan::ServingOptions> options = ServingOptionsOf(*shape, context);
  if (!options.ok()) return options.status();
  WarnOfLength(*shape, options->seq);
  const absl::StatusOr<plan::ServingMemory> memory = plan::ServingMemoryOf(*shape, *options);
  if (!memory.ok()) return memory.status();

  if (!context.output.empty()) {
    const std::string heading =
        absl::StrCat("vramctl plan serve: ", shape->model_type, ", ", Counted(options->sequences, "sequence"), " of ",
                     options->seq, " tokens, ", plan::NameOf(options->quantization));
    absl::Status written = WriteFile(context.output, plan::TraceText(plan::ServingTrace(*shape, *options), heading));
    if (!written.ok() || context.output == "-") return written;
  }
  if (context.json) {
    nlohmann::ordered_json json = {{"model", JsonOf(*shape)},
                                   {"quantization", plan::NameOf(options->quantization)},
                                   {"seq", options->seq},
                                   {"sequences", options->sequences},
                                   {"weights_bytes", memory->weights.bytes},
                                   {"kv_bytes_per_token", memory->kv_bytes_per_token},
                                   {"kv_bytes_per_sequence", memory->kv_bytes_per_sequence},
                                   {"kv_cache_bytes", memory->kv_cache.bytes},
                                   {"workspace_bytes", memory->workspace.bytes},
                                   {"sum_bytes", memory->sum_bytes},
                                   {"most_sequences", nullptr}};
    if (memory->most_sequences.has_value()) json["most_sequences"] = *memory->most_sequences;
    std::printf("%s\n", JsonText(json, /*indent=*/2).c_str());
    return absl::OkStatus();
  }
  std::printf("%s; %s of %s tokens\n\n", Described(*shape).c_str(), Counted(options->sequences, "sequence").c_str(),
              absl::StrCat(options->seq).c_str());
  const std::vector<std::vector<std::string>> rows = {{"PART", ">BYTES", "FORMULA"},
                                                      RowOf(memory->weights),
                                                      RowOf(memory->kv_cache),
                                                      {"  a token", FormatBytes(memory->kv_bytes_per_token), ""},
                                                      {"  a sequence", FormatBytes(memory->kv_bytes_per_sequence), ""},
                                                      RowOf(memory->workspace),
                                                      {"sum", FormatBytes(memory->sum_bytes), ""}};
  std::fputs(Table(rows).c_str(), stdout);
  if (memory->most_sequences == 0) {
    std::printf("\nOn %s of %s: no sequence fits beside the weights.\n", Percent(options->utilization).c_str(),
                FormatBytes(options->device_bytes).c_str());
  } else if (memory->most_sequences.has_value()) {
    std::printf("\nOn %s of %s: %s of %s tokens at a time.\n", Percent(options->utilization).c_str(),
                FormatBytes(options->device_bytes).c_str(), Counted(*memory->most_sequences, "sequence").c_str(),
                absl::StrCat(options->seq).c_str());
  }
  return absl::OkStatus();
}

}  // namespace vrambroker::vramctl
