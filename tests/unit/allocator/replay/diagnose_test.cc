// SPDX-License-Identifier: Apache-2.0
#include "allocator/replay/diagnose.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <iterator>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "allocator/base/bytes.h"
#include "allocator/replay/direct_heap.h"
#include "allocator/replay/torch_snapshot.h"
#include "allocator/replay/torch_trace.h"
#include "allocator/replay/tune.h"

namespace vrambroker {
namespace {

using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::SizeIs;

// The recording of a heap with a device and a limit, up to the refusal of the last request.
class DiagnoseTest : public ::testing::Test {
 protected:
  void Make(uint64_t limit, const AllocatorOptions& options = {}, size_t events = 100'000) {
    limit_ = limit;
    device_ = std::make_unique<SimulatedDevice>(kCapacity);
    heap_ = std::make_unique<DirectHeap>(device_.get(), device_.get(), options, kCapacity);
    heap_->SetLimit(limit);
    heap_->SetRecording(events);
  }
  Block* Get(uint64_t bytes) {
    absl::StatusOr<Block*> block = heap_->Allocate(bytes);
    EXPECT_TRUE(block.ok()) << block.status();
    return block.value_or(nullptr);
  }
  // Eight segments of 64 MiB. Each keeps one block of 13 MiB, so 104 MiB of 512 MiB are in use.
  void MakeHoles() {
    std::vector<Block*> blocks;
    for (int i = 0; i < 8; ++i) blocks.push_back(Get(64_MiB));
    for (Block* block : blocks) heap_->Free(block);
    blocks.clear();
    for (int i = 0; i < 8; ++i) blocks.push_back(Get(40_MiB));
    for (int i = 0; i < 8; ++i) Get(13_MiB);
    for (Block* block : blocks) heap_->Free(block);
  }
  // Makes the heap refuse a request. Later events follow, like the events of other threads.
  Diagnosis DiagnoseRequest(uint64_t bytes, const SettingsTarget& target = {}) {
    EXPECT_FALSE(heap_->Allocate(bytes).ok());
    reserved_ = heap_->GetMemoryStats().reserved_bytes.all.current;
    heap_->Free(Get(512));
    absl::StatusOr<Trace> trace = TraceFromTorchSnapshot(TorchSnapshot({heap_->Snapshot()}), 0);
    EXPECT_TRUE(trace.ok()) << trace.status();
    trace_ = *std::move(trace);
    EXPECT_THAT(trace_.recorded_refusals, Not(IsEmpty()));
    ReplayConfig config;
    config.options = trace_.recorded_options.value_or(config.options);
    size_t seen = 0;
    size_t last = 0;
    const Diagnosis diagnosis =
        Diagnose(trace_, config,
                 {.op = trace_.recorded_refusals.back(),
                  .requested_bytes = bytes,
                  .bound_bytes = limit_,
                  .reserved_bytes = reserved_ + outside_,
                  .capacity_bytes = kCapacity,
                  .is_limit = is_limit_},
                 {.target = target, .threads = 2, .may_go_on = may_go_on_, .progress = [&](size_t done, size_t total) {
                    ++seen;
                    last = total - done;
                  }});
    if (diagnosis.is_complete && !diagnosis.recorded.is_served) {
      EXPECT_GE(seen, diagnosis.tried);
      EXPECT_EQ(last, 0u);
    }
    return diagnosis;
  }

