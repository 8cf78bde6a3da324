// SPDX-License-Identifier: Apache-2.0
//
// AllocatorOptions: the options of a heap, read from settings in PyTorch's own syntax ("max_split_size_mb:128,...").
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

  // max_split_size_mb: free blocks from max_split_bytes on ("oversize") are not split and serve only requests from
  // max_split_bytes on.
  uint64_t max_split_bytes = kNoLimit;
  // max_non_split_rounding_mb: an oversize block may exceed the request by fewer bytes.
  uint64_t max_non_split_rounding_bytes = 20_MiB;
  // large_segment_size_mb: size of the segments shared by requests of 1 to 10 MiB. A multiple of 2 MiB, like every
  // segment.
  uint64_t large_segment_bytes = 20_MiB;
  // roundup_power2_divisions: steps between two powers of two to which requests are rounded; 0 and 1: multiples of 512
  // bytes. Entry i is for requests of 2^i to 2^(i+1) MiB, entry 0 also for smaller requests, entry 15 for larger
  // requests.
  std::array<uint32_t, 16> roundup_power2_divisions{};
  // garbage_collection_threshold: above this share of the limit, segments long unused are given back before a new
  // segment is obtained. 0: off. Needs a limit.
  double garbage_collection_threshold = 0;
  // per_process_memory_fraction: the limit as a share of the device's capacity; 1: no limit.
  double per_process_memory_fraction = 1.0;
  // throw_on_cudamalloc_oom: a segment beyond per_process_memory_fraction is refused without emptying the cache first.
  bool reject_without_retry = false;

  // Whether a block or segment of `bytes` is oversize.
  constexpr bool IsOversize(uint64_t bytes) const { return bytes >= max_split_bytes; }

  bool operator==(const AllocatorOptions&) const = default;
};

struct AllocConf {
  AllocatorOptions options;
  // Settings understood but without effect here, as text: PyTorch may heed them.
  std::string ignored;
  // Sentences, each on a setting without effect here, or with an effect different from the text.
  std::vector<std::string> warnings;
};

// Reads a settings string: KEY:VALUE pairs joined by commas, as in PYTORCH_CUDA_ALLOC_CONF. An empty text gives the
// defaults. InvalidArgument names key, value and the accepted values.
//
// Parsing is stricter than PyTorch's, so a misunderstood setting never passes for an understood setting:
// - A number is digits only, with a point or exponent where fractions make sense: "128x" is not 128. Signs, nan, inf
//   and numbers out of range ("1e9999", 2^60 bytes) are errors; nothing is cut to the range.
// - White space may stand around words, not within words.
// - Missing values, wrong separators, unclosed lists, text after a list and empty pairs are errors. A comma at the very
//   end is fine, as in PyTorch.
// - List keys are powers of two from 1 to 32768 and ascend; '>' comes last.
// As in PyTorch, the last value of a repeated key counts, and a list of divisions with only '>' leaves the first bucket
// at 0. An odd large_segment_size_mb is rounded up. Warnings say so.
absl::StatusOr<AllocConf> ParseAllocConf(absl::string_view text);

// Returns the settings string for `options`; empty for the default. REQUIRES: options made by ParseAllocConf.
std::string FormatAllocConf(const AllocatorOptions& options);

}  // namespace vrambroker

#endif  // VRAMBROKER_ALLOCATOR_HEAP_ALLOCATOR_OPTIONS_H_
