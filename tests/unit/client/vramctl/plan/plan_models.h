// SPDX-License-Identifier: Apache-2.0
//
// The config.json of well-known models, reduced to the numbers behind their size. Values come from the config.json
// files in the models' repositories on the Hugging Face Hub.
#ifndef VRAMBROKER_TESTS_UNIT_CLIENT_VRAMCTL_PLAN_PLAN_MODELS_H_
#define VRAMBROKER_TESTS_UNIT_CLIENT_VRAMCTL_PLAN_PLAN_MODELS_H_

namespace vrambroker::plan::models {

inline constexpr char kGpt2[] =
    R"({"model_type": "gpt2", "n_ctx": 1024, "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024,
        "vocab_size": 50257})";
// llm.c trains this model: the vocabulary is padded, and dropout is off.
inline constexpr char kGpt2OfLlmC[] =
    R"({"model_type": "gpt2", "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024, "vocab_size": 50304,
        "attn_pdrop": 0, "resid_pdrop": 0, "embd_pdrop": 0})";
inline constexpr char kGpt2Xl[] =
    R"({"model_type": "gpt2", "n_embd": 1600, "n_head": 25, "n_layer": 48, "n_positions": 1024, "vocab_size": 50257})";
// Brown et al. 2020, arXiv:2005.14165, table 2.1.
inline constexpr char kGpt3[] =
    R"({"model_type": "gpt2", "n_embd": 12288, "n_head": 96, "n_layer": 96, "n_positions": 2048, "vocab_size": 50257})";
// Korthikanti et al. 2022, table 3.
inline constexpr char kMtNlg[] =
    R"({"model_type": "gpt2", "n_embd": 20480, "n_head": 128, "n_layer": 105, "n_positions": 2048,
        "vocab_size": 51200})";
inline constexpr char kLlama7b[] =
    R"({"model_type": "llama", "hidden_size": 4096, "intermediate_size": 11008, "max_position_embeddings": 2048,
        "num_attention_heads": 32, "num_hidden_layers": 32, "vocab_size": 32000, "tie_word_embeddings": false})";
inline constexpr char kLlama3_8b[] =
    R"({"model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "max_position_embeddings": 8192,
        "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "vocab_size": 128256,
        "attention_bias": false, "tie_word_embeddings": false})";
inline constexpr char kLlama3_70b[] =
    R"({"model_type": "llama", "hidden_size": 8192, "intermediate_size": 28672, "max_position_embeddings": 131072,
        "num_attention_heads": 64, "num_hidden_layers": 80, "num_key_value_heads": 8, "vocab_size": 128256,
        "tie_word_embeddings": false})";
inline constexpr char kMistral7b[] =
    R"({"model_type": "mistral", "hidden_size": 4096, "intermediate_size": 14336, "max_position_embeddings": 32768,
        "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "sliding_window": 4096,
        "vocab_size": 32000, "tie_word_embeddings": false})";
inline constexpr char kQwen2_7b[] =
    R"({"model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944, "max_position_embeddings": 131072,
        "num_attention_heads": 28, "num_hidden_layers": 28, "num_key_value_heads": 4, "vocab_size": 152064,
        "attention_dropout": 0.0, "tie_word_embeddings": false})";
inline constexpr char kNeoX20b[] =
    R"({"model_type": "gpt_neox", "attention_probs_dropout_prob": 0, "hidden_dropout_prob": 0, "hidden_size": 6144,
        "intermediate_size": 24576, "max_position_embeddings": 2048, "num_attention_heads": 64, "num_hidden_layers": 44,
        "vocab_size": 50432, "tie_word_embeddings": false})";
inline constexpr char kBertLarge[] =
    R"({"model_type": "bert", "attention_probs_dropout_prob": 0.1, "hidden_dropout_prob": 0.1, "hidden_size": 1024,
        "intermediate_size": 4096, "max_position_embeddings": 512, "num_attention_heads": 16, "num_hidden_layers": 24,
        "type_vocab_size": 2, "vocab_size": 30522})";

}  // namespace vrambroker::plan::models

#endif  // VRAMBROKER_TESTS_UNIT_CLIENT_VRAMCTL_PLAN_PLAN_MODELS_H_
