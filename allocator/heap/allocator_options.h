// SPDX-License-Identifier: Apache-2.0
//
// AllocatorOptions: what a heap can be told, in PyTorch's own syntax ("max_split_size_mb:128,...").
#ifndef VRAMBROKER_ALLOCATOR_HEAP_ALLOCATOR_OPTIONS_H_
#define VRAMBROKER_ALLOCATOR_HEAP_ALLOCATOR_OPTIONS_H_

#include <array>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "allocator/base/bytes.h"

namespace vrambroker {

// "MB" in PyTorch's names means MiB.
struct AllocatorOptions {
  static constexpr uint64_t kNoLimit = std::numeric_limits<uint64_t>::max();

  // max_split_size_mb: free blocks of this size and above ("oversize") are not split and serve only requests of at
  // least this size.
  uint64_t max_split_bytes = kNoLimit;
  // max_non_split_rounding_mb: an oversize block may be larger than the request by less than this.
  uint64_t max_non_split_rounding_bytes = 20_MiB;
  // large_segment_size_mb: size of the segments that requests of 1 to 10 MiB share. A multiple of 2 MiB, as every
  // segment.
  uint64_t large_segment_bytes = 20_MiB;
  // roundup_power2_divisions: steps between two powers of two to which requests are rounded; 0 and 1: multiples of
  // 512 bytes. Entry i is for requests of 2^i to 2^(i+1) MiB; entry 0 also for smaller, entry 15 for larger ones.
  std::array<uint32_t, 16> roundup_power2_divisions{};
  // garbage_collection_threshold: above this share of the limit, segments long unused are given back before a new
  // one is obtained. 0: off. Needs a limit.
  double garbage_collection_threshold = 0;
  // per_process_memory_fraction: the limit as a share of the device's capacity; 1: none.
  double per_process_memory_fraction = 1.0;
  // throw_on_cudamalloc_oom: a segment that would pass per_process_memory_fraction is refused without emptying the
  // cache first.
  bool reject_without_retry = false;

  // Whether a block or segment of `bytes` is oversize.
  constexpr bool IsOversize(uint64_t bytes) const { return bytes >= max_split_bytes; }

  bool operator==(const AllocatorOptions&) const = default;
};

struct AllocConf {
  AllocatorOptions options;
  // The settings that are understood and have no effect here, as text: PyTorch may heed them.
  std::string ignored;
  // Sentences: one for each setting that is understood and has no effect here, or another effect than its text says.
  std::vector<std::string> warnings;
};

// Reads a settings string: KEY:VALUE pairs joined by commas, as in PYTORCH_CUDA_ALLOC_CONF. An empty text gives the
// defaults. InvalidArgument names key, value and the accepted values.
//
// A setting that was not understood must not pass for one that was, so this is stricter than PyTorch:
// - A number is digits only, with a point or exponent where fractions make sense: "128x" is not 128. There are no
//   signs, nan or inf, and what does not fit ("1e9999", 2^60 bytes) is not cut to what does.
// - White space may stand around words, not within them.
// - Missing values, wrong separators, unclosed lists, text after a list and empty pairs are errors. One comma at the
//   very end is fine, as in PyTorch.
// - List keys are powers of two from 1 to 32768 and ascend; '>' comes last.
// As in PyTorch, the last value counts of a key that is given several times, and a list of divisions that is only '>'
// leaves the first bucket at 0. An odd large_segment_size_mb is rounded up. Warnings say so.
absl::StatusOr<AllocConf> ParseAllocConf(absl::string_view text);

// The settings string that says the same; empty for the default. REQUIRES: options as ParseAllocConf makes them.
std::string FormatAllocConf(const AllocatorOptions& options);

}  // namespace vrambroker

#endif  // VRAMBROKER_ALLOCATOR_HEAP_ALLOCATOR_OPTIONS_H_
