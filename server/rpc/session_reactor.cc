// SPDX-License-Identifier: Apache-2.0
#include "server/rpc/session_reactor.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <optional>
#include <utility>
#include <vector>

#include "absl/container/btree_map.h"
#include "absl/strings/str_cat.h"
#include "allocator/base/version.h"
#include "allocator/wire/heap_convert.h"
#include "server/wire/convert.h"

namespace vrambroker {
namespace {

constexpr size_t kMaxQueued = 1024;  // messages to a client that does not read
constexpr int kMaxIdsInMessage = 4096;
constexpr int kMaxCarriedInMessage = 1024;
constexpr int kMaxTooMany = 1000;
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

// What concerns every hello, also one that resumes.
absl::Status CheckHello(const v1::Hello& hello) {
  if (hello.protocol_version() != kProtocolVersion) {
    return absl::FailedPreconditionError(absl::StrCat(
        "protocol_version: the client speaks version ", hello.protocol_version(), ", the daemon (vrambroker ", kVersion,
        ") version ", kProtocolVersion, "; install the same release of both"));
  }
  if (!v1::Placement_IsValid(hello.placement())) {
    return absl::InvalidArgumentError(absl::StrCat("placement: ", hello.placement(), " is no placement"));
  }
  if (hello.has_resume() && hello.placement() != v1::PLACEMENT_LEASED) {
    return absl::InvalidArgumentError("placement: only a session of PLACEMENT_LEASED can be resumed");
  }
  return absl::OkStatus();
}

// Of a message that is a call, and so is answered; those that give something back are never refused.
std::optional<uint64_t> CallId(const v1::SessionRequest& request) {
  using Request = v1::SessionRequest;
  switch (request.message_case()) {
    case Request::kAllocate:
      return request.allocate().call_id();
    case Request::kLease:
      return request.lease().call_id();
    case Request::kExplain:
      return request.explain().call_id();
    default:
      return std::nullopt;
  }
}

// The answer to call `id`: `fill` puts the result in, unless `status` is an error.
template <typename Fill>
v1::SessionResponse AnswerTo(uint64_t id, const absl::Status& status, const Fill& fill) {
  v1::SessionResponse response;
  v1::CallResult* result = response.mutable_result();
  result->set_call_id(id);
  if (status.ok()) {
    fill(*result);
  } else {
    *result->mutable_error() = ToProto(status);
  }
  return response;
}

}  // namespace

// What the session holds on to. The stream goes away with the call; its events then go nowhere.
class SessionReactor::Events : public SessionEvents {
 public:
  explicit Events(SessionReactor* stream) : stream_(stream) {}

  void Detach() {
    MutexLock lock(mu_);
    stream_ = nullptr;
  }

  void Send(v1::SessionResponse response) {
    MutexLock lock(mu_);
    if (stream_ != nullptr) stream_->Send(std::move(response));
  }

  // False when the stream has gone.
  bool Opened(const absl::StatusOr<SessionPtr>& session, const AllocConf& conf) {
    MutexLock lock(mu_);
    if (stream_ == nullptr) return false;
    stream_->Opened(session, conf);
    return true;
  }

