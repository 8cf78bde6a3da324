// SPDX-License-Identifier: Apache-2.0
#ifndef VRAMBROKER_TESTS_UNIT_ALLOCATOR_HEAP_SIMULATED_HEAP_FIXTURE_H_
#define VRAMBROKER_TESTS_UNIT_ALLOCATOR_HEAP_SIMULATED_HEAP_FIXTURE_H_

#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "allocator/base/bytes.h"
#include "allocator/replay/direct_heap.h"
#include "allocator/replay/simulated_device.h"
#include "tests/support/simulated_source.h"

namespace vrambroker {

// A heap over a simulated device. The invariants hold at the end of each test.
class SimulatedHeapTest : public ::testing::Test {
 protected:
  static constexpr uint64_t kCapacity = 1000_MiB;

  SimulatedHeapTest() { Configure(""); }
  void TearDown() override {
    EXPECT_EQ(allocator_->CheckInvariants(), absl::OkStatus());
    EXPECT_EQ(source_->misuse(), "");
    EXPECT_EQ(source_->used_bytes(), Stats().reserved_bytes.all.current);
  }

  // Makes a new allocator, and a new device of kCapacity.
  void Configure(absl::string_view settings) {
    const absl::StatusOr<AllocConf> conf = ParseAllocConf(settings);
    ASSERT_EQ(conf.status(), absl::OkStatus());
    source_ = std::make_unique<SimulatedSource>(kCapacity);
    allocator_ = std::make_unique<DirectHeap>(source_.get(), &streams_, conf->options, kCapacity);
  }

  Block* Get(uint64_t bytes, Stream stream = 0) {
    absl::StatusOr<Block*> block = allocator_->Allocate(bytes, stream);
    EXPECT_TRUE(block.ok()) << block.status();
    return block.ok() ? *block : nullptr;
  }
  // Makes free segments of the given sizes, freed in the given order.
  void Cache(const std::vector<uint64_t>& segments, Stream stream = 0) {
    std::vector<Block*> blocks;
    for (const uint64_t bytes : segments) blocks.push_back(Get(bytes, stream));
    for (Block* block : blocks) allocator_->Free(block);
  }
  bool Refuses(uint64_t bytes, Stream stream = 0) {
    return absl::IsResourceExhausted(allocator_->Allocate(bytes, stream).status());
  }
  MemoryStats Stats() const { return allocator_->GetMemoryStats(); }
  uint64_t Reserved() const { return Stats().reserved_bytes.all.current; }

  SimulatedDevice streams_{0};  // only for events
  std::unique_ptr<SimulatedSource> source_;
  std::unique_ptr<DirectHeap> allocator_;
};

}  // namespace vrambroker

#endif  // VRAMBROKER_TESTS_UNIT_ALLOCATOR_HEAP_SIMULATED_HEAP_FIXTURE_H_
