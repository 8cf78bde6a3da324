// SPDX-License-Identifier: Apache-2.0
//
// Replays what was recorded from PyTorch's allocator (tests/golden/README.md) and compares every row.
#include <gtest/gtest.h>
#include <zlib.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "allocator/caching_allocator.h"
#include "tests/unit/simulated_source.h"

namespace vrambroker {
namespace {

constexpr size_t kTraces = 24;

// Plain or gzip: zlib reads both.
std::vector<std::string> ReadLines(const std::string& path) {
  const std::string found = std::filesystem::exists(path) ? path : path + ".gz";
  gzFile file = gzopen(found.c_str(), "rb");
  if (file == nullptr) {
    ADD_FAILURE() << "cannot open " << found;
    return {};
  }
  std::string text;
  std::vector<char> buffer(1 << 16);
  int got = 0;
  while ((got = gzread(file, buffer.data(), static_cast<unsigned>(buffer.size()))) > 0) {
    text.append(buffer.data(), static_cast<size_t>(got));
  }
  EXPECT_EQ(got, 0) << found << " is damaged";
  gzclose(file);
  return absl::StrSplit(absl::StripSuffix(text, "\n"), '\n');
}

std::vector<std::string> TraceNames() {
  std::set<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(VRAMBROKER_GOLDEN_DIR)) {
    if (entry.path().extension() == ".conf") names.insert(entry.path().stem());
  }
  return {names.begin(), names.end()};
}

std::string PathOf(const std::string& file) {
  return absl::StrCat(VRAMBROKER_GOLDEN_DIR, "/", file);
}

class GoldenTest : public ::testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    for (const std::string& line : ReadLines(PathOf(GetParam() + ".conf"))) {
      const std::vector<std::string> pair = absl::StrSplit(line, absl::MaxSplits('=', 1));
      if (pair.size() == 2) conf_[pair[0]] = pair[1];
    }
    ASSERT_EQ(conf_["alloc_conf"], "") << "vrambroker has no such settings";
    ASSERT_TRUE(absl::SimpleAtoi(conf_["device_bytes"], &device_bytes_));
    source_ = std::make_unique<SimulatedSource>(device_bytes_);
    allocator_ = std::make_unique<CachingAllocator>(source_.get());
    if (conf_["fraction"] != "-1") SetFraction(conf_["fraction"]);
  }

  void SetFraction(const std::string& text) {
    double fraction = 0;
    ASSERT_TRUE(absl::SimpleAtod(text, &fraction)) << text;
    source_->set_limit(fraction == 1.0 ? SimulatedSource::kUnlimited
                                       : static_cast<uint64_t>(fraction * static_cast<double>(device_bytes_)));
  }

  // Performs one operation; returns its row up to the figures: "a,ok,0,0,2097152,512".
  std::string Do(const std::string& line) {
    const std::vector<std::string> words = absl::StrSplit(line, ' ');
    const std::string& op = words[0];
    if (op == "a") {
      uint64_t bytes = 0;
      EXPECT_TRUE(absl::SimpleAtoi(words.at(2), &bytes)) << line;
      EXPECT_EQ(words.at(3), "0") << "vrambroker has no streams";
      const absl::StatusOr<Block*> block = allocator_->Allocate(bytes);
      if (!block.ok()) {
        EXPECT_TRUE(absl::IsResourceExhausted(block.status())) << block.status();
        live_.erase(words[1]);
        return "a,oom,,,,";
      }
      live_[words[1]] = *block;
      return absl::StrCat("a,ok,", Raw((*block)->segment) - 1, ",", (*block)->offset, ",", (*block)->segment_bytes, ",",
                          (*block)->bytes);
    }
    if (op == "f") {
      const auto it = live_.find(words.at(1));
      if (it == live_.end()) return "f,nop,,,,";
      allocator_->Free(it->second);
      live_.erase(it);
      return "f,ok,,,,";
    }
    if (op == "e") {
      allocator_->EmptyCache();
      return "e,ok,,,,";
    }
    if (op == "p") {
      allocator_->ResetPeakStats();
      return "p,ok,,,,";
    }
    if (op == "frac") {
      SetFraction(words.at(1));
      return "F,ok,,,,";
    }
    ADD_FAILURE() << "unknown operation: " << line;
    return "";
  }

  std::string Figures() const {
    const MemoryStats stats = allocator_->GetMemoryStats();
    return absl::StrCat(
        absl::StrCat(stats.allocated_bytes.all.current, ",", stats.allocation.all.current, ",",
                     stats.active_bytes.all.current, ",", stats.active.all.current, ","),
        absl::StrCat(stats.reserved_bytes.all.current, ",", stats.segment.all.current, ",",
                     stats.inactive_split_bytes.all.current, ",", stats.inactive_split.all.current, ","),
        absl::StrCat(stats.requested_bytes.all.current, ",", stats.num_alloc_retries, ",", stats.num_ooms));
  }

  void CompareFinal(const std::string& line) {
    ASSERT_EQ(line.rfind("#final ", 0), 0u) << line;
    const nlohmann::json recorded = nlohmann::json::parse(line.substr(7));
    const MemoryStats stats = allocator_->GetMemoryStats();
    int compared = 0;
    const auto compare = [&](const std::string& name, const Stat& stat) {
      SCOPED_TRACE(name);
      ASSERT_TRUE(recorded.contains(name));
      const std::vector<uint64_t> have = {stat.current, stat.peak, stat.allocated, stat.freed};
      EXPECT_EQ(have, recorded[name].get<std::vector<uint64_t>>()) << "current, peak, allocated, freed";
      ++compared;
    };
    stats.ForEach([&](const char* name, const PoolStat& stat) {
      compare(absl::StrCat(name, ".all"), stat.all);
      compare(absl::StrCat(name, ".small_pool"), stat.pool[static_cast<int>(PoolKind::kSmall)]);
      compare(absl::StrCat(name, ".large_pool"), stat.pool[static_cast<int>(PoolKind::kLarge)]);
    });
    EXPECT_EQ(compared, 27);
    EXPECT_EQ(stats.num_alloc_retries, recorded["num_alloc_retries"].get<uint64_t>());
    EXPECT_EQ(stats.num_ooms, recorded["num_ooms"].get<uint64_t>());
    EXPECT_EQ(stats.num_device_alloc, recorded["num_device_alloc"].get<uint64_t>());
    EXPECT_EQ(stats.num_device_free, recorded["num_device_free"].get<uint64_t>());
    EXPECT_EQ(source_->used_bytes(), recorded["dev_used"].get<uint64_t>());
  }

  std::map<std::string, std::string> conf_;
  uint64_t device_bytes_ = 0;
  std::unique_ptr<SimulatedSource> source_;
  std::unique_ptr<CachingAllocator> allocator_;
  std::unordered_map<std::string, Block*> live_;
};

