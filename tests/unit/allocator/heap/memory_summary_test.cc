// SPDX-License-Identifier: Apache-2.0
#include "allocator/heap/memory_summary.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <string>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"

namespace vrambroker {
namespace {

using ::testing::ElementsAre;
using ::testing::SizeIs;

std::vector<std::string> Lines(const std::string& summary) {
  EXPECT_EQ(summary.back(), '\n');
  return absl::StrSplit(summary.substr(0, summary.size() - 1), '\n');
}

// The cells of a line, without their padding: "20480 KiB".
std::vector<std::string> Cells(const std::string& line) {
  std::vector<std::string> cells;
  for (const absl::string_view cell : absl::StrSplit(line.substr(1, line.size() - 2), '|')) {
    cells.push_back(absl::StrJoin(absl::StrSplit(cell, ' ', absl::SkipWhitespace()), " "));
  }
  return cells;
}

// The rows of `metric`: all, large pool, small pool.
std::vector<std::vector<std::string>> Rows(const MemoryStats& stats, const std::string& metric) {
  const std::vector<std::string> lines = Lines(MemorySummary("t", 0, stats));
  for (size_t i = 0; i + 2 < lines.size(); ++i) {
    if (Cells(lines[i])[0] == metric) return {Cells(lines[i]), Cells(lines[i + 1]), Cells(lines[i + 2])};
  }
  ADD_FAILURE() << "no rows of " << metric;
  return {{}, {}, {}};
}

TEST(MemorySummaryTest, HasPyTorchsShape) {
  const std::vector<std::string> lines = Lines(MemorySummary("job", 3, MemoryStats()));
  ASSERT_EQ(lines.size(), 47u);
  const std::string thick = absl::StrCat("|", std::string(75, '='), "|");
  const std::string thin = absl::StrCat("|", std::string(75, '-'), "|");
  EXPECT_EQ(lines[0], thick);
  EXPECT_EQ(lines[1],
            absl::StrCat("| vrambroker memory summary, device ID 3, session job", std::string(22, ' '), " |"));
  EXPECT_EQ(lines[2], thin);
  EXPECT_EQ(lines[4], thick);
  EXPECT_EQ(lines[5], "|        Metric         | Cur Usage  | Peak Usage | Tot Alloc  | Tot Freed  |");
  EXPECT_EQ(lines[46], thick);
  std::vector<std::string> metrics;
  for (size_t i = 6; i < 42; i += 4) {
    EXPECT_EQ(lines[i], thin);
    metrics.push_back(Cells(lines[i + 1])[0]);
    EXPECT_EQ(lines[i + 2].substr(0, 24), "|       from large pool ");
    EXPECT_EQ(lines[i + 3].substr(0, 24), "|       from small pool ");
  }
  EXPECT_THAT(metrics, ElementsAre("Allocated memory", "Active memory", "Requested memory", "GPU reserved memory",
                                   "Non-releasable memory", "Allocations", "Active allocs", "GPU reserved segments",
                                   "Non-releasable allocs"));
  for (size_t i = 42; i < 46; i += 2) EXPECT_EQ(lines[i], thin);
  EXPECT_EQ(Cells(lines[43])[0], "Oversize allocations");
  EXPECT_EQ(Cells(lines[45])[0], "Oversize GPU segments");
}

TEST(MemorySummaryTest, AbbreviatedItLeavesOutThePools) {
  MemoryStats stats;
  stats.allocated_bytes.Up(PoolKind::kLarge, 5000);
  const std::vector<std::string> whole = Lines(MemorySummary("t", 0, stats));
  std::vector<std::string> kept;
  for (const std::string& line : whole) {
    if (!absl::StrContains(line, "pool")) kept.push_back(line);
  }
  ASSERT_EQ(kept.size(), whole.size() - 18);
  EXPECT_EQ(Lines(MemorySummary("t", 0, stats, /*abbreviated=*/true)), kept);
}

TEST(MemorySummaryTest, OversizeBlocksHaveRowsOfTheirOwn) {
  MemoryStats stats;
  for (int i = 0; i < 3; ++i) stats.oversize_allocations.Up(1);
  stats.oversize_segments.Up(1);
  stats.oversize_segments.Down(1);
  const std::vector<std::string> lines = Lines(MemorySummary("t", 0, stats));
  EXPECT_THAT(Cells(lines[43]), ElementsAre("Oversize allocations", "3", "3", "3", "0"));
  EXPECT_THAT(Cells(lines[45]), ElementsAre("Oversize GPU segments", "0", "1", "1", "1"));
}

TEST(MemorySummaryTest, EveryRowKeepsItsWidth) {
  MemoryStats stats;
  stats.ForEach([](const char*, PoolStat& stat) {
    stat.Up(PoolKind::kLarge, uint64_t{9'999'999'000'000});  // counts show 7 digits and M
    stat.Up(PoolKind::kSmall, 1);
  });
  stats.reserved_bytes.all.current = std::numeric_limits<uint64_t>::max();
  const std::vector<std::string> lines = Lines(MemorySummary("t", 0, stats));
  for (size_t i = 5; i < lines.size(); ++i) EXPECT_THAT(lines[i], SizeIs(77));
}

TEST(MemorySummaryTest, LongTitleIsCut) {
  const auto title = [](const std::string& name) { return Lines(MemorySummary(name, 0, MemoryStats()))[1]; };
  const std::string fits(25, 'x');
  EXPECT_EQ(title(fits), absl::StrCat("| vrambroker memory summary, device ID 0, session ", fits, " |"));
  EXPECT_EQ(title("team/llama-70b-finetune/node03-rank7"),
            "| vrambroker memory summary, device ID 0, session ...-finetune/node03-rank7 |");
}

TEST(MemorySummaryTest, ShowsRefusalsAndRetries) {
  MemoryStats stats;
  stats.num_ooms = 12;
  stats.num_alloc_retries = 345;
  EXPECT_EQ(Lines(MemorySummary("t", 0, MemoryStats()))[3],
            "|            CUDA OOMs: 0            |        cudaMalloc retries: 0         |");
  EXPECT_THAT(Cells(Lines(MemorySummary("t", 0, stats))[3]), ElementsAre("CUDA OOMs: 12", "cudaMalloc retries: 345"));
}

TEST(MemorySummaryTest, ColumnsAreCurrentPeakAllocatedFreed) {
  MemoryStats stats;
  stats.allocated_bytes.Up(PoolKind::kLarge, 5000);
  stats.allocated_bytes.Up(PoolKind::kSmall, 600);
  stats.allocated_bytes.Down(PoolKind::kLarge, 4000);
  stats.allocated_bytes.Up(PoolKind::kSmall, 10);
  const auto rows = Rows(stats, "Allocated memory");
  EXPECT_THAT(rows[0], ElementsAre("Allocated memory", "1610 B", "5600 B", "5610 B", "4000 B"));
  EXPECT_THAT(rows[1], ElementsAre("from large pool", "1000 B", "5000 B", "5000 B", "4000 B"));
  EXPECT_THAT(rows[2], ElementsAre("from small pool", "610 B", "610 B", "610 B", "0 B"));
}

TEST(MemorySummaryTest, EachQuantityStandsInItsRow) {
  MemoryStats stats;
  uint64_t n = 1;
  for (PoolStat* stat :
       {&stats.allocated_bytes, &stats.active_bytes, &stats.requested_bytes, &stats.reserved_bytes,
        &stats.inactive_split_bytes, &stats.allocation, &stats.active, &stats.segment, &stats.inactive_split}) {
    stat->Up(PoolKind::kSmall, n++);
  }
  EXPECT_EQ(Rows(stats, "Allocated memory")[0][1], "1 B");
  EXPECT_EQ(Rows(stats, "Active memory")[0][1], "2 B");
  EXPECT_EQ(Rows(stats, "Requested memory")[0][1], "3 B");
  EXPECT_EQ(Rows(stats, "GPU reserved memory")[0][1], "4 B");
  EXPECT_EQ(Rows(stats, "Non-releasable memory")[0][1], "5 B");
  EXPECT_EQ(Rows(stats, "Allocations")[0][1], "6");
  EXPECT_EQ(Rows(stats, "Active allocs")[0][1], "7");
  EXPECT_EQ(Rows(stats, "GPU reserved segments")[0][1], "8");
  EXPECT_EQ(Rows(stats, "Non-releasable allocs")[0][1], "9");
}

std::string BytesCell(uint64_t bytes) {
  MemoryStats stats;
  stats.allocated_bytes.Up(PoolKind::kLarge, bytes);
  return Rows(stats, "Allocated memory")[0][1];
}

TEST(MemorySummaryTest, BytesChangeTheirUnitAt768OfTheNext) {
  constexpr uint64_t kEdge = 768 * 1024;
  EXPECT_EQ(BytesCell(0), "0 B");
  EXPECT_EQ(BytesCell(kEdge - 1), "786431 B");
  EXPECT_EQ(BytesCell(kEdge), "768 KiB");
  EXPECT_EQ(BytesCell(kEdge * 1024 - 1), "786431 KiB");
  EXPECT_EQ(BytesCell(kEdge * 1024), "768 MiB");
  EXPECT_EQ(BytesCell(kEdge * 1024 * 1024 - 1), "786431 MiB");
  EXPECT_EQ(BytesCell(kEdge * 1024 * 1024), "768 GiB");
  EXPECT_EQ(BytesCell((kEdge << 30)), "768 TiB");
  EXPECT_EQ(BytesCell((kEdge << 40)), "768 PiB");
}

TEST(MemorySummaryTest, BytesAreCutNotRounded) {
  EXPECT_EQ(BytesCell(768 * 1024 + 1023), "768 KiB");
  EXPECT_EQ(BytesCell((768 << 10) + (1 << 10)), "769 KiB");
}

TEST(MemorySummaryTest, UnitIsChosenFromTheWholeOfTheColumn) {
  MemoryStats stats;
  stats.allocated_bytes.Up(PoolKind::kLarge, 768 * 1024);
  stats.allocated_bytes.Up(PoolKind::kSmall, 2000);
  stats.allocated_bytes.Down(PoolKind::kSmall, 1500);
  const auto rows = Rows(stats, "Allocated memory");
  EXPECT_EQ(rows[2][1], "0 KiB") << "500 bytes, in the unit of the row of all";
  EXPECT_EQ(rows[2][3], "1 KiB");
  EXPECT_EQ(rows[2][4], "1500 B") << "a column of its own";
}

TEST(MemorySummaryTest, CountsChangeTheirUnitAt750Thousand) {
  const auto cell = [](uint64_t count) {
    MemoryStats stats;
    stats.allocation.Up(PoolKind::kSmall, count);
    return Rows(stats, "Allocations")[0][1];
  };
  EXPECT_EQ(cell(749'999), "749999");
  EXPECT_EQ(cell(750'000), "750 K");
  EXPECT_EQ(cell(750'999), "750 K");
  EXPECT_EQ(cell(749'999'999), "749999 K");
  EXPECT_EQ(cell(750'000'000), "750 M");
}

TEST(MemorySummaryTest, CellsAreAligned) {
  MemoryStats stats;
  stats.allocated_bytes.Up(PoolKind::kLarge, 20 << 20);
  stats.allocation.Up(PoolKind::kLarge, 1'234'567);
  stats.allocation.Down(PoolKind::kLarge, 1'234'560);
  const std::vector<std::string> lines = Lines(MemorySummary("t", 0, stats));
  EXPECT_EQ(lines[7].substr(0, 51), "| Allocated memory      |  20480 KiB |  20480 KiB |");
  EXPECT_EQ(lines[27], "| Allocations           |       7    |    1234 K  |    1234 K  |    1234 K  |");
}

TEST(MemorySummaryTest, EveryLineKeepsItsWidth) {
  MemoryStats stats;
  stats.num_ooms = 123'456'789'012;
  stats.num_alloc_retries = 1'234'567'890;
  for (const std::string& line : Lines(MemorySummary(std::string(200, 'x'), 0, stats))) EXPECT_THAT(line, SizeIs(77));
}

TEST(MemorySummaryTest, UnitIsOnTheLeft) {
  EXPECT_EQ(Lines(MemorySummary("t", 0, MemoryStats()))[7],
            "| Allocated memory      |      0 B   |      0 B   |      0 B   |      0 B   |");
}

}  // namespace
}  // namespace vrambroker
