// SPDX-License-Identifier: Apache-2.0
//
// The life of a request that does not fit:
//
//   Add --> asks those chosen by their figures --> asks everybody above its guarantee --> waits --> refused
//    \___________\________________________________________\_______________________________/--> granted, cancelled
//                                                         (the first one asks again when figures say something new)
//
// Before all that, it may await the look at what its session has closed of an earlier run.
//
// Figures may be a second old, hence the second step, which is taken once for a request, for all together ten times a
// second at most. Later on, figures have had the time to tell.
#include "server/growth_queue.h"

#include <algorithm>
#include <limits>

#include "server/out_of_memory.h"

namespace vrambroker {
namespace {

constexpr std::chrono::milliseconds kEverybodyPeriod(100);
constexpr int kSamples = 16;  // of what comes back, in hold_back_time

// Bounds of what a histogram counts.
prometheus::Histogram::BucketBoundaries WaitSeconds() {
  return {0.001, 0.01, 0.1, 0.5, 1, 2, 5, 10, 30, 60, 300, 3600};
}

WaitOutcome OutcomeOf(const absl::Status& status) {
  if (status.ok()) return WaitOutcome::kGranted;
  const bool cancelled = absl::IsCancelled(status) || absl::IsAborted(status);
  return cancelled ? WaitOutcome::kCancelled : WaitOutcome::kRefused;
}

}  // namespace

const char* WaitOutcomeName(WaitOutcome outcome) {
  switch (outcome) {
    case WaitOutcome::kGranted:
      return "granted";
    case WaitOutcome::kRefused:
      return "refused";
    case WaitOutcome::kCancelled:
      return "cancelled";
  }
  return "unknown";
}

GrowthQueue::GrowthQueue(SegmentPool* pool, const GrowthQueueOptions& options, GrowthQueueHooks hooks)
    : pool_(*pool),
      options_(options),
      hooks_(std::move(hooks)),
      durations_{prometheus::Histogram(WaitSeconds()), prometheus::Histogram(WaitSeconds()),
                 prometheus::Histogram(WaitSeconds())} {}

void GrowthQueue::Add(GrowthRequest request) {
  const std::optional<AccountFigures> account = pool_.GetAccount(request.session);
  if (!account.has_value()) return request.done(absl::AbortedError("the session has ended"), {});
  {
    MutexLock lock(mu_);
    const SteadyTime now = hooks_.clock();
    const bool awaits_look = !request.guarantee && pool_.IsClosingCarriedOver(request.session);
    waiters_.emplace(
        Place(-account->priority, next_arrival_++),
        Waiter{.request = std::move(request), .since = now, .awaits_look = awaits_look, .served_since = now});
    size_.store(waiters_.size(), std::memory_order_relaxed);
  }
  Serve();
}

void GrowthQueue::Cancel(SessionId session, const absl::Status& why) {
  CancelIf([session](const GrowthRequest& request) { return request.session == session; }, why);
}

void GrowthQueue::Cancel(SessionId session, uint64_t cancel_key, const absl::Status& why) {
  CancelIf([session, cancel_key](
               const GrowthRequest& request) { return request.session == session && request.cancel_key == cancel_key; },
           why);
}

void GrowthQueue::CancelIf(const std::function<bool(const GrowthRequest&)>& condition, const absl::Status& why) {
  Finished finished;
  {
    // Always, not only when there are any by size(): who cancels has said so before, who adds looks for that
    // afterwards, and of the two this lock lets at least one see the other. Without it, on arm64, neither might.
    MutexLock lock(mu_);
    for (auto it = waiters_.begin(); it != waiters_.end();) {
      if (condition(it->second.request)) {
        finished.emplace_back(std::move(it->second), why);
        it = waiters_.erase(it);
      } else {
        ++it;
      }
    }
    size_.store(waiters_.size(), std::memory_order_relaxed);
  }
  if (finished.empty()) return;
  TellAll(finished);
  Serve();  // others may have waited behind it
}

void GrowthQueue::Retry(SessionId session) {
  if (size() == 0) return;
  std::vector<std::pair<uint64_t, std::function<bool()>>> retries;
  {
    MutexLock lock(mu_);
    for (const auto& [place, waiter] : waiters_) {
      if (waiter.request.session == session && waiter.request.retry)
        retries.emplace_back(place.second, waiter.request.retry);
    }
  }
  for (const auto& [arrival, retry] : retries) {
    if (!retry()) continue;
    Finished finished;
    {
      MutexLock lock(mu_);
      const auto it = Find(arrival);
      if (it == waiters_.end()) continue;
      finished.emplace_back(std::move(it->second), absl::CancelledError("served otherwise"));
      finished.back().first.served_otherwise = true;
      waiters_.erase(it);
      size_.store(waiters_.size(), std::memory_order_relaxed);
    }
    TellAll(finished);
    Serve();
  }
}

void GrowthQueue::PriorityIs(SessionId session, int priority) {
  if (size() == 0) return;
  {
    MutexLock lock(mu_);
    std::vector<std::pair<uint64_t, Waiter>> moved;
    for (auto it = waiters_.begin(); it != waiters_.end();) {
      if (it->second.request.session == session) {
        moved.emplace_back(it->first.second, std::move(it->second));
        it = waiters_.erase(it);
      } else {
        ++it;
      }
    }
    for (auto& [arrival, waiter] : moved) waiters_.emplace(Place(-priority, arrival), std::move(waiter));
  }
  Serve();
}

void GrowthQueue::OnRoom() {
  if (size() > 0) Serve();
}

void GrowthQueue::TellAll(const Finished& finished) {
  for (const auto& [waiter, status] : finished) {
    const SteadyTime::duration time = hooks_.clock() - waiter.since;
    const auto waited = std::chrono::duration_cast<std::chrono::milliseconds>(time);
    const WaitOutcome outcome = waiter.served_otherwise ? WaitOutcome::kGranted : OutcomeOf(status);
    durations_[static_cast<size_t>(outcome)].Observe(std::chrono::duration<double>(time).count());
    GrowthOutcome outcome_of{.waited = waited, .asked = {}};
    for (const auto& [session, asked] : waiter.asked) outcome_of.asked.emplace(session, asked.last.is_answered);
    waiter.request.done(status, outcome_of);
  }
}

void GrowthQueue::Serve() {
  // Also called from within: what is granted or asked for may make room in turn.
  if (serves_wanted_.fetch_add(1) > 0) return;
  uint64_t wanted = 0;
  do {
    wanted = serves_wanted_.load();
    Finished finished;
    std::vector<uint64_t> to_ask;
    {
      MutexLock lock(mu_);
      const SteadyTime now = hooks_.clock();
      EndLooks(now);
      EndHold(now);
      ServeInOrder(now, finished);
      if (EndHold(now)) ServeInOrder(now, finished);  // its request was served: those it held back come next
      BeginHold(now);
      to_ask = ChooseWhoAsks(now);
      size_.store(waiters_.size(), std::memory_order_relaxed);
    }
    TellAll(finished);
    for (const uint64_t arrival : to_ask) Ask(arrival);
    if (hooks_.wake_changed) hooks_.wake_changed();
  } while (serves_wanted_.fetch_sub(wanted) != wanted);
}

void GrowthQueue::EndLooks(SteadyTime now) {
  for (auto& [place, waiter] : waiters_) {
    if (!waiter.awaits_look) continue;
    if (now < waiter.since + kLongestLook && pool_.IsClosingCarriedOver(waiter.request.session)) continue;
    waiter.awaits_look = false;
    waiter.served_since = now;
  }
}

absl::Status GrowthQueue::TryGrant(const GrowthRequest& request, const Place& place) {
  const bool is_held_for = hold_.has_value() && hold_->place == place;
  if (!request.guarantee) return pool_.Grant(request.session, request.bytes, is_held_for);
  if (IsHeldBack(request, place)) {
    return SegmentRefused(OomCause::kCapacity, "free memory is kept for a moment for a request that has waited longer");
  }
  return pool_.SetGuarantee(request.session, request.bytes);
}

bool GrowthQueue::IsHeldBack(const GrowthRequest& request, const Place& place) const {
  if (!hold_.has_value() || hold_->place == place) return false;
  // A guarantee would take what is held back out of reach for good.
  return request.guarantee ? place.first >= hold_->place.first : pool_.IsHeldBack(request.session, request.bytes);
}

void GrowthQueue::StopAsking(Waiter& waiter) {
  waiter.asking = Asking::kDone;
  waiter.has_asked = true;
}

bool GrowthQueue::IsHopeless(const Waiter& waiter, const Place& place, SteadyTime now) const {
  if (now < waiter.request.deadline) return false;
  if (now >= waiter.served_since + options_.reclaim_timeout) return true;
  if (IsHeldBack(waiter.request, place)) return false;
  // Somebody who was asked may be slow, and memory of a process that has just died is back in a moment.
  return waiter.has_asked && !AnswersUntil(now).has_value() && !pool_.IsSettling();
}

std::optional<SteadyTime> GrowthQueue::AnswersUntil(SteadyTime now) const {
  SteadyTime until = now;
  for (const auto& [session, owed] : owed_) until = std::max(until, owed.since + options_.reclaim_timeout);
  return until > now ? std::optional(until) : std::nullopt;
}

// ---- Holding memory back ----

uint64_t GrowthQueue::CameBackLately(SteadyTime now) {
  const uint64_t total = pool_.CameBackTotal();
  if (came_back_.empty() || now - came_back_.back().first >= options_.hold_back_time / kSamples) {
    came_back_.emplace_back(now, total);
  }
  // The oldest one that stays is from the beginning of that time, or before it.
  while (came_back_.size() > 1 && came_back_[1].first <= now - options_.hold_back_time) came_back_.pop_front();
  return total - came_back_.front().second;
}

uint64_t GrowthQueue::AskedFor(const Waiter& waiter, SteadyTime now) const {
  uint64_t bytes = 0;
  for (const auto& [session, asked] : waiter.asked) {
    if (!asked.last.is_answered && now < owed_.at(session).since + options_.reclaim_timeout) bytes += asked.expected;
  }
  return bytes;
}

bool GrowthQueue::IsOver(const Hold& hold, SteadyTime now) const {
  const auto it = waiters_.find(hold.place);
  if (it == waiters_.end() || now >= hold.since + options_.hold_back_time) return true;
  const GrowthRequest& request = it->second.request;
  const uint64_t came_back = pool_.CameBackTotal() - hold.came_back_total;
  const uint64_t still_churning = hold.churning - std::min(hold.churning, came_back);
  return pool_.MissingBytes(request.session, request.bytes, /*guarantee=*/false) >
         AskedFor(it->second, now) + pool_.ExpectedFor({request.session})[0].returning_bytes + still_churning;
}

bool GrowthQueue::EndHold(SteadyTime now) {
  if (!hold_.has_value() || !IsOver(*hold_, now)) return false;
  const SteadyTime::duration held = now - hold_->since;
  rest_until_ = now + held;
  users_rest_until_[hold_->uid] = now + kUserRest * held;
  hold_.reset();
  pool_.HoldBack(std::nullopt);
  return true;
}

void GrowthQueue::BeginHold(SteadyTime now) {
  if (waiters_.empty()) return came_back_.clear();
  if (hold_.has_value() || options_.hold_back_time.count() == 0) return;
  const uint64_t came_back = CameBackLately(now);
  if (now < rest_until_) return;
  absl::erase_if(users_rest_until_, [now](const auto& entry) { return entry.second <= now; });
  std::vector<Waiters::const_iterator> qualified;
  std::vector<SessionId> sessions;
  for (auto it = waiters_.cbegin(); it != waiters_.cend(); ++it) {
    const GrowthRequest& request = it->second.request;
    if (request.guarantee || it->second.awaits_look || now < it->second.served_since + kHoldAfter ||
        users_rest_until_.contains(request.uid)) {
      continue;
    }
    qualified.push_back(it);
    sessions.push_back(request.session);
  }
  if (qualified.empty()) return;
  const std::vector<SegmentPool::Expected> expected = pool_.ExpectedFor(sessions);
  for (size_t i = 0; i < qualified.size(); ++i) {
    const auto& [place, waiter] = *qualified[i];
    const GrowthRequest& request = waiter.request;
    // Not more than these sessions hold, however often it has come back.
    const uint64_t churning = std::min(came_back, expected[i].churning_bytes);
    if (pool_.MissingBytes(request.session, request.bytes, /*guarantee=*/false) >
        AskedFor(waiter, now) + expected[i].returning_bytes + churning) {
      continue;
    }
    hold_ = {.place = place,
             .uid = request.uid,
             .since = now,
             .churning = churning,
             .came_back_total = pool_.CameBackTotal()};
    const uint64_t bytes = std::min(pool_.GrowthOf(request.session, request.bytes), options_.hold_back_bytes);
    pool_.HoldBack(Ledger::Held{.priority = -place.first, .bytes = bytes});
    return;
  }
}

void GrowthQueue::ServeInOrder(SteadyTime now, Finished& finished) {
  for (auto it = waiters_.begin(); it != waiters_.end();) {
    const GrowthRequest& request = it->second.request;
    const absl::Status status = TryGrant(request, it->first);
    const std::optional<OomCause> cause = SegmentRefusalCause(status);
    if (it->second.awaits_look && cause.has_value() && cause != OomCause::kLargerThanDevice) {
      ++it;
      continue;
    }
    const bool may_wait =
        cause == OomCause::kCapacity && (request.guarantee || pool_.MayEverGrow(request.session, request.bytes));
    if (may_wait && !IsHopeless(it->second, it->first, now)) {
      ++it;
      continue;
    }
    finished.emplace_back(std::move(it->second), status);
    it = waiters_.erase(it);
  }
}

std::vector<uint64_t> GrowthQueue::ChooseWhoAsks(SteadyTime now) {
  std::vector<uint64_t> to_ask;
  bool everybody_asked = false;
  bool first = true;
  for (auto it = waiters_.begin(); it != waiters_.end(); ++it) {
    Waiter& waiter = it->second;
    if (waiter.awaits_look) continue;
    // Of those who have asked in vain, the first asks again: what it gets lets the next ones move up.
    const bool again = waiter.asking == Asking::kDone && now >= waiter.ask_again && first;
    first = false;
    if (waiter.asking == Asking::kNobody || again) {
      waiter.asking = again ? Asking::kAgain : Asking::kChosen;
      waiter.asking_since = now;
      waiter.ask_again = now + kAskPeriod;
      to_ask.push_back(it->first.second);
    } else if (waiter.asking != Asking::kDone) {
      const SteadyTime::duration patience =
          waiter.asking == Asking::kAgain ? options_.reclaim_timeout / 8 : options_.reclaim_timeout;
      if (now >= waiter.asking_since + patience) {
        StopAsking(waiter);  // whoever has not answered by now is not waited for
      } else if (waiter.asking == Asking::kChosen && now >= waiter.asking_since + options_.reclaim_timeout / 8) {
        waiter.asking = Asking::kSoonEverybody;  // one that is silent does not keep the others from being asked
      }
    }
    if (waiter.asking == Asking::kSoonEverybody && now >= everybody_asked_ + kEverybodyPeriod) {
      waiter.asking = Asking::kEverybody;
      everybody_asked = true;
      to_ask.push_back(it->first.second);
    }
  }
  if (everybody_asked) everybody_asked_ = now;
  return to_ask;
}

GrowthQueue::Waiters::iterator GrowthQueue::Find(uint64_t arrival) {
  return std::find_if(waiters_.begin(), waiters_.end(),
                      [arrival](const auto& entry) { return entry.first.second == arrival; });
}

std::vector<ReclaimVictim> GrowthQueue::Choose(const Waiter& waiter, int priority, uint64_t missing,
                                               const std::vector<ReclaimCandidate>& candidates, SteadyTime now) const {
  std::vector<ReclaimCandidate> allowed;
  for (const ReclaimCandidate& candidate : candidates) {
    std::optional<LastAsked> last;
    if (const auto it = waiter.asked.find(candidate.session); it != waiter.asked.end()) {
      last = it->second.last;
      last->is_long_ago = now >= it->second.at + kAskInVainPeriod;
    }
    const bool may_ask = waiter.asking == Asking::kChosen      ? true
                         : waiter.asking == Asking::kEverybody ? MayAskWithEverybody(candidate, priority, last)
                                                               : MayAskAgain(candidate, priority, last);
    if (may_ask) allowed.push_back(candidate);
  }
  return waiter.asking == Asking::kEverybody ? EveryVictim(allowed, missing) : ChooseVictims(allowed, missing);
}

void GrowthQueue::Ask(uint64_t arrival) {
  GrowthRequest request;
  {
    MutexLock lock(mu_);
    const auto it = Find(arrival);
    if (it == waiters_.end()) return;
    request = {.session = it->second.request.session,
               .bytes = it->second.request.bytes,
               .guarantee = it->second.request.guarantee};
  }
  const uint64_t missing = pool_.MissingBytes(request.session, request.bytes, request.guarantee);
  std::vector<ReclaimCandidate> candidates = missing > 0 ? hooks_.candidates() : std::vector<ReclaimCandidate>();
  for (ReclaimCandidate& candidate : candidates) {
    // What the session itself holds idle comes first.
    if (candidate.session == request.session) candidate.priority = std::numeric_limits<int>::min();
  }
  const bool is_anybody_there = !EveryVictim(candidates, missing).empty();
  std::vector<ReclaimVictim> victims;
  uint64_t round = 0;
  {
    MutexLock lock(mu_);
    const auto it = Find(arrival);
    if (it == waiters_.end()) return;
    const SteadyTime now = hooks_.clock();
    Waiter& waiter = it->second;
    const bool by_figures = waiter.asking == Asking::kChosen || waiter.asking == Asking::kAgain;
    if (!by_figures && waiter.asking != Asking::kEverybody) return;
    victims = Choose(waiter, -it->first.first, missing, candidates, now);
    round = ++waiter.round;
    waiter.unanswered = victims.size();
    for (const ReclaimVictim& victim : victims) {
      const auto of_victim = [&victim](const ReclaimCandidate& candidate) {
        return candidate.session == victim.session;
      };
      const ReclaimCandidate& candidate = *std::find_if(candidates.begin(), candidates.end(), of_victim);
      waiter.asked[victim.session] = {.last = {.reserved_bytes = candidate.reserved_bytes,
                                               .idle_bytes = candidate.idle_bytes,
                                               .by_figures = by_figures},
                                      .at = now,
                                      .expected = std::min(victim.bytes, candidate.idle_bytes)};
      if (Owed& owed = owed_[victim.session]; owed.answers++ == 0) owed.since = now;
    }
    if (victims.empty()) {
      if (waiter.asking == Asking::kChosen && is_anybody_there) {
        waiter.asking = Asking::kSoonEverybody;
      } else {
        StopAsking(waiter);
      }
    }
  }
  if (victims.empty()) return Serve();
  for (const ReclaimVictim& victim : victims) {
    hooks_.ask(victim, [this, arrival, round, session = victim.session] { Answered(arrival, round, session); });
  }
}

void GrowthQueue::Answered(uint64_t arrival, uint64_t round, SessionId victim) {
  const uint64_t reserved = pool_.GetAccount(victim).value_or(AccountFigures()).reserved_bytes;
  bool is_last = false;  // of its answers, or of those to this round
  {
    MutexLock lock(mu_);
    const auto owed = owed_.find(victim);
    owed->second.since = hooks_.clock();
    if (--owed->second.answers == 0) {
      owed_.erase(owed);
      is_last = true;
    }
    if (const auto it = Find(arrival); it != waiters_.end()) {
      Waiter& waiter = it->second;
      LastAsked& last = waiter.asked[victim].last;
      last.is_answered = true;
      last.has_given = reserved < last.reserved_bytes;
      if (waiter.round == round && --waiter.unanswered == 0) {
        if (waiter.asking == Asking::kChosen) {
          waiter.asking = Asking::kSoonEverybody;
        } else if (waiter.asking == Asking::kEverybody || waiter.asking == Asking::kAgain) {
          StopAsking(waiter);
        }
        is_last = true;
      }
    }
  }
  // What came back is there already: it may be enough. If it is not, it may have been the last hope.
  if (is_last) Serve();
}

SteadyTime GrowthQueue::WakeOf(const Waiter& waiter, bool first, SteadyTime now) const {
  SteadyTime wake = SteadyTime::max();
  const auto consider = [&](SteadyTime time) {
    if (time > now) wake = std::min(wake, time);
  };
  if (waiter.awaits_look) return std::max(now, waiter.since + kLongestLook);
  consider(waiter.request.deadline);
  consider(waiter.served_since + kHoldAfter);
  consider(waiter.served_since + options_.reclaim_timeout);
  if (waiter.asking == Asking::kDone) {
    if (first) wake = std::min(wake, std::max(now, waiter.ask_again));
  } else if (waiter.asking != Asking::kNobody) {
    wake = std::min(wake, std::max(now, waiter.asking_since + options_.reclaim_timeout));
    if (waiter.asking == Asking::kChosen || waiter.asking == Asking::kAgain) {
      consider(waiter.asking_since + options_.reclaim_timeout / 8);
    }
    if (waiter.asking == Asking::kSoonEverybody) consider(everybody_asked_ + kEverybodyPeriod);
  }
  return wake;
}

std::optional<SteadyTime> GrowthQueue::NextWake() const {
  MutexLock lock(mu_);
  if (waiters_.empty()) return std::nullopt;
  const SteadyTime now = hooks_.clock();
  SteadyTime wake = SteadyTime::max();
  bool first = true;
  for (const auto& [place, waiter] : waiters_) {
    wake = std::min(wake, WakeOf(waiter, first, now));
    if (!waiter.awaits_look) first = false;
  }
  wake = std::min(wake, AnswersUntil(now).value_or(wake));
  if (hold_.has_value()) return std::min(wake, std::max(now, hold_->since + options_.hold_back_time));
  if (rest_until_ > now) wake = std::min(wake, rest_until_);
  for (const auto& [uid, until] : users_rest_until_) {
    if (until > now) wake = std::min(wake, until);
  }
  return wake;
}

GrowthFigures GrowthQueue::GetFigures() const {
  GrowthFigures figures;
  for (size_t i = 0; i < durations_.size(); ++i) figures.durations[i] = durations_[i].Collect().histogram;
  if (size() == 0) return figures;
  MutexLock lock(mu_);
  figures.waiting = waiters_.size();
  for (const auto& [place, waiter] : waiters_) {
    figures.oldest = std::min(figures.oldest.value_or(waiter.since), waiter.since);
  }
  return figures;
}

std::vector<WaitingRequest> GrowthQueue::GetWaiting() const {
  std::vector<WaitingRequest> waiting;
  MutexLock lock(mu_);
  waiting.reserve(waiters_.size());
  for (const auto& [place, waiter] : waiters_) {
    waiting.push_back({.session = waiter.request.session,
                       .bytes = waiter.request.bytes,
                       .guarantee = waiter.request.guarantee,
                       .since = waiter.since,
                       .deadline = waiter.request.deadline});
  }
  return waiting;
}

}  // namespace vrambroker
