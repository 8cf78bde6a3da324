// SPDX-License-Identifier: Apache-2.0
//
// Timeline: each device's use of memory over the last minutes, and each session's share.
#ifndef VRAMBROKER_SERVER_HTTP_TIMELINE_H_
#define VRAMBROKER_SERVER_HTTP_TIMELINE_H_

#include <chrono>
#include <cstdint>
#include <deque>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "allocator/base/ids.h"
#include "allocator/base/mutex.h"
#include "server/core/broker_view.h"

namespace vrambroker {

// A device at a moment. All sizes are bytes.
struct TimelineSample {
  std::chrono::system_clock::time_point time;
  uint64_t allocated_bytes = 0;
  uint64_t leased_bytes = 0;          // charged to live sessions
  uint64_t inactive_split_bytes = 0;  // part of leased_bytes: free, in segments with blocks
  uint64_t reclaimable_bytes = 0;     // part of leased_bytes: in segments without blocks
  uint64_t idle_bytes = 0;            // held by the daemon, not leased
  uint64_t left_behind_bytes = 0;     // left behind by ended sessions
  uint64_t refusals = 0;              // ever
  uint64_t waiting = 0;               // requests
};

// Samples each device, by ordinal.
std::vector<TimelineSample> SamplesOf(const BrokerView& view, std::chrono::system_clock::time_point time);

// A session on a device at a moment.
struct SessionSample {
  std::chrono::system_clock::time_point time;
  uint64_t reserved_bytes = 0;
  uint64_t allocated_bytes = 0;
};

// Safe to call from any thread.
class Timeline {
 public:
  static constexpr std::chrono::seconds kPeriod{2};         // between samples
  static constexpr std::chrono::minutes kLength{15};        // older samples are dropped
  static constexpr size_t kMaxSamples = kLength / kPeriod;  // of a device, about 80 bytes each

  static constexpr std::chrono::seconds kSessionPeriod{6};  // between a session's samples, except its newest
  static constexpr size_t kMaxSessionSamples = kLength / kSessionPeriod;  // on a device, 24 bytes each
  // Histories of sessions on devices. At the limit, new sessions get no history.
  static constexpr size_t kMaxHistories = 4096;

  explicit Timeline(size_t devices) : samples_(devices) {}

  // Adds the devices and live sessions of `view`. Drops the histories of sessions missing from `view`.
  void Add(const BrokerView& view, std::chrono::system_clock::time_point time) ABSL_LOCKS_EXCLUDED(mu_);

  // Adds `samples` by device, taken at the same moment.
  void Add(const std::vector<TimelineSample>& samples) ABSL_LOCKS_EXCLUDED(mu_);
  // Oldest first.
  std::vector<TimelineSample> Get(size_t device) const ABSL_LOCKS_EXCLUDED(mu_);
  // Oldest first, from when the session first held memory of the device.
  std::vector<SessionSample> GetOfSession(SessionId session, size_t device) const ABSL_LOCKS_EXCLUDED(mu_);

 private:
  void AddSessions(const BrokerView& view, std::chrono::system_clock::time_point time) ABSL_LOCKS_EXCLUDED(mu_);

  mutable Mutex mu_;
  std::vector<std::deque<TimelineSample>> samples_ ABSL_GUARDED_BY(mu_);  // by device, oldest first
  // Samples by session and device, oldest first.
  absl::flat_hash_map<std::pair<SessionId, size_t>, std::deque<SessionSample>> histories_ ABSL_GUARDED_BY(mu_);
};

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_HTTP_TIMELINE_H_
