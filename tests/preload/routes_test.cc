// SPDX-License-Identifier: Apache-2.0
//
// Programs unaware of vrambroker, under libvrambroker-preload.so, with a daemon on the substitute's GPUs.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "absl/strings/str_cat.h"
#include "tests/preload/preload_fixture.h"

namespace vrambroker::testing_support {
namespace {

using ::testing::StartsWith;

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
                                           "proc2", "proc_itself", "proc_newer", "proc2_newer", "proc_newest",
                                           "proc2_newest", "proc_both", "proc2_both"),
                         [](const auto& route) { return route.param; });

class PreloadRoutes : public PreloadTest {};

TEST_F(PreloadRoutes, PythonIsHeldToItsLimit) {
  StartDaemon("64MiB");
  for (const std::string mode : {"default", "deepbind"}) {
    const std::string script = std::string(paths::kSourceDir) + "/tests/preload/ctypes_probe.py";
    const RunResult result = RunProgram({paths::kPython, script, mode}, Preloaded({{"VRAMBROKER_LIMIT", "16MiB"}}));
    EXPECT_EQ(result.out, "8 2\n") << mode << result.err;
  }
}

// The library adds no function missing in the driver.
TEST_F(PreloadRoutes, WhatIsMissingStaysMissing) {
  Environment environment = Preloaded();
  environment[1].second = FolderOf(paths::kOldDriver);
  const auto missing = [&](const Environment& with) {
    return Program(ChildProcess::Start({paths::kPreloadProbe, "dlsym"}, with).value()).Ask("missing");
  };
  const std::string with = missing(environment);
  environment[0].second = "";
  EXPECT_EQ(with, missing(environment));
  EXPECT_THAT(with, StartsWith("0 ")) << "the program has looked";
  EXPECT_NE(with, "0 0");
}

TEST_F(PreloadRoutes, WithoutADriverNoneOfItsFunctionsIsFound) {
  Program program = Run("none");
  EXPECT_EQ(program.Ask("find cuMemAlloc_v2"), "0 no error");
  EXPECT_EQ(program.Ask("find nvmlDeviceGetMemoryInfo"), "0 no error");
  EXPECT_EQ(program.Ask("find getpid"), "0 yes no error");
  Program linked = Run("linked");
  EXPECT_EQ(linked.Ask("find cuMemAlloc_v2"), "0 yes no error");
  EXPECT_EQ(linked.Ask("find cuNoSuchFunction"), "0 no error");
}

// Other interposers claim every name beginning with "cu", and recurse (HAMi-core #215). A second library in front of
// dlsym breaks such interposers.
TEST_F(PreloadRoutes, AnotherPreloadedLibraryWorks) {
  StartDaemon("64MiB");
  const std::string ours = paths::kPreload;
  const std::string other = paths::kPreloadOther;
  for (const std::string& libraries : {ours + ":" + other, other + ":" + ours}) {
    SCOPED_TRACE(libraries);
    Program program = Run("dlsym", {{"LD_PRELOAD", libraries}, {"VRAMBROKER_LIMIT", "16MiB"}});
    EXPECT_EQ(program.Ask("alloc plain 16M"), "0");
    EXPECT_EQ(program.Ask("alloc plain 2M"), "2");
    EXPECT_THAT(program.ErrorText(), ::testing::HasSubstr("other library: dlsym"));
    EXPECT_EQ(program.Ask("call getpid_of_other"), absl::StrCat("0 ", program.process().pid()));
    EXPECT_EQ(program.Ask("call cudnnCreate"), "0 77");
  }
}

// RTLD_NEXT means the next library after the caller, not after this library.
TEST_F(PreloadRoutes, NextMeansTheCallersNext) {
  Program program = Run("none");
  EXPECT_EQ(program.Ask("next getpid"), "0 yes");
  EXPECT_EQ(program.Ask("next main"), "0 no");
}

TEST_F(PreloadRoutes, AProgramThatDoesNotAllocateHasNoThreadAndNoSocket) {
  Program without = Run("none", {{"LD_PRELOAD", ""}});
  Program with = Run("none");
  EXPECT_EQ(with.Ask("census"), without.Ask("census"));
}

TEST_F(PreloadRoutes, AThreadThatIsCancelledLeavesNothingLocked) {
  StartDaemon("64MiB");
  Program one = Run("dlsym");
  EXPECT_EQ(one.Ask("alloc plain 60M"), "0");
  Program program = Run("dlsym", {{"VRAMBROKER_WAIT", "100ms"}});
  EXPECT_EQ(program.Ask("cancel 60M"), "0");
  EXPECT_EQ(program.Ask("alloc plain 2M"), "0");
}

}  // namespace
}  // namespace vrambroker::testing_support
