// SPDX-License-Identifier: Apache-2.0
//
// GrowthQueue: the requests for memory of one device that others have to give something up for. Asks those who hold
// idle memory to give it back, and lets requests wait.
#ifndef VRAMBROKER_SERVER_GROWTH_QUEUE_H_
#define VRAMBROKER_SERVER_GROWTH_QUEUE_H_

#include <prometheus/histogram.h>
#include <sys/types.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <limits>
#include <optional>
#include <utility>
#include <vector>

#include "absl/container/btree_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "allocator/ids.h"
#include "allocator/mutex.h"
#include "server/reclaim.h"
#include "server/segment_pool.h"

namespace vrambroker {

// What was done for a request.
struct GrowthOutcome {
  std::chrono::milliseconds waited{0};
  absl::btree_map<SessionId, bool> asked;  // to give memory back; true: it has answered
};

struct GrowthRequest {
  SessionId session{};
  uid_t uid = 0;  // whose session it is
  uint64_t bytes = 0;
  bool guarantee = false;   // raises the session's guarantee to `bytes`; else charges `bytes`: SegmentPool::Grant()
  SteadyTime deadline;      // a request that may not wait has its time of arrival; reclaim is tried in any case
  uint64_t cancel_key = 0;  // for Cancel(); 0: none
  // Tries to serve the request otherwise: true when it needs no grant any more. For Retry(); may be none.
  std::function<bool()> retry;
  // Once. OK: it is granted. SegmentRefused(), or the status of Cancel().
  std::function<void(const absl::Status&, const GrowthOutcome&)> done;
};

struct WaitingRequest {
  SessionId session{};
  uint64_t bytes = 0;
  bool guarantee = false;
  SteadyTime since;
  SteadyTime deadline;
};

enum class WaitOutcome { kGranted, kRefused, kCancelled };

inline constexpr std::array<WaitOutcome, 3> kWaitOutcomes = {WaitOutcome::kGranted, WaitOutcome::kRefused,
                                                             WaitOutcome::kCancelled};

const char* WaitOutcomeName(WaitOutcome outcome);  // "granted", "refused", "cancelled"

// What became of the requests, ever, and what still waits.
struct GrowthFigures {
  size_t waiting = 0;
  std::optional<SteadyTime> oldest;  // since when; none when nothing waits
  std::array<prometheus::ClientMetric::Histogram, kWaitOutcomes.size()> durations;  // seconds, by WaitOutcome
};

struct GrowthQueueOptions {
  // How long those who are asked have to answer. After an eighth of it everybody else is asked as well.
  std::chrono::milliseconds reclaim_timeout{2000};
  // How long free memory is held back for one request at most; 0: never.
  std::chrono::milliseconds hold_back_time{1000};
  // How much of it at most.
  uint64_t hold_back_bytes = std::numeric_limits<uint64_t>::max();
};

struct GrowthQueueHooks {
  std::function<SteadyTime()> clock = [] { return std::chrono::steady_clock::now(); };
  // The sessions that hold memory of the device and can be asked.
  std::function<std::vector<ReclaimCandidate>()> candidates;
  // Asks `victim` to give `bytes` back; calls `answered` when it has, or will not. Never blocks.
  std::function<void(const ReclaimVictim& victim, std::function<void()> answered)> ask;
  // NextWake() may be earlier than before.
  std::function<void()> wake_changed;
};

// Whatever fits is served, by priority, then by arrival: a small request does not wait for a large one. So that a large
// one does not starve, free memory is held back for it for a moment, once it has waited for kHoldAfter:
//
// - only when it can be served with what is expected to come back meanwhile: what others were asked for and reported as
//   idle, what they are closing, what settles in quarantine, and as much as has come back lately from sessions that
//   take and give memory all the time;
// - against sessions of its priority and below, but not against those that it waits for: SegmentPool::HoldBack();
// - for hold_back_time at most. Then no request has memory held back for as long as that took, so that those who were
//   held back are served, and none of the same user for kUserRest times as long;
// - for one request at a time, the first that qualifies.
//
// A request that only this keeps from its memory is not refused before it has waited for reclaim_timeout, even when it
// may not wait. Nor is any while somebody still owes an answer, whoever had it asked, for reclaim_timeout at most.
// Growth within a guarantee does not wait, with one exception.
//
// The exception holds for all requests for memory: the session has closed memory of an earlier run of the daemon, and
// the daemon has not seen yet that it is gone. A request that does not fit, be it only for the session's own limit,
// then waits until the daemon has seen it, for kLongestLook at most. Meanwhile nobody is asked for memory, and none is
// held back.
//
// Requests take no thread: OnRoom(), OnTimer() and answers of those who were asked carry them on. Thread-safe.
class GrowthQueue {
 public:
  static constexpr std::chrono::milliseconds kHoldAfter{1000};
  static constexpr int kUserRest = 4;
  static constexpr std::chrono::milliseconds kLongestLook{10000};
  // While requests wait, those whose figures say that they hold idle memory are asked again this often; those that gave
  // nothing the last time, and whose figures still say the same, less often.
  static constexpr std::chrono::milliseconds kAskPeriod{250};
  static constexpr std::chrono::milliseconds kAskInVainPeriod{2000};

