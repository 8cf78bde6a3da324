// SPDX-License-Identifier: Apache-2.0
#include "client/vramctl/plan/model_config.h"

#include <cmath>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/vramctl/plan/bounded.h"

namespace vrambroker::plan {
namespace {

using Json = nlohmann::json;

constexpr char kKnown[] = "bert, gpt2, gpt_neox, llama, mistral, qwen2, qwen3";
constexpr int kMostDepth = 64;  // nesting of arrays and objects

std::string Shown(const Json& value) {
  constexpr size_t kMost = 40;
  std::string text = value.dump(-1, ' ', /*ensure_ascii=*/true, Json::error_handler_t::replace);
  if (text.size() > kMost) text = text.substr(0, kMost) + "...";
  return text;
}

// Reads the keys of a config.json; keeps the first fault.
class Reader {
 public:
  explicit Reader(const Json& json) : json_(json) {}

  // Returns the number at the first present key of `keys`. Without any: returns 0, and a fault if `required`.
  uint64_t Number(std::initializer_list<const char*> keys, uint64_t most, bool required = true) {
    for (const char* key : keys) {
      const auto found = json_.find(key);
      if (found == json_.end() || found->is_null()) continue;
      const bool is_whole = found->is_number_unsigned() && found->get<uint64_t>() >= 1;
      if (is_whole && found->get<uint64_t>() <= most) return found->get<uint64_t>();
      Fault(absl::StrFormat("\"%s\" is %s; a whole number from 1 to %d is needed", key, Shown(*found), most));
      return 0;
    }
    if (required) Fault(absl::StrFormat("\"%s\" is missing", *keys.begin()));
    return 0;
  }

  bool Flag(const char* key, bool otherwise) {
    const auto found = json_.find(key);
    if (found == json_.end() || found->is_null()) return otherwise;
    if (!found->is_boolean()) {
      Fault(absl::StrFormat("\"%s\" is %s; true or false is needed", key, Shown(*found)));
      return otherwise;
    }
    return found->get<bool>();
  }

  // Whether a dropout probability is above 0.
  bool Dropout(std::initializer_list<const char*> keys, double otherwise) {
    double rate = otherwise;
    for (const char* key : keys) {
      const auto found = json_.find(key);
      if (found == json_.end() || found->is_null()) continue;
      if (!found->is_number() || found->get<double>() < 0 || found->get<double>() > 1) {
        Fault(absl::StrFormat("\"%s\" is %s; a number from 0 to 1 is needed", key, Shown(*found)));
        return false;
      }
      rate = found->get<double>();
      break;
    }
    return rate > 0;
  }

  absl::Status status() const { return status_; }

 private:
  void Fault(const std::string& text) {
    if (status_.ok()) status_ = absl::InvalidArgumentError(text);
  }

