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
  const auto free = [&](uint32_t id) { trace.ops.push_back({.kind = TraceOp::Kind::kFree, .id = id}); };
  // Allocates both sizes, then frees them.
  const auto use = [&](uint64_t bytes, uint64_t more_bytes) {
    const uint32_t first = trace.ids;
    make(bytes);
    make(more_bytes);
    for (uint32_t id = trace.ids; id-- > first;) free(id);
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
    const uint32_t input = trace.ids;
    make(stream);
    for (uint64_t layer = 0; layer < shape.layers; ++layer) {
      use(heads, stream);
      use(wide, stream);
    }
    free(input);
    use(Product({options.sequences, shape.vocab, 4}), 0);
  }
  return trace;
}

}  // namespace vrambroker::plan