  // `pool` outlives it.
  GrowthQueue(SegmentPool* pool, const GrowthQueueOptions& options, GrowthQueueHooks hooks);

  // `request.done` is called, perhaps before this returns.
  void Add(GrowthRequest request) ABSL_LOCKS_EXCLUDED(mu_);
  // Ends the requests of a session, or that with this key, with `why`.
  void Cancel(SessionId session, const absl::Status& why) ABSL_LOCKS_EXCLUDED(mu_);
  void Cancel(SessionId session, uint64_t cancel_key, const absl::Status& why) ABSL_LOCKS_EXCLUDED(mu_);
  // The session has freed something: its requests are tried otherwise, and end with Cancelled where that succeeds.
  void Retry(SessionId session) ABSL_LOCKS_EXCLUDED(mu_);
  // The session's requests go to their new place.
  void PriorityIs(SessionId session, int priority) ABSL_LOCKS_EXCLUDED(mu_);

  // Something has happened that may let a request through. Cheap when none waits.
  void OnRoom() ABSL_LOCKS_EXCLUDED(mu_);
  // The time of NextWake() has come.
  void OnTimer() ABSL_LOCKS_EXCLUDED(mu_) { OnRoom(); }
  std::optional<SteadyTime> NextWake() const ABSL_LOCKS_EXCLUDED(mu_);

  GrowthFigures GetFigures() const ABSL_LOCKS_EXCLUDED(mu_);
  // In their order.
  std::vector<WaitingRequest> GetWaiting() const ABSL_LOCKS_EXCLUDED(mu_);
  size_t size() const { return size_.load(std::memory_order_relaxed); }

 private:
  enum class Asking { kNobody, kChosen, kSoonEverybody, kEverybody, kDone, kAgain };
  struct Asked {
    LastAsked last;
    SteadyTime at;
    uint64_t expected = 0;  // of what was idle, as long as it is not answered
  };
  struct Waiter {
    GrowthRequest request;
    SteadyTime since;
    bool awaits_look = false;         // its session has closed memory, and the daemon has not seen that yet
    SteadyTime served_since;          // when it began to be served like all others
    Asking asking = Asking::kNobody;  // who is being asked, or was last
    bool has_asked = false;           // all the way, at least once
    SteadyTime asking_since;
    SteadyTime ask_again;
    size_t unanswered = 0;
    absl::btree_map<SessionId, Asked> asked;
    uint64_t round = 0;  // of asking; answers to earlier ones do not count
    bool served_otherwise = false;
  };
  // What a session was asked, for any request, and has not answered.
  struct Owed {
    size_t answers = 0;
    SteadyTime since;  // or since its last answer: it answers one after the other
  };
  using Place = std::pair<int, uint64_t>;  // minus the priority, arrival
  using Waiters = absl::btree_map<Place, Waiter>;
  using Finished = std::vector<std::pair<Waiter, absl::Status>>;
  // Free memory is held back for a request.
  struct Hold {
    Place place;  // of the request
    uid_t uid = 0;
    SteadyTime since;
    uint64_t churning = 0;         // what was expected to come back from sessions that take and give all the time
    uint64_t came_back_total = 0;  // then
  };

