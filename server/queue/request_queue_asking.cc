// SPDX-License-Identifier: Apache-2.0
//
// Asking for a request that does not fit:
//
//   Add --> asks sessions chosen by figures -----> asks everybody above its guarantee --> waits --> refused
//    \___________\________________________________________\_______________________________/--> granted, cancelled
//                                                         (the first request, and each share's first, ask again when
//                                                          figures say something new)
//
// Before all steps, a request may await the look at memory of an earlier run closed by its session.
//
// Figures may be a second old, hence the second step, taken once per request and, for all requests together, ten times
// a second at most. Later on, figures have had time to catch up.
#include <algorithm>
#include <limits>

#include "server/queue/request_queue.h"

namespace vrambroker {

void RequestQueue::StopAsking(Waiter& waiter) {
  waiter.asking = Asking::kDone;
  waiter.has_asked = true;
}

std::optional<SteadyTime> RequestQueue::AnswersUntil(SteadyTime now) const {
  if (owed_since_.empty()) return std::nullopt;
  const SteadyTime until = owed_since_.rbegin()->first + options_.reclaim_timeout;
  return until > now ? std::optional(until) : std::nullopt;
}

std::vector<Place> RequestQueue::WhoMayAskAgain() const {
  constexpr uint64_t kAny = std::numeric_limits<uint64_t>::max();
  std::vector<Place> firsts;
  const auto first =
      std::find_if(waiters_.begin(), waiters_.end(), [](const auto& entry) { return !entry.second.awaits_look; });
  if (first != waiters_.end()) firsts.push_back(first->first);
  for (const auto& [group, requests] : groups_) {
    const std::optional<Place> of_share = group.share.has_value() ? requests.First(kAny) : std::nullopt;
    if (of_share.has_value() && !(first != waiters_.end() && *of_share == first->first)) firsts.push_back(*of_share);
  }
  std::erase_if(firsts, [this](const Place& place) ABSL_NO_THREAD_SAFETY_ANALYSIS {
    const Waiter& waiter = waiters_.at(place);
    return waiter.awaits_look || waiter.asking != Asking::kDone;
  });
  return firsts;
}

void RequestQueue::ChooseWhoAsks(const std::vector<Place>& kept, SteadyTime now) {
  const auto starts = [&](const Place& place, Waiter& waiter, Asking asking) ABSL_NO_THREAD_SAFETY_ANALYSIS {
    waiter.asking = asking;
    ++waiter.round;  // answers to the last round do not count
    waiter.asking_since = now;
    waiter.ask_again = now + kAskPeriod;
    to_ask_.insert(place);
  };
  for (const Place& place : WhoMayAskAgain()) {
    Waiter& waiter = waiters_.at(place);
    if (now < waiter.ask_again) continue;
    starts(place, waiter, Asking::kAgain);
    SetTimer(place, waiter, now);
  }
  const bool is_time = now >= everybody_asked_ + kEverybodyPeriod;
  std::vector<std::pair<Place, Waiter*>> stay;
  for (const Place& place : kept) {
    const auto it = waiters_.find(place);
    if (it == waiters_.end()) continue;
    Waiter& waiter = it->second;
    stay.emplace_back(place, &waiter);
    if (waiter.awaits_look) continue;
    if (waiter.asking == Asking::kNobody) {
      starts(place, waiter, Asking::kChosen);
    } else if (waiter.asking != Asking::kDone) {
      const SteadyTime::duration patience =
          waiter.asking == Asking::kAgain ? options_.reclaim_timeout / 8 : options_.reclaim_timeout;
      if (now >= waiter.asking_since + patience) {
        StopAsking(waiter);  // stop waiting for silent sessions
      } else if (waiter.asking == Asking::kChosen && now >= waiter.asking_since + options_.reclaim_timeout / 8) {
        waiter.asking = Asking::kSoonEverybody;  // a silent session does not delay questions to the rest
      }
    }
    // Requests left to the next pass still ask with the current round.
    const bool may_ask = is_time || (asks_everybody_ && waiter.asking_since <= everybody_asked_);
    if (waiter.asking == Asking::kSoonEverybody && may_ask) {
      waiter.asking = Asking::kEverybody;
      ++waiter.round;
      if (is_time) everybody_asked_ = now;
      asks_everybody_ = true;
      to_ask_.insert(place);
    }
  }
  for (const auto& [place, waiter] : stay) {
    SetTimer(place, *waiter, now);
    const bool is_held_back = waiter->group.has_value() && waiter->group->is_held_back;
    if (waiter->has_asked && !waiter->awaits_look && !is_held_back && now >= waiter->request.deadline) {
      last_hope_.insert(place);
    }
  }
}

void RequestQueue::AskForThose() {
  std::vector<uint64_t> arrivals;
  {
    MutexLock lock(mu_);
    for (int i = 0; i < kMostAsking && !to_ask_.empty(); ++i) {
      arrivals.push_back(to_ask_.begin()->second);
      to_ask_.erase(to_ask_.begin());
    }
    is_asking_ = !arrivals.empty();
  }
  if (arrivals.empty()) return;
  Questions questions;
  for (const uint64_t arrival : arrivals) Ask(arrival, questions);
  for (const Question& question : questions.questions) {
    hooks_.ask(question.victim, [this, question] { Answered(question); });
  }
  hooks_.run([this] { AskForThose(); });
}

std::vector<ReclaimVictim> RequestQueue::Choose(const Waiter& waiter, int priority, const Missing& missing,
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

Missing RequestQueue::MissingOf(const QueuedRequest& request) const {
  const std::optional<AccountState> account = pool_.GetAccount(request.session);
  if (!account.has_value()) return {};
  return {.bytes = pool_.MissingBytes(request.session, request.bytes, request.guarantee),
          .share = account->share,
          .in_share = request.guarantee ? 0 : pool_.MissingInShare(request.session, request.bytes)};
}

void RequestQueue::Ask(uint64_t arrival, Questions& questions) {
  QueuedRequest request;
  {
    MutexLock lock(mu_);
    const auto it = Find(arrival);
    if (it == waiters_.end()) return;
    request = {.session = it->second.request.session,
               .bytes = it->second.request.bytes,
               .guarantee = it->second.request.guarantee};
  }
  const Missing missing = MissingOf(request);
  std::vector<ReclaimCandidate> candidates;
  if (!missing.is_nothing()) {
    if (!questions.candidates.has_value()) questions.candidates = hooks_.candidates();
    candidates = *questions.candidates;
  }
  for (ReclaimCandidate& candidate : candidates) {
    if (candidate.session != request.session) continue;
    // Reclaim from the session itself first.
    candidate.priority = std::numeric_limits<int>::min();
    // Bytes held within the guarantee count for it: giving them back frees nothing.
    if (request.guarantee) candidate.guarantee_bytes = std::max(candidate.guarantee_bytes, request.bytes);
  }
  const bool is_anybody_there = !EveryVictim(candidates, missing).empty();
  {
    MutexLock lock(mu_);
    const auto it = Find(arrival);
    if (it == waiters_.end()) return;
    const SteadyTime now = hooks_.clock();
    Waiter& waiter = it->second;
    const bool by_figures = waiter.asking == Asking::kChosen || waiter.asking == Asking::kAgain;
    if (!by_figures && waiter.asking != Asking::kEverybody) return;
    const bool is_there = missing.is_nothing() && !IsHeldBack(request, it->first) &&
                          (request.guarantee || pool_.AvailableBytes(request.session) >= request.bytes);
    const std::vector<ReclaimVictim> victims = Choose(waiter, -it->first.first, missing, candidates, now);
    const uint64_t round = ++waiter.round;
    waiter.unanswered = victims.size();
    absl::flat_hash_map<SessionId, const ReclaimCandidate*> by_session;
    for (const ReclaimCandidate& candidate : candidates) by_session.emplace(candidate.session, &candidate);
    for (const ReclaimVictim& victim : victims) {
      const ReclaimCandidate& candidate = *by_session.at(victim.session);
      Asked& asked = waiter.asked[victim.session];
      if (!asked.last.is_answered) waiter.expected -= asked.expected;
      asked = {.last = {.reserved_bytes = candidate.reserved_bytes,
                        .idle_bytes = candidate.idle_bytes,
                        .by_figures = by_figures},
               .at = now,
               .expected = std::min(victim.bytes, candidate.idle_bytes)};
      waiter.expected += asked.expected;
      const auto [index, is_first] = questions.of_session.emplace(victim.session, questions.questions.size());
      if (is_first) {
        questions.questions.push_back({.victim = {.session = victim.session}});
        if (Owed& owed = owed_[victim.session]; owed.answers++ == 0) {
          owed.since = now;
          owed_since_.emplace(now, victim.session);
        }
      }
      Question& question = questions.questions[index->second];
      question.victim.bytes += victim.bytes;
      question.requests.emplace_back(arrival, round);
    }
    if (!victims.empty()) return;
    if (is_there) {
      waiter.asking = Asking::kNobody;  // the next pass may find earlier requests
    } else if (waiter.asking == Asking::kChosen && is_anybody_there) {
      waiter.asking = Asking::kSoonEverybody;
    } else {
      StopAsking(waiter);
    }
    to_visit_.insert(it->first);
  }
  Wake();
}

void RequestQueue::Answered(const Question& question) {
  const SessionId victim = question.victim.session;
  const uint64_t reserved = pool_.GetAccount(victim).value_or(AccountState()).reserved_bytes;
  bool is_last = false;  // of the session's answers, or of answers to a round
  {
    MutexLock lock(mu_);
    const auto owed = owed_.find(victim);
    owed_since_.erase({owed->second.since, victim});
    owed->second.since = hooks_.clock();
    if (--owed->second.answers == 0) {
      owed_.erase(owed);
      is_last = true;
    } else {
      owed_since_.emplace(owed->second.since, victim);
    }
    for (const auto& [arrival, round] : question.requests) {
      const auto it = Find(arrival);
      if (it == waiters_.end()) continue;
      Waiter& waiter = it->second;
      Asked& asked = waiter.asked[victim];
      LastAsked& last = asked.last;
      if (!std::exchange(last.is_answered, true)) waiter.expected -= asked.expected;
      last.has_given = reserved < last.reserved_bytes;
      if (hold_.has_value() && hold_->place == it->first) next_hold_look_ = SteadyTime::min();
      if (waiter.round != round || --waiter.unanswered > 0) continue;
      if (waiter.asking == Asking::kChosen) {
        waiter.asking = Asking::kSoonEverybody;
      } else if (waiter.asking == Asking::kEverybody || waiter.asking == Asking::kAgain) {
        StopAsking(waiter);
      }
      to_visit_.insert(it->first);
      is_last = true;
    }
  }
  // Returned memory is already free, and may be enough. If not, the answer may have been the last hope.
  if (is_last) Wake();
}

}  // namespace vrambroker
