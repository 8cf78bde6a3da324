// SPDX-License-Identifier: Apache-2.0
#include "client/vramctl/plan/model_config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_replace.h"
#include "client/vramctl/plan/bounded.h"
#include "tests/unit/client/vramctl/plan/plan_models.h"

namespace vrambroker::plan {
namespace {

using ::testing::HasSubstr;

TEST(BoundedTest, StopsInsteadOfOverflowing) {
  EXPECT_EQ(Product({3, 5, 7}), 105u);
  EXPECT_EQ(Product({}), 1u);
  EXPECT_EQ(Product({kTooLarge, kTooLarge, 0}), 0u);
  EXPECT_EQ(Product({uint64_t{1} << 40, uint64_t{1} << 40}), kTooLarge);
  EXPECT_EQ(Product({uint64_t{1} << 30, uint64_t{1} << 30, 3}), kTooLarge);
  EXPECT_EQ(Sum({1, 2, 3}), 6u);
  EXPECT_EQ(Sum({kTooLarge, kTooLarge, kTooLarge}), kTooLarge);
  EXPECT_EQ(DividedUp(7, 2), 4u);
  EXPECT_EQ(DividedUp(8, 2), 4u);
}

TEST(ModelConfigTest, ReadsTheFamilies) {
  const ModelShape llama = *ParseModelConfig(models::kLlama3_8b);
  EXPECT_EQ(llama.kv_heads, 8u);
  EXPECT_EQ(llama.head_dim, 128u);
  EXPECT_TRUE(llama.gated);
  EXPECT_FALSE(llama.hidden_dropout);
  EXPECT_TRUE(llama.warnings.empty());
  const ModelShape gpt2 = *ParseModelConfig(models::kGpt2);
  EXPECT_EQ(gpt2.kv_heads, gpt2.heads);
  EXPECT_EQ(gpt2.ffn, 4 * gpt2.hidden);
  EXPECT_TRUE(gpt2.hidden_dropout && gpt2.attention_dropout) << "0.1 is the default";
  EXPECT_FALSE(ParseModelConfig(models::kGpt2OfLlmC)->hidden_dropout);
  EXPECT_FALSE(ParseModelConfig(models::kBertLarge)->has_output_layer);
  EXPECT_TRUE(ParseModelConfig(models::kQwen2_7b)->qkv_bias);
  EXPECT_FALSE(ParseModelConfig(models::kNeoX20b)->tied_embeddings);
}

// A number missing in the file comes from Hugging Face's class of the model.
TEST(ModelConfigTest, MissingNumbersAreThoseOfTheClass) {
  const std::string mistral = absl::StrReplaceAll(models::kMistral7b, {{"num_key_value_heads", "unknown"}});
  ASSERT_NE(mistral, models::kMistral7b);
  EXPECT_EQ(ParseModelConfig(mistral)->kv_heads, 8u);
  const std::string qwen3 = absl::StrReplaceAll(models::kQwen2_7b, {{"qwen2", "qwen3"}});
  ASSERT_NE(qwen3, models::kQwen2_7b);
  EXPECT_EQ(ParseModelConfig(qwen3)->head_dim, 128u);
  EXPECT_EQ(ParseModelConfig(models::kLlama7b)->kv_heads, 32u);
}

// Each case changes LLaMA-7B's file.
TEST(ModelConfigTest, SaysWhatIsWrong) {
  const std::vector<std::pair<std::pair<std::string, std::string>, std::string>> cases = {
      {{R"("llama")", R"("mamba")"}, R"("model_type" is "mamba"; known are bert, gpt2)"},
      {{R"("llama")", R"("\u0001")"}, R"("model_type" is "\x01")"},
      {{R"("llama")", "3"}, R"("model_type" is 3; a name is needed, one of bert, gpt2)"},
      {{R"("llama")", R"(["llama"])"}, R"("model_type" is ["llama"]; a name)"},
      {{R"("model_type")", R"("type")"}, R"("model_type" is missing; known are)"},
      {{R"("hidden_size")", R"("hidden")"}, R"("hidden_size" is missing)"},
      {{R"("vocab_size")", R"("vocab")"}, R"("vocab_size" is missing)"},
      {{"11008", "-1"}, R"("intermediate_size" is -1; a whole number from 1 to 1048576 is needed)"},
      {{"11008", "0"}, R"("intermediate_size" is 0; a whole number)"},
      {{"11008", "1.5"}, R"("intermediate_size" is 1.5; a whole number)"},
      {{"11008", R"("many")"}, R"("intermediate_size" is "many"; a whole number)"},
      {{"11008", "1e30"}, R"("intermediate_size" is 1e+30; a whole number)"},
      {{"11008", "99999999999999999999999"}, R"("intermediate_size" is 9.999999999999999e+22; a whole number)"},
      {{"11008", "18446744073709551615"}, R"("intermediate_size" is 18446744073709551615; a whole number)"},
      {{"\"num_hidden_layers\": 32", "\"num_hidden_layers\": 513"}, R"("num_hidden_layers" is 513; a whole number)"},
      {{"\"hidden_size\": 4096", "\"hidden_size\": 4095"}, "a hidden size of 4095 cannot be divided among 32 heads"},
      {{"32000", R"(32000, "num_key_value_heads": 5)"}, "32 heads cannot be divided among 5 key and value heads"},
      {{"32000", R"(32000, "attention_dropout": 2)"}, R"("attention_dropout" is 2; a number from 0 to 1 is needed)"},
      {{"false", "1"}, R"("tie_word_embeddings" is 1; true or false is needed)"},
      {{"32000", "16777216, \"head_dim\": 1048576"}, "more than 2^44 parameters"},
      {{"}", ""}, "this is not JSON"},
      {{"{", "[{"}, "this is not JSON"},
  };
  ASSERT_EQ(ParseModelConfig(models::kLlama7b).status(), absl::OkStatus());
  for (const auto& [change, message] : cases) {
    const std::string text = absl::StrReplaceAll(models::kLlama7b, {{change.first, change.second}});
    ASSERT_NE(text, models::kLlama7b) << change.first;
    const absl::Status status = ParseModelConfig(text).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << text;
    EXPECT_THAT(std::string(status.message()), HasSubstr(message));
  }
  EXPECT_THAT(std::string(ParseModelConfig("").status().message()), HasSubstr("this is not JSON"));
  EXPECT_THAT(std::string(ParseModelConfig("[]").status().message()), HasSubstr("this is not a JSON object"));
  const std::string deep = std::string(100'000, '[') + std::string(100'000, ']');
  EXPECT_THAT(std::string(ParseModelConfig(deep).status().message()), HasSubstr("nested deeper than 64"));
}

TEST(ModelConfigTest, WarnsOfWhatItLeavesOut) {
  const std::string experts = absl::StrReplaceAll(models::kMistral7b, {{"32000", R"(32000, "num_local_experts": 8)"}});
  EXPECT_THAT(ParseModelConfig(experts)->warnings, ::testing::ElementsAre(HasSubstr("taken as dense")));
}

TEST(ModelConfigTest, AFewNumbersAreEnough) {
  const GivenNumbers gpt2 = {.layers = 12, .hidden = 768, .heads = 12, .vocab = 50257};
  // The count lacks the table of positions, because the given numbers do not include its size.
  EXPECT_EQ(ParametersOf(*ShapeOf(gpt2)), 124439808u - 1024 * 768);
  GivenNumbers exact = gpt2;
  exact.parameters = 124439808;
  EXPECT_EQ(ParametersOf(*ShapeOf(exact)), 124439808u);
  const Weights weights = WeightsOf(*ShapeOf(exact));
  EXPECT_EQ(ElementsOf(weights.embeddings) + 12 * ElementsOf(weights.layer) + ElementsOf(weights.head), 124439808u);

  const std::vector<std::pair<GivenNumbers, std::string>> cases = {
      {{.layers = 12, .hidden = 768, .heads = 12}, "--vocab is missing"},
      {{.layers = 12, .hidden = 768, .vocab = 5}, "--heads is missing"},
      {{.hidden = 768, .heads = 12, .vocab = 5}, "--layers is missing"},
      {{.layers = 600, .hidden = 768, .heads = 12, .vocab = 5}, "--layers: 600 is above 512"},
      {{.layers = 12, .hidden = 768, .heads = 7, .vocab = 5}, "cannot be divided among 7 heads"},
      {{.parameters = 1000, .layers = 12, .hidden = 768, .heads = 12}, "--params: 1000 is less than the 85056000"},
      {{.parameters = ~uint64_t{0}, .layers = 1, .hidden = 64, .heads = 1}, "--params: 18446744073709551615 is above"},
  };
  for (const auto& [given, message] : cases) {
    EXPECT_THAT(std::string(ShapeOf(given).status().message()), HasSubstr(message));
  }
}

}  // namespace
}  // namespace vrambroker::plan
