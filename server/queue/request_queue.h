// SPDX-License-Identifier: Apache-2.0
//
// RequestQueue: the requests that wait for one device's memory. Asks sessions that hold reclaimable memory for it.
#ifndef VRAMBROKER_SERVER_QUEUE_REQUEST_QUEUE_H_
#define VRAMBROKER_SERVER_QUEUE_REQUEST_QUEUE_H_

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
#include <random>
#include <utility>
#include <vector>

#include "absl/container/btree_map.h"
#include "absl/container/btree_set.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "allocator/base/ids.h"
#include "allocator/base/mutex.h"
#include "server/base/user_key.h"
#include "server/pool/segment_pool.h"
#include "server/queue/first_fit.h"
#include "server/queue/reclaim.h"

namespace vrambroker {

// What was done for a request.
struct WaitRecord {
  std::chrono::milliseconds waited{0};
  absl::btree_map<SessionId, bool> asked;  // to give memory back; true: it has answered
};

struct QueuedRequest {
  SessionId session{};
  UserKey user;  // whose session it is
  uint64_t bytes = 0;
  bool guarantee = false;   // raises the session's guarantee to `bytes`; else charges `bytes`: SegmentPool::Grant()
  SteadyTime deadline;      // the time of arrival if the request may not wait; others are asked in any case
  uint64_t cancel_key = 0;  // for Cancel(); 0: none
  // Tries to serve the request otherwise: true when it needs no grant any more. For Retry(); may be none.
  std::function<bool()> retry;
  // Once. OK: it is granted. SegmentRefused(), or the status of Cancel().
  std::function<void(const absl::Status&, const WaitRecord&)> done;
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
struct WaitStats {
  size_t waiting = 0;
  std::optional<SteadyTime> oldest;  // since when; none when nothing waits
  std::array<prometheus::ClientMetric::Histogram, kWaitOutcomes.size()> durations;  // seconds, by WaitOutcome
  uint64_t visits = 0;  // times that a pass looked at a request
};

struct RequestQueueOptions {
  // How long those who are asked have to answer. After an eighth of it everybody else is asked as well.
  std::chrono::milliseconds reclaim_timeout{2000};
  // How long free memory is held back for one request at most; 0: never.
  std::chrono::milliseconds hold_back_time{1000};
  // How much of it at most.
  uint64_t hold_back_bytes = std::numeric_limits<uint64_t>::max();
};

struct RequestQueueHooks {
  std::function<SteadyTime()> clock = [] { return std::chrono::steady_clock::now(); };
  // The sessions that hold memory of the device and can be asked.
  std::function<std::vector<ReclaimCandidate>()> candidates;
  // Asks `victim` to give `bytes` back; calls `answered` when it has, or will not. Never blocks.
  std::function<void(const ReclaimVictim& victim, std::function<void()> answered)> ask;
  // NextWake() may be earlier than before.
  std::function<void()> wake_changed;
  // Runs a task of the queue. At most two are pending: one serves, one asks. Each ends soon and never blocks.
  std::function<void(std::function<void()> task)> run = [](const std::function<void()>& task) { task(); };
};

// Whatever fits is served, by priority, then by arrival: a small request does not wait for a large one. So that a large
// one does not starve, free memory is held back for it for a moment, once it has waited for kHoldAfter:
//
// - only when it can be served with what is expected to come back meanwhile: what others were asked for and reported as
//   reclaimable, what they are closing, what settles in quarantine, and as much as has come back lately from sessions
//   that take and give memory all the time;
// - against sessions of its priority and below, but not against those that it waits for: SegmentPool::HoldBack();
// - for hold_back_time at most. Then no request has memory held back for as long as that took, so that those who were
//   held back are served, and none of the same user for kUserRest times as long;
// - for one request at a time, the first that qualifies.
//
// A request that only this keeps from its memory is not refused before it has waited for reclaim_timeout, even when it
// may not wait. Nor is any while a session still owes an answer, to any request, for reclaim_timeout at most.
// Growth within a guarantee does not wait, with one exception.
//
// The exception holds for all requests for memory: the session has closed memory of an earlier run of the daemon, and
// the daemon has not seen yet that it is gone. A request that does not fit, be it only for the session's own limit,
// then waits until the daemon has seen it, for kLongestLook at most. Meanwhile nobody is asked for memory, and none is
// held back.
//
// Requests take no thread: OnCapacityFreed(), OnTimer() and answers of those who were asked have a pass over the queue
// made, by hooks.run. There is one pass at a time, and it looks at kMostVisits requests at most before others have
// their turn. A pass finds those that can be served without looking at the others: it takes O(log n) for each that is
// served, refused or asks, and for each that a hold begins or ends to keep from its memory. Beside that, it takes O(log
// n) for each claim, and each user with a limit, and each session with a guarantee, of whom something waits. All are
// looked at when a guarantee was raised or the device broke, and, some 64 times a second at most, those that have
// waited for kHoldAfter.
//
// A session that takes memory past the queue waits for the pending pass (AfterPass()), except within its guarantee.
//
// Thread-safe. No call waits for a pass.
class RequestQueue {
 public:
  static constexpr std::chrono::milliseconds kHoldAfter{1000};
  static constexpr int kUserRest = 4;
  static constexpr std::chrono::milliseconds kLongestLook{10000};
  // While requests wait, sessions whose figures say that they hold reclaimable memory are asked again this often. A
  // session that gave nothing the last time, and whose figures still say the same, is asked less often. So is a session
  // of higher priority than the request's.
  static constexpr std::chrono::milliseconds kAskPeriod{250};
  static constexpr std::chrono::milliseconds kAskInVainPeriod{2000};
  // For all requests together, everybody is asked this often at most.
  static constexpr std::chrono::milliseconds kEverybodyPeriod{100};
  // Whether holding memory back is of use is looked at this many times in hold_back_time, and at least this often.
  static constexpr int kHoldLooks = 64;
  static constexpr std::chrono::milliseconds kLongestHoldLook{15};
  // So many passes may keep those waiting who take memory past the queue.
  static constexpr int kMostUnserved = 64;
  // In a pass, and in a task that asks.
  static constexpr int kMostVisits = 256;
  static constexpr int kMostOfWalk = 128;  // of these, where all are to be visited
  static constexpr int kMostAsking = 64;

