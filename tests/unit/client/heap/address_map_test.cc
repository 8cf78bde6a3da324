// SPDX-License-Identifier: Apache-2.0
#include "client/heap/address_map.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "allocator/base/bytes.h"

namespace vrambroker::client_internal {
namespace {

constexpr uint64_t kBase = 0x7F12'3400'0000;  // start of a page

// The tests never read the memory at `address`.
void* At(uint64_t address) {
  return reinterpret_cast<void*>(address);  // NOLINT(performance-no-int-to-ptr)
}

class AddressMapTest : public ::testing::Test {
 protected:
  void* Value(uint64_t address) const { return map().Find(At(address)).value; }
  AddressMap& map() { return *map_; }
  const AddressMap& map() const { return *map_; }

  int owner_ = 0, other_ = 0, value_ = 0, value2_ = 0;

 private:
  const std::unique_ptr<AddressMap> map_ = std::make_unique<AddressMap>();
};

TEST_F(AddressMapTest, FindsWhatWasPut) {
  ASSERT_TRUE(map().AddRange(At(kBase), 2_MiB, 512, &owner_));
  for (const uint64_t offset : {uint64_t{0}, uint64_t{512}, 1_MiB, 2_MiB - 512}) {
    EXPECT_EQ(Value(kBase + offset), nullptr);
    EXPECT_TRUE(map().Put(At(kBase + offset), &value_));
    const AddressMap::Entry entry = map().Find(At(kBase + offset));
    EXPECT_EQ(entry.owner, &owner_);
    EXPECT_EQ(entry.value, &value_);
  }
  EXPECT_EQ(Value(kBase + 1024), nullptr);
}

TEST_F(AddressMapTest, TakesOnce) {
  ASSERT_TRUE(map().AddRange(At(kBase), 2_MiB, 512, &owner_));
  ASSERT_TRUE(map().Put(At(kBase + 512), &value_));
  const AddressMap::Entry entry = map().Take(At(kBase + 512));
  EXPECT_EQ(entry.owner, &owner_);
  EXPECT_EQ(entry.value, &value_);
  EXPECT_EQ(map().Take(At(kBase + 512)).value, nullptr) << "a second free";
  EXPECT_EQ(Value(kBase + 512), nullptr);
  ASSERT_TRUE(map().Put(At(kBase + 512), &value2_));
  EXPECT_EQ(map().Take(At(kBase + 512)).value, &value2_);
}

TEST_F(AddressMapTest, PointerIntoABlockIsNoBlock) {
  for (const uint64_t granule : {uint64_t{512}, 1_MiB, 32_MiB}) {
    const uint64_t base = kBase + granule * 1024;
    ASSERT_TRUE(map().AddRange(At(base), 64_MiB, granule, &owner_));
    ASSERT_TRUE(map().Put(At(base + 1_MiB + 1024), &value_));
    for (const int64_t off : {-1024, -512, -1, 1, 8, 511, 512, 1024, 1 << 19, 1 << 20, 1 << 21}) {
      EXPECT_EQ(Value(base + 1_MiB + 1024 + static_cast<uint64_t>(off)), nullptr) << off;
      EXPECT_EQ(map().Take(At(base + 1_MiB + 1024 + static_cast<uint64_t>(off))).value, nullptr) << off;
    }
    EXPECT_EQ(Value(base + 1_MiB + 1024), &value_) << "still there";
  }
}

TEST_F(AddressMapTest, GranuleHoldsTheLastValue) {
  ASSERT_TRUE(map().AddRange(At(kBase), 20_MiB, 1_MiB, &owner_));
  ASSERT_TRUE(map().Put(At(kBase + 1_MiB), &value_));
  ASSERT_TRUE(map().Put(At(kBase + 2_MiB - 512), &value2_));
  EXPECT_EQ(Value(kBase + 1_MiB), nullptr);
  EXPECT_EQ(Value(kBase + 2_MiB - 512), &value2_);
}

TEST_F(AddressMapTest, WildPointersFindNothing) {
  ASSERT_TRUE(map().AddRange(At(kBase), 2_MiB, 512, &owner_));
  ASSERT_TRUE(map().Put(At(kBase), &value_));
  int on_the_stack = 0;
  for (const uint64_t address :
       {uint64_t{0}, uint64_t{1}, uint64_t{512}, kBase - 512, kBase + 2_MiB, kBase + 4_MiB, kBase + 16_GiB,
        (uint64_t{1} << 48) - 512, uint64_t{1} << 48, kBase | uint64_t{1} << 48, kBase | uint64_t{1} << 63,
        std::numeric_limits<uint64_t>::max(), reinterpret_cast<uint64_t>(&on_the_stack)}) {
    EXPECT_EQ(Value(address), nullptr) << address;
    EXPECT_EQ(map().Take(At(address)).value, nullptr) << address;
    EXPECT_FALSE(map().Put(At(address), &value_)) << address;
  }
  EXPECT_FALSE(map().Put(At(kBase + 1), &value_)) << "blocks are units";
}

TEST_F(AddressMapTest, RefusesValuesThatItCannotKeep) {
  ASSERT_TRUE(map().AddRange(At(kBase), 2_MiB, 512, &owner_));
  EXPECT_FALSE(map().Put(At(kBase), nullptr));
  EXPECT_FALSE(map().Put(At(kBase), At(uint64_t{1} << 48)));
  EXPECT_EQ(Value(kBase), nullptr);
}

TEST_F(AddressMapTest, RefusesRangesThatItCannotHold) {
  EXPECT_FALSE(map().AddRange(At(kBase + 1), 2_MiB, 512, &owner_));
  EXPECT_FALSE(map().AddRange(At(kBase), 2_MiB + 1, 512, &owner_));
  EXPECT_FALSE(map().AddRange(At(kBase), 2_MiB - 512, 512, &owner_)) << "three of them might meet in a page";
  EXPECT_FALSE(map().AddRange(At(kBase), 0, 512, &owner_));
  for (const uint64_t granule : {uint64_t{0}, uint64_t{256}, uint64_t{768}, 64_MiB}) {
    EXPECT_FALSE(map().AddRange(At(kBase), 2_MiB, granule, &owner_)) << granule;
  }
  constexpr uint64_t kEnd = uint64_t{1} << 48;
  EXPECT_FALSE(map().AddRange(At(kEnd), 2_MiB, 512, &owner_));
  EXPECT_FALSE(map().AddRange(At(kEnd - 2_MiB), 2_MiB + 512, 512, &owner_));
  EXPECT_FALSE(map().AddRange(At(kBase), std::numeric_limits<uint64_t>::max() - 511, 512, &owner_));
  EXPECT_TRUE(map().AddRange(At(kEnd - 2_MiB), 2_MiB, 512, &owner_)) << "the last bytes that there are";
  EXPECT_TRUE(map().Put(At(kEnd - 512), &value_));
  EXPECT_EQ(Value(kEnd - 512), &value_);
}

TEST_F(AddressMapTest, RefusesRangesThatOverlap) {
  ASSERT_TRUE(map().AddRange(At(kBase + 4_MiB), 4_MiB, 512, &owner_));
  ASSERT_TRUE(map().Put(At(kBase + 4_MiB), &value_));
  for (const auto& [offset, bytes] : std::vector<std::pair<uint64_t, uint64_t>>{
           {4_MiB, 4_MiB}, {4_MiB, 2_MiB}, {5_MiB, 2_MiB}, {8_MiB - 512, 2_MiB}, {2_MiB, 2_MiB + 512}, {0, 16_MiB}}) {
    EXPECT_FALSE(map().AddRange(At(kBase + offset), bytes, 512, &other_)) << offset;
  }
  EXPECT_EQ(map().Find(At(kBase + 4_MiB)).owner, &owner_);
  EXPECT_TRUE(map().AddRange(At(kBase + 8_MiB), 2_MiB, 512, &other_));
  EXPECT_TRUE(map().AddRange(At(kBase + 2_MiB), 2_MiB, 512, &other_));
}

TEST_F(AddressMapTest, TwoRangesShareAPage) {
  // The first range ends in the middle of a page. The second range begins at the end of the first range, or after a
  // gap.
  for (const uint64_t gap : {uint64_t{0}, uint64_t{4096}}) {
    const uint64_t first = kBase + 1_MiB / 2 + (gap << 20), second = first + 3_MiB + gap;
    ASSERT_TRUE(map().AddRange(At(first), 3_MiB, 512, &owner_));
    ASSERT_TRUE(map().AddRange(At(second), 3_MiB, 1_MiB, &other_));
    ASSERT_TRUE(map().Put(At(second - gap - 512), &value_));
    ASSERT_TRUE(map().Put(At(second), &value2_));
    EXPECT_EQ(map().Put(At(second - 512), &value_), gap == 0);
    EXPECT_EQ(map().Find(At(second - gap - 512)).owner, &owner_);
    EXPECT_EQ(map().Find(At(second)).owner, &other_);
    EXPECT_TRUE(map().RemoveRange(At(first)));
    EXPECT_EQ(Value(second - gap - 512), nullptr);
    EXPECT_EQ(Value(second), &value2_);
    EXPECT_TRUE(map().AddRange(At(first), 3_MiB, 512, &owner_));
    EXPECT_TRUE(map().RemoveRange(At(second)));
    EXPECT_EQ(Value(second), nullptr);
    EXPECT_TRUE(map().Put(At(second - gap - 512), &value_));
  }
}

TEST_F(AddressMapTest, RemovedRangeIsForgotten) {
  ASSERT_TRUE(map().AddRange(At(kBase), 4_MiB, 512, &owner_));
  ASSERT_TRUE(map().Put(At(kBase + 3_MiB), &value_));
  EXPECT_FALSE(map().RemoveRange(At(kBase + 512))) << "not its base";
  EXPECT_TRUE(map().RemoveRange(At(kBase)));
  EXPECT_FALSE(map().RemoveRange(At(kBase)));
  EXPECT_EQ(Value(kBase + 3_MiB), nullptr);
  EXPECT_FALSE(map().Put(At(kBase + 3_MiB), &value_));
  ASSERT_TRUE(map().AddRange(At(kBase), 4_MiB, 512, &other_));
  EXPECT_EQ(Value(kBase + 3_MiB), nullptr) << "new memory, no blocks";
}

TEST_F(AddressMapTest, RangeMaySpanLeaves) {
  const uint64_t base = kBase + 7_MiB;
  const uint64_t bytes = 100_GiB + 1_MiB;
  ASSERT_TRUE(map().AddRange(At(base), bytes, 1_MiB, &owner_));
  for (uint64_t offset = 0; offset < bytes; offset += 1_GiB - 3_MiB) {
    ASSERT_TRUE(map().Put(At(base + offset), &value_));
    ASSERT_EQ(Value(base + offset), &value_);
  }
  EXPECT_FALSE(map().Put(At(base + bytes), &value_));
  EXPECT_TRUE(map().RemoveRange(At(base)));
  EXPECT_EQ(Value(base), nullptr);
}

TEST_F(AddressMapTest, AgreesWithAMap) {
  struct Range {
    uint64_t bytes;
    uint64_t granule;
    std::map<uint64_t, void*> values;
  };
  std::map<uint64_t, Range> ranges;
  std::mt19937_64 random(1);
  std::vector<int> owners(8);
  for (int step = 0; step < 40000; ++step) {
    const uint64_t address = kBase + random() % 128 * 512 * 1000;
    const auto after = ranges.upper_bound(address);
    auto in = after == ranges.begin() ? ranges.end() : std::prev(after);
    if (in != ranges.end() && address >= in->first + in->second.bytes) in = ranges.end();
    switch (random() % 8) {
      case 0: {
        const uint64_t bytes = 2_MiB + random() % 8 * 512 * 1000;
        const bool free = in == ranges.end() && (after == ranges.end() || after->first >= address + bytes);
        const uint64_t granule = random() % 2 == 0 ? 512 : 1_MiB;
        ASSERT_EQ(map().AddRange(At(address), bytes, granule, &owners[address / 512 % 8]), free);
        if (free) ranges[address] = {.bytes = bytes, .granule = granule, .values = {}};
        break;
      }
      case 1:
        ASSERT_EQ(map().RemoveRange(At(address)), ranges.erase(address) == 1);
        break;
      case 2:
      case 3:
      case 4: {
        void* value = &owners[random() % 8];
        ASSERT_EQ(map().Put(At(address), value), in != ranges.end());
        if (in == ranges.end()) break;
        std::erase_if(in->second.values, [&](const auto& item) {
          return (item.first - in->first) / in->second.granule == (address - in->first) / in->second.granule;
        });
        in->second.values[address] = value;
        break;
      }
      default: {
        const bool takes = random() % 2 == 0;
        const AddressMap::Entry entry = takes ? map().Take(At(address)) : map().Find(At(address));
        if (in == ranges.end() || !in->second.values.contains(address)) {
          ASSERT_EQ(entry.value, nullptr);
          break;
        }
        ASSERT_EQ(entry.value, in->second.values[address]);
        ASSERT_EQ(entry.owner, &owners[in->first / 512 % 8]);
        if (takes) in->second.values.erase(address);
      }
    }
  }
}

// ---- Several threads ----

TEST_F(AddressMapTest, OneOfSeveralTakersGetsTheValue) {
  constexpr int kThreads = 3;
  constexpr int kRounds = 500;
  ASSERT_TRUE(map().AddRange(At(kBase), 2_MiB, 512, &owner_));
  std::atomic<int> round = 0, taken = 0, ready = 0;
  std::vector<std::thread> threads;
  threads.reserve(kThreads);
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&] {
      for (int mine = 1; mine <= kRounds; ++mine) {
        while (round < mine) std::this_thread::yield();
        if (map().Take(At(kBase + 512)).value != nullptr) ++taken;
        ++ready;
      }
    });
  }
  for (int i = 1; i <= kRounds; ++i) {
    ASSERT_TRUE(map().Put(At(kBase + 512), &value_));
    round = i;
    while (ready < kThreads * i) std::this_thread::yield();
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(taken, kRounds);
}

