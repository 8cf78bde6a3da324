// SPDX-License-Identifier: Apache-2.0
#include "server/requests/refusals.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <string>
#include <utility>

#include "allocator/heap/size_class.h"
#include "server/base/client_log.h"
#include "server/base/saturating.h"
#include "server/oom/oom_advice.h"
#include "server/oom/refusal_line.h"
#include "server/requests/check_device.h"
#include "server/sessions/session_view.h"

namespace vrambroker {
namespace {

// Concurrent recordings fetched from clients. The ranks of a job may all be refused at once.
constexpr size_t kMaxRecordedOfUser = 8;
constexpr size_t kMaxRecorded = 16;

void AddFit(const FitReport& fit, OomReport* report) {
  report->block_bytes = fit.block_bytes;
  report->segment_bytes = fit.segment_bytes;
  report->pool_free_bytes = fit.pool_free_bytes;
  report->largest_free_block_bytes = fit.pool_largest_bytes;
  report->holes = fit.holes;
  report->knows_holes = fit.knows_holes;
  report->scope = fit.scope;
  report->scopes = fit.scopes;
}

// Whether `recording` contains the refusal. Heaps whose blocks the application cuts itself record no refusals.
bool Shows(const HeapSnapshot& recording, const OomReport& report) {
  return std::any_of(recording.history.rbegin(), recording.history.rend(), [&](const HistoryEvent& event) {
    return event.action == HistoryAction::kOutOfMemory && event.bytes == report.block_bytes;
  });
}

OtherSession::Asked AskedOf(const Session& session, int device, const WaitRecord& outcome, SteadyTime now) {
  if (session.reclaims().IsSilent(device, ReclaimQuestions::kSilence, now)) return OtherSession::Asked::kNoAnswer;
  const auto asked = outcome.asked.find(session.id());
  if (asked == outcome.asked.end()) return OtherSession::Asked::kNo;
  return asked->second ? OtherSession::Asked::kAnswered : OtherSession::Asked::kNoAnswer;
}

}  // namespace

Refusals::Refusals(std::function<SteadyTime()> clock, const SessionBounds& session_bounds,
                   std::vector<SegmentPool*> pools, const SessionRegistry* sessions, size_t max_tenants)
    : clock_(std::move(clock)),
      session_bounds_(session_bounds),
      pools_(std::move(pools)),
      sessions_(*sessions),
      counts_(pools_.size()),
      tenants_(pools_.size(), max_tenants),
      claims_(pools_.size()),
      recording_slots_(
          {.what = "recordings of refusals under way", .per_uid = kMaxRecordedOfUser, .in_all = kMaxRecorded}) {}

// ---- Refusing ----

void Refusals::Refuse(RemoteSession& session, int device, const RemoteRequest& request, const Done& done) {
  const FitReport fit = session.ExplainFit(device, request.bytes, request.stream, request.scope);
  const PoolLook look = pools_[device]->LookFor(session.id(), /*with_accounts=*/true);
  OomReport report = Report(session, device, look);
  report.requested_bytes = request.bytes;
  report.waited_ms = static_cast<uint64_t>(request.outcome.waited.count());
  AddOthersOf(session, look, request.outcome, &report);
  AddFit(fit, &report);
  report.cause = CauseOf(report, request.cause);
  End(session.shared_from_this(), std::move(report), /*is_recording=*/session.records(), done);
}

void Refusals::Explain(const SessionPtr& session, uint64_t device, const RefusedRequest& request, const Done& done) {
  if (absl::Status status = CheckDevice(device, pools_.size()); !status.ok()) return done(std::move(status));
  if (!session->leases()) {
    return done(absl::FailedPreconditionError("the session is remote: the daemon explains what it refuses"));
  }
  const int ordinal = static_cast<int>(device);
  const WaitRecord outcome = session->refusals().TakeLeaseOutcome(ordinal, request.fit.segment_bytes, clock_());
  const PoolLook look = pools_[ordinal]->LookFor(session->id(), /*with_accounts=*/true);
  OomReport report = Report(*session, ordinal, look);
  report.requested_bytes = request.requested_bytes;
  report.waited_ms = static_cast<uint64_t>(outcome.waited.count());
  // Newer than the client's last report, also among the holders.
  report.allocated_bytes = std::min(request.allocated_bytes, report.reserved_bytes);
  AddOthersOf(*session, look, outcome, &report);
  AddFit(request.fit, &report);
  report.cause = CauseOf(report, request.cause);
  // A client may have changed its recording on its own; version 0.1 does not report that.
  const bool is_recording = request.fit.max_events > 0 || session->records();
  End(session, std::move(report), is_recording, done);
}

absl::Status Refusals::LeaseError(const LeasedSession& session, int device, uint64_t bytes, OomCause cause,
                                  const WaitRecord& outcome) const {
  const PoolLook look = pools_[device]->LookFor(session.id(), /*with_accounts=*/false);
  return OutOfMemoryError(ReportOfWhole(session, device, look, bytes, cause, outcome));
}

void Refusals::RefuseCharge(CountedSession& session, int device, const ChargeRefusal& refusal, const Done& done) {
  const PoolLook look = pools_[device]->LookFor(session.id(), /*with_accounts=*/true);
  OomReport report = ReportOfWhole(session, device, look, refusal.bytes, refusal.cause, refusal.outcome);
  AddOthersOf(session, look, refusal.outcome, &report);
  End(session.shared_from_this(), std::move(report), /*is_recording=*/false, done);
}

absl::Status Refusals::ChargeError(const CountedSession& session, int device, const ChargeRefusal& refusal) const {
  const PoolLook look = pools_[device]->LookFor(session.id(), /*with_accounts=*/false);
  return OutOfMemoryError(ReportOfWhole(session, device, look, refusal.bytes, refusal.cause, refusal.outcome));
}

// ---- The report ----

OomReport Refusals::ReportOfWhole(const Session& session, int device, const PoolLook& look, uint64_t bytes,
                                  OomCause cause, const WaitRecord& outcome) const {
  OomReport report = Report(session, device, look);
  report.requested_bytes = report.block_bytes = report.segment_bytes = bytes;
  report.waited_ms = static_cast<uint64_t>(outcome.waited.count());
  report.cause = cause == OomCause::kCapacity && IsShareLimit(report) ? OomCause::kLimit : cause;
  return report;
}

OomReport Refusals::Report(const Session& session, int device, const PoolLook& look) const {
  const AccountState& account = look.account;
  const SessionDeviceView held = DeviceViewOf(session, device, account);
  OomReport report;
  report.device = device;
  if (!session.HasDevice(static_cast<size_t>(device))) {
    report.named_devices.assign(session.devices().begin(), session.devices().end());
  }
  report.limit_bytes = account.limit_bytes;
  report.reserved_bytes = account.reserved_bytes;
  report.allocated_bytes = held.stats.allocated_bytes.all.current;
  report.inactive_split_bytes = held.stats.inactive_split_bytes.all.current;
  report.unknown_bytes = held.unknown_bytes;
  report.capacity_bytes = look.stats.capacity_bytes;
  report.available_bytes = SaturatingSub(look.stats.capacity_bytes, look.stats.charged_bytes);
  report.guarantee_bytes = account.guarantee_bytes;
  // Committed and uncharged bytes, except the parts of the session and its claim.
  report.kept_free_bytes = SaturatingSub(look.stats.kept_free_bytes(),
                                         account.unused_guarantee_bytes() + look.share.unused_guarantee_bytes());
  report.held_back = look.is_held_back;
  report.device_idle_bytes = look.stats.idle_bytes;
  report.outside_bytes = look.stats.outside_bytes;
  if (account.share_limit_bytes != AccountState::kNoBound) {
    report.claim = session.terms().claim;
    report.is_in_by_socket = session.caller().claim.has_value();
    report.share_limit_bytes = account.share_limit_bytes;
    // Leaves out guarantees cut by the share's limit.
    const uint64_t cut = SaturatingSub(account.unused_guarantee_bytes(),
                                       SaturatingSub(account.share_limit_bytes, look.share.charged_bytes));
    report.guarantee_bytes -= cut;
    report.share_used_bytes =
        std::min(look.share.used_bytes, std::max(account.share_limit_bytes, look.share.charged_bytes));
  }
  return report;
}

void Refusals::AddOthersOf(const Session& session, const PoolLook& look, const WaitRecord& outcome,
                           OomReport* report) const {
  const SteadyTime now = clock_();
  const std::vector<SessionPtr> sessions = sessions_.GetAll();
  std::vector<OtherSession> others;
  others.reserve(sessions.size());
  for (const SessionPtr& holder : sessions) {
    const auto account = look.accounts.find(holder->id());
    if (account == look.accounts.end() || account->second.reserved_bytes == 0) continue;
    const bool is_own = holder->id() == session.id();
    const SessionDeviceView held = DeviceViewOf(*holder, report->device, account->second);
    report->largest_holders.push_back(
        {.client = holder->name(),
         .reserved_bytes = held.account.reserved_bytes,
         // The client may not have reported the refusal's figure yet.
         .allocated_bytes = is_own ? report->allocated_bytes : held.stats.allocated_bytes.all.current});
    if (is_own) continue;
    others.push_back({.client = holder->name(),
                      .reserved_bytes = held.account.reserved_bytes,
                      .guarantee_bytes = held.account.guarantee_bytes,
                      .active_bytes = held.stats.active_bytes.all.current,
                      .unknown_bytes = held.unknown_bytes,
                      .inactive_split_bytes = held.stats.inactive_split_bytes.all.current,
                      .is_connected = holder->state() == SessionState::kActive,
                      .asked = AskedOf(*holder, report->device, outcome, now)});
  }
  std::stable_sort(report->largest_holders.begin(), report->largest_holders.end(),
                   [](const auto& a, const auto& b) { return a.reserved_bytes > b.reserved_bytes; });
  if (report->largest_holders.size() > kMaxHolders) report->largest_holders.resize(kMaxHolders);
  AddOthers(others, report);
  report->left_behind_bytes = look.stats.quarantined_bytes;
}

// ---- Recording, counting, logging ----

void Refusals::End(const SessionPtr& session, OomReport report, bool is_recording, const Done& done) {
  report.refusal = ++last_number_;
  absl::StatusOr<UserSlots::Slot> slot = absl::UnavailableError("not now");
  const SteadyTime asked = clock_();
  // No setting helps a request larger than any device, and heaps do not record such a request.
  if (is_recording && report.cause != OomCause::kLargerThanDevice && report.requested_bytes < kMaxRequestBytes &&
      session->refusals().StartRecording(asked)) {
    slot = recording_slots_.Take(session->caller().user());
    if (!slot.ok()) session->refusals().EndRecording(asked, {});
  }
  if (!slot.ok()) return done(Count(*session, report));
  const auto taken = std::make_shared<UserSlots::Slot>(*std::move(slot));
  // Before the answer: a program killed by the refusal cannot be asked any more.
  const bool queued = session->slow_questions().Submit([this, session, report, done, taken, asked] {
    const SteadyTime began = clock_();
    OomReport recorded = report;
    // Behind earlier questions the moment may have passed, and the program is waiting.
    if (began - asked <= session_bounds_.client_timeout) {
      Keep(*session, &recorded);
      const SteadyTime now = clock_();
      session->refusals().EndRecording(now, std::max(now - began, SteadyTime::duration(1)));
    } else {
      session->refusals().EndRecording(began, {});
    }
    done(Count(*session, recorded));
  });
  if (queued) return;
  session->refusals().EndRecording(asked, {});
  done(Count(*session, report));
}

void Refusals::Keep(Session& session, OomReport* report) {
  absl::StatusOr<HeapSnapshot> recording = session.RecordingOfRefusal(report->device);
  if (!recording.ok() || !Shows(*recording, *report) || recording->segments.size() > session_bounds_.max_segments) {
    return;
  }
  const RefusalRecordings::Place place =
      recordings_.Add(report->refusal, session.id(), session.caller().user(), *std::move(recording));
  report->is_recorded = place != RefusalRecordings::Place::kNone;
  report->is_first_recorded = place == RefusalRecordings::Place::kFirst;
}

absl::Status Refusals::Count(Session& session, const OomReport& report) {
  counts_[report.device][static_cast<size_t>(report.cause)].fetch_add(1, std::memory_order_relaxed);
  session.refusals().Count(report.device, report.cause, clock_());
  tenants_.CountRefusal(session.terms().tenant, report.device, report.cause);
  if (!session.terms().claim.empty()) claims_.CountRefusal(session.terms().claim, report.device, report.cause);
  // The session may have ended while asked for its recording.
  if (session.state() == SessionState::kClosed) CountEndedAfterRefusal(session);
  absl::Status status = OutOfMemoryError(report);
  LogClientEvent(spdlog::level::info, RefusalLine(session.id(), session.name(), report));
  log_.Add({.time = std::chrono::system_clock::now(),
            .session = session.id(),
            .client = session.name(),
            .uid = session.caller().uid,
            .claim = session.terms().claim_id,
            .report = report});
  return status;
}

// ---- Stored refusals, counters ----

Refusals::Events Refusals::Last(std::optional<uid_t> uid) const {
  Events events = log_.NewestFirst();
  if (uid.has_value()) {
    std::erase_if(events, [&](const std::shared_ptr<const OomEvent>& event) { return event->uid != *uid; });
  }
  return events;
}

absl::StatusOr<Refusals::Events> Refusals::LastOf(const SessionRef& ref, std::optional<uid_t> uid) const {
  Events events = Last(uid);
  // The session may have ended: stored refusals count as well.
  SessionRef wanted = ref;
  if (const auto* either = std::get_if<IdOrName>(&ref)) {
    const auto [by_id, by_name] = sessions_.FindEither(*either);
    const auto is_seen = [&](const SessionPtr& session) {
      return session != nullptr && (!uid.has_value() || session->caller().uid == *uid);
    };
    std::optional<std::string> holder;
    std::optional<SessionId> namesake;
    if (is_seen(by_id)) holder = by_id->name();
    if (is_seen(by_name) && by_name != by_id) namesake = by_name->id();
    for (const auto& event : events) {
      if (event->session == either->id) {
        holder = event->client;
      } else if (event->client == either->name && !namesake.has_value()) {
        namesake = event->session;
      }
    }
    if (holder.has_value() && namesake.has_value()) return AmbiguousSession(*either, *holder, *namesake);
    wanted = holder.has_value() ? SessionRef(either->id) : SessionRef(either->name);
  }
  const auto is_other = [&wanted](const std::shared_ptr<const OomEvent>& event) {
    const auto* id = std::get_if<SessionId>(&wanted);
    return id != nullptr ? event->session != *id : event->client != std::get<std::string>(wanted);
  };
  std::erase_if(events, is_other);
  return events;
}

Refusals::Counts Refusals::GetCounts(int device) const {
  Counts counts;
  for (size_t i = 0; i < counts.size(); ++i) counts[i] = counts_[device][i].load(std::memory_order_relaxed);
  return counts;
}

std::optional<std::chrono::milliseconds> Refusals::CountEndedAfterRefusal(Session& session) {
  const SteadyTime now = clock_();
  std::optional<std::chrono::milliseconds> least;
  for (size_t device = 0; device < pools_.size(); ++device) {
    const std::optional<SteadyTime> refused = session.refusals().TakeLastTime(static_cast<int>(device));
    if (!refused.has_value() || now - *refused > TenantRefusals::kSoon) continue;
    tenants_.CountEndedSession(session.terms().tenant, static_cast<int>(device));
    const auto after = std::chrono::duration_cast<std::chrono::milliseconds>(now - *refused);
    least = std::min(after, least.value_or(after));
  }
  return least;
}

}  // namespace vrambroker
