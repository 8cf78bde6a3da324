// SPDX-License-Identifier: Apache-2.0
//
// The only file that knows the allocator's size numbers: request -> block size -> pool -> segment size.
// Source of the rules: PyTorch's CUDA caching allocator (c10/cuda/CUDACachingAllocator.cpp), default configuration.
#ifndef VRAMBROKER_ALLOCATOR_SIZE_CLASS_H_
#define VRAMBROKER_ALLOCATOR_SIZE_CLASS_H_

#include <cstdint>

#include "allocator/bytes.h"

namespace vrambroker {

inline constexpr uint64_t kMinBlockBytes = 512;          // block sizes are multiples of this
inline constexpr uint64_t kSmallMaxBytes = 1_MiB;        // rounded requests up to here use the small pool
inline constexpr uint64_t kSmallSegmentBytes = 2_MiB;    // every segment of the small pool
inline constexpr uint64_t kLargeSegmentBytes = 20_MiB;   // segments for large requests below kOwnSegmentMinBytes
inline constexpr uint64_t kOwnSegmentMinBytes = 10_MiB;  // from here a request gets a segment of its own size
inline constexpr uint64_t kSegmentGranuleBytes = 2_MiB;  // ... rounded up to this; every segment is a multiple
inline constexpr uint64_t kMaxRequestBytes = uint64_t{1} << 60;  // requests from here on are refused unseen

static_assert(kSmallSegmentBytes % kMinBlockBytes == 0 && kSegmentGranuleBytes % kMinBlockBytes == 0,
              "blocks must tile their segment exactly");
static_assert(kSmallSegmentBytes % kSegmentGranuleBytes == 0 && kLargeSegmentBytes % kSegmentGranuleBytes == 0,
              "no driver block may be shared by two segments");

enum class PoolKind : uint8_t { kSmall = 0, kLarge = 1 };

// Block size for a request of `requested` bytes. REQUIRES: requested < kMaxRequestBytes.
constexpr uint64_t RoundRequest(uint64_t requested) {
  return requested < kMinBlockBytes ? kMinBlockBytes : RoundUpTo(requested, kMinBlockBytes);
}

constexpr PoolKind PoolFor(uint64_t block_bytes) {
  return block_bytes <= kSmallMaxBytes ? PoolKind::kSmall : PoolKind::kLarge;
}

// Size of the segment that a miss for a block of `block_bytes` asks the device for.
constexpr uint64_t SegmentBytesFor(uint64_t block_bytes) {
  if (block_bytes <= kSmallMaxBytes) return kSmallSegmentBytes;
  if (block_bytes < kOwnSegmentMinBytes) return kLargeSegmentBytes;
  return RoundUpTo(block_bytes, kSegmentGranuleBytes);
}

// Whether the rest of a free block is cut off when `rest_bytes` of it are not needed.
constexpr bool ShouldSplit(PoolKind pool, uint64_t rest_bytes) {
  return pool == PoolKind::kSmall ? rest_bytes >= kMinBlockBytes : rest_bytes > kSmallMaxBytes;
}

}  // namespace vrambroker

#endif  // VRAMBROKER_ALLOCATOR_SIZE_CLASS_H_
