// SPDX-License-Identifier: Apache-2.0
//
// Memory for serving a model, by formula: weights, the cache of keys and values, and the temporaries of a pass.
#ifndef VRAMBROKER_CLIENT_VRAMCTL_PLAN_SERVING_MEMORY_H_
#define VRAMBROKER_CLIENT_VRAMCTL_PLAN_SERVING_MEMORY_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "client/vramctl/plan/model_config.h"
#include "client/vramctl/plan/training_memory.h"

namespace vrambroker::plan {

inline constexpr uint64_t kMostSequences = uint64_t{1} << 20;

// Storage format of the weights. int8, fp8 and int4 apply to the matrices inside the layers; the rest stays in 2 bytes.
enum class Quantization { kFp32, kBf16, kFp8, kInt8, kInt4 };

// Parses names of the command line. InvalidArgument lists the names.
absl::StatusOr<Quantization> ParseQuantization(absl::string_view name);
std::vector<std::string> QuantizationNames();
const char* NameOf(Quantization quantization);

struct ServingOptions {
  uint64_t seq = 0;        // tokens of a sequence, prompt and answer; 0: as in CheckTraining()
  uint64_t sequences = 1;  // concurrent sequences
  Quantization quantization = Quantization::kBf16;
  uint64_t kv_bytes = 2;        // bytes of a number in the cache: 1, 2 or 4
  uint64_t prefill_tokens = 0;  // tokens of all prompts in a pass through the model; 0: a single sequence
  uint64_t device_bytes = 0;    // 0: not given
  double utilization = 0.9;     // share of the device for the server, as vLLM's gpu_memory_utilization
};

// Returns `options` with defaults filled in. InvalidArgument names the option out of bounds, or says that the model
// generates no text.
absl::StatusOr<ServingOptions> CheckServing(const ModelShape& shape, const ServingOptions& options);

// Returns the cache of a token, bytes: 2 (key and value) x layers x key-value heads x head size x bytes of a number.
// Source: Kwon et al. 2023, "Efficient Memory Management for Large Language Model Serving with PagedAttention",
// arXiv:2309.06180, section 3, with the key-value heads of Ainslie et al. 2023, "GQA", arXiv:2305.13245.
uint64_t KvBytesPerToken(const ModelShape& shape, uint64_t kv_bytes);
// Returns the cache of a sequence, bytes, in whole blocks of tokens.
uint64_t KvBytesPerSequence(const ModelShape& shape, const ServingOptions& options);

// Returns the stored size of a weight, bytes. `is_of_layer`: the weight is in Weights::layer.
uint64_t StoredBytes(const Weight& weight, Quantization quantization, bool is_of_layer);

struct ServingMemory {
  uint64_t parameters = 0;
  Part weights;
  Part kv_cache;  // for options.sequences
  Part workspace;
  uint64_t sum_bytes = 0;
  uint64_t kv_bytes_per_token = 0;
  uint64_t kv_bytes_per_sequence = 0;      // in whole blocks of tokens
  std::optional<uint64_t> most_sequences;  // set with options.device_bytes
};

// InvalidArgument if the sum is too large to plan (64 PiB). `options` come from CheckServing(). Safe to call from any
// thread.
absl::StatusOr<ServingMemory> ServingMemoryOf(const ModelShape& shape, const ServingOptions& options);

}  // namespace vrambroker::plan

#endif  // VRAMBROKER_CLIENT_VRAMCTL_PLAN_SERVING_MEMORY_H_
