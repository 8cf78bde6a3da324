// SPDX-License-Identifier: Apache-2.0
//
// Broker: the daemon's front door in C++ terms. Who may do what, and what happens then. Knows no gRPC.
#ifndef VRAMBROKER_SERVER_CORE_BROKER_H_
#define VRAMBROKER_SERVER_CORE_BROKER_H_

#include <sys/types.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "absl/container/btree_map.h"
#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "allocator/base/ids.h"
#include "allocator/base/mutex.h"
#include "allocator/device/events.h"
#include "allocator/heap/allocator_options.h"
#include "allocator/heap/memory_stats.h"
#include "server/base/user_slots.h"
#include "server/base/worker_pool.h"
#include "server/core/fragmentation_trend.h"
#include "server/core/growth_queue.h"
#include "server/core/oom_log.h"
#include "server/core/out_of_memory.h"
#include "server/core/refusal_recordings.h"
#include "server/core/session.h"
#include "server/core/tenant_refusals.h"
#include "server/identity/policy.h"
#include "server/pool/segment_pool.h"

namespace vrambroker {

// Events that a session may keep for snapshots, on each device.
inline constexpr uint64_t kMaxRecordedEvents = 1'000'000;

struct BrokerOptions {
  std::shared_ptr<const Policy> policy;               // who gets what; null: the default of every field
  AllocatorOptions allocator;                         // of sessions that bring none of their own
  size_t record_events = 0;                           // what new sessions keep; at most kMaxRecordedEvents
  bool is_record_events_set = true;                   // not the default: who gets less is told
  uint64_t max_recorded_events_per_uid = 10'000'000;  // of remote sessions: theirs are in the daemon's memory
  SessionBounds session_bounds;
  size_t max_waiting_per_uid = 4096;  // requests
  // How long those who hold reclaimable memory have to give it back when somebody asks for it.
  std::chrono::milliseconds reclaim_timeout{2000};
  // See GrowthQueueOptions.
  std::chrono::milliseconds hold_back_time{1000};
  Limit hold_back_limit = 1.0;                                               // of each device
  std::chrono::milliseconds fragmentation_window = std::chrono::minutes(1);  // see FragmentationTrend
  std::function<SteadyTime()> clock = [] { return std::chrono::steady_clock::now(); };
  // Calls Broker::OnTimer() at `time`, or soon after; replaces the time that was set before. From any thread.
  std::function<void(SteadyTime time)> set_timer = [](SteadyTime) {};
  // Calls `gone`, from any thread, when the process of `pidfd` has ended; perhaps more than once. The result is for
  // unwatch_process, which the broker calls once.
  std::function<absl::StatusOr<int>(const UniqueFd& pidfd, std::function<void()> gone)> watch_process;
  std::function<void(int watch)> unwatch_process;
};

// What a session asks for when it is opened.
struct SessionWishes {
  std::string name;                           // empty: the command name of the process
  std::optional<Limit> limit;                 // none: what the policy allows
  std::optional<AllocatorOptions> allocator;  // none: the broker's
  bool leases = false;                        // its allocators are in the client
  std::optional<uint32_t> mark;               // the client's descriptor of it: see allocator/device/session_mark.h
};

struct SessionDeviceInfo {
  AccountFigures account;
  MemoryStats stats;
  struct Waiting {
    uint64_t bytes = 0;
    bool guarantee = false;
    std::chrono::milliseconds waited{0};
    std::chrono::milliseconds left{0};
    size_t place = 1;  // in the queue
  };
  uint64_t idle_bytes = 0;  // in segments that hold no block
  // Carried over by a remote session, whose allocator does not know it: neither allocated nor free.
  uint64_t unknown_bytes = 0;
  std::vector<Waiting> waiting;
  Session::OomCounts ooms{};  // by OomCause
  // As of the last FollowFragmentation().
  struct Fragmentation {
    double bytes_per_second = 0;               // 0: no trend
    std::optional<double> seconds_to_refusal;  // at this rate; none: no trend
  };
  Fragmentation fragmentation;
};

struct SessionInfo {
  SessionId id{};
  std::string name;
  Caller caller;
  SessionState state = SessionState::kActive;
  std::chrono::system_clock::time_point started;
  SessionTerms terms;                      // of the policy, when it was opened
  bool leases = false;                     // its allocators are in the client
  std::vector<SessionDeviceInfo> devices;  // by ordinal
};

// What a session that is gone has left behind.
struct QuarantinedInfo {
  std::chrono::milliseconds age{0};
  Quarantine::Holding holding;
};

struct DeviceInfo {
  DeviceProperties properties;
  PoolFigures figures;
  std::vector<QuarantinedInfo> quarantine;
  std::vector<CarriedOver::Holding> carried_over;
  absl::Status health;
  FreeSizes idle_sizes;  // of the segments that the daemon caches
  ReclaimFigures reclaims;
  DeviceMeterFigures calls;
  uint64_t driver_free_bytes = 0;  // see PoolView
  GrowthFigures waits;
  std::chrono::milliseconds longest_waiting{0};    // 0: nothing waits
  std::array<uint64_t, kOomCauses.size()> ooms{};  // refusals ever, by OomCause
  uint64_t alloc_retries = 0;                      // of all sessions ever: requests that flushed their cache first

