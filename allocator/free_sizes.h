// SPDX-License-Identifier: Apache-2.0
//
// FreeSizes: free blocks by size class: how badly free memory is cut up.
#ifndef VRAMBROKER_ALLOCATOR_FREE_SIZES_H_
#define VRAMBROKER_ALLOCATOR_FREE_SIZES_H_

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>

namespace vrambroker {

struct FreeSizes {
  static constexpr size_t kClasses = 8;

  std::array<uint64_t, kClasses> blocks{};  // COUNT, by class
  std::array<uint64_t, kClasses> bytes{};   // BYTES, by class
  uint64_t largest_bytes = 0;               // of the largest block

  // The smallest size of a class: 512, 4096, ... 1 GiB; each is eight times the one before, and the last has no end.
  static constexpr uint64_t ClassBytes(size_t size_class) { return uint64_t{512} << (3 * size_class); }
  static constexpr size_t ClassOf(uint64_t block_bytes) {
    const auto units = static_cast<size_t>(std::bit_width(block_bytes >> 9));
    return units == 0 ? 0 : std::min((units - 1) / 3, kClasses - 1);
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

  bool operator==(const FreeSizes&) const = default;
};

}  // namespace vrambroker

#endif  // VRAMBROKER_ALLOCATOR_FREE_SIZES_H_
