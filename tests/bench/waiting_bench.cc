// SPDX-License-Identifier: Apache-2.0
//
// Measures the cost of waiting requests for other sessions: the time of a lease within a guarantee, and of its return.
// Meanwhile thousands of requests wait for memory, sessions lease and return all the time, and new requests are
// refused. The peer is the same broker without waiting requests.
#include <spdlog/spdlog.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <ctime>
#include <fstream>
#include <functional>
#include <future>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/flags/usage.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "allocator/base/bytes.h"
#include "server/base/worker_pool.h"
#include "server/core/broker.h"
#include "tests/support/fake_device.h"

ABSL_FLAG(std::vector<std::string>, waiting, (std::vector<std::string>{"0", "1000", "4000"}), "Requests that wait.");
ABSL_FLAG(int, sessions, 100, "Sessions that they belong to; each holds memory.");
ABSL_FLAG(int, seconds, 3, "How long leases are measured for each number.");
ABSL_FLAG(std::string, json, "", "Where to write the figures, too.");

namespace vrambroker {
namespace {

using Clock = std::chrono::steady_clock;

constexpr uint64_t kGuarantee = 64_MiB;

double Microseconds(Clock::duration time) {
  return std::chrono::duration<double, std::micro>(time).count();
}

double ProcessorSeconds() {
  timespec time = {};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) / 1e9;
}

// A client that answers at once, and gives no memory back.
class Answering : public SessionEvents {
 public:
  void CloseSegments(absl::Span<const SegmentId>) override {}
  void LimitChanged(int, uint64_t) override {}
  void Draining(const std::string&) override {}
  void Ended(const std::string&) override {}
  void Ask(uint64_t question, const ClientQuestion&) override {
    if (const SessionPtr session = session_.lock()) {
      (void)session->slow_questions().Submit([session, question] {
        session->leased()->questions().Receive(question, 0, /*more=*/false,
                                               [](ClientAnswer&) { return absl::OkStatus(); });
      });
    }
  }
  void Is(const SessionPtr& session) { session_ = session; }

 private:
  std::weak_ptr<Session> session_;
};

struct Times {
  double median = 0, p99 = 0, most = 0;
};

struct Measured {
  Times lease, giving_back, others;
};

Times TimesOf(std::vector<double>& us) {
  std::sort(us.begin(), us.end());
  return {us[us.size() / 2], us[us.size() * 99 / 100], us.back()};
}

class Scene {
 public:
  Scene(int sessions, int waiting) : pool_(std::make_unique<FakeDevice>(64_GiB), 64_GiB, &next_segment_) {
    BrokerOptions options;
    options.watch_process = [](const UniqueFd&, const std::function<void()>&) { return 0; };
    options.unwatch_process = [](int) {};
    options.set_timer = [this](SteadyTime time) {
      MutexLock lock(timer_mu_);
      next_ = time;
      timer_set_.NotifyOne();
    };
    broker_ = std::make_unique<Broker>(std::move(options), std::vector<SegmentPool*>{&pool_}, workers_.get());
    timer_ = std::thread([this] { RunTimer(); });
    guaranteed_ = Open("guaranteed");
    std::promise<absl::Status> kept;
    broker_->limits().SetGuarantee(guaranteed_, Limit(kGuarantee),
                                   [&](absl::Status status) { kept.set_value(status); });
    if (!kept.get_future().get().ok()) std::abort();
    churner_ = Open("takes-and-gives");
    newcomer_ = Open("comes-and-is-refused");
    for (int i = 0; i < sessions; ++i) {
      waiters_.push_back(Open(absl::StrCat("waits-", i)));
      (void)Lease(waiters_.back(), 2_MiB);
    }
    // The free rest is too small for every waiting request.
    const SessionPtr holder = Open("holds-the-rest");
    const PoolStats stats = pool_.GetStats();
    (void)Lease(holder, stats.capacity_bytes - stats.committed_bytes - 64_MiB);
    const Clock::time_point start = Clock::now();
    for (int i = 0; i < waiting; ++i) {
      broker_->leases().LeaseSegments(waiters_[static_cast<size_t>(i % sessions)], 0, {512_MiB}, [](const auto&) {},
                                      {.may_reclaim = true, .wait = std::chrono::hours(1)});
    }
    while (broker_->waiting().GetWaiting(0).size() < static_cast<size_t>(waiting)) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    queued_us_ = Microseconds(Clock::now() - start);
  }
  ~Scene() {
    broker_->CloseAll("done");
    {
      MutexLock lock(timer_mu_);
      stop_ = true;
      timer_set_.NotifyOne();
    }
    timer_.join();
    workers_.reset();
  }

  // The time until all requests wait.
  double queued_us() const { return queued_us_; }