// Threads use ranges of their own. Neighbouring ranges on shared pages come and go.
TEST_F(AddressMapTest, NeighboursComeAndGo) {
  constexpr int kThreads = 3;
  constexpr uint64_t kBytes = 3_MiB;  // every second border is inside a page
  std::atomic<bool> done = false;
  std::vector<std::thread> threads;
  for (uint64_t t = 0; t < kThreads; ++t) {
    const uint64_t base = kBase + (2 * t + 1) * kBytes;
    ASSERT_TRUE(map().AddRange(At(base), kBytes, 512, &owner_));
    threads.emplace_back([&, base] {
      std::mt19937_64 random(base);
      do {
        const uint64_t address = base + random() % (kBytes / 512) * 512;
        EXPECT_EQ(map().Take(At(address)).value, nullptr);
        EXPECT_TRUE(map().Put(At(address), &value_));
        EXPECT_EQ(Value(address), &value_);
        EXPECT_EQ(map().Take(At(address)).owner, &owner_);
      } while (!done);
    });
  }
  for (int i = 0; i < 1000; ++i) {
    for (uint64_t n = 0; n <= kThreads; ++n) {
      void* const base = At(kBase + 2 * n * kBytes);
      ASSERT_TRUE(map().AddRange(base, kBytes, 1_MiB, &other_));
      ASSERT_TRUE(map().Put(base, &value2_));
    }
    for (uint64_t n = 0; n <= kThreads; ++n) ASSERT_TRUE(map().RemoveRange(At(kBase + 2 * n * kBytes)));
  }
  done = true;
  for (std::thread& thread : threads) thread.join();
}

}  // namespace
}  // namespace vrambroker::client_internal
