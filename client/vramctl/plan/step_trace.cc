// SPDX-License-Identifier: Apache-2.0
#include "client/vramctl/plan/step_trace.h"

#include <cstdint>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/vramctl/plan/bounded.h"
#include "client/vramctl/plan/layer_tensors.h"
#include "client/vramctl/plan/step_parts.h"

namespace vrambroker::plan {
namespace {

using Id = uint32_t;
using Tensors = std::vector<Id>;

class StepWriter {
 public:
  StepWriter(const ModelShape& shape, const TrainingOptions& options)
      : shape_(shape),
        options_(options),
        operations_(LayerOperations(shape, options)),
        weights_(StepWeightsOf(shape, options)),
        stream_(LayerInputBytes(shape, options)),
        logits_(LogitsBytes(shape, options)) {}

  Trace Write() {
    MakeModel();
    for (int step = 0; step < kSteps; ++step) {
      trace_.ops.push_back({.kind = TraceOp::Kind::kResetPeaks});
      Forward();
      Backward();
      Optimize(/*is_first=*/step == 0);
    }
    return std::move(trace_);
  }

 private:
  Id Make(uint64_t bytes) {
    const Id id = trace_.ids++;
    trace_.ops.push_back({.kind = TraceOp::Kind::kAllocate, .id = id, .bytes = bytes});
    return id;
  }
  void Free(Id id) { trace_.ops.push_back({.kind = TraceOp::Kind::kFree, .id = id}); }
  void MakeInto(Tensors& tensors, uint64_t bytes) {
    if (bytes != 0) tensors.push_back(Make(bytes));
  }
  void FreeAll(Tensors& tensors) {
    for (auto id = tensors.rbegin(); id != tensors.rend(); ++id) Free(*id);
    tensors.clear();
  }

  void MakeWeights(const std::vector<HeldWeight>& weights) {
    for (const HeldWeight& weight : weights) {
      if (weight.weight == 0) continue;
      Make(weight.weight);
      if (weight.fp8_copies != 0) Make(weight.fp8_copies);
    }
  }
  // Visits each trained weight, in the order of the model.
  template <class Visit>
  void VisitTrained(const Visit& visit) {
    const auto all = [&](const std::vector<HeldWeight>& weights) {
      for (const HeldWeight& weight : weights) {
        if (weight.gradient != 0) visit(weight);
      }
    };
    all(weights_.embeddings);
    for (uint64_t layer = 0; layer < shape_.layers; ++layer) {
      all(weights_.layer);
      all(weights_.adapters);
    }
    all(weights_.head);
  }

  void MakeModel() {
    MakeWeights(weights_.embeddings);
    for (uint64_t layer = 0; layer < shape_.layers; ++layer) {
      MakeWeights(weights_.layer);
      MakeWeights(weights_.adapters);
    }
    MakeWeights(weights_.head);
    VisitTrained([&](const HeldWeight& weight) {
      if (weight.master != 0) Make(weight.master);
    });
    Make(kLibraryWorkspace);
  }

  // ZeRO 3 holds the whole weights of a layer while computing the layer.
  Tensors Gather() {
    Tensors gathered;
    if (options_.zero_stage < 3) return gathered;
    for (const HeldWeight& weight : weights_.layer) MakeInto(gathered, weight.full_weight);
    return gathered;
  }

  // Runs a layer and returns the tensors kept according to `kept`, by operation. `has_input`: the layer's input already
  // exists.
  std::vector<Tensors> RunLayer(Checkpoint kept, bool has_input) {
    std::vector<Tensors> saved(operations_.size());
    Tensors dropped;  // tensors of the previous operation, read by the current operation
    Tensors branch;   // the stream, until the branch has been added
    for (size_t i = 0; i < operations_.size(); ++i) {
      const LayerOperation& operation = operations_[i];
      Tensors scratch;
      MakeInto(scratch, operation.forward_scratch);
      Tensors made;
      for (size_t j = 0; j < operation.saved.size(); ++j) {
        if (!(has_input && i == 0 && j == 0)) MakeInto(made, operation.saved[j]);
      }
      FreeAll(dropped);
      if (IsKept(operation, kept)) {
        saved[i] = made;
      } else if (operation.is_branch_start) {
        branch = made;
      } else {
        dropped = made;
      }
      FreeAll(scratch);
      if (operation.is_branch_output) FreeAll(branch);
    }
    FreeAll(dropped);
    return saved;
  }

  void Forward() {
    const bool has_mask = shape_.hidden_dropout;
    if (has_mask) MakeInto(outside_, Product({options_.seq, options_.batch, shape_.hidden}));
    for (uint64_t layer = 0; layer < shape_.layers; ++layer) {
      Tensors gathered = Gather();
      Tensors input;
      if (options_.checkpoint == Checkpoint::kFull) MakeInto(input, stream_);
      inputs_.push_back(input);
      kept_.push_back(RunLayer(options_.checkpoint, !input.empty()));
      FreeAll(gathered);
    }
    MakeInto(outside_, stream_);
    MakeInto(outside_, OutputInputBytes(shape_, options_));
  }

