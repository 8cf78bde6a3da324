// SPDX-License-Identifier: Apache-2.0
#include "client/vramctl/plan/layer_tensors.h"

#include <algorithm>
#include <string>

#include "absl/strings/match.h"
#include "client/vramctl/plan/bounded.h"

namespace vrambroker::plan {
namespace {

// Returns the positions in Weights::layer of the weights with names starting with any of `names`.
std::vector<size_t> Named(const std::vector<Weight>& weights, std::initializer_list<const char*> names) {
  std::vector<size_t> found;
  for (size_t i = 0; i < weights.size(); ++i) {
    for (const char* name : names) {
      if (absl::StartsWith(weights[i].name, name)) {
        found.push_back(i);
        break;
      }
    }
  }
  return found;
}

}  // namespace

uint64_t LayerInputBytes(const ModelShape& shape, const TrainingOptions& options) {
  return Product({options.seq, options.batch, shape.hidden, NumberBytesOf(options.precision).activation});
}

std::vector<LayerOperation> LayerOperations(const ModelShape& shape, const TrainingOptions& options) {
  const NumberBytes bytes = NumberBytesOf(options.precision);
  const uint64_t e = bytes.activation;
  const uint64_t tokens = Product({options.seq, options.batch});
  const uint64_t stream = Product({tokens, shape.hidden, e});
  const uint64_t queries = Product({tokens, shape.heads, shape.head_dim, e});
  const uint64_t keys = Product({tokens, shape.kv_heads, shape.head_dim, e});
  const uint64_t wide = Product({tokens, shape.ffn, e});
  const uint64_t scores = Product({tokens, options.seq, shape.heads});  // elements
  const uint64_t stream_mask = shape.hidden_dropout ? Product({tokens, shape.hidden}) : 0;
  const bool frozen = options.lora_rank != 0;
  // Returns the bytes of an input kept only for a weight's gradient.
  const auto input = [&](uint64_t width, bool is_trained) {
    return is_trained ? Product({tokens, width, bytes.linear_input}) : 0;
  };
  const std::vector<Weight> weights = WeightsOf(shape).layer;
  const auto named = [&](std::initializer_list<const char*> names) {
    return frozen ? std::vector<size_t>() : Named(weights, names);
  };
  const size_t adapters = AdaptersOf(shape, options.lora_rank).size();

  LayerOperation norm1 = {.part = LayerPart::kNorms,
                          .saved = {stream},
                          .input_gradient = stream,
                          .weights = named({"norm 1"}),
                          .is_branch_start = true};
  LayerOperation qkv = {.part = LayerPart::kAttention,
                        .saved = {input(shape.hidden, true), queries, keys, keys},
                        .input_gradient = stream,
                        .weights = named({"queries", "keys", "values", "norm of"})};
  for (size_t i = 0; i < adapters; ++i) {
    qkv.adapters.push_back(i);
    if (i % 2 == 0) qkv.saved.push_back(Product({tokens, options.lora_rank, e}));  // between the matrices
  }
  if (options.eager && !shape.norm_bias) {  // in PyTorch, layer norms (with a bias) are a single kernel, too
    const uint64_t exact = Product({tokens, shape.hidden, 4});
    norm1.saved.insert(norm1.saved.end(), {exact, stream});
  }
  LayerOperation attention = {.part = LayerPart::kScores, .input_gradient = Sum({queries, keys, keys})};
  if (options.flash) {
    attention.saved = {Product({tokens, shape.heads, 4})};     // the logarithm of each row's sum, fp32
    attention.backward_scratch = {Product({queries / e, 4})};  // the queries' gradient is summed in fp32
  } else {
    attention.saved = {Product({scores, e})};
    if (options.eager && !shape.norm_bias && e != 4) attention.saved.push_back(Product({scores, 4}));
    if (shape.attention_dropout) attention.saved.insert(attention.saved.end(), {scores, Product({scores, e})});
    attention.forward_scratch = Product({scores, e});            // scores before the softmax
    attention.backward_scratch.assign(2, Product({scores, e}));  // gradients of the scores after and before the softmax
  }
  // Flash attention's backward pass needs its own output, regardless of the trained weights.
  LayerOperation output = {
      .part = LayerPart::kAttention,
      .saved = {options.flash ? queries : input(shape.heads * shape.head_dim, !frozen), stream_mask},
      .forward_scratch = stream,
      .input_gradient = queries,
      .weights = named({"attention output"}),
      .is_branch_output = true};

  LayerOperation norm2 = norm1;
  norm2.weights = named({"norm 2"});
  LayerOperation up = {.part = LayerPart::kFeedForward,
                       .saved = {input(shape.hidden, !frozen), wide},
                       .input_gradient = stream,
                       .weights = named({"up", "gate"})};
  if (shape.gated) up.saved.push_back(wide);
  LayerOperation activation = {.part = LayerPart::kFeedForward,
                               .input_gradient = shape.gated ? Product({wide, 2}) : wide};
  if (shape.gated) activation.saved.push_back(wide);  // the gate after its function: a factor of the product
  activation.saved.push_back(input(shape.ffn, !frozen));
  LayerOperation down = {.part = LayerPart::kFeedForward,
                         .saved = {stream_mask},
                         .forward_scratch = stream,
                         .input_gradient = wide,
                         .weights = named({"down"}),
                         .is_branch_output = true};
  return {norm1, qkv, attention, output, norm2, up, activation, down};
}

uint64_t SavedBytes(const LayerOperation& operation) {
  uint64_t bytes = 0;
  for (const uint64_t tensor : operation.saved) bytes = Sum({bytes, tensor});
  return bytes;
}

bool IsKept(const LayerOperation& operation, Checkpoint checkpoint) {
  return checkpoint == Checkpoint::kNone ||
         (checkpoint == Checkpoint::kSelective && operation.part != LayerPart::kScores);
}

uint64_t BackwardScratch(const std::vector<LayerOperation>& operations, uint64_t layer_input_bytes) {
  uint64_t most = 0;
  uint64_t output_gradient = 0;  // gradient of the branch; layer_input_bytes is the gradient of the stream
  for (auto operation = operations.rbegin(); operation != operations.rend(); ++operation) {
    uint64_t scratch = Sum({layer_input_bytes, output_gradient, operation->input_gradient});
    for (const uint64_t tensor : operation->backward_scratch) scratch = Sum({scratch, tensor});
    most = std::max(most, scratch);
    output_gradient = operation->is_branch_start ? 0 : operation->input_gradient;
  }
  return most;
}

}  // namespace vrambroker::plan
