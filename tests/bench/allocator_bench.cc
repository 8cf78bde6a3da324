// SPDX-License-Identifier: Apache-2.0
//
// What the allocator itself costs, without daemon, device or memory.
#include <benchmark/benchmark.h>

#include <atomic>
#include <cmath>
#include <cstdint>
#include <memory>
#include <random>
#include <vector>

#include "allocator/bytes.h"
#include "allocator/caching_allocator.h"
#include "allocator/segment_source.h"

namespace vrambroker {
namespace {

// Segments that are only numbers.
class FreeSource : public SegmentSource {
 public:
  absl::StatusOr<SegmentId> AcquireSegment(uint64_t /*bytes*/) override {
    return SegmentId{acquired_.fetch_add(1, std::memory_order_relaxed) + 1};
  }
  uint64_t ReleaseSegments(absl::Span<const ReleasedSegment> segments) override {
    uint64_t bytes = 0;
    for (const ReleasedSegment& segment : segments) bytes += segment.bytes;
    return bytes;
  }
  uint64_t acquired() const { return acquired_.load(std::memory_order_relaxed); }

 private:
  std::atomic<uint64_t> acquired_{0};
};

struct Heap {
  FreeSource source;
  CachingAllocator allocator{&source};
};

Block* MustAllocate(CachingAllocator& allocator, uint64_t bytes, benchmark::State& state) {
  absl::StatusOr<Block*> block = allocator.Allocate(bytes);
  if (block.ok()) return *block;
  state.SkipWithError("the allocator refused");
  return nullptr;
}

// What DoNotOptimize() is given is const: it may say that it changes a variable, and gcc 12 then does, under sanitizers.

// Allocate + Free of one size that the cache serves; otherwise the heap is empty.
void BM_Hit(benchmark::State& state) {
  const uint64_t bytes = static_cast<uint64_t>(state.range(0));
  Heap heap;
  Block* first = MustAllocate(heap.allocator, bytes, state);
  if (first == nullptr) return;
  heap.allocator.Free(first);
  for (auto _ : state) {
    Block* const block = heap.allocator.TryAllocate(bytes);
    benchmark::DoNotOptimize(block);
    heap.allocator.Free(block);
  }
}
BENCHMARK(BM_Hit)->ArgName("bytes")->Arg(512)->Arg(64_KiB)->Arg(4_MiB);

// Allocate + Free with `live` other blocks of 512 B to 8 MiB (log-uniform): frees one of them and allocates another
// size. misses: how many of these pairs still needed a new segment, as a share.
void BM_HitMixed(benchmark::State& state) {
  constexpr size_t kSteps = 8192;
  const size_t live = static_cast<size_t>(state.range(0));
  std::mt19937_64 random(1);
  std::uniform_real_distribution<double> exponent(9, 23);
  std::vector<uint64_t> sizes(kSteps);
  std::vector<size_t> victims(kSteps);
  for (size_t i = 0; i < kSteps; ++i) {
    sizes[i] = static_cast<uint64_t>(std::exp2(exponent(random)));
    victims[i] = static_cast<size_t>(random() % live);
  }
  Heap heap;
  std::vector<Block*> blocks(live);
  for (size_t i = 0; i < live; ++i) blocks[i] = MustAllocate(heap.allocator, sizes[i], state);
  size_t step = 0;
  const auto replace_one = [&] {
    Block*& block = blocks[victims[step]];
    heap.allocator.Free(block);
    block = MustAllocate(heap.allocator, sizes[step], state);
    step = (step + 1) % kSteps;
  };
  for (size_t i = 0; i < 4 * kSteps; ++i) replace_one();  // until the cache has what the sequence needs
  const uint64_t acquired = heap.source.acquired();
  for (auto _ : state) replace_one();
  state.counters["misses"] =
      benchmark::Counter(static_cast<double>(heap.source.acquired() - acquired), benchmark::Counter::kAvgIterations);
}
BENCHMARK(BM_HitMixed)->ArgName("live")->Arg(1000);

// Allocate from an empty cache + Free + EmptyCache: a segment comes and goes, at no cost of its own.
void BM_Miss(benchmark::State& state) {
  const uint64_t bytes = static_cast<uint64_t>(state.range(0));
  Heap heap;
  for (auto _ : state) {
    Block* block = MustAllocate(heap.allocator, bytes, state);
    if (block == nullptr) return;
    heap.allocator.Free(block);
    benchmark::DoNotOptimize(heap.allocator.EmptyCache());
  }
}
BENCHMARK(BM_Miss)->ArgName("bytes")->Arg(512)->Arg(4_MiB)->Arg(32_MiB);

// BM_Hit by several threads on one heap. The time is wall time over the pairs of all threads together.
std::unique_ptr<Heap> shared_heap;

void BM_HitShared(benchmark::State& state) {
  for (auto _ : state) {
    Block* const block = shared_heap->allocator.TryAllocate(64_KiB);
    benchmark::DoNotOptimize(block);
    shared_heap->allocator.Free(block);
  }
}
BENCHMARK(BM_HitShared)
    ->Setup([](const benchmark::State&) {
      shared_heap = std::make_unique<Heap>();
      // One segment: 32 blocks, more than there are threads.
      shared_heap->allocator.Free(*shared_heap->allocator.Allocate(64_KiB));
    })
    ->Teardown([](const benchmark::State&) { shared_heap.reset(); })
    ->UseRealTime()
    ->Threads(1)
    ->Threads(4);

}  // namespace
}  // namespace vrambroker

BENCHMARK_MAIN();
