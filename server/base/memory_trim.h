// SPDX-License-Identifier: Apache-2.0
//
// MemoryTrim: gives freed memory back to the system. The C library keeps freed memory between live blocks: memory taken
// for a moment by a flood of calls would stay.
#ifndef VRAMBROKER_SERVER_BASE_MEMORY_TRIM_H_
#define VRAMBROKER_SERVER_BASE_MEMORY_TRIM_H_

#include <cstdint>

namespace vrambroker {

// Not thread-safe.
class MemoryTrim {
 public:
  // Growth of the process since the last trim that triggers a trim.
  static constexpr uint64_t kGrowthBytes = 32 << 20;
  // Number of further looks that trim: the memory behind the growth may be freed only then.
  static constexpr int kMoreLooks = 5;

  // (slow) Call every few seconds. True after a trim.
  bool Look();

 private:
  uint64_t least_bytes_ = 0;  // least size of the process since the last trim
  int looks_left_ = 0;        // further looks that trim in any case
};

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_BASE_MEMORY_TRIM_H_
