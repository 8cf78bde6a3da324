// SPDX-License-Identifier: Apache-2.0
//
// vramctl plan against published figures: within 10 % for weights, optimizer and KV cache, within 20 % for activations.
// The table in client/PLAN.md has the same figures.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "absl/strings/str_format.h"
#include "client/vramctl/plan/serving_memory.h"
#include "client/vramctl/plan/training_memory.h"
#include "tests/support/paths.h"
#include "tests/unit/client/vramctl/plan/plan_models.h"

namespace vrambroker::plan {
namespace {

constexpr double kMiB = 1 << 20;
constexpr double kGB = 1e9;
constexpr double kBillion = 1e9;

// A published figure of a model or of a step.
struct Figure {
  const char* model;
  const char* what;
  double published;
  double ours;
  const char* unit;
  double tolerance;  // tolerance of the ratio
  const char* source;
};

ModelShape Read(const char* config) {
  const absl::StatusOr<ModelShape> shape = ParseModelConfig(config);
  EXPECT_EQ(shape.status(), absl::OkStatus()) << config;
  return *shape;
}

ModelShape Given(const GivenNumbers& numbers) {
  const absl::StatusOr<ModelShape> shape = ShapeOf(numbers);
  EXPECT_EQ(shape.status(), absl::OkStatus());
  return *shape;
}

TrainingMemory Train(const ModelShape& shape, const TrainingOptions& options = {}) {
  const absl::StatusOr<TrainingOptions> checked = CheckTraining(shape, options);
  EXPECT_EQ(checked.status(), absl::OkStatus());
  const absl::StatusOr<TrainingMemory> memory = TrainingMemoryOf(shape, *checked);
  EXPECT_EQ(memory.status(), absl::OkStatus());
  return *memory;
}

double States(const TrainingMemory& memory) {
  return static_cast<double>(memory.weights.bytes + memory.gradients.bytes + memory.optimizer.bytes);
}

// Returns a layer's kept bytes as a multiple of s * b * h bytes.
double TimesSbh(const char* config, Checkpoint checkpoint) {
  const ModelShape shape = Read(config);
  const TrainingMemory memory = Train(shape, {.seq = 2048, .checkpoint = checkpoint});
  double bytes = 0;
  for (const Part& part : memory.activations) {
    if (part.name != "outside the layers") bytes += static_cast<double>(part.bytes);
  }
  return bytes / static_cast<double>(shape.layers * 2048 * shape.hidden);
}

double SelectiveSaves(const char* config) {
  return 100 * (1 - TimesSbh(config, Checkpoint::kSelective) / TimesSbh(config, Checkpoint::kNone));
}

double KvBytes(const ModelShape& shape, uint64_t tokens) {
  return static_cast<double>(KvBytesPerToken(shape, 2) * tokens);
}

std::vector<Figure> Figures() {
  std::vector<Figure> figures;
  const auto parameters = [&](const char* model, const char* config, double published, const char* source) {
    figures.push_back(
        {model, "parameters", published, static_cast<double>(ParametersOf(Read(config))), "", 0.1, source});
  };
  parameters("GPT-2 124M", models::kGpt2, 124439808, "sum over Hugging Face's `gpt2` when it is loaded");
  parameters("GPT-2 XL", models::kGpt2Xl, 1557611200, "sum over Hugging Face's `gpt2-xl` when it is loaded");
  parameters("LLaMA-7B", models::kLlama7b, 6738415616,
             "peft's print_trainable_parameters(): 6742609920, less the adapters");
  parameters("Llama 3.1 8B", models::kLlama3_8b, 8030261248, "safetensors metadata of fine-tuned models");
  parameters("Llama 3.1 70B", models::kLlama3_70b, 70.6 * kBillion, "Meta's model card");
  parameters("Mistral 7B", models::kMistral7b, 7241732096, "sum over `Mistral-7B-v0.1` when it is loaded");
  parameters("Qwen2 7B", models::kQwen2_7b, 7615616512, "safetensors metadata of fine-tuned Qwen2.5-7B, same shape");
  parameters("GPT-NeoX-20B", models::kNeoX20b, 20554567680, "model card of `EleutherAI/gpt-neox-20b`");
  parameters("BERT-large", models::kBertLarge, 335141888,
             "sum over Hugging Face's `bert-large-uncased` when it is loaded");
  parameters("GPT-3 175B", models::kGpt3, 175.0 * kBillion, "Brown et al. 2020, table 2.1");
  parameters("MT-NLG 530B", models::kMtNlg, 530 * kBillion, "Korthikanti et al. 2022, table 3");
  figures.push_back({"LLaMA-7B, LoRA rank 8", "trained parameters", 4194304,
                     static_cast<double>(Train(Read(models::kLlama7b), {.lora_rank = 8}).trained_parameters), "", 0.1,
                     "peft's print_trainable_parameters()"});

  const TrainingMemory xl = Train(Read(models::kGpt2Xl));
  figures.push_back({"GPT-2 XL", "weights, fp16", 3, static_cast<double>(xl.weights.bytes) / kGB, "GB", 0.1,
                     "Rajbhandari et al. 2020, section 3"});
  figures.push_back({"GPT-2 XL", "weights, gradients, Adam", 24, States(xl) / kGB, "GB", 0.1,
                     "Rajbhandari et al. 2020, section 3.1"});
  const ModelShape zero = Given({.parameters = 7'500'000'000, .layers = 36, .hidden = 4096, .heads = 32});
  const char* const figure1 = "Rajbhandari et al. 2020, figure 1 (64 GPUs)";
  figures.push_back({"7.5B", "states, no ZeRO", 120, States(Train(zero)) / kGB, "GB", 0.1, figure1});
  const double partitioned[] = {31.4, 16.6, 1.9};
  const char* const names[] = {"states, ZeRO 1", "states, ZeRO 2", "states, ZeRO 3"};
  for (uint64_t stage = 1; stage <= 3; ++stage) {
    const TrainingMemory memory = Train(zero, {.zero_stage = stage, .gpus = 64});
    figures.push_back({"7.5B", names[stage - 1], partitioned[stage - 1], States(memory) / kGB, "GB", 0.1, figure1});
  }

  const char* const log = "llm.c's printed sizes (log of a run on an RTX 4090)";
  const auto llm_c = [&](const char* what, uint64_t batch, bool flash, double published) {
    const TrainingMemory memory = Train(Read(models::kGpt2OfLlmC), {.batch = batch, .seq = 1024, .flash = flash});
    const double bytes = static_cast<double>(memory.ActivationBytes() + memory.logits.bytes);
    figures.push_back({"GPT-2 124M", what, published, bytes / kMiB, "MiB", 0.2, log});
  };
  const TrainingMemory small = Train(Read(models::kGpt2OfLlmC));
  figures.push_back(
      {"GPT-2 124M", "weights, bf16", 237, static_cast<double>(small.weights.bytes) / kMiB, "MiB", 0.1, log});
  figures.push_back({"GPT-2 124M", "AdamW and exact copy", 3 * 474, static_cast<double>(small.optimizer.bytes) / kMiB,
                     "MiB", 0.1, log});
  llm_c("activations and logits, 4 x 1024", 4, false, 2853);
  llm_c("the same, flash attention", 4, true, 1703);
  llm_c("the same, 32 x 1024", 32, true, 13629);

  const TrainingMemory llama = Train(Read(models::kLlama7b), {.batch = 8, .seq = 512, .eager = true});
  figures.push_back({"LLaMA-7B", "activations, 8 x 512, eager modules", 45,
                     static_cast<double>(llama.ActivationBytes()) / kMiB / 1024, "GiB", 0.2,
                     "Lv et al. 2023 (LOMO), table 1, \"45.x\" as quoted in OpenLMLab/LOMO issue 16"});
  const char* const section41 = "Korthikanti et al. 2022, section 4.1: 34 + 80";
  figures.push_back({"GPT-3 175B", "activations of a layer / sbh", 34 + 80, TimesSbh(models::kGpt3, Checkpoint::kNone),
                     "", 0.2, section41});
  figures.push_back({"MT-NLG 530B", "activations of a layer / sbh", 34 + 64,
                     TimesSbh(models::kMtNlg, Checkpoint::kNone), "", 0.2,
                     "Korthikanti et al. 2022, section 4.1: 34 + 64"});
  const char* const section5 = "Korthikanti et al. 2022, section 5";
  figures.push_back(
      {"GPT-3 175B", "selective recomputation saves", 70, SelectiveSaves(models::kGpt3), "%", 0.2, section5});
  figures.push_back(
      {"MT-NLG 530B", "selective recomputation saves", 65, SelectiveSaves(models::kMtNlg), "%", 0.2, section5});

  const ModelShape opt13b = Given({.parameters = 13'000'000'000, .layers = 40, .hidden = 5120, .heads = 40});
  const char* const paged = "Kwon et al. 2023 (vLLM), section 3";
  figures.push_back({"OPT-13B", "KV cache of a token", 800, KvBytes(opt13b, 1) / 1024, "KiB", 0.1, paged});
  figures.push_back({"OPT-13B", "KV cache of 2048 tokens", 1.6, KvBytes(opt13b, 2048) / kGB, "GB", 0.1, paged});
  figures.push_back({"LLaMA-7B", "KV cache of 2048 tokens", 1, KvBytes(Read(models::kLlama7b), 2048) / kMiB / 1024,
                     "GiB", 0.1, "<https://jiahuanglin.xyz/all_lessons/vllm/lessons/01_kv_cache.html>"});
  const char* const guide = "<https://www.spheron.network/blog/kv-cache-optimization-guide>";
  const ModelShape llama70b = Read(models::kLlama3_70b);
  figures.push_back({"Llama 3.1 70B", "KV cache of 4096 tokens", 1.3, KvBytes(llama70b, 4096) / kGB, "GB", 0.1, guide});
  figures.push_back(
      {"Llama 3.1 70B", "KV cache of 32768 tokens", 10.7, KvBytes(llama70b, 32768) / kGB, "GB", 0.1, guide});
  return figures;
}

std::string Number(double value) {
  return value >= 1000 ? absl::StrFormat("%.0f", value) : absl::StrFormat("%.4g", value);
}

std::string Row(const Figure& figure) {
  const double error = figure.ours / figure.published - 1;
  return absl::StrFormat("| %s | %s%s%s | %s | %s | %+.1f%% | %s |", figure.model, figure.what,
                         *figure.unit == '\0' ? "" : ", ", figure.unit, Number(figure.published), Number(figure.ours),
                         error * 100, figure.source);
}

TEST(PlanPublishedTest, AgreesWithPublishedFigures) {
  for (const Figure& figure : Figures()) {
    EXPECT_LE(std::abs(figure.ours / figure.published - 1), figure.tolerance) << Row(figure);
  }
}

TEST(PlanPublishedTest, TheDocumentHasTheseRows) {
  std::ifstream file(std::string(testing_support::paths::kSourceDir) + "/client/PLAN.md");
  std::stringstream text;
  text << file.rdbuf();
  for (const Figure& figure : Figures()) {
    EXPECT_NE(text.str().find(Row(figure) + "\n"), std::string::npos) << "client/PLAN.md lacks\n" << Row(figure);
  }
}

// ZeRO's text gives 60 GB for the activations of GPT-2 XL at 32 sequences of 1024 tokens: 12 numbers for each unit of
// the stream, without the attention's scores. Korthikanti's later count is higher. The test keeps PLAN.md's statement
// about the difference true.
TEST(PlanPublishedTest, ZeroCountsFewerActivations) {
  const TrainingMemory memory = Train(Read(models::kGpt2Xl), {.batch = 32, .seq = 1024});
  const double zero = 12.0 * 2 * 1600 * 32 * 1024 * 48;
  EXPECT_NEAR(zero / kGB, 60, 1);
  EXPECT_GT(static_cast<double>(memory.ActivationBytes()), 4 * zero);
}

}  // namespace
}  // namespace vrambroker::plan
