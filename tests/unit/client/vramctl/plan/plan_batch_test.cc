// SPDX-License-Identifier: Apache-2.0
//
// The largest batch for a device, against replays of every batch.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "allocator/base/bytes.h"
#include "allocator/replay/replay.h"
#include "client/vramctl/plan/largest_batch.h"
#include "client/vramctl/plan/step_trace.h"
#include "tests/unit/client/vramctl/plan/plan_models.h"

namespace vrambroker::plan {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

constexpr Checkpoint kWays[] = {Checkpoint::kNone, Checkpoint::kSelective, Checkpoint::kFull};

bool Fits(const ModelShape& shape, TrainingOptions options, uint64_t batch, const ReplayConfig& config) {
  options.batch = batch;
  return SummarizeReplay(StepTrace(shape, options), config).ooms == 0;
}

// Finds the largest batch by replays of each batch, while half of the formulas' peak fits on the device.
LargestBatch BruteForce(const ModelShape& shape, TrainingOptions options, const ReplayConfig& config) {
  LargestBatch largest;
  std::vector<uint64_t> refused;
  for (options.batch = 1; TrainingMemoryOf(shape, options)->peak_bytes / 2 <= config.device_bytes; ++options.batch) {
    if (!Fits(shape, options, options.batch, config)) {
      refused.push_back(options.batch);
      continue;
    }
    largest.batch = options.batch;
    largest.smaller_refused = refused;
  }
  return largest;
}

TEST(LargestBatchTest, OneMoreDoesNotFit) {
  const ModelShape shape = *ParseModelConfig(models::kGpt2);
  const ReplayConfig config = {.device_bytes = 16_GiB};
  for (const Checkpoint checkpoint : kWays) {
    const TrainingOptions options = {.seq = 1024, .checkpoint = checkpoint};
    const LargestBatch largest = FindLargestBatch(shape, options, config);
    ASSERT_GT(largest.batch, 0u);
    EXPECT_TRUE(largest.is_exact);
    EXPECT_TRUE(Fits(shape, options, largest.batch, config));
    EXPECT_FALSE(Fits(shape, options, largest.batch + 1, config));
  }
  const LargestBatch none = FindLargestBatch(shape, {.seq = 1024}, {.device_bytes = 1_GiB});
  EXPECT_EQ(none.batch, 0u);
  EXPECT_TRUE(none.is_exact);
  EXPECT_THAT(none.smaller_refused, IsEmpty());
}

// Bisection assumes that all batches below a fitting batch fit, too. Bisection stopped at 14, 14 and 11 in these cases,
// and gave 8 without a word about 7.
TEST(LargestBatchTest, SmallerBatchesNeedNotFit) {
  const ModelShape shape = *ParseModelConfig(models::kGpt2);
  const auto find = [&](TrainingOptions options, uint64_t device_bytes) {
    options.seq = 512;
    return FindLargestBatch(shape, options, {.device_bytes = device_bytes});
  };
  const LargestBatch selective = find({.checkpoint = Checkpoint::kSelective}, 8_GiB);
  EXPECT_EQ(selective.batch, 18u);
  EXPECT_THAT(selective.smaller_refused, ElementsAre(15, 16));
  const LargestBatch flash = find({.checkpoint = Checkpoint::kFull, .flash = true}, 6_GiB);
  EXPECT_EQ(flash.batch, 20u);
  EXPECT_THAT(flash.smaller_refused, ElementsAre(15, 16, 17));
  const LargestBatch full = find({.checkpoint = Checkpoint::kFull}, 5000_MiB);
  EXPECT_EQ(full.batch, 14u);
  EXPECT_THAT(full.smaller_refused, ElementsAre(12, 13));
  const LargestBatch sgd = find({.optimizer = Optimizer::kSgd, .checkpoint = Checkpoint::kFull}, 3_GiB);
  EXPECT_EQ(sgd.batch, 8u);
  EXPECT_THAT(sgd.smaller_refused, ElementsAre(7));
}

TEST(LargestBatchTest, IsThatOfBruteForce) {
  std::mt19937 random(7);
  const auto from_to = [&](uint64_t least, uint64_t most) {
    return std::uniform_int_distribution<uint64_t>(least, most)(random);
  };
  int with_gaps = 0;
  for (int i = 0; i < 60; ++i) {
    const uint64_t heads = from_to(1, 8);
    const ModelShape shape = *ShapeOf(
        {.layers = from_to(1, 4), .hidden = heads * 32 * from_to(1, 6), .heads = heads, .vocab = from_to(100, 20000)});
    TrainingOptions options = {.batch = from_to(1, 40),
                               .seq = from_to(16, 400),
                               .optimizer = static_cast<Optimizer>(from_to(0, 3)),
                               .checkpoint = kWays[from_to(0, 2)],
                               .flash = from_to(0, 1) == 1,
                               .lora_rank = from_to(0, 3) == 0 ? uint64_t{8} : 0};
    ReplayConfig config;
    if (i % 4 == 1) config.options.roundup_power2_divisions.fill(4);
    if (i % 4 == 2) config.options.max_split_bytes = 32_MiB;
    config.device_bytes =
        SummarizeReplay(StepTrace(shape, options), config).peak_reserved_bytes / 100 * from_to(85, 110);
    if (i % 4 == 3) {
      config.options.per_process_memory_fraction = 0.8;
      config.device_bytes = config.device_bytes / 4 * 5;
    }
    options.batch = 1;
    const LargestBatch expected = BruteForce(shape, options, config);
    const LargestBatch found = FindLargestBatch(shape, options, config);
    EXPECT_EQ(found.batch, expected.batch) << i;
    EXPECT_TRUE(found.is_exact) << i;
    EXPECT_EQ(found.smaller_refused, expected.smaller_refused) << i;
    with_gaps += expected.smaller_refused.empty() ? 0 : 1;
  }
  EXPECT_GT(with_gaps, 5) << "or this shows little";
}

TEST(LargestBatchTest, SaysWhereItDoesNotKnow) {
  const ModelShape tiny = *ShapeOf({.layers = 1, .hidden = 32, .heads = 1, .vocab = 100});
  const LargestBatch most = FindLargestBatch(tiny, {.seq = 4}, {.device_bytes = 80_GiB});
  EXPECT_EQ(most.batch, kMostBatch);
  EXPECT_FALSE(most.is_exact) << "no larger one is tried";
  // Short sequences leave more batches than a search can replay between the fitting and the impossible batches.
  const ModelShape shape = *ParseModelConfig(models::kGpt2);
  const TrainingOptions options = {.seq = 8, .checkpoint = Checkpoint::kFull};
  const ReplayConfig config = {.device_bytes = 80_GiB};
  const LargestBatch many = FindLargestBatch(shape, options, config);
  EXPECT_FALSE(many.is_exact);
  EXPECT_GT(many.batch, 15000u);
  EXPECT_LT(many.batch, kMostBatch);
  EXPECT_TRUE(Fits(shape, options, many.batch, config));
}

}  // namespace
}  // namespace vrambroker::plan
