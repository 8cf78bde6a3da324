// SPDX-License-Identifier: Apache-2.0
//
// Timeline: what each device's memory was used for in the last minutes.
#ifndef VRAMBROKER_SERVER_HTTP_TIMELINE_H_
#define VRAMBROKER_SERVER_HTTP_TIMELINE_H_

#include <chrono>
#include <cstdint>
#include <deque>
#include <vector>

#include "allocator/base/mutex.h"
#include "server/core/broker_view.h"

namespace vrambroker {

// A device at one moment. All sizes are bytes.
struct TimelineSample {
  std::chrono::system_clock::time_point time;
  uint64_t allocated_bytes = 0;
  uint64_t leased_bytes = 0;          // charged to live sessions
  uint64_t inactive_split_bytes = 0;  // part of leased_bytes: free, in segments that also hold blocks
  uint64_t reclaimable_bytes = 0;     // part of leased_bytes: in segments that hold no block
  uint64_t idle_bytes = 0;            // held by the daemon, leased to nobody
  uint64_t left_behind_bytes = 0;     // left behind by sessions that are gone
  uint64_t refusals = 0;              // ever
  uint64_t waiting = 0;               // requests
};

// Of each device, by ordinal.
std::vector<TimelineSample> SamplesOf(const BrokerView& view, std::chrono::system_clock::time_point time);

// Safe to call from any thread.
class Timeline {
 public:
  static constexpr std::chrono::seconds kPeriod{2};         // between samples
  static constexpr std::chrono::minutes kLength{15};        // older ones are dropped
  static constexpr size_t kMaxSamples = kLength / kPeriod;  // of a device, about 80 bytes each

  explicit Timeline(size_t devices) : samples_(devices) {}

  // `samples` by device, of one moment.
  void Add(const std::vector<TimelineSample>& samples) ABSL_LOCKS_EXCLUDED(mu_);
  // Oldest first.
  std::vector<TimelineSample> Get(size_t device) const ABSL_LOCKS_EXCLUDED(mu_);

 private:
  mutable Mutex mu_;
  std::vector<std::deque<TimelineSample>> samples_ ABSL_GUARDED_BY(mu_);  // by device, oldest first
};

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_HTTP_TIMELINE_H_
