// SPDX-License-Identifier: Apache-2.0
//
// HeapClock: the time for a heap's records, cheaper than a clock read per record.
#ifndef VRAMBROKER_ALLOCATOR_HEAP_HEAP_CLOCK_H_
#define VRAMBROKER_ALLOCATOR_HEAP_HEAP_CLOCK_H_

#include <chrono>
#include <cstdint>

namespace vrambroker {

// Starts when constructed. Not thread-safe.
class HeapClock {
 public:
  // Counts an operation of the heap. The operation's time is the last Update(): at most 64 operations before, or its
  // own time after ReadForEach().
  void Count() {
    if ((++operations_ & mask_) == 0) Update();
  }
  void ReadForEach() { mask_ = 0; }
  // Reads the clock. For slow calls, and for threads running once a second.
  void Update() {
    const auto since_start = std::chrono::steady_clock::now() - start_;
    seconds_ = static_cast<uint32_t>(std::chrono::duration_cast<std::chrono::seconds>(since_start).count());
    time_us_ = start_us_ + std::chrono::duration_cast<std::chrono::microseconds>(since_start).count();
  }

  uint32_t seconds() const { return seconds_; }
  // Microseconds since 1970. Never falls: ignores changes of the system's clock after construction.
  int64_t time_us() const { return time_us_; }

 private:
  const std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  const int64_t start_us_ =
      std::chrono::duration_cast<std::chrono::microseconds>(std::chrono::system_clock::now().time_since_epoch())
          .count();
  int64_t time_us_ = start_us_;
  uint32_t seconds_ = 0;
  uint32_t operations_ = 0;
  uint32_t mask_ = 63;
};

}  // namespace vrambroker

#endif  // VRAMBROKER_ALLOCATOR_HEAP_HEAP_CLOCK_H_
