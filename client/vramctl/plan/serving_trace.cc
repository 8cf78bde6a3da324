// SPDX-License-Identifier: Apache-2.0
#include "client/vramctl/plan/serving_trace.h"

#include <vector>

#include "client/vramctl/plan/bounded.h"
#include "client/vramctl/plan/step_parts.h"
#include "client/vramctl/plan/step_trace.h"

namespace vrambroker::plan {

Trace ServingTrace(const ModelShape& shape, const ServingOptions& options) {
  Trace trace;
  const auto make = [&](uint64_t bytes) {
    if (bytes != 0) trace.ops.push_back({.kind = TraceOp::Kind::kAllocate, .id = trace.ids++, .bytes = bytes});
  };
  // Frees all from the id `first` on.
  const auto free_from = [&](uint32_t first) {
    for (uint32_t id = trace.ids; id-- > first;) trace.ops.push_back({.kind = TraceOp::Kind::kFree, .id = id});
  };
  const Weights weights = WeightsOf(shape);
  const auto store = [&](const std::vector<Weight>& some, bool are_of_layer) {
    for (const Weight& weight : some) make(StoredBytes(weight, options.quantization, are_of_layer));
  };
  store(weights.embeddings, false);
  for (uint64_t layer = 0; layer < shape.layers; ++layer) store(weights.layer, true);
  store(weights.head, false);
  make(kLibraryWorkspace);
  const uint64_t cache = Product({KvBytesPerSequence(shape, options), options.sequences});
  for (uint64_t layer = 0; layer < shape.layers; ++layer) make(cache / shape.layers);

  const uint64_t stream = Product({options.prefill_tokens, shape.hidden, 2});
  const uint64_t heads = Product({options.prefill_tokens, shape.heads + 2 * shape.kv_heads, shape.head_dim, 2});
  const uint64_t wide = Product({options.prefill_tokens, shape.ffn, shape.gated ? uint64_t{2} : 1, 2});
  for (int pass = 0; pass < kSteps; ++pass) {
    trace.ops.push_back({.kind = TraceOp::Kind::kResetPeaks});
    const uint32_t of_pass = trace.ids;
    make(stream);
    for (uint64_t layer = 0; layer < shape.layers; ++layer) {
      for (const uint64_t half : {heads, wide}) {
        const uint32_t of_half = trace.ids;
        make(half);
        make(stream);
        free_from(of_half);
      }
    }
    free_from(of_pass);
    const uint32_t of_logits = trace.ids;
    make(Product({options.sequences, shape.vocab, 4}));
    free_from(of_logits);
  }
  return trace;
}

}  // namespace vrambroker::plan