  // ---- Sums over the sessions ----

  MemoryStats stats;               // what they count themselves may be older than the rest
  uint64_t leased_bytes = 0;       // charged to live sessions; also what the driver is still to give
  uint64_t reclaimable_bytes = 0;  // of these, in segments that hold no block
  uint64_t unknown_bytes = 0;      // of these, carried over by remote sessions
  uint64_t quarantined_bytes = 0;  // of disconnected and ended ones, and left behind
  // By sessions that are gone, and carried over by processes without a session.
  uint64_t left_behind_bytes = 0;
};

// Why a session was closed.
enum class CloseReason { kGoodbye, kProcessEnded, kNotOpened, kDaemonStops };

inline constexpr std::array<CloseReason, 4> kCloseReasons = {CloseReason::kGoodbye, CloseReason::kProcessEnded,
                                                             CloseReason::kNotOpened, CloseReason::kDaemonStops};

const char* CloseReasonName(CloseReason reason);  // "goodbye", "process_ended", "not_opened", "daemon_stops"

// Since the daemon started.
struct SessionCounts {
  uint64_t opened = 0;
  uint64_t refused = 0;  // OpenSession() gave an error; one that did not get its guarantee was opened and closed
  std::array<uint64_t, kCloseReasons.size()> closed{};  // by CloseReason
};

struct BrokerView {
  std::vector<SessionInfo> sessions;  // by id
  std::vector<DeviceInfo> devices;    // by ordinal
  TenantRefusals::ByTenant refusals;
  SessionCounts counts;
  bool draining = false;
};

// A request of a client's own allocator that a refused lease has left without memory.
struct RefusedRequest {
  OomCause cause = OomCause::kCapacity;
  uint64_t requested_bytes = 0;
  uint64_t allocated_bytes = 0;  // by the session
  FitReport fit;
};

inline constexpr int kMaxPriority = 1000;

// How far a request goes when the device is full.
struct GrowthOptions {
  bool may_reclaim = false;           // others that hold reclaimable memory are asked to give it back
  std::chrono::milliseconds wait{0};  // with may_reclaim: and then it waits for so long, as far as its terms allow
  uint64_t cancel_key = 0;            // for CancelWait(); 0: none
  ScopeId scope = 0;                  // of an allocation, in the session's list: what the block is for
  std::shared_ptr<std::atomic<bool>> cancelled = nullptr;  // the broker's own
};

using SessionPtr = std::shared_ptr<Session>;

class Broker;

// While it lives, a session keeps at least so many events: see Broker::HoldRecording(). Thread-safe.
class RecordingHold {
 public:
  // `broker` outlives it.
  RecordingHold(Broker* broker, const SessionPtr& session, uint64_t events, UserSlots::Slot slot);
  ~RecordingHold();
  RecordingHold(const RecordingHold&) = delete;
  RecordingHold& operator=(const RecordingHold&) = delete;

