// SPDX-License-Identifier: Apache-2.0
//
// Broker: how much of its past a session records. Events of remote sessions are in the daemon's memory and counted for
// their users; those of a session that leases are in its client's.
#include <spdlog/spdlog.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "allocator/base/mutex.h"
#include "server/base/client_log.h"
#include "server/base/log_line.h"
#include "server/base/user_slots.h"
#include "server/core/broker.h"
#include "server/core/recording_holds.h"
#include "server/core/session.h"

namespace vrambroker {

void Broker::SetRecording(const SessionPtr& session, uint64_t max_events,
                          const std::function<void(absl::Status)>& done) {
  if (max_events > kMaxRecordedEvents) {
    return done(absl::InvalidArgumentError(
        absl::StrCat("max_events: ", max_events, " is above ", kMaxRecordedEvents, ", the most that is kept")));
  }
  const bool queued = session->slow_questions().Submit([this, session, max_events, done] {
    absl::Status status = ReserveEvents(*session, std::max(max_events, session->recording_holds().Most()));
    // What costs more than the default does is done for who has asked for it.
    if (status.ok()) status = session->SetRecording(max_events, /*exact_times=*/max_events > options_.record_events);
    if (status.ok()) {
      LogClientEvent(spdlog::level::info,
                     SessionLine("recording changed", session->id(), session->name()).Add("events", max_events));
    }
    done(status);
  });
  if (!queued) done(TooManyCalls());
}

void Broker::HoldRecording(const SessionPtr& session, uint64_t events, uid_t uid,
                           const std::function<void(absl::StatusOr<std::shared_ptr<RecordingHold>>)>& done) {
  if (events == 0 || events > kMaxRecordedEvents) {
    return done(
        absl::InvalidArgumentError(absl::StrCat("events: ", events, " is not within [1, ", kMaxRecordedEvents, "]")));
  }
  absl::StatusOr<UserSlots::Slot> taken = recording_holds_.Take(uid);
  if (!taken.ok()) return done(taken.status());
  const auto slot = std::make_shared<UserSlots::Slot>(*std::move(taken));
  const bool queued = session->slow_questions().Submit([this, session, events, slot, done] {
    absl::Status status = ReserveEvents(*session, std::max(EventsToKeep(*session), events));
    std::shared_ptr<RecordingHold> hold;
    if (status.ok()) {
      hold = std::make_shared<RecordingHold>(this, session, events, std::move(*slot));
      status = session->ApplyRecordingHoldsSlowly();
    }
    if (status.ok()) {
      LogClientEvent(spdlog::level::info,
                     SessionLine("trace started", session->id(), session->name()).Add("events", events));
      return done(std::move(hold));
    }
    // Released before the answer: a caller that then asks for less must not find this one still counted.
    hold.reset();
    *slot = UserSlots::Slot();
    done(status);
  });
  if (!queued) done(TooManyCalls());
}

RecordingHold::RecordingHold(Broker* broker, const SessionPtr& session, uint64_t events, UserSlots::Slot slot)
    : broker_(*broker), session_(session), events_(events), slot_(std::move(slot)) {
  session->recording_holds().Add(events);
}

RecordingHold::~RecordingHold() {
  if (const SessionPtr session = session_.lock()) broker_.EndHold(session, events_);
}

void Broker::EndHold(const SessionPtr& session, uint64_t events) {
  session->recording_holds().Remove(events);
  LogClientEvent(spdlog::level::info, SessionLine("trace ended", session->id(), session->name()));
  // Else its heaps have gone, or forget it when their client comes back. While the daemon stops there are no workers.
  if (session->state() != SessionState::kActive) return;
  if (!session->leases() && session->slow_questions().Submit([this, session] {
        session->ApplyRecordingHolds();
        (void)ReserveEvents(*session, EventsToKeep(*session));  // less than before
      })) {
    return;
  }
  session->ApplyRecordingHolds();
}

uint64_t Broker::EventsToKeep(Session& session) {
  return std::max(session.recorded_events(), session.recording_holds().Most());
}

absl::Status Broker::ReserveEvents(const Session& session, uint64_t events_of_heap) {
  if (session.leases()) return absl::OkStatus();
  const uint64_t events = events_of_heap * pools_.size();
  MutexLock lock(mu_);
  const auto it = events_of_.find(session.id());
  if (it == events_of_.end()) return absl::AbortedError("the session has ended");
  uint64_t& of_uid = events_of_uid_[session.caller().uid];
  const uint64_t others = of_uid - it->second;
  if (others + events > options_.max_recorded_events_per_uid) {
    return absl::ResourceExhaustedError(
        absl::StrCat("max_events: with ", events, " more, the remote sessions of uid ", session.caller().uid,
                     " would record ", others + events, " events, more than the ", options_.max_recorded_events_per_uid,
                     " that max_recorded_events_per_uid allows; record less, or let others record less"));
  }
  it->second = events;
  of_uid = others + events;
  return absl::OkStatus();
}

}  // namespace vrambroker
