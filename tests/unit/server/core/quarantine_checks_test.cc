// SPDX-License-Identifier: Apache-2.0
#include "server/core/quarantine_checks.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <optional>
#include <vector>

#include "allocator/base/bytes.h"
#include "tests/support/fake_device.h"
#include "tests/support/step_workers.h"

namespace vrambroker {
namespace {

TEST(QuarantineChecksTest, OneWorkerLooksWhenACheckIsDue) {
  constexpr SessionId kId{7};
  SteadyTime now{std::chrono::hours(1)};
  std::atomic<uint64_t> next_segment = 1;
  SegmentPool pool(std::make_unique<FakeDevice>(64_MiB), 64_MiB, &next_segment,
                   {.settle_time = std::chrono::milliseconds(50), .clock = [&] { return now; }});
  StepWorkers workers;
  int updates = 0;
  SharedTimer timer([&](SteadyTime) { ++updates; });
  QuarantineChecks checks({&pool}, &workers, &timer);
  timer.AddSource([&] { return std::optional(now); });
  EXPECT_EQ(checks.NextCheck(), std::nullopt);

  pool.OpenAccount(kId, {.pid = 1, .limit_bytes = 64_MiB});
  const SegmentId segment = pool.Lease(kId, 2_MiB).value();
  ASSERT_TRUE(pool.RedeemTicket(std::get<FdTicket>(pool.HandleFor(kId, segment).value()), 1, 0).ok());
  pool.CloseAccountOfGone(kId);
  ASSERT_EQ(pool.GetStats().quarantined_bytes, 2_MiB);
  EXPECT_EQ(checks.NextCheck(), now + std::chrono::milliseconds(50));
  checks.OnTimer(now);
  EXPECT_EQ(workers.waiting(), 0u) << "it is not due";

  now += std::chrono::milliseconds(50);
  checks.OnTimer(now);
  checks.OnTimer(now);
  EXPECT_EQ(workers.waiting(), 1u) << "one at a time";
  EXPECT_EQ(checks.NextCheck(), std::nullopt) << "a worker is at it: the timer is not to come back at once";
  workers.Settle();
  EXPECT_EQ(pool.GetStats().quarantined_bytes, 0u);
  EXPECT_EQ(updates, 1) << "what comes next is looked at";
}

}  // namespace
}  // namespace vrambroker
