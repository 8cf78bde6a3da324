// SPDX-License-Identifier: Apache-2.0
#include "server/admin_service.h"

#include <unistd.h>

#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/convert.h"

namespace vrambroker {
namespace {

// Root, and the user that the daemon runs as.
bool IsOperator(const Caller& caller) {
  return caller.uid == 0 || caller.uid == geteuid();
}

// Writes the parts of a snapshot one after the other. Deletes itself.
class SnapshotWriter : public grpc::ServerWriteReactor<v1::GetSnapshotResponse> {
 public:
  SnapshotWriter(absl::Status status, std::vector<v1::GetSnapshotResponse> parts)
      : status_(std::move(status)), parts_(std::move(parts)) {
    WriteNext();
  }

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
    if (next_ < parts_.size()) {
      StartWrite(&parts_[next_++]);
    } else {
      Finish(ToGrpc(status_));
    }
  }

  const absl::Status status_;
  const std::vector<v1::GetSnapshotResponse> parts_;
  size_t next_ = 0;
};

// In parts of at most 4096 blocks, far below gRPC's limit for a message.
std::vector<v1::GetSnapshotResponse> InParts(const std::vector<SegmentSnapshot>& segments) {
  constexpr int kBlocksInPart = 4096;
  std::vector<v1::GetSnapshotResponse> parts;
  int room = 0;
  for (const SegmentSnapshot& from : segments) {
    v1::GetSnapshotResponse::Segment* segment = nullptr;
    for (const BlockSnapshot& block : from.blocks) {
      if (room == 0) {
        parts.emplace_back();
        room = kBlocksInPart;
        segment = nullptr;
      }
      if (segment == nullptr) {
        segment = parts.back().add_segments();
        segment->set_id(Raw(from.id));
        segment->set_segment_bytes(from.bytes);
        segment->set_small_pool(from.pool == PoolKind::kSmall);
      }
      v1::GetSnapshotResponse::Block* to = segment->add_blocks();
      to->set_offset_bytes(block.offset);
      to->set_block_bytes(block.bytes);
      to->set_requested_bytes(block.requested_bytes);
      to->set_allocated(block.state == BlockState::kAllocated);
      --room;
    }
  }
  return parts;
}

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
  absl::StatusOr<Caller> caller = connections_.Identify(*context);
  absl::StatusOr<SessionPtr> session = caller.ok() ? Find(request->session()) : caller.status();
  absl::Status status = session.status();
  // A snapshot is large, and shows how a program uses memory: not for everyone.
  if (status.ok() && !IsOperator(*caller) && caller->uid != (*session)->caller().uid) {
    status = absl::PermissionDeniedError("the session is another user's");
  }
  if (status.ok()) status = broker_.CheckDevice(request->device());
  if (!status.ok()) return new SnapshotWriter(status, {});
  return new SnapshotWriter(status, InParts((*session)->allocator(static_cast<int>(request->device())).Snapshot().segments));
}

}  // namespace vrambroker
