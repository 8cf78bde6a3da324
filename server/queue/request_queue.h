// SPDX-License-Identifier: Apache-2.0
//
// RequestQueue: requests waiting for one device's memory. Asks sessions holding reclaimable memory to give it back.
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

// Record of a request's wait.
struct WaitRecord {
  std::chrono::milliseconds waited{0};
  absl::btree_map<SessionId, bool> asked;  // sessions asked to give memory back; true: answered
};

struct QueuedRequest {
  SessionId session{};
  UserKey user;  // owner of the session
  uint64_t bytes = 0;
  bool guarantee = false;   // raises the session's guarantee to `bytes`; else charges `bytes`: SegmentPool::Grant()
  SteadyTime deadline;      // equals the arrival if the request may not wait; sessions are asked in any case
  uint64_t cancel_key = 0;  // for Cancel(); 0: none
  // Tries to serve the request otherwise; returns true when no grant is needed any more. For Retry(); may be empty.
  std::function<bool()> retry;
  // Called once: with OK when granted, with SegmentRefused(), or with the status of Cancel().
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

// Totals of finished requests, and the state of the queue.
struct WaitStats {
  size_t waiting = 0;
  std::optional<SteadyTime> oldest;  // arrival of the oldest waiting request; none when the queue is empty
  std::array<prometheus::ClientMetric::Histogram, kWaitOutcomes.size()> durations;  // seconds, by WaitOutcome
  uint64_t visits = 0;                                                              // looks of passes at requests
};

struct RequestQueueOptions {
  // Time for asked sessions to answer. After an eighth of the time, all other sessions are asked as well.
  std::chrono::milliseconds reclaim_timeout{2000};
  // Longest hold of free memory for one request; 0: never.
  std::chrono::milliseconds hold_back_time{1000};
  // Most bytes held back.
  uint64_t hold_back_bytes = std::numeric_limits<uint64_t>::max();
};

struct RequestQueueHooks {
  std::function<SteadyTime()> clock = [] { return std::chrono::steady_clock::now(); };
  // Lists the sessions holding memory of the device; all can be asked.
  std::function<std::vector<ReclaimCandidate>()> candidates;
  // Asks `victim` to give `bytes` back; calls `answered` when the session has done so or has declined. Never blocks.
  std::function<void(const ReclaimVictim& victim, std::function<void()> answered)> ask;
  // Called when NextWake() may be earlier than before.
  std::function<void()> wake_changed;
  // Runs a task of the queue. At most two are pending: a serving task and an asking task. Tasks end soon and never
  // block.
  std::function<void(std::function<void()> task)> run = [](const std::function<void()>& task) { task(); };
};

// Every request that fits is served, by priority, then by arrival: a small request does not wait for a large one. To
// keep a large request from starving, free memory is held back for it for a moment, once it has waited for kHoldAfter:
//
// - only when memory expected back meanwhile is enough: reclaimable memory already asked for, memory being closed by
//   sessions, memory settling in quarantine, and as much as came back lately from sessions taking and giving memory all
//   the time;
// - against sessions of equal or lower priority, except sessions the request waits for: SegmentPool::HoldBack();
// - for hold_back_time at most. Afterwards no request gets a hold for as long as the hold took, so that held-back
//   requests are served, and requests of the hold's user get none for kUserRest times as long;
// - for one request at a time, the first to qualify.
//
// A request kept from its memory only by a hold is not refused before it has waited for reclaim_timeout, even when it
// may not wait. No request is refused while a session still owes an answer, to any request, for reclaim_timeout at
// most. Growth within a guarantee does not wait, with one exception.
//
// The exception holds for all requests for memory: the session has closed memory of an earlier run of the daemon, and
// the daemon has not yet seen the memory gone. A request that does not fit, if only for the session's own limit, then
// waits until the daemon has looked, for kLongestLook at most. Meanwhile no session is asked for memory, and no memory
// is held back.
//
// Requests take no thread: OnCapacityFreed(), OnTimer() and answers of asked sessions schedule a pass over the queue by
// hooks.run. There is one pass at a time, and it visits kMostVisits requests at most before yielding. A pass finds the
// requests that fit without looking at the rest: it takes O(log n) for each request served, refused or asking, and for
// each request kept back or let go as a hold begins or ends. In addition, a pass takes O(log n) for each claim, each
// user with a limit, and each session with a guarantee, if requests wait there. All requests are visited when a
// guarantee was raised or the device broke. Requests that have waited for kHoldAfter are checked some 64 times a second
// at most.
//
// A session taking memory past the queue waits for the pending pass (AfterPass()), except within its guarantee.
//
// Thread-safe. No call waits for a pass.
class RequestQueue {
 public:
  static constexpr std::chrono::milliseconds kHoldAfter{1000};
  static constexpr int kUserRest = 4;
  static constexpr std::chrono::milliseconds kLongestLook{10000};
  // While requests wait, sessions with reclaimable memory by their figures are asked again this often. Sessions that
  // gave nothing last time and report unchanged figures are asked less often, as are sessions above the request's
  // priority.
  static constexpr std::chrono::milliseconds kAskPeriod{250};
  static constexpr std::chrono::milliseconds kAskInVainPeriod{2000};
  // For all requests together, everybody is asked this often at most.
  static constexpr std::chrono::milliseconds kEverybodyPeriod{100};
  // The use of a hold is checked kHoldLooks times in hold_back_time, and at least every kLongestHoldLook.
  static constexpr int kHoldLooks = 64;
  static constexpr std::chrono::milliseconds kLongestHoldLook{15};
  // Most passes that keep sessions waiting to take memory past the queue.
  static constexpr int kMostUnserved = 64;
  // Limits of one pass, and of one asking task.
  static constexpr int kMostVisits = 256;
  static constexpr int kMostOfWalk = 128;  // part of kMostVisits, when all requests are to be visited
  static constexpr int kMostAsking = 64;

