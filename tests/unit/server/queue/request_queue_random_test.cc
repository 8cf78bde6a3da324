// SPDX-License-Identifier: Apache-2.0
//
// Random requests, limits, guarantees, users and priorities: a pass finds the same requests as a look at all requests.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "allocator/base/bytes.h"
#include "server/base/worker_pool.h"
#include "server/oom/out_of_memory.h"
#include "server/queue/request_queue.h"
#include "tests/support/fake_device.h"

namespace vrambroker {
namespace {

using std::chrono::milliseconds;

constexpr uint64_t kDeviceBytes = 64_MiB;
constexpr milliseconds kReclaimTimeout(2000);
constexpr uint64_t kUserLimit = 24_MiB;  // limit of users 1 and 2
constexpr ClaimId kClaim{1};             // claim with a changing limit

class RandomQueue {
 public:
  explicit RandomQueue(uint64_t seed)
      : random_(seed),
        pool_(std::make_unique<FakeDevice>(kDeviceBytes), kDeviceBytes, &next_segment_,
              {.clock = [this] { return now_; }}),
        queue_(&pool_, {.reclaim_timeout = kReclaimTimeout},
               {.clock = [this] { return now_; },
                .candidates = [this] { return Candidates(); },
                .ask = [this](const ReclaimVictim&,
                              std::function<void()> answered) { answers_.push_back(std::move(answered)); }}) {
    pool_.SetOnCapacityFreed([this] { queue_.OnCapacityFreed(); });
    pool_.SetClaimLimit(kClaim, kDeviceBytes);
  }
  ~RandomQueue() { pool_.SetOnCapacityFreed(nullptr); }

  // Runs the steps, and returns the failure; empty on success.
  std::string Run(int steps) {
    for (int step = 0; step < steps && failure_.empty(); ++step) {
      Step();
      queue_.OnTimer();  // the next event brings a pass if no memory came free
      Check();
      if (!failure_.empty()) return absl::StrCat("step ", step, ": ", failure_);
    }
    return "";
  }
  uint64_t granted() const { return granted_; }

 private:
  struct Request {
    SessionId session{};
    uint64_t bytes = 0;
    bool guarantee = false;
    SteadyTime until;
  };

  uint64_t Random(uint64_t below) { return random_() % below; }
  SessionId AnySession() { return std::next(held_.begin(), static_cast<std::ptrdiff_t>(Random(held_.size())))->first; }

  std::vector<ReclaimCandidate> Candidates() const {
    std::vector<ReclaimCandidate> candidates;
    for (const auto& [session, segments] : held_) {
      const AccountState account = pool_.GetAccount(session).value();
      candidates.push_back({.session = session,
                            .priority = account.priority,
                            .reserved_bytes = account.reserved_bytes,
                            .guarantee_bytes = account.guarantee_bytes,
                            .idle_bytes = Raw(session) % 3 == 0 ? account.reserved_bytes : 0});
    }
    return candidates;
  }

  void Open() {
    const SessionId session{next_session_++};
    const auto uid = static_cast<uid_t>(Random(4));
    pool_.OpenAccount(session, {.pid = 1,
                                .uid = uid,
                                .claim = uid == 3 ? std::optional(kClaim) : std::nullopt,
                                .tenant = "d",
                                .limit_bytes = 2_MiB * (4 + Random(29)),
                                .priority = static_cast<int>(Random(3)) - 1,
                                .user_limit_bytes = uid == 1 || uid == 2 ? kUserLimit : AccountState::kNoBound});
    held_[session];
  }
  void Close(SessionId session) {
    queue_.Cancel(session, absl::AbortedError("it has ended"));
    held_.erase(session);
    pool_.CloseAccount(session);
  }
  void Lease(SessionId session, uint64_t bytes, bool granted) {
    const absl::StatusOr<SegmentId> segment = pool_.Lease(session, bytes, granted);
    if (segment.ok()) held_.at(session).push_back(*segment);
    if (granted && !segment.ok()) failure_ = "what was granted is not there";
  }
  void GiveBack(SessionId session) {
    std::vector<SegmentId>& segments = held_.at(session);
    if (segments.empty()) return;
    const size_t which = Random(segments.size());
    const SegmentId segment = segments[which];
    segments.erase(segments.begin() + static_cast<std::ptrdiff_t>(which));
    if (!pool_.Return(session, {segment}).ok()) failure_ = "a segment cannot be given back";
  }
  void Ask(SessionId session, bool guarantee) {
    const uint64_t key = next_key_++;
    const uint64_t bytes = 2_MiB * (1 + Random(12));
    const auto wait = milliseconds(guarantee ? 0 : Random(6000));
    requests_[key] = {.session = session,
                      .bytes = bytes,
                      .guarantee = guarantee,
                      .until = now_ + std::max(wait, kReclaimTimeout) + milliseconds(1)};
    queue_.Add({.session = session,
                .user = static_cast<uid_t>(Raw(session)),
                .bytes = bytes,
                .guarantee = guarantee,
                .deadline = now_ + wait,
                .cancel_key = key,
                .done = [this, key](const absl::Status& status, const WaitRecord&) { Done(key, status); }});
  }
  void Done(uint64_t key, const absl::Status& status) {
    const auto it = requests_.find(key);
    if (it == requests_.end()) {
      failure_ = "a request was answered twice";
      return;
    }
    const Request request = it->second;
    requests_.erase(it);
    if (!status.ok()) return;
    ++granted_;
    if (!request.guarantee) Lease(request.session, request.bytes, /*granted=*/true);
  }
  void Pass(milliseconds time) {
    const SteadyTime end = now_ + time;
    for (int fired = 0;; ++fired) {
      const std::optional<SteadyTime> next = queue_.NextWake();
      if (!next.has_value() || *next > end) break;
      if (fired > 1000) {
        failure_ = "the timer is set for now again and again";
        return;
      }
      now_ = std::max(now_, *next);
      queue_.OnTimer();
      Check();
    }
    now_ = end;
  }

