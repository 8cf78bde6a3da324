// SPDX-License-Identifier: Apache-2.0
//
// Session: one connected client process and all that it holds.
#ifndef VRAMBROKER_SERVER_SESSION_H_
#define VRAMBROKER_SERVER_SESSION_H_

#include <sys/types.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "allocator/caching_allocator.h"
#include "allocator/ids.h"
#include "allocator/mutex.h"
#include "server/segment_pool.h"
#include "server/worker_pool.h"

namespace vrambroker {

// Who is calling, in the kernel's words.
struct Caller {
  pid_t pid = 0;
  uid_t uid = 0;
  gid_t gid = 0;
  std::shared_ptr<const UniqueFd> pidfd;  // of the process that made the connection
};

// What a session tells its client. Implementations are thread-safe and never block.
class SessionEvents {
 public:
  virtual ~SessionEvents() = default;
  virtual void CloseSegments(absl::Span<const SegmentId> segments) = 0;
  virtual void LimitChanged(int device, uint64_t limit_bytes) = 0;
  virtual void Draining() = 0;
  virtual void Ended(const std::string& reason) = 0;
};

enum class SessionState {
  kActive,
  kDisconnected,  // the stream broke, the process lives: memory stays charged
  kEnded,         // by an operator; the client has not closed its memory yet
  kClosed,        // holds nothing any more
};

const char* SessionStateName(SessionState state);  // "active", "disconnected", "ended", "closed"

// A block as its holder sees it.
struct Allocation {
  BlockId block{};
  SegmentId segment{};
  uint64_t segment_bytes = 0;
  uint64_t offset = 0;
  uint64_t block_bytes = 0;
  WireHandle handle;
};

// Safe to call from any thread. Calls marked (slow) may wait for the driver or for the client; they belong on
// slow_calls().
class Session {
 public:
  // The session has an account with each of `pools`, which outlive it, as `events` does.
  Session(SessionId id, std::string name, Caller caller, const std::vector<SegmentPool*>& pools, WorkerPool* workers,
          size_t max_blocks, std::shared_ptr<SessionEvents> events, const AllocatorOptions& options = {});
  ~Session();

  SessionId id() const { return id_; }
  const std::string& name() const { return name_; }
  const Caller& caller() const { return caller_; }
  std::chrono::system_clock::time_point started() const { return started_; }
  SessionEvents& events() { return *events_; }
  SerialQueue& slow_calls() { return *slow_calls_; }
  // What the broker watches the process with, -1 for nothing; for the broker alone. Taken once.
  void set_process_watch(int watch) { process_watch_ = watch; }
  int TakeProcessWatch() { return process_watch_.exchange(-1); }
  SessionState state() const ABSL_LOCKS_EXCLUDED(mu_);

  // Moves to `state`; never back towards kActive. Returns false when that changed nothing. kClosed wakes every slow
  // call.
  bool Advance(SessionState state) ABSL_LOCKS_EXCLUDED(mu_);

  // Aborted when the session is not active, ResourceExhausted when it holds too many blocks.
  absl::Status CheckMayAllocate() const ABSL_LOCKS_EXCLUDED(mu_);

  // Block from the cache; NotFound when there is none and AllocateSlowly() has to try. Errors as CheckMayAllocate().
  absl::StatusOr<Allocation> AllocateFromCache(int device, uint64_t requested, Stream stream = 0);
  // (slow) The whole allocation path. SegmentRefused() when there is no memory.
  absl::StatusOr<Allocation> AllocateSlowly(int device, uint64_t requested, Stream stream = 0);

  // All of `blocks`, or none. InvalidArgument: duplicates. NotFound: not blocks of this session, or freed before.
  absl::Status Free(absl::Span<const BlockId> blocks) ABSL_LOCKS_EXCLUDED(mu_);

  // (slow) Gives wholly free segments back, as far as the client closes them. Returns the bytes given back.
  uint64_t EmptyCache();

  // The pool holds the session to `limit_bytes` from now on; garbage collection goes by it, too.
  void LimitIs(int device, uint64_t limit_bytes);

  // The client has closed these segments.
  void SegmentsClosed(absl::Span<const SegmentId> segments) ABSL_LOCKS_EXCLUDED(mu_);

  MemoryStats GetMemoryStats(int device) const { return heaps_[device]->allocator.GetMemoryStats(); }
  CachingAllocator& allocator(int device) { return heaps_[device]->allocator; }

 private:
  // The session's memory on one device: an allocator that grows from the session's account with the pool.
  struct Heap : public SegmentSource {
    Heap(Session* owner, SegmentPool* segment_pool, const AllocatorOptions& options)
        : session(*owner),
          pool(*segment_pool),
          allocator(this, /*events=*/nullptr, options, segment_pool->capacity_bytes()) {}
    absl::StatusOr<SegmentId> AcquireSegment(uint64_t bytes) override { return pool.Lease(session.id_, bytes); }
    uint64_t ReleaseSegments(absl::Span<const ReleasedSegment> segments) override {
      return session.ReturnSegments(pool, segments);
    }
    uint64_t AvailableBytes() override { return pool.AvailableBytes(session.id_); }

    Session& session;
    SegmentPool& pool;
    CachingAllocator allocator;
  };
  struct HeldBlock {
    int device = 0;
    Block* block = nullptr;
  };

  // (slow) Asks the client to close `segments` and waits until it has, or for kCloseTimeout, or not at all when too
  // many others wait. Returns the bytes closed.
  uint64_t ReturnSegments(SegmentPool& pool, absl::Span<const ReleasedSegment> segments) ABSL_LOCKS_EXCLUDED(mu_);
  absl::StatusOr<Allocation> Record(int device, Block* block) ABSL_LOCKS_EXCLUDED(mu_);

  // Constant after construction.
  const SessionId id_;
  const std::string name_;
  const Caller caller_;
  const std::chrono::system_clock::time_point started_ = std::chrono::system_clock::now();
  const size_t max_blocks_;
  WorkerPool& workers_;
  const std::shared_ptr<SessionEvents> events_;
  const std::shared_ptr<SerialQueue> slow_calls_;
  std::vector<std::unique_ptr<Heap>> heaps_;  // by device; each synchronises itself
  std::atomic<int> process_watch_{-1};

  // Held for map operations only; an allocator's or a pool's lock may be taken while it is held.
  mutable Mutex mu_;
  CondVar changed_;  // state_ or closing_ has changed
  SessionState state_ ABSL_GUARDED_BY(mu_) = SessionState::kActive;
  uint64_t next_block_ ABSL_GUARDED_BY(mu_) = 1;
  absl::flat_hash_map<BlockId, HeldBlock> blocks_ ABSL_GUARDED_BY(mu_);
  absl::flat_hash_map<SegmentId, SegmentPool*> closing_ ABSL_GUARDED_BY(mu_);  // asked back, not yet closed
};

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_SESSION_H_
