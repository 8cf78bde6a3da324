// SPDX-License-Identifier: Apache-2.0
#include "server/rpc/session_reactor.h"

#include <unistd.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"
#include "allocator/base/version.h"
#include "allocator/wire/heap_convert.h"
#include "server/requests/leases.h"
#include "server/requests/waiting_requests.h"
#include "server/sessions/leased_session.h"
#include "server/sessions/named_devices.h"
#include "server/sessions/remote_session.h"
#include "server/wire/convert.h"

namespace vrambroker {
namespace {

constexpr int kMaxIdsInMessage = 4096;
constexpr int kMaxCarriedInMessage = 1024;
constexpr int kMaxTooMany = 1000;
// Errors and warnings repeat parts of the text; gRPC breaks connections over statuses of more than 8 KiB.
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

// Checks the fields of every hello, including a resuming hello.
absl::Status CheckHello(const v1::Hello& hello) {
  if (hello.protocol_version() != kProtocolVersion) {
    return absl::FailedPreconditionError(absl::StrCat(
        "protocol_version: the client speaks version ", hello.protocol_version(), ", the daemon (vrambroker ", kVersion,
        ") version ", kProtocolVersion, "; install the same release of both"));
  }
  if (!v1::Placement_IsValid(hello.placement())) {
    return absl::InvalidArgumentError(absl::StrCat("placement: ", hello.placement(), " is not a placement"));
  }
  if (hello.has_resume() && hello.placement() != v1::PLACEMENT_LEASED) {
    return absl::InvalidArgumentError("placement: only a session of PLACEMENT_LEASED can be resumed");
  }
  return absl::OkStatus();
}

}  // namespace

// Answers a call on the stream, once, and meters the call.
class SessionReactor::Answer {
 public:
  Answer(std::shared_ptr<SessionOutbox> outbox, uint64_t call_id, RpcMeter::Method* method)
      : outbox_(std::move(outbox)), call_id_(call_id), rpc_(RpcMeter::Start(method)) {}

  // `fill` puts the result in, unless `status` is an error.
  template <typename Fill>
  void Send(const absl::Status& status, const Fill& fill) const {
    v1::SessionResponse response;
    v1::CallResult* result = response.mutable_result();
    result->set_call_id(call_id_);
    if (status.ok()) {
      fill(*result);
    } else {
      *result->mutable_error() = ToProto(status);
    }
    outbox_->Send(std::move(response));
    rpc_.Done(status.code());
  }
  void Refuse(const absl::Status& why) const {
    Send(why, [](v1::CallResult&) {});
  }

