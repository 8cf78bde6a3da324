// SPDX-License-Identifier: Apache-2.0
//
// Programs that know nothing of vrambroker, under libvrambroker-preload.so, with a daemon on the substitute's GPUs.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "tests/preload/preload_fixture.h"

namespace vrambroker::testing_support {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr char kOk[] = "0";
constexpr char kOutOfMemory[] = "2";

// --- Routes ---

class PreloadRoute : public PreloadTest, public ::testing::WithParamInterface<std::string> {};

TEST_P(PreloadRoute, IsHeldToTheLimitExactly) {
  StartDaemon("64MiB");
  Program program = Run(GetParam(), {{"VRAMBROKER_LIMIT", "16MiB"}});
  EXPECT_EQ(program.Ask("alloc plain 10M"), kOk);
  EXPECT_EQ(program.Ask("alloc plain 8M"), kOutOfMemory);
  EXPECT_EQ(program.Ask("alloc plain 6M"), kOk);
  EXPECT_EQ(program.Ask("alloc plain 1"), kOutOfMemory);
  EXPECT_EQ(program.Ask("info"), "0 0 16777216");
  EXPECT_EQ(program.Ask("free 0"), kOk);
  EXPECT_EQ(program.Ask("info"), "0 10485760 16777216");
  EXPECT_EQ(program.Ask("total"), "0 16777216");
  EXPECT_EQ(program.Ask("alloc plain 10M"), kOk);
}

INSTANTIATE_TEST_SUITE_P(All, PreloadRoute,
                         ::testing::Values("linked", "dlsym", "default", "dlvsym", "dlmopen", "deepbind", "proc",
                                           "proc2", "proc_itself"),
                         [](const auto& route) { return route.param; });

}  // namespace
}  // namespace vrambroker::testing_support
