// SPDX-License-Identifier: Apache-2.0
//
// Shared by the formulas and the trace of a step, beyond a single layer: the weights held on a GPU, and the sizes at
// the ends of the model.
#ifndef VRAMBROKER_CLIENT_VRAMCTL_PLAN_STEP_PARTS_H_
#define VRAMBROKER_CLIENT_VRAMCTL_PLAN_STEP_PARTS_H_

#include <cstdint>
#include <vector>

#include "client/vramctl/plan/model_config.h"
#include "client/vramctl/plan/training_memory.h"

namespace vrambroker::plan {

// PyTorch's workspace for cuBLAS, allocated by PyTorch's allocator: CUBLAS_WORKSPACE_CONFIG=:4096:2:16:8 (pytorch pull
// request 83461). On Hopper the workspace is 32 MiB.
inline constexpr uint64_t kLibraryWorkspace = uint64_t{4096 * 2 + 16 * 8} << 10;

// A weight as held by a GPU, in bytes.
struct HeldWeight {
  uint64_t weight = 0;
  uint64_t full_weight = 0;  // before ZeRO's partition
  uint64_t fp8_copies = 0;
  uint64_t gradient = 0;  // 0: the weight is frozen
  uint64_t full_gradient = 0;
  uint64_t master = 0;
  uint64_t states = 0;
  uint64_t update_scratch = 0;  // while the optimizer updates the weight
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
  uint64_t head_gradient_bytes = 0;   // made first: for the output layer, possibly the table of embeddings
  uint64_t late_gradient_bytes = 0;   // made last: for the first layer, and embeddings not in the output layer
  uint64_t gathered_bytes = 0;        // ZeRO 2 and 3: temporary whole gradients and weights
  uint64_t update_scratch_bytes = 0;  // the largest
};
StepWeights StepWeightsOf(const ModelShape& shape, const TrainingOptions& options);

// Whether the output layer shares the table of embeddings, so the gradient of the table comes first.
bool HasEarlyEmbeddingGradient(const ModelShape& shape);

// Returns the tensors kept outside the layers, bytes: the inputs of the last norm and of the output layer, and the
// dropout mask of the embeddings.
uint64_t OutsideActivationBytes(const ModelShape& shape, const TrainingOptions& options);
// Returns the size of the logits in fp32. 0: the model has none.
uint64_t LogitsBytes(const ModelShape& shape, const TrainingOptions& options);
// Returns the size of the input of the output layer.
uint64_t OutputInputBytes(const ModelShape& shape, const TrainingOptions& options);

}  // namespace vrambroker::plan

#endif  // VRAMBROKER_CLIENT_VRAMCTL_PLAN_STEP_PARTS_H_