  void Step() {
    const uint64_t dice = Random(100);
    if (held_.empty() || (dice < 6 && held_.size() < 12)) return Open();
    const SessionId session = AnySession();
    if (dice < 8) return Close(session);
    if (dice < 25) return Ask(session, /*guarantee=*/false);
    if (dice < 28) return Ask(session, /*guarantee=*/true);
    if (dice < 40) return Lease(session, 2_MiB * (1 + Random(6)), /*granted=*/false);
    if (dice < 65) return GiveBack(session);
    if (dice < 69) {
      (void)pool_.SetGuarantee(session, 2_MiB * Random(6));
    } else if (dice < 70) {
      pool_.SetClaimLimit(kClaim, 2_MiB * Random(33));
    } else if (dice < 73) {
      (void)pool_.SetLimit(session, 2_MiB * Random(33));
    } else if (dice < 76) {
      const int priority = static_cast<int>(Random(3)) - 1;
      (void)pool_.SetPriority(session, priority);
      queue_.UpdatePriority(session, priority);
    } else if (dice < 79 && !requests_.empty()) {
      const auto it = std::next(requests_.begin(), static_cast<std::ptrdiff_t>(Random(requests_.size())));
      queue_.Cancel(it->second.session, it->first, absl::CancelledError("given up"));
    } else if (dice < 90) {
      for (const auto& answered : std::exchange(answers_, {})) answered();
    } else {
      Pass(milliseconds(Random(300)));
    }
  }

  void Check() {
    for (const auto& [key, request] : requests_) {
      const AccountState account = pool_.GetAccount(request.session).value();
      const std::string who = absl::StrCat("request ", key, " for ", request.bytes, " bytes");
      if (now_ > request.until) failure_ = absl::StrCat(who, " waits beyond its time");
      if (request.guarantee) continue;
      if (request.bytes > account.limit_bytes - std::min(account.limit_bytes, account.reserved_bytes)) {
        failure_ = absl::StrCat(who, " waits, and is beyond its limit");
      } else if (request.bytes > pool_.MostEver(request.session)) {
        failure_ = absl::StrCat(who, " waits, and can never be served");
      } else if (pool_.AvailableBytes(request.session) >= request.bytes &&
                 !pool_.IsHeldBack(request.session, request.bytes)) {
        failure_ = absl::StrCat(who, " waits for what is there");
      }
    }
  }

  std::mt19937_64 random_;
  SteadyTime now_{std::chrono::hours(1)};
  std::atomic<uint64_t> next_segment_ = 1;
  SegmentPool pool_;
  std::vector<std::function<void()>> answers_;
  uint64_t next_session_ = 1;
  uint64_t next_key_ = 1;
  uint64_t granted_ = 0;
  std::string failure_;
  std::map<SessionId, std::vector<SegmentId>> held_;
  std::map<uint64_t, Request> requests_;
  RequestQueue queue_;
};

TEST(RequestQueueRandomTest, FindsEverybodyWhoCanBeServedOrIsToBeRefused) {
  uint64_t granted = 0;
  for (uint64_t seed = 1; seed <= 40; ++seed) {
    RandomQueue queue(seed);
    ASSERT_EQ(queue.Run(3000), "") << "seed " << seed;
    granted += queue.granted();
  }
  EXPECT_GT(granted, 1000u);
}

// Runs sessions that take and give past the queue on their own threads, while the sessions wait in the queue. No time
// passes.
class Crowd {
 public:
  static constexpr uint64_t kThreads = 4;
  static constexpr uint64_t kSessionsOfThread = 3;

