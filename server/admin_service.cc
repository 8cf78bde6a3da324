// SPDX-License-Identifier: Apache-2.0
#include "server/admin_service.h"

#include <unistd.h>

#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/convert.h"

namespace vrambroker {
namespace {

// Root, and the user that the daemon runs as.
bool IsOperator(const Caller& caller) {
  return caller.uid == 0 || caller.uid == geteuid();
}

v1::GetSnapshotResponse::BlockState ToProto(BlockState state) {
  switch (state) {
    case BlockState::kFree:
      return v1::GetSnapshotResponse::BLOCK_STATE_FREE;
    case BlockState::kAllocated:
      return v1::GetSnapshotResponse::BLOCK_STATE_ALLOCATED;
    case BlockState::kPendingFree:
      return v1::GetSnapshotResponse::BLOCK_STATE_PENDING_FREE;
  }
  return v1::GetSnapshotResponse::BLOCK_STATE_UNSPECIFIED;
}

v1::GetSnapshotResponse::Event::Action ToProto(HistoryAction action) {
  using Event = v1::GetSnapshotResponse::Event;
  switch (action) {
    case HistoryAction::kAllocate:
      return Event::ACTION_ALLOCATE;
    case HistoryAction::kFreeRequested:
      return Event::ACTION_FREE_REQUESTED;
    case HistoryAction::kFreeCompleted:
      return Event::ACTION_FREE_COMPLETED;
    case HistoryAction::kSegmentAllocate:
      return Event::ACTION_SEGMENT_ALLOCATE;
    case HistoryAction::kSegmentFree:
      return Event::ACTION_SEGMENT_FREE;
    case HistoryAction::kSnapshot:
      return Event::ACTION_SNAPSHOT;
    case HistoryAction::kOutOfMemory:
      return Event::ACTION_OUT_OF_MEMORY;
  }
  return Event::ACTION_UNSPECIFIED;
}

// A snapshot as messages, of which none is near gRPC's limit. They are made one at a time: a million events as messages
// take much more memory than as themselves.
class SnapshotParts {
 public:
  explicit SnapshotParts(HeapSnapshot snapshot) : snapshot_(std::move(snapshot)) {}

  // The next part; nullopt after the last one.
  std::optional<v1::GetSnapshotResponse> Next() {
    v1::GetSnapshotResponse part;
    if (is_first_) part.set_alloc_conf(FormatAllocConf(snapshot_.options));
    int room = kItemsInPart;
    while (room > 0 && segment_ < snapshot_.segments.size()) room -= AddSegment(room, &part);
    while (room > 0 && event_ < snapshot_.history.size()) {
      AddEvent(snapshot_.history[event_++], &part);
      --room;
    }
    if (room == kItemsInPart && !is_first_) return std::nullopt;
    is_first_ = false;
    return part;
  }

 private:
  static constexpr int kItemsInPart = 4096;  // blocks and events

  // Adds at most `room` blocks of the segment that comes next. Returns how many.
  int AddSegment(int room, v1::GetSnapshotResponse* part) {
    const SegmentSnapshot& from = snapshot_.segments[segment_];
    v1::GetSnapshotResponse::Segment* to = part->add_segments();
    to->set_id(Raw(from.id));
    to->set_segment_bytes(from.bytes);
    to->set_small_pool(from.pool == PoolKind::kSmall);
    to->set_address(from.address);
    to->set_stream(from.stream);
    for (; block_ < from.blocks.size() && to->blocks_size() < room; ++block_) {
      v1::GetSnapshotResponse::Block* block = to->add_blocks();
      block->set_offset_bytes(from.blocks[block_].offset);
      block->set_block_bytes(from.blocks[block_].bytes);
      block->set_requested_bytes(from.blocks[block_].requested_bytes);
      block->set_state(ToProto(from.blocks[block_].state));
    }
    if (block_ == from.blocks.size()) {
      ++segment_;
      block_ = 0;
    }
    return to->blocks_size();
  }

  static void AddEvent(const HistoryEvent& from, v1::GetSnapshotResponse* part) {
    v1::GetSnapshotResponse::Event* to = part->add_events();
    to->set_action(ToProto(from.action));
    to->set_address(from.address);
    to->set_bytes(from.bytes);
    to->set_stream(from.stream);
    to->set_time_us(from.time_us);
  }

  const HeapSnapshot snapshot_;
  bool is_first_ = true;
  size_t segment_ = 0;  // what comes next
  size_t block_ = 0;    // ... of that segment
  size_t event_ = 0;
};

// Writes the parts of a snapshot one after the other, or ends the call with an error. Deletes itself.
class SnapshotWriter : public grpc::ServerWriteReactor<v1::GetSnapshotResponse> {
 public:
  explicit SnapshotWriter(absl::StatusOr<SnapshotParts> parts) : parts_(std::move(parts)) { WriteNext(); }

  void OnWriteDone(bool ok) override {
    if (ok) {
      WriteNext();
    } else {
      Finish(grpc::Status::CANCELLED);
    }
  }
  void OnDone() override { delete this; }

 private:
  void WriteNext() {
    part_ = parts_.ok() ? parts_->Next() : std::nullopt;
    if (part_.has_value()) {
      StartWrite(&*part_);
    } else {
      Finish(ToGrpc(parts_.status()));
    }
  }

