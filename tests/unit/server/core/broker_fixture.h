// SPDX-License-Identifier: Apache-2.0
//
// A broker over fake devices and clients, for the tests of sessions and of leases.
#ifndef VRAMBROKER_TESTS_UNIT_SERVER_CORE_BROKER_FIXTURE_H_
#define VRAMBROKER_TESTS_UNIT_SERVER_CORE_BROKER_FIXTURE_H_

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/cord.h"
#include "absl/strings/str_cat.h"
#include "allocator/base/bytes.h"
#include "server/core/broker.h"
#include "tests/support/fake_device.h"
#include "vrambroker/v1/types.pb.h"

namespace vrambroker {

inline std::shared_ptr<const Policy> PolicyOf(PolicyOptions options) {
  return std::make_shared<const Policy>(std::move(options));
}

// Signals an event. (absl::Notification is not instrumented for ThreadSanitizer.)
class Signal {
 public:
  void Notify() {
    MutexLock lock(mu_);
    notified_ = true;
    changed_.NotifyAll();
  }
  void WaitForNotification() {
    MutexLock lock(mu_);
    while (!notified_) changed_.Wait(mu_);
  }
  bool HasBeenNotified() {
    MutexLock lock(mu_);
    return notified_;
  }

 private:
  Mutex mu_;
  CondVar changed_;
  bool notified_ ABSL_GUARDED_BY(mu_) = false;
};

class FakeClient : public SessionEvents {
 public:
  void CloseSegments(absl::Span<const SegmentId> segments) override {
    if (on_close) on_close(segments);
  }
  void LimitChanged(int device, uint64_t limit_bytes) override {
    Note(absl::StrCat("limit ", device, " ", limit_bytes));
    if (on_limit) on_limit();
  }
  void Draining(const std::string& reason) override {
    Note(reason.empty() ? "draining" : absl::StrCat("draining: ", reason));
  }
  void Ended(const std::string& reason) override { Note("ended: " + reason); }
  void Ask(uint64_t question_id, const ClientQuestion& question) override {
    if (on_ask) on_ask(question_id, question);
  }

  std::vector<std::string> told() const {
    MutexLock lock(mu_);
    return told_;
  }

  std::function<void(absl::Span<const SegmentId>)> on_close;  // set before use
  std::function<void(uint64_t, const ClientQuestion&)> on_ask;
  std::function<void()> on_limit;

 private:
  void Note(std::string text) {
    MutexLock lock(mu_);
    told_.push_back(std::move(text));
  }

  mutable Mutex mu_;
  std::vector<std::string> told_ ABSL_GUARDED_BY(mu_);
};

class BrokerTest : public ::testing::Test {
 protected:
  static constexpr uint64_t kCapacity = 64_MiB;

  BrokerTest() { Make({}); }

  void Make(BrokerOptions options, const SegmentPoolOptions& pool_options = {}, DeviceKind kind = DeviceKind::kHost) {
    broker_.reset();
    pools_.clear();
    controls_.clear();
    for (int i = 0; i < 2; ++i) {
      auto device = std::make_unique<FakeDevice>(kCapacity, kind);
      controls_.push_back(device->control());
      pools_.push_back(std::make_unique<SegmentPool>(std::move(device), kCapacity, &next_segment_, pool_options));
    }
    options.watch_process = [this](const UniqueFd&, std::function<void()> gone) -> absl::StatusOr<int> {
      if (!watch_error_.ok()) return watch_error_;
      gone_.push_back(std::move(gone));
      return static_cast<int>(gone_.size() - 1);
    };
    options.unwatch_process = [this](int watch) { unwatched_.push_back(watch); };
    broker_ = std::make_unique<Broker>(std::move(options), std::vector<SegmentPool*>{pools_[0].get(), pools_[1].get()},
                                       workers_.get());
  }
  void TearDown() override {
    broker_->CloseAll("end of the test");
    workers_.reset();
    EXPECT_EQ(broker_->sessions().size(), 0u);
    for (const std::unique_ptr<SegmentPool>& pool : pools_) {
      const PoolStats stats = pool->GetStats();
      EXPECT_EQ(stats.charged_bytes, stats.quarantined_bytes + stats.carried_over_bytes + stats.outside_bytes)
          << "only what programs keep";
    }
    broker_.reset();
    pools_.clear();
    for (const auto& control : controls_) {
      EXPECT_EQ(control->live_bytes(), 0u);
      EXPECT_EQ(control->misuse(), "");
    }
  }

