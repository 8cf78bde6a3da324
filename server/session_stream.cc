// SPDX-License-Identifier: Apache-2.0
#include "server/session_stream.h"

#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/convert.h"
#include "server/version.h"

namespace vrambroker {
namespace {

constexpr size_t kMaxQueued = 1024;  // messages to a client that does not read
constexpr int kMaxIdsInMessage = 4096;
// Errors and warnings repeat parts of it; gRPC breaks connections over statuses of more than 8 KiB.
constexpr size_t kMaxAllocConf = 4096;

absl::StatusOr<AllocConf> ParseHelloAllocConf(const std::string& text) {
  if (text.size() > kMaxAllocConf) {
    return absl::InvalidArgumentError(
        absl::StrCat("alloc_conf: ", text.size(), " characters; at most ", kMaxAllocConf, " are allowed"));
  }
  absl::StatusOr<AllocConf> conf = ParseAllocConf(text);
  if (conf.ok()) return conf;
  return absl::InvalidArgumentError(absl::StrCat("alloc_conf: ", conf.status().message()));
}

}  // namespace

// What the session holds on to. The stream goes away with the call; its events then go nowhere.
class SessionStream::Events : public SessionEvents {
 public:
  explicit Events(SessionStream* stream) : stream_(stream) {}

  void Detach() {
    MutexLock lock(mu_);
    stream_ = nullptr;
  }

  void Send(v1::SessionResponse response) {
    MutexLock lock(mu_);
    if (stream_ != nullptr) stream_->Send(std::move(response));
  }

  void CloseSegments(absl::Span<const SegmentId> segments) override {
    v1::SessionResponse response;
    for (const SegmentId id : segments) response.mutable_close_segments()->add_segment_ids(Raw(id));
    Send(std::move(response));
  }
  void LimitChanged(int device, uint64_t limit_bytes) override {
    v1::SessionResponse response;
    response.mutable_limit_changed()->set_device(static_cast<uint32_t>(device));
    response.mutable_limit_changed()->set_limit_bytes(limit_bytes);
    Send(std::move(response));
  }
  void Draining() override {
    v1::SessionResponse response;
    response.mutable_draining();
    Send(std::move(response));
  }
  void Ended(const std::string& reason) override {
    v1::SessionResponse response;
    response.mutable_ended()->set_reason(reason);
    Send(std::move(response));
  }

