// SPDX-License-Identifier: Apache-2.0
#ifndef VRAMBROKER_TESTS_INTEGRATION_COUNT_SOCKET_FIXTURE_H_
#define VRAMBROKER_TESTS_INTEGRATION_COUNT_SOCKET_FIXTURE_H_

#include <gtest/gtest.h>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "allocator/base/bytes.h"
#include "tests/support/count_client.h"
#include "tests/support/raw_client.h"
#include "tests/support/vramctl_test.h"

namespace vrambroker::testing_support {

// A daemon with 256 MiB, and programs that keep their own memory and have the daemon count the memory.
class CountSocketTest : public VramctlDaemonTest {
 protected:
  void Begin(const DaemonOptions& options = {}) {
    ASSERT_OK(StartDaemon(options));
    ASSERT_NO_FATAL_FAILURE(Look());
  }
  // Connects raw_ anew. Call Look() after each start of the daemon.
  void Look() {
    ASSERT_OK_AND_ASSIGN(RawClient raw, RawClient::Connect(dir()));
    raw_.emplace(std::move(raw));
  }
  void TearDown() override {
    raw_.reset();
    DaemonTest::TearDown();
  }

  absl::StatusOr<CountClient> Open(const std::string& name) { return CountClient::Open(dir(), CountHello(name)); }
  absl::StatusOr<CountClient> Open(const std::string& name, uint64_t limit_bytes) {
    return CountClient::Open(dir(), CountHello(name, limit_bytes));
  }
  // Starts another process with a counted session.
  absl::StatusOr<ClientProcess> OpenProcess(const std::string& name, const std::string& limit = "-") {
    absl::StatusOr<ClientProcess> process = ClientProcess::Start(dir());
    if (!process.ok()) return process;
    if (const auto done = process->Call("count_hello " + name + " " + limit); !done.ok()) return done.status();
    return process;
  }

  uint64_t Reserved(const std::string& name) { return ListedDevice(dir(), name).reserved_bytes(); }
  // Returns the reserved bytes of all sessions.
  uint64_t SumOfSessions() {
    const absl::StatusOr<v1::ListSessionsResponse> sessions = raw_->ListSessions();
    if (!sessions.ok()) return ~uint64_t{0};
    uint64_t sum = 0;
    for (const v1::Session& session : sessions->sessions()) sum += session.devices(0).reserved_bytes();
    return sum;
  }
  // Returns the bytes that the device's books charge to sessions.
  uint64_t OnDevice() {
    const absl::StatusOr<v1::Device> device = raw_->GetDevice();
    return device.ok() ? device->reserved_bytes() - device->idle_bytes() : ~uint64_t{0};
  }
  // Checks that the sessions and the device agree on `bytes` as charged, now or soon.
  ::testing::AssertionResult IsCharged(uint64_t bytes) {
    if (WaitFor([&] { return SumOfSessions() == bytes && OnDevice() == bytes; })) return ::testing::AssertionSuccess();
    return ::testing::AssertionFailure() << "the sessions have " << SumOfSessions() << ", the device counts "
                                         << OnDevice() << ", expected " << bytes;
  }
  // Returns the number of waiting requests of all sessions; -1 if the call fails.
  int Waiting() {
    const absl::StatusOr<v1::ListSessionsResponse> sessions = raw_->ListSessions();
    if (!sessions.ok()) return -1;
    int sum = 0;
    for (const v1::Session& session : sessions->sessions()) sum += session.devices(0).waiting_size();
    return sum;
  }
  ::testing::AssertionResult Waits(int requests) {
    if (WaitFor([&] { return Waiting() == requests; })) return ::testing::AssertionSuccess();
    return ::testing::AssertionFailure() << Waiting() << " wait, expected " << requests;
  }
  std::string StateOf(const std::string& name) {
    const absl::StatusOr<v1::Session> session = raw_->GetSession(Ref(name));
    return session.ok() ? v1::SessionState_Name(session->state()) : std::string(session.status().message());
  }

  std::optional<RawClient> raw_;
};

}  // namespace vrambroker::testing_support

#endif  // VRAMBROKER_TESTS_INTEGRATION_COUNT_SOCKET_FIXTURE_H_
