// SPDX-License-Identifier: Apache-2.0
#include "client/vramctl/plan/serving_memory.h"

#include <algorithm>
#include <array>
#include <string>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "client/vramctl/plan/bounded.h"
#include "client/vramctl/plan/step_parts.h"

namespace vrambroker::plan {
namespace {

constexpr uint64_t kTokensOfBlock = 16;  // vLLM's block size by default (Kwon et al. 2023, section 7.2)
constexpr uint64_t kGroup = 128;         // weights sharing a scale: GPTQ's and AWQ's usual group size

struct WeightFormat {
  const char* name;
  Quantization quantization;
  const char* formula;
};
constexpr std::array<WeightFormat, 5> kFormats = {
    {{"fp32", Quantization::kFp32, "4 B a parameter"},
     {"bf16", Quantization::kBf16, "2 B a parameter (fp16 is the same)"},
     {"fp8", Quantization::kFp8, "1 B for matrices of layers, 2 B for the rest"},
     {"int8", Quantization::kInt8, "1 B and a 2 B scale a row for matrices of layers, 2 B for the rest"},
     {"int4", Quantization::kInt4,
      "0.5 B, a 2 B scale and a 0.5 B zero for 128 of a row, for matrices of layers; 2 B for the rest"}}};

}  // namespace

absl::StatusOr<Quantization> ParseQuantization(absl::string_view name) {
  if (name == "fp16") return Quantization::kBf16;
  std::string known;
  for (const WeightFormat& one : kFormats) {
    if (name == one.name) return one.quantization;
    absl::StrAppend(&known, known.empty() ? "" : ", ", one.name);
  }
  return absl::InvalidArgumentError(
      absl::StrCat("\"", absl::Utf8SafeCHexEscape(name.substr(0, 40)), "\"; accepted: ", known, ", fp16"));
}

std::vector<std::string> QuantizationNames() {
  std::vector<std::string> names = {"fp16"};
  for (const WeightFormat& one : kFormats) names.emplace_back(one.name);
  return names;
}

const char* NameOf(Quantization quantization) {
  return kFormats[static_cast<size_t>(quantization)].name;
}

absl::StatusOr<ServingOptions> CheckServing(const ModelShape& shape, const ServingOptions& options) {
  if (shape.model_type == "bert") {
    return absl::InvalidArgumentError("a bert keeps no keys and values: it generates no text");
  }
  const absl::StatusOr<TrainingOptions> sized = CheckTraining(shape, {.seq = options.seq});
  if (!sized.ok()) return sized.status();
  ServingOptions checked = options;
  checked.seq = sized->seq;
  if (checked.prefill_tokens == 0) checked.prefill_tokens = checked.seq;
  if (checked.sequences < 1 || checked.sequences > kMostSequences) {
    return absl::InvalidArgumentError(
        absl::StrCat("--sequences: ", checked.sequences, "; accepted: 1 to ", kMostSequences));
  }
  if (checked.prefill_tokens > kMostPositions) {
    return absl::InvalidArgumentError(
        absl::StrCat("--prefill-tokens: ", checked.prefill_tokens, "; accepted: 1 to ", kMostPositions));
  }
  if (!(checked.utilization > 0 && checked.utilization <= 1)) {
    return absl::InvalidArgumentError("--utilization: accepted are numbers above 0, up to 1");
  }
  return checked;
}

uint64_t StoredBytes(const Weight& weight, Quantization quantization, bool is_of_layer) {
  const uint64_t elements = Product({weight.rows, weight.columns});
  const bool is_quantized = weight.is_linear && is_of_layer;
  switch (quantization) {
    case Quantization::kFp32:
      return Product({elements, 4});
    case Quantization::kBf16:
      return Product({elements, 2});
    case Quantization::kFp8:
      return Product({elements, is_quantized ? uint64_t{1} : 2});
    case Quantization::kInt8:
      return is_quantized ? Sum({elements, Product({weight.rows, 2})}) : Product({elements, 2});
    case Quantization::kInt4: {
      if (!is_quantized) return Product({elements, 2});
      const uint64_t groups = Product({weight.rows, DividedUp(weight.columns, kGroup)});
      return Sum({DividedUp(elements, 2), Product({groups, 2}), DividedUp(groups, 2)});
    }
  }
  return 0;
}

uint64_t KvBytesPerToken(const ModelShape& shape, uint64_t kv_bytes) {
  return Product({2, shape.layers, shape.kv_heads, shape.head_dim, kv_bytes});
}

uint64_t KvBytesPerSequence(const ModelShape& shape, const ServingOptions& options) {
  return Product({KvBytesPerToken(shape, options.kv_bytes), DividedUp(options.seq, kTokensOfBlock), kTokensOfBlock});
}

absl::StatusOr<ServingMemory> ServingMemoryOf(const ModelShape& shape, const ServingOptions& options) {
  ServingMemory memory;
  memory.parameters = ParametersOf(shape);
  const Weights weights = WeightsOf(shape);
  uint64_t stored = 0;
  const auto store = [&](const std::vector<Weight>& some, bool are_of_layer, uint64_t count) {
    for (const Weight& weight : some) {
      stored = Sum({stored, Product({StoredBytes(weight, options.quantization, are_of_layer), count})});
    }
  };
  store(weights.embeddings, false, 1);
  store(weights.layer, true, shape.layers);
  store(weights.head, false, 1);
  memory.weights = {absl::StrCat("weights (", NameOf(options.quantization), ")"), stored,
                    kFormats[static_cast<size_t>(options.quantization)].formula};

  memory.kv_bytes_per_token = KvBytesPerToken(shape, options.kv_bytes);
  memory.kv_bytes_per_sequence = KvBytesPerSequence(shape, options);
  memory.kv_cache = {"keys and values", Product({memory.kv_bytes_per_sequence, options.sequences}),
                     absl::StrCat("2 x ", shape.layers, " layers x ", shape.kv_heads, " heads x ", shape.head_dim,
                                  " x ", options.kv_bytes, " B a token, in blocks of 16 tokens (Kwon 2023)")};

  // Layers run sequentially: each needs its input, its queries, keys and values, its feed-forward network. The logits
  // in fp32 may need more.
  const uint64_t wide = Product({shape.ffn, shape.gated ? uint64_t{2} : 1});
  const uint64_t heads = Product({shape.heads + 2 * shape.kv_heads, shape.head_dim});
  const uint64_t layer = Product({options.prefill_tokens, Sum({2 * shape.hidden, std::max(wide, heads)}), 2});
  const uint64_t logits = Product({options.sequences, shape.vocab, 4});
  memory.workspace = {"workspace", Sum({std::max(layer, logits), kLibraryWorkspace}),
                      absl::StrCat("one layer's tensors for ", options.prefill_tokens,
                                   " tokens, or the logits; matrix library 8.1 MiB")};
  memory.sum_bytes = Sum({memory.weights.bytes, memory.kv_cache.bytes, memory.workspace.bytes});
  if (memory.sum_bytes >= kTooLarge) {
    return absl::InvalidArgumentError("that needs more than 64 PiB; make the model, --seq or --sequences smaller");
  }
  if (options.device_bytes != 0) {
    const auto usable = static_cast<uint64_t>(static_cast<double>(options.device_bytes) * options.utilization);
    const uint64_t fixed = Sum({memory.weights.bytes, kLibraryWorkspace});
    const uint64_t left = usable > fixed ? usable - fixed : 0;
    // The cache leaves room for the larger of two: a layer's tensors, or a row of logits for each sequence.
    const uint64_t sequence = std::max<uint64_t>(1, memory.kv_bytes_per_sequence);
    const uint64_t beside_layer = (left > layer ? left - layer : 0) / sequence;
    const uint64_t beside_logits = left / Sum({sequence, Product({shape.vocab, 4})});
    memory.most_sequences = std::min(beside_layer, beside_logits);
  }
  return memory;
}

}  // namespace vrambroker::plan
