// SPDX-License-Identifier: Apache-2.0
//
// MemoryTrim: gives freed memory back to the system. The C library keeps it between blocks that live on: what a flood
// of calls took for a moment would stay.
#ifndef VRAMBROKER_SERVER_BASE_MEMORY_TRIM_H_
#define VRAMBROKER_SERVER_BASE_MEMORY_TRIM_H_

#include <cstdint>

namespace vrambroker {

// One call at a time.
class MemoryTrim {
 public:
  // Trims once the process has grown by so many bytes since it was trimmed last,
  static constexpr uint64_t kGrowthBytes = 32 << 20;
  // and at so many looks after that: what made it grow may be freed only then.
  static constexpr int kMoreLooks = 5;

  // (slow) To be called every few seconds. True when it trimmed.
  bool Look();

 private:
  uint64_t least_bytes_ = 0;  // of the process since the last trim
  int looks_left_ = 0;        // at which it trims in any case
};

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_BASE_MEMORY_TRIM_H_