  // `pool` outlives it.
  RequestQueue(SegmentPool* pool, const RequestQueueOptions& options, RequestQueueHooks hooks);

  // `request.done` is called, perhaps before this returns.
  void Add(QueuedRequest request) ABSL_LOCKS_EXCLUDED(mu_);
  // Ends the requests of a session, or that with this key, with `why`.
  void Cancel(SessionId session, const absl::Status& why) ABSL_LOCKS_EXCLUDED(mu_);
  void Cancel(SessionId session, uint64_t cancel_key, const absl::Status& why) ABSL_LOCKS_EXCLUDED(mu_);
  // The session has freed something: its requests are tried otherwise, and end with Cancelled where that succeeds.
  void Retry(SessionId session) ABSL_LOCKS_EXCLUDED(mu_);
  // The session's requests go to their new place. The pool knows the priority already.
  void UpdatePriority(SessionId session, int priority) ABSL_LOCKS_EXCLUDED(mu_);

  // Something has happened that may let a request through. Never waits for a pass.
  void OnCapacityFreed() ABSL_LOCKS_EXCLUDED(mu_);
  // Calls `then` once those who wait have had their turn at what is free now: by a pass that is to come, or at once.
  // For sessions that take memory past the queue.
  void AfterPass(std::function<void()> then) ABSL_LOCKS_EXCLUDED(mu_, after_mu_);
  bool IsPassToCome() const { return size() > 0 && passes_wanted_.load() > 0; }
  // The time of NextWake() has come.
  void OnTimer() ABSL_LOCKS_EXCLUDED(mu_) { OnCapacityFreed(); }
  std::optional<SteadyTime> NextWake() const ABSL_LOCKS_EXCLUDED(mu_);

