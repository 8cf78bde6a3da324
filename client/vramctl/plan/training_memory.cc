// SPDX-License-Identifier: Apache-2.0
#include "client/vramctl/plan/training_memory.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/vramctl/plan/bounded.h"
#include "client/vramctl/plan/layer_tensors.h"
#include "client/vramctl/plan/step_parts.h"

namespace vrambroker::plan {
namespace {

std::string OptimizerFormula(Optimizer optimizer, const NumberBytes& bytes) {
  std::string formula = bytes.master == 0 ? "" : "4 B exact copy + ";
  switch (optimizer) {
    case Optimizer::kAdamW:
      absl::StrAppend(&formula, "2 x ", bytes.state, " B a parameter (ZeRO 3.1)");
      break;
    case Optimizer::kAdam8bit:
      absl::StrAppend(&formula, "2 x (1 + 4/256) B a parameter (Dettmers 2022)");
      break;
    case Optimizer::kSgd:
      absl::StrAppend(&formula, bytes.state, " B a parameter: momentum");
      break;
    case Optimizer::kAdafactor:
      absl::StrAppend(&formula, "4 B a row and a column of each matrix (Shazeer 2018)");
      break;
  }
  return formula;
}

// Sums the activations of all layers; the formula says how many times `unit` each layer keeps, `letters` being the
// symbols of the product `unit`.
Part ActivationsOf(const char* name, LayerPart part, const std::vector<LayerOperation>& operations,
                   const ModelShape& shape, const TrainingOptions& options, uint64_t unit, const char* letters) {
  uint64_t bytes = 0;
  for (const LayerOperation& operation : operations) {
    if (operation.part == part && IsKept(operation, options.checkpoint)) bytes = Sum({bytes, SavedBytes(operation)});
  }
  const double times = static_cast<double>(bytes) / static_cast<double>(unit);
  const char* const source = part == LayerPart::kScores && options.flash ? "Dao 2022" : "Korthikanti 4.1";
  return {name, Product({bytes, shape.layers}),
          bytes == 0 ? "computed again in the backward pass"
                     : absl::StrFormat("%.4g %s a layer (%s)", times, letters, source)};
}

std::vector<Part> AllActivations(const ModelShape& shape, const TrainingOptions& options,
                                 const std::vector<LayerOperation>& operations) {
  const uint64_t sbh = Product({options.seq, options.batch, shape.hidden});
  const uint64_t asb = Product({shape.heads, options.seq, options.batch});
  std::vector<Part> parts;
  if (options.checkpoint == Checkpoint::kFull) {
    const uint64_t input = LayerInputBytes(shape, options);
    parts.push_back(
        {"layer inputs", Product({shape.layers, input}), absl::StrCat(input / sbh, " sbh a layer (Korthikanti 5)")});
  } else {
    const auto add = [&](const char* name, LayerPart part, uint64_t unit, const char* letters) {
      parts.push_back(ActivationsOf(name, part, operations, shape, options, unit, letters));
    };
    add("norms", LayerPart::kNorms, sbh, "sbh");
    add("attention", LayerPart::kAttention, sbh, "sbh");
    if (options.flash) {
      add("attention scores", LayerPart::kScores, asb, "asb");
    } else {
      add("attention scores", LayerPart::kScores, Product({asb, options.seq}), "as^2 b");
    }
    add("feed-forward", LayerPart::kFeedForward, sbh, "sbh");
  }
  parts.push_back({"outside the layers", OutsideActivationBytes(shape, options),
                   "inputs of the last norm and the output layer, dropout mask (Korthikanti 4.3)"});
  return parts;
}

}  // namespace

NumberBytes NumberBytesOf(Precision precision) {
  switch (precision) {
    case Precision::kBf16Mixed:
    case Precision::kFp16Mixed:
      return {};
    case Precision::kBf16:
      return {.master = 0, .state = 2};
    case Precision::kFp32:
      return {.weight = 4, .gradient = 4, .master = 0, .activation = 4, .linear_input = 4};
    case Precision::kFp8Mixed:
      return {.fp8_copies = 2, .linear_input = 1};
  }
  return {};
}

uint64_t StateBytes(const Weight& weight, Optimizer optimizer, const NumberBytes& bytes) {
  constexpr uint64_t kBlock = 256;  // numbers sharing a scale
  const uint64_t elements = Product({weight.rows, weight.columns});
  switch (optimizer) {
    case Optimizer::kAdamW:
      return Product({elements, bytes.state, 2});
    case Optimizer::kAdam8bit:
      return Sum({Product({elements, 2}), Product({DividedUp(elements, kBlock), 4, 2})});
    case Optimizer::kSgd:
      return Product({elements, bytes.state});
    case Optimizer::kAdafactor:
      return weight.columns == 1 ? Product({elements, 4}) : Product({Sum({weight.rows, weight.columns}), 4});
  }
  return 0;
}

std::vector<Weight> AdaptersOf(const ModelShape& shape, uint64_t rank) {
  std::vector<Weight> adapters;
  if (rank == 0) return adapters;
  const uint64_t queries = shape.heads * shape.head_dim;
  const uint64_t keys = shape.kv_heads * shape.head_dim;
  const auto add = [&](const char* name, uint64_t out) {
    adapters.push_back({absl::StrCat(name, " A"), rank, shape.hidden, true});
    adapters.push_back({absl::StrCat(name, " B"), out, rank, true});
  };
  if (shape.fused_qkv) {
    add("queries, keys, values", queries + 2 * keys);
  } else {
    add("queries", queries);
    add("values", keys);
  }
  return adapters;
}

uint64_t TrainingMemory::ActivationBytes() const {
  uint64_t bytes = 0;
  for (const Part& part : activations) bytes = Sum({bytes, part.bytes});
  return bytes;
}

absl::StatusOr<TrainingMemory> TrainingMemoryOf(const ModelShape& shape, const TrainingOptions& options) {
  const NumberBytes bytes = NumberBytesOf(options.precision);
  const std::vector<LayerOperation> operations = LayerOperations(shape, options);
  const StepWeights weights = StepWeightsOf(shape, options);
  const uint64_t stream = LayerInputBytes(shape, options);

  TrainingMemory memory;
  memory.parameters = ParametersOf(shape);
  memory.trained_parameters = weights.trained_parameters;
  memory.weights = {"weights", weights.weight_bytes, absl::StrCat(bytes.weight, " B a parameter")};
  if (bytes.fp8_copies != 0) absl::StrAppend(&memory.weights.formula, " + 2 x 1 B for those of linear layers");
  memory.gradients = {"gradients", weights.gradient_bytes, absl::StrCat(bytes.gradient, " B a trained parameter")};
  memory.optimizer = {absl::StrCat("optimizer (", NameOf(options.optimizer), ")"), weights.optimizer_bytes,
                      OptimizerFormula(options.optimizer, bytes)};
  if (options.zero_stage >= 1) absl::StrAppend(&memory.optimizer.formula, ", / ", options.gpus, " GPUs (ZeRO)");
  if (options.zero_stage >= 2) absl::StrAppend(&memory.gradients.formula, ", / ", options.gpus, " GPUs (ZeRO)");
  if (options.zero_stage >= 3) absl::StrAppend(&memory.weights.formula, ", / ", options.gpus, " GPUs (ZeRO)");
  memory.activations = AllActivations(shape, options, operations);

  const uint64_t logits = LogitsBytes(shape, options);
  memory.logits = {"logits", logits, "4 sbv: fp32 for the loss (Korthikanti 4.3)"};
  uint64_t recomputed = 0;
  for (const LayerOperation& operation : operations) {
    if (!IsKept(operation, options.checkpoint)) recomputed = Sum({recomputed, SavedBytes(operation)});
  }
  if (options.checkpoint == Checkpoint::kFull) recomputed -= std::min(recomputed, stream);  // input was kept
  const uint64_t in_layer = Sum({recomputed, BackwardScratch(operations, stream)});
  const uint64_t always = Sum({weights.gathered_bytes, kLibraryWorkspace});
  memory.workspace = {
      "workspace", Sum({std::max({logits, in_layer, weights.update_scratch_bytes}), always}),
      "gradients of one layer's activations, of the logits, or of a weight in fp32; matrix library 8.1 MiB"};
  if (recomputed != 0) absl::StrAppend(&memory.workspace.formula, "; one layer recomputed");
  if (weights.gathered_bytes != 0) absl::StrAppend(&memory.workspace.formula, "; gathered for ZeRO");

  const uint64_t activations = memory.ActivationBytes();
  memory.sum_bytes = Sum({memory.weights.bytes, memory.gradients.bytes, memory.optimizer.bytes, activations, logits,
                          memory.workspace.bytes});
  if (memory.sum_bytes >= kTooLarge) {
    return absl::InvalidArgumentError("that step needs more than 64 PiB; make the model, --batch or --seq smaller");
  }
  const uint64_t persistent = Sum({memory.weights.bytes, memory.optimizer.bytes, always});
  // The backward pass starts with all activations kept and only the head's gradients, and ends the other way round.
  const uint64_t start = Sum({activations, std::max(2 * logits, Sum({weights.head_gradient_bytes, in_layer}))});
  uint64_t kept = 0;
  for (const Part& part : memory.activations) kept = Sum({kept, part.bytes / shape.layers});
  const uint64_t last_layer = memory.gradients.bytes - weights.late_gradient_bytes;
  const uint64_t end =
      std::max(Sum({last_layer, kept, in_layer}), Sum({memory.gradients.bytes, weights.update_scratch_bytes}));
  memory.peak_bytes = Sum({persistent, std::max(start, end)});
  return memory;
}

uint64_t KorthikantiActivationBytes(const ModelShape& shape, uint64_t batch, uint64_t seq, Checkpoint checkpoint) {
  const uint64_t sbh = Product({seq, batch, shape.hidden});
  const uint64_t scores = Product({5, shape.heads, seq, seq, batch});
  switch (checkpoint) {
    case Checkpoint::kNone:
      return Product({shape.layers, Sum({Product({34, sbh}), scores})});
    case Checkpoint::kSelective:
      return Product({shape.layers, 34, sbh});
    case Checkpoint::kFull:
      return Product({shape.layers, 2, sbh});
  }
  return 0;
}

std::vector<Part> GuideEstimates(const ModelShape& shape, const TrainingOptions& options) {
  const uint64_t parameters = ParametersOf(shape);
  const NumberBytes bytes = NumberBytesOf(options.precision);
  Part activations = {"activations", KorthikantiActivationBytes(shape, options.batch, options.seq, options.checkpoint),
                      "Korthikanti: L sbh(34 + 5as/h); selective L 34sbh; full L 2sbh"};
  if (options.lora_rank != 0) {  // the remaining rules assume gradients and states for all weights
    absl::StrAppend(&activations.formula, "; with all weights trained");
    return {activations};
  }
  return {{"16 B a parameter", Product({16, parameters}), "ZeRO 3.1: mixed precision and Adam, without activations"},
          {"18 B a parameter", Product({18, parameters}),
           "Hugging Face, \"GPU memory usage\": 6 weights + 8 AdamW + 4 gradients, without activations"},
          {"4 x the weights", Product({4, bytes.weight, parameters}),
           "Hugging Face accelerate estimate-memory: training with Adam, without activations"},
          activations};
}

}  // namespace vrambroker::plan