 private:
  Broker& broker_;
  const std::weak_ptr<Session> session_;  // it may end before
  const uint64_t events_;
  const UserSlots::Slot slot_;
};

// A number that may be an id or a name.
struct IdOrName {
  SessionId id{};
  std::string name;
};
using SessionRef = std::variant<SessionId, std::string, IdOrName>;  // by id, by unique name, by whichever there is

// Safe to call from any thread. No call blocks; what may take time answers through its callback, which is called
// exactly once, perhaps before the call returns.
class Broker {
 public:
  // `pools` by device ordinal. Pools and workers outlive the broker.
  Broker(BrokerOptions options, std::vector<SegmentPool*> pools, Executor* workers);
  ~Broker();

  absl::Span<SegmentPool* const> pools() const { return pools_; }
  size_t record_events() const { return options_.record_events; }
  bool is_record_events_set() const { return options_.is_record_events_set; }
  size_t max_segments() const { return options_.session_bounds.max_segments; }  // of a session

  // ---- Sessions ----

  // Unavailable while draining; ResourceExhausted when the user has too many; InvalidArgument for a bad name or limit;
  // PermissionDenied names the rule of the policy that gives no right to open sessions.
  // The limit is the smallest of what is wished for, what the policy allows and per_process_memory_fraction. Watches
  // the caller's process: when it ends, the session is closed. A process that cannot be watched gets no session, since
  // nobody would take its memory back.
  absl::StatusOr<SessionPtr> OpenSession(const Caller& caller, const SessionWishes& wishes,
                                         std::shared_ptr<SessionEvents> events);
  // Gives a new session the guarantee that it wishes for, or (none) all that the policy allows. PermissionDenied above
  // that; errors as SetGuarantee(), after which the session is to be closed.
  void KeepGuarantee(const SessionPtr& session, const std::optional<Limit>& wished,
                     const std::function<void(absl::Status)>& done);
  // The session of a token. NotFound: there is none. PermissionDenied: it is another process's.
  absl::StatusOr<SessionPtr> FindToResume(const Caller& caller, const Ticket& token) const;
  // A session whose stream broke goes on with `events`; segments that are not among `held` are taken back. Errors as
  // FindToResume(). Aborted: an operator ended it. Unavailable: its
  // old stream is still there. Answers later; the session's slow calls that were under way end first.
  using ResumeDone = std::function<void(absl::StatusOr<SessionPtr>)>;
  void ResumeSession(const Caller& caller, const Ticket& token, absl::flat_hash_set<SegmentId> held,
                     std::shared_ptr<SessionEvents> events, const ResumeDone& done);
  // The stream of the session broke: what it holds stays charged until its process ends, or resumes it.
  void Disconnect(const SessionPtr& session);
  // The session's holder says that it touches nothing any more: all that it held becomes idle.
  void Close(const SessionPtr& session, const std::string& why, CloseReason reason = CloseReason::kGoodbye);
  // Its process has ended: what it held is quarantined first.
  void CloseGone(const SessionPtr& session);

  // NotFound, or PermissionDenied when the session is another process's.
  absl::StatusOr<SessionPtr> FindSession(SessionId id, const Caller& caller) const;
  // NotFound, or InvalidArgument when it is one session's id and another one's name.
  absl::StatusOr<SessionPtr> FindSession(const SessionRef& ref) const;

  // ---- Memory ----

