// SPDX-License-Identifier: Apache-2.0
//
// Many threads at the limit: what they hold is never more, and all of it is counted, whenever nobody asks for memory.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
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

// The numbers of an answer, the program's error first.
std::vector<uint64_t> Numbers(const std::string& answer) {
  std::vector<uint64_t> numbers;
  for (const std::string& word : std::vector<std::string>(absl::StrSplit(answer, ' '))) {
    uint64_t number = 0;
    EXPECT_TRUE(absl::SimpleAtoi(word, &number)) << answer;
    numbers.push_back(number);
  }
  numbers.resize(std::max<size_t>(numbers.size(), 3));
  return numbers;
}

// A driver that puts small allocations together, and threads.
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

// Every kind of memory, on the substitute, whose small allocations are alone in their blocks.
class PreloadCrowdOfKind : public PreloadTest, public ::testing::WithParamInterface<std::tuple<std::string, int>> {};

TEST_P(PreloadCrowdOfKind, NeverPassesTheLimit) {
  const auto& [kind, threads] = GetParam();
  constexpr int kLooks = 6;
  const bool is_array = kind.find("array") == 0 || kind == "mipmapped";  // small ones share units
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