 private:
  Mutex mu_;
  SessionStream* stream_ ABSL_GUARDED_BY(mu_);
};

SessionStream::SessionStream(Broker* broker, grpc::CallbackServerContext* context, absl::StatusOr<Caller> identity)
    : broker_(*broker), context_(*context), identity_(std::move(identity)), events_(std::make_shared<Events>(this)) {
  if (identity_.ok()) {
    StartRead(&request_);
  } else {
    End(identity_.status());
  }
}

void SessionStream::OnReadDone(bool ok) {
  if (!ok) {  // half-closed or broken; without a goodbye neither says that the client's mappings are closed
    End(session_ != nullptr ? absl::OkStatus()
                            : absl::InvalidArgumentError("message: the stream ended before a readable hello"));
    return;
  }
  Handle(request_);
}

void SessionStream::Handle(const v1::SessionRequest& request) {
  using Request = v1::SessionRequest;
  if (session_ == nullptr) {
    const absl::Status status = request.message_case() == Request::kHello
                                    ? HandleHello(request.hello())
                                    : absl::InvalidArgumentError("message: the first message must be hello");
    if (!status.ok()) return End(status);
    return StartRead(&request_);
  }
  switch (request.message_case()) {
    case Request::kSegmentsClosed: {
      if (request.segments_closed().segment_ids_size() > kMaxIdsInMessage) {
        return End(absl::InvalidArgumentError(
            absl::StrCat("segments_closed.segment_ids: more than ", kMaxIdsInMessage, " ids in a message")));
      }
      std::vector<SegmentId> ids;
      for (const uint64_t id : request.segments_closed().segment_ids()) ids.push_back(SegmentId{id});
      session_->SegmentsClosed(ids);
      break;
    }
    case Request::kGoodbye:
      broker_.Close(session_, "goodbye");
      return End(absl::OkStatus());
    case Request::kAllocate:
      HandleAllocate(request.allocate());
      break;
    case Request::kFree:
      HandleFree(request.free());
      break;
    case Request::kHello:
      return End(absl::FailedPreconditionError("message: hello was sent before; one session a stream"));
    case Request::MESSAGE_NOT_SET:
      return End(absl::InvalidArgumentError("message: empty, or of a newer protocol"));
  }
  StartRead(&request_);
}

absl::Status SessionStream::HandleHello(const v1::Hello& hello) {
  if (hello.protocol_version() != kProtocolVersion) {
    return absl::FailedPreconditionError(absl::StrCat(
        "protocol_version: the client speaks version ", hello.protocol_version(), ", the daemon (vrambroker ", kVersion,
        ") version ", kProtocolVersion, "; install the same release of both"));
  }
  const absl::StatusOr<AllocConf> conf = ParseHelloAllocConf(hello.alloc_conf());
  if (!conf.ok()) return conf.status();
  SessionWishes wishes{.name = hello.name(), .limit = FromProto(hello.limit())};
  if (!hello.alloc_conf().empty()) wishes.allocator = conf->options;
  absl::StatusOr<SessionPtr> session = broker_.OpenSession(*identity_, wishes, events_);
  if (!session.ok()) return session.status();
  session_ = *session;

  v1::SessionResponse response;
  v1::Welcome* welcome = response.mutable_welcome();
  welcome->set_session_id(Raw(session_->id()));
  welcome->set_name(session_->name());
  welcome->set_protocol_version(kProtocolVersion);
  welcome->set_daemon_version(kVersion);
  for (const SegmentPool* pool : broker_.pools()) {
    v1::Welcome::DeviceGrant* grant = welcome->add_devices();
    *grant->mutable_device() = ToProto(*pool);
    grant->set_limit_bytes(pool->GetAccount(session_->id()).value_or(AccountFigures()).limit_bytes);
  }
  welcome->mutable_warnings()->Add(conf->warnings.begin(), conf->warnings.end());
  Send(std::move(response));
  return absl::OkStatus();
}

void SessionStream::HandleAllocate(const v1::AllocateCall& call) {
  broker_.Allocate(session_, call.request().device(), call.request().requested_bytes(), call.request().stream(),
                   [events = events_, id = call.call_id()](absl::StatusOr<Allocation> allocation) {
                     v1::SessionResponse response;
                     v1::CallResult* result = response.mutable_result();
                     result->set_call_id(id);
                     if (allocation.ok()) {
                       *result->mutable_allocated() = ToProto(*allocation);
                     } else {
                       *result->mutable_error() = ToProto(allocation.status());
                     }
                     events->Send(std::move(response));
                   });
}

void SessionStream::HandleFree(const v1::FreeCall& call) {
  const absl::StatusOr<std::vector<BlockId>> blocks = BlockIds(call.request());
  const absl::Status status = blocks.ok() ? broker_.Free(session_, *blocks) : blocks.status();
  v1::SessionResponse response;
  v1::CallResult* result = response.mutable_result();
  result->set_call_id(call.call_id());
  if (status.ok()) {
    result->mutable_freed();
  } else {
    *result->mutable_error() = ToProto(status);
  }
  Send(std::move(response));
}

void SessionStream::Send(v1::SessionResponse response) {
  MutexLock lock(mu_);
  if (ending_) return;
  if (outgoing_.size() < kMaxQueued) {
    outgoing_.push_back(std::move(response));
    return WriteNext();
  }
  // The client does not read. What is being written may never be done, so the call has to be broken.
  outgoing_.resize(1);
  ending_ = true;
  final_status_ = grpc::Status(grpc::StatusCode::RESOURCE_EXHAUSTED, "the client does not read its session stream");
  context_.TryCancel();
}

void SessionStream::End(const absl::Status& status) {
  MutexLock lock(mu_);
  if (ending_) return;
  ending_ = true;
  final_status_ = ToGrpc(status);
  WriteNext();
}

void SessionStream::WriteNext() {
  if (writing_ || finished_) return;
  if (!outgoing_.empty()) {
    writing_ = true;
    StartWrite(&outgoing_.front());
  } else if (ending_) {
    finished_ = true;
    Finish(final_status_);
  }
}

void SessionStream::OnWriteDone(bool ok) {
  MutexLock lock(mu_);
  writing_ = false;
  outgoing_.pop_front();
  if (!ok) {
    outgoing_.clear();
    ending_ = true;
  }
  WriteNext();
}

void SessionStream::OnCancel() {
  End(absl::CancelledError("the connection is gone"));
}

void SessionStream::OnDone() {
  events_->Detach();
  if (session_ != nullptr) broker_.Disconnect(session_);
  delete this;
}

}  // namespace vrambroker