  using AllocateDone = std::function<void(absl::StatusOr<Allocation>)>;
  // OutOfMemoryError() when there is no memory; ResourceExhausted when too many calls of the session wait;
  // InvalidArgument for 0 bytes; NotFound for an unknown device.
  void Allocate(const SessionPtr& session, uint64_t device, uint64_t requested, Stream stream, const AllocateDone& done,
                const GrowthOptions& growth = {.may_reclaim = true});
  absl::Status Free(const SessionPtr& session, absl::Span<const BlockId> blocks);
  // Segments for a session that leases: one of each of `sizes`, or none. OutOfMemoryError() names why, and is counted
  // only when Explain() says that it mattered. InvalidArgument for sizes that no segment has; NotFound for an unknown
  // device.
  using LeaseDone = std::function<void(absl::StatusOr<std::vector<Lease>>)>;
  void LeaseSegments(const SessionPtr& session, uint64_t device, const std::vector<uint64_t>& sizes,
                     const LeaseDone& done, const GrowthOptions& growth = {});
  // Ends the waiting of the session's requests with this key: Cancelled.
  void CancelWait(const SessionPtr& session, uint64_t cancel_key);
  absl::Status ReturnSegments(const SessionPtr& session, uint64_t device, absl::Span<const SegmentId> segments);
  // What the session's client holds of an earlier run of the daemon, by device; or a part of it, unless it `begins` and
  // `ends` here: see CarriedOver. NotFound for an unknown device, InvalidArgument for sizes that no segment has;
  // FailedPrecondition for a remote session.
  using CarriedByDevice = absl::btree_map<uint64_t, std::vector<CarriedSegment>>;
  absl::Status DeclareCarriedOver(const SessionPtr& session, const CarriedByDevice& segments, bool begins, bool ends);
  // It has closed these, on whatever devices they are.
  void FreeCarriedOver(const SessionPtr& session, absl::Span<const uint64_t> ids);
  // The session's client says that its device does not open what it was given. Logs it: of each user once, that CUDA
  // may not let processes of another user than the daemon's open its memory.
  void CannotOpen(const Session& session, int device, absl::string_view error) ABSL_LOCKS_EXCLUDED(mu_);
  using RefusalDone = std::function<void(absl::Status)>;
  // Counts, logs and explains that a request of the client's got no memory: OutOfMemoryError(). Asks the client for
  // what it has recorded first, if it is its turn.
  void Explain(const SessionPtr& session, uint64_t device, const RefusedRequest& request, const RefusalDone& done);

  // Gives `bytes` of wholly free segments back, or what there is; 0: all. Answers with the bytes given back.
  // ResourceExhausted when too many calls of the session wait; DeadlineExceeded when the client does not answer.
  void Trim(const SessionPtr& session, uint64_t bytes, const std::function<void(absl::StatusOr<uint64_t>)>& done);
  // NotFound for an unknown device.
  absl::Status CheckDevice(uint64_t device) const;

  // ---- Operators ----

