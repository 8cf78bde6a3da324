// SPDX-License-Identifier: Apache-2.0
//
// libFuzzer target: no config.json breaks vramctl plan, or makes the plan slow. The first bytes choose the options.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <iostream>
#include <vector>

#include "absl/strings/string_view.h"
#include "allocator/replay/replay.h"
#include "client/vramctl/plan/bounded.h"
#include "client/vramctl/plan/serving_memory.h"
#include "client/vramctl/plan/serving_trace.h"
#include "client/vramctl/plan/step_trace.h"

namespace {

namespace plan = vrambroker::plan;

constexpr size_t kMostOperations = 500'000;
constexpr uint64_t kMostLayersToRun = 8;  // a replay of more layers takes too long for a fuzzer

void Require(bool holds, absl::string_view rule) {
  if (holds) return;
  std::cerr << "violated: " << rule << '\n';
  std::abort();
}

void CheckTrace(const vrambroker::Trace& trace) {
  Require(trace.ops.size() < kMostOperations, "a trace is bounded");
  std::vector<char> live(trace.ids, 0);
  for (const vrambroker::TraceOp& op : trace.ops) {
    if (op.kind == vrambroker::TraceOp::Kind::kResetPeaks) continue;
    const bool allocates = op.kind == vrambroker::TraceOp::Kind::kAllocate;
    Require(!allocates || (op.bytes > 0 && op.bytes < plan::kTooLarge), "a size is one that a trace may have");
    Require(live[op.id] == (allocates ? 0 : 1), "an id is allocated once and freed once");
    live[op.id] = allocates ? 1 : 0;
  }
}

void TryTraining(const plan::ModelShape& shape, const plan::TrainingOptions& chosen) {
  const absl::StatusOr<plan::TrainingOptions> options = plan::CheckTraining(shape, chosen);
  if (!options.ok()) return;
  const absl::StatusOr<plan::TrainingMemory> memory = plan::TrainingMemoryOf(shape, *options);
  if (!memory.ok()) return;
  Require(memory->sum_bytes < plan::kTooLarge, "a sum is bounded");
  Require(memory->trained_parameters <= memory->parameters || options->lora_rank != 0,
          "no more is trained than is there");
  const vrambroker::Trace trace = plan::StepTrace(shape, *options);
  CheckTrace(trace);
  if (shape.layers > kMostLayersToRun) return;
  const vrambroker::ReplaySummary summary = vrambroker::SummarizeReplay(trace, {});
  Require(summary.ooms > 0 || summary.stats.requested_bytes.all.current <=
                                  memory->weights.bytes + memory->optimizer.bytes + (uint64_t{1} << 30),
          "what a step makes it frees, but for weights and optimizer");
}

void TryServing(const plan::ModelShape& shape, const plan::ServingOptions& chosen) {
  const absl::StatusOr<plan::ServingOptions> options = plan::CheckServing(shape, chosen);
  if (!options.ok()) return;
  const absl::StatusOr<plan::ServingMemory> memory = plan::ServingMemoryOf(shape, *options);
  if (!memory.ok()) return;
  Require(memory->sum_bytes < plan::kTooLarge, "a sum is bounded");
  CheckTrace(plan::ServingTrace(shape, *options));
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  constexpr size_t kChoices = 6;
  if (size < kChoices) return 0;
  const absl::StatusOr<plan::ModelShape> shape =
      plan::ParseModelConfig(absl::string_view(reinterpret_cast<const char*>(data) + kChoices, size - kChoices));
  if (!shape.ok()) {
    Require(absl::IsInvalidArgument(shape.status()) && !shape.status().message().empty(),
            "an error says what is wrong");
    return 0;
  }
  Require(plan::ParametersOf(*shape) <= plan::kMostParameters, "a model is bounded");
  const bool has_zero = data[3] % 4 != 0;
  TryTraining(*shape, {.batch = uint64_t{1} << data[0] % 17,
                       .seq = uint64_t{1} << data[1] % 25,
                       .precision = static_cast<plan::Precision>(data[2] % 5),
                       .optimizer = static_cast<plan::Optimizer>(data[2] / 5 % 4),
                       .checkpoint = static_cast<plan::Checkpoint>(data[2] / 20 % 3),
                       .zero_stage = data[3] % uint64_t{4},
                       .gpus = has_zero ? uint64_t{2} << data[3] / 4 % 20 : 1,
                       .flash = data[4] % 4 == 1,
                       .eager = data[4] % 4 == 2,
                       .lora_rank = data[4] >= 128 ? data[5] : uint64_t{0}});
  TryServing(*shape, {.seq = uint64_t{1} << data[1] % 25,
                      .sequences = uint64_t{1} << data[0] % 21,
                      .quantization = static_cast<plan::Quantization>(data[2] % 5),
                      .device_bytes = uint64_t{1} << data[5] % 62});
  return 0;
}
