// SPDX-License-Identifier: Apache-2.0
//
// Charges, and threads growing a reserve at the same time, with a played ledger and clock.
#include <gtest/gtest.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <thread>
#include <utility>

extern "C" {
#include "client/preload/growth.h"
#include "client/preload/pools.h"
#include "client/preload/runtime.h"
}

namespace {

std::atomic<uint64_t> units_left;  // units still available from the daemon
std::function<void()> when_taken;  // called once, before the thread gets its answer
bool have_others_had = false;      // other programs had the taken units before
uint64_t clock_ms = 1;

}  // namespace

extern "C" {

int ledger_take(struct account* /*account*/, uint64_t units, enum patience /*patience*/, int* waited,
                char* /*message*/) {
  if (units > units_left) return -1;
  units_left -= units;
  *waited = have_others_had ? 1 : 0;
  if (const auto action = std::exchange(when_taken, nullptr); action) action();
  return 0;
}

void ledger_give(struct account* /*account*/, uint64_t units) {
  units_left += units;
}

void ledger_owe(struct account* /*account*/, uint64_t /*units*/) {}

int refuse(const char* /*message*/) {
  return CU_OUT_OF_MEMORY;
}

void pools_read_if_freed(void) {}

uint64_t now_ms(void) {
  return clock_ms;
}

void sleep_ms(uint64_t milliseconds) {
  clock_ms += milliseconds;
}

struct calm calm_begin(void) {
  return {};
}

void calm_end(struct calm /*calm*/) {}

}  // extern "C"

namespace vrambroker::testing_support {
namespace {

// After a wait, the driver may have the other programs' memory a moment later.
TEST(PreloadCharge, AfterAWaitTheDriverIsAskedAgainForASecond) {
  int counted = 0;
  for (const bool waits : {false, true}) {
    charge allocation = {};
    have_others_had = waits;
    units_left = 1;
    ASSERT_EQ(charge_begin(&allocation, reinterpret_cast<account*>(&counted), "cuMemAlloc", 1, 1, MAY_WAIT), 0);
    const uint64_t start = clock_ms;
    EXPECT_EQ(charge_again(&allocation, CU_OK), 0);
    while (charge_again(&allocation, CU_OUT_OF_MEMORY) != 0) {
    }
    EXPECT_EQ(clock_ms - start, waits ? 1000u : 0u);
  }
  have_others_had = false;
}

// Two threads read the driver's memory for both threads. The first thread's charge is granted, but not yet recorded.
TEST(PreloadGrowth, WhatAnotherThreadPaysForIsNotRefused) {
  reserve shared = {};
  std::atomic<uint64_t> of_driver = 0;
  shared.owner = &of_driver;
  shared.read = [](const void* owner, uint64_t* units) {
    *units = *static_cast<const std::atomic<uint64_t>*>(owner);
    return 0;
  };
  growth one = {};
  growth other = {};
  growth_enter(&one, &shared);
  growth_enter(&other, &shared);
  of_driver = units_left = 5;
  int result = 1;
  std::atomic<bool> is_done = false;
  std::thread thread;
  when_taken = [&] {
    thread = std::thread([&] {
      result = growth_leave(&other, &shared);
      is_done = true;
    });
    while (__atomic_load_n(&shared.paying.state, __ATOMIC_RELAXED) != 2 && !is_done) std::this_thread::yield();
  };
  EXPECT_EQ(growth_leave(&one, &shared), 0);
  thread.join();
  EXPECT_EQ(result, 0);
  EXPECT_EQ(shared.known, 5u);
  EXPECT_EQ(shared.calls, 0u);
  EXPECT_EQ(units_left.load(), 0u);
}

// The first thread reads the driver's memory for both threads. Before the first thread's charge, the other thread is
// refused, and undoes its call.
TEST(PreloadGrowth, WhatAnotherThreadIsRefusedIsNotAskedFor) {
  struct Driver {
    uint64_t units = 6;
    std::function<void()> when_read;  // called once
  } driver;
  reserve shared = {};
  shared.owner = &driver;
  shared.read = [](const void* owner, uint64_t* units) {
    auto* const of = static_cast<Driver*>(const_cast<void*>(owner));
    *units = of->units;
    if (const auto action = std::exchange(of->when_read, nullptr); action) action();
    return 0;
  };
  growth one = {};
  growth other = {};
  growth_enter(&one, &shared);
  growth_enter(&other, &shared);
  units_left = 3;
  driver.when_read = [&] {
    EXPECT_EQ(growth_leave(&other, &shared), -1);
    driver.units = 3;
    growth_undone(&shared);
  };
  EXPECT_EQ(growth_leave(&one, &shared), 0);
  EXPECT_EQ(shared.known, 3u);
  EXPECT_EQ(units_left.load(), 0u);
}

}  // namespace
}  // namespace vrambroker::testing_support