  const Json& json_;
  absl::Status status_;
};

absl::Status CheckHeads(const ModelShape& shape, bool has_head_dim) {
  if (!has_head_dim && shape.hidden % shape.heads != 0) {
    return absl::InvalidArgumentError(absl::StrCat("a hidden size of ", shape.hidden, " cannot be divided among ",
                                                   shape.heads, " heads: one of the two numbers is wrong"));
  }
  if (shape.heads % shape.kv_heads != 0) {
    return absl::InvalidArgumentError(absl::StrCat(shape.heads, " heads cannot be divided among ", shape.kv_heads,
                                                   " key and value heads: one of the two numbers is wrong"));
  }
  return absl::OkStatus();
}

void ReadLlamaLike(Reader& read, const Json& json, ModelShape& shape) {
  const std::string& type = shape.model_type;
  shape.ffn = read.Number({"intermediate_size"}, kMostWidth);
  shape.gated = true;
  shape.tied_embeddings = read.Flag("tie_word_embeddings", false);
  const bool attention_bias = read.Flag("attention_bias", false);
  shape.qkv_bias = attention_bias || type == "qwen2";
  shape.output_bias = attention_bias;
  shape.mlp_bias = read.Flag("mlp_bias", false);
  shape.qk_norm = type == "qwen3";
  shape.attention_dropout = read.Dropout({"attention_dropout"}, 0);
  if (json.contains("num_local_experts") || json.contains("num_experts")) {
    shape.warnings.emplace_back("The experts of a mixture are not counted: the model is taken as dense.");
  }
  if (json.contains("quantization_config")) {
    shape.warnings.emplace_back("quantization_config is not read: say --precision, or --quantization of plan serve.");
  }
}

void ReadGpt2(Reader& read, ModelShape& shape) {
  shape.ffn = read.Number({"n_inner"}, kMostWidth, /*required=*/false);
  if (shape.ffn == 0) shape.ffn = 4 * shape.hidden;
  shape.learned_positions = shape.max_positions;
  shape.tied_embeddings = read.Flag("tie_word_embeddings", true);
  shape.fused_qkv = shape.norm_bias = shape.qkv_bias = shape.output_bias = shape.mlp_bias = true;
  shape.hidden_dropout = read.Dropout({"resid_pdrop"}, 0.1);
  shape.attention_dropout = read.Dropout({"attn_pdrop"}, 0.1);
}

void ReadNeoX(Reader& read, ModelShape& shape) {
  shape.ffn = read.Number({"intermediate_size"}, kMostWidth);
  shape.tied_embeddings = read.Flag("tie_word_embeddings", false);
  shape.fused_qkv = shape.norm_bias = shape.mlp_bias = true;
  shape.qkv_bias = shape.output_bias = read.Flag("attention_bias", true);
  shape.hidden_dropout = read.Dropout({"hidden_dropout", "hidden_dropout_prob"}, 0);
  shape.attention_dropout = read.Dropout({"attention_dropout", "attention_probs_dropout_prob"}, 0);
}

void ReadBert(Reader& read, ModelShape& shape) {
  shape.ffn = read.Number({"intermediate_size"}, kMostWidth);
  shape.token_types = read.Number({"type_vocab_size"}, kMostVocabulary, /*required=*/false);
  if (shape.token_types == 0) shape.token_types = 2;
  shape.learned_positions = shape.max_positions;
  shape.norm_bias = shape.qkv_bias = shape.output_bias = shape.mlp_bias = true;
  shape.final_norm = shape.has_output_layer = false;
  shape.pooler = true;
  shape.hidden_dropout = read.Dropout({"hidden_dropout_prob"}, 0.1);
  shape.attention_dropout = read.Dropout({"attention_probs_dropout_prob"}, 0.1);
}

}  // namespace

absl::StatusOr<ModelShape> ParseModelConfig(absl::string_view text) {
  int depth = 0;
  bool too_deep = false;
  const auto watch_depth = [&](int at, Json::parse_event_t, Json&) {
    depth = at;
    too_deep = too_deep || depth > kMostDepth;
    return !too_deep;
  };
  Json json;
  try {
    json = Json::parse(text.begin(), text.end(), watch_depth);
  } catch (const Json::parse_error& error) {
    return absl::InvalidArgumentError(absl::StrCat("byte ", error.byte, ": this is not JSON"));
  } catch (const Json::exception& error) {  // a number too large for any type
    return absl::InvalidArgumentError(absl::StrCat("this is not JSON: ", error.what()));
  }
  if (too_deep) return absl::InvalidArgumentError(absl::StrCat("nested deeper than ", kMostDepth, " levels"));
  if (!json.is_object())
    return absl::InvalidArgumentError("this is not a JSON object; a model's config.json is needed");

  ModelShape shape;
  const auto type = json.find("model_type");
  if (type == json.end()) {
    return absl::InvalidArgumentError(absl::StrCat("\"model_type\" is missing; known are ", kKnown));
  }
  if (!type->is_string()) {
    return absl::InvalidArgumentError(
        absl::StrCat("\"model_type\" is ", Shown(*type), "; a name is needed, one of ", kKnown));
  }
  shape.model_type = type->get<std::string>();
  const std::string& name = shape.model_type;
  const bool is_llama = name == "llama" || name == "mistral" || name == "qwen2" || name == "qwen3";
  if (!is_llama && name != "gpt2" && name != "gpt_neox" && name != "bert") {
    return absl::InvalidArgumentError(
        absl::StrCat("\"model_type\" is \"", absl::Utf8SafeCHexEscape(name.substr(0, 40)), "\"; known are ", kKnown,
                     ". For another one leave --config out and give --params, --layers, --hidden, --heads and "
                     "--vocab"));
  }

  Reader read(json);
  shape.layers = read.Number({"num_hidden_layers", "n_layer"}, kMostLayers);
  shape.hidden = read.Number({"hidden_size", "n_embd"}, kMostWidth);
  shape.heads = read.Number({"num_attention_heads", "n_head"}, kMostWidth);
  shape.vocab = read.Number({"vocab_size"}, kMostVocabulary);
  const bool needs_positions = name == "gpt2" || name == "bert";
  shape.max_positions =
      read.Number({"max_position_embeddings", "n_positions", "n_ctx"}, kMostPositions, needs_positions);
  shape.kv_heads = is_llama ? read.Number({"num_key_value_heads"}, kMostWidth, /*required=*/false) : 0;
  shape.head_dim = is_llama ? read.Number({"head_dim"}, kMostWidth, /*required=*/false) : 0;
  if (is_llama) ReadLlamaLike(read, json, shape);
  if (name == "gpt2") ReadGpt2(read, shape);
  if (name == "gpt_neox") ReadNeoX(read, shape);
  if (name == "bert") ReadBert(read, shape);
  if (!read.status().ok()) return read.status();

  // Hugging Face's classes have defaults of their own for keys missing in the file.
  if (shape.kv_heads == 0 && name == "mistral") shape.kv_heads = 8;
  if (shape.head_dim == 0 && name == "qwen3") shape.head_dim = 128;
  if (shape.kv_heads == 0) shape.kv_heads = shape.heads;
  const bool has_head_dim = shape.head_dim != 0;
  if (absl::Status heads = CheckHeads(shape, has_head_dim); !heads.ok()) return heads;
  if (!has_head_dim) shape.head_dim = shape.hidden / shape.heads;
  if (ParametersOf(shape) > kMostParameters) return absl::InvalidArgumentError("more than 2^44 parameters");
  return shape;
}

absl::StatusOr<ModelShape> ShapeOf(const GivenNumbers& given) {
  const auto check = [](const char* option, uint64_t value, uint64_t most, bool required) -> absl::Status {
    if (value == 0 && required) {
      return absl::InvalidArgumentError(
          absl::StrCat(option,
                       " is missing; without --config, --layers, --hidden and --heads are needed, and --params "
                       "or --vocab"));
    }
    if (value <= most) return absl::OkStatus();
    return absl::InvalidArgumentError(absl::StrCat(option, ": ", value, " is above ", most));
  };
  absl::Status status = check("--layers", given.layers, kMostLayers, true);
  status.Update(check("--hidden", given.hidden, kMostWidth, true));
  status.Update(check("--heads", given.heads, kMostWidth, true));
  status.Update(check("--kv-heads", given.kv_heads, kMostWidth, false));
  status.Update(check("--vocab", given.vocab, kMostVocabulary, given.parameters == 0));
  status.Update(check("--params", given.parameters, kMostParameters, false));
  if (!status.ok()) return status;

  ModelShape shape;
  shape.model_type = "given";
  shape.layers = given.layers;
  shape.hidden = given.hidden;
  shape.heads = given.heads;
  shape.kv_heads = given.kv_heads == 0 ? given.heads : given.kv_heads;
  shape.ffn = 4 * given.hidden;
  shape.vocab = given.vocab;
  shape.has_output_layer = given.vocab != 0;
  shape.tied_embeddings = true;
  shape.fused_qkv = shape.norm_bias = shape.qkv_bias = shape.output_bias = shape.mlp_bias = true;
  shape.hidden_dropout = shape.attention_dropout = true;
  if (absl::Status heads = CheckHeads(shape, /*has_head_dim=*/false); !heads.ok()) return heads;
  shape.head_dim = shape.hidden / shape.heads;
  const Weights weights = WeightsOf(shape);
  const uint64_t of_layers = Sum({Product({shape.layers, ElementsOf(weights.layer)}), ElementsOf(weights.head)});
  if (given.parameters != 0 && given.parameters < of_layers) {
    return absl::InvalidArgumentError(absl::StrCat("--params: ", given.parameters, " is less than the ", of_layers,
                                                   " of the layers alone; --layers or --hidden is wrong, or the model "
                                                   "is not a GPT: give its config.json"));
  }
  shape.given_parameters = given.parameters;
  if (ParametersOf(shape) > kMostParameters) return absl::InvalidArgumentError("more than 2^44 parameters");
  return shape;
}

}  // namespace vrambroker::plan
