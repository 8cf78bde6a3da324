// SPDX-License-Identifier: Apache-2.0
//
// libFuzzer: any bytes as the text of a trace and of a configuration, and as a file, also gzipped. Accepted traces are
// replayed.
#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <iostream>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "allocator/replay/replay.h"
#include "allocator/replay/trace.h"

namespace {

using vrambroker::operator""_MiB;

constexpr size_t kMostOperations = 2000;  // replayed operations

void Require(bool holds, absl::string_view rule) {
  if (holds) return;
  std::cerr << "violated: " << rule << '\n';
  std::abort();
}

// Checks ids of allocations. Segments have other numbers.
void CheckIds(const vrambroker::Trace& trace) {
  for (const vrambroker::TraceOp& op : trace.ops) {
    Require(op.id < trace.ids || op.id == 0 || op.kind == vrambroker::TraceOp::Kind::kGiveBack, "ids are below `ids`");
  }
}

void ReplayAll(const vrambroker::Trace& trace) {
  if (trace.ops.size() > kMostOperations) return;
  vrambroker::Replay replay({.device_bytes = 256_MiB}, trace);
  Require(replay.start_status().ok() || absl::IsResourceExhausted(replay.start_status()), "a start can be taken over");
  for (size_t i = 0; i < trace.ops.size(); ++i) {
    const vrambroker::Replay::Result result = replay.Do(trace.ops[i]);
    Require(!vrambroker::PerOpRow(i, trace.ops[i], result, replay).empty(), "every operation has a row");
  }
  Require(replay.allocator().CheckInvariants().ok(), "invariants hold after a replay");
  Require(absl::StartsWith(vrambroker::FinalLine(replay), "#final {"), "there is a last line");
}

void ReadAsFile(const uint8_t* data, size_t size) {
  static const int file = memfd_create("trace_fuzz", 0);
  Require(ftruncate(file, 0) == 0 && pwrite(file, data, size, 0) == static_cast<ssize_t>(size), "there is a file");
  const std::string path = absl::StrCat("/proc/self/fd/", file);
  const absl::StatusOr<vrambroker::Trace> trace = vrambroker::ReadTraceFile(path);
  if (trace.ok()) {
    CheckIds(*trace);
    return;
  }
  Require(absl::StartsWith(trace.status().message(), path), "an error names the file");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const absl::string_view text(reinterpret_cast<const char*>(data), size);
  const absl::StatusOr<vrambroker::Trace> trace = vrambroker::ParseTraceText(text);
  if (trace.ok()) {
    for (const vrambroker::TraceOp& op : trace->ops) {
      Require(op.bytes < vrambroker::kMaxRequestBytes, "requests are of a size that the allocator takes");
      Require(op.fraction >= 0 && op.fraction <= 1, "fractions are fractions");
    }
    CheckIds(*trace);
    const std::string written = vrambroker::FormatTrace(*trace);
    const absl::StatusOr<vrambroker::Trace> again = vrambroker::ParseTraceText(written);
    Require(again.ok() && vrambroker::FormatTrace(*again) == written, "what is written is read the same");
    ReplayAll(*trace);
  } else {
    Require(absl::StartsWith(trace.status().message(), "line "), "an error names its line");
  }
  const absl::StatusOr<vrambroker::ReplayConfig> config = vrambroker::ParseReplayConf(text);
  Require(config.ok() || absl::StartsWith(config.status().message(), "line "), "an error names its line");
  ReadAsFile(data, size);
  return 0;
}
