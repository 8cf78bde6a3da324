// SPDX-License-Identifier: Apache-2.0
//
// Requests for memory that wait for others, as the broker sees them: with its clock in the test's hands.
#include <atomic>
#include <thread>

#include "tests/unit/broker_fixture.h"

namespace vrambroker {
namespace {

using std::chrono::milliseconds;

class BrokerWaitingTest : public BrokerTest {
 protected:
  BrokerWaitingTest() {
    BrokerOptions options;
    options.clock = [this] { return ReadClock(); };
    Make(std::move(options), {.clock = [this] { return SteadyTime(now_.load()); }});
  }

  SteadyTime ReadClock() {
    const SteadyTime read = now_.load();
    if (std::this_thread::get_id() != thread_) return read;
    if (reads_until_.has_value() && (*reads_until_)-- == 0) {
      reads_until_.reset();
      now_ = read + milliseconds(5);
      meanwhile_();
    }
    return read;
  }
  // After so many reads of the broker's clock on this thread, time goes on and `meanwhile` happens, before what was
  // read is used.
  void After(int reads, std::function<void()> meanwhile) {
    reads_until_ = reads;
    meanwhile_ = std::move(meanwhile);
  }

  // All of the first device is leased to it.
  SessionPtr Holder() {
    SessionPtr holder = OpenLeasing("holder");
    EXPECT_TRUE(LeaseSegments(holder, {kCapacity}).ok());
    return holder;
  }
  void Wait(const SessionPtr& session, uint64_t bytes, milliseconds wait) {
    broker_->LeaseSegments(session, 0, {bytes}, [](const absl::StatusOr<std::vector<Lease>>&) {},
                           {.may_reclaim = true, .wait = wait});
  }

  std::atomic<SteadyTime> now_{SteadyTime(std::chrono::hours(1))};
  const std::thread::id thread_ = std::this_thread::get_id();
  std::optional<int> reads_until_;  // these two are for this thread alone
  std::function<void()> meanwhile_;
};

// ---- Times ----

TEST_F(BrokerWaitingTest, WhatBeginsDuringALookHasNotWaitedForLessThanNothing) {
  const SessionPtr holder = Holder();
  const SessionPtr waiting = OpenLeasing("waiting");
  for (int reads = 0; reads < 8; ++reads) {
    After(reads, [&] { Wait(waiting, 2_MiB, std::chrono::hours(1)); });
    const BrokerView view = broker_->View();
    reads_until_.reset();
    EXPECT_GE(view.devices[0].longest_waiting, milliseconds(0)) << "after " << reads << " reads of the clock";
    for (const SessionInfo& session : view.sessions) {
      for (const SessionDeviceInfo::Waiting& request : session.devices[0].waiting) {
        EXPECT_GE(request.waited, milliseconds(0)) << "after " << reads << " reads of the clock";
      }
    }
    After(0, [&] { Wait(waiting, 2_MiB, std::chrono::hours(1)); });
    const SessionInfo info = broker_->Describe(*waiting);
    for (const SessionDeviceInfo::Waiting& request : info.devices[0].waiting) {
      EXPECT_GE(request.waited, milliseconds(0));
    }
    reads_until_.reset();
    broker_->Disconnect(waiting);
    ASSERT_TRUE(Resume(*waiting->resume_token(), {}).ok());
  }
}

TEST_F(BrokerWaitingTest, WhatIsQuarantinedDuringALookIsNotYoungerThanNothing) {
  for (int reads = 0; reads < 8; ++reads) {
    const SessionPtr dies = OpenLeasing("dies");
    const std::vector<Lease> leases = *LeaseSegments(dies, {2_MiB});
    ASSERT_TRUE(pools_[0]->RedeemTicket(std::get<Ticket>(leases[0].handle), 1, 1000).ok());
    After(reads, [&] { broker_->CloseGone(dies); });
    const BrokerView view = broker_->View();
    for (const QuarantinedInfo& left : view.devices[0].quarantine) {
      EXPECT_GE(left.age, milliseconds(0)) << "after " << reads << " reads of the clock";
    }
    reads_until_.reset();
    broker_->CloseGone(dies);
    pools_[0]->CheckQuarantine();
  }
}

}  // namespace
}  // namespace vrambroker
