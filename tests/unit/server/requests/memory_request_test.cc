// SPDX-License-Identifier: Apache-2.0
#include "server/requests/memory_request.h"

#include <gtest/gtest.h>

#include <chrono>
#include <memory>

#include "server/sessions/leased_session.h"
#include "tests/support/step_workers.h"

namespace vrambroker {
namespace {

// Counts how the request's waits end.
class CountingRequest : public MemoryRequest {
 public:
  using MemoryRequest::MemoryRequest;

  void Refused(const absl::Status& /*why*/) override { ++refused; }

  bool can_be_served = true;
  int granted = 0;
  int refused = 0;
  int tries = 0;
  int served = 0;

 private:
  void RunReserved(Reservation /*reservation*/) override { ++granted; }
  bool TryServeOtherwise() override {
    ++tries;
    return can_be_served;
  }
  void ServedOtherwise() override { ++served; }
};

class MemoryRequestTest : public ::testing::Test {
 protected:
  std::shared_ptr<CountingRequest> Make(const RequestOptions& options) {
    SessionSetup setup{.id = SessionId{7}, .name = "test", .workers = &workers_};
    setup.terms.max_wait = std::chrono::seconds(10);
    session_ = std::make_shared<LeasedSession>(setup, ResumeToken());
    return std::make_shared<CountingRequest>(session_, 0, options);
  }

  const SteadyTime now_{std::chrono::hours(1)};
  StepWorkers workers_;
  SessionPtr session_;
};

TEST_F(MemoryRequestTest, AWaitEndsOnce) {
  const auto request = Make({.may_reclaim = true});
  const int granted = request->StartWaiting(now_);
  EXPECT_TRUE(request->EndWait(granted, {}));
  EXPECT_FALSE(request->EndWait(granted, {}));
  EXPECT_FALSE(request->EndWaitOtherwise(granted));
  EXPECT_EQ(request->tries, 0) << "who has ended it may be at it now";
  const int served = request->StartWaiting(now_);
  EXPECT_FALSE(request->EndWaitOtherwise(granted)) << "an earlier one";
  EXPECT_FALSE(request->EndWait(granted, {}));
  EXPECT_TRUE(request->EndWaitOtherwise(served));
  EXPECT_FALSE(request->EndWait(served, {}));
  EXPECT_EQ(request->served, 1);
}

TEST_F(MemoryRequestTest, AGrantedRequestGoesOnAsASlowCallOfItsSession) {
  const auto request = Make({.may_reclaim = true});
  request->Granted({});
  EXPECT_EQ(request->granted, 0);
  workers_.Settle();
  EXPECT_EQ(request->granted, 1);
  while (session_->slow_calls().Submit([] {})) continue;
  request->Granted({});
  EXPECT_EQ(request->refused, 1) << "too many calls wait";
  workers_.Settle();
  EXPECT_EQ(request->granted, 1);
}

TEST_F(MemoryRequestTest, WhatCannotBeServedGoesOnWaiting) {
  const auto request = Make({.may_reclaim = true});
  request->can_be_served = false;
  const int wait = request->StartWaiting(now_);
  EXPECT_FALSE(request->EndWaitOtherwise(wait));
  EXPECT_EQ(request->tries, 1);
  EXPECT_EQ(request->served, 0);
  EXPECT_TRUE(request->EndWait(wait, {}));
}

TEST_F(MemoryRequestTest, TheFirstWaitSetsTheDeadline) {
  const auto own = Make({.may_reclaim = true, .wait = std::chrono::seconds(3)});
  own->StartWaiting(now_);
  own->StartWaiting(now_ + std::chrono::seconds(2));
  EXPECT_EQ(own->deadline(), now_ + std::chrono::seconds(3));
  const auto by_rule = Make({.may_reclaim = true, .wait = std::chrono::hours(1)});
  by_rule->StartWaiting(now_);
  EXPECT_EQ(by_rule->deadline(), now_ + std::chrono::seconds(10));
}

TEST_F(MemoryRequestTest, OnlyWhatMayWaitIsKnownByItsKey) {
  const auto waits = Make({.may_reclaim = true, .cancel_key = 5});
  session_->cancel_keys().Cancel(5);
  EXPECT_TRUE(waits->is_cancelled());
  const auto does_not = Make({.may_reclaim = false, .cancel_key = 5});
  EXPECT_EQ(session_->cancel_keys().size(), 0u);
  session_->cancel_keys().Cancel(5);
  EXPECT_FALSE(does_not->is_cancelled());
}

TEST(CheckWaitTest, ARequestMayNotWaitForever) {
  EXPECT_EQ(CheckWait({.wait = kMaxWait}), absl::OkStatus());
  EXPECT_TRUE(absl::IsInvalidArgument(CheckWait({.wait = kMaxWait + std::chrono::milliseconds(1)})));
}

}  // namespace
}  // namespace vrambroker
