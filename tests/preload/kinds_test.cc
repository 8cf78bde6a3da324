// SPDX-License-Identifier: Apache-2.0
//
// Every kind of memory, by every route: the counted amount, and the release.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/preload/preload_fixture.h"
#include "tests/support/util.h"

namespace vrambroker::testing_support {
namespace {

using ::testing::HasSubstr;

class PreloadKind : public PreloadTest, public ::testing::WithParamInterface<std::tuple<std::string, std::string>> {
 protected:
  const std::string route_ = std::get<0>(GetParam());
  const std::string kind_ = std::get<1>(GetParam());
  // A pool reserves 32 MiB at once.
  const bool of_pool_ = kind_ == "async" || kind_ == "pool";
  const uint64_t unit_ = of_pool_ ? 32 : 8;
  const std::string alloc_ = absl::StrCat("alloc ", kind_, " ", of_pool_ ? 20 : 8, "M");
};

TEST_P(PreloadKind, IsHeldToTheLimitAndGivenBack) {
  StartDaemon("128MiB");
  const uint64_t before = UsedOnMachine();
  Program program = Run(route_, {{"VRAMBROKER_LIMIT", absl::StrCat(2 * unit_, "MiB")}});
  ASSERT_EQ(program.Ask("stream"), "0");
  ASSERT_EQ(program.Ask("pool"), "0");
  ASSERT_EQ(program.Ask(alloc_), "0");
  ASSERT_EQ(program.Ask(alloc_), "0");
  EXPECT_EQ(program.Ask("info"), Info(0, 2 * unit_));
  EXPECT_EQ(program.Ask(alloc_), "2");
  EXPECT_EQ(program.Ask("info"), Info(0, 2 * unit_));
  EXPECT_EQ(UsedOnMachine() - before, 2 * unit_ * kMiB);
  EXPECT_EQ(program.Ask("free 0"), "0");
  EXPECT_EQ(program.Ask("info"), Info(unit_, 2 * unit_));
  EXPECT_EQ(program.Ask(alloc_), "0");
  EXPECT_EQ(program.Ask("free 1"), "0");
  EXPECT_EQ(program.Ask("free 3"), "0");
  EXPECT_EQ(program.Ask("info"), Info(2 * unit_, 2 * unit_));
  EXPECT_EQ(UsedOnMachine(), before);
  EXPECT_THAT(program.ErrorText(), HasSubstr("refused: "));
}

INSTANTIATE_TEST_SUITE_P(
    All, PreloadKind,
    ::testing::Combine(::testing::Values("linked", "dlsym", "default", "dlmopen", "proc", "proc2", "proc2_newer",
                                         "proc2_newest", "proc2_both"),
                       ::testing::Values("plain", "managed", "pitch", "array", "array3d", "mipmapped", "handle",
                                         "mapped", "async", "pool", "plain32", "pitch32", "array32", "array3d32")),
    [](const auto& each) { return absl::StrCat(std::get<0>(each.param), "_", std::get<1>(each.param)); });

class PreloadKinds : public PreloadTest {
 protected:
  void SetUp() override { StartDaemon("128MiB"); }
  Program RunWithStream(const Environment& environment = {{"VRAMBROKER_LIMIT", "64MiB"}}) {
    Program program = Run("dlsym", environment);
    EXPECT_EQ(program.Ask("stream"), "0");
    return program;
  }
};

// The driver does not report an array's size.
TEST_F(PreloadKinds, ArraysCountByTheirFormat) {
  Program program = RunWithStream();
  const uint64_t before = UsedOnMachine();
  EXPECT_EQ(program.Ask("alloc array:0x91:4 32M"), "0") << "BC1, 8 Mi elements";
  EXPECT_EQ(program.Ask("info"), Info(60, 64));
  EXPECT_EQ(program.Ask("alloc array:0xb0:3 32M"), "0") << "NV12";
  EXPECT_EQ(program.Ask("info"), Info(48, 64));
  EXPECT_EQ(program.Ask("alloc array:0xc2:4 32M"), "0") << "UNORM_INT8X4";
  EXPECT_EQ(program.Ask("info"), Info(16, 64));
  EXPECT_EQ(UsedOnMachine() - before, 48 * kMiB);
  EXPECT_EQ(program.Ask("alloc array:0xc2:4 32M"), "2");
  EXPECT_EQ(program.Ask("alloc array:0x7f:1 8M"), "1") << "no format of the driver's";
  for (int i = 0; i < 3; ++i) EXPECT_EQ(program.Ask(absl::StrCat("free ", i)), "0");
  EXPECT_EQ(program.Ask("info"), Info(64, 64));
}

TEST_F(PreloadKinds, EveryLevelOfAMipmappedArrayCounts) {
  Program program = RunWithStream();
  EXPECT_EQ(program.Ask("alloc mipmapped:2 8M"), "0") << "the second level has a quarter";
  EXPECT_EQ(program.Ask("info"), Info(54, 64));
  EXPECT_EQ(program.Ask("free 0"), "0");
  EXPECT_EQ(program.Ask("info"), Info(64, 64));
}

// The mapping alone keeps the memory.
TEST_F(PreloadKinds, MemoryThatIsMappedIntoASparseArrayCounts) {
  Program program = RunWithStream();
  const uint64_t before = UsedOnMachine();
  EXPECT_EQ(program.Ask("alloc array_sparse 64M"), "0");
  EXPECT_EQ(program.Ask("info"), Info(64, 64)) << "nothing is in it";
  for (int handle = 1; handle <= 3; ++handle) EXPECT_EQ(program.Ask("alloc handle 10M"), "0");
  const auto map = [&](int handle) {
    EXPECT_EQ(program.Ask(absl::StrCat("map_tile 0 ", handle)), "0");
    EXPECT_EQ(program.Ask(absl::StrCat("release ", handle)), "0");
  };
  map(1);
  EXPECT_EQ(program.Ask("info"), Info(34, 64));
  map(2);
  EXPECT_EQ(program.Ask("info"), Info(44, 64)) << "the second one has taken the first one's place";
  EXPECT_EQ(program.Ask("unmap_tile 0"), "0");
  EXPECT_EQ(program.Ask("info"), Info(54, 64));
  map(3);
  EXPECT_EQ(program.Ask("info"), Info(54, 64));
  EXPECT_EQ(UsedOnMachine() - before, 10 * kMiB);
  EXPECT_EQ(program.Ask("free 0"), "0");
  EXPECT_EQ(program.Ask("info"), Info(64, 64));
  EXPECT_EQ(UsedOnMachine(), before);
}

// The other tile of the same mapping stays mapped. A deferred array has no parts.
TEST_F(PreloadKinds, ATileThatIsUnmappedAloneGivesNothingBack) {
  for (const auto& [array, left] : std::vector<std::pair<std::string, uint64_t>>{{"sparse", 54}, {"deferred", 64}}) {
    Program program = RunWithStream();
    EXPECT_EQ(program.Ask(absl::StrCat("alloc array_", array, " 64M")), "0");
    EXPECT_EQ(program.Ask("alloc handle 10M"), "0");
    EXPECT_EQ(program.Ask("map_tiles 0 1"), "0");
    EXPECT_EQ(program.Ask("release 1"), "0");
    EXPECT_EQ(program.Ask("unmap_tile 0"), "0");
    EXPECT_EQ(program.Ask("info"), Info(left, 64)) << array;
    EXPECT_EQ(program.Ask("free 0"), "0");
    EXPECT_EQ(program.Ask("info"), Info(64, 64)) << array;
  }
}

// NCCL asks for host memory by handle. Other interposers count host memory, and crash (HAMi-core #187, #169).
TEST_F(PreloadKinds, HandlesOfHostMemoryPassThrough) {
  Program program = RunWithStream({{"VRAMBROKER_LIMIT", "4MiB"}});
  EXPECT_EQ(program.Ask("alloc handle:2:0 64M"), "0");
  EXPECT_EQ(program.Ask("alloc handle:3:0 64M"), "0");
  EXPECT_EQ(program.Ask("info"), Info(4, 4));
  EXPECT_EQ(program.Ask("free 0"), "0");
  EXPECT_EQ(program.Ask("free 1"), "0");
}

// Location types unknown to this library may belong to the GPU, too.
TEST_F(PreloadKinds, HandlesOfLocationsThatAreNotKnownToBeTheHostsAreCharged) {
  Program program = RunWithStream();
  ASSERT_EQ(program.Ask("device 1"), "0");
  EXPECT_EQ(program.Ask("alloc handle:6:256 20M"), "0") << "domain 1 of device 0";
  EXPECT_EQ(program.Ask("info"), Info(64, 64));
  EXPECT_EQ(program.Ask("alloc handle:7:0 10M"), "0") << "a type that is not known: the thread's device";
  EXPECT_EQ(program.Ask("info"), Info(54, 64));
  EXPECT_EQ(program.Ask("alloc handle:7:0 56M"), "2");
  EXPECT_EQ(program.Ask("device 0"), "0");
  EXPECT_EQ(program.Ask("info"), Info(44, 64));
  EXPECT_EQ(program.Ask("alloc handle:6:0 46M"), "2");
  EXPECT_EQ(program.Ask("free 0"), "0");
  EXPECT_EQ(program.Ask("info"), Info(64, 64));
}

TEST_F(PreloadKinds, PoolsOfLocationsThatAreNotKnownToBeTheHostsAreCharged) {
  for (const std::string pool : {"new_pool", "default_pool", "current_pool"}) {
    for (const std::string location : {"6:1 pinned", "7:0 pinned", "0:0 managed", "1:1 managed", "2:0 managed"}) {
      SCOPED_TRACE(pool + " " + location);
      Program program = RunWithStream();
      ASSERT_EQ(program.Ask("device 1"), "0");
      ASSERT_EQ(program.Ask(absl::StrCat(pool, " ", location)), "0");
      ASSERT_EQ(program.Ask("device 0"), "0");  // the pool's device differs from the stream's device
      EXPECT_EQ(program.Ask("alloc pool 20M"), "0");
      EXPECT_EQ(program.Ask("info"), Info(64, 64));
      EXPECT_EQ(program.Ask("alloc pool 60M"), "2");
      ASSERT_EQ(program.Ask("device 1"), "0");
      EXPECT_EQ(program.Ask("info"), Info(32, 64));
    }
  }
}

TEST_F(PreloadKinds, PoolsOfHostMemoryPassThrough) {
  for (const std::string pool : {"new_pool", "default_pool", "current_pool"}) {
    for (const std::string location : {"2:0 pinned", "3:0 pinned"}) {
      SCOPED_TRACE(pool + " " + location);
      Program program = RunWithStream({{"VRAMBROKER_LIMIT", "4MiB"}});
      ASSERT_EQ(program.Ask(absl::StrCat(pool, " ", location)), "0");
      EXPECT_EQ(program.Ask("alloc pool 300M"), "0");
      EXPECT_EQ(program.Ask("info"), Info(4, 4));
      EXPECT_EQ(program.Ask("free 0"), "0");
    }
  }
}

// A program asks for its pools before its first allocation, and may never allocate.
TEST_F(PreloadKinds, ALocationsPoolIsFoundWithoutADaemon) {
  daemon().Kill();
  Program program = RunWithStream({{"VRAMBROKER_LIMIT", "64MiB"}, {"VRAMBROKER_RECONNECT", "1ms"}});
  EXPECT_EQ(program.Ask("default_pool 6:1 pinned"), "0");
  EXPECT_EQ(program.Ask("alloc pool 2M"), "2");
  ASSERT_TRUE(daemon().Restart().ok());
  EXPECT_TRUE(WaitFor([&] { return program.Ask("alloc pool 2M") == "0"; }));
  EXPECT_EQ(program.Ask("info"), Info(64, 64)) << "it is the other device's";
}

TEST_F(PreloadKinds, ImportedHandlesAreNotChargedAgain) {
  Program program = RunWithStream();
  EXPECT_EQ(program.Ask("alloc handle 20M"), "0");
  EXPECT_EQ(program.Ask("import 0"), "0");
  EXPECT_EQ(program.Ask("info"), Info(44, 64));
  EXPECT_EQ(program.Ask("free 1"), "0");
  EXPECT_EQ(program.Ask("info"), Info(44, 64));
}

TEST_F(PreloadKinds, AHandleIsChargedUntilItsLastReferenceAndMappingHaveGone) {
  Program program = RunWithStream();
  EXPECT_EQ(program.Ask("alloc mapped 20M"), "0");
  EXPECT_EQ(program.Ask("retain 0"), "0");
  EXPECT_EQ(program.Ask("retain 0"), "0");
  EXPECT_EQ(program.Ask("free 0"), "0");
  EXPECT_EQ(program.Ask("info"), Info(44, 64));
  EXPECT_EQ(program.Ask("release 0"), "0");
  EXPECT_EQ(program.Ask("info"), Info(44, 64));
  EXPECT_EQ(program.Ask("release 0"), "0");
  EXPECT_EQ(program.Ask("info"), Info(64, 64));
  EXPECT_EQ(program.Ask("map_same 2 4M"), "0");
  EXPECT_EQ(program.Ask("unmap 1:0 4M"), "0");
  EXPECT_EQ(program.Ask("info"), Info(60, 64)) << "the second mapping keeps the memory";
  EXPECT_EQ(program.Ask("unmap 1:1 4M"), "0");
  EXPECT_EQ(program.Ask("info"), Info(64, 64));
}

// Expandable segments are mapped side by side.
TEST_F(PreloadKinds, MappingsThatLieSideBySideAreUnmappedAtOnce) {
  Program program = RunWithStream();
  EXPECT_EQ(program.Ask("map_beside 4 4M"), "0");
  EXPECT_EQ(program.Ask("info"), Info(48, 64));
  EXPECT_EQ(program.Ask("free 0"), "0");
  EXPECT_EQ(program.Ask("info"), Info(64, 64));
}

TEST_F(PreloadKinds, WhatIsNoWholeUnitCountsAsOneMore) {
  Program program = RunWithStream();
  EXPECT_EQ(program.Ask("alloc array 3M"), "0");
  EXPECT_EQ(program.Ask("info"), Info(60, 64));
}

TEST_F(PreloadKinds, AContextTakesItsMemoryAlong) {
  Program program = RunWithStream();
  EXPECT_EQ(program.Ask("alloc plain 8M"), "0");
  EXPECT_EQ(program.Ask("context"), "0");
  EXPECT_EQ(program.Ask("alloc plain 8M"), "0");
  EXPECT_EQ(program.Ask("alloc array 8M"), "0");
  EXPECT_EQ(program.Ask("alloc handle 8M"), "0");  // handles belong to no context
  EXPECT_EQ(program.Ask("info"), Info(32, 64));
  EXPECT_EQ(program.Ask("destroy_context"), "0");
  EXPECT_EQ(program.Ask("info"), Info(48, 64));
  EXPECT_EQ(program.Ask("reset"), "0");
  EXPECT_EQ(program.Ask("info"), Info(56, 64));
}

TEST_F(PreloadKinds, TheLastReleaseOfThePrimaryContextTakesItsMemoryAlong) {
  Program program = RunWithStream();
  EXPECT_EQ(program.Ask("alloc plain 8M"), "0");
  EXPECT_EQ(program.Ask("leave"), "0");
  EXPECT_EQ(program.Ask("info"), Info(64, 64));
}

TEST_F(PreloadKinds, AReleaseOfThePrimaryContextThatIsNotTheLastLeavesItItsMemory) {
  Program program = RunWithStream();
  EXPECT_EQ(program.Ask("alloc plain 8M"), "0");
  EXPECT_EQ(program.Ask("alloc array 8M"), "0");
  EXPECT_EQ(program.Ask("device 0"), "0") << "retains the context once more";
  EXPECT_EQ(program.Ask("leave"), "0");
  EXPECT_EQ(program.Ask("info"), Info(48, 64));
  EXPECT_EQ(program.Ask("deep reset"), "0");
  EXPECT_EQ(program.Ask("info"), Info(64, 64));
}

// The handle has no reference: the array's context alone keeps the memory.
TEST_F(PreloadKinds, AContextTakesAlongWhatIsMappedIntoItsArrays) {
  Program program = RunWithStream();
  EXPECT_EQ(program.Ask("context"), "0");
  EXPECT_EQ(program.Ask("alloc array_sparse 64M"), "0");
  EXPECT_EQ(program.Ask("alloc handle 10M"), "0");
  EXPECT_EQ(program.Ask("map_tile 0 1"), "0");
  EXPECT_EQ(program.Ask("release 1"), "0");
  EXPECT_EQ(program.Ask("info"), Info(54, 64));
  EXPECT_EQ(program.Ask("destroy_context"), "0");
  EXPECT_EQ(program.Ask("info"), Info(64, 64));
}

TEST_F(PreloadKinds, PartsOfASparseArrayThatAreMappedAtOnceCountEach) {
  Program program = RunWithStream();
  EXPECT_EQ(program.Ask("alloc array_sparse 64M"), "0");
  for (int handle = 1; handle <= 6; ++handle) EXPECT_EQ(program.Ask("alloc handle 4M"), "0");
  const auto map = [&](const std::string& how, int first) {
    EXPECT_EQ(program.Ask(absl::StrCat(how, " 0 ", first)), "0");
    for (const int handle : {first, first + 1}) EXPECT_EQ(program.Ask(absl::StrCat("release ", handle)), "0");
  };
  map("map_two", 1);
  EXPECT_EQ(program.Ask("info"), Info(40, 64));
  map("map_two", 3);
  EXPECT_EQ(program.Ask("info"), Info(48, 64)) << "the second two handles have taken the place of the first two";
  map("map_again", 5);
  EXPECT_EQ(program.Ask("info"), Info(56, 64)) << "the last handle has taken the place of its neighbour, too";
  EXPECT_EQ(program.Ask("free 0"), "0");
  EXPECT_EQ(program.Ask("info"), Info(64, 64));
}

TEST_F(PreloadKinds, APoolIsChargedForWhatItKeeps) {
  Program program = RunWithStream();
  EXPECT_EQ(program.Ask("pool"), "0");
  EXPECT_EQ(program.Ask("keep"), "0");
  EXPECT_EQ(program.Ask("alloc pool 20M"), "0");
  EXPECT_EQ(program.Ask("free 0"), "0");
  EXPECT_EQ(program.Ask("info"), Info(32, 64));
  EXPECT_EQ(program.Ask("trim"), "0");
  EXPECT_EQ(program.Ask("info"), Info(64, 64));
  EXPECT_EQ(program.Ask("alloc pool 20M"), "0");
  EXPECT_EQ(program.Ask("free 1"), "0");
  EXPECT_EQ(program.Ask("info"), Info(32, 64));
  EXPECT_EQ(program.Ask("keep 0"), "0");
  EXPECT_EQ(program.Ask("synchronize"), "0");
  EXPECT_EQ(program.Ask("info"), Info(64, 64)) << "it keeps less from now on";
}

// A wait for another device comes first, and frees nothing.
TEST_F(PreloadKinds, WhatWasFreedComesBackWhenItsStreamHasComeSoFar) {
  Program program = RunWithStream();
  ASSERT_EQ(program.Ask("alloc async 20M"), "0");
  ASSERT_EQ(program.Ask("hold"), "0");
  ASSERT_EQ(program.Ask("free_later 0"), "0");
  ASSERT_EQ(program.Ask("device 1"), "0");
  ASSERT_EQ(program.Ask("synchronize"), "0");
  ASSERT_EQ(program.Ask("device 0"), "0");
  EXPECT_EQ(program.Ask("info"), Info(32, 64));
  ASSERT_EQ(program.Ask("go"), "0");
  ASSERT_EQ(program.Ask("synchronize"), "0");
  EXPECT_EQ(program.Ask("info"), Info(64, 64));
}

// Memory taken from the driver for a moment would be missing for other programs.
TEST_F(PreloadKinds, APoolTakesNothingThatCannotBeCharged) {
  StartDaemon("64MiB");
  Program program =
      Run("dlsym", {{cuda_substitute::kFaultsVariable, "cuMemAllocAsync:3=999"}, {"VRAMBROKER_RECONNECT", "200ms"}});
  EXPECT_EQ(program.Ask("alloc async 40M"), "0");
  EXPECT_EQ(program.Ask("alloc async 30M"), "2");
  EXPECT_EQ(program.Ask("free 0"), "0");
  EXPECT_EQ(program.Ask("alloc async 40M"), "0") << "of the pool, or anew";
  daemon().Kill();
  EXPECT_EQ(program.Ask("alloc async 50M"), "2");
  ASSERT_TRUE(daemon().Restart().ok());
  std::string answer;
  EXPECT_TRUE(WaitFor([&] { return (answer = program.Ask("alloc async 2M")) != "2"; })) << "the daemon is back";
  EXPECT_EQ(answer, "999") << "the third call that could be charged";
}

TEST_F(PreloadKinds, NoGpuHasAllThatFitsIntoANumber) {
  StartDaemon("64MiB");
  Program program = Run("dlsym");
  EXPECT_EQ(program.Ask("alloc plain 18446744073709551615"), "2");
  EXPECT_THAT(program.ErrorText(), HasSubstr("refused: no GPU has so much"));
  EXPECT_EQ(program.Ask("alloc plain 64M"), "0");
}

TEST_F(PreloadKinds, ADestroyedPoolIsChargedUntilItsLastAllocationIsFreed) {
  for (const std::string pool : {"pool", "new_pool 6:0 pinned" /* the library does not delay the destruction */}) {
    SCOPED_TRACE(pool);
    Program program = RunWithStream();
    EXPECT_EQ(program.Ask(pool), "0");
    EXPECT_EQ(program.Ask("alloc pool 20M"), "0");
    EXPECT_EQ(program.Ask("alloc pool 4M"), "0");
    EXPECT_EQ(program.Ask("destroy_pool"), "0");
    EXPECT_EQ(program.Ask("free 0"), "0");
    EXPECT_EQ(program.Ask("info"), Info(32, 64));
    EXPECT_EQ(program.Ask("free 1"), "0");
    EXPECT_EQ(program.Ask("info"), Info(64, 64));
  }
}

TEST_F(PreloadKinds, ADestroyedPoolIsChargedUntilItsLastFreeHasHappened) {
  for (const auto& [first, second] : {std::pair("free_later 0", "destroy_pool"), {"destroy_pool", "free_later 0"}}) {
    SCOPED_TRACE(first);
    const uint64_t before = UsedOnMachine();
    Program program = RunWithStream();
    ASSERT_EQ(program.Ask("pool"), "0");
    ASSERT_EQ(program.Ask("alloc pool 20M"), "0");
    ASSERT_EQ(program.Ask("hold"), "0");
    EXPECT_EQ(program.Ask(first), "0");
    EXPECT_EQ(program.Ask(second), "0");
    EXPECT_EQ(program.Ask("info"), Info(32, 64));
    ASSERT_EQ(program.Ask("go"), "0");
    ASSERT_EQ(program.Ask("synchronize"), "0");
    EXPECT_EQ(program.Ask("info"), Info(64, 64));
    EXPECT_EQ(UsedOnMachine(), before);
    EXPECT_EQ(program.Ask("destroy_pool"), "1") << "the driver has destroyed the pool, too";
  }
}

// The driver replaces a destroyed current pool by the device's default pool.
TEST_F(PreloadKinds, ADestroyedCurrentPoolIsChargedUntilItsLastFreeHasHappened) {
  Program program = RunWithStream();
  ASSERT_EQ(program.Ask("pool"), "0");
  ASSERT_EQ(program.Ask("make_current"), "0");
  ASSERT_EQ(program.Ask("alloc async 20M"), "0");
  ASSERT_EQ(program.Ask("hold"), "0");
  EXPECT_EQ(program.Ask("free_later 0"), "0");
  EXPECT_EQ(program.Ask("destroy_pool"), "0");
  EXPECT_EQ(program.Ask("info"), Info(32, 64));
  EXPECT_EQ(program.Ask("alloc async 30M"), "0") << "of the default pool";
  EXPECT_EQ(program.Ask("alloc async 4M"), "2") << "the destroyed pool counts still";
  ASSERT_EQ(program.Ask("go"), "0");
  ASSERT_EQ(program.Ask("synchronize"), "0");
  EXPECT_EQ(program.Ask("info"), Info(32, 64)) << "of the default pool alone";
}

// The program waits for no stream after the free.
TEST_F(PreloadKinds, ADestroyedPoolGivesItsMemoryBackWhenAContextEnds) {
  Program program = RunWithStream();
  ASSERT_EQ(program.Ask("pool"), "0");
  ASSERT_EQ(program.Ask("alloc pool 20M"), "0");
  ASSERT_EQ(program.Ask("destroy_pool"), "0");
  ASSERT_EQ(program.Ask("free_later 0"), "0");
  EXPECT_EQ(program.Ask("info"), Info(32, 64));
  EXPECT_EQ(program.Ask("reset"), "0");
  EXPECT_EQ(program.Ask("info"), Info(64, 64));
}

// The library does not see the end of the stream's work.
TEST_F(PreloadKinds, APlainAllocationHasWhatADestroyedPoolNoLongerNeeds) {
  Program program = RunWithStream();
  ASSERT_EQ(program.Ask("pool"), "0");
  ASSERT_EQ(program.Ask("alloc pool 60M"), "0");
  ASSERT_EQ(program.Ask("hold"), "0");
  ASSERT_EQ(program.Ask("free_later 0"), "0");
  ASSERT_EQ(program.Ask("destroy_pool"), "0");
  EXPECT_EQ(program.Ask("alloc plain 50M"), "2");
  ASSERT_EQ(program.Ask("go"), "0");
  EXPECT_TRUE(WaitFor([&] { return program.Ask("alloc plain 50M") == "0"; }));
}

TEST_F(PreloadKinds, MemoryOfGraphsIsCharged) {
  Program program = RunWithStream();
  EXPECT_EQ(program.Ask("graph 20M"), "0");
  EXPECT_EQ(program.Ask("info"), Info(44, 64));
  EXPECT_EQ(program.Ask("alloc plain 46M"), "2");
  EXPECT_EQ(program.Ask("trim_graphs"), "0");
  EXPECT_EQ(program.Ask("info"), Info(64, 64));
}

// A launch cannot be undone. The library owes the launch's memory, and prints a message.
TEST_F(PreloadKinds, AGraphThatTakesTooMuchKeepsOthersFromGettingMore) {
  Program program = RunWithStream();
  EXPECT_EQ(program.Ask("alloc plain 50M"), "0");
  EXPECT_EQ(program.Ask("graph 20M"), "0");
  EXPECT_THAT(program.ErrorText(), HasSubstr("a graph that runs took "));
  EXPECT_EQ(program.Ask("info"), Info(0, 64)) << "what is owed is not free";
  EXPECT_EQ(program.Ask("alloc plain 2M"), "2");
  EXPECT_EQ(program.Ask("trim_graphs"), "0");
  EXPECT_EQ(program.Ask("alloc plain 14M"), "0");
}

// A captured stream and a node name their own device.
TEST_F(PreloadKinds, MemoryOfGraphsOfAnotherDeviceThanTheThreadsIsCharged) {
  for (const std::string graph : {"graph 20M", "node_graph 20M 1", "any_node_graph 20M 1"}) {
    SCOPED_TRACE(graph);
    Program program = Run("dlsym", {{"VRAMBROKER_LIMIT", "64MiB"}});
    ASSERT_EQ(program.Ask("device 1"), "0");
    ASSERT_EQ(program.Ask("stream"), "0");
    ASSERT_EQ(program.Ask("device 0"), "0");
    EXPECT_EQ(program.Ask(graph), "0");
    EXPECT_EQ(program.Ask("info"), Info(64, 64));
    ASSERT_EQ(program.Ask("device 1"), "0");
    EXPECT_EQ(program.Ask("info"), Info(44, 64));
    EXPECT_EQ(program.Ask("alloc plain 46M"), "2");
    ASSERT_EQ(program.Ask("device 0"), "0");
    EXPECT_EQ(program.Ask("trim_graphs 1"), "0");
    ASSERT_EQ(program.Ask("device 1"), "0");
    EXPECT_EQ(program.Ask("info"), Info(64, 64));
  }
}

// A captured allocation takes memory of its pool's device.
TEST_F(PreloadKinds, MemoryOfGraphsOfAPoolOfAnotherDeviceIsCharged) {
  Program program = RunWithStream();
  ASSERT_EQ(program.Ask("new_pool 1:1 pinned"), "0");
  EXPECT_EQ(program.Ask("pool_graph 20M"), "0");
  EXPECT_EQ(program.Ask("info"), Info(64, 64));
  ASSERT_EQ(program.Ask("device 1"), "0");
  EXPECT_EQ(program.Ask("info"), Info(44, 64));
}

TEST_F(PreloadKinds, MemoryOfAPoolOfTheStreamsDeviceIsCharged) {
  Program program = Run("dlsym", {{"VRAMBROKER_LIMIT", "64MiB"}});
  ASSERT_EQ(program.Ask("device 1"), "0");
  ASSERT_EQ(program.Ask("stream"), "0");
  ASSERT_EQ(program.Ask("device 0"), "0");
  EXPECT_EQ(program.Ask("alloc async 20M"), "0");
  EXPECT_EQ(program.Ask("info"), Info(64, 64));
  ASSERT_EQ(program.Ask("device 1"), "0");
  EXPECT_EQ(program.Ask("info"), Info(32, 64));
}

// The allocation's stream may wait for work of another thread on another device. The pool is to keep unused memory, but
// keeps no memory without a grant.
TEST_F(PreloadKinds, ARefusedPoolAllocationWaitsForNoStream) {
  Program program = RunWithStream();
  ASSERT_EQ(program.Ask("pool"), "0");
  ASSERT_EQ(program.Ask("keep"), "0");
  ASSERT_EQ(program.Ask("alloc plain 40M"), "0");
  ASSERT_EQ(program.Ask("hold"), "0");
  ASSERT_EQ(program.Ask("pool_thread 20M"), "0") << "the driver takes 32 MiB, and 24 are left";
  ASSERT_EQ(program.Ask("device 1"), "0");
  ASSERT_EQ(program.Ask("stream"), "0");
  ASSERT_EQ(program.Ask("alloc async 20M"), "0") << "of another device";
  EXPECT_EQ(program.Ask("join"), "2");
  ASSERT_EQ(program.Ask("device 0"), "0");
  EXPECT_EQ(program.Ask("info"), Info(0, 64)) << "the pool has it as long as its stream is busy";
  EXPECT_EQ(program.Ask("alloc plain 2M"), "2");
  EXPECT_EQ(program.Ask("go"), "0");
  EXPECT_EQ(program.Ask("synchronize"), "0");
  EXPECT_EQ(program.Ask("info"), Info(24, 64));
  EXPECT_EQ(program.Ask("alloc plain 24M"), "0");
}

// The other thread's unfinished call keeps the library from trimming the pool later.
TEST_F(PreloadKinds, ARefusedPoolAllocationKeepsNothingWhileAnotherThreadAllocates) {
  const std::string go = MakeTempDir() + "/go";
  const uint64_t before = UsedOnMachine();
  Program program = RunWithStream(
      {{"VRAMBROKER_LIMIT", "64MiB"}, {cuda_substitute::kDelaysVariable, "cuMemAllocFromPoolAsync=until:" + go}});
  for (const std::string command : {"pool", "keep", "make_current", "alloc async 20M", "alloc plain 8M"}) {
    ASSERT_EQ(program.Ask(command), "0") << command;
  }
  ASSERT_EQ(program.Ask("pool_thread 2M"), "0");
  ASSERT_TRUE(WaitFor([&] { return std::filesystem::exists(go + ".waits"); }));
  EXPECT_EQ(program.Ask("alloc async 20M"), "2") << "the driver takes 32 MiB, and 24 are left";
  EXPECT_EQ(UsedOnMachine() - before, 40 * kMiB);
  std::ofstream(go).put('\n');
  EXPECT_EQ(program.Ask("join"), "0");
  EXPECT_EQ(program.Ask("info"), Info(24, 64));
}

// The driver keeps a refused allocation's memory as long as the stream is busy. The pool's first block has room.
TEST_F(PreloadKinds, APoolThatOwesServesNothingFromItsUnusedMemory) {
  Program program = RunWithStream();
  ASSERT_EQ(program.Ask("pool"), "0");
  ASSERT_EQ(program.Ask("alloc pool 20M"), "0");
  ASSERT_EQ(program.Ask("alloc plain 24M"), "0");
  ASSERT_EQ(program.Ask("hold"), "0");
  ASSERT_EQ(program.Ask("pool_thread 20M"), "0") << "the driver takes 32 MiB, and 8 are left";
  EXPECT_EQ(program.Ask("join"), "2");
  EXPECT_EQ(program.Ask("alloc pool 8M"), "2");
  EXPECT_EQ(program.Ask("go"), "0");
  EXPECT_EQ(program.Ask("synchronize"), "0");
  EXPECT_EQ(program.Ask("alloc pool 8M"), "0");
  EXPECT_EQ(program.Ask("info"), Info(8, 64));
}

// A launch may wait for room in a queue.
TEST_F(PreloadKinds, WhileALaunchWaitsOtherThreadsGoOn) {
  const std::string go = MakeTempDir() + "/go";
  Program program =
      RunWithStream({{"VRAMBROKER_LIMIT", "64MiB"}, {cuda_substitute::kDelaysVariable, "cuGraphLaunch=until:" + go}});
  ASSERT_EQ(program.Ask("launch_thread 20M"), "0");
  ASSERT_TRUE(WaitFor([&] { return std::filesystem::exists(go + ".waits"); }));
  ASSERT_EQ(program.Ask("device 1"), "0");
  EXPECT_EQ(program.Ask("make_graph 20M 1"), "0");
  EXPECT_EQ(program.Ask("trim_graphs 0"), "0");
  std::ofstream(go).put('\n');
  EXPECT_EQ(program.Ask("join"), "0");
  ASSERT_EQ(program.Ask("device 0"), "0");
  EXPECT_EQ(program.Ask("info"), Info(44, 64));
}

TEST_F(PreloadKinds, ManagedMemoryCanBeRefused) {
  Program program = RunWithStream({{"VRAMBROKER_MANAGED", "refuse"}});
  EXPECT_EQ(program.Ask("alloc managed 2M"), "2");
  for (const std::string pool : {"new_pool", "default_pool", "current_pool"}) {
    EXPECT_EQ(program.Ask(pool + " 0:0 managed"), "2");
  }
  EXPECT_THAT(program.ErrorText(), HasSubstr("VRAMBROKER_MANAGED=refuse"));
  EXPECT_EQ(program.Ask("alloc plain 2M"), "0");
}

TEST_F(PreloadKinds, FiguresOfNvmlAreThoseOfTheProgram) {
  Program program = RunWithStream();
  EXPECT_EQ(program.Ask("alloc plain 20M"), "0");
  EXPECT_EQ(program.Ask("nvml 1"), absl::StrCat("0 ", 64 * kMiB, " ", 20 * kMiB, " ", 44 * kMiB));
  EXPECT_EQ(program.Ask("nvml 2"), absl::StrCat("0 ", 64 * kMiB, " ", 20 * kMiB, " ", 44 * kMiB, " 0"))
      << "nothing of the limit is the driver's";
}

// Two programs size themselves at the same moment (vLLM #55827).
TEST_F(PreloadKinds, FiguresAreIndependentOfNeighbours) {
  Program one = RunWithStream();
  Program other = RunWithStream();
  EXPECT_EQ(one.Ask("alloc plain 60M"), "0");
  EXPECT_EQ(other.Ask("info"), Info(64, 64));
  EXPECT_EQ(other.Ask("alloc plain 64M"), "0");
  EXPECT_EQ(one.Ask("info"), Info(4, 64));
}

}  // namespace
}  // namespace vrambroker::testing_support
