// SPDX-License-Identifier: Apache-2.0
//
// A driver with calls failing once. Memory refused to a program is not counted, and memory still held is counted.
#include <gtest/gtest.h>

#include <cstdint>
#include <ostream>
#include <string>

#include "absl/strings/str_cat.h"
#include "tests/preload/preload_fixture.h"

namespace vrambroker::testing_support {
namespace {

struct Kind {
  const char* name;
  const char* allocates;  // documented name of the driver's function
  const char* frees;
  uint64_t mib = 20;      // size of an allocation
  uint64_t counted = 20;  // amount counted for an allocation
};

void PrintTo(const Kind& kind, std::ostream* to) {
  *to << kind.name;
}

class PreloadFailure : public PreloadTest, public ::testing::WithParamInterface<Kind> {};

TEST_P(PreloadFailure, ChangesNothing) {
  const Kind& kind = GetParam();
  StartDaemon("128MiB");
  Program program =
      Run("dlsym", {{"VRAMBROKER_LIMIT", "128MiB"},
                    {cuda_substitute::kFaultsVariable,
                     absl::StrCat(kind.allocates, ":1=2,", kind.allocates, ":3=999,", kind.frees, ":1=1")}});
  ASSERT_EQ(program.Ask("stream"), "0");
  ASSERT_EQ(program.Ask("pool"), "0");
  const std::string allocate = absl::StrCat("alloc ", kind.name, " ", kind.mib, "M");
  EXPECT_EQ(program.Ask(allocate), "2");
  EXPECT_EQ(program.Ask("info"), Info(128, 128));
  EXPECT_EQ(program.Ask(allocate), "0");
  EXPECT_EQ(program.Ask("info"), Info(128 - kind.counted, 128));
  EXPECT_EQ(program.Ask(allocate), "999");
  EXPECT_EQ(program.Ask("info"), Info(128 - kind.counted, 128));
  EXPECT_EQ(program.Ask("free 1"), "1");
  EXPECT_EQ(program.Ask("info"), Info(128 - kind.counted, 128)) << "the driver has not freed it";
  EXPECT_EQ(program.Ask("free 1"), "0");
  EXPECT_EQ(program.Ask("info"), Info(128, 128));
}

INSTANTIATE_TEST_SUITE_P(All, PreloadFailure,
                         ::testing::Values(Kind{"plain", "cuMemAlloc", "cuMemFree"},
                                           Kind{"managed", "cuMemAllocManaged", "cuMemFree"},
                                           Kind{"pitch", "cuMemAllocPitch", "cuMemFree"},
                                           Kind{"plain32", "cuMemAlloc", "cuMemFree"},
                                           Kind{"array", "cuArrayCreate", "cuArrayDestroy"},
                                           Kind{"array3d", "cuArray3DCreate", "cuArrayDestroy"},
                                           Kind{"mipmapped", "cuMipmappedArrayCreate", "cuMipmappedArrayDestroy"},
                                           Kind{"handle", "cuMemCreate", "cuMemRelease"},
                                           Kind{"async", "cuMemAllocAsync", "cuMemFreeAsync", 20, 32},
                                           Kind{"pool", "cuMemAllocFromPoolAsync", "cuMemFreeAsync", 20, 32}),
                         [](const auto& each) { return std::string(each.param.name); });

class PreloadFailures : public PreloadTest {
 protected:
  Program RunWithFaults(const std::string& faults) {
    StartDaemon("64MiB");
    Program program = Run("dlsym", {{"VRAMBROKER_LIMIT", "64MiB"}, {cuda_substitute::kFaultsVariable, faults}});
    EXPECT_EQ(program.Ask("stream"), "0");
    EXPECT_EQ(program.Ask("pool"), "0");
    return program;
  }
};

TEST_F(PreloadFailures, APoolThatIsNotDestroyedStaysCounted) {
  Program program = RunWithFaults("cuMemPoolDestroy:1=1");
  EXPECT_EQ(program.Ask("new_pool 6:0 pinned"), "0");  // a device pool's destruction might be delayed
  EXPECT_EQ(program.Ask("keep"), "0");
  EXPECT_EQ(program.Ask("alloc pool 20M"), "0");
  EXPECT_EQ(program.Ask("destroy_pool"), "1");
  EXPECT_EQ(program.Ask("info"), Info(32, 64));
  EXPECT_EQ(program.Ask("free 0"), "0");
  EXPECT_EQ(program.Ask("info"), Info(32, 64)) << "the pool keeps it";
  EXPECT_EQ(program.Ask("alloc pool 40M"), "2") << "the driver takes 64 MiB";
  EXPECT_EQ(program.Ask("destroy_pool"), "0");
  EXPECT_EQ(program.Ask("info"), Info(64, 64));
}

// The pool has 32 MiB. A failed allocation or free does not change the room counted by the library.
TEST_F(PreloadFailures, AFailedCallTakesNoRoomOfItsPool) {
  Program program = RunWithFaults("cuMemAllocAsync:2=999,cuMemFreeAsync:1=1");
  EXPECT_EQ(program.Ask("alloc async 4M"), "0");
  EXPECT_EQ(program.Ask("alloc async 20M"), "999");
  EXPECT_EQ(program.Ask("alloc plain 32M"), "0") << "the limit is reached";
  EXPECT_EQ(program.Ask("alloc async 20M"), "0");
  EXPECT_EQ(program.Ask("free 3"), "1");
  EXPECT_EQ(program.Ask("free 3"), "0");
  EXPECT_EQ(program.Ask("alloc async 20M"), "0");
  EXPECT_EQ(program.Ask("info"), Info(0, 64));
}

// The handle has a mapping and two references.
TEST_F(PreloadFailures, AReferenceThatIsNotReleasedCountsFurther) {
  Program program = RunWithFaults("cuMemRelease:2=1");
  EXPECT_EQ(program.Ask("alloc mapped 20M"), "0") << "releases its first reference";
  EXPECT_EQ(program.Ask("retain 0"), "0");
  EXPECT_EQ(program.Ask("release 0"), "1");
  EXPECT_EQ(program.Ask("free 0"), "0");
  EXPECT_EQ(program.Ask("info"), Info(44, 64));
  EXPECT_EQ(program.Ask("release 0"), "0");
  EXPECT_EQ(program.Ask("info"), Info(64, 64));
}

TEST_F(PreloadFailures, WhatIsNotUnmappedCountsFurther) {
  Program program = RunWithFaults("cuMemUnmap:1=1");
  EXPECT_EQ(program.Ask("alloc mapped 20M"), "0");
  EXPECT_EQ(program.Ask("free 0"), "1");
  EXPECT_EQ(program.Ask("info"), Info(44, 64));
  EXPECT_EQ(program.Ask("free 0"), "0");
  EXPECT_EQ(program.Ask("info"), Info(64, 64));
}

// The command "free" unmaps all mappings of the handle by a single call, and the call fails.
TEST_F(PreloadFailures, AHandleThatIsNotUnmappedCountsUntilItsLastMappingHasGone) {
  constexpr int kMappings = 16;
  Program program = RunWithFaults("cuMemUnmap:1=1");
  EXPECT_EQ(program.Ask(absl::StrCat("map_same ", kMappings, " 2M")), "0");
  EXPECT_EQ(program.Ask("free 0"), "1");
  for (int i = 0; i < kMappings; ++i) {
    EXPECT_EQ(program.Ask("info"), Info(62, 64)) << i;
    EXPECT_EQ(program.Ask(absl::StrCat("unmap 0:", i, " 2M")), "0");
  }
  EXPECT_EQ(program.Ask("info"), Info(64, 64));
}

TEST_F(PreloadFailures, AnArrayThatIsNotDestroyedKeepsWhatIsMappedIntoIt) {
  Program program = RunWithFaults("cuMemMapArrayAsync:2=1,cuArrayDestroy:1=1");
  EXPECT_EQ(program.Ask("alloc array_sparse 64M"), "0");
  EXPECT_EQ(program.Ask("alloc handle 10M"), "0");
  EXPECT_EQ(program.Ask("map_tile 0 1"), "0");
  EXPECT_EQ(program.Ask("release 1"), "0");
  EXPECT_EQ(program.Ask("unmap_tile 0"), "1");
  EXPECT_EQ(program.Ask("info"), Info(54, 64));
  EXPECT_EQ(program.Ask("free 0"), "1");
  EXPECT_EQ(program.Ask("info"), Info(54, 64));
  EXPECT_EQ(program.Ask("free 0"), "0");
  EXPECT_EQ(program.Ask("info"), Info(64, 64));
}

TEST_F(PreloadFailures, AMappingThatIsNotMadeKeepsNothing) {
  Program program = RunWithFaults("cuMemMap:1=1");
  EXPECT_EQ(program.Ask("alloc mapped 20M"), "1");
  EXPECT_EQ(program.Ask("info"), Info(44, 64)) << "the handle has it";
  EXPECT_EQ(program.Ask("release 0"), "0");
  EXPECT_EQ(program.Ask("info"), Info(64, 64));
}

TEST_F(PreloadFailures, AContextThatIsNotDestroyedKeepsItsMemory) {
  Program program = RunWithFaults("cuCtxDestroy:1=1,cuDevicePrimaryCtxReset:1=1");
  EXPECT_EQ(program.Ask("alloc plain 8M"), "0");
  EXPECT_EQ(program.Ask("context"), "0");
  EXPECT_EQ(program.Ask("alloc plain 8M"), "0");
  EXPECT_EQ(program.Ask("alloc array 8M"), "0");
  EXPECT_EQ(program.Ask("destroy_context"), "1");
  EXPECT_EQ(program.Ask("info"), Info(40, 64));
  EXPECT_EQ(program.Ask("reset"), "1");
  EXPECT_EQ(program.Ask("info"), Info(40, 64));
  EXPECT_EQ(program.Ask("deep destroy_context"), "0");
  EXPECT_EQ(program.Ask("info"), Info(56, 64)) << "the context still has its memory";
  EXPECT_EQ(program.Ask("deep reset"), "0");
  EXPECT_EQ(program.Ask("info"), Info(64, 64));
}

TEST_F(PreloadFailures, AGraphThatIsNotMadeOrLaunchedTakesNothing) {
  Program program = RunWithFaults("cuGraphInstantiate:1=1,cuGraphLaunch:1=1");
  EXPECT_EQ(program.Ask("graph 20M"), "1");
  EXPECT_EQ(program.Ask("graph 20M"), "1");
  EXPECT_EQ(program.Ask("info"), Info(64, 64));
  EXPECT_EQ(program.Ask("graph 20M"), "0");
  EXPECT_EQ(program.Ask("info"), Info(44, 64));
}

}  // namespace
}  // namespace vrambroker::testing_support
