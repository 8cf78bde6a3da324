// SPDX-License-Identifier: Apache-2.0
//
// Session: a connected client process with all its memory. A session leases segments (leased_session.h: allocators in
// the client), or is remote (remote_session.h: allocators in the daemon), or is counted (counted_session.h: the client
// allocates directly from the driver).
#ifndef VRAMBROKER_SERVER_SESSIONS_SESSION_H_
#define VRAMBROKER_SERVER_SESSIONS_SESSION_H_

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "allocator/base/ids.h"
#include "allocator/base/mutex.h"
#include "allocator/heap/allocator_options.h"
#include "allocator/heap/heap_snapshot.h"
#include "allocator/heap/memory_stats.h"
#include "server/base/steady_time.h"
#include "server/base/worker_pool.h"
#include "server/identity/caller.h"
#include "server/identity/policy.h"
#include "server/identity/process_command.h"
#include "server/pool/segment_pool.h"
#include "server/sessions/cancel_keys.h"
#include "server/sessions/client_questions.h"
#include "server/sessions/reclaim_questions.h"
#include "server/sessions/recording_holds.h"
#include "server/sessions/session_refusals.h"

namespace vrambroker {

class CountedSession;
class LeasedSession;
class RemoteSession;

// Bound on the events kept by a session for snapshots, per device.
inline constexpr uint64_t kMaxRecordedEvents = 1'000'000;

// Messages of a session to its client. Implementations are thread-safe and never block.
class SessionEvents {
 public:
  virtual ~SessionEvents() = default;
  virtual void CloseSegments(absl::Span<const SegmentId> segments) = 0;
  virtual void LimitChanged(int device, uint64_t limit_bytes) = 0;
  // `reason`: for people; empty when the daemon was told to stop.
  virtual void Draining(const std::string& reason) = 0;
  virtual void Ended(const std::string& reason) = 0;
  virtual void Ask(uint64_t question_id, const ClientQuestion& question) = 0;
};

// Owner of the session's memory, and location of its allocators.
enum class Placement : uint8_t {
  kRemote,   // the daemon's memory; allocators in the daemon
  kLeased,   // the daemon's memory; allocators in the client
  kCounted,  // the client's own memory from the driver, counted by the daemon
};

const char* PlacementName(Placement placement);  // "remote", "leased", "counted"

enum class SessionState {
  kActive,
  kDisconnected,  // the stream broke, the process lives: memory stays charged; the client may resume the session
  kEnded,         // by an operator; the client still holds memory
  kClosed,        // holds no memory any more
};

const char* SessionStateName(SessionState state);  // "active", "disconnected", "ended", "closed"

// Bounds on a session's cost for the daemon.
struct SessionBounds {
  std::chrono::milliseconds client_timeout{2000};  // time limit for answers of the client
  size_t max_blocks = 1 << 20;                     // through Allocate
  size_t max_segments = 1 << 16;                   // leased, over all devices
};

// Parts of a new session.
struct SessionSetup {
  SessionId id{};
  std::string name;
  Caller caller;
  std::shared_ptr<const ProcessCommand> command{};
  SessionTerms terms;               // given by the policy
  std::vector<SegmentPool*> pools;  // by device; the session has an account with each; pools outlive the session
  Executor* workers = nullptr;      // outlives the session
  SessionBounds bounds;
  std::shared_ptr<SessionEvents> events;
  AllocatorOptions allocator;
  uint64_t record_events = 0;       // recorded events per heap at first
  std::vector<uint32_t> devices{};  // see Session::devices()
  bool goes_on = false;             // continues an earlier session counted by the client
  std::function<SteadyTime()> clock = [] { return std::chrono::steady_clock::now(); };
};

// Thread-safe. Calls marked (slow) may wait for the driver or for the client; run them on slow_calls() or
// slow_questions().
class Session : public std::enable_shared_from_this<Session> {
 public:
  virtual ~Session() = default;
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  SessionId id() const { return id_; }
  const std::string& name() const { return name_; }
  const Caller& caller() const { return caller_; }
  // See CommandOf(); read when the session was opened.
  std::string command() const { return command_ == nullptr ? "" : command_->text(); }
  const SessionTerms& terms() const { return terms_; }  // at opening
  std::chrono::system_clock::time_point started() const { return started_; }
  // Ordinals of the devices named by the client: the session has no memory on other devices. Empty: all devices.
  absl::Span<const uint32_t> devices() const { return devices_; }
  bool HasDevice(size_t device) const;
  // Bytes of a limit or guarantee of the session on a device.
  uint64_t BytesOn(size_t device, const Limit& limit) const;
  // Longest wait of requests for memory; a change applies to waits begun later.
  std::chrono::milliseconds max_wait() const { return max_wait_.load(); }
  void SetMaxWait(std::chrono::milliseconds max_wait) { max_wait_ = max_wait; }
  // Time of the last allocation or free, as reported by the client; at first the time of opening.
  SteadyTime last_use() const { return last_use_.load(std::memory_order_relaxed); }
  void NoteUse(SteadyTime time) { last_use_.store(time, std::memory_order_relaxed); }

