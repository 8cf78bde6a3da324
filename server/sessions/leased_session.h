// SPDX-License-Identifier: Apache-2.0
//
// LeasedSession: a session with allocators in its client. The daemon leases whole segments to the client.
#ifndef VRAMBROKER_SERVER_SESSIONS_LEASED_SESSION_H_
#define VRAMBROKER_SERVER_SESSIONS_LEASED_SESSION_H_

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "server/base/random_token.h"
#include "server/pool/reservation.h"
#include "server/sessions/client_questions.h"
#include "server/sessions/session.h"

namespace vrambroker {

// A whole segment as seen by its holder.
struct Lease {
  SegmentId segment{};
  uint64_t bytes = 0;
  WireHandle handle;
};

// Secret of a client to resume its session.
using ResumeToken = RandomToken;

class LeasedSession : public Session {
 public:
  LeasedSession(const SessionSetup& setup, const ResumeToken& resume_token);

  Placement placement() const override { return Placement::kLeased; }
  LeasedSession* leased() override { return this; }
  const LeasedSession* leased() const override { return this; }

  const ResumeToken& resume_token() const { return resume_token_; }
  // Options of the client's allocators.
  const AllocatorOptions& allocator_options() const { return allocator_options_; }
  ClientQuestions& questions() { return questions_; }

  // Goes from kDisconnected back to kActive, with a new stream. False in any other state.
  bool Resume(std::shared_ptr<SessionEvents> events) ABSL_LOCKS_EXCLUDED(mu_);

  // Leases a segment for each of `sizes`, or none. Aborted when the session is not active, ResourceExhausted when it
  // holds too many segments. NotFound when the pool has no fitting idle segment, so LeaseSlowly() must ask the driver;
  // SegmentRefused().
  absl::StatusOr<std::vector<Lease>> LeaseIdle(int device, absl::Span<const uint64_t> sizes);
  // (slow) As LeaseIdle(), with new segments where needed. `reservation`: empty, or for all sizes.
  absl::StatusOr<std::vector<Lease>> LeaseSlowly(int device, absl::Span<const uint64_t> sizes,
                                                 Reservation reservation = {});
  // Returns all of `segments`, or none. InvalidArgument: duplicates. NotFound: not leased to this session.
  absl::Status ReturnSegments(int device, absl::Span<const SegmentId> segments);
  // Takes back all segments except `segments`, still held according to the client.
  void ReturnAllBut(const absl::flat_hash_set<SegmentId>& segments);
  // Stores the client's counters, cut to plausible values. If the session continues an earlier session, the first
  // report per device includes counts from before.
  void Report(int device, MemoryStats stats) ABSL_LOCKS_EXCLUDED(mu_);

  absl::StatusOr<uint64_t> TrimSlowly(uint64_t bytes) override;
  MemoryStats GetMemoryStats(int device) const override ABSL_LOCKS_EXCLUDED(mu_);
  absl::Status ResetStats(int device, bool accumulated) override;
  absl::StatusOr<HeapSnapshot> SnapshotSlowly(int device, bool with_history) override;
  absl::StatusOr<HeapSnapshot> RecordingOfRefusal(int device) override;
  absl::Status SetRecording(uint64_t max_events, bool exact_times) override;
  void ApplyRecordingHolds() override;
  absl::Status ApplyRecordingHoldsSlowly() override;

 private:
  using LeaseFunction = std::function<absl::StatusOr<std::vector<SegmentId>>(SegmentPool& pool)>;

  void SendReclaim(int device, uint64_t bytes, std::chrono::milliseconds time,
                   const std::function<void()>& answered) override;
  uint64_t NumAllocRetries(int device) const override ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    return reported_[device].num_alloc_retries;
  }
  SerialQueue& TrimQueue() override { return slow_questions(); }
  absl::Status RefreshStats() override;
  std::vector<std::function<void()>> CloseQuestions() override { return questions_.Close(); }

  // All segments that `lease` gets from the pool, with handles.
  absl::StatusOr<std::vector<Lease>> LeaseEach(int device, absl::Span<const uint64_t> sizes,
                                               const LeaseFunction& lease);
  absl::StatusOr<std::vector<Lease>> LeaseAll(SegmentPool& pool, absl::Span<const uint64_t> sizes,
                                              const LeaseFunction& lease);
  // ResourceExhausted unless the session may hold `more` additional segments.
  absl::Status CheckSegmentCount(size_t more) const;
  // (slow)
  absl::StatusOr<ClientAnswer> Ask(const ClientQuestion& question,
                                   size_t max_items = ClientQuestions::kMaxSnapshotItems,
                                   int most_patience = ClientQuestions::kMostPatience);
  // Total bytes that have returned to the pools.
  uint64_t CameBackBytes() const;
  // Asks the client to keep so many events for traces.
  void SendRecordingHold(uint64_t question_id, uint64_t held_events);

  const ResumeToken resume_token_;
  const AllocatorOptions allocator_options_;
  std::atomic<size_t> leases_under_way_{0};  // segments
  ClientQuestions questions_;
  std::vector<MemoryStats> reported_ ABSL_GUARDED_BY(mu_);  // by device
  std::vector<bool> counts_before_ ABSL_GUARDED_BY(mu_);    // by device: the next report includes counts from before
};

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_SESSIONS_LEASED_SESSION_H_
