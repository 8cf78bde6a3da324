// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "allocator/base/bytes.h"
#include "allocator/replay/replay.h"
#include "allocator/replay/tune.h"
#include "client/vramctl/plan/share_plan.h"

namespace vrambroker::plan {
namespace {

// Returns the start of the last step.
size_t StepStart(const Trace& trace, bool& has_marks) {
  size_t marks = 0;
  size_t last = 0;
  for (size_t i = 0; i < trace.ops.size(); ++i) {
    if (trace.ops[i].kind != TraceOp::Kind::kResetPeaks) continue;
    ++marks;
    last = i;
  }
  // A single mark need not be the mark of a step.
  has_marks = marks >= 2 && last + 1 < trace.ops.size();
  return has_marks ? last : trace.ops.size() / 2;
}

}  // namespace

JobProfile ProfileOf(const std::string& name, const Trace& trace, const AllocatorOptions& options) {
  const ReplayConfig config = {.options = options};
  const ReplaySummary summary = SummarizeReplay(trace, config);
  JobProfile profile = {.name = name,
                        .operations = trace.ops.size(),
                        .peak_allocated = summary.peak_allocated_bytes,
                        .peak_reserved = summary.peak_reserved_bytes};
  ReplayConfig bounded = config;
  bounded.device_bytes = RoundUpTo(summary.peak_reserved_bytes, 2_MiB) + 2_MiB;
  const uint64_t smallest = SmallestDevice(trace, bounded).value_or(summary.peak_reserved_bytes);
  profile.smallest_device = smallest;

  const size_t start = StepStart(trace, profile.has_marks);
  profile.step_operations = trace.ops.size() - start;
  std::vector<std::optional<uint64_t>> ticks(kTicks);
  Replay replay(config, trace);
  Replay reclaimed(config, trace);  // trimmed after each operation
  for (size_t i = 0; i < trace.ops.size(); ++i) {
    replay.Do(trace.ops[i]);
    const MemoryStats stats = replay.allocator().GetMemoryStats();
    reclaimed.Do(trace.ops[i]);
    reclaimed.allocator().Trim();
    const uint64_t needed =
        std::max(reclaimed.allocator().GetMemoryStats().reserved_bytes.all.current,
                 std::min(smallest, stats.active_bytes.all.current + stats.inactive_split_bytes.all.current));
    profile.peak_needed = std::max(profile.peak_needed, needed);
    if (i < start) continue;
    std::optional<uint64_t>& tick = ticks[(i - start) * kTicks / profile.step_operations];
    tick = std::max(tick.value_or(0), needed);
  }
  // If the step has fewer operations than ticks, ticks without an operation repeat the previous value.
  uint64_t current = 0;
  for (const std::optional<uint64_t>& tick : ticks) {
    current = tick.value_or(current);
    profile.step.push_back(current);
  }
  profile.floor_needed = *std::min_element(profile.step.begin(), profile.step.end());
  return profile;
}

std::string JobName(const std::string& path, const std::vector<std::string>& taken) {
  constexpr size_t kMostCharacters = 48;
  std::string name = path.substr(path.rfind('/') + 1);
  name = name.substr(0, name.find('.', 1));
  for (char& c : name) {
    if (!absl::ascii_isalnum(static_cast<unsigned char>(c)) && c != '_' && c != '-') c = '-';
  }
  name = name.substr(0, kMostCharacters);
  if (name.empty()) name = "job";
  std::string free = name;
  for (int i = 2; std::find(taken.begin(), taken.end(), free) != taken.end(); ++i) free = absl::StrCat(name, "-", i);
  return free;
}

}  // namespace vrambroker::plan
