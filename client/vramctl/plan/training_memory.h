// SPDX-License-Identifier: Apache-2.0
//
// Memory of a training step, by formula.
//
// Sources, by the names used in comments:
//   ZeRO         Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
//                arXiv:1910.02054, section 3
//   Korthikanti  Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models",
//                arXiv:2205.05198, section 4
//   Dettmers     Dettmers et al. 2022, "8-bit Optimizers via Block-wise Quantization", arXiv:2110.02861
//   Adafactor    Shazeer and Stern 2018, arXiv:1804.04235
//   LoRA         Hu et al. 2021, arXiv:2106.09685
// Letters are Korthikanti's: s sequence, b batch, h hidden size, a heads, v vocabulary, L layers; f is the width of the
// feed-forward network, e the bytes of a number in the activations, P the parameters.
#ifndef VRAMBROKER_CLIENT_VRAMCTL_PLAN_TRAINING_MEMORY_H_
#define VRAMBROKER_CLIENT_VRAMCTL_PLAN_TRAINING_MEMORY_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "client/vramctl/plan/model_config.h"

namespace vrambroker::plan {

inline constexpr uint64_t kMostBatch = uint64_t{1} << 16;
inline constexpr uint64_t kMostGpus = uint64_t{1} << 20;

enum class Precision { kBf16Mixed, kFp16Mixed, kBf16, kFp32, kFp8Mixed };
enum class Optimizer { kAdamW, kAdam8bit, kSgd, kAdafactor };
enum class Checkpoint { kNone, kSelective, kFull };

struct TrainingOptions {
  uint64_t batch = 1;  // sequences of a GPU passing through the model together
  uint64_t seq = 0;    // tokens of each sequence; 0: the model's maximum, up to 2048
  Precision precision = Precision::kBf16Mixed;
  Optimizer optimizer = Optimizer::kAdamW;
  Checkpoint checkpoint = Checkpoint::kNone;
  uint64_t zero_stage = 0;
  uint64_t gpus = 1;  // number of GPUs in ZeRO's partition
  bool flash = false;
  bool eager = false;      // modules as written by Hugging Face, without fused kernels: see LayerOperations()
  uint64_t lora_rank = 0;  // 0: all weights are trained
};

// Parses names of the command line. InvalidArgument lists the names.
absl::StatusOr<Precision> ParsePrecision(absl::string_view name);
absl::StatusOr<Optimizer> ParseOptimizer(absl::string_view name);
absl::StatusOr<Checkpoint> ParseCheckpoint(absl::string_view name);
std::vector<std::string> PrecisionNames();
std::vector<std::string> OptimizerNames();
std::vector<std::string> CheckpointNames();
const char* NameOf(Precision precision);
const char* NameOf(Optimizer optimizer);
const char* NameOf(Checkpoint checkpoint);

// Returns `options` with the default of seq filled in. InvalidArgument names the option out of bounds.
absl::StatusOr<TrainingOptions> CheckTraining(const ModelShape& shape, const TrainingOptions& options);

// Bytes of a number. Mixed precision follows ZeRO: 2 for the weight, 2 for its gradient, 4 for the weight's exact copy.
struct NumberBytes {
  uint64_t weight = 2;
  uint64_t fp8_copies = 0;  // for a linear weight: the matrix and its transpose, as on Hopper
  uint64_t gradient = 2;
  uint64_t master = 4;  // 0: the optimizer works on the weight itself
  uint64_t state = 4;   // for each of the optimizer's states, unless states have 8 bits
  uint64_t activation = 2;
  uint64_t linear_input = 2;  // for an activation kept only for a linear layer's weight gradient
};
NumberBytes NumberBytesOf(Precision precision);

// Returns the optimizer's states for a weight, bytes, without the master copy. adamw: two numbers a parameter (ZeRO);
// adam8bit: two bytes, plus a 4-byte scale per 256 bytes (Dettmers; the block size is bitsandbytes'); sgd: a single
// number, the momentum; adafactor: a number per row and column, or per element of a vector (Adafactor).
uint64_t StateBytes(const Weight& weight, Optimizer optimizer, const NumberBytes& bytes);

// Returns the adapters of a layer: on queries and values, or on the fused matrix (LoRA, section 4.2).
std::vector<Weight> AdaptersOf(const ModelShape& shape, uint64_t rank);

struct Part {
  std::string name;
  uint64_t bytes = 0;
  std::string formula;  // with its source
};

struct TrainingMemory {
  uint64_t parameters = 0;
  uint64_t trained_parameters = 0;
  Part weights;
  Part gradients;
  Part optimizer;                 // the master copy is part of it, as in ZeRO
  std::vector<Part> activations;  // of all layers, by kind
  Part logits;
  Part workspace;          // the largest set of temporaries alive together
  uint64_t sum_bytes = 0;  // sum of the parts above
  // Peak of the memory held: gradients come while activations go. The peak is the larger of the start and the end of
  // the backward pass, if gradients are freed before each forward pass (PyTorch's zero_grad).
  uint64_t peak_bytes = 0;
  uint64_t ActivationBytes() const;
};

// Returns sizes per GPU. InvalidArgument if the sum is too large to plan (64 PiB). `options` come from CheckTraining().
// Safe to call from any thread.
absl::StatusOr<TrainingMemory> TrainingMemoryOf(const ModelShape& shape, const TrainingOptions& options);

// Korthikanti's closed form, bytes of all layers: L * sbh(34 + 5as/h), 34sbh (selective), 2sbh (full).
uint64_t KorthikantiActivationBytes(const ModelShape& shape, uint64_t batch, uint64_t seq, Checkpoint checkpoint);

// Returns the estimates of published guides: rules of thumb, per GPU and without ZeRO. With LoRA only the estimate of
// the activations.
std::vector<Part> GuideEstimates(const ModelShape& shape, const TrainingOptions& options);

}  // namespace vrambroker::plan

#endif  // VRAMBROKER_CLIENT_VRAMCTL_PLAN_TRAINING_MEMORY_H_
