// SPDX-License-Identifier: Apache-2.0
//
// libFuzzer target: no settings string breaks the parser. An accepted string can be written and read again.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <iostream>
#include <string>

#include "absl/strings/string_view.h"
#include "allocator/heap/allocator_options.h"
#include "allocator/heap/size_class.h"

namespace {

void Require(bool holds, absl::string_view rule, absl::string_view text) {
  if (holds) return;
  std::cerr << "violated: " << rule << "; text: " << text << '\n';
  std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using vrambroker::AllocatorOptions;
  const absl::string_view input(reinterpret_cast<const char*>(data), size);
  const absl::StatusOr<vrambroker::AllocConf> conf = vrambroker::ParseAllocConf(input);
  if (!conf.ok()) {
    Require(!conf.status().message().empty(), "an error says what is wrong", input);
    return 0;
  }
  const AllocatorOptions& options = conf->options;
  Require(options.large_segment_bytes > vrambroker::kOwnSegmentMinBytes &&
              options.large_segment_bytes < vrambroker::kMaxRequestBytes &&
              options.large_segment_bytes % vrambroker::kSegmentGranuleBytes == 0,
          "the large segment is one that a device can give", input);
  Require(options.max_split_bytes >= options.large_segment_bytes &&
              options.max_non_split_rounding_bytes >= options.large_segment_bytes,
          "limits are not below the large segment", input);
  Require(options.garbage_collection_threshold >= 0 && options.garbage_collection_threshold < 1 &&
              options.per_process_memory_fraction >= 0 && options.per_process_memory_fraction <= 1,
          "shares are in range", input);
  const std::string text = vrambroker::FormatAllocConf(options);
  const absl::StatusOr<vrambroker::AllocConf> again = vrambroker::ParseAllocConf(text);
  Require(again.ok(), "what is formatted parses", text);
  Require(again->options == options, "what is formatted parses to the same", text);
  Require(again->warnings.empty(), "what is formatted has no idle setting", text);
  Require(vrambroker::FormatAllocConf(again->options) == text, "the text is always the same", text);
  return 0;
}
