// SPDX-License-Identifier: Apache-2.0
//
// SessionClient's background thread: reports, answers the daemon's questions, and reconnects.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <limits>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "allocator/wire/heap_convert.h"
#include "client/session/session_client.h"

namespace vrambroker::client_internal {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kMaxCarriedInMessage = 1024;
// Shortest period for reporting statistics and looking at wholly free segments.
constexpr std::chrono::milliseconds kReportPeriod(950);  // so the daemon's figures are less than 1 s old
// Delay of a change's first report, so that the report includes the block that caused a lease.
constexpr std::chrono::milliseconds kReportDelay(2);
// Shortest period for passing on the application's segment use, normally sent at once because it ages.
constexpr std::chrono::milliseconds kUseReportPeriod(100);
// Share of a trim's time left to the application; the rest covers the messages.
constexpr double kTrimTimeShare = 0.75;
constexpr std::chrono::milliseconds kTrimTime(2000);  // when the daemon gives no time
constexpr int kTicksOfDecay = 4;
// Poll period for ending a session without a client after its last block.
constexpr std::chrono::milliseconds kOrphanPeriod(20);
constexpr std::chrono::milliseconds kFirstBackoff(100);
constexpr std::chrono::milliseconds kLastBackoff(5000);
constexpr int kItemsInSnapshotPart = 1024;  // the daemon accepts messages up to 64 KiB

// True when the daemon will never resume the session: the memory stays charged to the session, and the client needs a
// new session. Earlier daemons reject a list larger than a message; the error comes from gRPC.
bool IsNotToBeResumed(const absl::Status& status) {
  return absl::IsNotFound(status) || absl::IsInvalidArgument(status) ||
         (absl::IsResourceExhausted(status) && absl::StrContains(status.message(), "larger than max"));
}

bool SameCounts(const MemoryStats& a, const MemoryStats& b) {
  return StatsToProto(a).SerializeAsString() == StatsToProto(b).SerializeAsString();
}

}  // namespace

void SessionClient::Grown() {
  MutexLock lock(mu_);
  if (std::exchange(grown_, true)) return;
  changed_.NotifyAll();
}

void SessionClient::Lost(const Link* link, const absl::Status& why) {
  {
    MutexLock lock(mu_);
    // A replaced link may report its loss late; for a link not yet in use, its status carries the loss.
    if (link_.get() == link) lost_ = true;
    changed_.NotifyAll();
  }
  // `this` may be deleted before the callback returns.
  const std::shared_ptr<Callbacks> callbacks = callbacks_;
  callbacks->gate.Run([&] {
    if (const auto on_lost = callbacks->on_lost) on_lost(why);
  });
}

void SessionClient::Log(const std::string& line) const {
  if (logs_to_stderr_) {
    std::fprintf(stderr, "vrambroker: %s\n", line.c_str());
    return;
  }
  const std::shared_ptr<Callbacks> callbacks = callbacks_;
  callbacks->gate.Run([&] {
    if (const auto log = callbacks->log) log(line);
  });
}

