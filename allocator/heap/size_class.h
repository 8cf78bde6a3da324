// SPDX-License-Identifier: Apache-2.0
//
// Size rules of the allocator, found in no other file: request -> block size -> pool -> segment size. Source: PyTorch's
// CUDA caching allocator (c10/cuda/CUDACachingAllocator.cpp).
#ifndef VRAMBROKER_ALLOCATOR_HEAP_SIZE_CLASS_H_
#define VRAMBROKER_ALLOCATOR_HEAP_SIZE_CLASS_H_

#include <algorithm>
#include <bit>
#include <cstdint>

#include "allocator/base/bytes.h"
#include "allocator/base/segment_bytes.h"
#include "allocator/heap/allocator_options.h"
#include "allocator/heap/memory_stats.h"

namespace vrambroker {

inline constexpr uint64_t kMinBlockBytes = 512;          // every block size is a multiple
inline constexpr uint64_t kSmallMaxBytes = 1_MiB;        // rounded requests up to here use the small pool
inline constexpr uint64_t kSmallSegmentBytes = 2_MiB;    // every segment of the small pool
inline constexpr uint64_t kOwnSegmentMinBytes = 10_MiB;  // from here on a request gets a segment of its own size

static_assert(kSmallSegmentBytes % kMinBlockBytes == 0 && kSegmentGranuleBytes % kMinBlockBytes == 0,
              "blocks must tile their segment exactly");
static_assert(kSmallSegmentBytes % kSegmentGranuleBytes == 0, "no driver block may be shared by two segments");

// Block size for a request of `requested` bytes. REQUIRES: requested < kMaxRequestBytes.
constexpr uint64_t RoundRequest(uint64_t requested, const AllocatorOptions& options) {
  if (requested < kMinBlockBytes) return kMinBlockBytes;
  // Entry 0 is for everything below 2 MiB, entry 15 for everything from 32 GiB.
  const int entry = std::clamp(static_cast<int>(std::bit_width(requested)) - 21, 0, 15);
  const uint64_t divisions = options.roundup_power2_divisions[entry];
  if (divisions <= 1 || requested <= kMinBlockBytes * divisions) return RoundUpTo(requested, kMinBlockBytes);
  // Steps of at least 512 bytes: `requested` is above 512 * divisions, and divisions is a power of two.
  return RoundUpTo(requested, std::bit_floor(requested) / divisions);
}

constexpr PoolKind PoolFor(uint64_t block_bytes) {
  return block_bytes <= kSmallMaxBytes ? PoolKind::kSmall : PoolKind::kLarge;
}

// Size of the segment to ask the device for, after a miss for a block of `block_bytes`.
constexpr uint64_t SegmentBytesFor(uint64_t block_bytes, const AllocatorOptions& options) {
  if (block_bytes <= kSmallMaxBytes) return kSmallSegmentBytes;
  if (block_bytes < kOwnSegmentMinBytes) return options.large_segment_bytes;
  return RoundUpTo(block_bytes, kSegmentGranuleBytes);
}

// Whether to cut off the rest of a free block when a block of `block_bytes` leaves `rest_bytes`.
constexpr bool ShouldSplit(PoolKind pool, uint64_t block_bytes, uint64_t rest_bytes, const AllocatorOptions& options) {
  if (pool == PoolKind::kSmall) return rest_bytes >= kMinBlockBytes;
  return !options.IsOversize(block_bytes) && rest_bytes > kSmallMaxBytes;
}

// Whether a free block of `free_bytes`, the best fit, may serve a request of `block_bytes`.
constexpr bool MayServe(uint64_t block_bytes, uint64_t free_bytes, const AllocatorOptions& options) {
  if (!options.IsOversize(block_bytes)) return !options.IsOversize(free_bytes);
  return free_bytes - block_bytes < options.max_non_split_rounding_bytes;
}

}  // namespace vrambroker

#endif  // VRAMBROKER_ALLOCATOR_HEAP_SIZE_CLASS_H_
