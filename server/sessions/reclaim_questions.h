// SPDX-License-Identifier: Apache-2.0
//
// ReclaimQuestions: what a session is asked to give back for others.
#ifndef VRAMBROKER_SERVER_SESSIONS_RECLAIM_QUESTIONS_H_
#define VRAMBROKER_SERVER_SESSIONS_RECLAIM_QUESTIONS_H_

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "allocator/base/ids.h"
#include "allocator/base/mutex.h"
#include "server/base/steady_time.h"
#include "server/pool/segment_pool.h"

namespace vrambroker {

// One question at a time for each device. Requests that come meanwhile share the next one.
// Thread-safe.
class ReclaimQuestions {
 public:
  // Asks the session for `bytes` of wholly free segments of the device; `answered` is called once, when they are there
  // or nobody answers any more. Never blocks. `time`: how long the answer is waited for.
  using Send =
      std::function<void(int device, uint64_t bytes, std::chrono::milliseconds time, std::function<void()> answered)>;

  // `pools`, by device, outlive it.
  ReclaimQuestions(SessionId session, std::string name, std::vector<SegmentPool*> pools,
                   std::function<SteadyTime()> clock, Send send);

  // Calls `answered` when the question that asks for this is answered, perhaps before this returns.
  void Ask(int device, uint64_t bytes, std::chrono::milliseconds time, std::function<void()> answered)
      ABSL_LOCKS_EXCLUDED(mu_);
  // Whether the session has owed the answer to the question that is under way for longer than `time`.
  bool IsSilent(int device, std::chrono::milliseconds time, SteadyTime now) const ABSL_LOCKS_EXCLUDED(mu_);
  // What a client may take to answer before the next one is asked instead.
  static constexpr std::chrono::milliseconds kSilence{200};

 private:
  struct OfDevice {
    bool asked = false;
    SteadyTime asked_since;                   // the question that is under way
    std::chrono::milliseconds time{0};        // that an answer is waited for
    std::vector<std::function<void()>> now;   // for the answer that is under way
    std::vector<std::function<void()>> next;  // for the one after that
    uint64_t next_bytes = 0;
    uint64_t now_bytes = 0;
    uint64_t reserved_before = 0;
  };

  void SendNext(int device) ABSL_LOCKS_EXCLUDED(mu_);
  void Answered(int device) ABSL_LOCKS_EXCLUDED(mu_);

  // Constant after construction.
  const SessionId session_;
  const std::string name_;
  const std::vector<SegmentPool*> pools_;
  const std::function<SteadyTime()> clock_;
  const Send send_;

  mutable Mutex mu_;  // held for nothing but this; no other lock is taken
  std::vector<OfDevice> devices_ ABSL_GUARDED_BY(mu_);
};

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_SESSIONS_RECLAIM_QUESTIONS_H_