  // Leases and returns within the guarantee for `time`, while other sessions come and go. Returns the time of each
  // call, and the time of each call of the session that takes and gives.
  Measured Measure(std::chrono::seconds time) {
    std::atomic<bool> done = false;
    std::vector<double> others;
    std::thread churn([&] {
      while (!done) {
        const Clock::time_point start = Clock::now();
        const absl::StatusOr<std::vector<vrambroker::Lease>> lease = Lease(churner_, 2_MiB);
        if (lease.ok()) (void)broker_->leases().ReturnSegments(churner_, 0, {lease->front().segment});
        others.push_back(Microseconds(Clock::now() - start));
        std::this_thread::sleep_for(std::chrono::microseconds(100));
      }
    });
    std::thread arrivals([&] {
      while (!done) {
        (void)Lease(newcomer_, 1_GiB);
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
    });
    std::vector<double> leases;
    std::vector<double> returns;
    for (const Clock::time_point end = Clock::now() + time; Clock::now() < end;) {
      const Clock::time_point start = Clock::now();
      const absl::StatusOr<std::vector<vrambroker::Lease>> lease = Lease(guaranteed_, 2_MiB);
      const Clock::time_point leased = Clock::now();
      if (!lease.ok()) std::abort();
      (void)broker_->leases().ReturnSegments(guaranteed_, 0, {lease->front().segment});
      leases.push_back(Microseconds(leased - start));
      returns.push_back(Microseconds(Clock::now() - leased));
      std::this_thread::sleep_for(std::chrono::microseconds(200));
    }
    done = true;
    churn.join();
    arrivals.join();
    return {TimesOf(leases), TimesOf(returns), TimesOf(others)};
  }

 private:
  SessionPtr Open(const std::string& name) {
    const Caller caller{.pid = 1, .uid = next_uid_++ / 100, .pidfd = std::make_shared<UniqueFd>()};
    const auto client = std::make_shared<Answering>();
    SessionPtr session = broker_->OpenSession(caller, {.name = name, .placement = Placement::kLeased}, client).value();
    client->Is(session);
    return session;
  }
  absl::StatusOr<std::vector<vrambroker::Lease>> Lease(const SessionPtr& session, uint64_t bytes) {
    std::promise<absl::StatusOr<std::vector<vrambroker::Lease>>> leases;
    broker_->leases().LeaseSegments(session, 0, {bytes}, [&](auto answer) { leases.set_value(std::move(answer)); },
                                    {.may_reclaim = true});
    return leases.get_future().get();
  }
  void RunTimer() {
    while (true) {
      {
        MutexLock lock(timer_mu_);
        while (!stop_ && Clock::now() < next_) (void)timer_set_.WaitUntil(timer_mu_, next_);
        if (stop_) return;
        next_ = SteadyTime::max();
      }
      broker_->OnTimer();
    }
  }

  std::atomic<uint64_t> next_segment_ = 1;
  SegmentPool pool_;
  std::unique_ptr<WorkerPool> workers_ = std::make_unique<WorkerPool>(64);
  Mutex timer_mu_;
  CondVar timer_set_;
  SteadyTime next_ ABSL_GUARDED_BY(timer_mu_) = SteadyTime::max();
  bool stop_ ABSL_GUARDED_BY(timer_mu_) = false;
  std::unique_ptr<Broker> broker_;
  std::thread timer_;
  SessionPtr guaranteed_, churner_, newcomer_;
  std::vector<SessionPtr> waiters_;
  uid_t next_uid_ = 100;
  double queued_us_ = 0;
};

int Main() {
  nlohmann::json json;
  std::printf(
      "| waiting | until all wait, ms | lease, us: median | p99 | most | return, us: median | p99 | most | others' "
      "calls, "
      "us: median | p99 | most | cores | ratio |\n"
      "| ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |\n");
  double peer = 0;
  for (const std::string& text : absl::GetFlag(FLAGS_waiting)) {
    int waiting = 0;
    if (!absl::SimpleAtoi(text, &waiting) || waiting < 0) {
      std::fprintf(stderr, "waiting_bench: --waiting=%s: not a number\n", text.c_str());
      return 2;
    }
    Scene scene(std::max(1, absl::GetFlag(FLAGS_sessions)), waiting);
    const double cpu = ProcessorSeconds();
    const Clock::time_point start = Clock::now();
    const auto [lease, back, others] = scene.Measure(std::chrono::seconds(std::max(1, absl::GetFlag(FLAGS_seconds))));
    const double cores = (ProcessorSeconds() - cpu) / std::chrono::duration<double>(Clock::now() - start).count();
    if (peer == 0) peer = cores;
    std::printf("| %d | %.1f | %.1f | %.1f | %.1f | %.1f | %.1f | %.1f | %.1f | %.1f | %.1f | %.2f | %.2f |\n", waiting,
                scene.queued_us() / 1000, lease.median, lease.p99, lease.most, back.median, back.p99, back.most,
                others.median, others.p99, others.most, cores, cores / peer);
    std::fflush(stdout);
    json.push_back({{"waiting", waiting},
                    {"queued_ms", scene.queued_us() / 1000},
                    {"lease_us", {{"median", lease.median}, {"p99", lease.p99}, {"most", lease.most}}},
                    {"return_us", {{"median", back.median}, {"p99", back.p99}, {"most", back.most}}},
                    {"others_us", {{"median", others.median}, {"p99", others.p99}, {"most", others.most}}},
                    {"cores", cores},
                    {"cores_ratio", cores / peer}});
  }
  if (const std::string path = absl::GetFlag(FLAGS_json); !path.empty()) std::ofstream(path) << json.dump(2) << "\n";
  return 0;
}

}  // namespace
}  // namespace vrambroker

int main(int argc, char** argv) {
  absl::SetProgramUsageMessage("what requests that wait for memory cost the others");
  absl::ParseCommandLine(argc, argv);
  spdlog::set_level(spdlog::level::off);
  return vrambroker::Main();
}