  // The loss works on the logits in fp32, keeps their logarithms, and makes their gradient (log_softmax and nll_loss).
  void Loss() {
    if (logits_ == 0) return;
    const uint64_t e = NumberBytesOf(options_.precision).activation;
    const uint64_t narrow = e == 4 ? 0 : logits_ / 4 * e;
    Tensors model_output;
    MakeInto(model_output, narrow);
    Tensors exact;
    MakeInto(exact, logits_);
    FreeAll(model_output);
    Tensors logarithms;
    MakeInto(logarithms, logits_);
    FreeAll(exact);
    Tensors gradient;
    MakeInto(gradient, logits_);
    FreeAll(logarithms);
    Tensors narrow_gradient;
    MakeInto(narrow_gradient, narrow);
    if (narrow != 0) FreeAll(gradient);
    MakeGradients(weights_.head);
    if (HasEarlyEmbeddingGradient(shape_)) MakeGradients(weights_.embeddings);
    FreeAll(narrow_gradient);
    FreeAll(gradient);
  }

  void MakeGradient(const HeldWeight& weight) {
    if (weight.gradient == 0) return;
    if (weight.gradient == weight.full_gradient) {
      gradients_.push_back(Make(weight.gradient));
      return;
    }
    const Id whole = Make(weight.full_gradient);  // lives until every GPU has its part of the sum
    gradients_.push_back(Make(weight.gradient));
    Free(whole);
  }
  void MakeGradients(const std::vector<HeldWeight>& weights) {
    for (const HeldWeight& weight : weights) MakeGradient(weight);
  }

  void BackwardLayer() {
    Tensors gathered = Gather();
    std::vector<Tensors> saved = std::move(kept_.back());
    Tensors input = std::move(inputs_.back());
    kept_.pop_back();
    inputs_.pop_back();
    if (options_.checkpoint == Checkpoint::kFull) saved = RunLayer(Checkpoint::kNone, /*has_input=*/true);
    Tensors branch_gradient;
    for (size_t i = operations_.size(); i-- > 0;) {
      const LayerOperation& operation = operations_[i];
      if (options_.checkpoint == Checkpoint::kSelective && !IsKept(operation, options_.checkpoint)) {
        for (const uint64_t bytes : operation.saved) MakeInto(saved[i], bytes);
      }
      Tensors scratch;
      for (const uint64_t bytes : operation.backward_scratch) MakeInto(scratch, bytes);
      Tensors input_gradient;
      MakeInto(input_gradient, operation.input_gradient);
      FreeAll(scratch);
      FreeAll(branch_gradient);
      FreeAll(saved[i]);
      for (const size_t weight : operation.weights) MakeGradient(weights_.layer[weight]);
      for (const size_t weight : operation.adapters) MakeGradient(weights_.adapters[weight]);
      if (operation.is_branch_start) {
        FreeAll(input_gradient);  // added to the stream's gradient
      } else {
        branch_gradient = input_gradient;
      }
    }
    FreeAll(input);
    FreeAll(gathered);
  }

  void Backward() {
    Loss();
    Tensors stream_gradient;
    MakeInto(stream_gradient, stream_);
    FreeAll(outside_);
    if (logits_ == 0) MakeGradients(weights_.head);
    for (uint64_t layer = 0; layer < shape_.layers; ++layer) BackwardLayer();
    if (!HasEarlyEmbeddingGradient(shape_)) MakeGradients(weights_.embeddings);
    FreeAll(stream_gradient);
  }

  void Optimize(bool is_first) {
    VisitTrained([&](const HeldWeight& weight) {
      if (is_first && weight.states != 0) {
        // Adam has two states of equal size, the rest a single state.
        const bool are_two = options_.optimizer == Optimizer::kAdamW || options_.optimizer == Optimizer::kAdam8bit;
        Make(are_two ? DividedUp(weight.states, 2) : weight.states);
        if (are_two) Make(DividedUp(weight.states, 2));
      }
      const Id scratch = Make(weight.update_scratch);
      Free(scratch);
    });
    FreeAll(gradients_);
  }

  const ModelShape& shape_;
  const TrainingOptions& options_;
  const std::vector<LayerOperation> operations_;
  const StepWeights weights_;
  const uint64_t stream_;  // bytes of the activations between two layers
  const uint64_t logits_;  // bytes in fp32
  Trace trace_;
  std::vector<std::vector<Tensors>> kept_;  // by layer and operation
  std::vector<Tensors> inputs_;             // by layer; checkpointed
  Tensors outside_;
  Tensors gradients_;
};

}  // namespace

Trace StepTrace(const ModelShape& shape, const TrainingOptions& options) {
  return StepWriter(shape, options).Write();
}

std::string TraceText(const Trace& trace, const std::string& heading) {
  return absl::StrCat("# ", heading, "\n", FormatTrace(trace));
}

}  // namespace vrambroker::plan
