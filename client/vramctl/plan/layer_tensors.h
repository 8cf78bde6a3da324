// SPDX-License-Identifier: Apache-2.0
//
// A transformer layer as a sequence of operations: the tensors each operation keeps for the backward pass, and its
// temporaries. The formulas add the tensors up, and the trace of a step allocates them, so both have a single source.
#ifndef VRAMBROKER_CLIENT_VRAMCTL_PLAN_LAYER_TENSORS_H_
#define VRAMBROKER_CLIENT_VRAMCTL_PLAN_LAYER_TENSORS_H_

#include <cstdint>
#include <vector>

#include "client/vramctl/plan/model_config.h"
#include "client/vramctl/plan/training_memory.h"

namespace vrambroker::plan {

enum class LayerPart { kNorms, kAttention, kScores, kFeedForward };

// All sizes are bytes. A tensor of 0 bytes does not exist.
struct LayerOperation {
  LayerPart part = LayerPart::kNorms;
  std::vector<uint64_t> saved;  // kept for the backward pass
  uint64_t forward_scratch = 0;
  std::vector<uint64_t> backward_scratch;
  uint64_t input_gradient = 0;    // made by the backward pass; lives until the next operation's is made
  std::vector<size_t> weights;    // indices into Weights::layer: the backward pass makes their gradients
  std::vector<size_t> adapters;   // indices into AdaptersOf()
  bool is_branch_start = false;   // norm of a branch: the branch's gradient joins the residual stream's
  bool is_branch_output = false;  // added to the residual stream
};

// Returns the operations in the order of the forward pass. The sizes per layer follow Korthikanti, section 4.1, without
// dropout masks if the model has no dropout, with grouped heads, and with gated feed-forward networks. Flash attention
// (Dao et al. 2022, arXiv:2205.14135) keeps a number per row of the scores instead of the scores. With LoRA the inputs
// of frozen linear layers are not kept: nothing needs the gradients of frozen weights.
//
// Eager modules keep more (LlamaRMSNorm and eager_attention_forward in Hugging Face's modeling_llama.py). RMS norms
// work on an fp32 copy of their input and keep the copy and the result before scaling. The softmax is computed and kept
// in fp32, besides its copy for the next product.
std::vector<LayerOperation> LayerOperations(const ModelShape& shape, const TrainingOptions& options);

uint64_t SavedBytes(const LayerOperation& operation);

// Whether a layer keeps the operation's tensors between the forward and the backward pass. Checkpoint::kFull keeps only
// the layer's input, kSelective all but the scores (Korthikanti, section 5).
bool IsKept(const LayerOperation& operation, Checkpoint checkpoint);
uint64_t LayerInputBytes(const ModelShape& shape, const TrainingOptions& options);

// Returns the peak of a layer's backward pass, without saved tensors and the weights' gradients.
uint64_t BackwardScratch(const std::vector<LayerOperation>& operations, uint64_t layer_input_bytes);

}  // namespace vrambroker::plan

#endif  // VRAMBROKER_CLIENT_VRAMCTL_PLAN_LAYER_TENSORS_H_