  Crowd() {
    pool_.SetOnCapacityFreed([this] { queue_.OnCapacityFreed(); });
    for (uint64_t i = 0; i < kThreads * kSessionsOfThread; ++i) {
      const auto uid = static_cast<uid_t>(i % 3);
      pool_.OpenAccount(SessionId{1 + i}, {.pid = 1,
                                           .uid = uid,
                                           .tenant = "d",
                                           .limit_bytes = 32_MiB,
                                           .user_limit_bytes = uid == 1 ? kUserLimit : AccountState::kNoBound});
      if (i % 4 == 0) {
        EXPECT_TRUE(pool_.SetGuarantee(SessionId{1 + i}, 6_MiB).ok());
      }
    }
  }
  ~Crowd() {
    pool_.SetOnCapacityFreed(nullptr);
    workers_.reset();
  }

  void Run(uint64_t seed) {
    std::vector<std::thread> threads;
    for (uint64_t i = 0; i < kThreads; ++i) threads.emplace_back([this, seed, i] { Work(seed, i); });
    for (std::thread& thread : threads) thread.join();
    Await([this] { return !queue_.IsPassToCome(); });
    queue_.OnTimer();
    Await([this] { return !queue_.IsPassToCome(); });
  }
  // Returns a reason for each waiting request that need not wait.
  std::vector<std::string> Missed() {
    std::vector<std::string> missed;
    for (const WaitingRequest& waiting : queue_.GetWaiting()) {
      const AccountState account = *pool_.GetAccount(waiting.session);
      if (waiting.bytes > account.limit_bytes - account.reserved_bytes) missed.emplace_back("beyond its limit");
      if (pool_.AvailableBytes(waiting.session) >= waiting.bytes) missed.emplace_back("there is enough");
    }
    return missed;
  }

 private:
  static void Await(const std::function<bool()>& condition) {
    while (!condition()) std::this_thread::yield();
  }
  void Hold(SessionId session, SegmentId segment) {
    MutexLock lock(mu_);
    held_[session].push_back(segment);
  }
  void Work(uint64_t seed, uint64_t thread) {
    std::mt19937_64 random(seed * 100 + thread);
    for (int i = 0; i < 600; ++i) {
      const SessionId session{1 + thread * kSessionsOfThread + random() % kSessionsOfThread};
      const uint64_t bytes = 2_MiB * (1 + random() % 6);
      const uint64_t dice = random() % 100;
      if (dice < 40) {
        const absl::StatusOr<SegmentId> segment = pool_.Lease(session, bytes);
        if (segment.ok()) Hold(session, *segment);
      } else if (dice < 90) {
        SegmentId segment{};
        {
          MutexLock lock(mu_);
          std::vector<SegmentId>& segments = held_[session];
          if (segments.empty()) continue;
          segment = segments.back();
          segments.pop_back();
        }
        EXPECT_TRUE(pool_.Return(session, {segment}).ok());
      } else {
        queue_.Add({.session = session,
                    .bytes = bytes,
                    .deadline = now_ + std::chrono::hours(1),
                    .done = [this, session, bytes](const absl::Status& status, const WaitRecord&) {
                      if (!status.ok()) return;
                      const absl::StatusOr<SegmentId> segment = pool_.Lease(session, bytes, /*granted=*/true);
                      ASSERT_TRUE(segment.ok()) << segment.status();
                      Hold(session, *segment);
                    }});
      }
    }
  }

  const SteadyTime now_{std::chrono::hours(1)};
  std::atomic<uint64_t> next_segment_ = 1;
  SegmentPool pool_{std::make_unique<FakeDevice>(kDeviceBytes), kDeviceBytes, &next_segment_, {}};
  Mutex mu_;
  std::map<SessionId, std::vector<SegmentId>> held_ ABSL_GUARDED_BY(mu_);
  std::unique_ptr<WorkerPool> workers_ = std::make_unique<WorkerPool>(2);
  RequestQueue queue_{
      &pool_,
      {},
      {.clock = [this] { return now_; },
       .candidates = [] { return std::vector<ReclaimCandidate>(); },
       .ask = [](const ReclaimVictim&, const std::function<void()>&) {},
       .run = [workers = workers_.get()](std::function<void()> task) { workers->SubmitFirst(std::move(task)); }}};
};

TEST(RequestQueueRandomTest, NobodyIsMissedWhileOthersTakeAndGive) {
  for (uint64_t seed = 1; seed <= 50; ++seed) {
    Crowd crowd;
    crowd.Run(seed);
    EXPECT_THAT(crowd.Missed(), testing::IsEmpty()) << "seed " << seed;
  }
}

}  // namespace
}  // namespace vrambroker
