// SPDX-License-Identifier: Apache-2.0
#include <cstdio>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "allocator/allocator_options.h"
#include "allocator/heap_snapshot.h"
#include "client/vramctl/commands.h"
#include "client/vramctl/daemon_calls.h"
#include "client/vramctl/snapshot_file.h"

namespace vrambroker::vramctl {
namespace {

using Part = v1::GetSnapshotResponse;

absl::StatusOr<BlockState> FromProto(Part::BlockState state) {
  switch (state) {
    case Part::BLOCK_STATE_FREE:
      return BlockState::kFree;
    case Part::BLOCK_STATE_ALLOCATED:
      return BlockState::kAllocated;
    case Part::BLOCK_STATE_PENDING_FREE:
      return BlockState::kPendingFree;
    default:
      return absl::InternalError(absl::StrCat("the daemon is of another version: block state ", state));
  }
}

absl::StatusOr<HistoryAction> FromProto(Part::Event::Action action) {
  switch (action) {
    case Part::Event::ACTION_ALLOCATE:
      return HistoryAction::kAllocate;
    case Part::Event::ACTION_FREE_REQUESTED:
      return HistoryAction::kFreeRequested;
    case Part::Event::ACTION_FREE_COMPLETED:
      return HistoryAction::kFreeCompleted;
    case Part::Event::ACTION_SEGMENT_ALLOCATE:
      return HistoryAction::kSegmentAllocate;
    case Part::Event::ACTION_SEGMENT_FREE:
      return HistoryAction::kSegmentFree;
    case Part::Event::ACTION_SNAPSHOT:
      return HistoryAction::kSnapshot;
    case Part::Event::ACTION_OUT_OF_MEMORY:
      return HistoryAction::kOutOfMemory;
    default:
      return absl::InternalError(absl::StrCat("the daemon is of another version: event ", action));
  }
}

absl::Status AddPart(const Part& part, HeapSnapshot& heap) {
  for (const Part::Segment& from : part.segments()) {
    const SegmentId id{from.id()};
    if (heap.segments.empty() || heap.segments.back().id != id) {  // else it continues
      heap.segments.push_back({.id = id,
                               .address = from.address(),
                               .bytes = from.segment_bytes(),
                               .pool = from.small_pool() ? PoolKind::kSmall : PoolKind::kLarge,
                               .stream = from.stream()});
    }
    for (const Part::Block& block : from.blocks()) {
      const absl::StatusOr<BlockState> state = FromProto(block.state());
      if (!state.ok()) return state.status();
      heap.segments.back().blocks.push_back({.offset = block.offset_bytes(),
                                             .bytes = block.block_bytes(),
                                             .requested_bytes = block.requested_bytes(),
                                             .state = *state});
    }
  }
  for (const Part::Event& event : part.events()) {
    const absl::StatusOr<HistoryAction> action = FromProto(event.action());
    if (!action.ok()) return action.status();
    heap.history.push_back({.action = *action,
                            .address = event.address(),
                            .bytes = event.bytes(),
                            .stream = event.stream(),
                            .time_us = event.time_us()});
  }
  return absl::OkStatus();
}

absl::StatusOr<HeapSnapshot> GetSnapshot(Daemon& daemon, uint64_t session, uint32_t device) {
  v1::GetSnapshotRequest request;
  request.mutable_session()->set_id(session);
  request.set_device(device);
  grpc::ClientContext context;
  context.set_deadline(absl::ToChronoTime(absl::Now() + kDeadline));
  const std::unique_ptr<grpc::ClientReader<Part>> reader = daemon.admin->GetSnapshot(&context, request);
  HeapSnapshot heap;
  absl::Status status;
  bool is_first = true;
  for (Part part; status.ok() && reader->Read(&part);) {
    if (is_first) {
      absl::StatusOr<AllocConf> conf = ParseAllocConf(part.alloc_conf());
      if (!conf.ok())
        return absl::InternalError(absl::StrCat("the daemon is of another version: ", conf.status().message()));
      heap.options = conf->options;
    }
    is_first = false;
    status = AddPart(part, heap);
  }
  if (!status.ok()) {
    context.TryCancel();
    return status;
  }
  if (absl::Status end = client_internal::FromGrpc(reader->Finish()); !end.ok()) return end;
  return heap;
}

}  // namespace

absl::Status Record(const Context& context, const std::string& session, const std::string& events) {
  uint32_t max_events = 0;
  if (!absl::SimpleAtoi(events, &max_events)) {
    return absl::InvalidArgumentError(absl::StrCat("EVENTS: '", events, "' is not a whole number; 0 stops recording"));
  }
  absl::StatusOr<Daemon> daemon = Daemon::Connect(context);
  if (!daemon.ok()) return daemon.status();
  v1::SetRecordingRequest request;
  SetRef(session, request.mutable_session());
  request.set_max_events(max_events);
  v1::SetRecordingResponse response;
  if (absl::Status status = Call(*daemon->admin, &v1::Admin::Stub::SetRecording, request, &response); !status.ok()) {
    return status;
  }
  if (context.json) {
    Print({{"session", session}, {"max_events", max_events}});
  } else if (max_events == 0) {
    std::printf("%s: records no events\n", session.c_str());
  } else {
    std::printf("%s: keeps its last %u events on each device\n", session.c_str(), max_events);
  }
  return absl::OkStatus();
}

absl::Status Snapshot(const Context& context, const std::string& session) {
  const std::string& path = context.output;
  if (path.empty()) {
    return absl::InvalidArgumentError("snapshot: say where to: -o FILE, or -o - for JSON on the terminal");
  }
  if (absl::Status status = CheckSnapshotPath(path); !status.ok()) return status;
  absl::StatusOr<Daemon> daemon = Daemon::Connect(context);
  if (!daemon.ok()) return daemon.status();
  const absl::StatusOr<v1::Session> found = GetSession(*daemon, session);
  if (!found.ok()) return found.status();
  std::vector<HeapSnapshot> heaps;
  size_t segments = 0;
  size_t blocks = 0;
  size_t events = 0;
  for (const v1::SessionDevice& device : found->devices()) {
    absl::StatusOr<HeapSnapshot> heap = GetSnapshot(*daemon, found->id(), device.device());
    if (!heap.ok()) return heap.status();
    segments += heap->segments.size();
    for (const SegmentSnapshot& segment : heap->segments) blocks += segment.blocks.size();
    events += heap->history.size();
    heaps.push_back(*std::move(heap));
  }

  if (absl::Status status = WriteSnapshot(heaps, path); !status.ok() || path == "-") return status;
  if (context.json) {
    Print({{"session", found->name()}, {"file", path}, {"segments", segments}, {"blocks", blocks}, {"events", events}});
  } else {
    std::printf("%s: %zu segments, %zu blocks and %zu events are in %s\n", found->name().c_str(), segments, blocks,
                events, path.c_str());
  }
  return absl::OkStatus();
}

}  // namespace vrambroker::vramctl
