// SPDX-License-Identifier: Apache-2.0
#include <cstdio>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "allocator/heap/heap_snapshot.h"
#include "client/vramctl/commands/commands.h"
#include "client/vramctl/commands/snapshot_file.h"
#include "client/vramctl/daemon/daemon_calls.h"
#include "client/vramctl/views/output.h"

namespace vrambroker::vramctl {
absl::Status Record(const Context& context, const std::string& session, const std::string& events) {
  uint32_t max_events = 0;
  if (!absl::SimpleAtoi(events, &max_events)) {
    return absl::InvalidArgumentError(absl::StrCat("EVENTS: '", events, "' is not a whole number; 0 stops recording"));
  }
  absl::StatusOr<Daemon> daemon = Daemon::Connect(context);
  if (!daemon.ok()) return daemon.status();
  v1::SetRecordingRequest request;
  *request.mutable_session() = ParseSessionRef(session);
  request.set_max_events(max_events);
  v1::SetRecordingResponse response;
  if (absl::Status status = Call(*daemon, &v1::Admin::Stub::SetRecording, request, &response); !status.ok()) {
    return status;
  }
  if (context.json) {
    Print({{"session", session}, {"max_events", max_events}});
  } else if (max_events == 0) {
    std::printf("%s: records no events\n", session.c_str());
  } else {
    std::printf("%s: keeps its last %s on each device\n", session.c_str(), Counted(max_events, "event").c_str());
  }
  return absl::OkStatus();
}

absl::Status Snapshot(const Context& context, const std::string& session) {
  const std::string& path = context.output;
  if (context.diff.size() == 1) {
    return absl::InvalidArgumentError("--diff: one file; two are compared: vramctl snapshot --diff BEFORE AFTER");
  }
  if (!context.diff.empty()) {
    if (session.empty() && path.empty()) return DiffSnapshots(context, context.diff.front(), context.diff.back());
    return absl::InvalidArgumentError("snapshot: --diff goes with neither SESSION nor -o; see vramctl snapshot --help");
  }
  if (session.empty()) {
    return absl::InvalidArgumentError("SESSION is required, or --diff; see vramctl snapshot --help");
  }
  if (path.empty()) {
    return absl::InvalidArgumentError("snapshot: say where to: -o FILE, or -o - for JSON on the terminal");
  }
  if (absl::Status status = CheckSnapshotPath(path); !status.ok()) return status;
  absl::StatusOr<Daemon> daemon = Daemon::Connect(context);
  if (!daemon.ok()) return daemon.status();
  const absl::StatusOr<v1::Session> found = GetSession(*daemon, ParseSessionRef(session));
  if (!found.ok()) return found.status();
  const absl::StatusOr<std::vector<HeapSnapshot>> heaps = ReadSnapshots(*daemon, found->id());
  if (!heaps.ok()) return heaps.status();
  size_t segments = 0;
  size_t blocks = 0;
  size_t events = 0;
  for (const HeapSnapshot& heap : *heaps) {
    segments += heap.segments.size();
    for (const SegmentSnapshot& segment : heap.segments) blocks += segment.blocks.size();
    events += heap.history.size();
  }

  if (absl::Status status = WriteSnapshot(*heaps, path); !status.ok() || path == "-") return status;
  if (context.json) {
    Print({{"session", found->name()}, {"file", path}, {"segments", segments}, {"blocks", blocks}, {"events", events}});
  } else {
    std::printf("%s: wrote %s, %s and %s to %s\n", found->name().c_str(), Counted(segments, "segment").c_str(),
                Counted(blocks, "block").c_str(), Counted(events, "event").c_str(), path.c_str());
  }
  return absl::OkStatus();
}

}  // namespace vrambroker::vramctl