  virtual Placement placement() const = 0;
  // The session as its subclass; nullptr for a different subclass.
  virtual LeasedSession* leased() { return nullptr; }
  virtual const LeasedSession* leased() const { return nullptr; }
  virtual RemoteSession* remote() { return nullptr; }
  virtual CountedSession* counted() { return nullptr; }
  bool leases() const { return leased() != nullptr; }

  std::shared_ptr<SessionEvents> events() const ABSL_LOCKS_EXCLUDED(mu_);
  SerialQueue& slow_calls() { return *slow_calls_; }
  SerialQueue& slow_questions() { return *slow_questions_; }  // separate: a client may lease while being asked
  // Answer to a call rejected by a full queue.
  static absl::Status TooManyCalls();

  // The broker's watch of the process, -1 for none; used by the broker alone. Taken once.
  void set_process_watch(int watch) { process_watch_ = watch; }
  int TakeProcessWatch() { return process_watch_.exchange(-1); }

  // ---- State ----

  SessionState state() const ABSL_LOCKS_EXCLUDED(mu_);
  // Aborted from kEnded on: requests and changes come too late.
  absl::Status CheckNotEnded() const ABSL_LOCKS_EXCLUDED(mu_);
  // Moves to `state`; only Resume() moves back towards kActive. Returns false if nothing changed. kClosed wakes every
  // slow call.
  bool Advance(SessionState state) ABSL_LOCKS_EXCLUDED(mu_);

  // ---- Memory ----

  // Gives back `bytes` of wholly free segments (0: all), as far as available and as far as the client closes segments.
  // Answers with the bytes given back. A remote session always gives all. ResourceExhausted when too many calls of the
  // session wait; DeadlineExceeded when the client does not answer.
  void Trim(uint64_t bytes, const std::function<void(absl::StatusOr<uint64_t>)>& done);
  // (slow) As Trim().
  virtual absl::StatusOr<uint64_t> TrimSlowly(uint64_t bytes) = 0;
  // The pool limits the session to `limit_bytes` from now on.
  virtual void SetLimit(int /*device*/, uint64_t /*limit_bytes*/) {}

  // Questions to give memory back.
  ReclaimQuestions& reclaims() { return reclaims_; }
  const ReclaimQuestions& reclaims() const { return reclaims_; }
  // Requests that may wait.
  CancelKeys& cancel_keys() { return cancel_keys_; }
  SessionRefusals& refusals() { return refusals_; }
  const SessionRefusals& refusals() const { return refusals_; }

  // ---- Figures ----

  // For a leasing session: as last reported, at most about a second ago while its client runs.
  virtual MemoryStats GetMemoryStats(int device) const = 0;
  // Answers when GetMemoryStats() is current, or the client does not report.
  void Refresh(const std::function<void()>& done);
  // Sets peaks to the current values; with `accumulated`, restarts totals. FailedPrecondition for a leasing session.
  virtual absl::Status ResetStats(int device, bool accumulated) = 0;
  // Requests so far that flushed the cache first. Never falls, although the client may reset its counters; final when
  // the session is closed.
  uint64_t CountAllocRetries(int device) ABSL_LOCKS_EXCLUDED(mu_);

  // ---- Snapshots and recordings ----

