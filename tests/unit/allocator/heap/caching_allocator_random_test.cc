// SPDX-License-Identifier: Apache-2.0
//
// Random settings and operations: tests/support/heap_model.h finds no fault in any order. A failing sequence is shrunk
// before the report.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/support/heap_model.h"

namespace vrambroker {
namespace {

constexpr int kSeeds = 640;
constexpr int kOperations = 400;
constexpr int kShards = 8;

struct Case {
  HeapConfig config;
  std::vector<HeapOp> ops;
};

class Generator {
 public:
  explicit Generator(uint64_t seed) : random_(seed) {}

  Case Make() {
    Case made;
    made.config = {.options = Options(), .device_bytes = Pick({64_MiB, 256_MiB, 256_MiB, 1_GiB, 4_GiB})};
    const uint64_t streams = Pick({1, 2, 4});
    const bool fails = random_() % 4 == 0;
    for (int i = 0; i < kOperations; ++i) made.ops.push_back(Op(streams, fails));
    return made;
  }

 private:
  uint64_t Pick(std::vector<uint64_t> choices) { return choices[random_() % choices.size()]; }

  AllocatorOptions Options() {
    AllocatorOptions options;
    if (random_() % 4 == 0) options.large_segment_bytes = Pick({12_MiB, 40_MiB});
    options.max_non_split_rounding_bytes = options.large_segment_bytes;
    if (random_() % 2 == 0) options.max_split_bytes = options.large_segment_bytes + Pick({0, 1_MiB, 12_MiB, 80_MiB});
    if (random_() % 4 == 0) options.max_non_split_rounding_bytes += Pick({1_MiB, 30_MiB});
    if (random_() % 4 == 0) options.roundup_power2_divisions.fill(static_cast<uint32_t>(Pick({1, 2, 8})));
    if (random_() % 2 == 0) options.garbage_collection_threshold = 0.1 * static_cast<double>(random_() % 9 + 1);
    if (random_() % 3 == 0) options.per_process_memory_fraction = 0.1 * static_cast<double>(random_() % 11);
    options.reject_without_retry = random_() % 6 == 0;
    return options;
  }

  HeapOp Op(uint64_t streams, bool fails) {
    using Kind = HeapOp::Kind;
    const uint64_t dice = random_() % 1000;
    const Stream stream = random_() % streams;
    if (dice < 360) return {Kind::kAllocate, Bytes(), stream};
    if (dice < 460) return {Kind::kTryAllocate, Bytes(), stream};
    if (dice < 820) return {Kind::kFree, random_(), 0};
    if (dice < 900) return {Kind::kRecordStream, random_(), random_() % streams};
    if (dice < 915) return {Kind::kTick};
    if (dice < 930) return {Kind::kTrim, Pick({1, 40_MiB, SimulatedSource::kUnlimited}), Pick({0, 0, 1, 2, 5})};
    if (dice < 960) return {Kind::kFinish, random_() % 4, random_() % streams};
    if (dice < 966) return {Kind::kPoll};
    if (dice < 971) return {Kind::kEmptyCache};
    if (dice < 976) return {Kind::kSetLimit, Pick({0, 30_MiB, 100_MiB, CachingAllocator::kNoLimit})};
    if (dice < 982) return {Kind::kSetFraction, Pick({500, 1000, random_() % 1001})};
    if (dice < 988) {
      return {Kind::kDeviceLimit, Pick({0, 30_MiB, 100_MiB, SimulatedSource::kUnlimited, SimulatedSource::kUnlimited})};
    }
    if (dice < 992) return fails ? HeapOp{Kind::kFail, Pick({0, 0, random_()})} : HeapOp{Kind::kPoll};
    return {dice < 996 ? Kind::kResetPeaks : Kind::kResetTotals};
  }

  uint64_t Bytes() {
    switch (random_() % 6) {
      case 0:
        return random_() % 2048;
      case 1:
        return random_() % 1_MiB + 1;
      case 2:
        return random_() % 10_MiB + 1;
      case 3:
        return random_() % 40_MiB + 1;
      case 4:  // the edges
        return Pick({512, 1_MiB, 10_MiB, 11_MiB, 19_MiB, 20_MiB, 21_MiB, 32_MiB}) + random_() % 3 - 1;
      default:
        return 512 * (random_() % 8 + 1);
    }
  }

  std::mt19937_64 random_;
};

// The first fault; empty without a fault.
std::string Violation(const Case& tried, uint64_t* ooms = nullptr, uint64_t* deferred_frees = nullptr) {
  HeapModel model(tried.config);
  for (size_t i = 0; i < tried.ops.size(); ++i) {
    const std::string wrong = model.Do(tried.ops[i]);
    if (!wrong.empty()) return absl::StrCat("operation ", i, ": ", wrong);
  }
  if (ooms != nullptr) *ooms += model.ooms();
  if (deferred_frees != nullptr) *deferred_frees += model.deferred_frees();
  return model.End();
}

// Reduces the operations of a failing case as far as the case still fails.
Case Shrink(Case failing) {
  for (size_t chunk = failing.ops.size() / 2 + 1; chunk > 0; chunk /= 2) {
    for (size_t i = 0; i < failing.ops.size();) {
      Case smaller = failing;
      const auto begin = smaller.ops.begin() + static_cast<std::ptrdiff_t>(i);
      const size_t count = std::min(chunk, smaller.ops.size() - i);
      smaller.ops.erase(begin, begin + static_cast<std::ptrdiff_t>(count));
      if (Violation(smaller).empty()) {
        i += chunk;
      } else {
        failing = std::move(smaller);
      }
    }
  }
  return failing;
}

class CachingAllocatorRandomTest : public ::testing::TestWithParam<int> {};

TEST_P(CachingAllocatorRandomTest, HoldsItsPromises) {
  uint64_t ooms = 0, deferred_frees = 0;
  for (int seed = GetParam(); seed < kSeeds; seed += kShards) {
    const Case made = Generator(static_cast<uint64_t>(seed)).Make();
    if (Violation(made, &ooms, &deferred_frees).empty()) continue;
    const Case least = Shrink(made);
    std::string text;
    for (const HeapOp& op : least.ops) absl::StrAppend(&text, "\n", ToString(op));
    FAIL() << "seed " << seed << ", " << Violation(least) << "; settings \"" << FormatAllocConf(least.config.options)
           << "\", device of " << least.config.device_bytes << " bytes" << text;
  }
  EXPECT_GT(ooms, 100u) << "too few to mean anything";
  EXPECT_GT(deferred_frees, 100u) << "too few to mean anything";
}

INSTANTIATE_TEST_SUITE_P(Shards, CachingAllocatorRandomTest, ::testing::Range(0, kShards));

}  // namespace
}  // namespace vrambroker
