// SPDX-License-Identifier: Apache-2.0
//
// Many threads at the limit. The threads never hold more memory than the limit. Between requests, all held memory is
// counted.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <tuple>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "tests/preload/played_daemon.h"
#include "tests/preload/preload_fixture.h"
#include "tests/support/util.h"

namespace vrambroker::testing_support {
namespace {

constexpr uint64_t kPackingUnit = 2 * kMiB;

// Returns the numbers of an answer. The program's error comes first.
std::vector<uint64_t> Numbers(const std::string& answer) {
  std::vector<uint64_t> numbers;
  for (const std::string& word : std::vector<std::string>(absl::StrSplit(answer, ' '))) {
    uint64_t number = 0;
    EXPECT_TRUE(absl::SimpleAtoi(word, &number)) << answer;
    numbers.push_back(number);
  }
  numbers.resize(std::max<size_t>(numbers.size(), 5));
  return numbers;
}

// Runs threads on a driver packing small allocations into shared blocks.
class PreloadCrowd : public PreloadTest, public ::testing::WithParamInterface<int> {};

TEST_P(PreloadCrowd, SmallAllocationsNeverPassTheLimit) {
  constexpr uint64_t kLimit = 8 * kMiB;
  constexpr int kLooks = 30;
  PlayedDaemon daemon(kPackingUuid, kLimit);
  Program program = Run("dlsym", {{"LD_LIBRARY_PATH", FolderOf(paths::kPreloadPackingDriver)},
                                  {"VRAMBROKER_SOCKET_DIR", daemon.socket_dir()}});
  for (int look = 0; look < kLooks; ++look) {
    const int times = look + 1 < kLooks ? 1024 / GetParam() : 0;
    const std::vector<uint64_t> answer =
        Numbers(program.Ask(absl::StrCat("crowd plain ", GetParam(), " ", times, " 700K")));
    ASSERT_EQ(answer[2], 0u) << "frees that failed";
    const uint64_t of_driver = Numbers(program.Ask("blocks"))[1] * kPackingUnit;
    ASSERT_LE(of_driver, kLimit) << "look " << look;
    ASSERT_LE(of_driver, daemon.charged()) << "look " << look;
    ASSERT_LE(daemon.charged(), of_driver + kPackingUnit) << "a unit of slack is kept";
  }
  EXPECT_EQ(program.Ask("blocks"), "0 0");
}

INSTANTIATE_TEST_SUITE_P(Threads, PreloadCrowd, ::testing::Values(2, 8, 64), ::testing::PrintToStringParamName());

// A thread waits for the daemon's answer about the first device. Meanwhile, another thread frees memory on the second
// device.
TEST_F(PreloadTest, MemoryThatIsFreedWhileTheDaemonIsAskedComesBack) {
  PlayedDaemon daemon(std::vector<std::string>{kPackingUuid, kSecondPackingUuid}, 64 * kMiB);
  Program program = Run("dlsym", {{"LD_LIBRARY_PATH", FolderOf(paths::kPreloadPackingDriver)},
                                  {"VRAMBROKER_SOCKET_DIR", daemon.socket_dir()}});
  ASSERT_EQ(program.Ask("pool"), "0");
  ASSERT_EQ(program.Ask("device 1"), "0");
  ASSERT_EQ(program.Ask("alloc plain 16M"), "0");
  ASSERT_EQ(daemon.charged(1), 16 * kMiB);
  daemon.HoldBack(VRAMBROKER_COUNT_CHARGE);
  ASSERT_EQ(program.Ask("pool_thread 4M"), "0");
  ASSERT_TRUE(WaitFor([&] { return daemon.charged(0) != 0; }));
  EXPECT_EQ(program.Ask("free 0"), "0");
  EXPECT_EQ(daemon.charged(1), 16 * kMiB);
  daemon.SendHeldBack();
  EXPECT_EQ(program.Ask("join"), "0");
  EXPECT_LE(daemon.charged(1), kPackingUnit) << "a unit of slack is kept";
}

// The graph belongs to the second device. The refusal is about memory taken meanwhile by graphs of the first device.
TEST_F(PreloadTest, AGraphThatIsRefusedForAnotherDeviceLeavesNothing) {
  PlayedDaemon daemon(std::vector<std::string>{kPackingUuid, kSecondPackingUuid}, 16 * kMiB);
  Program program = Run("dlsym", {{"LD_LIBRARY_PATH", FolderOf(paths::kPreloadPackingDriver)},
                                  {"VRAMBROKER_SOCKET_DIR", daemon.socket_dir()}});
  ASSERT_EQ(program.Ask("make_graph 4M 0"), "0");
  ASSERT_EQ(program.Ask("alloc plain 12M"), "0");
  ASSERT_EQ(daemon.charged(0), 16 * kMiB);
  ASSERT_EQ(program.Ask("reserve_for_graphs 0 1"), "0");
  EXPECT_EQ(program.Ask("make_graph 4M 1"), "2");
  EXPECT_EQ(program.Ask("taken 1"), "0 0");
  EXPECT_LE(daemon.charged(1), kPackingUnit) << "a unit of slack is kept";
  EXPECT_EQ(program.Ask("make_graph 4M 1"), "0") << "the first device's was given back with it";
}

// The driver reuses freed memory before the freeing call returns, as another thread could.
TEST_F(PreloadTest, WhatIsUsedAgainAtOnceIsCounted) {
  for (const std::string how : {"unmap_and_reuse 16M", "destroy_and_reuse 16M plain", "destroy_and_reuse 16M array"}) {
    PlayedDaemon daemon(kPackingUuid, 64 * kMiB);
    Program program = Run("dlsym", {{"LD_LIBRARY_PATH", FolderOf(paths::kPreloadPackingDriver)},
                                    {"VRAMBROKER_SOCKET_DIR", daemon.socket_dir()}});
    EXPECT_EQ(program.Ask(how), "0");
    EXPECT_EQ(program.Ask("taken 0"), "0 4");
    EXPECT_GE(daemon.charged(), 4 * kPackingUnit) << how;
    EXPECT_LE(daemon.charged(), 5 * kPackingUnit) << how << ": a unit of slack is kept";
    EXPECT_EQ(program.Ask("free_another"), "0");
    EXPECT_EQ(program.Ask("taken 0"), "0 0");
    EXPECT_LE(daemon.charged(), kPackingUnit) << how;
  }
}

// Returns the number of operations. Manual runs use one million.
uint64_t Operations() {
  const char* const text = std::getenv("VRAMBROKER_PRELOAD_OPERATIONS");
  uint64_t operations = 8'000;
  EXPECT_TRUE(text == nullptr || absl::SimpleAtoi(text, &operations)) << text;
  return operations;
}

// The driver checks the limit after each of its operations. The check ignores the unfinished calls
// described in client/preload/grant.h and growth.h: the library may still undo an unfinished call.
TEST_P(PreloadCrowd, MemoryOfAllKindsOfTwoDevicesNeverPassesTheLimit) {
  constexpr uint64_t kLooks = 5;
  constexpr uint64_t units = 10;  // low enough for two threads to reach the limit
  PlayedDaemon daemon(std::vector<std::string>{kPackingUuid, kSecondPackingUuid}, units * kPackingUnit);
  Program program = Run("dlsym", {{"LD_LIBRARY_PATH", FolderOf(paths::kPreloadPackingDriver)},
                                  {"VRAMBROKER_SOCKET_DIR", daemon.socket_dir()}});
  for (uint64_t look = 0; look < kLooks; ++look) {
    const uint64_t times = look + 1 < kLooks ? Operations() / (kLooks - 1) / static_cast<uint64_t>(GetParam()) : 0;
    const std::string answer = program.Ask(absl::StrCat("pack ", GetParam(), " ", times, " ", units));
    const std::vector<uint64_t> numbers = Numbers(answer);
    ASSERT_EQ(numbers[1], 0u) << "looks that saw more than the limit: " << program.ErrorText();
    ASSERT_EQ(numbers[4], 0u) << "frees that failed: " << answer;
    for (const size_t device : {size_t{0}, size_t{1}}) {
      EXPECT_GE(numbers[2 + device], units) << "the limit was never reached";
      const uint64_t taken = Numbers(program.Ask(absl::StrCat("taken ", device)))[1] * kPackingUnit;
      ASSERT_LE(taken, units * kPackingUnit) << "look " << look;
      ASSERT_LE(taken, daemon.charged(device)) << "look " << look;
    }
  }
  for (const size_t device : {size_t{0}, size_t{1}}) {
    EXPECT_EQ(program.Ask(absl::StrCat("taken ", device)), "0 0");
    EXPECT_TRUE(WaitFor([&] { return daemon.charged(device) == 0; })) << daemon.charged(device);
  }
}

// Runs every kind of memory on the substitute. Small allocations have their own blocks there.
class PreloadCrowdOfKind : public PreloadTest, public ::testing::WithParamInterface<std::tuple<std::string, int>> {};

TEST_P(PreloadCrowdOfKind, NeverPassesTheLimit) {
  const auto& [kind, threads] = GetParam();
  constexpr int kLooks = 6;
  const bool is_array = kind.find("array") == 0 || kind == "mipmapped";  // small arrays share units
  const uint64_t limit = is_array ? 8 * kMiB : 64 * kMiB;
  StartDaemon("128MiB");
  const uint64_t before = UsedOnMachine();
  Program program = Run("dlsym", {{"VRAMBROKER_LIMIT", absl::StrCat(limit / kMiB, "MiB")}});
  ASSERT_EQ(program.Ask("stream"), "0");
  ASSERT_EQ(program.Ask("pool"), "0");
  for (int look = 0; look < kLooks; ++look) {
    const int times = look + 1 < kLooks ? 512 / threads : 0;
    const std::vector<uint64_t> answer =
        Numbers(program.Ask(absl::StrCat("crowd ", kind, " ", threads, " ", times, is_array ? " 900K" : " 6M")));
    ASSERT_EQ(answer[2], 0u) << "frees that failed";
    ASSERT_LE(answer[1], limit) << "look " << look;
    const uint64_t left = Numbers(program.Ask("info"))[1];
    ASSERT_LE(answer[1], limit - left) << "look " << look;
    ASSERT_LE(is_array ? 0 : UsedOnMachine() - before, limit - left) << "look " << look;
  }
  EXPECT_EQ(program.Ask("synchronize"), "0");
  EXPECT_TRUE(WaitFor([&] { return program.Ask("info") == Info(limit / kMiB, limit / kMiB); })) << program.Ask("info");
  EXPECT_EQ(UsedOnMachine(), before);
}

INSTANTIATE_TEST_SUITE_P(All, PreloadCrowdOfKind,
                         ::testing::Combine(::testing::Values("plain", "managed", "pitch", "array", "array3d",
                                                              "mipmapped", "handle", "mapped", "async", "pool"),
                                            ::testing::Values(2, 8, 64)),
                         [](const auto& each) {
                           return absl::StrCat(std::get<0>(each.param), "_", std::get<1>(each.param));
                         });

}  // namespace
}  // namespace vrambroker::testing_support
