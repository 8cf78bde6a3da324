// SPDX-License-Identifier: Apache-2.0
//
// SessionRefusals: a session's refusals, and records explaining the next refusal.
#ifndef VRAMBROKER_SERVER_SESSIONS_SESSION_REFUSALS_H_
#define VRAMBROKER_SERVER_SESSIONS_SESSION_REFUSALS_H_

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <vector>

#include "allocator/base/mutex.h"
#include "server/base/steady_time.h"
#include "server/pool/segment_refusal.h"
#include "server/queue/request_queue.h"

namespace vrambroker {

// Thread-safe.
class SessionRefusals {
 public:
  using Counts = std::array<uint64_t, kOomCauses.size()>;  // by OomCause

  explicit SessionRefusals(size_t devices);

  void Count(int device, OomCause cause, SteadyTime now);
  Counts GetCounts(int device) const;
  // Time of the last refused request on `device`. Taken once.
  std::optional<SteadyTime> TakeLastTime(int device);

  // Keeps the steps tried for a refused lease with `bytes` in the largest segment, for the ExplainCall that usually
  // follows at once.
  void AddLeaseOutcome(int device, uint64_t bytes, SteadyTime now, WaitRecord outcome) ABSL_LOCKS_EXCLUDED(mu_);
  // Takes the oldest kept record for such a lease; each explains a single refusal. Empty without a recent refusal.
  WaitRecord TakeLeaseOutcome(int device, uint64_t bytes, SteadyTime now) ABSL_LOCKS_EXCLUDED(mu_);
  static constexpr std::chrono::seconds kExplainedWithin{5};
  static constexpr size_t kMaxLeaseOutcomes = 64;  // over all devices; the oldest are dropped

  // Whether to record a refusal now: one recording at a time, about ten in a row (a program catching a refusal retries
  // at once), and a twentieth of the time in the long run. If true, call EndRecording() later; `took`: 0 without a
  // recording.
  bool StartRecording(SteadyTime now);
  void EndRecording(SteadyTime now, SteadyTime::duration took);

 private:
  std::vector<std::array<std::atomic<uint64_t>, kOomCauses.size()>> counts_;  // by device, then cause
  std::vector<std::atomic<SteadyTime>> last_times_;                           // by device; 0: none, or taken
  std::atomic<bool> is_recording_{false};
  std::atomic<SteadyTime> recordings_paid_{};  // time at which recordings make up a twentieth of the time again

  struct LeaseOutcome {
    int device = 0;
    uint64_t bytes = 0;
    SteadyTime time;
    WaitRecord outcome;
  };
  Mutex mu_;
  std::deque<LeaseOutcome> lease_outcomes_ ABSL_GUARDED_BY(mu_);  // oldest first
};

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_SESSIONS_SESSION_REFUSALS_H_
