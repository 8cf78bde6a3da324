// SPDX-License-Identifier: Apache-2.0
#include "server/core/recordings.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/base/client_log.h"
#include "server/base/log_line.h"

namespace vrambroker {
namespace {

constexpr size_t kMaxHoldsOfUser = 16;

}  // namespace

Recordings::Recordings(uint64_t default_events, SessionRegistry* sessions, SavedSettings* settings)
    : default_events_(default_events),
      sessions_(*sessions),
      settings_(*settings),
      slots_({.what = "traces under way", .per_uid = kMaxHoldsOfUser, .per_uid_bound = "the daemon"}) {}

void Recordings::Set(const SessionPtr& session, uint64_t max_events, const std::function<void(absl::Status)>& done) {
  if (max_events > kMaxRecordedEvents) {
    return done(absl::InvalidArgumentError(
        absl::StrCat("max_events: ", max_events, " is above ", kMaxRecordedEvents, ", the most that is kept")));
  }
  const bool queued = session->slow_questions().Submit([this, session, max_events, done] {
    absl::Status status = sessions_.ReserveEvents(*session, std::max(max_events, session->recording_holds().Most()));
    // Exact times cost more than the default, so only a request beyond the default gets them.
    if (status.ok()) status = session->SetRecording(max_events, /*exact_times=*/max_events > default_events_);
    if (status.ok()) {
      settings_.Change(session->id(), [&](SessionSettings& set) { set.recorded_events = max_events; });
      LogClientEvent(spdlog::level::info,
                     SessionLine("recording changed", session->id(), session->name()).Add("events", max_events));
    }
    done(status);
  });
  if (!queued) done(Session::TooManyCalls());
}

void Recordings::Hold(const SessionPtr& session, uint64_t events, const UserKey& user,
                      const std::function<void(absl::StatusOr<std::shared_ptr<RecordingHold>>)>& done) {
  if (events == 0 || events > kMaxRecordedEvents) {
    return done(
        absl::InvalidArgumentError(absl::StrCat("events: ", events, " is not within [1, ", kMaxRecordedEvents, "]")));
  }
  absl::StatusOr<UserSlots::Slot> taken = slots_.Take(user);
  if (!taken.ok()) return done(taken.status());
  const auto slot = std::make_shared<UserSlots::Slot>(*std::move(taken));
  const bool queued = session->slow_questions().Submit([this, session, events, slot, done] {
    absl::Status status = sessions_.ReserveEvents(*session, std::max(EventsToKeep(*session), events));
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
    // Released before the answer, so a caller's next, smaller request does not find this hold still counted.
    hold.reset();
    *slot = UserSlots::Slot();
    done(status);
  });
  if (!queued) done(Session::TooManyCalls());
}

RecordingHold::RecordingHold(Recordings* owner, const SessionPtr& session, uint64_t events, UserSlots::Slot slot)
    : owner_(*owner), session_(session), events_(events), slot_(std::move(slot)) {
  session->recording_holds().Add(events);
}

RecordingHold::~RecordingHold() {
  if (const SessionPtr session = session_.lock()) owner_.EndHold(session, events_);
}

void Recordings::EndHold(const SessionPtr& session, uint64_t events) {
  session->recording_holds().Remove(events);
  LogClientEvent(spdlog::level::info, SessionLine("trace ended", session->id(), session->name()));
  // Otherwise the heaps are gone, or forget the hold when the client returns. While the daemon stops there are no
  // workers.
  if (session->state() != SessionState::kActive) return;
  if (session->remote() != nullptr && session->slow_questions().Submit([this, session] {
        session->ApplyRecordingHolds();
        (void)sessions_.ReserveEvents(*session, EventsToKeep(*session));  // less than before
      })) {
    return;
  }
  session->ApplyRecordingHolds();
}

uint64_t Recordings::EventsToKeep(Session& session) {
  return std::max(session.recorded_events(), session.recording_holds().Most());
}

}  // namespace vrambroker
