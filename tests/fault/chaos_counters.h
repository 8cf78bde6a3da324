// SPDX-License-Identifier: Apache-2.0
//
// State shared by the processes of the chaos test: counters in shared memory, and the limits of clients.
#ifndef VRAMBROKER_TESTS_FAULT_CHAOS_COUNTERS_H_
#define VRAMBROKER_TESTS_FAULT_CHAOS_COUNTERS_H_

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "allocator/base/bytes.h"

namespace vrambroker::fault {

inline constexpr uint64_t kChaosGuarantee = 40_MiB;  // guarantee of each client that has a guarantee
inline constexpr uint64_t kChaosLimit = 64_MiB;      // limit of each client of the first part; clients ask for more
inline constexpr int kUsualClients = 14;
inline constexpr size_t kMostDevices = 8;

// Samples added by several processes. Samples beyond the capacity are dropped.
class Samples {
 public:
  void Add(uint64_t value) {
    const uint64_t at = size_.fetch_add(1, std::memory_order_relaxed);
    if (at < values_.size()) values_[at].store(value, std::memory_order_relaxed);
  }
  uint64_t size() const { return size_.load() < values_.size() ? size_.load() : values_.size(); }
  uint64_t operator[](uint64_t i) const { return values_[i].load(std::memory_order_relaxed); }

 private:
  std::atomic<uint64_t> size_{0};
  std::array<std::atomic<uint64_t>, 1 << 16> values_{};
};

// Counters in a file mapped by all processes. Zeroed memory is valid.
struct ChaosCounters {
  // Constants for clients: set before the first client starts.
  std::atomic<uint64_t> capacity_bytes{0};  // capacity of each device
  std::atomic<uint64_t> devices{1};
  std::atomic<uint64_t> clients{0};  // more clients rest longer each: the total load stays as usual

  std::atomic<bool> stop{false};
  std::atomic<uint64_t> restarts{0};       // begun restarts of the daemon
  std::atomic<uint64_t> restarts_done{0};  // finished restarts: the new daemon serves

  std::atomic<uint64_t> verified_blocks{0};
  std::atomic<uint64_t> verified_bytes{0};
  std::atomic<uint64_t> wrong_blocks{0};
  std::atomic<uint64_t> broken_guarantees{0};
  std::atomic<uint64_t> kept_guarantees{0};  // granted requests within guarantees
  std::atomic<uint64_t> granted_at_once{0};
  std::atomic<uint64_t> granted_by_reclaim{0};
  std::atomic<uint64_t> granted_after_wait{0};
  std::atomic<uint64_t> refused{0};
  std::atomic<uint64_t> refused_by_limit{0};  // part of `refused`: refusals by the client's own limit
  std::atomic<uint64_t> refused_by_rate{0};   // refused calls of any kind
  std::atomic<uint64_t> cuts{0};
  std::atomic<uint64_t> resumed{0};
  std::atomic<uint64_t> new_sessions{0};  // sessions with another daemon, after a restart
  std::atomic<uint64_t> children{0};      // child processes, made by fork()
  std::atomic<uint64_t> orphans_verified{0};
  Samples reclaim_ns;          // times of requests granted by reclaim
  Samples guaranteed_back_ns;  // times until a client with a guarantee had the guarantee from a new daemon

  std::atomic<int64_t> storm_began_ns{0};  // CLOCK_MONOTONIC; 0: no storm is measured
  Samples storm_ns;                        // times from a storm's beginning until a new client had its memory
};

}  // namespace vrambroker::fault

#endif  // VRAMBROKER_TESTS_FAULT_CHAOS_COUNTERS_H_
