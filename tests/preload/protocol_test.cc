// SPDX-License-Identifier: Apache-2.0
//
// A program's requests to a played daemon: their number, their units, and the handling of wrong answers.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/preload/played_daemon.h"
#include "tests/preload/preload_fixture.h"
#include "tests/support/util.h"

namespace vrambroker::testing_support {
namespace {

using ::testing::HasSubstr;

// Runs programs on a driver packing small allocations.
class PreloadProtocol : public PreloadTest {
 protected:
  Program RunPacking(const PlayedDaemon& daemon, const Environment& more = {}) const {
    Environment environment = {{"LD_PRELOAD", paths::kPreload},
                               {"LD_LIBRARY_PATH", FolderOf(paths::kPreloadPackingDriver)},
                               {"VRAMBROKER_SOCKET_DIR", daemon.socket_dir()}};
    environment.insert(environment.end(), more.begin(), more.end());
    return Program(ChildProcess::Start({paths::kPreloadProbe, "dlsym"}, environment).value());
  }
};

TEST_F(PreloadProtocol, SmallAllocationsShareUnits) {
  PlayedDaemon daemon(kPackingUuid, 8 * kMiB);
  Program program = RunPacking(daemon);
  for (int i = 0; i < 12; ++i) EXPECT_EQ(program.Ask("alloc plain 512K"), "0") << i;  // fills three blocks
  EXPECT_EQ(daemon.charged(), 6 * kMiB);
  EXPECT_EQ(daemon.Calls(VRAMBROKER_COUNT_CHARGE), 3) << "one for each unit";
  EXPECT_EQ(program.Ask("alloc plain 2M"), "0");
  // The limit is reached, and every block is full.
  EXPECT_EQ(program.Ask("alloc plain 1"), "2");
  EXPECT_EQ(program.Ask("free 5"), "0");
  EXPECT_EQ(program.Ask("alloc plain 2M"), "2");
  EXPECT_EQ(program.Ask("alloc plain 256K"), "0") << "a block that is counted already has room";
  EXPECT_EQ(program.Ask("alloc plain 256K"), "0");
  EXPECT_EQ(program.Ask("alloc plain 1K"), "2");
  EXPECT_EQ(program.Ask("info"), Info(0, 8));
  EXPECT_EQ(daemon.charged(), 8 * kMiB);
}

TEST_F(PreloadProtocol, ABlockCountsUntilItsLastAllocationIsFreed) {
  PlayedDaemon daemon(kPackingUuid, 64 * kMiB);
  Program program = RunPacking(daemon);
  for (int i = 0; i < 16; ++i) EXPECT_EQ(program.Ask("alloc plain 512K"), "0");
  EXPECT_EQ(program.Ask("info"), Info(56, 64));
  for (int i = 0; i < 16; ++i) {
    if (i % 4 == 0) continue;
    EXPECT_EQ(program.Ask(absl::StrCat("free ", i)), "0");
  }
  EXPECT_EQ(program.Ask("info"), Info(56, 64)) << "the driver has four blocks still";
  for (int i = 0; i < 16; i += 4) EXPECT_EQ(program.Ask(absl::StrCat("free ", i)), "0");
  EXPECT_EQ(program.Ask("info"), Info(64, 64));
}

// Two arrays share a unit. A thread waits for a second unit.
TEST_F(PreloadProtocol, AnArrayThatWaitsIsNotInTheWayOfOneThatHasRoom) {
  PlayedDaemon daemon(kPackingUuid, 8 * kMiB);
  Program program = RunPacking(daemon, {{"VRAMBROKER_WAIT", "10m"}});
  for (const std::string what : {"plain 6M", "array 1000K", "array 900K"}) {
    EXPECT_EQ(program.Ask("alloc " + what), "0");
  }
  daemon.HoldBack(VRAMBROKER_COUNT_WAIT);
  EXPECT_EQ(program.Ask("array_thread 512K"), "0");
  ASSERT_TRUE(WaitFor([&] { return daemon.Calls(VRAMBROKER_COUNT_WAIT) == 1; }));
  EXPECT_EQ(program.Ask("alloc array 64K"), "0");
  EXPECT_EQ(daemon.Calls(VRAMBROKER_COUNT_WAIT), 1);
  daemon.SendHeldBack();
  EXPECT_EQ(program.Ask("join"), "2");
  EXPECT_THAT(program.ErrorText(), HasSubstr("cuArrayCreate of 0.5 MiB refused: the played daemon has no more"));
  EXPECT_EQ(daemon.charged(), 8 * kMiB);
}

// An array of the first unit is freed while the daemon is asked for another unit.
TEST_F(PreloadProtocol, AnArrayThatIsRefusedAUnitTakesTheRoomInAnother) {
  PlayedDaemon daemon(kPackingUuid, 8 * kMiB);
  Program program = RunPacking(daemon, {{"VRAMBROKER_WAIT", "10m"}});
  for (const std::string what : {"plain 6M", "array 1000K", "array 900K"}) {
    EXPECT_EQ(program.Ask("alloc " + what), "0");
  }
  daemon.HoldBack(VRAMBROKER_COUNT_WAIT);
  EXPECT_EQ(program.Ask("array_thread 512K"), "0");
  ASSERT_TRUE(WaitFor([&] { return daemon.Calls(VRAMBROKER_COUNT_WAIT) == 1; }));
  EXPECT_EQ(program.Ask("free 2"), "0");
  daemon.SendHeldBack();
  EXPECT_EQ(program.Ask("join"), "0");
  EXPECT_EQ(daemon.charged(), 8 * kMiB);
}

TEST_F(PreloadProtocol, PairsOfSmallAllocationsMakeFewCalls) {
  PlayedDaemon daemon(kPackingUuid, 64 * kMiB);
  Program program = RunPacking(daemon);
  EXPECT_EQ(program.Ask("pairs 10000 64K").substr(0, 2), "0 ");
  EXPECT_EQ(program.Ask("pairs 10000 2M").substr(0, 2), "0 ");
  // Unused slack goes back after a while, possibly between two pairs.
  EXPECT_LE(daemon.Calls(VRAMBROKER_COUNT_CHARGE), 10);
}

TEST_F(PreloadProtocol, SlackGoesBackWhenItIsNotNeeded) {
  PlayedDaemon daemon(kPackingUuid, 64 * kMiB);
  Program program = RunPacking(daemon);
  EXPECT_EQ(program.Ask("alloc plain 20M"), "0");
  EXPECT_EQ(program.Ask("free 0"), "0");
  EXPECT_LE(daemon.charged(), 2 * kMiB);
  EXPECT_TRUE(WaitFor([&] { return daemon.charged() == 0; }));
}

TEST_F(PreloadProtocol, SlackOfEachDeviceGoesBack) {
  PlayedDaemon daemon(std::vector<std::string>{kPackingUuid, kSecondPackingUuid}, 64 * kMiB);
  Program program = RunPacking(daemon);
  EXPECT_EQ(program.Ask("alloc plain 2M"), "0");
  EXPECT_EQ(program.Ask("device 1"), "0");
  EXPECT_EQ(program.Ask("alloc plain 20M"), "0");
  EXPECT_EQ(program.Ask("free 1"), "0");
  EXPECT_LE(daemon.charged(1), 2 * kMiB) << "at once";
  EXPECT_TRUE(WaitFor([&] { return daemon.charged(1) == 0; }));
  EXPECT_EQ(daemon.charged(0), 2 * kMiB);
}

TEST_F(PreloadProtocol, WhatABusyDaemonDoesNotTakeBackIsGivenBackLater) {
  PlayedDaemon daemon(kPackingUuid, 64 * kMiB);
  Program program = RunPacking(daemon);
  EXPECT_EQ(program.Ask("alloc plain 20M"), "0");
  daemon.SetBusy(VRAMBROKER_COUNT_UNCHARGE, 1);
  EXPECT_EQ(program.Ask("free 0"), "0");
  EXPECT_TRUE(WaitFor([&] { return daemon.charged() == 0; }));
}

// Others may wait for slack. The waiting thread has it back with its memory.
TEST_F(PreloadProtocol, AProgramThatWaitsKeepsNoSlackAndThenSomeAgain) {
  PlayedDaemon daemon(kPackingUuid, 8 * kMiB);
  Program program = RunPacking(daemon);
  EXPECT_EQ(program.Ask("alloc plain 4M"), "0");
  EXPECT_EQ(program.Ask("alloc plain 4M"), "0");
  EXPECT_EQ(program.Ask("free 1"), "0");
  daemon.HoldBack(VRAMBROKER_COUNT_WAIT);
  program.Tell("alloc plain 6M");
  ASSERT_TRUE(WaitFor([&] { return daemon.Calls(VRAMBROKER_COUNT_WAIT) == 1; }));
  EXPECT_EQ(daemon.charged(), 4 * kMiB);
  daemon.SendHeldBack();
  EXPECT_EQ(program.Hear(), "2");
  EXPECT_EQ(program.Ask("pairs 1000 2M").substr(0, 2), "0 ");
  EXPECT_LE(daemon.Calls(VRAMBROKER_COUNT_CHARGE), 100) << "the program keeps a unit";
}

TEST_F(PreloadProtocol, ADaemonThatIsBusyIsAskedAgain) {
  PlayedDaemon daemon(kPackingUuid, 64 * kMiB);
  daemon.SetBusy(VRAMBROKER_COUNT_CHARGE, 3);
  Program program = RunPacking(daemon);
  EXPECT_EQ(program.Ask("alloc plain 10M"), "0");
  EXPECT_GE(daemon.Calls(VRAMBROKER_COUNT_CHARGE), 4);
}

// A device without an answer would seem not served, and memory on the device would not be counted.
TEST_F(PreloadProtocol, ADaemonThatIsBusyWhenASessionBeginsIsAskedAgain) {
  PlayedDaemon daemon(kPackingUuid, 64 * kMiB);
  daemon.SetBusy(VRAMBROKER_COUNT_INFO, 2);
  Program program = RunPacking(daemon);
  EXPECT_EQ(program.Ask("alloc plain 20M"), "0");
  EXPECT_EQ(daemon.charged(), 20 * kMiB);
  daemon.Forget();
  daemon.SetBusy(VRAMBROKER_COUNT_HOLD, 2);
  daemon.HangUpAfter(VRAMBROKER_COUNT_INFO);
  EXPECT_EQ(program.Ask("info"), Info(44, 64));
  EXPECT_EQ(program.Ask("alloc plain 10M"), "0");
  EXPECT_EQ(daemon.charged(), 30 * kMiB);
  EXPECT_EQ(daemon.Calls(VRAMBROKER_COUNT_HOLD), 3);
}

// The daemon does not name its devices.
TEST_F(PreloadProtocol, WhileASessionBeginsNothingIsTaken) {
  PlayedDaemon daemon(kPackingUuid, 64 * kMiB);
  Program program = RunPacking(daemon, {{"VRAMBROKER_RECONNECT", "300ms"}});
  EXPECT_EQ(program.Ask("alloc plain 20M"), "0");
  daemon.SetBusy(VRAMBROKER_COUNT_INFO, 1'000'000);
  daemon.HangUpAfter(VRAMBROKER_COUNT_CHARGE);
  for (int i = 0; i < 3; ++i) EXPECT_EQ(program.Ask("alloc plain 20M"), "2") << i;
  daemon.SetBusy(VRAMBROKER_COUNT_INFO, 0);
  EXPECT_EQ(program.Ask("alloc plain 20M"), "0");
  EXPECT_EQ(daemon.charged(), 40 * kMiB);
}

TEST_F(PreloadProtocol, ADeviceThatTheDaemonDoesNotServeIsNotCounted) {
  PlayedDaemon daemon("GPU-22222222-1111-1111-1111-111111111111", 2 * kMiB);
  Program program = RunPacking(daemon);
  EXPECT_EQ(program.Ask("alloc plain 20M"), "0");
  EXPECT_EQ(program.Ask("info"), Info(108, 128));
  EXPECT_THAT(program.ErrorText(), HasSubstr("the daemon does not serve GPU 0"));
  EXPECT_EQ(daemon.Calls(VRAMBROKER_COUNT_CHARGE), 0);
}

// The program uses the second device only after the first daemon.
TEST_F(PreloadProtocol, ADeviceThatIsNotServedAnyMoreIsNotCountedAnyMore) {
  PlayedDaemon daemon(std::vector<std::string>{kPackingUuid, kSecondPackingUuid}, 64 * kMiB);
  Program program = RunPacking(daemon);
  EXPECT_EQ(program.Ask("alloc plain 20M"), "0");
  daemon.set_distort([](const PlayedDaemon::Request& request, PlayedDaemon::Answer answer) {
    if (request.call == VRAMBROKER_COUNT_INFO) std::strcpy(answer.uuid, "GPU-22222222-1111-1111-1111-111111111111");
    return PlayedDaemon::Bytes(answer);
  });
  daemon.HangUpAfter(VRAMBROKER_COUNT_CHARGE);
  EXPECT_EQ(program.Ask("alloc plain 60M"), "0");
  EXPECT_EQ(daemon.charged(), 0u);
  EXPECT_EQ(program.Ask("device 1"), "0");
  EXPECT_EQ(program.Ask("alloc plain 20M"), "0");
  EXPECT_EQ(program.Ask("info"), Info(108, 128)) << "the driver's figures";
  EXPECT_THAT(program.ErrorText(), HasSubstr("the daemon does not serve GPU 1"));
}

TEST_F(PreloadProtocol, AnOlderDaemonServesProgramsThatAskItForNothingNewer) {
  for (const auto& [most, known, newer] :
       {std::tuple(VRAMBROKER_COUNT_SHORT_REQUEST_BYTES, "VRAMBROKER_NAME", "VRAMBROKER_GUARANTEE"),
        std::tuple(VRAMBROKER_COUNT_NO_DEVICES_REQUEST_BYTES, "VRAMBROKER_GUARANTEE", "VRAMBROKER_DEVICES")}) {
    PlayedDaemon daemon(kPackingUuid, 64 * kMiB);
    daemon.set_most_request_bytes(most);
    Program served = RunPacking(daemon, {{known, "1B"}});
    EXPECT_EQ(served.Ask("alloc plain 2M"), "0") << served.ErrorText();
    Program refused = RunPacking(daemon, {{newer, "1B"}});
    EXPECT_EQ(refused.Ask("alloc plain 2M"), "2");
    EXPECT_THAT(refused.ErrorText(), HasSubstr("does not answer as it should: is it of this version"));
  }
}

// The daemon grants the allocation's unit, and refuses the pool's second unit.
TEST_F(PreloadProtocol, APoolThatIsRefusedAPartAsksForAllOfItsMemory) {
  PlayedDaemon daemon(kPackingUuid, 8 * kMiB);
  std::atomic<uint64_t> asked = 0;
  daemon.set_distort([&](const PlayedDaemon::Request& request, const PlayedDaemon::Answer& answer) {
    if (request.call == VRAMBROKER_COUNT_WAIT) asked = request.bytes;
    return PlayedDaemon::Bytes(answer);
  });
  Program program = RunPacking(daemon);
  EXPECT_EQ(program.Ask("alloc plain 6M"), "0");
  EXPECT_EQ(program.Ask("alloc async 1M"), "2");
  EXPECT_EQ(asked, 4 * kMiB);
}

// Memory already held by a pool of the device counts, too.
TEST_F(PreloadProtocol, PoolsOfADeviceThatIsServedLaterAreCountedFromThen) {
  PlayedDaemon daemon(std::vector<std::string>{kPackingUuid, kSecondPackingUuid}, 64 * kMiB);
  daemon.set_distort([](const PlayedDaemon::Request& request, PlayedDaemon::Answer answer) {
    if (request.device == 0) std::strcpy(answer.uuid, "GPU-33333333-1111-1111-1111-111111111111");
    return PlayedDaemon::Bytes(answer);
  });
  Program program = RunPacking(daemon);
  EXPECT_EQ(program.Ask("alloc async 20M"), "0");
  EXPECT_EQ(program.Ask("device 1"), "0");
  EXPECT_EQ(program.Ask("alloc plain 2M"), "0");
  EXPECT_EQ(daemon.charged(0), 0u);
  daemon.set_distort(nullptr);
  daemon.HangUpAfter(VRAMBROKER_COUNT_CHARGE);
  EXPECT_EQ(program.Ask("alloc plain 2M"), "0");
  EXPECT_EQ(program.Ask("device 0"), "0");
  EXPECT_EQ(program.Ask("alloc async 20M"), "0");
  EXPECT_GE(daemon.charged(0), 40 * kMiB);
}

// A driver may free a pool's memory with a context, in a call of another function. The pool has room again.
TEST_F(PreloadProtocol, WhatAPoolLosesUnseenTakesNoRoom) {
  PlayedDaemon daemon(kPackingUuid, 8 * kMiB);
  Program program = RunPacking(daemon);
  EXPECT_EQ(program.Ask("alloc async 3M"), "0");
  EXPECT_EQ(program.Ask("free_unseen 0"), "0");
  EXPECT_EQ(program.Ask("default_pool"), "0");
  EXPECT_EQ(program.Ask("trim"), "0");
  EXPECT_EQ(program.Ask("alloc array 4M"), "0") << "gets the number of the freed memory";
  EXPECT_EQ(program.Ask("alloc async 1536K"), "0") << "the driver takes 4 MiB";
  EXPECT_EQ(daemon.charged(), 8 * kMiB);
  EXPECT_EQ(program.Ask("alloc async 2M"), "0");
}

TEST_F(PreloadProtocol, AnAddressThatAPoolGivesAgainTakesRoomOnce) {
  PlayedDaemon daemon(kPackingUuid, 8 * kMiB);
  Program program = RunPacking(daemon);
  EXPECT_EQ(program.Ask("alloc async 1536K"), "0") << "the driver takes 4 MiB";
  EXPECT_EQ(program.Ask("free_unseen 0"), "0");
  EXPECT_EQ(program.Ask("alloc async 1536K"), "0") << "has the address of the freed memory";
  EXPECT_EQ(program.Ask("alloc plain 4M"), "0");
  EXPECT_EQ(daemon.charged(), 8 * kMiB);
  EXPECT_EQ(program.Ask("alloc async 2M"), "0");
}

// The plain allocation makes the library read all pools.
TEST_F(PreloadProtocol, APoolWithTheHandleOfAnotherCountsOnce) {
  PlayedDaemon daemon(kPackingUuid, 64 * kMiB);
  Program program = RunPacking(daemon);
  EXPECT_EQ(program.Ask("pool"), "0");
  EXPECT_EQ(program.Ask("destroy_pool_unseen"), "0");
  EXPECT_EQ(program.Ask("pool"), "0") << "has the handle of the destroyed pool";
  for (int i = 0; i < 2; ++i) EXPECT_EQ(program.Ask("alloc pool 1M"), "0") << "the driver takes 4 MiB for both";
  EXPECT_EQ(program.Ask("alloc plain 2M"), "0");
  EXPECT_EQ(program.Ask("info"), Info(58, 64));
}

// The driver gives back the graph's memory in no call known to the library.
TEST_F(PreloadProtocol, GraphsAreAskedForTheirMemoryWhenAContextEnds) {
  PlayedDaemon daemon(kPackingUuid, 64 * kMiB);
  Program program = RunPacking(daemon);
  EXPECT_EQ(program.Ask("make_graph 20M 0"), "0");
  EXPECT_EQ(program.Ask("reserve_for_graphs 0 -10"), "0");
  EXPECT_EQ(daemon.charged(), 20 * kMiB);
  EXPECT_EQ(program.Ask("destroy_and_reuse 2M plain"), "0");
  EXPECT_EQ(program.Ask("taken 0"), "0 1");
  EXPECT_TRUE(WaitFor([&] { return daemon.charged() <= 4 * kMiB; })) << "a unit of slack is kept";
}

// The packing driver's state is copied with the process: a child can free its parent's memory.
TEST_F(PreloadProtocol, WhatAChildFreesOfItsParentsMemoryWasNotCountedForIt) {
  for (const std::string kind : {"plain", "array", "handle", "async", "graph"}) {
    PlayedDaemon daemon(kPackingUuid, 64 * kMiB);
    Program program = RunPacking(daemon);
    EXPECT_EQ(program.Ask(absl::StrCat("alloc ", kind, " 20M")), "0") << kind;
    ASSERT_EQ(program.Ask("fork"), "0");
    EXPECT_EQ(program.Ask("alloc plain 20M"), "0") << kind;
    EXPECT_EQ(program.Ask("free 0"), "0") << kind;
    EXPECT_EQ(daemon.charged(), 20 * kMiB) << kind;
  }
}

// --- Daemons with wrong answers: handled like a missing daemon, and never in a hot loop ---

class PreloadHostile : public PreloadProtocol, public ::testing::WithParamInterface<uint32_t> {
 protected:
  // Checks an allocation with a daemon giving wrong answers to a call.
  void Expect(const PlayedDaemon::Distort& distort) {
    PlayedDaemon daemon(kPackingUuid, 64 * kMiB);
    daemon.set_distort([&](const PlayedDaemon::Request& request, const PlayedDaemon::Answer& answer) {
      return request.call == GetParam() ? distort(request, answer) : PlayedDaemon::Bytes(answer);
    });
    Program program = RunPacking(daemon, {{"VRAMBROKER_RECONNECT", "300ms"}});
    EXPECT_EQ(program.Ask("alloc plain 20M"), "2");
    EXPECT_LE(daemon.Calls(GetParam()), 100);
    EXPECT_THAT(program.ErrorText(), HasSubstr("vrambroker: "));
    EXPECT_EQ(program.Ask("getpid"), absl::StrCat("0 ", program.process().pid())) << "it lives";
  }
};

TEST_P(PreloadHostile, Garbage) {
  Expect([](const auto&, const auto& answer) { return std::string(sizeof answer, '\xff'); });
}

TEST_P(PreloadHostile, TooShort) {
  Expect([](const auto&, const auto& answer) { return PlayedDaemon::Bytes(answer).substr(0, 20); });
}

TEST_P(PreloadHostile, Empty) {
  Expect([](const auto&, const auto&) { return std::string(); });
}

TEST_P(PreloadHostile, TooLong) {
  Expect([](const auto&, const auto& answer) { return PlayedDaemon::Bytes(answer) + std::string(5000, 'x'); });
}

TEST_P(PreloadHostile, OfAnotherVersion) {
  Expect([](const auto&, auto answer) {
    answer.version = 77;
    return PlayedDaemon::Bytes(answer);
  });
}

TEST_P(PreloadHostile, ToAnotherCall) {
  Expect([](const auto&, auto answer) {
    answer.call = VRAMBROKER_COUNT_UNCHARGE;
    return PlayedDaemon::Bytes(answer);
  });
}

TEST_P(PreloadHostile, Silence) {
  Expect([](const auto&, const auto&) { return std::nullopt; });
}

TEST_P(PreloadHostile, TextsWithoutAnEnd) {
  Expect([](const auto&, auto answer) {
    answer.code = 9;
    std::memset(answer.uuid, 'x', sizeof answer.uuid);
    std::memset(answer.message, 'x', sizeof answer.message);
    return PlayedDaemon::Bytes(answer);
  });
}

INSTANTIATE_TEST_SUITE_P(All, PreloadHostile, ::testing::Values(VRAMBROKER_COUNT_HELLO, VRAMBROKER_COUNT_CHARGE),
                         [](const auto& call) {
                           return std::string(call.param == VRAMBROKER_COUNT_HELLO ? "Hello" : "Charge");
                         });

TEST_F(PreloadProtocol, ADaemonThatHangsUpIsNoEnd) {
  PlayedDaemon daemon(kPackingUuid, 64 * kMiB);
  Program program = RunPacking(daemon, {{"VRAMBROKER_RECONNECT", "300ms"}});
  EXPECT_EQ(program.Ask("alloc plain 20M"), "0");
  daemon.set_hang_up(true);
  EXPECT_EQ(program.Ask("alloc plain 20M"), "2");
  EXPECT_EQ(program.Ask("free 0"), "0");
  daemon.set_hang_up(false);
  EXPECT_EQ(program.Ask("alloc plain 60M"), "0");
  EXPECT_EQ(program.Ask("info"), Info(4, 64));
}

// The daemon has counted an allocation unknown to the program.
TEST_F(PreloadProtocol, AfterALostConnectionTheSessionGoesOnAsItWas) {
  PlayedDaemon daemon(kPackingUuid, 64 * kMiB);
  std::atomic<int> hellos_with_token = 0;
  std::atomic<uint64_t> least_charged = ~uint64_t{0};
  Program program = RunPacking(daemon);
  EXPECT_EQ(program.Ask("alloc plain 20M"), "0");
  daemon.set_distort([&](const PlayedDaemon::Request& request, const PlayedDaemon::Answer& answer) {
    if (request.call == VRAMBROKER_COUNT_HELLO && request.token[0] != 0) ++hellos_with_token;
    least_charged = std::min(least_charged.load(), answer.charged_bytes);
    return PlayedDaemon::Bytes(answer);
  });
  daemon.HangUpAfter(VRAMBROKER_COUNT_CHARGE);
  EXPECT_EQ(program.Ask("alloc plain 30M"), "0");
  EXPECT_EQ(program.Ask("info"), Info(14, 64));
  EXPECT_EQ(daemon.charged(), 50 * kMiB);
  EXPECT_GE(hellos_with_token, 1);
  EXPECT_EQ(daemon.Calls(VRAMBROKER_COUNT_HOLD), 0) << "the daemon knew of it";
  EXPECT_EQ(least_charged, 20 * kMiB) << "what the program held was counted all the time";
}

// The restarted daemon does not know the earlier daemon's grants.
TEST_F(PreloadProtocol, WhatAnEarlierSessionIsGrantedDoesNotCount) {
  PlayedDaemon daemon(kPackingUuid, 64 * kMiB);
  daemon.set_distort([](const PlayedDaemon::Request& request, PlayedDaemon::Answer answer) {
    if (request.call == VRAMBROKER_COUNT_CHARGE && request.bytes > 32 * kMiB) answer.code = 8;
    return PlayedDaemon::Bytes(answer);
  });
  daemon.HoldBack(VRAMBROKER_COUNT_WAIT);
  Program program = RunPacking(daemon, {{"VRAMBROKER_WAIT", "10m"}});
  program.Tell("alloc plain 40M");
  ASSERT_TRUE(WaitFor([&] { return daemon.Calls(VRAMBROKER_COUNT_WAIT) == 1; }));
  const int asked = daemon.Calls(VRAMBROKER_COUNT_INFO);
  daemon.set_distort(nullptr);
  daemon.Forget();
  daemon.HangUp();
  ASSERT_TRUE(WaitFor([&] { return daemon.Calls(VRAMBROKER_COUNT_INFO) > asked; })) << "a new session begins";
  daemon.SendHeldBack();
  EXPECT_EQ(program.Hear(), "0");
  EXPECT_EQ(daemon.charged(), 40 * kMiB) << "it was asked again";
}

// Other programs wait for all programs' amounts.
TEST_F(PreloadProtocol, AProgramThatHoldsNothingSaysSoToANewDaemon) {
  PlayedDaemon daemon(kPackingUuid, 64 * kMiB);
  Program program = RunPacking(daemon);
  EXPECT_EQ(program.Ask("own_context"), "0");
  EXPECT_EQ(daemon.Calls(VRAMBROKER_COUNT_HOLD), 0);
  daemon.HangUp();
  EXPECT_TRUE(WaitFor([&] { return daemon.Calls(VRAMBROKER_COUNT_HOLD) == 1; }));
  EXPECT_EQ(daemon.charged(), 0u);
}

// The slack is gone even while the new session begins.
TEST_F(PreloadProtocol, SlackOfAnEarlierSessionIsNone) {
  PlayedDaemon daemon(kPackingUuid, 64 * kMiB);
  Program program = RunPacking(daemon, {{"VRAMBROKER_RECONNECT", "300ms"}});
  EXPECT_EQ(program.Ask("alloc plain 2M"), "0");
  EXPECT_EQ(program.Ask("free 0"), "0");
  const int asked = daemon.Calls(VRAMBROKER_COUNT_INFO);
  daemon.SetBusy(VRAMBROKER_COUNT_INFO, 1'000'000);
  daemon.Forget();
  daemon.HangUp();
  ASSERT_TRUE(WaitFor([&] { return daemon.Calls(VRAMBROKER_COUNT_INFO) > asked; }));
  EXPECT_EQ(program.Ask("alloc plain 2M"), "2");
  daemon.SetBusy(VRAMBROKER_COUNT_INFO, 0);
  EXPECT_EQ(program.Ask("alloc plain 2M"), "0");
  EXPECT_EQ(daemon.charged(), 2 * kMiB);
}

TEST_F(PreloadProtocol, WhyADaemonHasNoRoomForAConnectionIsSaid) {
  PlayedDaemon daemon(kPackingUuid, 8 * kMiB);
  daemon.set_distort([](const PlayedDaemon::Request& request, const PlayedDaemon::Answer& answer) {
    if (request.call != VRAMBROKER_COUNT_JOIN) return PlayedDaemon::Bytes(answer);
    PlayedDaemon::Answer refused = answer;
    refused.call = VRAMBROKER_COUNT_HELLO;
    refused.code = 8;
    std::snprintf(refused.message, sizeof refused.message, "no room for another connection");
    return PlayedDaemon::Bytes(refused);
  });
  Program program = RunPacking(daemon);
  EXPECT_EQ(program.Ask("alloc plain 16M"), "2");
  EXPECT_THAT(program.ErrorText(), HasSubstr("no room for another connection"));
}

// The refusal of the first try stands.
TEST_F(PreloadProtocol, AProgramWithoutDescriptorsIsRefusedAtOnce) {
  PlayedDaemon daemon(kPackingUuid, 8 * kMiB);
  Program program = RunPacking(daemon, {{"VRAMBROKER_RECONNECT", "1h"}});
  EXPECT_EQ(program.Ask("alloc plain 2M"), "0");
  const rlimit none = {.rlim_cur = 3, .rlim_max = 3};
  ASSERT_EQ(prlimit(program.process().pid(), RLIMIT_NOFILE, &none, nullptr), 0);
  EXPECT_EQ(program.Ask("alloc plain 16M"), "2");
  EXPECT_THAT(program.ErrorText(), HasSubstr("the played daemon has no more"));
}

// An operator has ended the session. The process gets no other session, and learns the reason at once.
TEST_F(PreloadProtocol, AnEndedSessionIsNotWaitedFor) {
  PlayedDaemon daemon(kPackingUuid, 64 * kMiB);
  Program program = RunPacking(daemon);
  EXPECT_EQ(program.Ask("alloc plain 20M"), "0");
  daemon.set_distort([](const PlayedDaemon::Request& request, PlayedDaemon::Answer answer) {
    if (request.call == VRAMBROKER_COUNT_CHARGE || request.call == VRAMBROKER_COUNT_HELLO) {
      answer.code = 10;
      std::strcpy(answer.message, "an operator has ended it");
    }
    return PlayedDaemon::Bytes(answer);
  });
  EXPECT_EQ(program.Ask("alloc plain 20M"), "2");
  EXPECT_THAT(program.ErrorText(), HasSubstr("an operator has ended it"));
  EXPECT_GE(daemon.Calls(VRAMBROKER_COUNT_HELLO), 2) << "the process has asked for another session";
  EXPECT_LE(daemon.Calls(VRAMBROKER_COUNT_HELLO), 20);
  EXPECT_EQ(program.Ask("free 0"), "0");
}

// Excessive amounts or nonsense in the figures change only the figures told to the program.
TEST_F(PreloadProtocol, WildFiguresDoNoHarm) {
  PlayedDaemon daemon(kPackingUuid, 64 * kMiB);
  daemon.set_distort([](const auto&, auto answer) {
    answer.limit_bytes = ~uint64_t{0};
    answer.free_bytes = ~uint64_t{0} - 5;
    answer.charged_bytes = ~uint64_t{0};
    answer.devices = ~uint32_t{0};
    return PlayedDaemon::Bytes(answer);
  });
  Program program = RunPacking(daemon);
  EXPECT_EQ(program.Ask("alloc plain 20M"), "0");
  EXPECT_EQ(program.Ask("info"), Info(128, 128)) << "never more than the driver has";
  EXPECT_EQ(program.Ask("free 0"), "0");
}

}  // namespace
}  // namespace vrambroker::testing_support
