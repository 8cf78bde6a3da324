// SPDX-License-Identifier: Apache-2.0
//
// A pass over the queue visits only requests that a change may affect, found by
//
//   groups_     needed bytes, against free bytes: FirstFit
//   to_visit_   new requests, requests of changed sessions, requests done with asking
//   timers_     requests whose time has come
//   last_hope_  requests to refuse when no answer is outstanding and nothing settles
//
// Requests kept back only by a hold are in separate groups until the hold ends.
#include "server/queue/request_queue.h"

#include <algorithm>
#include <limits>

#include "server/base/saturating.h"
#include "server/pool/segment_refusal.h"

namespace vrambroker {
namespace {

constexpr uint64_t kNever = std::numeric_limits<uint64_t>::max();  // more than is ever free

// Bucket boundaries of the histograms.
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

RequestQueue::RequestQueue(SegmentPool* pool, const RequestQueueOptions& options, RequestQueueHooks hooks)
    : pool_(*pool),
      options_(options),
      hooks_(std::move(hooks)),
      durations_{prometheus::Histogram(WaitSeconds()), prometheus::Histogram(WaitSeconds()),
                 prometheus::Histogram(WaitSeconds())},
      random_(std::random_device()()) {}

// ---- From outside ----

void RequestQueue::Add(QueuedRequest request) {
  if (!pool_.GetAccount(request.session).has_value()) {
    return request.done(absl::AbortedError("the session has ended"), {});
  }
  {
    MutexLock lock(mu_);
    const SteadyTime now = hooks_.clock();
    const bool awaits_look = !request.guarantee && pool_.IsClosingCarriedOver(request.session);
    // Read the priority under the lock: after a later change, UpdatePriority() finds the request.
    const int priority = pool_.GetAccount(request.session).value_or(AccountState()).priority;
    Insert({-priority, next_arrival_++},
           {.request = std::move(request), .since = now, .awaits_look = awaits_look, .served_since = now});
  }
  Wake();
}

void RequestQueue::Cancel(SessionId session, const absl::Status& why) {
  CancelIf(
      session, [](const QueuedRequest&) { return true; }, why);
}

void RequestQueue::Cancel(SessionId session, uint64_t cancel_key, const absl::Status& why) {
  if (cancel_key == 0) return;
  CancelIf(
      session, [cancel_key](const QueuedRequest& request) { return request.cancel_key == cancel_key; }, why);
}

void RequestQueue::CancelIf(SessionId session, const std::function<bool(const QueuedRequest&)>& condition,
                            const absl::Status& why) {
  Finished finished;
  {
    // Lock even when size() is 0: cancellers set a flag before Cancel(), and requesters read the flag after Add(), so
    // the lock lets at least one side see the other. Without the lock, on arm64, neither might.
    MutexLock lock(mu_);
    for (const Place& place : PlacesOf(session)) {
      const auto it = waiters_.find(place);
      if (condition(it->second.request)) finished.emplace_back(Remove(it), why);
    }
    size_.store(waiters_.size(), std::memory_order_relaxed);
  }
  if (finished.empty()) return;
  TellAll(finished);
  Wake();  // requests behind may fit now
}

void RequestQueue::Retry(SessionId session) {
  if (size() == 0) return;
  std::vector<std::pair<uint64_t, std::function<bool()>>> retries;
  {
    MutexLock lock(mu_);
    std::vector<Place> places = PlacesOf(session);
    std::sort(places.begin(), places.end());
    for (const Place& place : places) {
      if (const auto& retry = waiters_.find(place)->second.request.retry; retry)
        retries.emplace_back(place.second, retry);
    }
  }
  for (const auto& [arrival, retry] : retries) {
    if (!retry()) continue;
    Finished finished;
    {
      MutexLock lock(mu_);
      const auto it = Find(arrival);
      if (it == waiters_.end()) continue;
      finished.emplace_back(Remove(it), absl::CancelledError("served otherwise"));
      finished.back().first.served_otherwise = true;
      size_.store(waiters_.size(), std::memory_order_relaxed);
    }
    TellAll(finished);
    Wake();
  }
}

void RequestQueue::UpdatePriority(SessionId session, int priority) {
  {
    MutexLock lock(mu_);  // always: as in CancelIf()
    const std::vector<Place> places = PlacesOf(session);
    if (places.empty()) return;
    for (const Place& place : places) {
      const bool is_to_ask = to_ask_.contains(place);
      const Place moved(-priority, place.second);
      Insert(moved, Remove(waiters_.find(place)));
      if (is_to_ask) to_ask_.insert(moved);
    }
  }
  Wake();
}

void RequestQueue::OnCapacityFreed() {
  if (size() > 0) Wake();
}

std::optional<SteadyTime> RequestQueue::NextWake() const {
  MutexLock lock(mu_);
  // A pass calls wake_changed when done.
  if (waiters_.empty() || passes_wanted_.load() > 0) return std::nullopt;
  const SteadyTime now = hooks_.clock();
  SteadyTime wake = timers_.empty() ? SteadyTime::max() : timers_.begin()->first;
  for (const Place& place : WhoMayAskAgain()) wake = std::min(wake, waiters_.at(place).ask_again);
  wake = std::min(wake, AnswersUntil(now).value_or(wake));
  if (hold_look_wanted_) wake = std::min(wake, next_hold_look_);
  if (hold_.has_value()) return std::max(now, std::min(wake, hold_->since + options_.hold_back_time));
  if (rest_until_ > now) wake = std::min(wake, rest_until_);
  for (const auto& [user, until] : users_rest_until_) {
    if (until > now) wake = std::min(wake, until);
  }
  return std::max(now, wake);
}

WaitStats RequestQueue::GetStats() const {
  WaitStats stats;
  for (size_t i = 0; i < durations_.size(); ++i) stats.durations[i] = durations_[i].Collect().histogram;
  stats.visits = visits_.load(std::memory_order_relaxed);
  if (size() == 0) return stats;
  MutexLock lock(mu_);
  stats.waiting = waiters_.size();
  if (!places_.empty()) stats.oldest = waiters_.at(places_.begin()->second).since;
  return stats;
}

std::vector<WaitingRequest> RequestQueue::GetWaiting() const {
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

// ---- Passes ----

void RequestQueue::Wake() {
  if (passes_wanted_.fetch_add(1) == 0) hooks_.run([this] { Pass(); });
}

void RequestQueue::Pass() {
  const uint64_t wanted = passes_wanted_.load();
  std::vector<std::function<void()>> after = TakeAfter();
  Finished finished;
  bool is_served = false;
  bool is_done = false;
  bool asks = false;
  {
    MutexLock lock(mu_);
    const SteadyTime now = hooks_.clock();
    std::vector<Place> kept;
    hold_look_wanted_ = false;
    EndLooks(now);
    EndHold(now);
    CallDue(now);
    Walk();
    is_served = ServeInOrder(now, finished, kept);
    if (is_served && EndHold(now)) is_served = ServeInOrder(now, finished, kept);  // the hold's request was served
    if (is_served) BeginHold(now);
    is_done = is_served && !walk_.has_value() && !visit_all_;
    ChooseWhoAsks(kept, now);
    asks_everybody_ = asks_everybody_ && !is_done;
    unserved_passes_ = is_served ? 0 : unserved_passes_ + 1;
    is_served = is_served || unserved_passes_ % kMostUnserved == 0;
    size_.store(waiters_.size(), std::memory_order_relaxed);
    asks = !to_ask_.empty() && !std::exchange(is_asking_, true);
  }
  TellAll(finished);
  if (asks) hooks_.run([this] { AskForThose(); });
  if (is_served) {
    for (const auto& then : after) then();
  } else {
    MutexLock lock(after_mu_);
    after_.insert(after_.begin(), std::make_move_iterator(after.begin()), std::make_move_iterator(after.end()));
  }
  // Leave later events to another pass, so that no task is kept busy without end.
  if (!is_done || passes_wanted_.fetch_sub(wanted) != wanted) return hooks_.run([this] { Pass(); });
  if (hooks_.wake_changed) hooks_.wake_changed();
  CallAfter();
}

void RequestQueue::AfterPass(std::function<void()> then) {
  if (!IsPassToCome()) return then();
  {
    MutexLock lock(after_mu_);
    after_.push_back(std::move(then));
  }
  // The pass may have ended before it could see `then`.
  if (passes_wanted_.load() == 0) CallAfter();
}

void RequestQueue::CallAfter() {
  std::vector<std::function<void()>> after;
  {
    MutexLock lock(after_mu_);
    if (passes_wanted_.load() > 0) return;  // the pending pass calls `after_`
    after.swap(after_);
  }
  for (const auto& then : after) then();
}

std::vector<std::function<void()>> RequestQueue::TakeAfter() {
  MutexLock lock(after_mu_);
  return std::exchange(after_, {});
}

void RequestQueue::CallDue(SteadyTime now) {
  while (!timers_.empty() && timers_.begin()->first <= now) {
    const Place place = timers_.begin()->second;
    waiters_.at(place).wake = SteadyTime::max();
    timers_.erase(timers_.begin());
    to_visit_.insert(place);
  }
  // An asked session may be slow, and memory of a process that has just died is back in a moment.
  if (last_hope_.empty() || AnswersUntil(now).has_value() || pool_.IsSettling()) return;
  to_visit_.insert(last_hope_.begin(), last_hope_.end());
}

void RequestQueue::EndLooks(SteadyTime now) {
  absl::erase_if(closing_, [&](SessionId session) ABSL_NO_THREAD_SAFETY_ANALYSIS {
    if (pool_.IsClosingCarriedOver(session)) return false;
    for (const Place& place : PlacesOf(session)) {
      Waiter& waiter = waiters_.at(place);
      if (!std::exchange(waiter.awaits_look, false)) continue;
      waiter.served_since = now;
      to_visit_.insert(place);
    }
    return true;
  });
}

void RequestQueue::Walk() {
  if (!walk_.has_value()) {
    if (!std::exchange(visit_all_, false)) return;
    walk_ = Place(std::numeric_limits<int>::min(), 0);
  }
  auto it = waiters_.lower_bound(*walk_);
  for (int i = 0; i < kMostOfWalk && it != waiters_.end(); ++i, ++it) to_visit_.insert(it->first);
  walk_ = it == waiters_.end() ? std::nullopt : std::optional(it->first);
}

bool RequestQueue::ServeInOrder(SteadyTime now, Finished& finished, std::vector<Place>& kept) {
  TakeChanges();
  for (int visits = 0; visits < kMostVisits; ++visits) {
    std::optional<Place> next = FirstThatFits();
    if (!to_visit_.empty()) next = std::min(next.value_or(*to_visit_.begin()), *to_visit_.begin());
    if (!next.has_value()) return true;
    Visit(*next, now, finished, kept);
    TakeChanges();  // each grant makes changes
  }
  return false;
}

void RequestQueue::TakeChanges() {
  SegmentPool::CapacityChanges changes = pool_.TakeChanges();
  visit_all_ = visit_all_ || changes.forbidden != changes_.forbidden;
  changes_ = std::move(changes);
  for (const SessionId session : changes_.changed) Reconsider(session);
}

void RequestQueue::Reconsider(SessionId session) {
  const auto it = of_session_.find(session);
  if (it == of_session_.end()) return;
  OfSession& own = it->second;
  const std::optional<AccountState> account = pool_.GetAccount(session);
  if (!account.has_value()) {
    for (const auto& [bytes, place] : own.requests) to_visit_.insert(place);
    return;
  }
  own.unused_guarantee_bytes = account->unused_guarantee_bytes();
  // Visit requests now forbidden for good by the session's limit, the share's limit, or other guarantees.
  const uint64_t most = std::min(SaturatingSub(account->limit_bytes, account->reserved_bytes), pool_.MostEver(session));
  for (auto request = own.requests.rbegin(); request != own.requests.rend() && request->first > most; ++request) {
    to_visit_.insert(request->second);
  }
  // Groups depend on little, and hardly ever change.
  const auto put_again = [&](const Place& place) ABSL_NO_THREAD_SAFETY_ANALYSIS {
    Waiter& waiter = waiters_.at(place);
    if (waiter.group.has_value()) PutInGroup(place, waiter, *account, waiter.group->is_held_back);
  };
  const bool has_guarantee = account->guarantee_bytes > 0;
  const bool other_guarantee = std::exchange(own.has_guarantee, has_guarantee) != has_guarantee;
  const bool other_limit =
      std::exchange(own.share_limit_bytes, account->share_limit_bytes) != account->share_limit_bytes;
  const bool all = other_guarantee || other_limit;
  if (all || closing_.contains(session)) {
    for (const auto& [bytes, place] : own.requests) {
      if (all || waiters_.at(place).awaits_look) put_again(place);
    }
  }
  for (const Place& place : own.guarantees) put_again(place);
}

uint64_t RequestQueue::FreeFor(const Group& group) const {
  const uint64_t free = changes_.free_bytes - (group.is_held_back ? changes_.held_back_bytes : 0);
  const uint64_t own = group.session.has_value() ? of_session_.at(*group.session).unused_guarantee_bytes : 0;
  if (!group.share.has_value()) return free + own;
  const auto& [id, limit] = *group.share;
  const ShareStats share = pool_.GetShare(id);
  const uint64_t in_share =
      std::min(free + share.unused_guarantee_bytes(), SaturatingSub(limit, share.used_bytes)) + own;
  return std::min(in_share, SaturatingSub(limit, share.charged_bytes));
}

std::optional<Place> RequestQueue::FirstThatFits() const {
  std::optional<Place> first;
  for (const auto& [group, requests] : groups_) {
    if (group.is_for_guarantees && changes_.is_overcommitted) continue;
    const std::optional<Place> fits = requests.First(FreeFor(group));
    if (fits.has_value()) first = std::min(first.value_or(*fits), *fits);
  }
  return first;
}

void RequestQueue::Visit(const Place& place, SteadyTime now, Finished& finished, std::vector<Place>& kept) {
  visits_.fetch_add(1, std::memory_order_relaxed);
  to_visit_.erase(place);
  last_hope_.erase(place);
  const auto it = waiters_.find(place);
  Waiter& waiter = it->second;
  const QueuedRequest& request = waiter.request;
  if (waiter.awaits_look && now >= waiter.since + kLongestLook) {
    waiter.awaits_look = false;
    waiter.served_since = now;
  }
  // Check before the attempt: memory settling now may be free right after a failed attempt.
  const bool is_hopeless = IsHopeless(waiter, place, now);
  const absl::Status status = TryGrant(request, place);
  const std::optional<OomCause> cause = SegmentRefusalCause(status);
  bool may_wait = false;
  if (waiter.awaits_look) {
    may_wait = cause.has_value() && cause != OomCause::kLargerThanDevice;
  } else if (cause == OomCause::kCapacity) {
    may_wait = (request.guarantee || request.bytes <= pool_.MostEver(request.session)) && !is_hopeless;
  }
  const std::optional<AccountState> account =
      may_wait ? pool_.GetAccount(request.session) : std::optional<AccountState>();
  if (!account.has_value()) {
    finished.emplace_back(Remove(it), status);
    return;
  }
  PutInGroup(place, waiter, *account, IsHeldBack(request, place));
  kept.push_back(place);
}

absl::Status RequestQueue::TryGrant(const QueuedRequest& request, const Place& place) {
  const bool is_held_for = hold_.has_value() && hold_->place == place;
  if (!request.guarantee) return pool_.Grant(request.session, request.bytes, is_held_for);
  if (IsHeldBack(request, place)) {
    return SegmentRefused(OomCause::kCapacity, "free memory is kept for a moment for a request that has waited longer");
  }
  return pool_.SetGuarantee(request.session, request.bytes);
}

bool RequestQueue::IsHopeless(const Waiter& waiter, const Place& place, SteadyTime now) const {
  if (now < waiter.request.deadline) return false;
  if (now >= waiter.served_since + options_.reclaim_timeout) return true;
  if (!waiter.has_asked || AnswersUntil(now).has_value()) return false;
  return !pool_.IsSettling() && !IsHeldBack(waiter.request, place);
}

void RequestQueue::TellAll(const Finished& finished) {
  for (const auto& [waiter, status] : finished) {
    const SteadyTime::duration time = hooks_.clock() - waiter.since;
    const auto waited = std::chrono::duration_cast<std::chrono::milliseconds>(time);
    const WaitOutcome outcome = waiter.served_otherwise ? WaitOutcome::kGranted : OutcomeOf(status);
    durations_[static_cast<size_t>(outcome)].Observe(std::chrono::duration<double>(time).count());
    WaitRecord outcome_of{.waited = waited, .asked = {}};
    for (const auto& [session, asked] : waiter.asked) outcome_of.asked.emplace(session, asked.last.is_answered);
    waiter.request.done(status, outcome_of);
  }
}

// ---- Where requests are found ----

void RequestQueue::Insert(const Place& place, Waiter waiter) {
  const SessionId session = waiter.request.session;
  const auto [it, is_new] = of_session_.try_emplace(session);
  if (is_new) {
    pool_.Watch(session, true);
    Reconsider(session);  // catches up with earlier changes
  }
  it->second.requests.emplace(waiter.request.bytes, place);
  if (waiter.request.guarantee) it->second.guarantees.insert(place);
  if (waiter.awaits_look) closing_.insert(session);
  places_.emplace(place.second, place);
  to_visit_.insert(place);
  waiters_.emplace(place, std::move(waiter));
  size_.store(waiters_.size(), std::memory_order_relaxed);
}

RequestQueue::Waiter RequestQueue::Remove(Waiters::iterator it) {
  const Place place = it->first;
  Waiter waiter = std::move(it->second);
  waiters_.erase(it);
  TakeFromGroup(place, waiter);
  if (waiter.wake != SteadyTime::max()) timers_.erase({waiter.wake, place});
  waiter.wake = SteadyTime::max();
  places_.erase(place.second);
  to_visit_.erase(place);
  to_ask_.erase(place);
  last_hope_.erase(place);
  const SessionId session = waiter.request.session;
  const auto own = of_session_.find(session);
  own->second.requests.erase({waiter.request.bytes, place});
  own->second.guarantees.erase(place);
  if (own->second.requests.empty()) {
    of_session_.erase(own);
    closing_.erase(session);
    pool_.Watch(session, false);
  }
  return waiter;
}

RequestQueue::Waiters::iterator RequestQueue::Find(uint64_t arrival) {
  const auto it = places_.find(arrival);
  return it == places_.end() ? waiters_.end() : waiters_.find(it->second);
}

std::vector<Place> RequestQueue::PlacesOf(SessionId session) const {
  std::vector<Place> places;
  const auto it = of_session_.find(session);
  if (it == of_session_.end()) return places;
  places.reserve(it->second.requests.size());
  for (const auto& [bytes, place] : it->second.requests) places.push_back(place);
  return places;
}

void RequestQueue::PutInGroup(const Place& place, Waiter& waiter, const AccountState& account, bool is_held_back) {
  TakeFromGroup(place, waiter);
  Group group{.is_held_back = is_held_back};
  uint64_t needed = waiter.request.bytes;
  if (waiter.request.guarantee) {
    group.is_for_guarantees = true;
    needed = is_held_back ? kNever : SaturatingSub(needed, account.committed_bytes());
  } else {
    if (account.share_limit_bytes != AccountState::kNoBound) group.share = {account.share, account.share_limit_bytes};
    if (of_session_.at(waiter.request.session).has_guarantee) group.session = waiter.request.session;
    // Beyond the limit, a request waits only for a look that may let the session grow; without a look, it is refused.
    if (waiter.awaits_look && needed > SaturatingSub(account.limit_bytes, account.reserved_bytes)) needed = kNever;
  }
  groups_.try_emplace(group, &random_).first->second.Insert(place, needed);
  waiter.group = group;
}

void RequestQueue::TakeFromGroup(const Place& place, Waiter& waiter) {
  if (!waiter.group.has_value()) return;
  const auto it = groups_.find(*waiter.group);
  it->second.Erase(place);
  if (it->second.empty()) groups_.erase(it);
  waiter.group.reset();
}

void RequestQueue::SetTimer(const Place& place, Waiter& waiter, SteadyTime now) {
  if (waiter.wake != SteadyTime::max()) timers_.erase({waiter.wake, place});
  waiter.wake = WakeOf(waiter, now);
  if (waiter.wake != SteadyTime::max()) timers_.emplace(waiter.wake, place);
}

SteadyTime RequestQueue::WakeOf(const Waiter& waiter, SteadyTime now) const {
  SteadyTime wake = SteadyTime::max();
  const auto consider = [&](SteadyTime time) {
    if (time > now) wake = std::min(wake, time);
  };
  if (waiter.awaits_look) {
    consider(waiter.since + kLongestLook);
    return wake;
  }
  consider(waiter.request.deadline);
  consider(waiter.served_since + kHoldAfter);
  consider(waiter.served_since + options_.reclaim_timeout);
  if (waiter.asking == Asking::kDone || waiter.asking == Asking::kNobody) return wake;
  consider(waiter.asking_since + options_.reclaim_timeout);
  if (waiter.asking == Asking::kSoonEverybody) {
    consider(everybody_asked_ + kEverybodyPeriod);
  } else if (waiter.asking != Asking::kEverybody) {
    consider(waiter.asking_since + options_.reclaim_timeout / 8);
  }
  return wake;
}

}  // namespace vrambroker
