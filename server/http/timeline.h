// SPDX-License-Identifier: Apache-2.0
//
// Timeline: what each device's memory was used for in the last minutes, and what each session had of it.
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

// A session on a device at one moment.
struct SessionSample {
  std::chrono::system_clock::time_point time;
  uint64_t reserved_bytes = 0;
  uint64_t allocated_bytes = 0;
};

// Safe to call from any thread.
class Timeline {
 public:
  static constexpr std::chrono::seconds kPeriod{2};         // between samples
  static constexpr std::chrono::minutes kLength{15};        // older ones are dropped
  static constexpr size_t kMaxSamples = kLength / kPeriod;  // of a device, about 80 bytes each

  static constexpr std::chrono::seconds kSessionPeriod{6};  // between a session's samples, before its newest one
  static constexpr size_t kMaxSessionSamples = kLength / kSessionPeriod;  // on a device, 24 bytes each
  // Histories of sessions on devices. While there are as many, sessions that come have none.
  static constexpr size_t kMaxHistories = 4096;

  explicit Timeline(size_t devices) : samples_(devices) {}

  // Adds the devices and live sessions of `view`. Histories of other sessions go.
  void Add(const BrokerView& view, std::chrono::system_clock::time_point time) ABSL_LOCKS_EXCLUDED(mu_);

  // `samples` by device, of one moment.
  void Add(const std::vector<TimelineSample>& samples) ABSL_LOCKS_EXCLUDED(mu_);
  // Oldest first.
  std::vector<TimelineSample> Get(size_t device) const ABSL_LOCKS_EXCLUDED(mu_);
  // Oldest first, from when the session first held memory of the device.
  std::vector<SessionSample> GetOfSession(SessionId session, size_t device) const ABSL_LOCKS_EXCLUDED(mu_);

 private:
  void AddSessions(const BrokerView& view, std::chrono::system_clock::time_point time) ABSL_LOCKS_EXCLUDED(mu_);

  mutable Mutex mu_;
  std::vector<std::deque<TimelineSample>> samples_ ABSL_GUARDED_BY(mu_);  // by device, oldest first
  // By session and device, oldest first.
  absl::flat_hash_map<std::pair<SessionId, size_t>, std::deque<SessionSample>> histories_ ABSL_GUARDED_BY(mu_);
};

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_HTTP_TIMELINE_H_
