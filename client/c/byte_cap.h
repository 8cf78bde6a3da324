// SPDX-License-Identifier: Apache-2.0
#ifndef VRAMBROKER_CLIENT_C_BYTE_CAP_H_
#define VRAMBROKER_CLIENT_C_BYTE_CAP_H_

#include <atomic>
#include <cstdint>

namespace vrambroker::c_library {

// Counts held bytes against a cap. Thread-safe; never blocks.
class ByteCap {
 public:
  struct Charged {
    bool ok = false;
    uint64_t held = 0;  // bytes, before the charge
    uint64_t cap = 0;   // bytes; 0: no cap
  };

  // Charges `bytes` more, unless above the cap. A refused charge changes nothing, not even for a moment: a large
  // request never makes another thread's fitting request fail.
  Charged Charge(uint64_t bytes) {
    uint64_t held = held_.load(std::memory_order_relaxed);
    for (;;) {
      const uint64_t cap = cap_.load(std::memory_order_relaxed);
      if (cap != 0 && (held > cap || bytes > cap - held)) return {.held = held, .cap = cap};
      if (held_.compare_exchange_weak(held, held + bytes, std::memory_order_relaxed)) {
        return {.ok = true, .held = held, .cap = cap};
      }
    }
  }
  void Uncharge(uint64_t bytes) { held_.fetch_sub(bytes, std::memory_order_relaxed); }
  // 0: no cap. Held bytes stay; only later charges are refused.
  void SetCap(uint64_t bytes) { cap_.store(bytes, std::memory_order_relaxed); }

 private:
  std::atomic<uint64_t> held_{0};
  std::atomic<uint64_t> cap_{0};
};

}  // namespace vrambroker::c_library

#endif  // VRAMBROKER_CLIENT_C_BYTE_CAP_H_
