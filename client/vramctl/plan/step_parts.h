// SPDX-License-Identifier: Apache-2.0
//
// What the formulas and the trace of a step both need to know beyond one layer: the weights as they are held on one
// GPU, and the sizes at the ends of the model.
#ifndef VRAMBROKER_CLIENT_VRAMCTL_PLAN_STEP_PARTS_H_
#define VRAMBROKER_CLIENT_VRAMCTL_PLAN_STEP_PARTS_H_

#include <cstdint>
#include <vector>

#include "client/vramctl/plan/model_config.h"
#include "client/vramctl/plan/training_memory.h"

namespace vrambroker::plan {

// PyTorch's workspace for cuBLAS, which it takes from its allocator: CUBLAS_WORKSPACE_CONFIG=:4096:2:16:8 (pytorch
// pull request 83461). On Hopper it is 32 MiB.
inline constexpr uint64_t kLibraryWorkspace = uint64_t{4096 * 2 + 16 * 8} << 10;

// One weight as one GPU holds it, in bytes.
struct HeldWeight {
  uint64_t weight = 0;
  uint64_t full_weight = 0;  // before ZeRO's partition
  uint64_t fp8_copies = 0;
  uint64_t gradient = 0;  // 0: it is frozen
  uint64_t full_gradient = 0;
  uint64_t master = 0;
  uint64_t states = 0;
  uint64_t update_scratch = 0;  // while the optimizer works on it
};
HeldWeight HeldWeightOf(const Weight& weight, bool is_trained, const TrainingOptions& options);

struct StepWeights {
  std::vector<HeldWeight> embeddings;
  std::vector<HeldWeight> layer;
  std::vector<HeldWeight> adapters;  // of each layer
  std::vector<HeldWeight> head;
  // Sums over the model.
  uint64_t trained_parameters = 0;
  uint64_t weight_bytes = 0;
  uint64_t gradient_bytes = 0;
  uint64_t optimizer_bytes = 0;
  uint64_t head_gradient_bytes = 0;   // there first: of the output layer, which can be the table of embeddings
  uint64_t late_gradient_bytes = 0;   // there last: of the first layer and of embeddings that no output layer uses
  uint64_t gathered_bytes = 0;        // of ZeRO 2 and 3: whole gradients and weights for a while
  uint64_t update_scratch_bytes = 0;  // the largest
};
StepWeights StepWeightsOf(const ModelShape& shape, const TrainingOptions& options);

// Whether the table of embeddings is the output layer, too, so that its gradient comes first.
bool HasEarlyEmbeddingGradient(const ModelShape& shape);

// What is kept outside the layers, bytes: the inputs of the last norm and of the output layer, and the dropout mask of
// the embeddings.
uint64_t OutsideActivationBytes(const ModelShape& shape, const TrainingOptions& options);
// The logits in fp32. 0: the model has none.
uint64_t LogitsBytes(const ModelShape& shape, const TrainingOptions& options);
// The input of the output layer.
uint64_t OutputInputBytes(const ModelShape& shape, const TrainingOptions& options);

}  // namespace vrambroker::plan

#endif  // VRAMBROKER_CLIENT_VRAMCTL_PLAN_STEP_PARTS_H_
