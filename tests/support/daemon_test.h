// SPDX-License-Identifier: Apache-2.0
#ifndef VRAMBROKER_TESTS_SUPPORT_DAEMON_TEST_H_
#define VRAMBROKER_TESTS_SUPPORT_DAEMON_TEST_H_

#include <gtest/gtest.h>

#include <iostream>
#include <memory>
#include <optional>
#include <string>

#include "absl/strings/match.h"
#include "client/vrambroker/client.h"
#include "tests/support/client_process.h"
#include "tests/support/daemon_process.h"
#include "tests/support/status_macros.h"

namespace vrambroker::testing_support {

// A test that starts a daemon. The daemon must end well: a sanitizer's finding in the daemon fails the test.
class DaemonTest : public ::testing::Test {
 protected:
  absl::Status StartDaemon(const DaemonOptions& options = {}) {
    absl::StatusOr<std::unique_ptr<DaemonProcess>> daemon = DaemonProcess::Start(options);
    if (!daemon.ok()) return daemon.status();
    daemon_ = *std::move(daemon);
    return absl::OkStatus();
  }

  void TearDown() override {
    if (daemon_ == nullptr) return;
    if (daemon_->Running()) {
      const absl::StatusOr<int> exit_code = daemon_->Stop();
      EXPECT_TRUE(exit_code.ok() && *exit_code == 0) << exit_code.status() << " " << exit_code.value_or(-1);
    }
    if (HasFailure()) std::cerr << "---- the daemon's log ----\n" << daemon_->log() << "----\n";
  }

  const std::string& dir() const { return daemon_->socket_dir(); }

  absl::StatusOr<Client> Connect(const std::string& name, std::optional<Limit> limit = std::nullopt) {
    ClientOptions options;
    options.socket_dir = dir();
    options.name = name;
    options.limit = limit;
    options.placement = placement_;
    options.call_timeout = kPatience;
    options.connect_timeout = kPatience;
    return Client::Connect(options);
  }
  absl::StatusOr<ClientProcess> ConnectProcess(const std::string& name, const std::string& limit = "-") {
    return ClientProcess::Connect(dir(), name, limit);
  }

  std::unique_ptr<DaemonProcess> daemon_;
  Placement placement_ = Placement::kLeased;  // is for Connect(); remote where a test reads figures at once
};

}  // namespace vrambroker::testing_support

#endif  // VRAMBROKER_TESTS_SUPPORT_DAEMON_TEST_H_