  void Serve() ABSL_LOCKS_EXCLUDED(mu_);
  // Serves what can be served, in order, and ends what has waited for too long.
  void ServeInOrder(SteadyTime now, Finished& finished) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Ends the waiting for looks that are done, or take too long.
  void EndLooks(SteadyTime now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Returns the arrivals that are to ask now.
  std::vector<uint64_t> ChooseWhoAsks(SteadyTime now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Status TryGrant(const GrowthRequest& request, const Place& place) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Ends the hold when its time is up, or when it is of no use any more. True: it did.
  bool EndHold(SteadyTime now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  bool IsOver(const Hold& hold, SteadyTime now) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Begins one for the first request that qualifies.
  void BeginHold(SteadyTime now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Notes how much has come back so far; returns how much of that since hold_back_time ago.
  uint64_t CameBackLately(SteadyTime now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // What others reported as idle and were asked for; not what has been answered, or is overdue.
  uint64_t AskedFor(const Waiter& waiter, SteadyTime now) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Only a hold keeps the request from its memory.
  bool IsHeldBack(const GrowthRequest& request, const Place& place) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Asks for the request of this arrival; goes on to the next step when there is nobody to ask.
  void Ask(uint64_t arrival) ABSL_LOCKS_EXCLUDED(mu_);
  // Who of them is to be asked for the request now, in the step that it is in.
  std::vector<ReclaimVictim> Choose(const Waiter& waiter, int priority, uint64_t missing,
                                    const std::vector<ReclaimCandidate>& candidates, SteadyTime now) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Answered(uint64_t arrival, uint64_t round, SessionId victim) ABSL_LOCKS_EXCLUDED(mu_);
  Waiters::iterator Find(uint64_t arrival) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void CancelIf(const std::function<bool(const GrowthRequest&)>& condition, const absl::Status& why)
      ABSL_LOCKS_EXCLUDED(mu_);
  // `first`: of those that await no look.
  SteadyTime WakeOf(const Waiter& waiter, bool first, SteadyTime now) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void TellAll(const Finished& finished);
  static void StopAsking(Waiter& waiter);
  bool IsHopeless(const Waiter& waiter, const Place& place, SteadyTime now) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Until when the last answer that is to come is not overdue; nullopt when none is to come.
  std::optional<SteadyTime> AnswersUntil(SteadyTime now) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  SegmentPool& pool_;
  const GrowthQueueOptions options_;
  const GrowthQueueHooks hooks_;

  std::atomic<size_t> size_{0};
  std::array<prometheus::Histogram, kWaitOutcomes.size()> durations_;  // seconds, by WaitOutcome
  std::atomic<uint64_t> serves_wanted_{0};  // one thread serves at a time; the others leave it to that one

  mutable Mutex mu_;
  uint64_t next_arrival_ ABSL_GUARDED_BY(mu_) = 1;
  SteadyTime everybody_asked_ ABSL_GUARDED_BY(mu_) = SteadyTime::min();
  Waiters waiters_ ABSL_GUARDED_BY(mu_);
  absl::btree_map<SessionId, Owed> owed_ ABSL_GUARDED_BY(mu_);
  std::optional<Hold> hold_ ABSL_GUARDED_BY(mu_);
  SteadyTime rest_until_ ABSL_GUARDED_BY(mu_) = SteadyTime::min();              // no request gets a hold before
  absl::btree_map<uid_t, SteadyTime> users_rest_until_ ABSL_GUARDED_BY(mu_);    // of those who had one
  std::deque<std::pair<SteadyTime, uint64_t>> came_back_ ABSL_GUARDED_BY(mu_);  // totals, over hold_back_time
};

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_GROWTH_QUEUE_H_