  static Caller Process(pid_t pid, uid_t uid) {
    return {.pid = pid, .uid = uid, .pidfd = std::make_shared<UniqueFd>()};
  }
  absl::StatusOr<SessionPtr> TryOpen(const std::string& name, std::optional<Limit> limit = std::nullopt,
                                     Caller caller = Process(1, 1000),
                                     std::optional<AllocatorOptions> allocator = std::nullopt) {
    client_ = std::make_shared<FakeClient>();
    return broker_->OpenSession(caller, {.name = name, .limit = limit, .allocator = allocator}, client_);
  }
  SessionPtr Open(const std::string& name, std::optional<Limit> limit = std::nullopt, Caller caller = Process(1, 1000),
                  std::optional<AllocatorOptions> allocator = std::nullopt) {
    absl::StatusOr<SessionPtr> session = TryOpen(name, limit, caller, allocator);
    EXPECT_TRUE(session.ok()) << session.status();
    const std::weak_ptr<Session> weak = *session;
    client_->on_close = [weak](absl::Span<const SegmentId> segments) {
      if (const SessionPtr alive = weak.lock()) alive->remote()->SegmentsClosed(segments);
    };
    return session.value_or(nullptr);
  }
  // Opens a leasing session.
  SessionPtr OpenLeasing(const std::string& name, std::optional<Limit> limit = std::nullopt,
                         Caller caller = Process(1, 1000)) {
    client_ = std::make_shared<FakeClient>();
    absl::StatusOr<SessionPtr> session =
        broker_->OpenSession(caller, {.name = name, .limit = limit, .placement = Placement::kLeased}, client_);
    EXPECT_TRUE(session.ok()) << session.status();
    return session.value_or(nullptr);
  }
  absl::StatusOr<std::vector<Lease>> LeaseSegments(const SessionPtr& session, const std::vector<uint64_t>& sizes,
                                                   uint64_t device = 0) {
    Signal answered;
    absl::StatusOr<std::vector<Lease>> answer = absl::UnknownError("no answer");
    broker_->leases().LeaseSegments(session, device, sizes, [&](absl::StatusOr<std::vector<Lease>> leases) {
      answer = std::move(leases);
      answered.Notify();
    });
    answered.WaitForNotification();
    return answer;
  }
  absl::StatusOr<uint64_t> Trim(const SessionPtr& session, uint64_t bytes) {
    Signal answered;
    absl::StatusOr<uint64_t> answer = absl::UnknownError("no answer");
    session->Trim(bytes, [&](absl::StatusOr<uint64_t> released) {
      answer = std::move(released);
      answered.Notify();
    });
    answered.WaitForNotification();
    return answer;
  }
  absl::StatusOr<SessionPtr> Resume(const ResumeToken& token, const absl::flat_hash_set<SegmentId>& held,
                                    Caller caller = Process(1, 1000)) {
    client_ = std::make_shared<FakeClient>();
    Signal answered;
    absl::StatusOr<SessionPtr> answer = absl::UnknownError("no answer");
    broker_->ResumeSession(caller, token, held, client_, [&](absl::StatusOr<SessionPtr> session) {
      answer = std::move(session);
      answered.Notify();
    });
    answered.WaitForNotification();
    return answer;
  }
  absl::Status Explain(const SessionPtr& session, uint64_t device, const RefusedRequest& request) {
    Signal answered;
    absl::Status answer;
    broker_->refusals().Explain(session, device, request, [&](absl::Status status) {
      answer = std::move(status);
      answered.Notify();
    });
    answered.WaitForNotification();
    return answer;
  }
  absl::Status SetRecording(const SessionPtr& session, uint64_t max_events) {
    Signal answered;
    absl::Status answer;
    broker_->recordings().Set(session, max_events, [&](const absl::Status& status) {
      answer = status;
      answered.Notify();
    });
    answered.WaitForNotification();
    return answer;
  }
  // Calls Allocate(), and returns the answer.
  absl::StatusOr<Allocation> Allocate(const SessionPtr& session, uint64_t bytes, uint64_t device = 0, Stream stream = 0,
                                      const RequestOptions& growth = {}) {
    Gate answered;
    answered.Open();
    absl::StatusOr<Allocation> answer = absl::UnknownError("no answer");
    const auto done = [&](absl::StatusOr<Allocation> allocation) {
      answer = std::move(allocation);
      answered.Pass();
    };
    broker_->allocations().Allocate(session, device, bytes, stream, done, growth);
    answered.AwaitArrivals(1);
    // The worker must leave the gate before the gate goes.
    Drain(session);
    return answer;
  }
  // Waits for all tasks that the session has so far.
  static void Drain(const SessionPtr& session) {
    const auto gate = std::make_shared<Gate>();
    gate->Open();
    session->slow_calls().Submit([gate] { gate->Pass(); });
    session->slow_questions().Submit([gate] { gate->Pass(); });
    gate->AwaitArrivals(2);
  }
  uint64_t Refusals(size_t device, OomCause cause) const {
    return broker_->operator_view().Look().devices[device].ooms[static_cast<size_t>(cause)];
  }
  static v1::OutOfMemory Report(const absl::Status& status) {
    v1::OutOfMemory proto;
    const absl::optional<absl::Cord> payload = status.GetPayload("type.googleapis.com/vrambroker.v1.OutOfMemory");
    EXPECT_TRUE(payload.has_value()) << status;
    if (payload.has_value()) {
      EXPECT_TRUE(proto.ParseFromString(std::string(*payload)));
    }
    return proto;
  }

  std::atomic<uint64_t> next_segment_ = 1;
  std::unique_ptr<Executor> workers_ = std::make_unique<WorkerPool>(4);
  std::vector<std::shared_ptr<FakeDevice::Control>> controls_;
  std::vector<std::unique_ptr<SegmentPool>> pools_;
  absl::Status watch_error_;
  std::vector<std::function<void()>> gone_;  // a callback for each session, in order
  std::vector<int> unwatched_;               // indices of gone_
  std::unique_ptr<Broker> broker_;
  std::shared_ptr<FakeClient> client_;  // client of the last session
};

}  // namespace vrambroker

#endif  // VRAMBROKER_TESTS_UNIT_SERVER_CORE_BROKER_FIXTURE_H_
