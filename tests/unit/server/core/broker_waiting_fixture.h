// SPDX-License-Identifier: Apache-2.0
//
// A broker for tests of requests that wait for memory. The test controls the broker's clock.
#ifndef VRAMBROKER_TESTS_UNIT_SERVER_CORE_BROKER_WAITING_FIXTURE_H_
#define VRAMBROKER_TESTS_UNIT_SERVER_CORE_BROKER_WAITING_FIXTURE_H_

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "tests/support/step_workers.h"
#include "tests/unit/server/core/broker_fixture.h"

namespace vrambroker {

class BrokerWaitingTest : public BrokerTest {
 protected:
  using Leases = absl::StatusOr<std::vector<Lease>>;

  BrokerWaitingTest() {
    broker_.reset();
    workers_ = std::make_unique<StepWorkers>();
    BrokerOptions options;
    options.clock = [this] { return ReadClock(); };
    Make(std::move(options), {.clock = [this] { return now_; }});
  }

  SteadyTime ReadClock() {
    const SteadyTime read = now_;
    if (reads_until_.has_value() && (*reads_until_)-- == 0) {
      reads_until_.reset();
      now_ = read + std::chrono::milliseconds(5);
      meanwhile_();
    }
    return read;
  }
  // Lets time go on and calls `meanwhile` after `reads` reads of the clock, before the broker uses the last time read.
  void After(int reads, std::function<void()> meanwhile) {
    reads_until_ = reads;
    meanwhile_ = std::move(meanwhile);
  }
  void Settle() { static_cast<StepWorkers&>(*workers_).Settle(); }
  void Pass(std::chrono::milliseconds time) {
    now_ += time;
    broker_->OnTimer();
    Settle();
  }

  // Requests leases. The answer arrives in the returned object.
  std::shared_ptr<std::optional<Leases>> Ask(const SessionPtr& session, const std::vector<uint64_t>& sizes,
                                             const RequestOptions& growth, uint64_t device = 0) {
    auto answer = std::make_shared<std::optional<Leases>>();
    broker_->leases().LeaseSegments(
        session, device, sizes, [answer](Leases leases) { *answer = std::move(leases); }, growth);
    return answer;
  }
  std::vector<Lease> Hold(const SessionPtr& session, const std::vector<uint64_t>& sizes, uint64_t device = 0) {
    const auto answer = Ask(session, sizes, {}, device);
    Settle();
    EXPECT_TRUE(answer->has_value() && (*answer)->ok());
    return (*answer)->value();
  }

  // Requests memory for a new session, which leases or is remote. The request waits for as long as allowed.
  void AskOrAllocate(bool leases, uint64_t bytes, std::optional<absl::Status>& answer) {
    const RequestOptions waits{.may_reclaim = true, .wait = std::chrono::hours(1)};
    if (leases) {
      broker_->leases().LeaseSegments(
          OpenLeasing("waiting"), 0, {bytes}, [&answer](const Leases& lease) { answer = lease.status(); }, waits);
    } else {
      broker_->allocations().Allocate(
          Open("waiting"), 0, bytes, 0, [&answer](const auto& block) { answer = block.status(); }, waits);
    }
  }

  SteadyTime now_{std::chrono::hours(1)};
  std::optional<int> reads_until_;
  std::function<void()> meanwhile_;
};

}  // namespace vrambroker

#endif  // VRAMBROKER_TESTS_UNIT_SERVER_CORE_BROKER_WAITING_FIXTURE_H_
