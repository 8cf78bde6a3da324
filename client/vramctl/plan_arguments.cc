// SPDX-License-Identifier: Apache-2.0
#include "client/vramctl/plan_arguments.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "client/vramctl/plan/serving_memory.h"
#include "client/vramctl/plan/training_memory.h"

namespace vrambroker::vramctl {
namespace {

const std::vector<std::string>& KvNames() {
  static const auto& names = *new std::vector<std::string>{"bf16", "fp16", "fp32", "fp8", "int8"};
  return names;
}

std::string Choice(const char* what, const std::vector<std::string>& names, const char* otherwise) {
  return absl::StrCat(what, " ", absl::StrJoin(names, ", "), ". Default: ", otherwise, ".");
}

void AddModel(CLI::App* command, PlanFlags& flags) {
  command->add_option("--config", flags.config, "Hugging Face config.json of the model.")->type_name("FILE");
  command->add_option("--params", flags.params, "Without --config: number of parameters, as 7B.")->type_name("N");
  command->add_option("--layers", flags.layers, "Without --config: number of layers.")->type_name("N");
  command->add_option("--hidden", flags.hidden, "Without --config: hidden size.")->type_name("N");
  command->add_option("--heads", flags.heads, "Without --config: number of attention heads.")->type_name("N");
  command
      ->add_option("--kv-heads", flags.kv_heads,
                   "Without --config: number of heads for keys and values. Default: --heads.")
      ->type_name("N");
  command->add_option("--vocab", flags.vocab, "Without --config: size of the vocabulary.")->type_name("N");
  command->add_option("--seq", flags.seq, "Tokens per sequence. Default: the model's maximum, up to 2048.")
      ->type_name("N");
}

CLI::Option* AddDeviceBytes(CLI::App* command, Context& context, const char* description) {
  return command->add_option("--device-bytes", context.replay.device_bytes, description)->type_name("BYTES");
}

void AddTrain(CLI::App* train, Context& context) {
  PlanFlags& flags = context.plan;
  AddModel(train, flags);
  train->add_option("--batch", flags.batch, "Sequences on one GPU at a time. Default: 1.")->type_name("N");
  train
      ->add_option("--precision", flags.precision,
                   Choice("Precision of numbers:", plan::PrecisionNames(), "bf16-mixed"))
      ->type_name("NAME");
  train->add_option("--optimizer", flags.optimizer, Choice("Optimizer:", plan::OptimizerNames(), "adamw"))
      ->type_name("NAME");
  train
      ->add_option("--checkpoint", flags.checkpoint,
                   Choice("Recomputation in the backward pass:", plan::CheckpointNames(), "none"))
      ->type_name("NAME");
  train->add_option("--zero", flags.zero, "Stage of ZeRO, 0 to 3. Default: 0.")->type_name("N");
  train->add_option("--gpus", flags.gpus, "Number of GPUs in ZeRO's partition, with --zero 1 to 3.")->type_name("N");
  train->add_flag("--flash", flags.flash, "Flash attention: the step keeps no scores.")->disable_flag_override();
  train
      ->add_flag("--eager", flags.eager, "Modules without fused kernels: the step also keeps norms and scores in fp32.")
      ->disable_flag_override();
  train->add_option("--lora", flags.lora, "Train only adapters of this rank. Default: train all weights.")
      ->type_name("RANK");
  AddDeviceBytes(train, context, "Find the largest batch for a device of this size, as 80GiB.");
  train
      ->add_option("--alloc-conf", context.replay.alloc_conf,
                   "Allocator settings in PyTorch's syntax, as max_split_size_mb:128.")
      ->type_name("SETTINGS");
  train->add_option("-o,--output", context.output, "Write the steps as a trace, for replay, tune and plan share.")
      ->type_name("FILE");
  train->footer("Examples:\n  $ vramctl plan train --config config.json --batch 8 --device-bytes 80GiB -o step.trace");
}

void AddServe(CLI::App* serve, Context& context) {
  PlanFlags& flags = context.plan;
  AddModel(serve, flags);
  serve->add_option("--sequences", flags.sequences, "Sequences served at a time. Default: 1.")->type_name("N");
  serve->add_option("--quantization", flags.quantization, Choice("Weights:", plan::QuantizationNames(), "bf16"))
      ->type_name("NAME");
  serve->add_option("--kv", flags.kv, Choice("Keys and values:", KvNames(), "bf16"))->type_name("NAME");
  serve
      ->add_option("--prefill-tokens", flags.prefill_tokens,
                   "Prompt tokens read per pass. Default: the tokens of a sequence.")
      ->type_name("N");
  AddDeviceBytes(serve, context, "Compute the number of sequences for a device of this size, as 80GiB.");
  serve->add_option("--utilization", flags.utilization, "Usable share of the device. Default: 0.9.")->type_name("F");
  serve->add_option("-o,--output", context.output, "Write several passes as a trace, for plan share.")
      ->type_name("FILE");
  serve->footer("Examples:\n  $ vramctl plan serve --config config.json --seq 4096 --device-bytes 80GiB");
}

void AddShare(CLI::App* share, Context& context) {
  share
      ->add_option(
          "FILE", context.plan.jobs,
          "File of a job: a trace of plan train or plan serve, another trace, or a pickled snapshot of vramctl or "
          "PyTorch. Give a FILE per job.")
      ->type_name("FILE")
      ->required();
  AddDeviceBytes(share, context, "Memory shared by the jobs, as 80GiB: the daemon's capacity.")->required();
  share
      ->add_option("--alloc-conf", context.replay.alloc_conf,
                   "Allocator settings in PyTorch's syntax, as max_split_size_mb:128.")
      ->type_name("SETTINGS");
  share
      ->add_option("--device", context.only_device, "Device whose events are read from a PyTorch snapshot. Default: 0.")
      ->type_name("N");
  share->add_option("-o,--output", context.output, "Write the rules for the daemon's configuration to FILE.")
      ->type_name("FILE");
  share->footer("Examples:\n  $ vramctl plan share trainer.trace tuner.pickle --device-bytes 80GiB -o rules.textproto");
}

}  // namespace

void AddPlan(CLI::App& app, const char* group, Context& context,
             const std::function<void(std::function<absl::Status()>)>& choose) {
  CLI::App* const plan =
      app.add_subcommand("plan", "Plan before a job runs: `plan train`, `plan serve`, `plan share`.");
  plan->group(group);
  plan->footer("");
  plan->require_subcommand(0, 1);
  CLI::App* const train = plan->add_subcommand(
      "train", "Compute the memory of a training step, by formula and by simulating the allocator.");
  train->callback([&context, choose] { choose([&context] { return PlanTrain(context); }); });
  AddTrain(train, context);
  CLI::App* const serve =
      plan->add_subcommand("serve", "Compute the memory for serving a model, and the number of sequences that fit.");
  serve->callback([&context, choose] { choose([&context] { return PlanServe(context); }); });
  AddServe(serve, context);
  CLI::App* const share = plan->add_subcommand(
      "share", "Check whether several jobs fit on one device together; name waiting jobs, and limits to set.");
  share->callback([&context, choose] { choose([&context] { return PlanShare(context); }); });
  AddShare(share, context);
}

std::vector<std::string> PlanValues(const CLI::Option& option) {
  if (option.check_lname("precision")) return plan::PrecisionNames();
  if (option.check_lname("optimizer")) return plan::OptimizerNames();
  if (option.check_lname("checkpoint")) return plan::CheckpointNames();
  if (option.check_lname("quantization")) return plan::QuantizationNames();
  if (option.check_lname("kv")) return KvNames();
  return {};
}

}  // namespace vrambroker::vramctl