  // Everything that operators see. What a pool counts, of all sessions, is of one moment for each device.
  BrokerView View() const;
  SessionInfo Describe(const Session& session) const;
  // Adds what the sessions use by `view`, of this moment, to their trends. To be called every few seconds.
  void FollowFragmentation(const BrokerView& view) ABSL_LOCKS_EXCLUDED(trends_mu_);
  // The requests that wait for memory of the device, in the order in which they are served.
  std::vector<WaitingRequest> GetWaiting(int device) const { return queues_[device]->GetWaiting(); }
  // Answers when the figures of the session are of this moment, or not to be had from its client.
  void Refresh(const SessionPtr& session, const std::function<void()>& done);
  // Errors as Trim(). With the events that the session has recorded, or only what its heap is now.
  void Snapshot(const SessionPtr& session, int device, const std::function<void(absl::StatusOr<HeapSnapshot>)>& done,
                bool with_history = true);
  // What is reserved beyond it is asked back, as far as it is reclaimable; the rest stays. InvalidArgument below the
  // guarantee.
  absl::Status SetLimit(const SessionPtr& session, const Limit& limit) ABSL_LOCKS_EXCLUDED(limits_mu_);
  // On all devices, or on none. Answers when others have given up what is needed for it, or will not: errors of
  // Ledger::SetGuarantee(), as ResourceExhausted.
  void SetGuarantee(const SessionPtr& session, const Limit& guarantee, const std::function<void(absl::Status)>& done);
  // InvalidArgument outside of [-kMaxPriority, kMaxPriority].
  absl::Status SetPriority(const SessionPtr& session, int64_t priority);
  // Keeps the last `max_events` events of each of the session's heaps for snapshots; 0: none. InvalidArgument above
  // kMaxRecordedEvents; ResourceExhausted when the remote sessions of its user may keep no more.
  void SetRecording(const SessionPtr& session, uint64_t max_events, const std::function<void(absl::Status)>& done);
  // Keeps at least `events` of each of its heaps, with exact times, whatever SetRecording() says, until what `done`
  // gets is destroyed. `uid`: who asks. Errors as SetRecording(); ResourceExhausted also when `uid` has too many of
  // them.
  void HoldRecording(const SessionPtr& session, uint64_t events, uid_t uid,
                     const std::function<void(absl::StatusOr<std::shared_ptr<RecordingHold>>)>& done);
  // Ends the session; returns the bytes that stay charged until the client or its process lets go.
  uint64_t EndSession(const SessionPtr& session, const std::string& reason);

  // The timer that was set has run out. Never blocks.
  void OnTimer();

  // ---- Policy ----

  std::shared_ptr<const Policy> policy() const ABSL_LOCKS_EXCLUDED(mu_);
  // For sessions that are opened from now on, and for the rights of every caller. Live sessions keep their terms.
  void SetPolicy(std::shared_ptr<const Policy> policy) ABSL_LOCKS_EXCLUDED(mu_);
  // What the policy knows of a caller. Unauthenticated when its process has ended meanwhile.
  absl::StatusOr<PolicySubject> SubjectOf(const Caller& caller, const std::optional<std::string>& session_name) const;
  // What a caller may do, apart from any session. Errors as SubjectOf().
  absl::StatusOr<SessionTerms> TermsOf(const Caller& caller) const;

  // The last refusals, on all devices.
  const OomLog& oom_log() const { return oom_log_; }
  // Newest first; of all users, or of the sessions of one.
  std::vector<std::shared_ptr<const OomEvent>> Refusals(std::optional<uid_t> uid) const;
  // Of these, those of one session. It may have ended; one name may have been several sessions'. InvalidArgument when a
  // number is one session's id and another one's name.
  absl::StatusOr<std::vector<std::shared_ptr<const OomEvent>>> RefusalsOf(const SessionRef& ref,
                                                                          std::optional<uid_t> uid = std::nullopt) const
      ABSL_LOCKS_EXCLUDED(mu_);
  // What led to some of them.
  const RefusalRecordings& refusal_recordings() const { return refusal_recordings_; }

  // ---- Stopping ----

  // From now on no new session; live ones are told, with the `reason` if there is one.
  void Drain(const std::string& reason = "");
  size_t session_count() const;
  // Wakes everything that waits; later calls fail with Aborted.
  void CloseAll(const std::string& why);

 private:
  using GrowthDone = std::function<void(const absl::Status&)>;