  WaitStats GetStats() const ABSL_LOCKS_EXCLUDED(mu_);
  // In their order.
  std::vector<WaitingRequest> GetWaiting() const ABSL_LOCKS_EXCLUDED(mu_);
  size_t size() const { return size_.load(std::memory_order_relaxed); }

 private:
  enum class Asking { kNobody, kChosen, kSoonEverybody, kEverybody, kDone, kAgain };
  struct Asked {
    LastAsked last;
    SteadyTime at;
    uint64_t expected = 0;  // of what was reclaimable, as long as it is not answered
  };
  // To all requests of a group, as much is free. What one needs is compared with that.
  struct Group {
    std::optional<std::pair<ShareId, uint64_t>> share{};  // and its limit; none: without one
    std::optional<SessionId> session{};                   // that has a guarantee; none: of those without one
    bool is_for_guarantees = false;
    bool is_held_back = false;
    friend auto operator<=>(const Group&, const Group&) = default;
  };
  struct Waiter {
    QueuedRequest request;
    SteadyTime since;
    bool awaits_look = false;         // its session has closed memory, and the daemon has not seen that yet
    SteadyTime served_since;          // when it began to be served like all others
    Asking asking = Asking::kNobody;  // who is being asked, or was last
    bool has_asked = false;           // all the way, at least once
    SteadyTime asking_since;
    SteadyTime ask_again;
    size_t unanswered = 0;
    absl::btree_map<SessionId, Asked> asked;
    uint64_t expected = 0;  // the sum of that which is not answered
    uint64_t round = 0;     // of asking; answers to earlier ones do not count
    bool served_otherwise = false;
    std::optional<Group> group = std::nullopt;  // where it is in groups_
    SteadyTime wake = SteadyTime::max();        // where it is in timers_
  };
  using Waiters = absl::btree_map<Place, Waiter>;
  using Finished = std::vector<std::pair<Waiter, absl::Status>>;
  // The requests of a session, and its figures as of its last change.
  struct OfSession {
    absl::btree_set<std::pair<uint64_t, Place>> requests;  // by their bytes
    absl::btree_set<Place> guarantees;                     // of these
    uint64_t unused_guarantee_bytes = 0;
    uint64_t share_limit_bytes = 0;
    bool has_guarantee = false;
  };
  // What a session was asked, for any request, and has not answered.
  struct Owed {
    size_t answers = 0;
    SteadyTime since;  // or since its last answer: it answers one after the other
  };
  // Free memory is held back for a request.
  struct Hold {
    Place place;  // of the request
    UserKey user;
    SteadyTime since;
    uint64_t churning = 0;         // what was expected to come back from sessions that take and give all the time
    uint64_t came_back_total = 0;  // then
  };

  // ---- request_queue.cc ----