  // `pool` outlives the queue.
  RequestQueue(SegmentPool* pool, const RequestQueueOptions& options, RequestQueueHooks hooks);

  // Calls `request.done`, perhaps before returning.
  void Add(QueuedRequest request) ABSL_LOCKS_EXCLUDED(mu_);
  // Ends with `why` the requests of a session, or only the request with the key.
  void Cancel(SessionId session, const absl::Status& why) ABSL_LOCKS_EXCLUDED(mu_);
  void Cancel(SessionId session, uint64_t cancel_key, const absl::Status& why) ABSL_LOCKS_EXCLUDED(mu_);
  // Tries the session's requests otherwise, after it has freed something; success ends a request with Cancelled.
  void Retry(SessionId session) ABSL_LOCKS_EXCLUDED(mu_);
  // Moves the session's requests to their new place. The pool already knows the priority.
  void UpdatePriority(SessionId session, int priority) ABSL_LOCKS_EXCLUDED(mu_);

  // Call when a request may fit now. Never waits for a pass.
  void OnCapacityFreed() ABSL_LOCKS_EXCLUDED(mu_);
  // Calls `then` once waiting requests have had their turn at the memory free now: by a pending pass, or at once. For
  // sessions taking memory past the queue.
  void AfterPass(std::function<void()> then) ABSL_LOCKS_EXCLUDED(mu_, after_mu_);
  bool IsPassToCome() const { return size() > 0 && passes_wanted_.load() > 0; }
  // Call at the time of NextWake().
  void OnTimer() ABSL_LOCKS_EXCLUDED(mu_) { OnCapacityFreed(); }
  std::optional<SteadyTime> NextWake() const ABSL_LOCKS_EXCLUDED(mu_);

  WaitStats GetStats() const ABSL_LOCKS_EXCLUDED(mu_);
  // Returns the requests in serving order.
  std::vector<WaitingRequest> GetWaiting() const ABSL_LOCKS_EXCLUDED(mu_);
  size_t size() const { return size_.load(std::memory_order_relaxed); }

 private:
  enum class Asking { kNobody, kChosen, kSoonEverybody, kEverybody, kDone, kAgain };
  struct Asked {
    LastAsked last;
    SteadyTime at;
    uint64_t expected = 0;  // reclaimable bytes asked for, until answered
  };
  // Requests of a group have equally many bytes free, to be compared with each request's need.
  struct Group {
    std::optional<std::pair<ShareId, uint64_t>> share{};  // share and its limit; none: no limit
    std::optional<SessionId> session{};                   // a session with a guarantee; none: sessions without
    bool is_for_guarantees = false;
    bool is_held_back = false;
    friend auto operator<=>(const Group&, const Group&) = default;
  };
  struct Waiter {
    QueuedRequest request;
    SteadyTime since;
    bool awaits_look = false;         // the session has closed memory, and the daemon has not seen the memory gone yet
    SteadyTime served_since;          // arrival, or end of awaiting the look
    Asking asking = Asking::kNobody;  // current or last step
    bool has_asked = false;           // through all steps, at least once
    SteadyTime asking_since;
    SteadyTime ask_again;
    size_t unanswered = 0;
    absl::btree_map<SessionId, Asked> asked;
    uint64_t expected = 0;  // sum over unanswered questions
    uint64_t round = 0;     // number of the asking round; answers to earlier rounds do not count
    bool served_otherwise = false;
    std::optional<Group> group = std::nullopt;  // key in groups_
    SteadyTime wake = SteadyTime::max();        // key in timers_
  };
  using Waiters = absl::btree_map<Place, Waiter>;
  using Finished = std::vector<std::pair<Waiter, absl::Status>>;
  // Requests of a session, and its figures as of its last change.
  struct OfSession {
    absl::btree_set<std::pair<uint64_t, Place>> requests;  // by bytes
    absl::btree_set<Place> guarantees;                     // subset of `requests`
    uint64_t unused_guarantee_bytes = 0;
    uint64_t share_limit_bytes = 0;
    bool has_guarantee = false;
  };
  // Unanswered questions to a session, for any request.
  struct Owed {
    size_t answers = 0;
    SteadyTime since;  // of the first question, or of the last answer: a session answers questions in turn
  };
  // Hold of free memory for a request.
  struct Hold {
    Place place;  // place of the request
    UserKey user;
    SteadyTime since;
    uint64_t churning = 0;         // bytes expected back from sessions taking and giving all the time
    uint64_t came_back_total = 0;  // CameBackTotal() at `since`
  };

