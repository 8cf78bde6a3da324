// SPDX-License-Identifier: Apache-2.0
//
// SessionRefusals: what a session was refused, and what explains the next refusal of it.
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
  // When a request on `device` was refused last. Taken once.
  std::optional<SteadyTime> TakeLastTime(int device);

  // Keeps what was tried for a refused lease whose largest segment has `bytes`, for the ExplainCall that usually
  // follows at once.
  void AddLeaseOutcome(int device, uint64_t bytes, SteadyTime now, WaitRecord outcome) ABSL_LOCKS_EXCLUDED(mu_);
  // Of such a lease, the oldest that is kept; each explains one refusal. Nothing where none was refused lately.
  WaitRecord TakeLeaseOutcome(int device, uint64_t bytes, SteadyTime now) ABSL_LOCKS_EXCLUDED(mu_);
  static constexpr std::chrono::seconds kExplainedWithin{5};
  static constexpr size_t kMaxLeaseOutcomes = 64;  // of all devices; the oldest make room

  // Whether a recording of a refusal may be taken now: one at a time, about ten in a row (a program that catches a
  // refusal tries again at once), and a twentieth of the time in the long run. If so, EndRecording() is to follow;
  // `took`: 0 if none was taken.
  bool StartRecording(SteadyTime now);
  void EndRecording(SteadyTime now, SteadyTime::duration took);

 private:
  std::vector<std::array<std::atomic<uint64_t>, kOomCauses.size()>> counts_;  // by device, then cause
  std::vector<std::atomic<SteadyTime>> last_times_;                           // by device; 0: none, or taken
  std::atomic<bool> is_recording_{false};
  std::atomic<SteadyTime> recordings_paid_{};  // when what was spent on them is a twentieth of the time again

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
