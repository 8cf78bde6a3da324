// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "client/vramctl/plan/training_memory.h"

namespace vrambroker::plan {
namespace {

template <class T>
using Name = std::pair<const char*, T>;

constexpr std::array<Name<Precision>, 5> kPrecisions = {{{"bf16-mixed", Precision::kBf16Mixed},
                                                         {"fp16-mixed", Precision::kFp16Mixed},
                                                         {"bf16", Precision::kBf16},
                                                         {"fp32", Precision::kFp32},
                                                         {"fp8-mixed", Precision::kFp8Mixed}}};
constexpr std::array<Name<Optimizer>, 4> kOptimizers = {{{"adamw", Optimizer::kAdamW},
                                                         {"adam8bit", Optimizer::kAdam8bit},
                                                         {"sgd", Optimizer::kSgd},
                                                         {"adafactor", Optimizer::kAdafactor}}};
constexpr std::array<Name<Checkpoint>, 3> kCheckpoints = {
    {{"none", Checkpoint::kNone}, {"full", Checkpoint::kFull}, {"selective", Checkpoint::kSelective}}};

template <class T, size_t kCount>
std::vector<std::string> All(const std::array<Name<T>, kCount>& names) {
  std::vector<std::string> all;
  all.reserve(kCount);
  for (const auto& [name, value] : names) all.emplace_back(name);
  return all;
}

template <class T, size_t kCount>
absl::StatusOr<T> Parse(const std::array<Name<T>, kCount>& names, absl::string_view given) {
  for (const auto& [name, value] : names) {
    if (given == name) return value;
  }
  return absl::InvalidArgumentError(absl::StrCat("\"", absl::Utf8SafeCHexEscape(given.substr(0, 40)),
                                                 "\"; accepted: ", absl::StrJoin(All(names), ", ")));
}

template <class T, size_t kCount>
const char* Find(const std::array<Name<T>, kCount>& names, T wanted) {
  for (const auto& [name, value] : names) {
    if (value == wanted) return name;
  }
  return "";
}

}  // namespace

std::vector<std::string> PrecisionNames() {
  return All(kPrecisions);
}
std::vector<std::string> OptimizerNames() {
  return All(kOptimizers);
}
std::vector<std::string> CheckpointNames() {
  return All(kCheckpoints);
}
absl::StatusOr<Precision> ParsePrecision(absl::string_view name) {
  return Parse(kPrecisions, name);
}
absl::StatusOr<Optimizer> ParseOptimizer(absl::string_view name) {
  return Parse(kOptimizers, name);
}
absl::StatusOr<Checkpoint> ParseCheckpoint(absl::string_view name) {
  return Parse(kCheckpoints, name);
}
const char* NameOf(Precision precision) {
  return Find(kPrecisions, precision);
}
const char* NameOf(Optimizer optimizer) {
  return Find(kOptimizers, optimizer);
}
const char* NameOf(Checkpoint checkpoint) {
  return Find(kCheckpoints, checkpoint);
}

absl::StatusOr<TrainingOptions> CheckTraining(const ModelShape& shape, const TrainingOptions& options) {
  constexpr uint64_t kDefaultSeq = 2048;
  constexpr uint64_t kMostRank = 65536;
  TrainingOptions checked = options;
  if (checked.seq == 0) {
    checked.seq = shape.max_positions == 0 ? kDefaultSeq : std::min(kDefaultSeq, shape.max_positions);
  }
  const auto check = [](const char* option, uint64_t value, uint64_t least, uint64_t most) -> absl::Status {
    if (value >= least && value <= most) return absl::OkStatus();
    return absl::InvalidArgumentError(absl::StrCat(option, ": ", value, "; accepted: ", least, " to ", most));
  };
  absl::Status status = check("--batch", checked.batch, 1, kMostBatch);
  status.Update(check("--seq", checked.seq, 1, kMostPositions));
  status.Update(check("--zero", checked.zero_stage, 0, 3));
  status.Update(check("--gpus", checked.gpus, 1, kMostGpus));
  status.Update(check("--lora", checked.lora_rank, 0, kMostRank));
  if (status.ok() && checked.zero_stage != 0 && checked.gpus == 1) {
    status = absl::InvalidArgumentError("--zero partitions among several GPUs; say how many with --gpus");
  }
  if (status.ok() && checked.zero_stage == 0 && checked.gpus != 1) {
    status = absl::InvalidArgumentError("--gpus is for --zero; without it each GPU holds everything");
  }
  if (status.ok() && checked.eager && checked.flash) {
    status = absl::InvalidArgumentError("--eager is without fused kernels, and --flash is one: give one of the two");
  }
  if (!status.ok()) return status;
  return checked;
}

}  // namespace vrambroker::plan