void SessionClient::Keep() {
  const bool decays = leases() && options().idle_decay < kLongestDuration;
  const std::chrono::milliseconds tick =
      std::max(std::chrono::milliseconds(1),
               absl::ToChronoMilliseconds(decays ? options().idle_decay : absl::Hours(1)) / kTicksOfDecay);
  Clock::time_point last_report = Clock::now() - kReportPeriod;
  Clock::time_point next_report = Clock::now() + kReportPeriod;
  Clock::time_point next_tick = decays ? Clock::now() + tick : Clock::time_point::max();
  Clock::time_point next_try = Clock::time_point::max();  // next attempt to reconnect
  auto backoff = kFirstBackoff;
  bool reported_lost = false;
  absl::Status last_failure;  // of reconnecting
  while (true) {
    std::deque<v1::Question> questions;
    bool lost = false;
    bool orphaned = false;
    {
      MutexLock lock(mu_);
      Clock::time_point wake = leases() ? std::min({next_report, next_tick, next_try}) : Clock::time_point::max();
      wake = std::min(wake, trims_.NextDeadline().value_or(wake));
      if (orphaned_) wake = std::min(wake, Clock::now() + kOrphanPeriod);
      while (!stopping_ && questions_.empty() && !trims_changed_ && (!lost_ || reported_lost || !leases())) {
        if (grown_ || use_reported_) {
          const std::chrono::milliseconds period = use_reported_ ? kUseReportPeriod : kReportPeriod;
          next_report = std::min(next_report, std::max(Clock::now() + kReportDelay, last_report + period));
          wake = std::min(wake, next_report);
        }
        if (!changed_.WaitUntil(mu_, wake)) break;
        if (orphaned_) wake = std::min(wake, Clock::now() + kOrphanPeriod);
      }
      if (stopping_) return;
      trims_changed_ = false;
      questions.swap(questions_);
      lost = lost_ && leases();
      orphaned = orphaned_;
    }
    if (orphaned && !InUse()) {
      background_thread_.detach();
      SayGoodbyeForSure();
      delete this;
      return;
    }
    for (const v1::Question& question : questions) Answer(question);
    AnswerEndedTrims();
    const Clock::time_point now = Clock::now();
    if (lost && !reported_lost) {
      reported_lost = true;
      const absl::Status why = link()->stream->status();
      const bool ended = absl::IsAborted(why);
      if (ended) GiveBackIdle();
      Log(absl::StrCat("session '", name(), "': ", why.message(), ended ? "" : "; trying to reconnect"));
      next_try = ended ? Clock::time_point::max() : now;
      backoff = kFirstBackoff;
    }
    if (now >= next_try) {
      const absl::Status reached = Reconnect();
      if (reached.ok()) {
        reported_lost = false;
        next_try = Clock::time_point::max();
        next_report = now;
        MutexLock lock(reports_mu_);
        for (MemoryStats& stats : reported_) stats = MemoryStats();
      } else {
        if (!absl::IsUnavailable(reached) && reached != last_failure)
          Log(absl::StrCat("session '", name(), "': ", reached.message()));
        last_failure = reached;
        next_try = absl::IsAborted(reached) ? Clock::time_point::max() : Clock::now() + backoff;
        backoff = std::min(2 * backoff, kLastBackoff);
      }
    }
    if (leases() && now >= next_report) {
      for (size_t device = 0; device < heaps_.size(); ++device) {
        leased(device).NoteTime();
        leased(device).RetryClosing();
      }
      ReturnAgain();
      {
        MutexLock lock(mu_);
        grown_ = use_reported_ = false;
      }
      if (ReportStats(/*all=*/false)) last_report = now;
      next_report = now + kReportPeriod;
    }
    if (now >= next_tick) {
      for (size_t device = 0; device < heaps_.size(); ++device) {
        leased(device).Tick();
        leased(device).Trim(std::numeric_limits<uint64_t>::max(), kTicksOfDecay);
      }
      next_tick = now + tick;
    }
  }
}

bool SessionClient::ReportStats(bool all) {
  bool changed = false;
  for (size_t device = 0; device < heaps_.size(); ++device) changed = ReportStatsOf(device, /*always=*/all) || changed;
  return changed;
}

bool SessionClient::ReportStatsOf(size_t device, bool always) {
  MutexLock lock(reports_mu_);
  const std::shared_ptr<Link> link = this->link();
  if (!link->stream->status().ok()) return false;
  const MemoryStats stats = heaps_[device]->GetMemoryStats().value_or(MemoryStats());
  if (!always && SameCounts(stats, reported_[device])) return false;
  reported_[device] = stats;
  SendStats(*link, device, stats);
  return true;
}

void SessionClient::SendStats(const Link& link, size_t device, const MemoryStats& stats) {
  v1::SessionRequest message;
  message.mutable_stats()->set_device(static_cast<uint32_t>(device));
  *message.mutable_stats()->mutable_stats() = StatsToProto(stats);
  link.stream->Send(std::move(message));
}

void SessionClient::Answer(const v1::Question& question) {
  const std::shared_ptr<Link> link = this->link();
  v1::SessionRequest message;
  v1::Answer* answer = message.mutable_answer();
  answer->set_question_id(question.question_id());
  switch (question.question_case()) {
    case v1::Question::kTrim: {
      const uint64_t wanted =
          question.trim().bytes() > 0 ? question.trim().bytes() : std::numeric_limits<uint64_t>::max();
      uint64_t released = 0;
      for (size_t device = 0; device < heaps_.size() && released < wanted; ++device) {
        if (question.trim().has_device() && question.trim().device() != device) continue;
        released += leased(device).Trim(wanted - released, /*min_idle_ticks=*/0);
      }
      if (released < wanted && PassOn(question, wanted, released)) return;
      answer->set_released_bytes(released);
      ReportStats(/*all=*/false);
      break;
    }
    case v1::Question::kStats:
      ReportStats(/*all=*/true);
      break;
    case v1::Question::kSnapshot: {
      if (question.snapshot().device() >= heaps_.size()) break;
      SnapshotParts parts(leased(question.snapshot().device()).Snapshot(!question.snapshot().without_history()),
                          kItemsInSnapshotPart);
      while (std::optional<v1::GetSnapshotResponse> part = parts.Next()) {
        v1::SessionRequest one;
        one.mutable_answer()->set_question_id(question.question_id());
        *one.mutable_answer()->mutable_snapshot() = *std::move(part);
        one.mutable_answer()->set_more(true);
        link->stream->WaitForRoom();  // leases and returns may go in between
        link->stream->Send(std::move(one));
      }
      break;  // an empty part ends the snapshot
    }
    case v1::Question::kRecord:
      for (size_t device = 0; device < heaps_.size(); ++device) {
        if (question.record().has_held_events()) {
          leased(device).HoldRecording(question.record().held_events());
        } else {
          Record(device, question.record().max_events());
        }
      }
      break;
    case v1::Question::QUESTION_NOT_SET:  // from a newer daemon: send an empty answer
      break;
  }
  link->stream->Send(std::move(message));
}