  absl::StatusOr<SnapshotParts> parts_;
  std::optional<v1::GetSnapshotResponse> part_;  // being written
};

}  // namespace

absl::StatusOr<SessionPtr> AdminService::Find(const v1::SessionRef& ref) const {
  switch (ref.ref_case()) {
    case v1::SessionRef::kId:
      return broker_.FindSession(SessionRef(SessionId{ref.id()}));
    case v1::SessionRef::kName:
      // Longer ones would come back in the error message, and break the connection when they are very long.
      if (ref.name().size() > 255) return absl::InvalidArgumentError("session.name: longer than any session's name");
      return broker_.FindSession(SessionRef(ref.name()));
    case v1::SessionRef::REF_NOT_SET:
      break;
  }
  return absl::InvalidArgumentError("session: neither id nor name is set");
}

absl::StatusOr<SessionPtr> AdminService::FindForChange(const grpc::CallbackServerContext& context,
                                                       const v1::SessionRef& ref) const {
  absl::StatusOr<Caller> caller = connections_.Identify(context);
  if (!caller.ok()) return caller.status();
  if (!IsOperator(*caller)) {
    return absl::PermissionDeniedError(
        absl::StrCat("uid ", caller->uid, " may not change sessions; root and uid ", geteuid(), " may"));
  }
  return Find(ref);
}

absl::StatusOr<SessionPtr> AdminService::FindForSnapshots(const grpc::CallbackServerContext& context,
                                                          const v1::SessionRef& ref) const {
  absl::StatusOr<Caller> caller = connections_.Identify(context);
  if (!caller.ok()) return caller.status();
  absl::StatusOr<SessionPtr> session = Find(ref);
  if (session.ok() && !IsOperator(*caller) && caller->uid != (*session)->caller().uid) {
    return absl::PermissionDeniedError("the session is another user's");
  }
  return session;
}

grpc::ServerUnaryReactor* AdminService::ListSessions(grpc::CallbackServerContext* context,
                                                     const v1::ListSessionsRequest* /*request*/,
                                                     v1::ListSessionsResponse* response) {
  for (const SessionInfo& info : broker_.ListSessions()) *response->add_sessions() = ToProto(info);
  return Reply(context, absl::OkStatus());
}

grpc::ServerUnaryReactor* AdminService::GetSession(grpc::CallbackServerContext* context,
                                                   const v1::GetSessionRequest* request,
                                                   v1::GetSessionResponse* response) {
  absl::StatusOr<SessionPtr> session = Find(request->session());
  if (session.ok()) *response->mutable_session() = ToProto(broker_.Describe(**session));
  return Reply(context, session.status());
}

grpc::ServerUnaryReactor* AdminService::SetLimit(grpc::CallbackServerContext* context,
                                                 const v1::SetLimitRequest* request, v1::SetLimitResponse* response) {
  absl::StatusOr<SessionPtr> session = FindForChange(*context, request->session());
  if (!session.ok()) return Reply(context, session.status());
  const std::optional<Limit> limit = FromProto(request->limit());
  if (!limit.has_value()) return Reply(context, absl::InvalidArgumentError("limit: neither bytes nor fraction is set"));
  const absl::Status status = broker_.SetLimit(*session, *limit);
  if (status.ok()) *response->mutable_session() = ToProto(broker_.Describe(**session));
  return Reply(context, status);
}

grpc::ServerUnaryReactor* AdminService::TrimSession(grpc::CallbackServerContext* context,
                                                    const v1::TrimSessionRequest* request,
                                                    v1::TrimSessionResponse* response) {
  absl::StatusOr<SessionPtr> session = FindForChange(*context, request->session());
  if (!session.ok()) return Reply(context, session.status());
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  broker_.EmptyCache(*session, [reactor, response](const absl::StatusOr<uint64_t>& bytes) {
    response->set_released_bytes(bytes.value_or(0));
    reactor->Finish(ToGrpc(bytes.status()));
  });
  return reactor;
}

grpc::ServerUnaryReactor* AdminService::EndSession(grpc::CallbackServerContext* context,
                                                   const v1::EndSessionRequest* request,
                                                   v1::EndSessionResponse* response) {
  absl::StatusOr<SessionPtr> session = FindForChange(*context, request->session());
  if (session.ok()) response->set_quarantined_bytes(broker_.EndSession(*session, "ended by an operator"));
  return Reply(context, session.status());
}

grpc::ServerWriteReactor<v1::GetSnapshotResponse>* AdminService::GetSnapshot(grpc::CallbackServerContext* context,
                                                                             const v1::GetSnapshotRequest* request) {
  absl::StatusOr<SessionPtr> session = FindForSnapshots(*context, request->session());
  absl::Status status = session.ok() ? broker_.CheckDevice(request->device()) : session.status();
  if (!status.ok()) return new SnapshotWriter(status);
  return new SnapshotWriter(SnapshotParts((*session)->allocator(static_cast<int>(request->device())).Snapshot()));
}

grpc::ServerUnaryReactor* AdminService::SetRecording(grpc::CallbackServerContext* context,
                                                     const v1::SetRecordingRequest* request,
                                                     v1::SetRecordingResponse* /*response*/) {
  absl::StatusOr<SessionPtr> session = FindForSnapshots(*context, request->session());
  return Reply(context, session.ok() ? broker_.SetRecording(*session, request->max_events()) : session.status());
}

}  // namespace vrambroker
