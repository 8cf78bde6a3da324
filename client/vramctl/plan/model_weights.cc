// SPDX-License-Identifier: Apache-2.0
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/vramctl/plan/bounded.h"
#include "client/vramctl/plan/model_config.h"

namespace vrambroker::plan {
namespace {

void AddLinear(std::vector<Weight>& weights, const char* name, uint64_t in, uint64_t out, bool bias) {
  weights.push_back({.name = name, .rows = out, .columns = in, .is_linear = true});
  if (bias) weights.push_back({.name = absl::StrCat(name, " bias"), .rows = out});
}

void AddNorm(std::vector<Weight>& weights, const char* name, uint64_t width, bool bias) {
  weights.push_back({.name = name, .rows = width});
  if (bias) weights.push_back({.name = absl::StrCat(name, " bias"), .rows = width});
}

}  // namespace

Weights WeightsOf(const ModelShape& shape) {
  const uint64_t queries = shape.heads * shape.head_dim;
  const uint64_t keys = shape.kv_heads * shape.head_dim;
  Weights weights;
  std::vector<Weight>& embeddings = weights.embeddings;
  if (shape.given_parameters == 0 && shape.vocab != 0)
    embeddings.push_back({.name = "tokens", .rows = shape.vocab, .columns = shape.hidden});
  if (shape.learned_positions != 0) {
    embeddings.push_back({.name = "positions", .rows = shape.learned_positions, .columns = shape.hidden});
  }
  if (shape.token_types != 0) {
    embeddings.push_back({.name = "segments", .rows = shape.token_types, .columns = shape.hidden});
    AddNorm(embeddings, "norm of embeddings", shape.hidden, /*bias=*/true);
  }

  std::vector<Weight>& layer = weights.layer;
  AddNorm(layer, "norm 1", shape.hidden, shape.norm_bias);
  if (shape.fused_qkv) {
    AddLinear(layer, "queries, keys, values", shape.hidden, queries + 2 * keys, shape.qkv_bias);
  } else {
    AddLinear(layer, "queries", shape.hidden, queries, shape.qkv_bias);
    AddLinear(layer, "keys", shape.hidden, keys, shape.qkv_bias);
    AddLinear(layer, "values", shape.hidden, keys, shape.qkv_bias);
  }
  if (shape.qk_norm) {
    AddNorm(layer, "norm of queries", shape.head_dim, /*bias=*/false);
    AddNorm(layer, "norm of keys", shape.head_dim, /*bias=*/false);
  }
  AddLinear(layer, "attention output", queries, shape.hidden, shape.output_bias);
  AddNorm(layer, "norm 2", shape.hidden, shape.norm_bias);
  if (shape.gated) AddLinear(layer, "gate", shape.hidden, shape.ffn, shape.mlp_bias);
  AddLinear(layer, "up", shape.hidden, shape.ffn, shape.mlp_bias);
  AddLinear(layer, "down", shape.ffn, shape.hidden, shape.mlp_bias);

  if (shape.final_norm) AddNorm(weights.head, "final norm", shape.hidden, shape.norm_bias);
  if (shape.pooler) AddLinear(weights.head, "pooler", shape.hidden, shape.hidden, /*bias=*/true);
  if (shape.has_output_layer && !shape.tied_embeddings) {
    AddLinear(weights.head, "output layer", shape.hidden, shape.vocab, /*bias=*/false);
  }
  if (shape.given_parameters != 0) {
    const uint64_t counted = Sum({Product({shape.layers, ElementsOf(layer)}), ElementsOf(weights.head)});
    embeddings.push_back({.name = "outside the layers", .rows = shape.given_parameters - counted});
  }
  return weights;
}

uint64_t ElementsOf(const std::vector<Weight>& weights) {
  uint64_t elements = 0;
  for (const Weight& weight : weights) elements = Sum({elements, Product({weight.rows, weight.columns})});
  return elements;
}

uint64_t ParametersOf(const ModelShape& shape) {
  if (shape.given_parameters != 0) return shape.given_parameters;
  const Weights weights = WeightsOf(shape);
  return Sum(
      {ElementsOf(weights.embeddings), Product({shape.layers, ElementsOf(weights.layer)}), ElementsOf(weights.head)});
}

}  // namespace vrambroker::plan
