// SPDX-License-Identifier: Apache-2.0
//
// Session: one connected client process and all that it holds. It leases segments (leased_session.h: its allocators are
// in the client), or it is remote (remote_session.h: its allocators are here), or its memory is its own and is counted
// here (counted_session.h).
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

// Events that a session may keep for snapshots, on each device.
inline constexpr uint64_t kMaxRecordedEvents = 1'000'000;

// What a session tells its client. Implementations are thread-safe and never block.
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

// Whose memory it uses, and where its allocators are.
enum class Placement : uint8_t {
  kRemote,   // the daemon's memory; allocators in the daemon
  kLeased,   // the daemon's memory; allocators in the client
  kCounted,  // the client's own of the driver, which the daemon counts
};

const char* PlacementName(Placement placement);  // "remote", "leased", "counted"

enum class SessionState {
  kActive,
  kDisconnected,  // the stream broke, the process lives: memory stays charged; the client may resume the session
  kEnded,         // by an operator; the client has not closed its memory yet
  kClosed,        // holds nothing any more
};

const char* SessionStateName(SessionState state);  // "active", "disconnected", "ended", "closed"

// What one session may cost the daemon.
struct SessionBounds {
  std::chrono::milliseconds client_timeout{2000};  // how long its client may be silent when it is asked something
  size_t max_blocks = 1 << 20;                     // through Allocate
  size_t max_segments = 1 << 16;                   // leased, over all devices
};

// What a session is made of.
struct SessionSetup {
  SessionId id{};
  std::string name;
  Caller caller;
  std::shared_ptr<const ProcessCommand> command{};
  SessionTerms terms;               // what the policy gave it
  std::vector<SegmentPool*> pools;  // by device; the session has an account with each; they outlive it
  Executor* workers = nullptr;      // outlives it
  SessionBounds bounds;
  std::shared_ptr<SessionEvents> events;
  AllocatorOptions allocator;
  uint64_t record_events = 0;       // what each of its heaps keeps from the start
  std::vector<uint32_t> devices{};  // see Session::devices()
  bool goes_on = false;             // from an earlier session, which its client has counted for
  std::function<SteadyTime()> clock = [] { return std::chrono::steady_clock::now(); };
};

// Safe to call from any thread. Calls marked (slow) may wait for the driver or for the client; they belong on
// slow_calls() or slow_questions().
class Session : public std::enable_shared_from_this<Session> {
 public:
  virtual ~Session() = default;
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  SessionId id() const { return id_; }
  const std::string& name() const { return name_; }
  const Caller& caller() const { return caller_; }
  // See CommandOf(); read when it was opened.
  std::string command() const { return command_ == nullptr ? "" : command_->text(); }
  const SessionTerms& terms() const { return terms_; }  // as they were when it was opened
  std::chrono::system_clock::time_point started() const { return started_; }
  // Ordinals of the devices that its client has named: it has nothing of the others. Empty: all devices.
  absl::Span<const uint32_t> devices() const { return devices_; }
  bool HasDevice(size_t device) const;
  // What a limit or a guarantee of the session comes to on a device.
  uint64_t BytesOn(size_t device, const Limit& limit) const;
  // How long its requests may wait for memory: those that begin to wait from now on.
  std::chrono::milliseconds max_wait() const { return max_wait_.load(); }
  void SetMaxWait(std::chrono::milliseconds max_wait) { max_wait_ = max_wait; }
  // When it last allocated or freed memory, as far as its client has said; at first when it was opened.
  SteadyTime last_use() const { return last_use_.load(std::memory_order_relaxed); }
  void NoteUse(SteadyTime time) { last_use_.store(time, std::memory_order_relaxed); }

  virtual Placement placement() const = 0;
  // The session as what it is; nullptr: it is of another kind.
  virtual LeasedSession* leased() { return nullptr; }
  virtual const LeasedSession* leased() const { return nullptr; }
  virtual RemoteSession* remote() { return nullptr; }
  virtual CountedSession* counted() { return nullptr; }
  bool leases() const { return leased() != nullptr; }

  std::shared_ptr<SessionEvents> events() const ABSL_LOCKS_EXCLUDED(mu_);
  SerialQueue& slow_calls() { return *slow_calls_; }
  SerialQueue& slow_questions() { return *slow_questions_; }  // of their own: a client may lease while it is asked
  // What a call answers that one of them has no room for.
  static absl::Status TooManyCalls();

  // What the broker watches the process with, -1 for nothing; for the broker alone. Taken once.
  void set_process_watch(int watch) { process_watch_ = watch; }
  int TakeProcessWatch() { return process_watch_.exchange(-1); }

  // ---- State ----

