// SPDX-License-Identifier: Apache-2.0
//
// Replays recordings of PyTorch's allocator (tests/golden/README.md), and compares every row.
#include <gtest/gtest.h>

#include <filesystem>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "allocator/replay/replay.h"
#include "allocator/replay/trace.h"
#include "tests/support/paths.h"

namespace vrambroker {
namespace {

constexpr size_t kTraces = 44;

// The path of a plain or gzipped file.
std::string PathOf(const std::string& file) {
  const std::string path = absl::StrCat(testing_support::paths::kGoldenDir, "/", file);
  return std::filesystem::exists(path) ? path : path + ".gz";
}

std::string Read(const std::string& file) {
  const absl::StatusOr<std::string> text = ReadMaybeGzipped(PathOf(file));
  EXPECT_EQ(text.status(), absl::OkStatus());
  return text.value_or("");
}

std::vector<std::string> TraceNames() {
  std::set<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(testing_support::paths::kGoldenDir)) {
    if (entry.path().extension() == ".conf") names.insert(entry.path().stem());
  }
  return {names.begin(), names.end()};
}

class GoldenTest : public ::testing::TestWithParam<std::string> {};

TEST_P(GoldenTest, EveryRowIsAsRecorded) {
  const std::string conf = Read(GetParam() + ".conf");
  const absl::StatusOr<ReplayConfig> config = ParseReplayConf(conf);
  ASSERT_EQ(config.status(), absl::OkStatus());
  std::string name = GetParam();
  for (absl::string_view line : absl::StrSplit(conf, '\n')) {
    if (absl::ConsumePrefix(&line, "trace=")) name = std::string(line);
  }
  const absl::StatusOr<Trace> trace = ReadTraceFile(PathOf(name + ".trace"));
  ASSERT_EQ(trace.status(), absl::OkStatus());
  const std::string expected_text = Read(GetParam() + ".expected");
  const std::vector<absl::string_view> expected = absl::StrSplit(absl::StripSuffix(expected_text, "\n"), '\n');
  ASSERT_EQ(expected.size(), trace->ops.size() + 2) << "a heading, a row for each operation, the final line";
  EXPECT_EQ(expected.front(), PerOpHeading());

  // A check of the whole heap after every operation is quick enough only for the short traces.
  const size_t check_every = trace->ops.size() < 2500 ? 1 : 97;
  Replay replay(*config, *trace);
  for (size_t i = 0; i < trace->ops.size(); ++i) {
    const Replay::Result result = replay.Do(trace->ops[i]);
    ASSERT_EQ(PerOpRow(i, trace->ops[i], result, replay), expected[i + 1]) << "columns: " << expected[0];
    if (i % check_every == 0) {
      ASSERT_EQ(replay.allocator().CheckInvariants(), absl::OkStatus()) << "operation " << i;
    }
  }
  EXPECT_EQ(replay.allocator().CheckInvariants(), absl::OkStatus());
  EXPECT_EQ(FinalLine(replay), expected.back());
}

TEST(GoldenFilesTest, AreAllThere) {
  EXPECT_EQ(TraceNames().size(), kTraces);
}

INSTANTIATE_TEST_SUITE_P(Traces, GoldenTest, ::testing::ValuesIn(TraceNames()),
                         [](const auto& param) { return param.param; });

}  // namespace
}  // namespace vrambroker
