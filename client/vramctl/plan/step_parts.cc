// SPDX-License-Identifier: Apache-2.0
#include "client/vramctl/plan/step_parts.h"

#include <algorithm>

#include "client/vramctl/plan/bounded.h"
#include "client/vramctl/plan/layer_tensors.h"

namespace vrambroker::plan {

HeldWeight HeldWeightOf(const Weight& weight, bool is_trained, const TrainingOptions& options) {
  const NumberBytes bytes = NumberBytesOf(options.precision);
  const uint64_t elements = Product({weight.rows, weight.columns});
  const auto share = [&](uint64_t whole, uint64_t from_stage) {
    return options.zero_stage >= from_stage ? DividedUp(whole, options.gpus) : whole;
  };
  HeldWeight held;
  held.full_weight = Product({elements, bytes.weight});
  held.weight = share(held.full_weight, 3);
  if (weight.is_linear) held.fp8_copies = share(Product({elements, bytes.fp8_copies}), 3);
  if (!is_trained) return held;
  held.full_gradient = Product({elements, bytes.gradient});
  held.gradient = share(held.full_gradient, 2);
  held.master = share(Product({elements, bytes.master}), 1);
  held.states = share(StateBytes(weight, options.optimizer, bytes), 1);
  held.update_scratch = share(Product({elements, 4}), 1);
  return held;
}

StepWeights StepWeightsOf(const ModelShape& shape, const TrainingOptions& options) {
  StepWeights step;
  uint64_t largest_gradient = 0;
  const auto hold = [&](const std::vector<Weight>& weights, bool are_trained, uint64_t count) {
    std::vector<HeldWeight> held;
    for (const Weight& weight : weights) {
      const HeldWeight& one = held.emplace_back(HeldWeightOf(weight, are_trained, options));
      if (are_trained) {
        step.trained_parameters = Sum({step.trained_parameters, Product({weight.rows, weight.columns, count})});
      }
      step.weight_bytes = Sum({step.weight_bytes, Product({Sum({one.weight, one.fp8_copies}), count})});
      step.gradient_bytes = Sum({step.gradient_bytes, Product({one.gradient, count})});
      step.optimizer_bytes = Sum({step.optimizer_bytes, Product({Sum({one.master, one.states}), count})});
      step.update_scratch_bytes = std::max(step.update_scratch_bytes, one.update_scratch);
      largest_gradient = std::max(largest_gradient, one.full_gradient);
    }
    return held;
  };
  const auto gradients = [](const std::vector<HeldWeight>& weights) {
    uint64_t bytes = 0;
    for (const HeldWeight& weight : weights) bytes = Sum({bytes, weight.gradient});
    return bytes;
  };
  const Weights weights = WeightsOf(shape);
  const bool all_trained = options.lora_rank == 0;
  step.embeddings = hold(weights.embeddings, all_trained, 1);
  step.layer = hold(weights.layer, all_trained, shape.layers);
  step.adapters = hold(AdaptersOf(shape, options.lora_rank), true, shape.layers);
  step.head = hold(weights.head, all_trained, 1);

  const bool early = HasEarlyEmbeddingGradient(shape);
  step.head_gradient_bytes = Sum({gradients(step.head), early ? gradients(step.embeddings) : 0});
  step.late_gradient_bytes =
      Sum({gradients(step.layer), gradients(step.adapters), early ? 0 : gradients(step.embeddings)});
  if (options.zero_stage >= 2) step.gathered_bytes = largest_gradient;
  if (options.zero_stage >= 3) {
    for (const HeldWeight& weight : step.layer) {
      step.gathered_bytes = Sum({step.gathered_bytes, weight.full_weight});
    }
  }
  return step;
}

bool HasEarlyEmbeddingGradient(const ModelShape& shape) {
  return shape.has_output_layer && shape.tied_embeddings;
}

uint64_t OutputInputBytes(const ModelShape& shape, const TrainingOptions& options) {
  // The output layer stays in two bytes even if linear layers multiply in a single byte.
  return options.lora_rank == 0 ? LayerInputBytes(shape, options) : 0;
}

uint64_t OutsideActivationBytes(const ModelShape& shape, const TrainingOptions& options) {
  const uint64_t mask = shape.hidden_dropout ? Product({options.seq, options.batch, shape.hidden}) : 0;
  return Sum({LayerInputBytes(shape, options), OutputInputBytes(shape, options), mask});
}

uint64_t LogitsBytes(const ModelShape& shape, const TrainingOptions& options) {
  return shape.has_output_layer ? Product({options.seq, options.batch, shape.vocab, 4}) : 0;
}

}  // namespace vrambroker::plan