  // With the recorded events, or only the current heap. Errors as Trim().
  void Snapshot(int device, const std::function<void(absl::StatusOr<HeapSnapshot>)>& done, bool with_history = true);
  // (slow) As Snapshot().
  virtual absl::StatusOr<HeapSnapshot> SnapshotSlowly(int device, bool with_history) = 0;
  // (slow) Snapshot with history, after a refusal. Waits for the client at most for client_timeout. ResourceExhausted:
  // more than kMaxRecordedItems.
  virtual absl::StatusOr<HeapSnapshot> RecordingOfRefusal(int device) = 0;
  static constexpr size_t kMaxRecordedItems = 2'500'000;  // blocks and events

  // (slow) See CachingAllocator::SetRecording(). A client decides by itself whether times are exact.
  virtual absl::Status SetRecording(uint64_t max_events, bool exact_times) = 0;
  // Number of the last SetRecording(), or at opening.
  uint64_t recorded_events() const { return recorded_events_; }
  // Holds that raise the number of kept events for a while. After a change call ApplyRecordingHolds(), which returns at
  // once, or ApplyRecordingHoldsSlowly() (slow), which waits for the client.
  RecordingHolds& recording_holds() { return recording_holds_; }
  virtual void ApplyRecordingHolds() = 0;
  virtual absl::Status ApplyRecordingHoldsSlowly() = 0;
  bool records() const { return recorded_events_ > 0 || recording_holds_.Most() > 0; }

 protected:
  explicit Session(const SessionSetup& setup);

  size_t device_count() const { return pools_.size(); }
  SegmentPool& pool(int device) const { return *pools_[device]; }
  // Aborted unless the session is active.
  absl::Status CheckActive() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Adds the growth of NumAllocRetries() since the last call.
  void UpdateRetries(int device) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // The counter of NumAllocRetries() restarts, or had reached `so_far` before this session.
  void CountRetriesFrom(int device, uint64_t so_far) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    retries_[device].counted = so_far;
  }

  // Constant after construction.
  const SessionId id_;
  const std::string name_;
  const Caller caller_;
  const std::shared_ptr<const ProcessCommand> command_;
  const SessionTerms terms_;
  const std::vector<uint32_t> devices_;
  std::atomic<std::chrono::milliseconds> max_wait_;
  const std::chrono::system_clock::time_point started_ = std::chrono::system_clock::now();
  const SessionBounds bounds_;
  const std::function<SteadyTime()> clock_;
  std::atomic<SteadyTime> last_use_;
  const std::vector<SegmentPool*> pools_;
  Executor& workers_;

  std::atomic<uint64_t> recorded_events_;
  RecordingHolds recording_holds_;

  // Guards the state, the events and the maps. A heap's or a pool's lock may be taken under mu_. No call waits under
  // mu_, except on changed_.
  mutable Mutex mu_ ABSL_ACQUIRED_AFTER(lock_level::kSession)
      ABSL_ACQUIRED_BEFORE(lock_level::kHeap){lock_level::kSession};
  CondVar changed_;  // the state, or the segments to be closed by a remote session's client
  SessionState state_ ABSL_GUARDED_BY(mu_) = SessionState::kActive;
  std::shared_ptr<SessionEvents> events_ ABSL_GUARDED_BY(mu_);

 private:
  struct Retries {
    uint64_t total = 0;
    uint64_t counted = 0;  // the allocator's counter at the last update
  };

  // See ReclaimQuestions::Send.
  virtual void SendReclaim(int device, uint64_t bytes, std::chrono::milliseconds time,
                           const std::function<void()>& answered) = 0;
  // Retries counted by the session's allocator, as far as known to the daemon.
  virtual uint64_t NumAllocRetries(int device) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) = 0;
  // Queue for Trim().
  virtual SerialQueue& TrimQueue() = 0;
  // (slow) Makes GetMemoryStats() current.
  virtual absl::Status RefreshStats() = 0;
  // No more answers will come. The caller must call the results, without a lock.
  virtual std::vector<std::function<void()>> CloseQuestions() { return {}; }

  const std::shared_ptr<SerialQueue> slow_calls_;
  const std::shared_ptr<SerialQueue> slow_questions_;
  std::atomic<int> process_watch_{-1};
  CancelKeys cancel_keys_;
  SessionRefusals refusals_;
  ReclaimQuestions reclaims_;
  std::vector<Retries> retries_ ABSL_GUARDED_BY(mu_);  // by device
};

using SessionPtr = std::shared_ptr<Session>;

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_SESSIONS_SESSION_H_
