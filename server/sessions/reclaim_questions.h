// SPDX-License-Identifier: Apache-2.0
//
// ReclaimQuestions: questions to a session to give memory back.
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

// Sends one question at a time per device. Requests arriving meanwhile share the next question. Thread-safe.
class ReclaimQuestions {
 public:
  // Asks the session for `bytes` of wholly free segments of the device. Calls `answered` once, when the segments are
  // back or no answer will come. Never blocks. `time`: time limit for the answer.
  using Send =
      std::function<void(int device, uint64_t bytes, std::chrono::milliseconds time, std::function<void()> answered)>;

  // `pools`, indexed by device, outlive the object.
  ReclaimQuestions(SessionId session, std::string name, std::vector<SegmentPool*> pools,
                   std::function<SteadyTime()> clock, Send send);

  // Calls `answered` when the question for this request is answered, perhaps before Ask() returns.
  void Ask(int device, uint64_t bytes, std::chrono::milliseconds time, std::function<void()> answered)
      ABSL_LOCKS_EXCLUDED(mu_);
  // Whether the running question has been unanswered for longer than `time`.
  bool IsSilent(int device, std::chrono::milliseconds time, SteadyTime now) const ABSL_LOCKS_EXCLUDED(mu_);
  // Time for a client's answer before the next client is asked instead.
  static constexpr std::chrono::milliseconds kSilence{200};

 private:
  struct OfDevice {
    bool asked = false;
    SteadyTime asked_since;                   // start of the running question
    std::chrono::milliseconds time{0};        // time limit for an answer
    std::vector<std::function<void()>> now;   // waiting for the running answer
    std::vector<std::function<void()>> next;  // waiting for the next answer
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

  mutable Mutex mu_;  // guards only devices_; no other lock is taken under it
  std::vector<OfDevice> devices_ ABSL_GUARDED_BY(mu_);
};

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_SESSIONS_RECLAIM_QUESTIONS_H_
