// SPDX-License-Identifier: Apache-2.0
//
//   kActive --stream breaks--> kDisconnected --+
//      |  \--operator ends it--> kEnded -------+--process gone--> kClosed
//      +------------goodbye, process gone------+
//
// A leasing or counted client may go from kDisconnected back to kActive: LeasedSession::Resume(),
// CountedSession::Resume(). In every state but kClosed the session's memory stays charged: mapped memory cannot be
// taken away.
#include "server/sessions/session.h"

#include <algorithm>

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"

namespace vrambroker {
namespace {

constexpr uint64_t kMostRetriesAtOnce = 1 << 20;

}  // namespace

const char* PlacementName(Placement placement) {
  switch (placement) {
    case Placement::kRemote:
      return "remote";
    case Placement::kLeased:
      return "leased";
    case Placement::kCounted:
      return "counted";
  }
  return "unknown";
}

const char* SessionStateName(SessionState state) {
  switch (state) {
    case SessionState::kActive:
      return "active";
    case SessionState::kDisconnected:
      return "disconnected";
    case SessionState::kEnded:
      return "ended";
    case SessionState::kClosed:
      return "closed";
  }
  return "unknown";
}

Session::Session(const SessionSetup& setup)
    : id_(setup.id),
      name_(setup.name),
      caller_(setup.caller),
      command_(setup.command),
      terms_(setup.terms),
      devices_(setup.devices),
      max_wait_(setup.terms.max_wait),
      bounds_(setup.bounds),
      clock_(setup.clock),
      last_use_(clock_()),
      pools_(setup.pools),
      workers_(*setup.workers),
      recorded_events_(setup.record_events),
      events_(setup.events),
      slow_calls_(std::make_shared<SerialQueue>(setup.workers)),
      slow_questions_(std::make_shared<SerialQueue>(setup.workers)),
      refusals_(setup.pools.size()),
      reclaims_(setup.id, setup.name, setup.pools, setup.clock,
                [this](int device, uint64_t bytes, std::chrono::milliseconds time,
                       const std::function<void()>& answered) { SendReclaim(device, bytes, time, answered); }),
      retries_(setup.pools.size()) {}

bool Session::HasDevice(size_t device) const {
  return devices_.empty() || absl::c_linear_search(devices_, device);
}

uint64_t Session::BytesOn(size_t device, const Limit& limit) const {
  return HasDevice(device) ? LimitBytes(limit, pools_[device]->capacity_bytes()) : 0;
}

absl::Status Session::TooManyCalls() {
  return absl::ResourceExhaustedError(absl::StrCat(
      "calls: ", SerialQueue::kMaxTasks, " calls of this session are already waiting; wait for their answers first"));
}

std::shared_ptr<SessionEvents> Session::events() const {
  MutexLock lock(mu_);
  return events_;
}

SessionState Session::state() const {
  MutexLock lock(mu_);
  return state_;
}

absl::Status Session::CheckNotEnded() const {
  if (state() < SessionState::kEnded) return absl::OkStatus();
  return absl::AbortedError(
      absl::StrCat("session '", name_, "' has ended: its process gives back what it holds by closing it or exiting"));
}

absl::Status Session::CheckActive() const {
  if (state_ == SessionState::kActive) return absl::OkStatus();
  return absl::AbortedError(absl::StrCat("session ", Raw(id_), " is ", SessionStateName(state_), "; open a new one"));
}

bool Session::Advance(SessionState state) {
  std::vector<std::function<void()>> unanswered;
  {
    MutexLock lock(mu_);
    if (state <= state_) return false;
    for (size_t device = 0; state == SessionState::kClosed && device < device_count(); ++device) {
      UpdateRetries(static_cast<int>(device));
    }
    state_ = state;
    changed_.NotifyAll();
    unanswered = CloseQuestions();
  }
  for (const auto& call : unanswered) call();
  return true;
}

void Session::Trim(uint64_t bytes, const std::function<void(absl::StatusOr<uint64_t>)>& done) {
  if (!TrimQueue().Submit([self = shared_from_this(), bytes, done] { done(self->TrimSlowly(bytes)); })) {
    done(TooManyCalls());
  }
}

void Session::Refresh(const std::function<void()>& done) {
  const bool queued = leases() && slow_questions().Submit([self = shared_from_this(), done] {
    (void)self->RefreshStats();  // after an error, the last report still stands
    done();
  });
  if (!queued) done();
}

void Session::Snapshot(int device, const std::function<void(absl::StatusOr<HeapSnapshot>)>& done, bool with_history) {
  const bool queued = slow_questions().Submit(
      [self = shared_from_this(), device, done, with_history] { done(self->SnapshotSlowly(device, with_history)); });
  if (!queued) done(TooManyCalls());
}

void Session::UpdateRetries(int device) {
  if (state_ == SessionState::kClosed) return;
  Retries& retries = retries_[device];
  const uint64_t now = NumAllocRetries(device);
  // A lower count means a reset in between. Implausibly fast growth reported by a client is cut.
  retries.total += std::min(now < retries.counted ? now : now - retries.counted, kMostRetriesAtOnce);
  retries.counted = now;
}

uint64_t Session::CountAllocRetries(int device) {
  MutexLock lock(mu_);
  UpdateRetries(device);
  return retries_[device].total;
}

}  // namespace vrambroker