  static constexpr uint64_t kCapacity = 4_GiB;
  uint64_t limit_ = 0;
  bool is_limit_ = true;
  std::function<bool()> may_go_on_ = [] { return true; };
  uint64_t reserved_ = 0;
  uint64_t outside_ = 0;  // charged to the session, but outside of the heap
  Trace trace_;
  std::unique_ptr<SimulatedDevice> device_;
  std::unique_ptr<DirectHeap> heap_;
};

TEST_F(DiagnoseTest, ASettingThatIsNamedServesTheSameWork) {
  Make(520_MiB);
  MakeHoles();
  const Diagnosis diagnosis = DiagnoseRequest(64_MiB);
  EXPECT_FALSE(diagnosis.recorded.is_served);
  EXPECT_EQ(diagnosis.recorded.missing_bytes, reserved_ + 64_MiB - 520_MiB);
  EXPECT_EQ(diagnosis.recorded.peak_reserved_bytes, 512_MiB);
  EXPECT_EQ(diagnosis.tried, TuneGrid({}, {}, /*has_limit=*/true).size());
  ASSERT_THAT(diagnosis.helping, Not(IsEmpty()));
  EXPECT_EQ(diagnosis.nearest, std::nullopt);
  std::set<std::pair<uint64_t, uint64_t>> results;
  for (const Trial& trial : diagnosis.helping) {
    SCOPED_TRACE(FormatAllocConf(trial.options));
    EXPECT_TRUE(trial.Helps());
    EXPECT_EQ(trial.missing_bytes, 0u);
    EXPECT_GE(trial.peak_reserved_bytes, diagnosis.helping[0].peak_reserved_bytes) << "best first";
    EXPECT_TRUE(results.emplace(trial.peak_reserved_bytes, trial.device_calls).second) << "one for each result";
    // A working heap, not a replay, checks the trial.
    Make(520_MiB, trial.options);
    MakeHoles();
    Get(64_MiB);
    EXPECT_EQ(heap_->GetMemoryStats().reserved_bytes.all.peak, trial.peak_reserved_bytes);
    EXPECT_EQ(heap_->GetMemoryStats().allocated_bytes.all.peak, trial.peak_allocated_bytes);
  }
}

TEST_F(DiagnoseTest, WhereNothingHelpsItSaysHowMuchIsMissing) {
  Make(420_MiB);
  std::vector<Block*> blocks;
  for (int i = 0; i < 100; ++i) blocks.push_back(Get(4_MiB));
  for (size_t i = 0; i < 100; i += 2) heap_->Free(blocks[i]);
  const Diagnosis diagnosis = DiagnoseRequest(199_MiB);
  EXPECT_THAT(diagnosis.helping, IsEmpty());
  EXPECT_EQ(diagnosis.recorded.missing_bytes, 180_MiB);
  EXPECT_EQ(diagnosis.needed_bound_bytes, 600_MiB);
  EXPECT_EQ(diagnosis.emptied, std::nullopt);
  EXPECT_LE(diagnosis.largest_served_bytes, 20_MiB);
  EXPECT_GT(diagnosis.largest_served_bytes, 19_MiB);
  if (diagnosis.nearest.has_value()) {
    EXPECT_LT(diagnosis.nearest->missing_bytes, 180_MiB);
    EXPECT_FALSE(diagnosis.nearest->is_served);
  }
  // The heap itself confirms the numbers.
  EXPECT_TRUE(heap_->Allocate(diagnosis.largest_served_bytes).ok());
  heap_->SetLimit(600_MiB + reserved_ - 400_MiB + 20_MiB);
  EXPECT_TRUE(heap_->Allocate(199_MiB).ok());
}

TEST_F(DiagnoseTest, NothingIsTriedForWhatIsLargerThanTheBound) {
  Make(64_MiB);
  const Diagnosis diagnosis = DiagnoseRequest(100_MiB);
  EXPECT_FALSE(diagnosis.recorded.is_served);
  EXPECT_EQ(diagnosis.tried, 0u);
  EXPECT_TRUE(diagnosis.is_complete);
  EXPECT_EQ(diagnosis.needed_bound_bytes, 100_MiB);
  EXPECT_GT(diagnosis.largest_served_bytes, 60_MiB);
}

TEST_F(DiagnoseTest, TheBoundIsThatOfTheRequest) {
  Make(300_MiB);
  std::vector<Block*> blocks;
  for (int i = 0; i < 3; ++i) blocks.push_back(Get(100_MiB));
  for (Block* block : blocks) heap_->Free(block);
  heap_->EmptyCache();
  // Meanwhile other sessions have taken the rest.
  limit_ = 100_MiB;
  heap_->SetLimit(limit_);
  Get(60_MiB);
  const Diagnosis diagnosis = DiagnoseRequest(60_MiB);
  EXPECT_FALSE(diagnosis.recorded.is_served);
  EXPECT_EQ(diagnosis.recorded.missing_bytes, 20_MiB);
  EXPECT_EQ(diagnosis.recorded.refused_before, 0u);
}

TEST_F(DiagnoseTest, MoreThanTheDeviceHasIsNoBoundToAskFor) {
  Make(4_GiB);
  Get(3_GiB);
  const Diagnosis diagnosis = DiagnoseRequest(2_GiB);
  EXPECT_THAT(diagnosis.helping, IsEmpty());
  EXPECT_EQ(diagnosis.needed_bound_bytes, std::nullopt);
  EXPECT_EQ(diagnosis.recorded.missing_bytes, 1_GiB);
  EXPECT_GT(diagnosis.largest_served_bytes, 1000_MiB);
}

TEST_F(DiagnoseTest, EmptyingTheCacheOnceMayBeEnough) {
  // Large segments stay cached after a first phase. The second phase cuts a small block out of each, and keeps the
  // block.
  Make(200_MiB);
  std::vector<Block*> first;
  for (int i = 0; i < 3; ++i) first.push_back(Get(60_MiB));
  for (Block* block : first) heap_->Free(block);
  std::vector<Block*> second;
  for (int i = 0; i < 3; ++i) {
    second.push_back(Get(50_MiB));
    Get(10_MiB);
  }
  for (Block* block : second) heap_->Free(block);
  const Diagnosis diagnosis = DiagnoseRequest(150_MiB);
  ASSERT_TRUE(diagnosis.emptied.has_value());
  EXPECT_TRUE(diagnosis.emptied->trial.Helps());
  EXPECT_EQ(diagnosis.emptied->allocated_bytes, 0u);
  EXPECT_LT(diagnosis.emptied->op, trace_.recorded_refusals.back());
  // The heap itself is emptied at the same place.
  Make(200_MiB);
  first.clear();
  for (int i = 0; i < 3; ++i) first.push_back(Get(60_MiB));
  for (Block* block : first) heap_->Free(block);
  heap_->EmptyCache();
  second.clear();
  for (int i = 0; i < 3; ++i) {
    second.push_back(Get(50_MiB));
    Get(10_MiB);
  }
  for (Block* block : second) heap_->Free(block);
  EXPECT_TRUE(heap_->Allocate(150_MiB).ok());
}

TEST_F(DiagnoseTest, ARecordingThatBeginsInTheMiddleIsJudgedFromThere) {
  Make(520_MiB, {}, 20);
  MakeHoles();
  const Diagnosis diagnosis = DiagnoseRequest(64_MiB);
  EXPECT_GT(trace_.start.ReservedBytes(), 400_MiB);
  EXPECT_FALSE(diagnosis.recorded.is_served);
  EXPECT_EQ(diagnosis.recorded.missing_bytes, reserved_ + 64_MiB - 520_MiB);
  for (const Trial& trial : diagnosis.helping) {
    EXPECT_GE(trial.peak_reserved_bytes, trace_.start.ReservedBytes()) << "what it began with is there";
  }
}

TEST_F(DiagnoseTest, EarlierRefusalsAreNoFaultOfASetting) {
  Make(520_MiB);
  for (int i = 0; i < 3; ++i) EXPECT_FALSE(heap_->Allocate(1_GiB).ok());
  MakeHoles();
  const Diagnosis diagnosis = DiagnoseRequest(64_MiB);
  ASSERT_THAT(trace_.recorded_refusals, SizeIs(4));
  EXPECT_EQ(diagnosis.recorded.refused_before, 0u);
  EXPECT_THAT(diagnosis.helping, Not(IsEmpty()));
}

TEST_F(DiagnoseTest, ARequestThatIsServedWasNotRefusedForWhatIsRecorded) {
  Make(520_MiB);
  MakeHoles();
  limit_ = 600_MiB;  // a wrong limit
  const absl::StatusOr<Block*> refused = heap_->Allocate(64_MiB);
  EXPECT_FALSE(refused.ok());
  const Diagnosis diagnosis = DiagnoseRequest(64_MiB);
  EXPECT_TRUE(diagnosis.recorded.is_served);
  EXPECT_EQ(diagnosis.tried, 0u);
  EXPECT_THAT(diagnosis.helping, IsEmpty());
}

TEST_F(DiagnoseTest, CollectingIsTriedOnlyWhereTheHeapCollects) {
  for (const bool is_limit : {true, false}) {
    is_limit_ = is_limit;
    Make(520_MiB);
    MakeHoles();
    const Diagnosis diagnosis = DiagnoseRequest(64_MiB);
    EXPECT_EQ(diagnosis.tried, TuneGrid({}, {}, /*has_limit=*/is_limit).size());
    for (const Trial& trial : diagnosis.helping) {
      if (!is_limit) {
        EXPECT_EQ(trial.options.garbage_collection_threshold, 0);
      }
    }
  }
}

TEST_F(DiagnoseTest, ItEndsWhenTheTimeIsOver) {
  Make(520_MiB);
  MakeHoles();
  std::atomic<int> left{40};
  may_go_on_ = [&] { return --left > 0; };
  const absl::StatusOr<Block*> refused = heap_->Allocate(64_MiB);
  EXPECT_FALSE(refused.ok());
  const absl::StatusOr<Trace> trace = TraceFromTorchSnapshot(TorchSnapshot({heap_->Snapshot()}), 0);
  ASSERT_TRUE(trace.ok());
  const RefusalToDiagnose refusal{.op = trace->recorded_refusals.back(),
                                  .requested_bytes = 64_MiB,
                                  .bound_bytes = limit_,
                                  .capacity_bytes = kCapacity,
                                  .is_limit = true};
  const Diagnosis some = Diagnose(*trace, {}, refusal, {.may_go_on = may_go_on_});
  EXPECT_FALSE(some.is_complete);
  EXPECT_GT(some.tried, 0u);
  EXPECT_LT(some.tried, 40u);
  EXPECT_GT(some.recorded.missing_bytes, 0u);
  const Diagnosis none = Diagnose(*trace, {}, refusal, {.may_go_on = [] { return false; }});
  EXPECT_FALSE(none.is_complete);
  EXPECT_EQ(none.tried, 0u);
}

TEST_F(DiagnoseTest, TheNextStepsAreTriedBeforeTheTimeIsOver) {
  Make(420_MiB);
  std::vector<Block*> blocks;
  for (int i = 0; i < 100; ++i) blocks.push_back(Get(4_MiB));
  for (size_t i = 0; i < 100; i += 2) heap_->Free(blocks[i]);
  std::atomic<int> left{30};
  may_go_on_ = [&] { return --left > 0; };
  const Diagnosis diagnosis = DiagnoseRequest(199_MiB);
  EXPECT_FALSE(diagnosis.is_complete);
  EXPECT_GT(diagnosis.largest_served_bytes, 19_MiB);
  EXPECT_EQ(diagnosis.needed_bound_bytes, 600_MiB);
}

TEST_F(DiagnoseTest, WhatTheHeapDidNotHoldTakesItsPartOfTheBound) {
  Make(520_MiB);
  MakeHoles();
  limit_ = 820_MiB;
  outside_ = 300_MiB;  // like carried-over memory
  const Diagnosis diagnosis = DiagnoseRequest(64_MiB);
  EXPECT_FALSE(diagnosis.recorded.is_served);
  EXPECT_EQ(diagnosis.recorded.missing_bytes, reserved_ + 64_MiB - 520_MiB);
  for (const Trial& trial : diagnosis.helping) EXPECT_LE(trial.peak_reserved_bytes, 520_MiB);

  Make(420_MiB);
  std::vector<Block*> blocks;
  for (int i = 0; i < 100; ++i) blocks.push_back(Get(4_MiB));
  for (size_t i = 0; i < 100; i += 2) heap_->Free(blocks[i]);
  limit_ = 720_MiB;
  const Diagnosis none = DiagnoseRequest(199_MiB);
  EXPECT_THAT(none.helping, IsEmpty());
  EXPECT_EQ(none.needed_bound_bytes, 900_MiB);
}

// A heap that is short of memory empties its cache by itself. A heap with other settings may never be short, and so may
// keep the cached segments and cut blocks out of them.
TEST_F(DiagnoseTest, WhatIsSaidToHelpHelpsAHeapThatEmptiesItsCacheByItself) {
  constexpr uint64_t kLimit = 200_MiB;
  struct Step {
    int id = 0;
    uint64_t bytes = 0;  // 0: a free
  };
  int flushes = 0;
  int helped = 0;
  for (unsigned seed = 1; seed <= 120; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937 random(seed);
    Make(kLimit);
    Get(512);                 // the segment has room for the event after the refusal
    std::vector<Step> steps;  // served steps
    std::map<int, Block*> blocks;
    uint64_t refused = 0;
    for (int id = 0; refused == 0 && id < 300; ++id) {
      const uint64_t bytes = 1_MiB + random() % (seed % 2 == 0 ? 24_MiB : 60_MiB);
      const uint64_t freed_before = heap_->GetMemoryStats().num_device_free;
      const absl::StatusOr<Block*> block = heap_->Allocate(bytes);
      if (!block.ok()) {
        refused = bytes;
        break;
      }
      if (heap_->GetMemoryStats().num_device_free > freed_before) ++flushes;
      blocks[id] = *block;
      steps.push_back({.id = id, .bytes = bytes});
      while (blocks.size() > 4 || (!blocks.empty() && random() % 3 == 0)) {
        const auto it = std::next(blocks.begin(), static_cast<std::ptrdiff_t>(random() % blocks.size()));
        heap_->Free(it->second);
        steps.push_back({.id = it->first});
        blocks.erase(it);
      }
    }
    if (refused == 0) continue;
    const Diagnosis diagnosis = DiagnoseRequest(refused);
    for (const Trial& trial : diagnosis.helping) {
      ++helped;
      SCOPED_TRACE(FormatAllocConf(trial.options));
      Make(kLimit, trial.options);
      Get(512);
      std::map<int, Block*> again;
      for (const Step& step : steps) {
        if (step.bytes == 0) {
          heap_->Free(again.at(step.id));
        } else {
          const absl::StatusOr<Block*> block = heap_->Allocate(step.bytes);
          ASSERT_TRUE(block.ok()) << "refused before";
          again[step.id] = *block;
        }
      }
      EXPECT_TRUE(heap_->Allocate(refused).ok());
    }
  }
  EXPECT_GT(flushes, 50);
  EXPECT_GT(helped, 50);
}

// The program repeats the run, and counts its own allocations and frees.
TEST_F(DiagnoseTest, TheCacheIsEmptiedWhereAProgramCanCountTo) {
  constexpr uint64_t kLimit = 200_MiB;
  int emptied = 0;
  int own_operations = 0;  // operations of the heap between emptying and the request
  for (unsigned seed = 1; seed <= 120; ++seed) {
    SCOPED_TRACE(seed);
    uint64_t refused_call = 0;
    // Runs until a refusal, or up to the earlier refusal. Returns the size of the refused request; 0 without a refusal.
    const auto run = [&](uint64_t empty_before) -> uint64_t {
      std::mt19937 random(seed);
      Make(kLimit);
      Get(512);  // the segment has room for the event after the refusal
      std::map<uint64_t, Block*> blocks;
      uint64_t call = 1;
      for (uint64_t id = 0; id < 300; ++id) {
        const uint64_t bytes = 1_MiB + random() % (seed % 2 == 0 ? 24_MiB : 60_MiB);
        if (call == empty_before) heap_->EmptyCache();
        const absl::StatusOr<Block*> block = heap_->Allocate(bytes);
        if (!block.ok()) {
          refused_call = call;
          return bytes;
        }
        if (call++ == refused_call) return 0;
        blocks[id] = *block;
        while (blocks.size() > 4 || (!blocks.empty() && random() % 3 == 0)) {
          const auto it = std::next(blocks.begin(), static_cast<std::ptrdiff_t>(random() % blocks.size()));
          if (call++ == empty_before) heap_->EmptyCache();
          heap_->Free(it->second);
          blocks.erase(it);
        }
      }
      return 0;
    };
    const uint64_t refused = run(0);
    if (refused == 0) continue;
    const uint64_t at = refused_call;
    const Diagnosis diagnosis = DiagnoseRequest(refused);  // makes one call more
    if (!diagnosis.emptied.has_value()) continue;
    ++emptied;
    const uint64_t operations = trace_.recorded_refusals.back() - diagnosis.emptied->op;
    own_operations += operations > diagnosis.emptied->calls_before ? 1 : 0;
    ASSERT_LE(diagnosis.emptied->calls_before, at);
    EXPECT_EQ(run(at + 1 - diagnosis.emptied->calls_before), 0u);
    EXPECT_EQ(refused_call, at);
  }
  EXPECT_GT(emptied, 20);
  EXPECT_GT(own_operations, 5) << "where counting them would lead elsewhere";
}

TEST_F(DiagnoseTest, WhatHasMoreToSpareComesFirst) {
  constexpr uint64_t kLimit = 200_MiB;
  int tight = 0;
  int full_but_spare = 0;  // peaks at the limit, and also fits in less
  for (unsigned seed = 1; seed <= 200; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937 random(seed);
    Make(kLimit);
    Get(512);  // the segment has room for the event after the refusal
    std::vector<Block*> blocks;
    uint64_t refused = 0;
    for (int i = 0; i < 300; ++i) {
      const uint64_t bytes = 1_MiB + random() % (seed % 2 == 0 ? 24_MiB : 60_MiB);
      const absl::StatusOr<Block*> block = heap_->Allocate(bytes);
      if (!block.ok()) {
        refused = bytes;
        break;
      }
      blocks.push_back(*block);
      while (blocks.size() > 4 || (!blocks.empty() && random() % 3 == 0)) {
        std::swap(blocks[random() % blocks.size()], blocks.back());
        heap_->Free(blocks.back());
        blocks.pop_back();
      }
    }
    if (refused == 0) continue;
    const Diagnosis diagnosis = DiagnoseRequest(refused);
    bool seen_tight = false;
    for (const Trial& trial : diagnosis.helping) {
      const bool is_tight = trial.spare_bytes < EnoughToSpare(kLimit);
      EXPECT_TRUE(is_tight || !seen_tight) << FormatAllocConf(trial.options);
      seen_tight = seen_tight || is_tight;
      EXPECT_GE(trial.spare_bytes, kLimit - trial.peak_reserved_bytes);
      tight += is_tight ? 1 : 0;
      full_but_spare += trial.spare_bytes > kLimit - trial.peak_reserved_bytes ? 1 : 0;
    }
  }
  EXPECT_GT(tight, 5);
  EXPECT_GT(full_but_spare, 5);
}

TEST_F(DiagnoseTest, OnlyWhatTheTargetHasIsTried) {
  Make(520_MiB);
  MakeHoles();
  const absl::StatusOr<SettingsTarget> torch = SettingsTarget::Parse("torch-2.6");
  ASSERT_TRUE(torch.ok());
  const Diagnosis diagnosis = DiagnoseRequest(64_MiB, *torch);
  EXPECT_GT(diagnosis.tried, 50u);
  EXPECT_LT(diagnosis.tried, TuneGrid({}).size());
  EXPECT_EQ(diagnosis.tried, TuneGrid({}, *torch, /*has_limit=*/false).size()) << "PyTorch's heap has no limit";
  for (const Trial& trial : diagnosis.helping) {
    EXPECT_TRUE(torch->Has(trial.options)) << FormatAllocConf(trial.options);
    EXPECT_EQ(trial.options.large_segment_bytes, 20_MiB);
  }
}

// ---- SettingsTarget ----

AllocatorOptions Conf(const std::string& text) {
  const absl::StatusOr<AllocConf> conf = ParseAllocConf(text);
  EXPECT_TRUE(conf.ok()) << conf.status();
  return conf.ok() ? conf->options : AllocatorOptions();
}

TEST(SettingsTargetTest, HasWhatTheReleaseHas) {
  struct Row {
    const char* conf;
    bool torch_1_13, torch_2_5, torch_2_6, torch_2_13, torch_2_14;
  };
  for (const Row& param : {
           Row{"", true, true, true, true, true},
           Row{"max_split_size_mb:20", false, false, false, false, true},
           Row{"max_split_size_mb:21", true, true, true, true, true},
           Row{"garbage_collection_threshold:0.8", true, true, true, true, true},
           Row{"roundup_power2_divisions:4", true, true, true, true, true},
           Row{"roundup_power2_divisions:1", false, false, true, true, true},
           Row{"roundup_power2_divisions:[256:1,512:2,>:4]", false, false, true, true, true},
           Row{"max_split_size_mb:128,max_non_split_rounding_mb:64", false, false, true, true, true},
           Row{"large_segment_size_mb:64", false, false, false, false, true},
           Row{"throw_on_cudamalloc_oom:True", false, false, false, false, true},
           Row{"per_process_memory_fraction:0.5", false, false, false, false, true},
       }) {
    const AllocatorOptions options = Conf(param.conf);
    const auto has = [&](const char* name) { return SettingsTarget::Parse(name)->Has(options); };
    EXPECT_EQ(has("torch-1.13"), param.torch_1_13) << param.conf;
    EXPECT_EQ(has("torch-2.5.1"), param.torch_2_5) << param.conf;
    EXPECT_EQ(has("torch-2.6"), param.torch_2_6) << param.conf;
    EXPECT_EQ(has("torch-2.13"), param.torch_2_13) << param.conf;
    EXPECT_EQ(has("torch-2.14.1+cu130"), param.torch_2_14) << param.conf;
    EXPECT_EQ(has("torch-3.0"), param.torch_2_14) << param.conf;
    EXPECT_TRUE(has("vrambroker")) << param.conf;
  }
}

TEST(SettingsTargetTest, NearestIsWhatItHas) {
  const std::vector<std::string> confs = {
      "", "max_split_size_mb:20", "large_segment_size_mb:64", "large_segment_size_mb:64,max_non_split_rounding_mb:128",
      "max_split_size_mb:128,roundup_power2_divisions:[256:1,512:2,>:4],garbage_collection_threshold:0.7"};
  for (const char* name : {"vrambroker", "torch-1.13", "torch-2.6", "torch-2.14"}) {
    const SettingsTarget target = *SettingsTarget::Parse(name);
    for (const std::string& conf : confs) {
      const AllocatorOptions nearest = target.Nearest(Conf(conf));
      EXPECT_TRUE(target.Has(nearest)) << name << " " << conf;
      EXPECT_EQ(Conf(FormatAllocConf(nearest)), nearest) << "it can be written";
    }
    for (const AllocatorOptions& options : TuneGrid({}, target)) EXPECT_TRUE(target.Has(options)) << name;
  }
  EXPECT_EQ(SettingsTarget::Parse("torch-2.6")->Nearest(Conf("large_segment_size_mb:64")), AllocatorOptions());
}

TEST(SettingsTargetTest, SaysHowToUseThem) {
  const AllocatorOptions options = Conf("max_split_size_mb:64");
  // PyTorch 2.6.0, 2.9.1 and 2.14.1 all read PYTORCH_CUDA_ALLOC_CONF, and 2.14.1 reads no other variable beside it.
  for (const char* name : {"vrambroker", "torch-2.6", "torch-2.9.1", "torch-2.14"}) {
    EXPECT_EQ(SettingsTarget::Parse(name)->Use(options), "PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:64") << name;
  }
  EXPECT_EQ(SettingsTarget::Parse("torch-2.6.0+cu124")->name(), "torch-2.6");
  // An empty variable would leave other settings in force.
  EXPECT_EQ(SettingsTarget().Use({}), "PYTORCH_CUDA_ALLOC_CONF=large_segment_size_mb:20");
  EXPECT_EQ(Conf("large_segment_size_mb:20"), AllocatorOptions());
  EXPECT_EQ(SettingsTarget::Parse("torch-2.6")->Use({}),
            "unset PYTORCH_CUDA_ALLOC_CONF PYTORCH_HIP_ALLOC_CONF PYTORCH_ALLOC_CONF");
}

TEST(SettingsTargetTest, OthersAreRefused) {
  for (const char* name : {"", "torch", "torch-", "torch-2", "torch-2.", "torch-x.y", "torch-2.6x", "pytorch-2.6",
                           "Torch-2.6", "torch-99999.1", "torch--1.2", "vrambroker-1.0", "torch- 2.6"}) {
    const absl::StatusOr<SettingsTarget> target = SettingsTarget::Parse(name);
    EXPECT_TRUE(absl::IsInvalidArgument(target.status())) << name;
    EXPECT_THAT(std::string(target.status().message()),
                ::testing::HasSubstr("accepted: vrambroker, torch-MAJOR.MINOR as torch-2.6"));
  }
  EXPECT_THAT(std::string(SettingsTarget::Parse("torch-1.12").status().message()),
              ::testing::HasSubstr("before 1.13 are not known here"));
}

}  // namespace
}  // namespace vrambroker
