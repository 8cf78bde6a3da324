// SPDX-License-Identifier: Apache-2.0
#include "allocator/heap/memory_summary.h"

#include <array>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "allocator/base/bytes.h"

namespace vrambroker {
namespace {

constexpr int kWidth = 75;  // between the two outer bars

// Unit of the numbers in a column, chosen by the column's largest row ("all"). Values are cut, not rounded, as in
// PyTorch.
struct Unit {
  uint64_t divisor;
  const char* name;
};

Unit BytesUnit(uint64_t reference) {
  static constexpr std::array<const char*, 6> kNames = {"B", "KiB", "MiB", "GiB", "TiB", "PiB"};
  Unit unit{1, kNames[0]};
  for (size_t i = 1; i < kNames.size() && reference / unit.divisor >= 768_KiB; ++i) {
    unit = {unit.divisor * 1024, kNames[i]};
  }
  return unit;
}

Unit CountUnit(uint64_t reference) {
  static constexpr std::array<const char*, 3> kNames = {" ", "K", "M"};
  Unit unit{1, kNames[0]};
  for (size_t i = 1; i < kNames.size() && reference / unit.divisor >= 750'000; ++i) {
    unit = {unit.divisor * 1000, kNames[i]};
  }
  return unit;
}

std::string Cell(uint64_t value, const Unit& unit, bool bytes) {
  return bytes ? absl::StrFormat("%6d %-3s", value / unit.divisor, unit.name)
               : absl::StrFormat("%7d %s ", value / unit.divisor, unit.name);
}

std::string Row(absl::string_view name, const Stat& stat, const Stat& reference, bool bytes) {
  const auto unit = [&](uint64_t value) { return bytes ? BytesUnit(value) : CountUnit(value); };
  return absl::StrFormat("| %-21s | %s | %s | %s | %s |\n", name, Cell(stat.current, unit(reference.current), bytes),
                         Cell(stat.peak, unit(reference.peak), bytes),
                         Cell(stat.allocated, unit(reference.allocated), bytes),
                         Cell(stat.freed, unit(reference.freed), bytes));
}

std::string Rule(char c) {
  return absl::StrCat("|", std::string(kWidth, c), "|\n");
}

}  // namespace

std::string MemorySummary(absl::string_view session, int device, const MemoryStats& stats, bool abbreviated) {
  struct Metric {
    const char* name;
    const PoolStat* stat;
    bool bytes;
  };
  const std::array<Metric, 9> metrics = {{
      {"Allocated memory", &stats.allocated_bytes, true},
      {"Active memory", &stats.active_bytes, true},
      {"Requested memory", &stats.requested_bytes, true},
      {"GPU reserved memory", &stats.reserved_bytes, true},
      {"Non-releasable memory", &stats.inactive_split_bytes, true},
      {"Allocations", &stats.allocation, false},
      {"Active allocs", &stats.active, false},
      {"GPU reserved segments", &stats.segment, false},
      {"Non-releasable allocs", &stats.inactive_split, false},
  }};
  std::string out = Rule('=');
  std::string heading =
      absl::StrCat("vrambroker memory summary, device ID ", device, session.empty() ? ", all sessions" : ", session ");
  // Long names differ at the end.
  const size_t room = size_t{kWidth} - 2 - heading.size();
  absl::StrAppend(&heading,
                  session.size() <= room ? session : absl::StrCat("...", session.substr(session.size() - room + 3)));
  absl::StrAppend(&out, absl::StrFormat("| %-*s |\n", kWidth - 2, heading));
  absl::StrAppend(&out, Rule('-'));
  absl::StrAppend(&out, absl::StrFormat("|%12sCUDA OOMs: %-13d|%8scudaMalloc retries: %-10d|\n", "", stats.num_ooms, "",
                                        stats.num_alloc_retries));
  absl::StrAppend(&out, Rule('='));
  absl::StrAppend(&out, absl::StrFormat("| %-21s | %-10s | %-10s | %-10s | %-10s |\n", "       Metric", "Cur Usage ",
                                        "Peak Usage", "Tot Alloc ", "Tot Freed "));
  for (const Metric& metric : metrics) {
    const Stat& all = metric.stat->all;
    absl::StrAppend(&out, Rule('-'), Row(metric.name, all, all, metric.bytes));
    if (abbreviated) continue;
    absl::StrAppend(
        &out, Row("      from large pool", metric.stat->pool[static_cast<int>(PoolKind::kLarge)], all, metric.bytes),
        Row("      from small pool", metric.stat->pool[static_cast<int>(PoolKind::kSmall)], all, metric.bytes));
  }
  for (const auto& [name, stat] : {std::pair("Oversize allocations", &stats.oversize_allocations),
                                   std::pair("Oversize GPU segments", &stats.oversize_segments)}) {
    absl::StrAppend(&out, Rule('-'), Row(name, *stat, *stat, /*bytes=*/false));
  }
  absl::StrAppend(&out, Rule('='));
  return out;
}

}  // namespace vrambroker
