// SPDX-License-Identifier: Apache-2.0
#ifndef VRAMBROKER_TESTS_SUPPORT_VRAMCTL_TEST_H_
#define VRAMBROKER_TESTS_SUPPORT_VRAMCTL_TEST_H_

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "tests/support/daemon_test.h"
#include "tests/support/util.h"

namespace vrambroker::testing_support {

// A test that runs vramctl against the test's daemon.
class VramctlDaemonTest : public DaemonTest {
 protected:
  using Json = nlohmann::json;

  RunResult Ctl(Arguments arguments) {
    arguments.insert(arguments.begin(), VramctlProgram());
    arguments.push_back("--socket_dir=" + dir());
    return RunProgram(arguments);
  }
  // Returns the output of a command that must succeed, parsed as JSON.
  Json CtlJson(Arguments arguments) {
    arguments.push_back("--format=json");
    const RunResult result = Ctl(arguments);
    EXPECT_EQ(result.exit_code, 0) << result.err;
    Json json = Json::parse(result.out, nullptr, /*allow_exceptions=*/false);
    EXPECT_FALSE(json.is_discarded()) << result.out;
    return json;
  }
};

}  // namespace vrambroker::testing_support

#endif  // VRAMBROKER_TESTS_SUPPORT_VRAMCTL_TEST_H_
