// SPDX-License-Identifier: Apache-2.0
#include "server/core/reconciliation.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <functional>
#include <memory>
#include <string>

#include "allocator/base/bytes.h"
#include "server/requests/charges.h"
#include "tests/unit/server/core/broker_fixture.h"

namespace vrambroker {
namespace {

// Has two GPUs of 64 MiB. A process's context takes 4 MiB; more than 6 MiB is drift.
class ReconciliationTest : public BrokerTest {
 protected:
  static constexpr pid_t kClient = 1;
  static constexpr pid_t kOtherProcess = 0x7FFFFFF0;  // pid of no process

  ReconciliationTest() { Make({.overhead_allowance_bytes = 6_MiB}, {}, DeviceKind::kCuda); }

  SessionPtr OpenCounted(const std::string& name, uint64_t bytes) {
    client_ = std::make_shared<FakeClient>();
    const absl::StatusOr<SessionPtr> session =
        broker_->OpenSession(Process(kClient, 1000), {.name = name, .placement = Placement::kCounted}, client_);
    EXPECT_TRUE(session.ok()) << session.status();
    EXPECT_TRUE(pools_[0]->ChargeCounted((*session)->id(), bytes).ok());
    return *session;
  }
  // Sets the use of the first GPU's processes, and returns the reconciled processes.
  std::shared_ptr<const DeviceProcesses> Look(const std::vector<GpuProcess>& uses) {
    controls_[0]->set_processes(uses);
    broker_->reconciliation().Look(0);
    return broker_->reconciliation().Get(0);
  }
};

TEST_F(ReconciliationTest, NothingIsKnownUntilTheDriverTells) {
  EXPECT_EQ(broker_->reconciliation().Get(0)->status.code(), absl::StatusCode::kUnimplemented);
  controls_[0]->set_processes(absl::InternalError("nvml: lost"));
  broker_->reconciliation().Look(0);
  EXPECT_EQ(broker_->reconciliation().Get(0)->status.message(), "nvml: lost");
  EXPECT_TRUE(Look({})->status.ok());
}

TEST_F(ReconciliationTest, TheSensorsAreReadAtEachLook) {
  EXPECT_EQ(broker_->reconciliation().GetSensors(0).power_watts, std::nullopt);
  controls_[0]->set_sensors({.use_percent = 12, .temperature_celsius = std::nullopt, .power_watts = 70.5});
  controls_[0]->set_processes(absl::InternalError("nvml: lost"));
  broker_->reconciliation().Look(0);
  const GpuSensors sensors = broker_->operator_view().Look().devices[0].sensors;
  EXPECT_EQ(sensors.use_percent, 12);
  EXPECT_EQ(sensors.temperature_celsius, std::nullopt);
  EXPECT_EQ(sensors.power_watts, 70.5);
  EXPECT_EQ(broker_->reconciliation().GetSensors(1).use_percent, std::nullopt);
}

TEST_F(ReconciliationTest, OverheadIsWhatAProcessUsesBeyondWhatItIsCharged) {
  const SessionPtr session = OpenCounted("train", 20_MiB);
  const auto found = Look({{.pid = kClient, .bytes = 24_MiB}, {.pid = getpid(), .bytes = 3_MiB}});
  ASSERT_EQ(found->processes.size(), 2u);
  const ProcessView& client = found->processes[0];
  EXPECT_EQ(client.kind, ProcessView::Kind::kClient);
  EXPECT_EQ(client.session, session->id());
  EXPECT_EQ(client.used_bytes, 24_MiB);
  EXPECT_EQ(client.charged_bytes, 20_MiB);
  EXPECT_EQ(client.overhead_bytes, 4_MiB);
  EXPECT_EQ(client.drift_bytes, 0u);
  EXPECT_EQ(found->processes[1].kind, ProcessView::Kind::kDaemon);
  EXPECT_EQ(found->processes[1].overhead_bytes, 3_MiB);
  EXPECT_EQ(found->overhead_bytes, 7_MiB);
  EXPECT_EQ(found->drift_bytes + found->unused_bytes + found->uncounted_bytes, 0u);

  const BrokerView view = broker_->operator_view().Look();
  EXPECT_EQ(view.devices[0].processes, found);
  ASSERT_EQ(view.sessions.size(), 1u);
  EXPECT_EQ(view.sessions[0].devices[0].used_bytes, 24_MiB);
  EXPECT_EQ(view.sessions[0].devices[0].overhead_bytes, 4_MiB);
  EXPECT_EQ(view.sessions[0].devices[1].used_bytes, 0u) << "on the other GPU nothing is known";
  EXPECT_EQ(broker_->operator_view().Describe(*session).devices[0].used_bytes, 24_MiB);
}

TEST_F(ReconciliationTest, DriftIsWhatContextsDoNotTake) {
  const SessionPtr session = OpenCounted("train", 20_MiB);
  const auto beyond = Look({{.pid = kClient, .bytes = 40_MiB}});
  EXPECT_EQ(beyond->drift_bytes, 14_MiB);
  EXPECT_EQ(beyond->unused_bytes, 0u);
  const auto below = Look({{.pid = kClient, .bytes = 6_MiB}});
  EXPECT_EQ(below->drift_bytes, 0u);
  EXPECT_EQ(below->unused_bytes, 14_MiB) << "charged, and not on the GPU";
}

TEST_F(ReconciliationTest, WhatIsChargedOrGivenBackMeanwhileIsNoDifference) {
  const SessionPtr session = OpenCounted("train", 20_MiB);
  const auto look = [&](uint64_t used, const std::function<void()>& meanwhile) {
    controls_[0]->set_processes(std::vector<GpuProcess>{{.pid = kClient, .bytes = used}}, meanwhile);
    broker_->reconciliation().Look(0);
    const auto found = broker_->reconciliation().Get(0);
    return found->drift_bytes + found->unused_bytes;
  };
  for (const uint64_t used : {24_MiB, 44_MiB}) {
    EXPECT_EQ(look(used, [&] { EXPECT_TRUE(pools_[0]->ChargeCounted(session->id(), 20_MiB).ok()); }), 0u) << used;
    EXPECT_EQ(look(used, [&] { EXPECT_TRUE(pools_[0]->UnchargeCounted(session->id(), 20_MiB).ok()); }), 0u) << used;
  }
}

TEST_F(ReconciliationTest, SessionsOfAProcessAreComparedTogether) {
  const SessionPtr first = OpenCounted("first", 20_MiB);
  const SessionPtr second = OpenCounted("second", 10_MiB);
  const auto found = Look({{.pid = kClient, .bytes = 34_MiB}});
  EXPECT_EQ(found->overhead_bytes, 4_MiB);
  EXPECT_EQ(found->processes[0].session, first->id());
}

TEST_F(ReconciliationTest, AClientOfTheDaemonsMemoryHasItsContextAlone) {
  const SessionPtr session = Open("leased", std::nullopt, Process(kClient, 1000));
  const absl::StatusOr<SegmentId> segment = pools_[0]->Lease(session->id(), 20_MiB);
  ASSERT_TRUE(segment.ok());
  const auto found = Look({{.pid = kClient, .bytes = 4_MiB}, {.pid = getpid(), .bytes = 23_MiB}});
  EXPECT_EQ(found->processes[0].charged_bytes, 0u) << "what it has open is the daemon's";
  EXPECT_EQ(found->processes[0].overhead_bytes, 4_MiB);
  EXPECT_EQ(found->processes[1].charged_bytes, 20_MiB);
  EXPECT_EQ(found->processes[1].overhead_bytes, 3_MiB);
  EXPECT_EQ(found->unused_bytes, 0u);
}

TEST_F(ReconciliationTest, WhoHasNoSessionIsNamed) {
  const auto found = Look({{.pid = getppid(), .bytes = 9_MiB}, {.pid = kOtherProcess, .bytes = 1_MiB}});
  ASSERT_EQ(found->processes.size(), 2u);
  for (const ProcessView& process : found->processes) EXPECT_EQ(process.kind, ProcessView::Kind::kUncounted);
  EXPECT_FALSE(found->processes[0].name.empty());
  EXPECT_EQ(found->processes[1].name, "unknown") << "it has ended meanwhile";
  EXPECT_EQ(found->uncounted_bytes, 10_MiB);
  EXPECT_EQ(found->overhead_bytes, 0u);
}

TEST_F(ReconciliationTest, OneWorkerLooksAtEachGpu) {
  controls_[0]->set_processes(std::vector<GpuProcess>{{.pid = kOtherProcess, .bytes = 1_MiB}});
  broker_->reconciliation().Start();
  while (!broker_->reconciliation().Get(0)->status.ok()) std::this_thread::yield();
  EXPECT_EQ(broker_->reconciliation().Get(0)->uncounted_bytes, 1_MiB);
}

// The capacity is the free memory less 12 MiB for contexts. Another program has used up the 12 MiB.
TEST_F(ReconciliationTest, TheNextClientsContextIsLikeThoseThatThereAre) {
  Make({.overhead_allowance_bytes = 6_MiB}, {.headroom_bytes = 12_MiB}, DeviceKind::kCuda);
  const SessionPtr session = OpenCounted("train", 2_MiB);
  controls_[0]->set_foreign_bytes(20_MiB);
  ASSERT_TRUE(pools_[0]->UpdateHealth().ok());
  const uint64_t inferred = pools_[0]->GetStats().outside_bytes;
  Look({{.pid = kClient, .bytes = 6_MiB}, {.pid = kOtherProcess, .bytes = 14_MiB}});
  EXPECT_EQ(inferred - pools_[0]->GetStats().outside_bytes, 8_MiB) << "4 MiB for the next one, and not 12";
  broker_->CloseAll("done");
  Make({});
}

}  // namespace
}  // namespace vrambroker