TEST_P(GoldenTest, EveryRowIsAsRecorded) {
  const std::string name = conf_.contains("trace") ? conf_["trace"] : GetParam();
  const std::vector<std::string> trace = ReadLines(PathOf(name + ".trace"));
  const std::vector<std::string> expected = ReadLines(PathOf(GetParam() + ".expected"));
  ASSERT_GE(trace.size(), 2u);
  ASSERT_EQ(expected.size(), trace.size() + 2) << "a heading, a row for each operation, the final line";
  // A walk over everything after every operation is quick enough for the short traces only.
  const size_t check_every = trace.size() < 2500 ? 1 : 97;
  for (size_t i = 0; i < trace.size(); ++i) {
    std::string row = absl::StrCat(i, ",", Do(trace[i]));
    absl::StrAppend(&row, ",", Figures());
    ASSERT_EQ(row, expected[i + 1]) << "operation " << i << ": " << trace[i] << "\ncolumns: " << expected[0];
    if (i % check_every == 0) {
      ASSERT_EQ(allocator_->CheckInvariants(), absl::OkStatus()) << "operation " << i;
    }
  }
  EXPECT_EQ(allocator_->CheckInvariants(), absl::OkStatus());
  EXPECT_EQ(source_->misuse(), "");
  CompareFinal(expected.back());
}

TEST(GoldenFilesTest, AreAllThere) {
  EXPECT_EQ(TraceNames().size(), kTraces);
}

INSTANTIATE_TEST_SUITE_P(Traces, GoldenTest, ::testing::ValuesIn(TraceNames()),
                         [](const auto& param) { return param.param; });

}  // namespace
}  // namespace vrambroker
