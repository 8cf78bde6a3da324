// SPDX-License-Identifier: Apache-2.0
#include "allocator/replay/tune.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "allocator/base/bytes.h"
#include "allocator/wire/admin_json.h"
#include "client/vramctl/commands/commands.h"
#include "client/vramctl/views/output.h"

namespace vrambroker::vramctl {
namespace {

using Json = nlohmann::ordered_json;

void ShowProgress(size_t done, size_t total) {
  if (isatty(STDERR_FILENO) == 0) return;
  constexpr size_t kWidth = 40;
  const size_t filled = done * kWidth / total;
  std::fprintf(stderr, "\r[%s%s] %zu of %zu%s", std::string(filled, '#').c_str(),
               std::string(kWidth - filled, ' ').c_str(), done, total, done == total ? "\n" : "");
}

std::string Name(const TuneCandidate& candidate, const TuneResult& result) {
  const std::string text = FormatAllocConf(candidate.options);
  if (text.empty()) return "default";
  if (candidate.options == result.baseline.options) return absl::StrCat(text, " (given)");
  const bool is_default = result.pytorch_default.has_value() && candidate.options == result.pytorch_default->options;
  return is_default ? absl::StrCat(text, " (default)") : text;
}

std::string Compared(uint64_t value, uint64_t baseline) {
  if (baseline == 0 || value == baseline) return "";
  return absl::StrFormat("%+.1f%%", (static_cast<double>(value) / static_cast<double>(baseline) - 1) * 100);
}

std::vector<std::string> Row(const TuneCandidate& candidate, const TuneResult& result) {
  const ReplaySummary& summary = candidate.summary;
  const ReplaySummary& baseline = result.baseline.summary;
  std::vector<std::string> row = {
      Name(candidate, result),
      FormatBytes(summary.peak_reserved_bytes),
      Compared(summary.peak_reserved_bytes, baseline.peak_reserved_bytes),
      Percent(summary.fragmentation_at_peak),
      absl::StrCat(summary.device_calls),
      absl::StrCat(summary.ooms),
      candidate.smallest_device.has_value() ? FormatBytes(*candidate.smallest_device) : "-"};
  for (const uint64_t ooms : candidate.ooms_on_smaller) row.push_back(ooms == 0 ? "fits" : absl::StrCat(ooms, " OOM"));
  return row;
}

void PrintTable(const char* title, const std::vector<TuneCandidate>& candidates, const TuneResult& result) {
  std::printf("\n%s\n", title);
  std::vector<std::vector<std::string>> rows = {
      {"SETTINGS", ">PEAK RESERVED", ">CHANGE", ">FRAGMENTATION", ">DEVICE CALLS", ">OOMS", ">SMALLEST DEVICE"}};
  for (const uint64_t bytes : result.smaller_devices) rows[0].push_back(absl::StrCat(">ON ", FormatBytes(bytes)));
  rows.push_back(Row(result.baseline, result));
  if (result.pytorch_default.has_value()) rows.push_back(Row(*result.pytorch_default, result));
  for (const TuneCandidate& candidate : candidates) rows.push_back(Row(candidate, result));
  std::fputs(Table(rows).c_str(), stdout);
  if (candidates.empty()) std::printf("No setting tried is better.\n");
}

// Prints the better settings of a PyTorch newer than the writer of the snapshot.
void PrintNewer(const Trace& trace, const ReplayConfig& config, const TuneResult& result, int threads) {
  const SettingsTarget newest = SettingsTarget::NewestTorch();
  const TuneResult newer = Tune(trace, config, newest, threads, [](size_t, size_t) {});
  if (newer.by_peak_reserved.empty()) return;
  const TuneCandidate& other = newer.by_peak_reserved.front();
  const TuneCandidate& best = result.by_peak_reserved.empty() ? result.baseline : result.by_peak_reserved.front();
  const auto cost = [](const TuneCandidate& candidate) {
    return std::pair(candidate.summary.ooms, candidate.summary.peak_reserved_bytes);
  };
  if (cost(other) >= cost(best)) return;
  std::printf("PyTorch %s or newer has a better one, %s: %s at the peak. For that, give --for %s.\n",
              SettingsTarget::OldestTorchWith(other.options).release().c_str(), FormatAllocConf(other.options).c_str(),
              FormatBytes(other.summary.peak_reserved_bytes).c_str(), newest.name().c_str());
}

// Returns the whole line to use, since the replaced settings may include more than a replay heeds.
std::string Use(const TuneCandidate& candidate, const SettingsTarget& target, const LeftOutSettings& left_out) {
  AllocatorOptions options = candidate.options;
  if (left_out.per_process_memory_fraction < 1) {
    options.per_process_memory_fraction = left_out.per_process_memory_fraction;
  }
  return target.Use(target.Nearest(options), left_out.ignored);
}

Json CandidateJson(const TuneCandidate& candidate, const SettingsTarget& target, const LeftOutSettings& left_out) {
  Json json = {{"alloc_conf", FormatAllocConf(candidate.options)},
               {"use", Use(candidate, target, left_out)},
               {"peak_allocated_bytes", candidate.summary.peak_allocated_bytes},
               {"peak_reserved_bytes", candidate.summary.peak_reserved_bytes},
               {"fragmentation_at_peak", candidate.summary.fragmentation_at_peak},
               {"device_calls", candidate.summary.device_calls},
               {"ooms", candidate.summary.ooms},
               {"smallest_device_bytes", nullptr},
               {"ooms_on_smaller_devices", candidate.ooms_on_smaller}};
  if (candidate.smallest_device.has_value()) json["smallest_device_bytes"] = *candidate.smallest_device;
  return json;
}

Json CandidatesJson(const std::vector<TuneCandidate>& candidates, const SettingsTarget& target,
                    const LeftOutSettings& left_out) {
  Json json = Json::array();
  for (const TuneCandidate& candidate : candidates) json.push_back(CandidateJson(candidate, target, left_out));
  return json;
}

}  // namespace

absl::Status RunTune(const Context& context, const std::string& path) {
  absl::StatusOr<SettingsTarget> target = TargetOf(context);
  if (!target.ok()) return target.status();
  const absl::StatusOr<ReplayConfig> given = ReplayConfigOf(context.replay);
  if (!given.ok()) return given.status();
  const absl::StatusOr<Trace> trace = ReadTraceArgument(context, path);
  if (!trace.ok()) return trace.status();
  const absl::StatusOr<ReplayConfig> config = ConfigFor(context.replay, *trace, *given);
  if (!config.ok()) return config.status();

  const TraceWriter* const writer = trace->writer.has_value() ? &*trace->writer : nullptr;
  const bool is_of_writer = context.target.empty() && writer != nullptr;
  if (is_of_writer) target = writer->oldest;
  const int threads = std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
  const auto progress = context.json ? [](size_t, size_t) {} : ShowProgress;
  const TuneResult result = Tune(*trace, *config, *target, threads, progress);
  if (context.json) {
    const auto json_of = [&](const TuneCandidate& candidate) {
      return CandidateJson(candidate, *target, config->left_out);
    };
    const Json json = {{"trace", path},
                       {"for", target->name()},
                       {"tried", result.tried},
                       {"smaller_devices_bytes", result.smaller_devices},
                       {"baseline", json_of(result.baseline)},
                       {"default", json_of(result.pytorch_default.value_or(result.baseline))},
                       {"by_peak_reserved", CandidatesJson(result.by_peak_reserved, *target, config->left_out)},
                       {"by_device_calls", CandidatesJson(result.by_device_calls, *target, config->left_out)}};
    std::printf("%s\n", JsonText(json, /*indent=*/2).c_str());
    return absl::OkStatus();
  }
  std::printf("%s: %s, peak allocated %s; tried %s.\n", InputName(path).c_str(),
              Counted(trace->ops.size(), "operation").c_str(),
              FormatBytes(result.baseline.summary.peak_allocated_bytes).c_str(),
              Counted(result.tried, "setting").c_str());
  PrintTable("Least reserved memory", result.by_peak_reserved, result);
  PrintTable("Fewest device calls", result.by_device_calls, result);
  if (is_of_writer) {
    std::printf("\n%s: tried is what %s has. For another one, give --for, as --for torch-2.14.\n",
                writer->words.c_str(), target->name().c_str());
    if (target->release() != SettingsTarget::NewestTorch().release()) PrintNewer(*trace, *config, result, threads);
  }
  if (result.by_peak_reserved.empty()) return absl::OkStatus();
  const TuneCandidate& best = result.by_peak_reserved.front();
  const ReplaySummary& baseline = result.baseline.summary;
  if (best.summary.ooms < baseline.ooms) {
    std::printf("\nFor %zu refusals instead of %zu:", best.summary.ooms, baseline.ooms);
  } else {
    std::printf("\nTo reserve %s less at the peak (%s instead of %s):",
                FormatBytes(baseline.peak_reserved_bytes - best.summary.peak_reserved_bytes).c_str(),
                FormatBytes(best.summary.peak_reserved_bytes).c_str(),
                FormatBytes(baseline.peak_reserved_bytes).c_str());
  }
  std::printf("\n  %s\n", Use(best, *target, config->left_out).c_str());
  if (writer != nullptr && !writer->oldest.Has(best.options)) {
    std::printf("\nFor that, PyTorch must be %s or newer; %s.\n",
                SettingsTarget::OldestTorchWith(best.options).release().c_str(), writer->words.c_str());
  }
  return absl::OkStatus();
}

}  // namespace vrambroker::vramctl
