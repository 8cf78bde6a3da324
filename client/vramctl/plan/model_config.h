// SPDX-License-Identifier: Apache-2.0
//
// The shape of a transformer: read from a Hugging Face config.json, or from a few numbers.
#ifndef VRAMBROKER_CLIENT_VRAMCTL_PLAN_MODEL_CONFIG_H_
#define VRAMBROKER_CLIENT_VRAMCTL_PLAN_MODEL_CONFIG_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace vrambroker::plan {

// Larger models are refused: an untrusted file must not make the plan take gigabytes or minutes.
inline constexpr uint64_t kMostLayers = 512;
inline constexpr uint64_t kMostWidth = uint64_t{1} << 20;  // bounds hidden, feed-forward and head sizes, and heads
inline constexpr uint64_t kMostVocabulary = uint64_t{1} << 24;
inline constexpr uint64_t kMostPositions = uint64_t{1} << 24;
inline constexpr uint64_t kMostParameters = uint64_t{1} << 44;

// Structure of the layers. Sources: the model's classes in Hugging Face transformers (modeling_llama.py,
// modeling_gpt2.py, modeling_gpt_neox.py, modeling_bert.py, modeling_qwen2.py).
struct ModelShape {
  std::string model_type;  // as in config.json; "given" for --params
  uint64_t layers = 0;
  uint64_t hidden = 0;
  uint64_t heads = 0;
  uint64_t kv_heads = 0;  // fewer than heads: grouped heads share a key and a value
  uint64_t head_dim = 0;
  uint64_t ffn = 0;  // the width between the two halves of the feed-forward network
  uint64_t vocab = 0;
  uint64_t max_positions = 0;      // 0: unknown
  uint64_t learned_positions = 0;  // rows of the table of positions; 0: rotary
  uint64_t token_types = 0;        // rows of BERT's table of segments
  bool gated = false;              // three matrices in the feed-forward network instead of two
  bool fused_qkv = false;          // one matrix for queries, keys and values
  bool norm_bias = false;          // layer norm with a bias; else RMS norm
  bool qkv_bias = false;
  bool output_bias = false;  // bias of the attention's output
  bool mlp_bias = false;
  bool qk_norm = false;          // Qwen 3: a norm over each head's queries and keys
  bool final_norm = true;        // BERT: none
  bool tied_embeddings = false;  // the output layer uses the table of embeddings
  bool has_output_layer = true;  // BERT without its heads: none, and no logits
  bool pooler = false;           // BERT
  bool hidden_dropout = false;   // masks are kept for the backward pass
  bool attention_dropout = false;
  uint64_t given_parameters = 0;      // --params, if nothing else is known for certain
  std::vector<std::string> warnings;  // a sentence each
};

// Reads config.json. InvalidArgument names the missing or wrong key, or lists the known model types. Safe to call from
// any thread.
absl::StatusOr<ModelShape> ParseModelConfig(absl::string_view json);

// The numbers of a model without a config.json. The model is assumed to be a GPT with a feed-forward width of four
// times `hidden`, as in the published formulas. 0 means "not given"; layers, hidden and heads are required.
// InvalidArgument names the option.
struct GivenNumbers {
  uint64_t parameters = 0;
  uint64_t layers = 0;
  uint64_t hidden = 0;
  uint64_t heads = 0;
  uint64_t kv_heads = 0;
  uint64_t vocab = 0;
};
absl::StatusOr<ModelShape> ShapeOf(const GivenNumbers& given);

// A matrix or vector of the model, with rows * columns elements.
struct Weight {
  std::string name;
  uint64_t rows = 0;
  uint64_t columns = 1;
  bool is_linear = false;  // multiplied with a matrix of activations, so 8-bit formats apply
};

// The weights of each layer, all layers being equal, and the weights outside the layers.
struct Weights {
  std::vector<Weight> embeddings;
  std::vector<Weight> layer;
  std::vector<Weight> head;  // weights after the last layer
};
Weights WeightsOf(const ModelShape& shape);

// Returns the number of elements, counting every layer. With --params: exactly the given number.
uint64_t ParametersOf(const ModelShape& shape);
uint64_t ElementsOf(const std::vector<Weight>& weights);

}  // namespace vrambroker::plan

#endif  // VRAMBROKER_CLIENT_VRAMCTL_PLAN_MODEL_CONFIG_H_
