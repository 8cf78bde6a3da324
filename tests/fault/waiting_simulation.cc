// SPDX-License-Identifier: Apache-2.0
//
// Simulation of requests that wait under hostile arrivals: the real request queue and pool over a simulated device and
// clock.
//
// Honest and hostile sessions share a device. Hostile sessions ask for nearly all of the device and wait for an hour,
// report memory as idle and keep the memory, take and give as fast as possible, and come again as new sessions, as
// several users. Sitters never give memory back. Sessions except sitters hold memory for half of hold_back_time at
// most.
//
// Checks after each step: a request kept from its memory only by a hold is held back for hold_back_time at most, and is
// not refused. A sitter that wants more memory gets free memory. A large request that could be served if the other
// sessions gave back their memory is served within kLongest. Prints the times that large requests took.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/flags/usage.h"
#include "absl/strings/str_cat.h"
#include "allocator/base/bytes.h"
#include "server/oom/out_of_memory.h"
#include "server/queue/request_queue.h"
#include "tests/fault/sim_device.h"

ABSL_FLAG(uint64_t, seed, 1, "What is random follows from it.");
ABSL_FLAG(uint64_t, steps, 1'000'000, "How many.");

namespace vrambroker::fault {
namespace {

using std::chrono::milliseconds;

constexpr uint64_t kCapacity = 128_MiB;
constexpr milliseconds kHoldBackTime(1000);
constexpr milliseconds kReclaimTimeout(2000);
constexpr milliseconds kSlack(1);
constexpr std::chrono::seconds kLongest(600);  // bound for a large request among hostile requests
constexpr size_t kSitters = 3;
constexpr uint64_t kSitterLimit = 10_MiB;
constexpr size_t kMaxSessions = 24;

class World {
 public:
  explicit World(uint64_t seed)
      : random_(seed),
        pool_(std::make_unique<SimDevice>(&memory_, kCapacity), kCapacity, &next_segment_,
              SegmentPoolOptions{.churn_window = kHoldBackTime, .clock = [this] { return now_; }}),
        queue_(&pool_, {.reclaim_timeout = kReclaimTimeout, .hold_back_time = kHoldBackTime},
               {.clock = [this] { return now_; },
                .candidates = [this] { return Candidates(); },
                .ask =
                    [this](const ReclaimVictim&, std::function<void()> answered) {
                      answers_.emplace_back(now_ + milliseconds(Random(Chance(10) ? 3000 : 20)), std::move(answered));
                    }}) {
    pool_.SetOnCapacityFreed([this] { queue_.OnCapacityFreed(); });
    for (size_t i = 0; i < kSitters; ++i) {
      sitters_.push_back(OpenSession(kSitterLimit, /*uid=*/9));
      Take(sitters_.back(), 2_MiB, now_ + std::chrono::hours(1'000'000));
    }
  }
  ~World() { pool_.SetOnCapacityFreed(nullptr); }

  std::string Run(uint64_t steps) {
    for (uint64_t step = 0; step < steps && failure_.empty(); ++step) {
      step_ = step;
      Step();
    }
    return failure_;
  }

  void Print() const {
    std::printf(
        "%lu large requests served, each after %.1f s at most, %.1f s on average; %lu small ones, held back for %ld ms "
        "at most; %lu hostile requests for all of the device; %lu requests were held back at some time\n",
        large_served_, Seconds(longest_large_),
        large_served_ == 0 ? 0 : Seconds(sum_large_) / static_cast<double>(large_served_), small_served_,
        static_cast<long>(longest_held_back_ / milliseconds(1)), hostile_, held_back_.size());
  }

 private:
  struct Session {
    uid_t uid = 0;
    bool lies = false;                      // reports all memory as idle, and gives none
    std::map<SegmentId, SteadyTime> until;  // held segments, with the end of each
  };
  struct Asked {
    SessionId session{};
    uint64_t bytes = 0;
    SteadyTime since;
    bool is_large = false;
    bool may_wait = false;
    std::optional<SteadyTime> held_back_since{};
  };

  static double Seconds(SteadyTime::duration time) { return std::chrono::duration<double>(time).count(); }
  uint64_t Random(uint64_t below) { return random_() % below; }
  bool Chance(int percent) { return static_cast<int>(Random(100)) < percent; }
  uint64_t RandomBytes(uint64_t most) { return 2_MiB * (1 + Random(most / 2_MiB)); }
  void Fail(const std::string& what) {
    if (failure_.empty()) failure_ = absl::StrCat("step ", step_, ": ", what);
  }

  SessionId OpenSession(uint64_t limit, uid_t uid) {
    const SessionId id{next_session_++};
    pool_.OpenAccount(id, {.pid = 1, .uid = uid, .tenant = "d", .limit_bytes = limit});
    sessions_[id] = {.uid = uid, .lies = Chance(30)};
    return id;
  }
  void CloseSession(SessionId id) {
    queue_.Cancel(id, absl::AbortedError("it has ended"));
    pool_.CloseAccount(id);
    sessions_.erase(id);
  }

