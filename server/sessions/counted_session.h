// SPDX-License-Identifier: Apache-2.0
//
// CountedSession: a session whose client has its memory of the driver itself. The daemon is charged first, and knows no
// block of it.
#ifndef VRAMBROKER_SERVER_SESSIONS_COUNTED_SESSION_H_
#define VRAMBROKER_SERVER_SESSIONS_COUNTED_SESSION_H_

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/base/random_token.h"
#include "server/pool/reservation.h"
#include "server/sessions/session.h"

namespace vrambroker {

// What it is charged is what its client has allocated, as far as anybody here knows.
class CountedSession : public Session {
 public:
  CountedSession(const SessionSetup& setup, const RandomToken& join_token);

  Placement placement() const override { return Placement::kCounted; }
  CountedSession* counted() override { return this; }

  // What further connections of the client's process join it by.
  RandomToken join_token() const ABSL_LOCKS_EXCLUDED(mu_);

  // A client that has lost its connection goes on with another one: from kDisconnected back to kActive, with this
  // join token. False in other states. What was begun before charges nothing any more: a client that goes on says what
  // it holds, and would not know of it.
  bool Resume(const RandomToken& join_token) ABSL_LOCKS_EXCLUDED(mu_);
  // COUNT of Resume().
  uint64_t resumes() const ABSL_LOCKS_EXCLUDED(mu_);
  // The same if it is the join token now.
  std::optional<uint64_t> FindResumes(const RandomToken& join_token) const ABSL_LOCKS_EXCLUDED(mu_);
  // Whether it is the join token, or the one before: a client may have lost the answer that had the next one.
  bool IsOf(const RandomToken& token) const ABSL_LOCKS_EXCLUDED(mu_);

  // Charges `bytes` more. Aborted when the session is not active. Unavailable when it has been resumed since it was
  // `resumes`. NotFound: only ChargeSlowly() can tell. SegmentRefused().
  absl::Status TryCharge(int device, uint64_t bytes, uint64_t resumes) ABSL_LOCKS_EXCLUDED(mu_);
  // (slow) The same. `reservation`: of nothing, or of all of them.
  absl::Status ChargeSlowly(int device, uint64_t bytes, uint64_t resumes, Reservation reservation = {})
      ABSL_LOCKS_EXCLUDED(mu_);
  // In every state. Errors as SegmentPool::UnchargeCounted().
  absl::Status Uncharge(int device, uint64_t bytes) { return pool(device).UnchargeCounted(id_, bytes); }
  // Aborted and Unavailable as TryCharge(). Else errors as SegmentPool::DeclareCounted().
  absl::Status Declare(int device, uint64_t bytes, uint64_t resumes) ABSL_LOCKS_EXCLUDED(mu_);

  // Its client gives nothing back for others: it holds no more than it uses.
  absl::StatusOr<uint64_t> TrimSlowly(uint64_t /*bytes*/) override { return 0; }
  MemoryStats GetMemoryStats(int device) const override ABSL_LOCKS_EXCLUDED(mu_);
  absl::Status ResetStats(int device, bool accumulated) override ABSL_LOCKS_EXCLUDED(mu_);
  absl::StatusOr<HeapSnapshot> SnapshotSlowly(int device, bool with_history) override;
  absl::StatusOr<HeapSnapshot> RecordingOfRefusal(int device) override;
  absl::Status SetRecording(uint64_t max_events, bool exact_times) override;
  void ApplyRecordingHolds() override {}
  absl::Status ApplyRecordingHoldsSlowly() override;

 private:
  void SendReclaim(int /*device*/, uint64_t /*bytes*/, std::chrono::milliseconds /*time*/,
                   const std::function<void()>& answered) override {
    answered();
  }
  uint64_t NumAllocRetries(int /*device*/) const override { return 0; }
  SerialQueue& TrimQueue() override { return slow_questions(); }
  absl::Status RefreshStats() override { return absl::OkStatus(); }

  // Notes a new peak.
  absl::Status Charged(int device, absl::Status status) ABSL_LOCKS_EXCLUDED(mu_);
  uint64_t ReservedBytes(int device) const;

  absl::Status CheckGoesOn(uint64_t resumes) const ABSL_LOCKS_EXCLUDED(mu_);

  RandomToken join_token_ ABSL_GUARDED_BY(mu_);
  RandomToken last_join_token_ ABSL_GUARDED_BY(mu_);  // before the last Resume()
  uint64_t resumes_ ABSL_GUARDED_BY(mu_) = 0;
  std::vector<uint64_t> peaks_ ABSL_GUARDED_BY(mu_);  // by device
};

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_SESSIONS_COUNTED_SESSION_H_
