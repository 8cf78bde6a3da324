// SPDX-License-Identifier: Apache-2.0
#include "tests/bench/workload.h"

#include <time.h>

#include <algorithm>
#include <barrier>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <numeric>
#include <random>
#include <thread>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "allocator/base/bytes.h"
#include "allocator/replay/direct_heap.h"
#include "allocator/replay/simulated_device.h"

namespace vrambroker::bench {
namespace {

using Kind = TraceOp::Kind;

// ---- Making ----

TraceOp AllocateOp(uint64_t id, uint64_t bytes) {
  return {.kind = Kind::kAllocate, .id = static_cast<uint32_t>(id), .bytes = bytes};
}
TraceOp FreeOp(uint64_t id) {
  return {.kind = Kind::kFree, .id = static_cast<uint32_t>(id)};
}

// Sizes from 512 bytes up to `max_bytes`. Each power of two is equally likely.
class Sizes {
 public:
  explicit Sizes(uint64_t max_bytes) : exponent_(9, std::log2(static_cast<double>(max_bytes))) {}
  uint64_t Next(std::mt19937_64& random) { return static_cast<uint64_t>(std::exp2(exponent_(random))); }

 private:
  std::uniform_real_distribution<double> exponent_;
};

Workload Hot(uint64_t bytes, size_t ops) {
  Workload workload;
  workload.setup = {AllocateOp(0, bytes), FreeOp(0)};
  while (workload.timed.size() < ops) {
    workload.timed.push_back(AllocateOp(0, bytes));
    workload.timed.push_back(FreeOp(0));
  }
  return workload;
}

// Allocates `live` blocks, and between them as many more, freed in any order. The timed part replaces live blocks one
// by one. max_bytes 512: all blocks have one size, and every second block is freed, so that no two free blocks join.
Workload Replace(size_t live, uint64_t max_bytes, size_t ops) {
  std::mt19937_64 random(1);
  Sizes sizes(max_bytes);
  std::vector<uint32_t> order(2 * live);  // order of allocation: the lower half stays
  std::iota(order.begin(), order.end(), 0);
  if (max_bytes > 512) {
    std::shuffle(order.begin(), order.end(), random);
  } else {
    for (size_t i = 0; i < live; ++i) {
      order[2 * i] = static_cast<uint32_t>(i);
      order[2 * i + 1] = static_cast<uint32_t>(live + i);
    }
  }
  Workload workload;
  workload.ids = static_cast<uint32_t>(2 * live);
  for (const uint32_t id : order) workload.setup.push_back(AllocateOp(id, sizes.Next(random)));
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin() + static_cast<std::ptrdiff_t>(live), order.end(), random);
  for (size_t i = live; i < 2 * live; ++i) workload.setup.push_back(FreeOp(order[i]));
  while (workload.timed.size() < ops) {
    const uint64_t id = random() % live;
    workload.timed.push_back(FreeOp(id));
    workload.timed.push_back(AllocateOp(id, sizes.Next(random)));
  }
  return workload;
}

Workload HotMixed(size_t ops) {
  constexpr size_t kLive = 1000;
  std::mt19937_64 random(1);
  Sizes sizes(8_MiB);
  Workload workload;
  workload.ids = kLive;
  for (size_t i = 0; i < kLive; ++i) workload.setup.push_back(AllocateOp(i, sizes.Next(random)));
  for (size_t i = 0; i < 4 * ops; i += 2) {
    std::vector<TraceOp>& phase = i < 3 * ops ? workload.setup : workload.timed;  // setup until segments suffice
    const uint64_t id = random() % kLive;
    phase.push_back(FreeOp(id));
    phase.push_back(AllocateOp(id, sizes.Next(random)));
  }
  return workload;
}

Workload Miss(uint64_t bytes, size_t ops) {
  Workload workload;
  for (size_t i = 0; i < ops; i += 2) {
    workload.timed.push_back(AllocateOp(0, bytes));
    workload.timed.push_back(FreeOp(0));
    workload.timed.push_back({.kind = Kind::kEmptyCache});
  }
  return workload;
}

absl::StatusOr<Workload> Golden(const std::string& name, const std::string& dir) {
  const std::string base = absl::StrCat(dir, "/", name);
  const absl::StatusOr<std::string> conf = ReadMaybeGzipped(base + ".conf");
  if (!conf.ok()) return conf.status();
  const absl::StatusOr<ReplayConfig> config = ParseReplayConf(*conf);
  if (!config.ok()) return config.status();
  const std::string path = base + ".trace";
  absl::StatusOr<Trace> trace = ReadTraceFile(std::filesystem::exists(path) ? path : path + ".gz");
  if (!trace.ok()) return trace.status();
  std::erase_if(trace->ops, [](const TraceOp& op) { return op.kind != Kind::kAllocate && op.kind != Kind::kFree; });
  return Workload{.config = *config, .timed = std::move(trace->ops), .ids = trace->ids};
}

// ---- Performing ----

struct VrambrokerHeap {
  using Pointer = Block*;
  explicit VrambrokerHeap(const ReplayConfig& config)
      : device(config.device_bytes), allocator(&device, &device, config.options, config.device_bytes) {}

  Block* Allocate(const TraceOp& op) {
    const absl::StatusOr<Block*> block = allocator.Allocate(op.bytes, op.stream);
    return block.ok() ? *block : nullptr;
  }
  void Free(Block* block) { allocator.Free(block); }
  void EmptyCache() { allocator.EmptyCache(); }
  uint64_t MetadataBytes() const { return allocator.MetadataBytes(); }

