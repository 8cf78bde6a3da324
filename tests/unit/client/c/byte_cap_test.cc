// SPDX-License-Identifier: Apache-2.0
#include "client/c/byte_cap.h"

#include <gtest/gtest.h>

#include <atomic>
#include <limits>
#include <thread>
#include <vector>

namespace vrambroker::c_library {
namespace {

TEST(ByteCapTest, RefusesWhatWouldExceedTheCap) {
  ByteCap cap;
  EXPECT_TRUE(cap.Charge(1000).ok) << "there is none yet";
  cap.SetCap(1200);
  EXPECT_TRUE(cap.Charge(200).ok);
  const ByteCap::Charged refused = cap.Charge(1);
  EXPECT_FALSE(refused.ok);
  EXPECT_EQ(refused.held, 1200u);
  EXPECT_EQ(refused.cap, 1200u);
  cap.Uncharge(200);
  EXPECT_FALSE(cap.Charge(std::numeric_limits<uint64_t>::max()).ok) << "the sum would wrap";
  EXPECT_TRUE(cap.Charge(200).ok);
  cap.SetCap(100);
  EXPECT_FALSE(cap.Charge(1).ok) << "more is held than may be";
  cap.SetCap(0);
  EXPECT_TRUE(cap.Charge(1).ok);
}

// A fitting request is never refused because of another thread's larger request.
TEST(ByteCapTest, RequestsThatFitAreNeverRefused) {
  constexpr int kFitting = 3;
  constexpr uint64_t kBytes = 10;
  ByteCap cap;
  cap.SetCap(kFitting * kBytes);
  std::atomic<bool> done{false};
  std::atomic<uint64_t> granted{0};
  std::thread greedy([&] {
    while (!done) {
      if (cap.Charge(kFitting * kBytes + 1).ok) ++granted;
    }
  });
  std::atomic<uint64_t> refused{0};
  std::vector<std::thread> threads;
  threads.reserve(kFitting);
  for (int t = 0; t < kFitting; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 200'000; ++i) {
        if (cap.Charge(kBytes).ok) {
          cap.Uncharge(kBytes);
        } else {
          ++refused;
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  done = true;
  greedy.join();
  EXPECT_EQ(refused, 0u);
  EXPECT_EQ(granted, 0u);
  EXPECT_EQ(cap.Charge(0).held, 0u) << "nothing is left over";
}

}  // namespace
}  // namespace vrambroker::c_library
