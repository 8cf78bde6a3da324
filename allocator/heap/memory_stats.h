// SPDX-License-Identifier: Apache-2.0
//
// The figures of one heap, with the names and meanings of torch.cuda.memory_stats(). Installed, as part of the C++
// client's interface: includes nothing of the project and is C++17.
#ifndef VRAMBROKER_ALLOCATOR_HEAP_MEMORY_STATS_H_
#define VRAMBROKER_ALLOCATOR_HEAP_MEMORY_STATS_H_

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <utility>
#include <vector>

namespace vrambroker {

// The two pools of a heap. No segment belongs to both.
enum class PoolKind : uint8_t { kSmall = 0, kLarge = 1 };

// A counted quantity. Identity: current == allocated - freed, and peak >= current.
struct Stat {
  uint64_t current = 0;
  uint64_t peak = 0;       // highest `current` since the last reset of peaks
  uint64_t allocated = 0;  // sum of all increases
  uint64_t freed = 0;      // sum of all decreases

  void Up(uint64_t n) {
    current += n;
    allocated += n;
    if (current > peak) peak = current;
  }
  void Down(uint64_t n) {
    current -= n;
    freed += n;
  }
  void Add(const Stat& other) {
    current += other.current;
    peak += other.peak;
    allocated += other.allocated;
    freed += other.freed;
  }
};

// A Stat for the whole heap and for each of its two pools.
struct PoolStat {
  Stat all;
  std::array<Stat, 2> pool;  // indexed by PoolKind

  void Up(PoolKind kind, uint64_t n) {
    all.Up(n);
    pool[static_cast<int>(kind)].Up(n);
  }
  void Down(PoolKind kind, uint64_t n) {
    all.Down(n);
    pool[static_cast<int>(kind)].Down(n);
  }
};

// Free blocks by size class: how badly free memory is cut up.
struct FreeSizes {
  static constexpr size_t kClasses = 8;

  std::array<uint64_t, kClasses> blocks{};  // COUNT, by class
  std::array<uint64_t, kClasses> bytes{};   // BYTES, by class
  uint64_t largest_bytes = 0;               // size of the largest block

  // Smallest size of a class: 512, 4096, ... 1 GiB, each eight times the size before. The last class has no end.
  static constexpr uint64_t ClassBytes(size_t size_class) { return uint64_t{512} << (3 * size_class); }
  static constexpr size_t ClassOf(uint64_t block_bytes) {
    const uint64_t kibibytes = block_bytes >> 10;
    const auto doublings =
        kibibytes == 0 ? size_t{0} : static_cast<size_t>(64 - __builtin_clzll(kibibytes));  // of 512 bytes
    return std::min(doublings / 3, kClasses - 1);
  }

  void Add(uint64_t block_bytes) {
    const size_t size_class = ClassOf(block_bytes);
    ++blocks[size_class];
    bytes[size_class] += block_bytes;
    largest_bytes = std::max(largest_bytes, block_bytes);
  }
  void Add(const FreeSizes& other) {
    for (size_t i = 0; i < kClasses; ++i) {
      blocks[i] += other.blocks[i];
      bytes[i] += other.bytes[i];
    }
    largest_bytes = std::max(largest_bytes, other.largest_bytes);
  }

  bool operator==(const FreeSizes& other) const {
    return blocks == other.blocks && bytes == other.bytes && largest_bytes == other.largest_bytes;
  }
};

struct MemoryStats {
  // COUNT
  PoolStat allocation;      // blocks handed out
  PoolStat segment;         // segments held
  PoolStat active;          // blocks handed out, or freed and still in use by a stream
  PoolStat inactive_split;  // free blocks in segments with used blocks
  // BYTES
  PoolStat allocated_bytes;
  PoolStat reserved_bytes;
  PoolStat active_bytes;
  PoolStat inactive_split_bytes;
  PoolStat requested_bytes;
  // COUNT of blocks handed out and of segments held of max_split_bytes and more
  Stat oversize_allocations;
  Stat oversize_segments;
  // COUNT
  uint64_t num_alloc_retries = 0;     // requests that flushed the cache before asking for a segment again
  uint64_t num_ooms = 0;              // requests refused
  uint64_t num_oom_rejections = 0;    // requests refused by AllocatorOptions::reject_without_retry
  uint64_t num_sync_all_streams = 0;  // waits for every stream's use of freed blocks
  uint64_t num_device_alloc = 0;      // segments obtained
  uint64_t num_device_free = 0;       // segments given back
  // BYTES; AllocatorOptions::kNoLimit when unset
  uint64_t max_split_bytes = std::numeric_limits<uint64_t>::max();

  // Free blocks of all segments, wholly free or in part used. Not among PyTorch's figures.
  FreeSizes free;

  // Sets every peak to the current value.
  void ResetPeaks();

  // Adds the figures of another heap. Peaks are added too, so the sum's peak is an upper bound. max_split_bytes stays
  // if equal in both heaps.
  void Add(const MemoryStats& other);

  // Calls `visit(name, stat)` for each quantity by pool, in the order above, names as PyTorch's ("allocated_bytes").
  void ForEach(const std::function<void(const char* name, const PoolStat& stat)>& visit) const;
  void ForEach(const std::function<void(const char* name, PoolStat& stat)>& visit);
};

// 1 - allocated / reserved; 0 when nothing is reserved. Between 0 and 1.
double FragmentationRatio(uint64_t allocated_bytes, uint64_t reserved_bytes);

// 1 - largest / free: the share of free memory unusable for one large request. 0 when nothing is free. Between 0 and 1.
double ExternalFragmentationRatio(uint64_t largest_free_block_bytes, uint64_t free_bytes);

// PyTorch's flat dictionary, sorted by key: "allocated_bytes.all.current" -> 512, ... "max_split_size" is -1 when
// unset.
std::vector<std::pair<std::string, int64_t>> FlatMemoryStats(const MemoryStats& stats);

}  // namespace vrambroker

#endif  // VRAMBROKER_ALLOCATOR_HEAP_MEMORY_STATS_H_