  // Null: there is none.
  SessionPtr SessionById(SessionId id) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  SessionPtr SessionByName(absl::string_view name) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  bool SessionHasEnded(SessionId id) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Unwatch(Session& session);
  // Of a request for which others were asked.
  void LogWait(const Session& session, int device, uint64_t bytes, const absl::Status& status,
               const GrowthOutcome& outcome) const;
  // Growth by so many bytes does not have to wait until those in the queue have had their turn at what has just become
  // free: see GrowthQueue::AfterPass().
  bool GoesFirst(const Session& session, int device, uint64_t bytes) const;
  // Charges `bytes` to the session as soon as others have given up enough: SegmentPool::Grant().
  void WaitForGrant(const SessionPtr& session, int device, uint64_t bytes, const GrowthOptions& growth,
                    const GrowthDone& done, const std::function<bool()>& retry = nullptr) ABSL_LOCKS_EXCLUDED(mu_);
  void Enqueue(const SessionPtr& session, int device, GrowthRequest request,
               const std::shared_ptr<std::atomic<bool>>& cancelled = nullptr);
  static SessionDeviceInfo FiguresOn(const Session& session, int device, const AccountFigures& account);
  // `accounts`: of the session, by device.
  static SessionInfo FiguresOf(const Session& session, absl::Span<const AccountFigures> accounts);
  // Of segments that hold no block.
  static uint64_t IdleBytes(const Session& session, const AccountFigures& account, const MemoryStats& stats);
  static absl::Status TooManyCalls();
  void AddWaiting(absl::Span<SessionInfo> infos) const;
  void AddFragmentation(absl::Span<SessionInfo> infos) const ABSL_LOCKS_EXCLUDED(trends_mu_);
  void SetGuaranteeFrom(size_t device, const SessionPtr& session, const Limit& guarantee, std::vector<uint64_t> before,
                        const std::function<void(absl::Status)>& done);
  std::vector<ReclaimCandidate> ReclaimCandidates(int device) const;
  void SetTimer();
  // What waits for memory ends with `why`.
  void CancelWaits(const Session& session, const absl::Status& why);
  // A request of a remote session that its cache did not serve: broker_memory.cc.
  struct PendingAllocation;
  using PendingAllocationPtr = std::shared_ptr<PendingAllocation>;
  void AllocateSlowly(const PendingAllocationPtr& pending);
  // Until others have given up enough, or the session itself has freed what serves it.
  void WaitToAllocate(const PendingAllocationPtr& pending, const GrowthOptions& growth);
  // `until`: when the time is over that it may wait.
  void AllocateGranted(const PendingAllocationPtr& pending, const GrowthOptions& growth, SteadyTime until);
  // What came of it, after a last search of the cache if it is refused.
  void Answer(PendingAllocation& pending, const absl::Status& refusal = absl::OkStatus());
  void WaitToLease(const SessionPtr& session, int device, const std::vector<uint64_t>& sizes,
                   const GrowthOptions& growth, const LeaseDone& finish);
  // How a request waits that the driver has refused what was granted to it: `until` the time that it may wait. None: it
  // has passed.
  std::optional<GrowthOptions> WaitsOn(const GrowthOptions& growth, SteadyTime until) const;
  // Counts, logs and explains a refusal of a session's allocator here.
  void Refuse(const SessionPtr& session, int device, uint64_t requested, Stream stream, ScopeId scope, OomCause refusal,
              const RefusalDone& done);
  // The figures of the session and the device; cheap.
  OomReport Report(const Session& session, int device) const;
  // Those of the other sessions, for a refusal that people will see.
  void AddHolders(const Session& session, OomReport* report) const;
  // Keeps what the session has recorded first, if it is its turn.
  void EndRefusal(const SessionPtr& session, OomReport report, bool is_recording, const RefusalDone& done);
  absl::Status CountRefusal(Session& session, const OomReport& report);
  absl::StatusOr<SessionPtr> TryOpenSession(const Caller& caller, const SessionWishes& wishes,
                                            std::shared_ptr<SessionEvents> events) ABSL_LOCKS_EXCLUDED(mu_);
  // 0 when no device needs it, or it cannot be told.
  SessionMark MarkOf(const Caller& caller, const SessionWishes& wishes);
  // From now on it is found. False, and its name is free again, when the daemon stops.
  bool Publish(const SessionPtr& session) ABSL_LOCKS_EXCLUDED(mu_);
  // Its name and its place among its user's sessions are free again.
  void Release(const Session& session) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Counts `session`, which is closed, for its tenant if it ended soon after a refusal. Returns how long after the
  // last.
  std::optional<std::chrono::milliseconds> CountEndedAfterRefusal(Session& session);
  void LogClosed(const Session& session, const std::string& why, CloseReason reason, uint64_t bytes,
                 std::optional<std::chrono::milliseconds> after_refusal) const;
  void CloseWith(uint64_t (SegmentPool::*close)(SessionId), const SessionPtr& session, const std::string& why,
                 CloseReason reason) ABSL_LOCKS_EXCLUDED(mu_);
  friend class RecordingHold;
  void EndHold(const SessionPtr& session, uint64_t events);
  static uint64_t EventsToKeep(Session& session);  // in each heap
  // Counts what each heap of a remote session may record in place of what it recorded so far.
  absl::Status ReserveEvents(const Session& session, uint64_t events_of_heap) ABSL_LOCKS_EXCLUDED(mu_);
  std::vector<SessionPtr> Sessions() const ABSL_LOCKS_EXCLUDED(mu_);
  std::string UniqueName(absl::string_view wanted) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  // Held while the timer is set, so that the earliest time wins.
  Mutex timer_mu_;

