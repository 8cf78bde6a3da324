// SPDX-License-Identifier: Apache-2.0
//
// Random operations against a model: whatever the order, invariants hold, blocks never overlap, the best fit is
// chosen, and a request is refused only when nothing could have served it.
#include <gtest/gtest.h>

#include <map>
#include <optional>
#include <random>
#include <tuple>
#include <vector>

#include "allocator/caching_allocator.h"
#include "tests/unit/simulated_source.h"

namespace vrambroker {
namespace {

constexpr int kSeeds = 256;
constexpr int kSteps = 500;
constexpr int kShards = 8;

using Place = std::tuple<uint64_t, uint64_t>;  // segment, offset

class Model {
 public:
  explicit Model(uint64_t seed) : random_(seed), source_(Pick({64_MiB, 256_MiB, 4_GiB})), allocator_(&source_) {}

  void Run() {
    for (int step = 0; step < kSteps; ++step) {
      SCOPED_TRACE(::testing::Message() << "step " << step);
      Step();
      ASSERT_EQ(allocator_.CheckInvariants(), absl::OkStatus());
      const MemoryStats stats = allocator_.GetMemoryStats();
      ASSERT_EQ(stats.allocated_bytes.all.current, live_bytes_);
      ASSERT_EQ(stats.allocation.all.current, live_.size());
      ASSERT_EQ(stats.reserved_bytes.all.current, source_.used_bytes());
      ASSERT_EQ(source_.misuse(), "");
      if (::testing::Test::HasFailure()) return;
    }
    while (!live_.empty()) FreeOne();
    allocator_.EmptyCache();
    EXPECT_EQ(source_.used_bytes(), 0u);
    EXPECT_EQ(allocator_.CheckInvariants(), absl::OkStatus());
  }

 private:
  uint64_t Pick(std::vector<uint64_t> choices) { return choices[random_() % choices.size()]; }

  void Step() {
    const uint64_t dice = random_() % 1000;
    if (dice < 540) {
      AllocateOne();
    } else if (dice < 960) {
      FreeOne();
    } else if (dice < 980) {
      allocator_.EmptyCache();
    } else if (dice < 990) {
      source_.set_limit(Pick({0, 30_MiB, 100_MiB, SimulatedSource::kUnlimited, SimulatedSource::kUnlimited}));
    } else {
      allocator_.ResetPeakStats();
    }
  }

  uint64_t RandomRequest() {
    switch (random_() % 6) {
      case 0:
        return random_() % 2048 + 1;
      case 1:
        return random_() % 1_MiB + 1;
      case 2:
        return random_() % 10_MiB + 1;
      case 3:
        return random_() % 40_MiB + 1;
      case 4:  // the edges
        return Pick({512, 1_MiB, 10_MiB, 11_MiB, 19_MiB, 20_MiB}) + random_() % 3 - 1;
      default:
        return 512 * (random_() % 8 + 1);
    }
  }

  // What best fit has to choose: smallest, then oldest segment, then lowest offset.
  std::optional<Place> BestFit(uint64_t block_bytes) {
    std::optional<std::tuple<uint64_t, uint64_t, uint64_t>> best;
    for (const SegmentSnapshot& segment : allocator_.Snapshot().segments) {
      if (segment.pool != PoolFor(block_bytes)) continue;
      for (const BlockSnapshot& block : segment.blocks) {
        if (block.state != BlockState::kFree || block.bytes < block_bytes) continue;
        const auto candidate = std::make_tuple(block.bytes, Raw(segment.id), block.offset);
        if (!best.has_value() || candidate < *best) best = candidate;
      }
    }
    if (!best.has_value()) return std::nullopt;
    return Place(std::get<1>(*best), std::get<2>(*best));
  }

  void AllocateOne() {
    const uint64_t requested = RandomRequest();
    const uint64_t block_bytes = RoundRequest(requested, AllocatorOptions());
    SCOPED_TRACE(::testing::Message() << "allocate " << requested);
    const std::optional<Place> expected = BestFit(block_bytes);
    const int calls = source_.acquire_calls();
    Block* block = nullptr;
    if (random_() % 4 == 0) {
      block = allocator_.TryAllocate(requested);
      ASSERT_EQ(block != nullptr, expected.has_value());
      if (block == nullptr) return;
    } else {
      const absl::StatusOr<Block*> allocated = allocator_.Allocate(requested);
      if (!allocated.ok()) {
        ASSERT_FALSE(expected.has_value());
        // Everything that could be given back has been, and still there is no room.
        ASSERT_FALSE(source_.CouldAcquire(SegmentBytesFor(block_bytes, AllocatorOptions())));
        for (const SegmentSnapshot& segment : allocator_.Snapshot().segments) {
          ASSERT_FALSE(segment.blocks.size() == 1 && segment.blocks[0].state != BlockState::kAllocated)
              << "a segment was not flushed";
        }
        return;
      }
      block = *allocated;
    }
    if (expected.has_value()) {
      ASSERT_EQ(Place(Raw(block->segment_id()), block->offset()), *expected);
      ASSERT_EQ(source_.acquire_calls(), calls) << "a hit asks for no segment";
    }
    ASSERT_EQ(block->state, BlockState::kAllocated);
    ASSERT_EQ(block->requested_bytes, requested);
    ASSERT_GE(block->bytes, block_bytes);
    ASSERT_LE(block->bytes - block_bytes, 1_MiB) << "waste";
    ASSERT_EQ(block->segment_bytes(), source_.BytesOf(block->segment_id())) << "the segment is live";
    ASSERT_LE(block->offset() + block->bytes, block->segment_bytes());

    const Place place(Raw(block->segment_id()), block->offset());
    const auto next = live_.lower_bound(place);
    if (next != live_.end() && std::get<0>(next->first) == Raw(block->segment_id())) {
      ASSERT_GE(std::get<1>(next->first), block->offset() + block->bytes) << "overlaps the block above";
    }
    if (next != live_.begin()) {
      const Block* below = std::prev(next)->second;
      if (below->segment_id() == block->segment_id()) {
        ASSERT_LE(below->offset() + below->bytes, block->offset()) << "overlaps the block below";
      }
    }
    live_[place] = block;
    live_bytes_ += block->bytes;
  }

  void FreeOne() {
    if (live_.empty()) return;
    const auto it = std::next(live_.begin(), static_cast<std::ptrdiff_t>(random_() % live_.size()));
    live_bytes_ -= it->second->bytes;
    allocator_.Free(it->second);
    live_.erase(it);
  }

  std::mt19937_64 random_;
  SimulatedSource source_;
  CachingAllocator allocator_;
  std::map<Place, Block*> live_;
  uint64_t live_bytes_ = 0;
};

class CachingAllocatorRandomTest : public ::testing::TestWithParam<int> {};

TEST_P(CachingAllocatorRandomTest, HoldsItsPromises) {
  for (int seed = GetParam(); seed < kSeeds; seed += kShards) {
    SCOPED_TRACE(::testing::Message() << "seed " << seed);
    Model(static_cast<uint64_t>(seed)).Run();
    if (HasFailure()) return;
  }
}

INSTANTIATE_TEST_SUITE_P(Shards, CachingAllocatorRandomTest, ::testing::Range(0, kShards));

}  // namespace
}  // namespace vrambroker
