// SPDX-License-Identifier: Apache-2.0
#include "allocator/replay/replay.h"

#include <cstdio>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "allocator/base/amounts.h"
#include "allocator/base/bytes.h"
#include "allocator/wire/admin_json.h"
#include "client/vramctl/commands/commands.h"
#include "client/vramctl/commands/snapshot_file.h"
#include "client/vramctl/options/refusal.h"
#include "client/vramctl/views/output.h"

namespace vrambroker::vramctl {

absl::StatusOr<ReplayConfig> ReplayConfigOf(const ReplayFlags& flags) {
  ReplayConfig config;
  if (!flags.conf.empty()) {
    const absl::StatusOr<std::string> text = ReadMaybeGzipped(flags.conf);
    if (!text.ok()) return absl::InvalidArgumentError(absl::StrCat("--conf: ", text.status().message()));
    std::vector<std::string> warnings;
    absl::StatusOr<ReplayConfig> read = ParseReplayConf(*text, &warnings);
    if (!read.ok()) return absl::InvalidArgumentError(absl::StrCat(flags.conf, ": ", read.status().message()));
    for (const std::string& warning : warnings)
      std::fprintf(stderr, "vramctl: %s: %s\n", flags.conf.c_str(), warning.c_str());
    config = *std::move(read);
  }
  if (!flags.alloc_conf.empty()) {
    const absl::StatusOr<AllocConf> conf = ParseAllocConf(flags.alloc_conf);
    if (!conf.ok()) return absl::InvalidArgumentError(absl::StrCat("--alloc-conf: ", conf.status().message()));
    for (const std::string& warning : conf->warnings)
      std::fprintf(stderr, "vramctl: --alloc-conf: %s\n", warning.c_str());
    config.options = conf->options;
    config.left_out.ignored = conf->ignored;
  }
  if (!flags.device_bytes.empty()) {
    const absl::StatusOr<uint64_t> bytes = ParseBytes(flags.device_bytes);
    if (!bytes.ok()) return absl::InvalidArgumentError(absl::StrCat("--device-bytes: ", bytes.status().message()));
    if (*bytes > ReplayConfig::kUnlimitedBytes) return absl::InvalidArgumentError("--device-bytes: above 4 EiB");
    config.device_bytes = *bytes;
  }
  if (!flags.fraction.empty()) {
    const absl::StatusOr<double> share = ParseShare(flags.fraction);
    if (!share.ok()) return absl::InvalidArgumentError(absl::StrCat("--fraction: ", share.status().message()));
    config.fraction = *share;
  }
  const double fraction = config.fraction.value_or(config.options.per_process_memory_fraction);
  if (config.device_bytes == ReplayConfig::kUnlimitedBytes && fraction < 1) {
    return absl::InvalidArgumentError("a memory fraction of what? say --device-bytes, too");
  }
  return config;
}

absl::StatusOr<Trace> ReadTraceArgument(const Context& context, const std::string& path) {
  absl::StatusOr<Trace> trace = ReadTraceFile(path, context.device);
  // A missing file is an ordinary wrong argument.
  if (!trace.ok()) return absl::InvalidArgumentError(trace.status().message());
  if (trace->ops.empty())
    return absl::InvalidArgumentError(absl::StrCat(InputName(path), ": has no operations to replay"));
  for (const std::string& note : trace->notes) {
    std::fprintf(stderr, "vramctl: %s: %s\n", InputName(path).c_str(), note.c_str());
  }
  return trace;
}

absl::StatusOr<ReplayConfig> ConfigFor(const ReplayFlags& flags, const Trace& trace, const ReplayConfig& given) {
  ReplayConfig config = given;
  if (flags.conf.empty() && flags.alloc_conf.empty()) {
    config.options = trace.recorded_options.value_or(config.options);
    config.left_out = trace.left_out;
  }
  const Replay replay(config, trace);
  if (replay.start_status().ok()) return config;
  return Refusal({replay.start_status().code(), absl::StrCat("does not fit: ", replay.start_status().message())});
}

namespace {

absl::Status PrintEveryOperation(const Trace& trace, const ReplayConfig& config) {
  vrambroker::Replay replay(config, trace);
  std::string out = absl::StrCat(PerOpHeading(), "\n");
  for (size_t i = 0; i < trace.ops.size(); ++i) {
    const auto result = replay.Do(trace.ops[i]);
    absl::StrAppend(&out, PerOpRow(i, trace.ops[i], result, replay), "\n");
    if (out.size() < (size_t{1} << 16)) continue;
    std::fputs(out.c_str(), stdout);
    out.clear();
  }
  absl::StrAppend(&out, FinalLine(replay), "\n");
  std::fputs(out.c_str(), stdout);
  return absl::OkStatus();
}

// Writes the heap at the end of the replay, with its last events.
absl::Status WriteHeap(const Trace& trace, const ReplayConfig& config, const std::string& path) {
  constexpr size_t kMaxEvents = 1'000'000;
  if (absl::Status status = CheckSnapshotPath(path); !status.ok()) return status;
  Replay replay(config, trace);
  replay.allocator().SetRecording(kMaxEvents);
  for (const TraceOp& op : trace.ops) replay.Do(op);
  return WriteSnapshot({replay.allocator().Snapshot()}, path);
}

}  // namespace

absl::Status RunReplay(const Context& context, const std::string& path) {
  const absl::StatusOr<ReplayConfig> given = ReplayConfigOf(context.replay);
  if (!given.ok()) return given.status();
  const absl::StatusOr<Trace> trace = ReadTraceArgument(context, path);
  if (!trace.ok()) return trace.status();
  const absl::StatusOr<ReplayConfig> config = ConfigFor(context.replay, *trace, *given);
  if (!config.ok()) return config.status();
  if (context.replay.per_op) {
    if (context.json) return absl::InvalidArgumentError("--per-op prints rows; it goes with no other --format");
    return PrintEveryOperation(*trace, *config);
  }

  if (!context.output.empty()) {
    absl::Status status = WriteHeap(*trace, *config, context.output);
    if (!status.ok() || context.output == "-") return status;
  }

  const ReplaySummary summary = SummarizeReplay(*trace, *config);
  const double ns_per_op = MeasureReplay(*trace, *config);
  const MemoryStats& stats = summary.stats;
  const std::string options = FormatAllocConf(config->options);
  if (context.json) {
    nlohmann::ordered_json json = {{"trace", path},
                                   {"alloc_conf", options},
                                   {"operations", summary.ops},
                                   {"allocations", summary.allocations},
                                   {"start_reserved_bytes", trace->start.ReservedBytes()},
                                   {"peak_allocated_bytes", summary.peak_allocated_bytes},
                                   {"peak_reserved_bytes", summary.peak_reserved_bytes},
                                   {"fragmentation_at_peak", summary.fragmentation_at_peak},
                                   {"ooms", summary.ooms},
                                   {"retries", stats.num_alloc_retries},
                                   {"device_calls", summary.device_calls},
                                   {"ns_per_operation", ns_per_op}};
    if (config->device_bytes != ReplayConfig::kUnlimitedBytes) json["device_bytes"] = config->device_bytes;
    std::printf("%s\n", JsonText(json, /*indent=*/2).c_str());
    return absl::OkStatus();
  }
  const std::vector<std::vector<std::string>> rows = {
      {"", ""},
      {"settings", options.empty() ? "default" : options},
      {"device",
       config->device_bytes == ReplayConfig::kUnlimitedBytes ? "unlimited" : FormatBytes(config->device_bytes)},
      {"operations", absl::StrCat(summary.ops, ", of these ", summary.allocations, " allocations")},
      {"reserved at the start", FormatBytes(trace->start.ReservedBytes())},
      {"peak allocated", FormatBytes(summary.peak_allocated_bytes)},
      {"peak reserved", FormatBytes(summary.peak_reserved_bytes)},
      {"fragmentation at peak", absl::StrCat(Percent(summary.fragmentation_at_peak), " of what is reserved")},
      {"out of memory", absl::StrCat(summary.ooms)},
      {"cache flush retries", absl::StrCat(stats.num_alloc_retries)},
      {"device calls", absl::StrCat(summary.device_calls, " (", stats.num_device_alloc, " to obtain segments, ",
                                    stats.num_device_free, " to give them back)")},
      {"time", absl::StrFormat("%.0f ns per operation", ns_per_op)},
  };
  const std::string table = Table(rows);
  std::fputs(table.substr(table.find('\n') + 1).c_str(), stdout);
  return absl::OkStatus();
}

}  // namespace vrambroker::vramctl
