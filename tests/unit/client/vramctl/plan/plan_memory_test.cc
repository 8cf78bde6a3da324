// SPDX-License-Identifier: Apache-2.0
//
// The formulas and the trace of a step, against each other and against facts true of any step.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "allocator/base/bytes.h"
#include "allocator/replay/tune.h"
#include "client/vramctl/plan/bounded.h"
#include "client/vramctl/plan/layer_tensors.h"
#include "client/vramctl/plan/serving_memory.h"
#include "client/vramctl/plan/serving_trace.h"
#include "client/vramctl/plan/step_trace.h"
#include "client/vramctl/plan/training_memory.h"
#include "tests/unit/client/vramctl/plan/plan_models.h"

namespace vrambroker::plan {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr Checkpoint kCheckpoints[] = {Checkpoint::kNone, Checkpoint::kSelective, Checkpoint::kFull};

struct Step {
  ModelShape shape;
  TrainingOptions options;
  TrainingMemory memory;
  Trace trace;
  ReplaySummary summary;
};

Step MakeStep(const char* config, const TrainingOptions& options) {
  Step step = {.shape = *ParseModelConfig(config)};
  const absl::StatusOr<TrainingOptions> checked = CheckTraining(step.shape, options);
  EXPECT_EQ(checked.status(), absl::OkStatus());
  step.options = *checked;
  const absl::StatusOr<TrainingMemory> memory = TrainingMemoryOf(step.shape, step.options);
  EXPECT_EQ(memory.status(), absl::OkStatus());
  step.memory = *memory;
  step.trace = StepTrace(step.shape, step.options);
  step.summary = SummarizeReplay(step.trace, {});
  return step;
}

void ExpectEachFreedOnce(const Trace& trace) {
  std::vector<int> live(trace.ids, 0);
  for (const TraceOp& op : trace.ops) {
    if (op.kind == TraceOp::Kind::kResetPeaks) continue;
    live[op.id] += op.kind == TraceOp::Kind::kAllocate ? 1 : -1;
    ASSERT_TRUE(live[op.id] == 0 || live[op.id] == 1) << "an id is allocated once and freed once";
    ASSERT_TRUE(op.kind != TraceOp::Kind::kAllocate || op.bytes > 0);
  }
}

std::vector<TrainingOptions> ManyOptions() {
  std::vector<TrainingOptions> all;
  for (const Checkpoint checkpoint : kCheckpoints) {
    for (const uint64_t batch : {1, 4}) {
      all.push_back({.batch = batch, .seq = 512, .checkpoint = checkpoint});
      all.push_back({.batch = batch, .seq = 512, .checkpoint = checkpoint, .flash = true});
      all.push_back({.batch = batch, .seq = 512, .checkpoint = checkpoint, .eager = true});
      all.push_back({.batch = batch, .seq = 512, .checkpoint = checkpoint, .lora_rank = 8});
    }
    all.push_back({.batch = 2, .seq = 512, .precision = Precision::kFp32, .checkpoint = checkpoint});
    all.push_back({.batch = 2, .seq = 512, .precision = Precision::kFp8Mixed, .checkpoint = checkpoint});
    all.push_back({.batch = 2, .seq = 512, .optimizer = Optimizer::kAdam8bit, .checkpoint = checkpoint});
    all.push_back({.seq = 512, .precision = Precision::kBf16, .optimizer = Optimizer::kSgd, .checkpoint = checkpoint});
    all.push_back({.seq = 512, .optimizer = Optimizer::kAdafactor, .checkpoint = checkpoint});
    for (const uint64_t stage : {1, 2, 3}) {
      all.push_back({.batch = 2, .seq = 512, .checkpoint = checkpoint, .zero_stage = stage, .gpus = 8});
    }
  }
  return all;
}

// The formula takes the largest of a layer's temporaries at the moment of the most kept memory. A step has the
// temporaries a little earlier or later, and small tensors are rounded up. The formula is therefore never much below
// the trace, and little above the trace.
TEST(StepTraceTest, TheFormulaPredictsThePeak) {
  for (const char* config : {models::kLlama7b, models::kGpt2, models::kQwen2_7b, models::kBertLarge}) {
    for (const TrainingOptions& options : ManyOptions()) {
      const Step step = MakeStep(config, options);
      const double ratio =
          static_cast<double>(step.memory.peak_bytes) / static_cast<double>(step.summary.peak_allocated_bytes);
      const std::string what = std::string(config).substr(0, 40) + " " + NameOf(options.checkpoint) + " " +
                               NameOf(options.precision) + " " + NameOf(options.optimizer) + " zero " +
                               std::to_string(options.zero_stage) + " batch " + std::to_string(options.batch) +
                               (options.flash   ? " flash"
                                : options.eager ? " eager"
                                                : "") +
                               (options.lora_rank != 0 ? " lora" : "");
      EXPECT_GT(ratio, 0.975) << what;
      EXPECT_LT(ratio, options.zero_stage >= 2 ? 1.15 : 1.04) << what;
      EXPECT_LE(step.memory.peak_bytes, step.memory.sum_bytes) << what;
      EXPECT_GE(step.summary.peak_reserved_bytes, step.summary.peak_allocated_bytes) << what;
      EXPECT_EQ(step.summary.ooms, 0u) << what;
    }
  }
}

// The weights and the optimizer alone are left at the end of a step. All kept memory has been freed, once.
TEST(StepTraceTest, LeavesWeightsAndOptimizer) {
  for (const TrainingOptions& options : ManyOptions()) {
    const Step step = MakeStep(models::kGpt2, options);
    const auto left = static_cast<double>(step.summary.stats.requested_bytes.all.current);
    const auto persistent = static_cast<double>(step.memory.weights.bytes + step.memory.optimizer.bytes) + 8519680;
    EXPECT_NEAR(left / persistent, 1, 0.001) << NameOf(options.checkpoint) << " " << options.zero_stage;
    ExpectEachFreedOnce(step.trace);
  }
}

TEST(StepTraceTest, CheckpointingSaves) {
  uint64_t peaks[3];
  for (int i = 0; i < 3; ++i) {
    peaks[i] = MakeStep(models::kGpt2, {.batch = 16, .checkpoint = kCheckpoints[i]}).summary.peak_allocated_bytes;
  }
  EXPECT_GT(peaks[0], peaks[1]);
  EXPECT_GT(peaks[1], peaks[2]);
}

TEST(StepTraceTest, IsReadAgainAsItWasWritten) {
  const Step step = MakeStep(models::kGpt2, {.batch = 2});
  const absl::StatusOr<Trace> read = ParseTraceText(TraceText(step.trace, "a heading"));
  ASSERT_EQ(read.status(), absl::OkStatus());
  ASSERT_EQ(read->ops.size(), step.trace.ops.size());
  EXPECT_EQ(SummarizeReplay(*read, {}).peak_reserved_bytes, step.summary.peak_reserved_bytes);
}

TEST(StepTraceTest, StaysSmallForTheLargestModel) {
  const ModelShape shape = *ShapeOf({.layers = kMostLayers, .hidden = 1024, .heads = 16, .vocab = 50257});
  for (const Checkpoint checkpoint : kCheckpoints) {
    const Trace trace = StepTrace(shape, {.seq = 128, .checkpoint = checkpoint, .zero_stage = 3, .gpus = 4});
    EXPECT_LT(trace.ops.size(), 500'000u) << NameOf(checkpoint);
  }
}

TEST(TrainingMemoryTest, KorthikantisFormulaIsTheSumOfTheTensors) {
  const ModelShape shape = *ParseModelConfig(models::kGpt3);
  for (const Checkpoint checkpoint : kCheckpoints) {
    const TrainingMemory memory = *TrainingMemoryOf(shape, {.batch = 3, .seq = 2048, .checkpoint = checkpoint});
    uint64_t of_layers = 0;
    for (const Part& part : memory.activations) of_layers += part.name == "outside the layers" ? 0 : part.bytes;
    EXPECT_EQ(of_layers, KorthikantiActivationBytes(shape, 3, 2048, checkpoint)) << NameOf(checkpoint);
  }
}

TEST(TrainingMemoryTest, SixteenBytesAParameter) {
  const ModelShape shape = *ParseModelConfig(models::kLlama7b);
  const auto states = [&](Precision precision, Optimizer optimizer) {
    const TrainingMemory memory = *TrainingMemoryOf(shape, {.seq = 8, .precision = precision, .optimizer = optimizer});
    return static_cast<double>(memory.weights.bytes + memory.gradients.bytes + memory.optimizer.bytes) / 6738415616.0;
  };
  EXPECT_EQ(states(Precision::kBf16Mixed, Optimizer::kAdamW), 16);
  EXPECT_EQ(states(Precision::kFp16Mixed, Optimizer::kAdamW), 16);
  EXPECT_EQ(states(Precision::kFp32, Optimizer::kAdamW), 16);
  EXPECT_EQ(states(Precision::kBf16, Optimizer::kAdamW), 8);
  EXPECT_EQ(states(Precision::kBf16, Optimizer::kSgd), 6);
  EXPECT_NEAR(states(Precision::kBf16Mixed, Optimizer::kAdam8bit), 2 + 2 + 4 + 2.03, 0.01);
  EXPECT_NEAR(states(Precision::kBf16Mixed, Optimizer::kAdafactor), 2 + 2 + 4, 0.01);
}

// Guides of 16 bytes a parameter describe trained weights.
TEST(TrainingMemoryTest, GuidesOfAllWeightsAreNotOfAdapters) {
  const ModelShape shape = *ParseModelConfig(models::kLlama7b);
  const auto names = [&](const TrainingOptions& options) {
    std::vector<std::string> all;
    for (const Part& part : GuideEstimates(shape, options)) all.push_back(part.name);
    return all;
  };
  EXPECT_THAT(names({.seq = 512}),
              ElementsAre("16 B a parameter", "18 B a parameter", "4 x the weights", "activations"));
  EXPECT_THAT(names({.seq = 512, .lora_rank = 8}), ElementsAre("activations"));
  EXPECT_THAT(GuideEstimates(shape, {.seq = 512, .lora_rank = 8})[0].formula, HasSubstr("with all weights trained"));
}

TEST(TrainingMemoryTest, OptionsAreBounded) {
  const ModelShape shape = *ParseModelConfig(models::kLlama7b);
  const auto refusal = [&](const TrainingOptions& options) {
    return std::string(CheckTraining(shape, options).status().message());
  };
  EXPECT_EQ(CheckTraining(shape, {})->seq, 2048u);
  EXPECT_THAT(refusal({.batch = 0}), HasSubstr("--batch: 0; accepted: 1 to 65536"));
  EXPECT_THAT(refusal({.seq = ~uint64_t{0}}), HasSubstr("--seq: 18446744073709551615"));
  EXPECT_THAT(refusal({.zero_stage = 4, .gpus = 2}), HasSubstr("--zero: 4; accepted: 0 to 3"));
  EXPECT_THAT(refusal({.zero_stage = 1}), HasSubstr("say how many with --gpus"));
  EXPECT_THAT(refusal({.gpus = 8}), HasSubstr("--gpus is for --zero"));
  EXPECT_THAT(refusal({.flash = true, .eager = true}), HasSubstr("give one of the two"));
  // All options at their bounds give a refusal, and no overflow.
  const ModelShape huge = *ShapeOf({.layers = 512, .hidden = 1 << 15, .heads = 1 << 15, .vocab = kMostVocabulary});
  const absl::Status status = TrainingMemoryOf(huge, {.batch = kMostBatch, .seq = kMostPositions}).status();
  EXPECT_THAT(std::string(status.message()), HasSubstr("more than 64 PiB"));
}

TEST(ServingMemoryTest, QuantizationAndGroupedHeads) {
  const ModelShape shape = *ParseModelConfig(models::kLlama3_70b);
  const auto serve = [&](ServingOptions options) {
    const absl::StatusOr<ServingOptions> checked = CheckServing(shape, options);
    EXPECT_EQ(checked.status(), absl::OkStatus());
    return *ServingMemoryOf(shape, *checked);
  };
  EXPECT_EQ(serve({}).kv_bytes_per_token, 320_KiB);
  EXPECT_EQ(serve({.kv_bytes = 1}).kv_bytes_per_token, 160_KiB);
  EXPECT_EQ(serve({.seq = 1}).kv_bytes_per_sequence, 16 * 320_KiB) << "whole blocks of 16 tokens";
  EXPECT_EQ(serve({}).weights.bytes, 2 * 70553706496);
  EXPECT_EQ(serve({.quantization = Quantization::kFp32}).weights.bytes, 4 * 70553706496);
  // Embeddings and output layer stay unquantized: 2 x 128256 x 8192 weights.
  const double outside = 2.0 * 128256 * 8192;
  EXPECT_NEAR(static_cast<double>(serve({.quantization = Quantization::kInt8}).weights.bytes),
              (70553706496 - outside) + 2 * outside, 0.001 * 70553706496);
  EXPECT_NEAR(static_cast<double>(serve({.quantization = Quantization::kInt4}).weights.bytes),
              (70553706496 - outside) * (0.5 + 2.5 / 128) + 2 * outside, 0.001 * 70553706496);
  EXPECT_FALSE(serve({}).most_sequences.has_value());
}

TEST(ServingMemoryTest, OneMoreSequenceDoesNotFit) {
  const ModelShape shape = *ParseModelConfig(models::kLlama7b);
  ServingOptions options = *CheckServing(shape, {.seq = 2048, .device_bytes = 80_GiB});
  const uint64_t most = *ServingMemoryOf(shape, options)->most_sequences;
  const double usable = 0.9 * static_cast<double>(80_GiB);
  ASSERT_GT(most, 10u);
  options.sequences = most;
  EXPECT_LE(static_cast<double>(ServingMemoryOf(shape, options)->sum_bytes), usable);
  options.sequences = most + 1;
  EXPECT_GT(static_cast<double>(ServingMemoryOf(shape, options)->sum_bytes), usable);
  options.device_bytes = 1_GiB;
  EXPECT_EQ(ServingMemoryOf(shape, options)->most_sequences, 0u);

  // Long prompts at once make one layer's tensors decisive, here larger than a sequence.
  ServingOptions prompts = *CheckServing(shape, {.seq = 2048, .prefill_tokens = 32768, .device_bytes = 80_GiB});
  prompts.sequences = *ServingMemoryOf(shape, prompts)->most_sequences;
  EXPECT_LT(prompts.sequences, most);
  EXPECT_LE(static_cast<double>(ServingMemoryOf(shape, prompts)->sum_bytes), usable);
  ++prompts.sequences;
  EXPECT_GT(static_cast<double>(ServingMemoryOf(shape, prompts)->sum_bytes), usable);

  // Short sequences of a small model make the logits decisive.
  const ModelShape gpt = *ParseModelConfig(models::kGpt2);
  for (const uint64_t seq : {uint64_t{16}, uint64_t{1024}}) {
    ServingOptions many = *CheckServing(gpt, {.seq = seq, .device_bytes = 80_GiB});
    many.sequences = *ServingMemoryOf(gpt, many)->most_sequences;
    EXPECT_LE(ServingMemoryOf(gpt, many)->sum_bytes, 72_GiB) << seq;
    ++many.sequences;
    EXPECT_GT(ServingMemoryOf(gpt, many)->sum_bytes, 72_GiB) << seq;
  }
}

TEST(ServingMemoryTest, TheWorkspaceIsOneLayersTensorsOrTheLogits) {
  constexpr uint64_t kLibrary = 8519680;
  const auto workspace = [](const char* config, const ServingOptions& options) {
    const ModelShape shape = *ParseModelConfig(config);
    return ServingMemoryOf(shape, *CheckServing(shape, options))->workspace.bytes;
  };
  // LLaMA 7B: hidden 4096, a gated network of 2 x 11008, 32000 tokens. GPT-2: 12 + 2 x 12 heads of 64 are less than
  // 3072.
  EXPECT_EQ(workspace(models::kLlama7b, {.prefill_tokens = 512}),
            kLibrary + uint64_t{512} * (2 * 4096 + 2 * 11008) * 2);
  EXPECT_EQ(workspace(models::kGpt2, {.prefill_tokens = 512}), kLibrary + uint64_t{512} * (2 * 768 + 3072) * 2);
  EXPECT_EQ(workspace(models::kLlama7b, {.sequences = 512, .prefill_tokens = 1}), kLibrary + uint64_t{512} * 32000 * 4);
}

TEST(LayerTensorsTest, TheBackwardPassHasAGradientUntilTheNextIsMade) {
  // Lists the operations in the order of the forward pass. The backward pass begins at the end.
  const std::vector<LayerOperation> operations = {{.input_gradient = 3, .is_branch_start = true},
                                                  {.backward_scratch = {5, 7}, .input_gradient = 11},
                                                  {.input_gradient = 200, .is_branch_start = true},
                                                  {.backward_scratch = {100}, .input_gradient = 17}};
  EXPECT_EQ(BackwardScratch({operations.begin() + 3, operations.end()}, 1000), 1000u + 17 + 100);
  EXPECT_EQ(BackwardScratch({operations.begin() + 2, operations.end()}, 1000), 1000u + 17 + 200);
  EXPECT_EQ(BackwardScratch({operations.begin(), operations.begin() + 2}, 1000), 1000u + 5 + 7 + 11);
  EXPECT_EQ(BackwardScratch({operations[1], {.input_gradient = 13, .is_branch_start = true}}, 1000), 1000u + 5 + 7 + 11)
      << "what joins the stream at the start of a branch has no place of its own";
  EXPECT_EQ(BackwardScratch({operations[1], {.input_gradient = 13}}, 1000), 1000u + 13 + 5 + 7 + 11);
}

TEST(ServingTraceTest, HoldsWhatTheFormulaSays) {
  for (const char* config : {models::kLlama7b, models::kGpt2, models::kMistral7b}) {
    const ModelShape shape = *ParseModelConfig(config);
    for (const Quantization quantization : {Quantization::kBf16, Quantization::kInt4}) {
      const ServingOptions options = *CheckServing(shape, {.seq = 1024, .sequences = 8, .quantization = quantization});
      const ServingMemory memory = *ServingMemoryOf(shape, options);
      const Trace trace = ServingTrace(shape, options);
      ExpectEachFreedOnce(trace);
      const ReplaySummary summary = SummarizeReplay(trace, {});
      const auto held = static_cast<double>(memory.weights.bytes + memory.kv_cache.bytes + 8519680);
      EXPECT_NEAR(static_cast<double>(summary.stats.requested_bytes.all.current) / held, 1, 0.001) << config;
      EXPECT_NEAR(static_cast<double>(summary.peak_allocated_bytes) / static_cast<double>(memory.sum_bytes), 1, 0.05)
          << config;
    }
  }
}

TEST(ServingMemoryTest, OptionsAreBounded) {
  const ModelShape shape = *ParseModelConfig(models::kLlama7b);
  const auto refusal = [&](const ServingOptions& options) {
    return std::string(CheckServing(shape, options).status().message());
  };
  EXPECT_THAT(refusal({.sequences = 0}), HasSubstr("--sequences: 0"));
  EXPECT_THAT(refusal({.prefill_tokens = kMostPositions + 1}), HasSubstr("--prefill-tokens"));
  EXPECT_THAT(refusal({.utilization = 1.5}), HasSubstr("--utilization"));
  EXPECT_THAT(std::string(CheckServing(*ParseModelConfig(models::kBertLarge), {}).status().message()),
              HasSubstr("generates no text"));
}

}  // namespace
}  // namespace vrambroker::plan