  // Constant after construction.
  const BrokerOptions options_;
  const std::vector<SegmentPool*> pools_;
  Executor& workers_;

  // Synchronises itself.
  std::vector<std::array<std::atomic<uint64_t>, kOomCauses.size()>> ooms_;  // by device, then cause
  UserSlots waiting_;                                                       // requests that wait
  std::vector<std::unique_ptr<GrowthQueue>> queues_;                        // by device
  std::vector<std::atomic<bool>> checking_quarantine_;                      // by device: a worker is to do it
  OomLog oom_log_;
  TenantRefusals tenant_refusals_;
  std::atomic<uint64_t> refusals_{0};
  UserSlots recording_refusals_;
  UserSlots recording_holds_;
  RefusalRecordings refusal_recordings_;
  std::atomic<bool> warned_of_mark_{false};

  // Held while a limit is changed: pool, allocator and client hear of two changes in the same order, all devices of the
  // last one. Taken before any other lock.
  Mutex limits_mu_;

  struct Trend {
    FragmentationTrend trend;
    SessionDeviceInfo::Fragmentation figures;
  };
  mutable Mutex trends_mu_;  // held for nothing but this; no other lock is taken
  absl::flat_hash_map<SessionId, std::vector<Trend>> trends_ ABSL_GUARDED_BY(trends_mu_);  // by device

  // Held to look up and to record. Never while calling an allocator or the driver, or writing to a client.
  mutable Mutex mu_;
  absl::btree_map<SessionId, SessionPtr> sessions_ ABSL_GUARDED_BY(mu_);
  absl::btree_map<std::string, SessionId, std::less<>> names_ ABSL_GUARDED_BY(mu_);
  absl::btree_map<uid_t, size_t> sessions_of_uid_ ABSL_GUARDED_BY(mu_);
  absl::btree_map<std::pair<uid_t, std::string>, size_t> sessions_of_rule_ ABSL_GUARDED_BY(mu_);  // of a user
  absl::btree_map<SessionId, uint64_t> events_of_ ABSL_GUARDED_BY(mu_);  // that remote sessions may record
  absl::btree_map<uid_t, uint64_t> events_of_uid_ ABSL_GUARDED_BY(mu_);  // their sums
  std::shared_ptr<const Policy> policy_ ABSL_GUARDED_BY(mu_);            // never null
  uint64_t next_session_ ABSL_GUARDED_BY(mu_) = 1;
  bool draining_ ABSL_GUARDED_BY(mu_) = false;
  SessionCounts counts_ ABSL_GUARDED_BY(mu_);
  absl::flat_hash_set<uid_t> cannot_open_ ABSL_GUARDED_BY(mu_);  // who have been logged
  std::vector<uint64_t> closed_retries_ ABSL_GUARDED_BY(mu_);    // by device: of the sessions that are closed
};

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_CORE_BROKER_H_