bool SessionClient::PassOn(const v1::Question& question, uint64_t wanted, uint64_t released) {
  const std::chrono::milliseconds time =
      question.trim().time_ms() > 0 ? std::chrono::milliseconds(question.trim().time_ms()) : kTrimTime;
  TrimRequests::Question passed{.id = question.question_id(),
                                .stream = link()->stream,
                                .wanted_bytes = wanted,
                                .released_bytes = released,
                                .deadline = DeadlineAfter(kTrimTimeShare * absl::FromChrono(time))};
  if (question.trim().has_device()) passed.device = static_cast<int>(question.trim().device());
  return trims_.Add(std::move(passed));
}

void SessionClient::AnswerEndedTrims() {
  const std::vector<TrimRequests::Question> ended = trims_.TakeEnded(Clock::now());
  if (!ended.empty()) ReportStats(/*all=*/false);
  for (const TrimRequests::Question& question : ended) {
    v1::SessionRequest message;
    message.mutable_answer()->set_question_id(question.id);
    message.mutable_answer()->set_released_bytes(question.released_bytes);
    question.stream->Send(std::move(message));
  }
}

void SessionClient::GiveBackIdle() {
  for (size_t device = 0; device < heaps_.size(); ++device) {
    leased(device).Trim(std::numeric_limits<uint64_t>::max(), /*min_idle_ticks=*/0);
  }
}

void SessionClient::DeclareCarriedOver(Link& link) {
  if (!link.takes_carried_over || link.session == 0) return;  // a first session carries nothing over
  v1::SessionRequest message;
  message.mutable_carried_over()->set_begins(true);
  for (size_t device = 0; device < heaps_.size(); ++device) {
    for (v1::CarriedOver::Segment& segment : leased(device).CarriedOver(link.session)) {
      if (message.carried_over().segments_size() == kMaxCarriedInMessage) link.stream->Send(std::exchange(message, {}));
      *message.mutable_carried_over()->add_segments() = std::move(segment);
    }
  }
  message.mutable_carried_over()->set_ends(true);
  link.stream->Send(std::move(message));
  ++link.carried_over_sent;
}

absl::Status SessionClient::Reconnect() {
  const std::shared_ptr<Link> old = link();
  absl::StatusOr<std::shared_ptr<Link>> reached = Connect(old.get(), options().connect_timeout);
  const bool resumed = reached.ok();
  const absl::Status refused = reached.status();
  if (IsNotToBeResumed(refused)) reached = Connect(nullptr, options().connect_timeout, old->resume_token);
  if (!reached.ok()) return reached.status();
  Link& link = **reached;
  link.session = resumed ? old->session : old->session + 1;
  DeclareCarriedOver(link);
  // Sends the counters so far before the new session requests anything, so they are not charged to the new session.
  for (size_t device = 0; !resumed && device < heaps_.size(); ++device) {
    SendStats(link, device, heaps_[device]->GetMemoryStats().value_or(MemoryStats()));
  }
  {
    MutexLock lock(mu_);
    lost_ = !link.stream->status().ok();
    link_ = *reached;
    if (stopping_) link.stream->StopWaiting();
  }
  if (resumed) {
    Log(absl::StrCat("session '", link.name, "': reconnected to the daemon and resumed the session"));
    return absl::OkStatus();
  }
  GiveBackIdle();  // may give this daemon room to grant more
  size_t segments = 0;
  for (size_t device = 0; device < heaps_.size(); ++device) segments += leased(device).CarriedOver(link.session).size();
  const std::string why = absl::IsNotFound(refused)
                              ? "connected to another daemon as a new session; "
                              : absl::StrCat("opened a new session, since the daemon does not resume the old one (",
                                             refused.message(), "); ");
  Log(absl::StrCat("session '", link.name, "': ", why, segments,
                   segments == 1 ? " segment of the old session stays usable until it is freed"
                                 : " segments of the old session stay usable until they are freed"));
  return absl::OkStatus();
}

}  // namespace vrambroker::client_internal
