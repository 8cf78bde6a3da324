// SPDX-License-Identifier: Apache-2.0
#include <cstdio>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "allocator/base/bytes.h"
#include "allocator/replay/tune.h"
#include "allocator/wire/admin_json.h"
#include "client/vramctl/commands/commands.h"
#include "client/vramctl/commands/plan_output.h"
#include "client/vramctl/commands/snapshot_file.h"
#include "client/vramctl/plan/largest_batch.h"
#include "client/vramctl/plan/step_trace.h"
#include "client/vramctl/views/output.h"

namespace vrambroker::vramctl {
namespace {

using Json = nlohmann::ordered_json;

absl::StatusOr<plan::TrainingOptions> TrainingOptionsOf(const plan::ModelShape& shape, const PlanFlags& flags) {
  plan::TrainingOptions options;
  const struct {
    const char* option;
    const std::string& text;
    uint64_t& number;
    bool is_optional = false;  // 0 stands for "not given", so users cannot pass 0
  } numbers[] = {{"--batch", flags.batch, options.batch},
                 {"--seq", flags.seq, options.seq, true},
                 {"--zero", flags.zero, options.zero_stage},
                 {"--gpus", flags.gpus, options.gpus},
                 {"--lora", flags.lora, options.lora_rank, true}};
  for (const auto& [option, text, number, is_optional] : numbers) {
    const absl::StatusOr<uint64_t> read = is_optional ? CountOf(option, text) : NumberOf(option, text);
    if (!read.ok()) return read.status();
    number = *read;
  }
  const auto precision = plan::ParsePrecision(flags.precision);
  if (!precision.ok()) return absl::InvalidArgumentError(absl::StrCat("--precision: ", precision.status().message()));
  const auto optimizer = plan::ParseOptimizer(flags.optimizer);
  if (!optimizer.ok()) return absl::InvalidArgumentError(absl::StrCat("--optimizer: ", optimizer.status().message()));
  const auto checkpoint = plan::ParseCheckpoint(flags.checkpoint);
  if (!checkpoint.ok()) {
    return absl::InvalidArgumentError(absl::StrCat("--checkpoint: ", checkpoint.status().message()));
  }
  options.precision = *precision;
  options.optimizer = *optimizer;
  options.checkpoint = *checkpoint;
  options.flash = flags.flash;
  options.eager = flags.eager;
  return plan::CheckTraining(shape, options);
}

// Simulation of the step in the allocator with one way of checkpointing.
struct Simulated {
  plan::Checkpoint checkpoint = plan::Checkpoint::kNone;
  plan::TrainingMemory memory;
  ReplaySummary summary;  // on an unlimited device
  std::optional<uint64_t> smallest_device;
  std::optional<plan::LargestBatch> largest_batch;  // with --device-bytes
};

absl::StatusOr<Simulated> Simulate(const plan::ModelShape& shape, plan::TrainingOptions options,
                                   plan::Checkpoint checkpoint, const ReplayConfig& config) {
  options.checkpoint = checkpoint;
  absl::StatusOr<plan::TrainingMemory> memory = plan::TrainingMemoryOf(shape, options);
  if (!memory.ok()) return memory.status();
  Simulated simulated = {.checkpoint = checkpoint, .memory = *std::move(memory)};
  const Trace trace = plan::StepTrace(shape, options);
  ReplayConfig unlimited = config;
  unlimited.device_bytes = ReplayConfig::kUnlimitedBytes;
  simulated.summary = SummarizeReplay(trace, unlimited);
  // The smallest device is never much above the peak, so bisection begins there.
  ReplayConfig bounded = config;
  bounded.device_bytes = RoundUpTo(simulated.summary.peak_reserved_bytes, 2_MiB) + 2_MiB;
  simulated.smallest_device = SmallestDevice(trace, bounded);
  if (config.device_bytes != ReplayConfig::kUnlimitedBytes) {
    simulated.largest_batch = plan::FindLargestBatch(shape, options, config);
  }
  return simulated;
}

Json SimulatedJson(const Simulated& simulated) {
  Json json = {{"checkpoint", plan::NameOf(simulated.checkpoint)},
               {"operations", simulated.summary.ops},
               {"expected_peak_bytes", simulated.memory.peak_bytes},
               {"peak_allocated_bytes", simulated.summary.peak_allocated_bytes},
               {"peak_reserved_bytes", simulated.summary.peak_reserved_bytes},
               {"fragmentation_at_peak", simulated.summary.fragmentation_at_peak},
               {"smallest_device_bytes", nullptr},
               {"largest_batch", nullptr},
               {"largest_batch_is_exact", nullptr},
               {"smaller_batches_refused", Json::array()}};
  if (simulated.smallest_device.has_value()) json["smallest_device_bytes"] = *simulated.smallest_device;
  if (simulated.largest_batch.has_value()) {
    json["largest_batch"] = simulated.largest_batch->batch;
    json["largest_batch_is_exact"] = simulated.largest_batch->is_exact;
    json["smaller_batches_refused"] = simulated.largest_batch->smaller_refused;
  }
  return json;
}

std::vector<std::string> SimulatedRow(const Simulated& simulated) {
  std::vector<std::string> row = {
      plan::NameOf(simulated.checkpoint),
      FormatBytes(simulated.memory.peak_bytes),
      FormatBytes(simulated.summary.peak_allocated_bytes),
      FormatBytes(simulated.summary.peak_reserved_bytes),
      Percent(simulated.summary.fragmentation_at_peak),
      simulated.smallest_device.has_value() ? FormatBytes(*simulated.smallest_device) : "-"};
  if (const std::optional<plan::LargestBatch>& largest = simulated.largest_batch; largest.has_value()) {
    row.push_back(absl::StrCat(largest->is_exact ? "" : "at least ", largest->batch));
  }
  return row;
}

// "3, 15-17".
std::string Ranges(const std::vector<uint64_t>& ascending) {
  constexpr size_t kMost = 8;
  std::vector<std::string> ranges;
  for (size_t i = 0; i < ascending.size();) {
    size_t last = i;
    while (last + 1 < ascending.size() && ascending[last + 1] == ascending[last] + 1) ++last;
    ranges.push_back(absl::StrCat(ascending[i], last == i ? "" : absl::StrCat("-", ascending[last])));
    i = last + 1;
  }
  if (ranges.size() > kMost) {  // keep the ranges next to the largest batch
    ranges.erase(ranges.begin(), ranges.end() - kMost);
    ranges.insert(ranges.begin(), "...");
  }
  return absl::StrJoin(ranges, ", ");
}

// Returns a line; empty: no smaller batch is refused.
std::string SmallerRefused(const std::vector<Simulated>& all) {
  std::vector<std::string> ways;
  for (const Simulated& simulated : all) {
    if (!simulated.largest_batch.has_value() || simulated.largest_batch->smaller_refused.empty()) continue;
    ways.push_back(
        absl::StrCat(plan::NameOf(simulated.checkpoint), " ", Ranges(simulated.largest_batch->smaller_refused)));
  }
  if (ways.empty()) return "";
  return absl::StrCat("Smaller batches that do not fit, because their blocks leave more gaps (fragmentation): ",
                      absl::StrJoin(ways, "; "), ".\n");
}

void PrintPlan(const plan::ModelShape& shape, const plan::TrainingOptions& options, const ReplayConfig& config,
               const std::vector<Simulated>& all) {
  const plan::TrainingMemory& memory = all.front().memory;
  std::printf("%s (%s trained); batch %s, %s tokens each, %s, %s, checkpoint %s%s\n\n", Described(shape).c_str(),
              absl::StrCat(memory.trained_parameters).c_str(), absl::StrCat(options.batch).c_str(),
              absl::StrCat(options.seq).c_str(), plan::NameOf(options.precision), plan::NameOf(options.optimizer),
              plan::NameOf(options.checkpoint),
              options.flash   ? ", flash attention"
              : options.eager ? ", eager modules"
                              : "");
  std::vector<std::vector<std::string>> rows = {{"PART", ">BYTES", "FORMULA"}};
  for (const plan::Part* part : {&memory.weights, &memory.gradients, &memory.optimizer}) rows.push_back(RowOf(*part));
  for (plan::Part part : memory.activations) {
    part.name = absl::StrCat("activations: ", part.name);
    rows.push_back(RowOf(part));
  }
  rows.push_back(RowOf(memory.logits));
  rows.push_back(RowOf(memory.workspace));
  rows.push_back({"sum", FormatBytes(memory.sum_bytes), "all of the above, if they were there at the same time"});
  rows.push_back({"expected peak", FormatBytes(memory.peak_bytes), "gradients come while activations go"});
  std::fputs(Table(rows).c_str(), stdout);

  std::printf("\nGuides say\n");
  rows = {{"RULE", ">BYTES", "SOURCE"}};
  for (const plan::Part& part : plan::GuideEstimates(shape, options)) rows.push_back(RowOf(part));
  std::fputs(Table(rows).c_str(), stdout);

  std::printf("\nThe step in the allocator (%s, %d steps)\n", Counted(all.front().summary.ops, "operation").c_str(),
              plan::kSteps);
  rows = {{"CHECKPOINT", ">EXPECTED PEAK", ">PEAK ALLOCATED", ">PEAK RESERVED", ">FRAGMENTATION", ">SMALLEST DEVICE"}};
  if (config.device_bytes != ReplayConfig::kUnlimitedBytes) {
    rows.front().push_back(absl::StrCat(">BATCH ON ", FormatBytes(config.device_bytes)));
  }
  for (const Simulated& simulated : all) rows.push_back(SimulatedRow(simulated));
  std::fputs(Table(rows).c_str(), stdout);
  std::fputs(SmallerRefused(all).c_str(), stdout);
  std::printf("\nA CUDA context and the kernels' code come on top: some hundred MiB that no allocator sees.\n");
}

}  // namespace

absl::Status PlanTrain(const Context& context) {
  const absl::StatusOr<ReplayConfig> config = PlanConfigOf(context.replay);
  if (!config.ok()) return config.status();
  if (absl::Status status = CheckPlanOutput(context.output, {context.plan.config}); !status.ok()) return status;
  const absl::StatusOr<plan::ModelShape> shape = ModelOf(context.plan);
  if (!shape.ok()) return shape.status();
  const absl::StatusOr<plan::TrainingOptions> options = TrainingOptionsOf(*shape, context.plan);
  if (!options.ok()) return options.status();
  WarnOfLength(*shape, options->seq);

  // The requested way first, then alternatives for comparison.
  std::vector<Simulated> all;
  std::vector<plan::Checkpoint> order = {options->checkpoint};
  for (const plan::Checkpoint other :
       {plan::Checkpoint::kNone, plan::Checkpoint::kSelective, plan::Checkpoint::kFull}) {
    if (other != options->checkpoint) order.push_back(other);
  }
  for (const plan::Checkpoint checkpoint : order) {
    absl::StatusOr<Simulated> simulated = Simulate(*shape, *options, checkpoint, *config);
    if (!simulated.ok() && checkpoint == options->checkpoint) return simulated.status();
    if (simulated.ok()) all.push_back(*std::move(simulated));
  }
  if (!context.output.empty()) {
    const std::string heading =
        absl::StrFormat("vramctl plan train: %s, batch %d, %d tokens, %s, %s, checkpoint %s", shape->model_type,
                        options->batch, options->seq, plan::NameOf(options->precision),
                        plan::NameOf(options->optimizer), plan::NameOf(options->checkpoint));
    absl::Status written = WriteFile(context.output, plan::TraceText(plan::StepTrace(*shape, *options), heading));
    if (!written.ok() || context.output == "-") return written;
  }
  if (!context.json) {
    PrintPlan(*shape, *options, *config, all);
    return absl::OkStatus();
  }
  const plan::TrainingMemory& memory = all.front().memory;
  Json json = {{"model", JsonOf(*shape)},
               {"trained_parameters", memory.trained_parameters},
               {"batch", options->batch},
               {"seq", options->seq},
               {"precision", plan::NameOf(options->precision)},
               {"optimizer", plan::NameOf(options->optimizer)},
               {"weights_bytes", memory.weights.bytes},
               {"gradients_bytes", memory.gradients.bytes},
               {"optimizer_bytes", memory.optimizer.bytes},
               {"activations_bytes", memory.ActivationBytes()},
               {"activations", JsonOf(memory.activations)},
               {"logits_bytes", memory.logits.bytes},
               {"workspace_bytes", memory.workspace.bytes},
               {"sum_bytes", memory.sum_bytes},
               {"guides", JsonOf(plan::GuideEstimates(*shape, *options))}};
  Json steps = Json::array();
  for (const Simulated& simulated : all) steps.push_back(SimulatedJson(simulated));
  json["steps"] = std::move(steps);
  std::printf("%s\n", JsonText(json, /*indent=*/2).c_str());
  return absl::OkStatus();
}

}  // namespace vrambroker::vramctl