  void Ask(uint64_t question_id, const ClientQuestion& question) override {
    v1::SessionResponse response;
    v1::Question* message = response.mutable_question();
    message->set_question_id(question_id);
    switch (question.kind) {
      case ClientQuestion::Kind::kTrim:
        message->mutable_trim()->set_bytes(question.bytes);
        if (question.device >= 0) message->mutable_trim()->set_device(static_cast<uint32_t>(question.device));
        message->mutable_trim()->set_time_ms(static_cast<uint32_t>(question.time.count()));
        break;
      case ClientQuestion::Kind::kStats:
        message->mutable_stats();
        break;
      case ClientQuestion::Kind::kSnapshot:
        message->mutable_snapshot()->set_device(static_cast<uint32_t>(question.device));
        message->mutable_snapshot()->set_without_history(!question.with_history);
        break;
      case ClientQuestion::Kind::kRecord:
        message->mutable_record()->set_max_events(static_cast<uint32_t>(question.max_events));
        break;
      case ClientQuestion::Kind::kHoldRecording:
        message->mutable_record()->set_max_events(static_cast<uint32_t>(question.max_events));
        message->mutable_record()->set_held_events(static_cast<uint32_t>(question.held_events));
        break;
    }
    Send(std::move(response));
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
  void Draining(const std::string& reason) override {
    v1::SessionResponse response;
    response.mutable_draining()->set_reason(reason);
    Send(std::move(response));
  }
  void Ended(const std::string& reason) override {
    v1::SessionResponse response;
    response.mutable_ended()->set_reason(reason);
    Send(std::move(response));
  }

 private:
  Mutex mu_ ABSL_ACQUIRED_AFTER(lock_level::kEvents) ABSL_ACQUIRED_BEFORE(lock_level::kStream){lock_level::kEvents};
  SessionReactor* stream_ ABSL_GUARDED_BY(mu_);
};

SessionReactor::SessionReactor(Broker* broker, CallRates* rates, const RpcMeter* rpcs,
                               grpc::CallbackServerContext* context, absl::StatusOr<Caller> identity,
                               UserSlots::Slot slot, UserSlots* resume_lists)
    : broker_(*broker),
      rates_(*rates),
      rpcs_(*rpcs),
      call_(RpcMeter::Start(rpcs_.Find("Session"))),
      context_(*context),
      identity_(std::move(identity)),
      slot_(std::move(slot)),
      resume_lists_(*resume_lists),
      events_(std::make_shared<Events>(this)) {
  if (identity_.ok()) {
    StartRead(&request_);
  } else {
    End(identity_.status());
  }
}

void SessionReactor::OnReadDone(bool ok) {
  if (!ok) {  // half-closed or broken; without a goodbye neither says that the client's mappings are closed
    End(session_ != nullptr ? absl::OkStatus()
                            : absl::InvalidArgumentError("message: the stream ended before a readable hello"));
    return;
  }
  Handle(request_);
}

void SessionReactor::Handle(const v1::SessionRequest& request) {
  if (session_ == nullptr) {
    const absl::Status status = HandleFirst(request);
    if (!status.ok()) End(status);
    return;  // Opened() reads on
  }
  if (request.message_case() == v1::SessionRequest::kGoodbye) {
    broker_.Close(session_, "goodbye");
    return End(absl::OkStatus());
  }
  if (request.has_free() || request.has_return_segments()) {
    HandleGivingBack(request);
    return StartRead(&request_);
  }
  const absl::Status refusal = rates_.Take(identity_->uid, std::chrono::steady_clock::now());
  if (refusal.ok()) too_many_ = 0;
  const absl::Status status = refusal.ok() ? HandleLater(request) : HandleTooMany(request, refusal);
  if (!status.ok()) return End(status);
  StartRead(&request_);
}

void SessionReactor::HandleGivingBack(const v1::SessionRequest& request) {
  const auto now = std::chrono::steady_clock::now();
  const absl::Status over_rate = rates_.Take(identity_->uid, now);
  if (over_rate.ok()) too_many_ = 0;
  const bool gave_back =
      request.has_free() ? HandleFree(request.free(), over_rate) : HandleReturn(request.return_segments(), over_rate);
  if (gave_back && !over_rate.ok()) rates_.Owe(identity_->uid, now);
}

// Before the session is open.
absl::Status SessionReactor::HandleFirst(const v1::SessionRequest& request) {
  if (resume_list_ != nullptr) {
    if (request.has_resume_more()) return HandleResumeMore(request.resume_more());
    return absl::InvalidArgumentError("message: after a hello whose resume has `more`, it must be resume_more");
  }
  if (!request.has_hello()) return absl::InvalidArgumentError("message: the first message must be hello");
  if (absl::Status status = CheckHello(request.hello()); !status.ok()) return status;
  return request.hello().has_resume() ? HandleResume(request.hello().resume()) : HandleHello(request.hello());
}

absl::Status SessionReactor::HandleTooMany(const v1::SessionRequest& request, const absl::Status& refusal) {
  if (const std::optional<uint64_t> call = CallId(request); call.has_value()) {
    Send(AnswerTo(*call, refusal, [](v1::CallResult&) {}));
    return absl::OkStatus();
  }
  // Another process of the user may be the one that floods: what an honest client sends unasked, statistics once a
  // second and answers, is not lost, and does not end its session.
  if (++too_many_ > kMaxTooMany) return refusal;
  return HandleLater(request);
}

// Of an open session. An error ends the stream.
absl::Status SessionReactor::HandleLater(const v1::SessionRequest& request) {
  using Request = v1::SessionRequest;
  switch (request.message_case()) {
    case Request::kSegmentsClosed: {
      if (request.segments_closed().segment_ids_size() > kMaxIdsInMessage) {
        return absl::InvalidArgumentError(
            absl::StrCat("segments_closed.segment_ids: more than ", kMaxIdsInMessage, " ids in a message"));
      }
      std::vector<SegmentId> ids;
      for (const uint64_t id : request.segments_closed().segment_ids()) ids.push_back(SegmentId{id});
      if (RemoteSession* const remote = session_->remote()) remote->SegmentsClosed(ids);
      break;
    }
    case Request::kAllocate:
      HandleAllocate(request.allocate());
      break;
    case Request::kLease:
      HandleLease(request.lease());
      break;
    case Request::kExplain:
      HandleExplain(request.explain());
      break;
    case Request::kStats:
      return HandleStats(request.stats());
    case Request::kAnswer:
      HandleAnswer(request.answer());
      break;
    case Request::kCancel:
      broker_.waiting().Cancel(session_, request.cancel().call_id());
      break;
    case Request::kCarriedOver:
      return HandleCarriedOver(request.carried_over());
    case Request::kCarriedOverFreed:
      if (request.carried_over_freed().ids_size() > kMaxIdsInMessage) {
        return absl::InvalidArgumentError(
            absl::StrCat("carried_over_freed.ids: more than ", kMaxIdsInMessage, " ids in a message"));
      }
      broker_.leases().FreeCarriedOver(session_, {request.carried_over_freed().ids().data(),
                                                  static_cast<size_t>(request.carried_over_freed().ids_size())});
      break;
    case Request::kCannotOpen:
      if (absl::Status status = broker_.CheckDevice(request.cannot_open().device()); !status.ok()) return status;
      broker_.leases().CannotOpen(*session_, static_cast<int>(request.cannot_open().device()),
                                  request.cannot_open().error());
      break;
    case Request::kResumeMore:
      return absl::FailedPreconditionError("message: resume_more comes right after the hello only");
    case Request::kFree:
    case Request::kReturnSegments:  // HandleGivingBack()
      break;
    case Request::kHello:
      return absl::FailedPreconditionError("message: hello was already sent; a stream carries one session");
    case Request::kGoodbye:
    case Request::MESSAGE_NOT_SET:
      return absl::InvalidArgumentError("message: empty, or of a newer protocol");
  }
  return absl::OkStatus();
}

absl::Status SessionReactor::HandleHello(const v1::Hello& hello) {
  const absl::StatusOr<AllocConf> conf = ParseHelloAllocConf(hello.alloc_conf());
  if (!conf.ok()) return conf.status();
  OpenOptions options{
      .name = hello.name(), .limit = FromProto(hello.limit()), .leases = hello.placement() == v1::PLACEMENT_LEASED};
  if (!hello.alloc_conf().empty()) options.allocator = conf->options;
  if (hello.has_mark()) options.mark = hello.mark().fd();
  const absl::StatusOr<SessionPtr> session = broker_.OpenSession(*identity_, options, events_);
  if (!session.ok()) return session.status();
  broker_.limits().KeepGuarantee(
      *session, FromProto(hello.guarantee()),
      [&broker = broker_, events = events_, session = *session, conf = *conf](const absl::Status& kept) {
        if (!kept.ok()) broker.Close(session, std::string(kept.message()), CloseReason::kNotOpened);
        if (!events->Opened(kept.ok() ? session : absl::StatusOr<SessionPtr>(kept), conf)) {
          broker.Close(session, "its stream ended before it was open", CloseReason::kNotOpened);
        }
      });
  return absl::OkStatus();
}

absl::Status SessionReactor::HandleResume(const v1::Resume& resume) {
  ResumeToken token;
  if (resume.token().size() != token.size()) {
    return absl::InvalidArgumentError(absl::StrCat("resume.token: must be ", token.size(), " bytes long"));
  }
  std::copy(resume.token().begin(), resume.token().end(), token.begin());
  resumed_ = true;
  resume_list_ = std::make_unique<ResumeList>();
  resume_list_->token = token;
  if (resume.more()) {  // only its owner may have the daemon keep a part of a list
    const absl::StatusOr<SessionPtr> session = broker_.FindToResume(*identity_, token);
    if (!session.ok()) return session.status();
    absl::StatusOr<UserSlots::Slot> slot = resume_lists_.Take(identity_->uid);
    if (!slot.ok()) return slot.status();
    resume_list_->slot = *std::move(slot);
  }
  return ResumeWith(resume.segment_ids(), resume.more());
}

absl::Status SessionReactor::HandleResumeMore(const v1::ResumeMore& part) {
  if (part.segment_ids().empty()) return absl::InvalidArgumentError("resume_more.segment_ids: must not be empty");
  return ResumeWith(part.segment_ids(), part.more());
}

absl::Status SessionReactor::ResumeWith(const google::protobuf::RepeatedField<uint64_t>& segment_ids, bool more) {
  if (more ? segment_ids.size() != kMaxIdsInMessage
           : resume_list_->listed > 0 && segment_ids.size() > kMaxIdsInMessage) {
    return absl::InvalidArgumentError(absl::StrCat("segment_ids: ", segment_ids.size(),
                                                   " ids in a part of a list; all but the last have ", kMaxIdsInMessage,
                                                   ", the last at most as many"));
  }
  resume_list_->listed += static_cast<size_t>(segment_ids.size());
  if (resume_list_->listed > broker_.options().session_bounds.max_segments) {
    return absl::InvalidArgumentError(absl::StrCat("resume.segment_ids: more than the ",
                                                   broker_.options().session_bounds.max_segments,
                                                   " that max_segments_per_session allows"));
  }
  for (const uint64_t id : segment_ids) resume_list_->held.insert(SegmentId{id});
  if (more) {
    StartRead(&request_);
    return absl::OkStatus();
  }
  const std::unique_ptr<ResumeList> list = std::move(resume_list_);
  broker_.ResumeSession(*identity_, list->token, std::move(list->held), events_,
                        [&broker = broker_, events = events_](const absl::StatusOr<SessionPtr>& session) {
                          if (!events->Opened(session, {}) && session.ok()) broker.Disconnect(*session);
                        });
  return absl::OkStatus();
}

void SessionReactor::Opened(const absl::StatusOr<SessionPtr>& session, const AllocConf& conf) {
  if (!session.ok()) return End(session.status());
  session_ = *session;
  SendWelcome(conf);
  // This is no reaction of gRPC's: the call may be over already.
  MutexLock lock(mu_);
  if (!finished_) StartRead(&request_);
}

void SessionReactor::SendWelcome(const AllocConf& conf) {
  v1::SessionResponse response;
  v1::Welcome* welcome = response.mutable_welcome();
  welcome->set_session_id(Raw(session_->id()));
  welcome->set_name(session_->name());
  welcome->set_protocol_version(kProtocolVersion);
  welcome->set_daemon_version(kVersion);
  welcome->mutable_users()->set_daemon_uid(geteuid());
  welcome->mutable_users()->set_client_uid(session_->caller().uid);
  for (const SegmentPool* pool : broker_.pools()) {
    v1::Welcome::DeviceGrant* grant = welcome->add_devices();
    *grant->mutable_device() = ToProto(*pool);
    const AccountState account = pool->GetAccount(session_->id()).value_or(AccountState());
    grant->set_limit_bytes(account.limit_bytes);
    grant->set_guarantee_bytes(account.guarantee_bytes);
  }
  welcome->mutable_warnings()->Add(conf.warnings.begin(), conf.warnings.end());
  // What it was told since it was opened is no default. Of a remote session, what there was room for.
  welcome->set_record_events(
      static_cast<uint32_t>(session_->leases() ? broker_.options().record_events : session_->recorded_events()));
  if (const LeasedSession* const leased = session_->leased()) {
    welcome->set_alloc_conf(FormatAllocConf(leased->allocator_options()));
    welcome->set_resume_token(leased->resume_token().data(), leased->resume_token().size());
    welcome->set_takes_carried_over(true);
    welcome->set_takes_resume_in_parts(true);
  } else if (const uint64_t events = session_->recorded_events();
             broker_.options().is_record_events_set && events < broker_.options().record_events) {
    welcome->add_warnings(absl::StrCat("record_events: the session records ", events, " events instead of ",
                                       broker_.options().record_events,
                                       ": max_recorded_events_per_uid allows its user no more"));
  }
  Send(std::move(response));
}

void SessionReactor::HandleAllocate(const v1::AllocateCall& call) {
  const auto done = [events = events_, id = call.call_id(), rpc = RpcMeter::Start(rpcs_.Find("Session.Allocate"))](
                        const absl::StatusOr<Allocation>& allocation) {
    events->Send(AnswerTo(id, allocation.status(),
                          [&](v1::CallResult& result) { *result.mutable_allocated() = ToProto(*allocation); }));
    rpc.Done(allocation.status().code());
  };
  const absl::StatusOr<RequestOptions> growth = RequestOptionsOf(call.request(), call.call_id(), session_.get());
  if (!growth.ok()) return done(growth.status());
  broker_.allocations().Allocate(session_, call.request().device(), call.request().requested_bytes(),
                                 call.request().stream(), done, *growth);
}

bool SessionReactor::HandleFree(const v1::FreeCall& call, const absl::Status& over_rate) {
  const RpcMeter::Call rpc = RpcMeter::Start(rpcs_.Find("Session.Free"));
  const absl::StatusOr<std::vector<BlockId>> blocks = BlockIds(call.request());
  absl::Status status = blocks.ok() ? broker_.allocations().Free(session_, *blocks) : blocks.status();
  if (!status.ok() && !over_rate.ok()) status = over_rate;
  Send(AnswerTo(call.call_id(), status, [](v1::CallResult& result) { result.mutable_freed(); }));
  rpc.Done(status.code());
  return status.ok();
}

void SessionReactor::HandleLease(const v1::LeaseCall& call) {
  const v1::LeaseSegmentsRequest& request = call.request();
  broker_.leases().LeaseSegments(
      session_, request.device(), {request.segment_bytes().begin(), request.segment_bytes().end()},
      [events = events_, id = call.call_id(),
       rpc = RpcMeter::Start(rpcs_.Find("Session.LeaseSegments"))](const absl::StatusOr<std::vector<Lease>>& leases) {
        events->Send(AnswerTo(id, leases.status(),
                              [&](v1::CallResult& result) { *result.mutable_leased() = ToProto(*leases); }));
        rpc.Done(leases.status().code());
      },
      RequestOptionsOf(request, call.call_id()));
}

bool SessionReactor::HandleReturn(const v1::ReturnCall& call, const absl::Status& over_rate) {
  const RpcMeter::Call rpc = RpcMeter::Start(rpcs_.Find("Session.ReturnSegments"));
  const absl::StatusOr<std::vector<SegmentId>> segments = SegmentIds(call.request());
  absl::Status status =
      segments.ok() ? broker_.leases().ReturnSegments(session_, call.request().device(), *segments) : segments.status();
  if (!status.ok() && !over_rate.ok()) status = over_rate;
  Send(AnswerTo(call.call_id(), status, [](v1::CallResult& result) { result.mutable_returned(); }));
  rpc.Done(status.code());
  return status.ok();
}

void SessionReactor::HandleExplain(const v1::ExplainCall& call) {
  const auto done = [events = events_, id = call.call_id(),
                     rpc = RpcMeter::Start(rpcs_.Find("Session.Explain"))](const absl::Status& explained) {
    events->Send(AnswerTo(id, explained, [](v1::CallResult&) {}));  // always an error
    rpc.Done(explained.code());
  };
  const absl::StatusOr<RefusedRequest> request = FromProto(call.request());
  if (!request.ok()) return done(request.status());
  broker_.refusals().Explain(session_, call.request().device(), *request, done);
}

absl::Status SessionReactor::HandleStats(const v1::HeapStats& stats) {
  LeasedSession* const leased = session_->leased();
  if (leased == nullptr) {
    return absl::FailedPreconditionError("stats: the session is remote: the daemon keeps the statistics");
  }
  if (absl::Status status = broker_.CheckDevice(stats.device()); !status.ok()) return status;
  leased->Report(static_cast<int>(stats.device()), StatsFromProto(stats.stats()));
  return absl::OkStatus();
}

absl::Status SessionReactor::HandleCarriedOver(const v1::CarriedOver& message) {
  if (message.segments_size() > kMaxCarriedInMessage) {
    return absl::InvalidArgumentError(
        absl::StrCat("carried_over.segments: more than ", kMaxCarriedInMessage, " segments in a message"));
  }
  Leases::CarriedByDevice by_device;
  for (const v1::CarriedOver::Segment& segment : message.segments()) {
    by_device[segment.device()].push_back({.id = segment.id(),
                                           .bytes = segment.segment_bytes(),
                                           .file_device = segment.file_device(),
                                           .file_inode = segment.file_inode()});
  }
  const absl::Status status =
      broker_.leases().DeclareCarriedOver(session_, by_device, message.begins(), message.ends());
  return status.ok() ? status : absl::Status(status.code(), absl::StrCat("carried_over.segments: ", status.message()));
}

void SessionReactor::HandleAnswer(const v1::Answer& answer) {
  LeasedSession* const leased = session_->leased();
  if (leased == nullptr) return;  // a remote one is asked nothing
  size_t items = static_cast<size_t>(answer.snapshot().events_size());
  items += static_cast<size_t>(answer.snapshot().scopes_size());
  items += static_cast<size_t>(answer.snapshot().segments_size());
  for (const auto& segment : answer.snapshot().segments()) items += static_cast<size_t>(segment.blocks_size());
  leased->questions().Receive(answer.question_id(), items, answer.more(), [&](ClientAnswer& so_far) {
    so_far.released_bytes = answer.released_bytes();
    return AddSnapshotPart(answer.snapshot(), &so_far.snapshot);
  });
}

void SessionReactor::Send(v1::SessionResponse response) {
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

void SessionReactor::End(const absl::Status& status) {
  MutexLock lock(mu_);
  if (ending_) return;
  ending_ = true;
  final_status_ = ToGrpc(status);
  WriteNext();
}

void SessionReactor::WriteNext() {
  if (writing_ || finished_) return;
  if (!outgoing_.empty()) {
    writing_ = true;
    StartWrite(&outgoing_.front());
  } else if (ending_) {
    finished_ = true;
    Finish(final_status_);
  }
}

void SessionReactor::OnWriteDone(bool ok) {
  MutexLock lock(mu_);
  writing_ = false;
  if (ok && outgoing_.front().has_welcome()) welcomed_ = true;
  outgoing_.pop_front();
  if (!ok) {
    outgoing_.clear();
    ending_ = true;
  }
  WriteNext();
}

void SessionReactor::OnCancel() {
  End(absl::CancelledError("the connection is gone"));
}

void SessionReactor::OnDone() {
  events_->Detach();
  bool welcomed = false;
  {
    MutexLock lock(mu_);
    welcomed = welcomed_;
    // Nobody was told that the caller cannot be identified when it was because the connection had gone.
    const bool of_nobody = !identity_.ok() && context_.IsCancelled();
    call_.Done(of_nobody ? absl::StatusCode::kCancelled : static_cast<absl::StatusCode>(final_status_.error_code()));
  }
  if (session_ != nullptr && !welcomed && !resumed_) {
    broker_.Close(session_, "its stream ended before it was open", CloseReason::kNotOpened);  // nobody knows its id
  } else if (session_ != nullptr) {
    broker_.Disconnect(session_);
  }
  delete this;
}

}  // namespace vrambroker
