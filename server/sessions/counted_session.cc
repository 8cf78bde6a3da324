// SPDX-License-Identifier: Apache-2.0
#include "server/sessions/counted_session.h"

#include <algorithm>
#include <optional>
#include <utility>

namespace vrambroker {
namespace {

absl::Status KnowsNoBlocks() {
  return absl::FailedPreconditionError(
      "the session is counted: its program has its memory of the driver itself, and the daemon knows no blocks of it");
}

}  // namespace

CountedSession::CountedSession(const SessionSetup& setup, const RandomToken& join_token)
    : Session(setup), join_token_(join_token), last_join_token_(join_token), peaks_(setup.pools.size()) {}

// ---- Connections ----

RandomToken CountedSession::join_token() const {
  MutexLock lock(mu_);
  return join_token_;
}

bool CountedSession::Resume(const RandomToken& join_token) {
  MutexLock lock(mu_);
  if (state_ != SessionState::kDisconnected) return false;
  state_ = SessionState::kActive;
  last_join_token_ = std::exchange(join_token_, join_token);
  ++resumes_;
  return true;
}

uint64_t CountedSession::resumes() const {
  MutexLock lock(mu_);
  return resumes_;
}

std::optional<uint64_t> CountedSession::FindResumes(const RandomToken& join_token) const {
  MutexLock lock(mu_);
  if (join_token != join_token_) return std::nullopt;
  return resumes_;
}

bool CountedSession::IsOf(const RandomToken& token) const {
  MutexLock lock(mu_);
  return token == join_token_ || token == last_join_token_;
}

absl::Status CountedSession::CheckGoesOn(uint64_t resumes) const {
  MutexLock lock(mu_);
  if (absl::Status status = CheckActive(); !status.ok()) return status;
  if (resumes != resumes_) return absl::UnavailableError("the session has gone on with another connection; join it");
  return absl::OkStatus();
}

// ---- Charges ----

absl::Status CountedSession::TryCharge(int device, uint64_t bytes, uint64_t resumes) {
  if (absl::Status status = CheckGoesOn(resumes); !status.ok()) return status;
  return Charged(device, pool(device).TryChargeCounted(id_, bytes));
}

absl::Status CountedSession::ChargeSlowly(int device, uint64_t bytes, uint64_t resumes, Reservation reservation) {
  if (absl::Status status = CheckGoesOn(resumes); !status.ok()) return status;
  return Charged(device, pool(device).ChargeCounted(id_, bytes, /*granted=*/reservation.Consume()));
}

absl::Status CountedSession::Declare(int device, uint64_t bytes, uint64_t resumes) {
  if (absl::Status status = CheckGoesOn(resumes); !status.ok()) return status;
  return Charged(device, pool(device).DeclareCounted(id_, bytes));
}

absl::Status CountedSession::Charged(int device, absl::Status status) {
  if (!status.ok()) return status;
  const uint64_t reserved = ReservedBytes(device);
  MutexLock lock(mu_);
  peaks_[device] = std::max(peaks_[device], reserved);
  return status;
}

uint64_t CountedSession::ReservedBytes(int device) const {
  const std::optional<AccountState> account = pool(device).GetAccount(id_);
  return account.has_value() ? account->reserved_bytes : 0;
}

MemoryStats CountedSession::GetMemoryStats(int device) const {
  MemoryStats stats;
  const uint64_t reserved = ReservedBytes(device);
  MutexLock lock(mu_);
  for (PoolStat* bytes : {&stats.allocated_bytes, &stats.active_bytes, &stats.requested_bytes, &stats.reserved_bytes}) {
    bytes->all.current = reserved;
    bytes->all.peak = std::max(peaks_[device], reserved);
  }
  return stats;
}

absl::Status CountedSession::ResetStats(int device, bool /*accumulated*/) {
  MutexLock lock(mu_);
  peaks_[device] = 0;
  return absl::OkStatus();
}

absl::StatusOr<HeapSnapshot> CountedSession::SnapshotSlowly(int /*device*/, bool /*with_history*/) {
  return KnowsNoBlocks();
}

absl::StatusOr<HeapSnapshot> CountedSession::RecordingOfRefusal(int /*device*/) {
  return KnowsNoBlocks();
}

absl::Status CountedSession::SetRecording(uint64_t /*max_events*/, bool /*exact_times*/) {
  return KnowsNoBlocks();
}

absl::Status CountedSession::ApplyRecordingHoldsSlowly() {
  return KnowsNoBlocks();
}

}  // namespace vrambroker