  SessionState state() const ABSL_LOCKS_EXCLUDED(mu_);
  // Aborted from kEnded on: what is asked of it, or is to change, comes too late.
  absl::Status CheckNotEnded() const ABSL_LOCKS_EXCLUDED(mu_);
  // Moves to `state`; never back towards kActive, but by Resume(). Returns false when that changed
  // nothing. kClosed wakes every slow call.
  bool Advance(SessionState state) ABSL_LOCKS_EXCLUDED(mu_);

  // ---- Memory ----

  // Gives `bytes` of wholly free segments back, or what there is (0: all), as far as the client closes them. Answers
  // with the bytes given back. A remote session always gives all. ResourceExhausted when too many calls of the session
  // wait; DeadlineExceeded when the client does not answer.
  void Trim(uint64_t bytes, const std::function<void(absl::StatusOr<uint64_t>)>& done);
  // (slow) The same.
  virtual absl::StatusOr<uint64_t> TrimSlowly(uint64_t bytes) = 0;
  // The pool holds the session to `limit_bytes` from now on.
  virtual void SetLimit(int /*device*/, uint64_t /*limit_bytes*/) {}

  // What it is asked to give back for others.
  ReclaimQuestions& reclaims() { return reclaims_; }
  const ReclaimQuestions& reclaims() const { return reclaims_; }
  // Its requests that may come to wait.
  CancelKeys& cancel_keys() { return cancel_keys_; }
  SessionRefusals& refusals() { return refusals_; }
  const SessionRefusals& refusals() const { return refusals_; }

  // ---- Figures ----

  // Of a session that leases: as last reported, at most about a second ago while its client runs.
  virtual MemoryStats GetMemoryStats(int device) const = 0;
  // Answers when GetMemoryStats() is of this moment, or not to be had from the client.
  void Refresh(const std::function<void()>& done);
  // Peaks become the current values; with `accumulated`, totals start again. FailedPrecondition for a session that
  // leases.
  virtual absl::Status ResetStats(int device, bool accumulated) = 0;
  // Its requests so far that flushed the cache first. Never falls, although the client may reset what it counts; final
  // when the session is closed.
  uint64_t CountAllocRetries(int device) ABSL_LOCKS_EXCLUDED(mu_);

  // ---- Snapshots, and what is recorded for them ----

  // With the events that the session has recorded, or only what its heap is now. Errors as Trim().
  void Snapshot(int device, const std::function<void(absl::StatusOr<HeapSnapshot>)>& done, bool with_history = true);
  // (slow) The same.
  virtual absl::StatusOr<HeapSnapshot> SnapshotSlowly(int device, bool with_history) = 0;
  // (slow) With history, of a session that has just been refused, whose client is not waited for as long: at most for
  // client_timeout. ResourceExhausted: there is more than kMaxRecordedItems.
  virtual absl::StatusOr<HeapSnapshot> RecordingOfRefusal(int device) = 0;
  static constexpr size_t kMaxRecordedItems = 2'500'000;  // blocks and events

  // (slow) See CachingAllocator::SetRecording(). A client decides for itself whether times are exact.
  virtual absl::Status SetRecording(uint64_t max_events, bool exact_times) = 0;
  // What it was told to keep last, or when it was opened.
  uint64_t recorded_events() const { return recorded_events_; }
  // More than that is kept for as long as somebody needs it. After a change: ApplyRecordingHolds(), which returns at
  // once, or ApplyRecordingHoldsSlowly() (slow), which waits until the client has done it.
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
  // Adds what NumAllocRetries() says beyond what it said the last time.
  void UpdateRetries(int device) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // The counter of NumAllocRetries() starts again, or has come to `so_far` before this session.
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

  // Guards the state, the events and the maps. A heap's or a pool's lock may be taken under it. Nothing waits under it,
  // except on changed_.
  mutable Mutex mu_ ABSL_ACQUIRED_AFTER(lock_level::kSession)
      ABSL_ACQUIRED_BEFORE(lock_level::kHeap){lock_level::kSession};
  CondVar changed_;  // the state, or what a remote session's client is to close
  SessionState state_ ABSL_GUARDED_BY(mu_) = SessionState::kActive;
  std::shared_ptr<SessionEvents> events_ ABSL_GUARDED_BY(mu_);

 private:
  struct Retries {
    uint64_t total = 0;
    uint64_t counted = 0;  // what the allocator had counted then
  };

  // See ReclaimQuestions::Send.
  virtual void SendReclaim(int device, uint64_t bytes, std::chrono::milliseconds time,
                           const std::function<void()>& answered) = 0;
  // What its allocator has counted, as far as it is known here.
  virtual uint64_t NumAllocRetries(int device) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) = 0;
  // Where Trim() runs.
  virtual SerialQueue& TrimQueue() = 0;
  // (slow) GetMemoryStats() is of this moment from then on.
  virtual absl::Status RefreshStats() = 0;
  // Nobody answers any more. The caller is to call what is returned, without a lock.
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