  // Has a pass made, unless one is to come that has not begun.
  void Wake() ABSL_LOCKS_EXCLUDED(mu_);
  void Pass() ABSL_LOCKS_EXCLUDED(mu_);
  // Has some more visited, when all are to be.
  void Walk() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Visits, in order, the requests in to_visit_ and those that can be served. False: one pass is not enough for them.
  bool ServeInOrder(SteadyTime now, Finished& finished, std::vector<Place>& kept) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Serves the request, ends it, or keeps it.
  void Visit(const Place& place, SteadyTime now, Finished& finished, std::vector<Place>& kept)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Status TryGrant(const QueuedRequest& request, const Place& place) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  bool IsHopeless(const Waiter& waiter, const Place& place, SteadyTime now) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Looks at what the pool has changed since the last time.
  void TakeChanges() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Reconsider(SessionId session) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  uint64_t FreeFor(const Group& group) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  std::optional<Place> FirstThatFits() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Those whose time has come, and those that nothing can be expected for any more, are to be visited.
  void CallDue(SteadyTime now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Ends the waiting for looks that are done.
  void EndLooks(SteadyTime now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void TellAll(const Finished& finished);
  std::vector<std::function<void()>> TakeAfter() ABSL_LOCKS_EXCLUDED(after_mu_);
  void CallAfter() ABSL_LOCKS_EXCLUDED(mu_, after_mu_);

  // Puts it where it is found again, to be visited.
  void Insert(const Place& place, Waiter waiter) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  Waiter Remove(Waiters::iterator it) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  Waiters::iterator Find(uint64_t arrival) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  std::vector<Place> PlacesOf(SessionId session) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void CancelIf(SessionId session, const std::function<bool(const QueuedRequest&)>& condition, const absl::Status& why)
      ABSL_LOCKS_EXCLUDED(mu_);
  // Where it is found when what it needs is free.
  void PutInGroup(const Place& place, Waiter& waiter, const AccountState& account, bool is_held_back)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void TakeFromGroup(const Place& place, Waiter& waiter) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void SetTimer(const Place& place, Waiter& waiter, SteadyTime now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  SteadyTime WakeOf(const Waiter& waiter, SteadyTime now) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  // ---- request_queue_asking.cc: who is asked ----

  // Takes those that were kept a step further, and the first of all.
  void ChooseWhoAsks(const std::vector<Place>& kept, SteadyTime now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Asks for the requests that are to ask, some at a time. A task of its own: it looks at all sessions.
  void AskForThose() ABSL_LOCKS_EXCLUDED(mu_);
  // What a session is asked for several requests at once.
  struct Question {
    ReclaimVictim victim;
    std::vector<std::pair<uint64_t, uint64_t>> requests;  // arrival, and round
  };
  struct Questions {
    std::optional<std::vector<ReclaimCandidate>> candidates;  // looked up once, when somebody lacks something
    std::vector<Question> questions;
    absl::flat_hash_map<SessionId, size_t> of_session;  // indices of these
  };
  // Adds what is to be asked for the request of this arrival, which goes on to the next step when that is nothing.
  void Ask(uint64_t arrival, Questions& questions) ABSL_LOCKS_EXCLUDED(mu_);
  // Who of them is to be asked for the request now, in the step that it is in.
  std::vector<ReclaimVictim> Choose(const Waiter& waiter, int priority, const Missing& missing,
                                    const std::vector<ReclaimCandidate>& candidates, SteadyTime now) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Answered(const Question& question) ABSL_LOCKS_EXCLUDED(mu_);
  static void StopAsking(Waiter& waiter);
  Missing MissingOf(const QueuedRequest& request) const;
  // Of those who have asked in vain, the first one: what it gets lets the next ones move up. And the first one of each
  // share with a limit, which may be the only obstacle to it.
  std::vector<Place> WhoMayAskAgain() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Until when the last answer that is to come is not overdue; nullopt when none is to come.
  std::optional<SteadyTime> AnswersUntil(SteadyTime now) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  // ---- request_queue_holding.cc: holding memory back ----

  // Ends the hold when its time is up, or when it is of no use any more. True: it did.
  bool EndHold(SteadyTime now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  bool IsOver(const Hold& hold, SteadyTime now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Those that were held back are to be visited.
  void CallHeldBack() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Begins one for the first request that qualifies.
  void BeginHold(SteadyTime now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // It is time to see whether a hold is of use.
  bool IsTimeToLook(SteadyTime now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Notes how much has come back so far; returns how much of that since hold_back_time ago.
  uint64_t CameBackLately(SteadyTime now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // What others reported as reclaimable and were asked for; not what has been answered, or is overdue.
  uint64_t AskedFor(const Waiter& waiter, SteadyTime now) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Only a hold keeps the request from its memory.
  bool IsHeldBack(const QueuedRequest& request, const Place& place) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  SegmentPool& pool_;
  const RequestQueueOptions options_;
  const RequestQueueHooks hooks_;

  std::atomic<size_t> size_{0};
  std::array<prometheus::Histogram, kWaitOutcomes.size()> durations_;  // seconds, by WaitOutcome
  std::atomic<uint64_t> passes_wanted_{0};                             // since the last one began, and that one
  std::atomic<uint64_t> visits_{0};
  Mutex after_mu_;
  std::vector<std::function<void()>> after_ ABSL_GUARDED_BY(after_mu_);  // see AfterPass()

  mutable Mutex mu_ ABSL_ACQUIRED_AFTER(lock_level::kQueue)
      ABSL_ACQUIRED_BEFORE(lock_level::kRecordings){lock_level::kQueue};
  uint64_t next_arrival_ ABSL_GUARDED_BY(mu_) = 1;
  Waiters waiters_ ABSL_GUARDED_BY(mu_);
  absl::btree_map<uint64_t, Place> places_ ABSL_GUARDED_BY(mu_);  // by arrival
  absl::btree_map<SessionId, OfSession> of_session_ ABSL_GUARDED_BY(mu_);
  absl::btree_set<Place> to_visit_ ABSL_GUARDED_BY(mu_);  // something has happened to them
  absl::btree_set<Place> to_ask_ ABSL_GUARDED_BY(mu_);
  bool is_asking_ ABSL_GUARDED_BY(mu_) = false;  // a task does
  // Those that are refused unless there is still somebody to answer, or something to settle.
  absl::btree_set<Place> last_hope_ ABSL_GUARDED_BY(mu_);
  absl::btree_set<std::pair<SteadyTime, Place>> timers_ ABSL_GUARDED_BY(mu_);
  absl::btree_set<SessionId> closing_ ABSL_GUARDED_BY(mu_);  // whose requests may await a look
  SegmentPool::CapacityChanges changes_ ABSL_GUARDED_BY(mu_);
  // Something may forbid requests for good: all are visited, some in each pass, from here on.
  bool visit_all_ ABSL_GUARDED_BY(mu_) = false;
  std::optional<Place> walk_ ABSL_GUARDED_BY(mu_);
  int unserved_passes_ ABSL_GUARDED_BY(mu_) = 0;  // in a row that had more to visit than they may
  std::minstd_rand random_ ABSL_GUARDED_BY(mu_);
  absl::btree_map<Group, FirstFit> groups_ ABSL_GUARDED_BY(mu_);  // none is empty

  SteadyTime everybody_asked_ ABSL_GUARDED_BY(mu_) = SteadyTime::min();
  bool asks_everybody_ ABSL_GUARDED_BY(mu_) = false;  // the passes that began then are not done
  absl::btree_map<SessionId, Owed> owed_ ABSL_GUARDED_BY(mu_);
  absl::btree_set<std::pair<SteadyTime, SessionId>> owed_since_ ABSL_GUARDED_BY(mu_);

  std::optional<Hold> hold_ ABSL_GUARDED_BY(mu_);
  SteadyTime next_hold_look_ ABSL_GUARDED_BY(mu_) = SteadyTime::min();
  bool hold_look_wanted_ ABSL_GUARDED_BY(mu_) = false;                          // then
  SteadyTime rest_until_ ABSL_GUARDED_BY(mu_) = SteadyTime::min();              // no request gets a hold before
  absl::btree_map<UserKey, SteadyTime> users_rest_until_ ABSL_GUARDED_BY(mu_);  // of those who had one
  std::deque<std::pair<SteadyTime, uint64_t>> came_back_ ABSL_GUARDED_BY(mu_);  // totals, over hold_back_time
};

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_QUEUE_REQUEST_QUEUE_H_