  std::vector<ReclaimCandidate> Candidates() const {
    std::vector<ReclaimCandidate> candidates;
    for (const auto& [id, session] : sessions_) {
      const AccountState account = *pool_.GetAccount(id);
      if (account.reserved_bytes == 0) continue;
      candidates.push_back({.session = id,
                            .reserved_bytes = account.reserved_bytes,
                            .idle_bytes = session.lies ? account.reserved_bytes : 0});
    }
    return candidates;
  }

  // Leases a segment; the session holds the segment until `until`.
  void Take(SessionId id, uint64_t bytes, SteadyTime until, bool granted = false) {
    const absl::StatusOr<SegmentId> segment = pool_.Lease(id, bytes, granted);
    if (segment.ok()) sessions_.at(id).until[*segment] = until;
  }
  SteadyTime SomeTime() { return now_ + milliseconds(1 + Random(kHoldBackTime.count() / 2)); }

  void Ask(SessionId id, uint64_t bytes, milliseconds wait, bool is_large) {
    const uint64_t key = next_key_++;
    asked_[key] = {.session = id, .bytes = bytes, .since = now_, .is_large = is_large, .may_wait = wait.count() > 0};
    queue_.Add({.session = id,
                .user = sessions_.at(id).uid,
                .bytes = bytes,
                .deadline = now_ + wait,
                .cancel_key = key,
                .done = [this, key](const absl::Status& status, const WaitRecord&) { Answered(key, status); }});
  }

  void Answered(uint64_t key, const absl::Status& status) {
    const Asked asked = asked_.at(key);
    asked_.erase(key);
    if (status.ok()) {
      Take(asked.session, asked.bytes, SomeTime(), /*granted=*/true);
    } else if (SegmentRefusalCause(status) == OomCause::kCapacity && pool_.IsHeldBack(asked.session, asked.bytes) &&
               now_ < asked.since + kReclaimTimeout) {
      Fail("a request was refused although it is only held back");
    }
    if (!asked.is_large) {
      small_served_ += status.ok() ? 1 : 0;
      return;
    }
    large_ = false;
    if (!status.ok()) return Fail(absl::StrCat("a large request was refused: ", status.ToString()));
    ++large_served_;
    sum_large_ += now_ - asked.since;
    longest_large_ = std::max(longest_large_, now_ - asked.since);
  }

  SessionId AnySession() {
    auto it = sessions_.begin();
    std::advance(it, static_cast<std::ptrdiff_t>(Random(sessions_.size())));
    return it->first;
  }
  bool IsSitter(SessionId id) const { return std::find(sitters_.begin(), sitters_.end(), id) != sitters_.end(); }