 private:
  std::shared_ptr<SessionOutbox> outbox_;
  uint64_t call_id_;
  RpcMeter::Call rpc_;
};

SessionReactor::SessionReactor(Broker* broker, const SessionCalls* calls, const RpcMeter* rpcs,
                               grpc::CallbackServerContext* context, absl::StatusOr<Caller> identity,
                               UserSlots::Slot slot, UserSlots* resume_lists)
    : broker_(*broker),
      calls_(*calls),
      rpcs_(*rpcs),
      call_(RpcMeter::Start(rpcs_.Find("Session"))),
      context_(*context),
      identity_(std::move(identity)),
      slot_(std::move(slot)),
      resume_lists_(*resume_lists),
      outbox_(std::make_shared<SessionOutbox>(this)) {
  if (identity_.ok()) {
    StartRead(&request_);
  } else {
    outbox_->End(identity_.status());
  }
}

void SessionReactor::OnReadDone(bool ok) {
  if (!ok) {  // half-closed or broken; without a goodbye neither proves that the client's mappings are closed
    outbox_->End(session_ != nullptr ? absl::OkStatus()
                                     : absl::InvalidArgumentError("message: the stream ended before a readable hello"));
    return;
  }
  Handle(request_);
}

void SessionReactor::Handle(const v1::SessionRequest& request) {
  if (session_ == nullptr) {
    const absl::Status status = HandleFirst(request);
    if (!status.ok()) outbox_->End(status);
    return;  // Opened() reads on
  }
  if (request.message_case() == v1::SessionRequest::kGoodbye) {
    broker_.Close(session_, "goodbye");
    return outbox_->End(absl::OkStatus());
  }
  const Admission admitted = calls_.Admit(identity_->user());
  if (admitted.status.ok()) too_many_ = 0;
  if (!HandleCall(request, admitted)) {
    // Another process of the user may cause the flood. Keeps the unsolicited messages of an honest client (statistics
    // once a second and answers) and does not end its session.
    if (!admitted.status.ok() && ++too_many_ > kMaxTooMany) return outbox_->End(admitted.status);
    if (const absl::Status status = HandleMessage(request); !status.ok()) return outbox_->End(status);
  }
  StartRead(&request_);
}

// Handles a message before the session is open.
absl::Status SessionReactor::HandleFirst(const v1::SessionRequest& request) {
  if (resume_list_ != nullptr) {
    if (request.has_resume_more()) return HandleResumeMore(request.resume_more());
    return absl::InvalidArgumentError("message: after a hello whose resume has `more`, it must be resume_more");
  }
  if (!request.has_hello()) return absl::InvalidArgumentError("message: the first message must be hello");
  if (absl::Status status = CheckHello(request.hello()); !status.ok()) return status;
  return request.hello().has_resume() ? HandleResume(request.hello().resume()) : HandleHello(request.hello());
}

bool SessionReactor::HandleCall(const v1::SessionRequest& request, const Admission& admitted) {
  using Request = v1::SessionRequest;
  switch (request.message_case()) {
    case Request::kAllocate: {
      const v1::AllocateCall& call = request.allocate();
      const Answer answer(outbox_, call.call_id(), rpcs_.Find("Session.Allocate"));
      calls_.Allocate(
          session_, call.request(), call.call_id(), admitted, [answer](absl::StatusOr<v1::AllocateResponse> got) {
            answer.Send(got.status(), [&](v1::CallResult& result) { *result.mutable_allocated() = *std::move(got); });
          });
      return true;
    }
    case Request::kLease: {
      const v1::LeaseCall& call = request.lease();
      const Answer answer(outbox_, call.call_id(), rpcs_.Find("Session.LeaseSegments"));
      calls_.LeaseSegments(
          session_, call.request(), call.call_id(), admitted, [answer](absl::StatusOr<v1::LeaseSegmentsResponse> got) {
            answer.Send(got.status(), [&](v1::CallResult& result) { *result.mutable_leased() = *std::move(got); });
          });
      return true;
    }
    case Request::kExplain: {
      const v1::ExplainCall& call = request.explain();
      const Answer answer(outbox_, call.call_id(), rpcs_.Find("Session.Explain"));
      calls_.Explain(session_, call.request(), admitted, [answer](const absl::Status& why) { answer.Refuse(why); });
      return true;
    }
    case Request::kFree: {
      const v1::FreeCall& call = request.free();
      const Answer answer(outbox_, call.call_id(), rpcs_.Find("Session.Free"));
      answer.Send(calls_.Free(session_, call.request(), admitted),
                  [](v1::CallResult& result) { result.mutable_freed(); });
      return true;
    }
    case Request::kReturnSegments: {
      const v1::ReturnCall& call = request.return_segments();
      const Answer answer(outbox_, call.call_id(), rpcs_.Find("Session.ReturnSegments"));
      answer.Send(calls_.ReturnSegments(session_, call.request(), admitted),
                  [](v1::CallResult& result) { result.mutable_returned(); });
      return true;
    }
    default:
      return false;
  }
}

absl::Status SessionReactor::HandleMessage(const v1::SessionRequest& request) {
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
    case Request::kAllocate:
    case Request::kFree:
    case Request::kLease:
    case Request::kReturnSegments:
    case Request::kExplain:  // HandleCall()
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
  OpenOptions options{.name = hello.name(),
                      .limit = FromProto(hello.limit()),
                      .placement = hello.placement() == v1::PLACEMENT_LEASED ? Placement::kLeased : Placement::kRemote};
  if (!hello.alloc_conf().empty()) options.allocator = conf->options;
  if (hello.has_mark()) options.mark = hello.mark().fd();
  if (hello.earlier_token().size() == std::tuple_size_v<RandomToken>) {
    absl::c_copy(hello.earlier_token(), options.earlier.emplace().begin());
  } else if (!hello.earlier_token().empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat("earlier_token: must be ", std::tuple_size_v<RandomToken>, " bytes long"));
  }
  const std::vector<std::string> names(hello.devices().begin(), hello.devices().end());
  absl::StatusOr<std::vector<uint32_t>> devices = NamedDevices(names, broker_.pools());
  if (!devices.ok()) return devices.status();
  options.devices = *std::move(devices);
  const absl::StatusOr<SessionPtr> session = broker_.OpenSession(*identity_, options, outbox_);
  if (!session.ok()) return session.status();
  broker_.limits().KeepGuarantee(
      *session, FromProto(hello.guarantee()), options.earlier.has_value(),
      [this, &broker = broker_, outbox = outbox_, session = *session, conf = *conf](const absl::Status& kept) {
        if (!kept.ok()) broker.Close(session, std::string(kept.message()), CloseReason::kNotOpened);
        // May run after this object is gone; the outbox knows.
        if (!outbox->Open([&] { return Opened(kept.ok() ? session : absl::StatusOr<SessionPtr>(kept), conf); })) {
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
  if (resume.more()) {  // only the owner may have the daemon keep a partial list
    const absl::StatusOr<SessionPtr> session = broker_.FindToResume(*identity_, token);
    if (!session.ok()) return session.status();
    absl::StatusOr<UserSlots::Slot> slot = resume_lists_.Take(identity_->user());
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
  broker_.ResumeSession(*identity_, list->token, std::move(list->held), outbox_,
                        [this, &broker = broker_, outbox = outbox_](const absl::StatusOr<SessionPtr>& session) {
                          if (!outbox->Open([&] { return Opened(session, {}); }) && session.ok()) {
                            broker.Disconnect(*session);
                          }
                        });
  return absl::OkStatus();
}

absl::StatusOr<v1::SessionResponse> SessionReactor::Opened(const absl::StatusOr<SessionPtr>& session,
                                                           const AllocConf& conf) {
  if (!session.ok()) return session.status();
  session_ = *session;
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
    grant->set_limit_bytes(account.effective_limit_bytes());
    grant->set_guarantee_bytes(account.guarantee_bytes);
  }
  welcome->set_takes_devices(true);
  welcome->mutable_warnings()->Add(conf.warnings.begin(), conf.warnings.end());
  // Reports the default, not the setting changed since opening. A remote session gets the number there was room for.
  welcome->set_record_events(
      static_cast<uint32_t>(session_->leases() ? broker_.options().record_events : session_->recorded_events()));
  if (const LeasedSession* const leased = session_->leased()) {
    welcome->set_alloc_conf(FormatAllocConf(leased->allocator_options()));
    welcome->set_resume_token(leased->resume_token().data(), leased->resume_token().size());
    welcome->set_takes_carried_over(true);
    welcome->set_takes_resume_in_parts(true);
    welcome->set_takes_segment_calls(true);
  } else if (const uint64_t events = session_->recorded_events();
             broker_.options().is_record_events_set && events < broker_.options().record_events) {
    welcome->add_warnings(absl::StrCat("record_events: the session records ", events, " events instead of ",
                                       broker_.options().record_events,
                                       ": max_recorded_events_per_uid allows its user no more"));
  }
  return response;
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
  if (leased == nullptr) return;  // remote sessions get no questions
  size_t items = static_cast<size_t>(answer.snapshot().events_size());
  items += static_cast<size_t>(answer.snapshot().scopes_size());
  items += static_cast<size_t>(answer.snapshot().segments_size());
  for (const auto& segment : answer.snapshot().segments()) items += static_cast<size_t>(segment.blocks_size());
  leased->questions().Receive(answer.question_id(), items, answer.more(), [&](ClientAnswer& so_far) {
    so_far.released_bytes = answer.released_bytes();
    return AddSnapshotPart(answer.snapshot(), &so_far.snapshot);
  });
}

// ---- Calls from gRPC and the outbox ----

void SessionReactor::OnWriteDone(bool ok) {
  outbox_->OnWritten(ok);
}

void SessionReactor::OnCancel() {
  outbox_->End(absl::CancelledError("the connection is gone"));
}

void SessionReactor::OnDone() {
  const SessionOutbox::Ending ending = outbox_->Detach();
  // If the connection was gone, its caller was unidentifiable and did not receive the error.
  const bool of_nobody = !identity_.ok() && context_.IsCancelled();
  call_.Done(of_nobody ? absl::StatusCode::kCancelled : ending.code);
  if (session_ != nullptr && !ending.welcomed && !resumed_) {
    broker_.Close(session_, "its stream ended before it was open", CloseReason::kNotOpened);  // no client knows the id
  } else if (session_ != nullptr) {
    broker_.Disconnect(session_);
  }
  delete this;
}

}  // namespace vrambroker