  SimulatedDevice device;
  DirectHeap allocator;
};

struct RecordingHeap : VrambrokerHeap {
  explicit RecordingHeap(const ReplayConfig& config) : VrambrokerHeap(config) {
    allocator.SetRecording(History::kDefaultEvents, /*exact_times=*/false);
    for (size_t i = 0; i <= History::kDefaultEvents / 2; ++i) allocator.Free(*allocator.Allocate(512));
    allocator.EmptyCache();
  }
};

struct HostHeap {
  using Pointer = void*;
  explicit HostHeap(const ReplayConfig& /*config*/) {}

  void* Allocate(const TraceOp& op) { return std::malloc(op.bytes); }
  void Free(void* memory) { std::free(memory); }
  void EmptyCache() {}
  uint64_t MetadataBytes() const { return 0; }
};

struct EmptyHeap {
  using Pointer = const void*;
  explicit EmptyHeap(const ReplayConfig& /*config*/) {}

  const void* Allocate(const TraceOp& op) { return &op; }
  void Free(const void* /*memory*/) {}
  void EmptyCache() {}
  uint64_t MetadataBytes() const { return 0; }
};

// The compiler must not drop a malloc() with its free().
template <typename Pointer>
void Use(Pointer pointer) {
  asm volatile("" : : "r"(pointer) : "memory");
}

template <typename Heap>
void PerformOps(const std::vector<TraceOp>& ops, Heap& heap, std::vector<typename Heap::Pointer>& blocks) {
  for (const TraceOp& op : ops) {
    auto& block = blocks[op.id];
    if (op.kind == Kind::kAllocate) {
      block = heap.Allocate(op);
      if (block == nullptr) {
        std::fprintf(stderr, "allocator_bench: %llu bytes were refused\n", static_cast<unsigned long long>(op.bytes));
        std::abort();
      }
      Use(block);
    } else if (op.kind == Kind::kFree) {
      heap.Free(block);
      block = nullptr;
    } else {
      heap.EmptyCache();
    }
  }
}

double NowNs(clockid_t clock) {
  timespec now;
  clock_gettime(clock, &now);
  return static_cast<double>(now.tv_sec) * 1e9 + static_cast<double>(now.tv_nsec);
}

template <typename Heap>
Cost PerformWith(const Workload& workload) {
  // Processor time measures a single thread, because other processes disturb processor time less.
  const clockid_t clock = workload.threads == 1 ? CLOCK_THREAD_CPUTIME_ID : CLOCK_MONOTONIC;
  const size_t threads = static_cast<size_t>(workload.threads);
  std::vector<std::unique_ptr<Heap>> heaps;
  while (heaps.size() < (workload.own_heaps ? threads : 1)) heaps.push_back(std::make_unique<Heap>(workload.config));
  std::vector<std::pair<double, double>> times(threads);  // from, until
  std::barrier start(workload.threads);
  Cost cost;
  const auto run = [&](size_t thread) {
    Heap& heap = *heaps[thread % heaps.size()];
    std::vector<typename Heap::Pointer> blocks(workload.ids, nullptr);
    PerformOps(workload.setup, heap, blocks);
    start.arrive_and_wait();
    times[thread].first = NowNs(clock);
    PerformOps(workload.timed, heap, blocks);
    times[thread].second = NowNs(clock);
    const auto live = std::ranges::count_if(blocks, [](auto block) { return block != nullptr; });
    if (threads == 1 && live > 0) {
      cost.metadata_per_block = static_cast<double>(heap.MetadataBytes()) / static_cast<double>(live);
    }
    for (auto& block : blocks) {
      if (block != nullptr) heap.Free(std::exchange(block, nullptr));
    }
  };
  std::vector<std::thread> others;
  for (size_t i = 1; i < threads; ++i) others.emplace_back(run, i);
  run(0);
  for (std::thread& other : others) other.join();

  double from = times[0].first;
  double until = times[0].second;
  for (const auto& [first, last] : times) {
    from = std::min(from, first);
    until = std::max(until, last);
  }
  const auto emptied = std::ranges::count(workload.timed, Kind::kEmptyCache, &TraceOp::kind);
  const size_t ops = threads * (workload.timed.size() - static_cast<size_t>(emptied));
  cost.ns = (until - from) / static_cast<double>(ops);
  return cost;
}

}  // namespace

absl::StatusOr<Workload> MakeWorkload(const std::string& name, const std::string& golden_dir, size_t ops) {
  if (name == "hot_512B") return Hot(512, ops);
  if (name == "hot_64KiB") return Hot(64_KiB, ops);
  if (name == "hot_4MiB") return Hot(4_MiB, ops);
  if (name == "hot_mixed_1000_blocks") return HotMixed(ops);
  if (name == "threads_one_heap" || name == "threads_own_heaps") {
    Workload workload = HotMixed(ops);
    workload.threads = 4;
    workload.own_heaps = name == "threads_own_heaps";
    return workload;
  }
  absl::string_view argument = name;
  uint64_t number = 0;
  if (absl::ConsumePrefix(&argument, "mixed_live:") && absl::SimpleAtoi(argument, &number)) {
    return Replace(number, 64_KiB, ops);
  }
  if (absl::ConsumePrefix(&argument, "equal_live:") && absl::SimpleAtoi(argument, &number)) {
    return Replace(number, 512, ops);
  }
  if (absl::ConsumePrefix(&argument, "miss:") && absl::SimpleAtoi(argument, &number)) return Miss(number, ops);
  return Golden(name, golden_dir);
}

Cost Perform(const Workload& workload, Subject subject) {
  switch (subject) {
    case Subject::kVrambroker:
      return PerformWith<VrambrokerHeap>(workload);
    case Subject::kRecording:
      return PerformWith<RecordingHeap>(workload);
    case Subject::kHost:
      return PerformWith<HostHeap>(workload);
    case Subject::kEmpty:
      return PerformWith<EmptyHeap>(workload);
  }
  return {};
}

}  // namespace vrambroker::bench
