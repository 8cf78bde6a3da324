// SPDX-License-Identifier: Apache-2.0
//
// CountedSession: a session whose client allocates directly from the driver. The client charges memory to the daemon
// first; the daemon knows no blocks.
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

// The charge equals the client's allocations, as far as the daemon knows.
class CountedSession : public Session {
 public:
  CountedSession(const SessionSetup& setup, const RandomToken& join_token);

  Placement placement() const override { return Placement::kCounted; }
  CountedSession* counted() override { return this; }

  // Secret of the client's process for joining with further connections.
  RandomToken join_token() const ABSL_LOCKS_EXCLUDED(mu_);

  // Resumes a client on a new connection, from kDisconnected back to kActive, with a new join token. False in any other
  // state. Earlier unfinished calls charge nothing any more: a resuming client declares its memory, and would not know
  // of such charges.
  bool Resume(const RandomToken& join_token) ABSL_LOCKS_EXCLUDED(mu_);
  // Number of successful Resume() calls.
  uint64_t resumes() const ABSL_LOCKS_EXCLUDED(mu_);
  // As resumes(), if `join_token` is the current join token.
  std::optional<uint64_t> FindResumes(const RandomToken& join_token) const ABSL_LOCKS_EXCLUDED(mu_);
  // Whether `token` is the current join token or its predecessor: a client may have lost the answer with the current
  // token.
  bool IsOf(const RandomToken& token) const ABSL_LOCKS_EXCLUDED(mu_);

  // Charges `bytes` more. Aborted when the session is not active. Unavailable when the session was resumed after
  // `resumes`. NotFound: only ChargeSlowly() can tell. SegmentRefused().
  absl::Status TryCharge(int device, uint64_t bytes, uint64_t resumes) ABSL_LOCKS_EXCLUDED(mu_);
  // (slow) As TryCharge(). `reservation`: empty, or for all bytes.
  absl::Status ChargeSlowly(int device, uint64_t bytes, uint64_t resumes, Reservation reservation = {})
      ABSL_LOCKS_EXCLUDED(mu_);
  // Allowed in every state. Errors as SegmentPool::UnchargeCounted().
  absl::Status Uncharge(int device, uint64_t bytes) { return pool(device).UnchargeCounted(id_, bytes); }
  // Aborted and Unavailable as TryCharge(). Other errors as SegmentPool::DeclareCounted().
  absl::Status Declare(int device, uint64_t bytes, uint64_t resumes) ABSL_LOCKS_EXCLUDED(mu_);

  // The client has nothing to give back: all its memory is in use.
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

  // Updates the peak.
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
