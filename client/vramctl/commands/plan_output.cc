// SPDX-License-Identifier: Apache-2.0
#include "client/vramctl/commands/plan_output.h"

#include <cmath>
#include <cstdio>
#include <filesystem>
#include <system_error>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "allocator/base/bytes.h"
#include "allocator/replay/trace.h"
#include "client/vramctl/commands/snapshot_file.h"

namespace vrambroker::vramctl {
namespace {

constexpr size_t kMostConfigBytes = size_t{1} << 20;

absl::StatusOr<plan::ModelShape> ReadConfig(const PlanFlags& flags) {
  if (!(flags.params + flags.layers + flags.hidden + flags.heads + flags.kv_heads + flags.vocab).empty()) {
    return absl::InvalidArgumentError(
        "--config goes with none of --params, --layers, --hidden, --heads, --kv-heads, --vocab: the file says these");
  }
  const absl::StatusOr<std::string> text = ReadMaybeGzipped(flags.config);
  if (!text.ok()) return absl::InvalidArgumentError(absl::StrCat("--config: ", text.status().message()));
  if (text->size() > kMostConfigBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("--config: ", flags.config, ": ", text->size(), " bytes; a config.json has at most 1 MiB"));
  }
  absl::StatusOr<plan::ModelShape> shape = plan::ParseModelConfig(*text);
  if (!shape.ok()) {
    return absl::InvalidArgumentError(absl::StrCat("--config: ", flags.config, ": ", shape.status().message()));
  }
  return shape;
}

// Parses counts as in model names: "7B", "6.7B", "124M". Without a letter: a whole number.
absl::StatusOr<uint64_t> ParametersOf(const std::string& text) {
  constexpr absl::string_view kLetters = "KMBT";
  const size_t letter = text.empty() ? kLetters.npos : kLetters.find(absl::ascii_toupper(text.back()));
  if (letter == kLetters.npos) return NumberOf("--params", text);
  const std::string digits = text.substr(0, text.size() - 1);
  double number = 0;
  if (digits.find_first_not_of("0123456789.") != std::string::npos || !absl::SimpleAtod(digits, &number) ||
      number >= 1e6) {
    return absl::InvalidArgumentError(absl::StrCat("--params: \"", absl::Utf8SafeCHexEscape(text.substr(0, 40)),
                                                   "\"; accepted: a whole number, or one such as 124M, 6.7B"));
  }
  for (size_t i = 0; i <= letter; ++i) number *= 1000;
  return static_cast<uint64_t>(std::llround(number));
}

absl::StatusOr<uint64_t> AtLeastOne(const char* option, const std::string& text,
                                    const absl::StatusOr<uint64_t>& number) {
  if (!number.ok() || *number != 0 || text.empty()) return number;
  return absl::InvalidArgumentError(
      absl::StrCat(option, ": ", absl::Utf8SafeCHexEscape(text.substr(0, 40)), "; at least 1 is needed"));
}

}  // namespace

absl::StatusOr<uint64_t> NumberOf(const char* option, const std::string& text) {
  uint64_t number = 0;
  if (text.empty()) return number;
  if (text.find_first_not_of("0123456789") == std::string::npos && absl::SimpleAtoi(text, &number)) return number;
  return absl::InvalidArgumentError(absl::StrCat(option, ": \"", absl::Utf8SafeCHexEscape(text.substr(0, 40)),
                                                 "\"; a whole number below 2^64 is needed"));
}

absl::StatusOr<uint64_t> CountOf(const char* option, const std::string& text) {
  return AtLeastOne(option, text, NumberOf(option, text));
}

absl::StatusOr<ReplayConfig> PlanConfigOf(const ReplayFlags& flags) {
  absl::StatusOr<ReplayConfig> config = ReplayConfigOf(flags);
  if (config.ok() && config->device_bytes == 0) {
    return absl::InvalidArgumentError("--device-bytes: 0 B; a size above 0 is needed, as 80GiB");
  }
  return config;
}

absl::StatusOr<plan::ModelShape> ModelOf(const PlanFlags& flags) {
  absl::StatusOr<plan::ModelShape> shape;
  if (!flags.config.empty()) {
    shape = ReadConfig(flags);
  } else {
    plan::GivenNumbers given;
    const struct {
      const char* option;
      const std::string& text;
      uint64_t& number;
    } numbers[] = {{"--params", flags.params, given.parameters},   {"--layers", flags.layers, given.layers},
                   {"--hidden", flags.hidden, given.hidden},       {"--heads", flags.heads, given.heads},
                   {"--kv-heads", flags.kv_heads, given.kv_heads}, {"--vocab", flags.vocab, given.vocab}};
    bool is_any = false;
    for (const auto& [option, text, number] : numbers) {
      const absl::StatusOr<uint64_t> read =
          &text == &flags.params ? AtLeastOne(option, text, ParametersOf(text)) : CountOf(option, text);
      if (!read.ok()) return read.status();
      number = *read;
      is_any = is_any || !text.empty();
    }
    if (!is_any) {
      return absl::InvalidArgumentError(
          "which model? give --config FILE (a Hugging Face config.json), or --layers, --hidden, --heads and --vocab or "
          "--params");
    }
    shape = plan::ShapeOf(given);
  }
  if (!shape.ok()) return shape.status();
  for (const std::string& warning : shape->warnings) std::fprintf(stderr, "vramctl: %s\n", warning.c_str());
  return shape;
}

void WarnOfLength(const plan::ModelShape& shape, uint64_t seq) {
  if (shape.max_positions == 0 || seq <= shape.max_positions) return;
  std::fprintf(stderr,
               "vramctl: --seq %s is longer than the %s tokens that the model takes (max_position_embeddings)\n",
               absl::StrCat(seq).c_str(), absl::StrCat(shape.max_positions).c_str());
}

absl::Status CheckPlanOutput(const std::string& path, const std::vector<std::string>& inputs) {
  if (path.empty()) return absl::OkStatus();
  if (absl::Status status = CheckSnapshotPath(path); !status.ok()) return status;
  for (const std::string& input : inputs) {
    std::error_code none;  // ignores a missing file
    if (path != "-" && std::filesystem::equivalent(path, input, none)) {
      return absl::InvalidArgumentError(absl::StrCat("-o ", path, ": that is what is read; name another file"));
    }
  }
  return absl::OkStatus();
}

std::vector<std::string> RowOf(const plan::Part& part) {
  return {part.name, FormatBytes(part.bytes), part.formula};
}

nlohmann::ordered_json JsonOf(const plan::Part& part) {
  return {{"name", part.name}, {"bytes", part.bytes}, {"formula", part.formula}};
}

nlohmann::ordered_json JsonOf(const std::vector<plan::Part>& parts) {
  nlohmann::ordered_json json = nlohmann::ordered_json::array();
  for (const plan::Part& part : parts) json.push_back(JsonOf(part));
  return json;
}

std::string Described(const plan::ModelShape& shape) {
  return absl::StrCat(shape.model_type == "given" ? "a GPT" : shape.model_type, ", ", plan::ParametersOf(shape),
                      " parameters");
}

nlohmann::ordered_json JsonOf(const plan::ModelShape& shape) {
  return {{"model_type", shape.model_type},
          {"parameters", plan::ParametersOf(shape)},
          {"layers", shape.layers},
          {"hidden", shape.hidden},
          {"heads", shape.heads},
          {"kv_heads", shape.kv_heads},
          {"vocab", shape.vocab}};
}

}  // namespace vrambroker::vramctl
