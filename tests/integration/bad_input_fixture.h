// SPDX-License-Identifier: Apache-2.0
#ifndef VRAMBROKER_TESTS_INTEGRATION_BAD_INPUT_FIXTURE_H_
#define VRAMBROKER_TESTS_INTEGRATION_BAD_INPUT_FIXTURE_H_

#include <google/protobuf/util/message_differencer.h>
#include <gtest/gtest.h>

#include <optional>

#include "tests/support/daemon_test.h"
#include "tests/support/raw_client.h"

namespace vrambroker::testing_support {

// A daemon with a witness: another process that holds memory. Bad input must not change the witness's memory.
class BadInputTest : public DaemonTest {
 protected:
  void SetUp() override { Begin({}); }

  void Begin(const DaemonOptions& options) {
    witness_.reset();
    ASSERT_OK(StartDaemon(options));
    auto witness = ConnectProcess("witness");
    ASSERT_OK(witness);
    witness_.emplace(*std::move(witness));
    ASSERT_OK(witness_->Call("fill 4 100000 77"));
    ASSERT_OK_AND_ASSIGN(RawClient raw, RawClient::Connect(dir()));
    raw_.emplace(std::move(raw));
    ASSERT_OK_AND_ASSIGN(before_, raw_->GetSession(Ref("witness")));
  }

  void TearDown() override {
    if (!HasFatalFailure()) ExpectUnharmed();
    witness_.reset();
    raw_.reset();
    DaemonTest::TearDown();
  }

  // Checks that the daemon serves, and that the witness still has its memory in the daemon's books and in fact.
  void ExpectUnharmed() {
    ASSERT_TRUE(daemon_->Running());
    ASSERT_OK_AND_ASSIGN(RawClient fresh, RawClient::Connect(dir()));
    ASSERT_OK_AND_ASSIGN(const v1::Session now, fresh.GetSession(Ref("witness")));
    EXPECT_TRUE(google::protobuf::util::MessageDifferencer::Equals(Lasting(before_), Lasting(now)))
        << before_.DebugString() << now.DebugString();
    EXPECT_OK(witness_->Call("check 77"));
    // The sessions and the device agree on the charged bytes.
    EXPECT_TRUE(WaitFor([&] {
      const auto sessions = fresh.ListSessions();
      const auto device = fresh.GetDevice();
      if (!sessions.ok() || !device.ok()) return false;
      uint64_t sum = 0;
      for (const v1::Session& session : sessions->sessions()) sum += session.devices(0).reserved_bytes();
      return sum == device->reserved_bytes() - device->idle_bytes();
    }));
  }

  uint64_t WitnessId() const { return before_.id(); }

  std::optional<ClientProcess> witness_;
  std::optional<RawClient> raw_;
  v1::Session before_;
};

}  // namespace vrambroker::testing_support

#endif  // VRAMBROKER_TESTS_INTEGRATION_BAD_INPUT_FIXTURE_H_