  void Step() {
    const uint64_t dice = Random(100);
    if (dice < 8 && sessions_.size() < kMaxSessions) {
      OpenSession(kCapacity, static_cast<uid_t>(Random(4)));
    } else if (dice < 12) {
      if (const SessionId id = AnySession(); !IsSitter(id) && !IsLarge(id)) CloseSession(id);
    } else if (dice < 40) {  // takes memory past the queue, as fast as possible
      if (const SessionId id = AnySession(); !IsSitter(id) && !IsLarge(id)) {
        Take(id, RandomBytes(Chance(20) ? kCapacity : 16_MiB), SomeTime());
      }
    } else if (dice < 50) {
      if (const SessionId id = AnySession(); !IsSitter(id) && !IsLarge(id)) {
        Ask(id, RandomBytes(32_MiB), milliseconds(Chance(50) ? 0 : Random(5000)), /*is_large=*/false);
      }
    } else if (dice < 52 && queue_.size() < 12) {
      if (const SessionId id = AnySession(); !IsSitter(id) && !IsLarge(id)) {
        ++hostile_;
        Ask(id, kCapacity - 2_MiB * Random(8), std::chrono::hours(1), /*is_large=*/false);
      }
    } else if (dice < 53) {
      SitterGrows();
    } else if (dice < 56 && !large_) {
      // The request fits beside the sitters, even when sitters hold as much memory as their limits allow.
      const SessionId id = OpenSession(kCapacity, /*uid=*/7);
      large_ = true;
      Ask(id, kCapacity - kSitters * kSitterLimit - RandomBytes(16_MiB), std::chrono::hours(1'000), /*is_large=*/true);
    } else {
      Pass(milliseconds(1 + Random(15)));
    }
    Check();
  }

  bool IsLarge(SessionId id) const { return sessions_.at(id).uid == 7; }

  // Checks that a sitter gets free memory within its limit, even memory held back for other requests.
  void SitterGrows() {
    const SessionId id = sitters_[Random(sitters_.size())];
    const PoolStats stats = pool_.GetStats();
    const bool fits = pool_.GetAccount(id)->reserved_bytes + 2_MiB <= kSitterLimit &&
                      stats.capacity_bytes - stats.committed_bytes >= 2_MiB;
    if (!fits) return;
    const absl::StatusOr<SegmentId> segment = pool_.Lease(id, 2_MiB);
    if (!segment.ok())
      return Fail(absl::StrCat("one that others wait for is held back: ", segment.status().ToString()));
    sessions_.at(id).until[*segment] = now_ + std::chrono::hours(1'000'000);
  }

  void Pass(milliseconds time) {
    const SteadyTime end = now_ + time;
    for (int fired = 0;; ++fired) {
      std::optional<SteadyTime> next = queue_.NextWake();
      for (const auto& [at, answered] : answers_) next = std::min(next.value_or(at), at);
      if (!next.has_value() || *next > end) break;
      if (fired > 10'000) return Fail("the timer is set for now again and again");
      now_ = std::max(now_ + std::chrono::microseconds(1), *next);
      AnswerThose();
      queue_.OnTimer();
      Check();
    }
    now_ = std::max(now_, end);
    GiveBack();
  }
  void AnswerThose() {
    std::vector<std::function<void()>> due;
    std::erase_if(answers_, [&](auto& entry) {
      if (entry.first > now_) return false;
      due.push_back(std::move(entry.second));
      return true;
    });
    for (const auto& answered : due) answered();
  }
  void GiveBack() {
    std::vector<std::pair<SessionId, SegmentId>> due;
    for (const auto& [id, session] : sessions_) {
      for (const auto& [segment, until] : session.until) {
        if (until <= now_) due.emplace_back(id, segment);
      }
    }
    for (const auto& [id, segment] : due) {
      sessions_.at(id).until.erase(segment);
      if (!pool_.Return(id, {segment}).ok()) Fail("a segment cannot be given back");
    }
    std::vector<SessionId> done;  // sessions whose large request is over
    for (const auto& [id, session] : sessions_) {
      const bool waits =
          std::any_of(asked_.begin(), asked_.end(), [&id = id](const auto& a) { return a.second.session == id; });
      if (session.uid == 7 && session.until.empty() && !waits) done.push_back(id);
    }
    for (const SessionId id : done) CloseSession(id);
  }

  void Check() {
    for (auto& [key, asked] : asked_) {
      if (asked.is_large && now_ - asked.since > kLongest) {
        return Fail(absl::StrCat("a large request has waited for ", Seconds(now_ - asked.since), " s"));
      }
      if (!pool_.IsHeldBack(asked.session, asked.bytes)) {
        asked.held_back_since.reset();
        continue;
      }
      if (!asked.held_back_since.has_value()) asked.held_back_since = now_;
      const SteadyTime::duration held_back = now_ - *asked.held_back_since;
      longest_held_back_ = std::max(longest_held_back_, held_back);
      held_back_[key] = held_back;
      if (held_back > kHoldBackTime + kSlack) Fail("a request was held back for longer than the bound");
    }
  }

  std::mt19937_64 random_;
  std::string failure_;
  uint64_t step_ = 0;
  SteadyTime now_{std::chrono::hours(1)};
  SimMemory memory_;
  std::atomic<uint64_t> next_segment_{1};
  SegmentPool pool_;
  std::deque<std::pair<SteadyTime, std::function<void()>>> answers_;  // answers of asked sessions, with their times
  RequestQueue queue_;
  uint64_t next_session_ = 1;
  std::map<SessionId, Session> sessions_;
  std::vector<SessionId> sitters_;
  uint64_t next_key_ = 1;
  std::map<uint64_t, Asked> asked_;  // waiting requests, by key
  bool large_ = false;               // a large request waits

  uint64_t large_served_ = 0;
  uint64_t small_served_ = 0;
  uint64_t hostile_ = 0;
  SteadyTime::duration longest_large_{0};
  SteadyTime::duration sum_large_{0};
  SteadyTime::duration longest_held_back_{0};
  std::map<uint64_t, SteadyTime::duration> held_back_;  // requests that were ever held back, with their last hold
};

int Main() {
  World world(absl::GetFlag(FLAGS_seed));
  const std::string failure = world.Run(absl::GetFlag(FLAGS_steps));
  if (failure.empty()) {
    world.Print();
    return 0;
  }
  std::printf("FAILED: %s\nrepeat it with: waiting_simulation --seed=%lu\n", failure.c_str(),
              absl::GetFlag(FLAGS_seed));
  return 1;
}

}  // namespace
}  // namespace vrambroker::fault

int main(int argc, char** argv) {
  absl::SetProgramUsageMessage("simulates requests that wait for memory among hostile ones.");
  absl::ParseCommandLine(argc, argv);
  return vrambroker::fault::Main();
}