  // ---- request_queue.cc ----

  // Schedules a pass, unless a pending pass has yet to begin.
  void Wake() ABSL_LOCKS_EXCLUDED(mu_);
  void Pass() ABSL_LOCKS_EXCLUDED(mu_);
  // Has some more requests visited, when all are to be visited.
  void Walk() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Visits, in order, requests in to_visit_ and requests that fit. Returns false when one pass is not enough.
  bool ServeInOrder(SteadyTime now, Finished& finished, std::vector<Place>& kept) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Serves the request, ends it, or keeps it.
  void Visit(const Place& place, SteadyTime now, Finished& finished, std::vector<Place>& kept)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Status TryGrant(const QueuedRequest& request, const Place& place) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  bool IsHopeless(const Waiter& waiter, const Place& place, SteadyTime now) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Takes in changes of the pool since the last call.
  void TakeChanges() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Reconsider(SessionId session) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  uint64_t FreeFor(const Group& group) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  std::optional<Place> FirstThatFits() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Puts requests whose time has come, and requests without hope, into to_visit_.
  void CallDue(SteadyTime now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Ends the waiting for completed looks.
  void EndLooks(SteadyTime now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void TellAll(const Finished& finished);
  std::vector<std::function<void()>> TakeAfter() ABSL_LOCKS_EXCLUDED(after_mu_);
  void CallAfter() ABSL_LOCKS_EXCLUDED(mu_, after_mu_);

  // Adds the request to all indexes and to to_visit_.
  void Insert(const Place& place, Waiter waiter) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  Waiter Remove(Waiters::iterator it) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  Waiters::iterator Find(uint64_t arrival) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  std::vector<Place> PlacesOf(SessionId session) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void CancelIf(SessionId session, const std::function<bool(const QueuedRequest&)>& condition, const absl::Status& why)
      ABSL_LOCKS_EXCLUDED(mu_);
  // Puts the request where FirstThatFits() finds it when enough is free.
  void PutInGroup(const Place& place, Waiter& waiter, const AccountState& account, bool is_held_back)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void TakeFromGroup(const Place& place, Waiter& waiter) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void SetTimer(const Place& place, Waiter& waiter, SteadyTime now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  SteadyTime WakeOf(const Waiter& waiter, SteadyTime now) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  // ---- request_queue_asking.cc: asking sessions ----

  // Takes the kept requests, and the requests of WhoMayAskAgain(), a step further.
  void ChooseWhoAsks(const std::vector<Place>& kept, SteadyTime now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Asks for the requests in to_ask_, some at a time. A separate task, because it looks at all sessions.
  void AskForThose() ABSL_LOCKS_EXCLUDED(mu_);
  // Question to a session, for several requests at once.
  struct Question {
    ReclaimVictim victim;
    std::vector<std::pair<uint64_t, uint64_t>> requests;  // arrival, and round
  };
  struct Questions {
    std::optional<std::vector<ReclaimCandidate>> candidates;  // looked up once, when a request lacks something
    std::vector<Question> questions;
    absl::flat_hash_map<SessionId, size_t> of_session;  // indices in `questions`
  };
  // Adds the questions for the request with this arrival. Without questions, the request goes on to the next step.
  void Ask(uint64_t arrival, Questions& questions) ABSL_LOCKS_EXCLUDED(mu_);
  // Chooses the sessions to ask for the request in its current step.
  std::vector<ReclaimVictim> Choose(const Waiter& waiter, int priority, const Missing& missing,
                                    const std::vector<ReclaimCandidate>& candidates, SteadyTime now) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Answered(const Question& question) ABSL_LOCKS_EXCLUDED(mu_);
  static void StopAsking(Waiter& waiter);
  Missing MissingOf(const QueuedRequest& request) const;
  // Returns the first request, and the first of each share with a limit, if they have asked in vain. Memory for the
  // first request lets the next move up; a share's limit may be the only obstacle for its first request.
  std::vector<Place> WhoMayAskAgain() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Deadline of the last expected answer; nullopt when no answer is expected.
  std::optional<SteadyTime> AnswersUntil(SteadyTime now) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  // ---- request_queue_holding.cc: holding memory back ----

  // Ends the hold when its time is up or its use is gone. Returns whether it ended.
  bool EndHold(SteadyTime now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  bool IsOver(const Hold& hold, SteadyTime now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Puts held-back requests into to_visit_.
  void CallHeldBack() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Begins a hold for the first qualifying request.
  void BeginHold(SteadyTime now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Whether it is time to check the use of a hold.
  bool IsTimeToLook(SteadyTime now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Records CameBackTotal(); returns its growth over the last hold_back_time.
  uint64_t CameBackLately(SteadyTime now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Reclaimable bytes asked for and neither answered nor overdue.
  uint64_t AskedFor(const Waiter& waiter, SteadyTime now) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Whether only a hold keeps the request from its memory.
  bool IsHeldBack(const QueuedRequest& request, const Place& place) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  SegmentPool& pool_;
  const RequestQueueOptions options_;
  const RequestQueueHooks hooks_;

  std::atomic<size_t> size_{0};
  std::array<prometheus::Histogram, kWaitOutcomes.size()> durations_;  // seconds, by WaitOutcome
  std::atomic<uint64_t> passes_wanted_{0};                             // calls of Wake() that no finished pass covers
  std::atomic<uint64_t> visits_{0};
  Mutex after_mu_;
  std::vector<std::function<void()>> after_ ABSL_GUARDED_BY(after_mu_);  // see AfterPass()

  mutable Mutex mu_ ABSL_ACQUIRED_AFTER(lock_level::kQueue)
      ABSL_ACQUIRED_BEFORE(lock_level::kRecordings){lock_level::kQueue};
  uint64_t next_arrival_ ABSL_GUARDED_BY(mu_) = 1;
  Waiters waiters_ ABSL_GUARDED_BY(mu_);
  absl::btree_map<uint64_t, Place> places_ ABSL_GUARDED_BY(mu_);  // by arrival
  absl::btree_map<SessionId, OfSession> of_session_ ABSL_GUARDED_BY(mu_);
  absl::btree_set<Place> to_visit_ ABSL_GUARDED_BY(mu_);  // requests affected by an event
  absl::btree_set<Place> to_ask_ ABSL_GUARDED_BY(mu_);
  bool is_asking_ ABSL_GUARDED_BY(mu_) = false;  // a task is pending
  // Requests to refuse unless an answer is outstanding or something settles.
  absl::btree_set<Place> last_hope_ ABSL_GUARDED_BY(mu_);
  absl::btree_set<std::pair<SteadyTime, Place>> timers_ ABSL_GUARDED_BY(mu_);
  absl::btree_set<SessionId> closing_ ABSL_GUARDED_BY(mu_);  // sessions with requests that may await a look
  SegmentPool::CapacityChanges changes_ ABSL_GUARDED_BY(mu_);
  // Set when requests may be forbidden for good: all are visited, some in each pass, from walk_ on.
  bool visit_all_ ABSL_GUARDED_BY(mu_) = false;
  std::optional<Place> walk_ ABSL_GUARDED_BY(mu_);
  int unserved_passes_ ABSL_GUARDED_BY(mu_) = 0;  // consecutive passes with more to visit than allowed
  std::minstd_rand random_ ABSL_GUARDED_BY(mu_);
  absl::btree_map<Group, FirstFit> groups_ ABSL_GUARDED_BY(mu_);  // no group is empty

  SteadyTime everybody_asked_ ABSL_GUARDED_BY(mu_) = SteadyTime::min();
  bool asks_everybody_ ABSL_GUARDED_BY(mu_) = false;  // passes begun then are not done
  absl::btree_map<SessionId, Owed> owed_ ABSL_GUARDED_BY(mu_);
  absl::btree_set<std::pair<SteadyTime, SessionId>> owed_since_ ABSL_GUARDED_BY(mu_);

  std::optional<Hold> hold_ ABSL_GUARDED_BY(mu_);
  SteadyTime next_hold_look_ ABSL_GUARDED_BY(mu_) = SteadyTime::min();
  bool hold_look_wanted_ ABSL_GUARDED_BY(mu_) = false;                          // wake at next_hold_look_
  SteadyTime rest_until_ ABSL_GUARDED_BY(mu_) = SteadyTime::min();              // no request gets a hold before
  absl::btree_map<UserKey, SteadyTime> users_rest_until_ ABSL_GUARDED_BY(mu_);  // for users with a past hold
  std::deque<std::pair<SteadyTime, uint64_t>> came_back_ ABSL_GUARDED_BY(mu_);  // CameBackTotal() over hold_back_time
};

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_QUEUE_REQUEST_QUEUE_H_
