// SPDX-License-Identifier: Apache-2.0
#include "server/rpc/admin_service.h"

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "allocator/base/mutex.h"
#include "allocator/base/names.h"
#include "allocator/wire/heap_convert.h"
#include "server/identity/process_info.h"
#include "server/wire/convert.h"

namespace vrambroker {
namespace {

constexpr char kWhyNotRecorded[] =
    ": the session kept no events (record_events of the daemon's configuration), cuts its blocks with an allocator of "
    "its own, did not answer in time, or had been refused just before, or many sessions were refused at once, or there "
    "was no room for it beside the session's first recording";

// Limit on a client's status text: gRPC breaks connections over long statuses.
constexpr size_t kMaxFaultText = 2000;

// Describes any visible process, by its command name.
absl::StatusOr<PolicySubject> SubjectOfProcess(pid_t pid) {
  absl::StatusOr<ProcessUser> user = UserOf(pid);
  if (!user.ok()) return user.status();
  return PolicySubject{
      .uid = user->uid, .gids = std::move(user->gids), .cgroup = CgroupOf(pid), .session_name = CommandName(pid)};
}

absl::Status ReloadRefused(const absl::Status& status) {
  std::string text(status.message());
  if (text.size() > kMaxFaultText) {
    text.resize(std::min(text.rfind('\n', kMaxFaultText), kMaxFaultText));
    absl::StrAppend(&text, "\nand more: see the daemon's log, or vrambrokerd --check-config");
  }
  return absl::FailedPreconditionError(absl::StrCat("not reloaded; the old configuration stays in effect: ", text));
}

// Writes the parts of a snapshot in turn, or ends the call with an error. Deletes itself. Keeps `slot` as long as the
// snapshot.
class SnapshotWriter : public grpc::ServerWriteReactor<v1::GetSnapshotResponse> {
 public:
  explicit SnapshotWriter(UserSlots::Slot slot) : slot_(std::move(slot)) {}

  // Called once.
  void Start(absl::StatusOr<HeapSnapshot> snapshot) {
    if (snapshot.ok()) {
      parts_ = SnapshotParts(*std::move(snapshot));
    } else {
      parts_ = snapshot.status();
    }
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
    part_ = parts_.ok() ? parts_->Next() : std::nullopt;
    if (part_.has_value()) {
      StartWrite(&*part_);
      return;
    }
    // Releases the slot before the caller learns of the end and may request the next snapshot.
    const absl::Status status = parts_.status();
    parts_ = status.ok() ? absl::UnknownError("all is written") : status;
    slot_ = UserSlots::Slot();
    Finish(ToGrpc(status));
  }

  UserSlots::Slot slot_;
  absl::StatusOr<SnapshotParts> parts_ = absl::UnknownError("not started");
  std::optional<v1::GetSnapshotResponse> part_;  // being written
};

// Keeps a RecordingHold until the caller ends the call. Deletes itself.
class HoldWriter : public grpc::ServerWriteReactor<v1::HoldRecordingResponse> {
 public:
  // Called once.
  void Start(absl::StatusOr<std::shared_ptr<RecordingHold>> hold) {
    absl::Status status = hold.status();
    {
      MutexLock lock(mu_);
      is_started_ = true;
      if (is_cancelled_) {
        status = absl::CancelledError();
      } else if (status.ok()) {
        hold_ = *std::move(hold);
      }
    }
    if (status.ok()) {
      StartWrite(&response_);
    } else {
      End(status);
    }
  }

  void OnWriteDone(bool ok) override {
    if (!ok) End(absl::CancelledError());
  }
  void OnCancel() override {
    {
      MutexLock lock(mu_);
      is_cancelled_ = true;
      if (!is_started_) return;  // Start() ends the call
    }
    End(absl::CancelledError());
  }
  void OnDone() override { delete this; }

 private:
  void End(const absl::Status& status) {
    std::shared_ptr<RecordingHold> hold;  // ends without the lock
    {
      MutexLock lock(mu_);
      if (std::exchange(is_ended_, true)) return;
      hold = std::move(hold_);
    }
    hold.reset();
    Finish(ToGrpc(status));
  }

  const v1::HoldRecordingResponse response_;
  Mutex mu_;
  bool is_started_ ABSL_GUARDED_BY(mu_) = false;
  bool is_cancelled_ ABSL_GUARDED_BY(mu_) = false;
  bool is_ended_ ABSL_GUARDED_BY(mu_) = false;
  std::shared_ptr<RecordingHold> hold_ ABSL_GUARDED_BY(mu_);
};

}  // namespace

absl::StatusOr<SessionPtr> AdminService::Find(const v1::SessionRef& ref) const {
  const absl::StatusOr<SessionRef> parsed = FromProto(ref);
  if (!parsed.ok()) return parsed.status();
  return broker_.sessions().Find(*parsed);
}

bool AdminService::Asker::IsUserOf(uid_t uid, std::optional<ClaimId> claim) const {
  return caller.uid == uid && (!caller.claim.has_value() || caller.claim == claim);
}

absl::StatusOr<AdminService::Asker> AdminService::Ask(const grpc::CallbackServerContext& context, size_t calls) const {
  absl::StatusOr<Caller> caller = connections_.Identify(context, calls);
  if (!caller.ok()) return caller.status();
  absl::StatusOr<SessionTerms> terms = broker_.TermsOf(*caller);
  if (!terms.ok()) return terms.status();
  return Asker{.caller = *std::move(caller), .terms = *std::move(terms)};
}

absl::Status AdminService::Asker::Refusal(absl::string_view action, absl::string_view right) const {
  if (caller.claim.has_value()) {
    return absl::PermissionDeniedError(absl::StrCat("uid ", caller.uid, " may not ", action,
                                                    " through the sockets of claim ", terms.claim,
                                                    ": it takes the daemon's own, and the right ", right));
  }
  return absl::PermissionDeniedError(absl::StrCat(
      "uid ", caller.uid, " may not ", action, ": ",
      terms.rule.empty() ? ""
                         : absl::StrCat("the policy's rule ", terms.rule, " does not give it the right ", right, "; "),
      "only root and users with the ", right, " right may do this"));
}

absl::StatusOr<SessionPtr> AdminService::FindForChange(const grpc::CallbackServerContext& context,
                                                       const v1::SessionRef& ref) const {
  const absl::StatusOr<Asker> asker = Ask(context);
  if (!asker.ok()) return asker.status();
  if (!asker->terms.rights.admin) return asker->Refusal("change sessions", "ADMIN");
  return Find(ref);
}

absl::StatusOr<SessionPtr> AdminService::FindForSnapshots(const absl::StatusOr<Asker>& asker,
                                                          const v1::SessionRef& ref) const {
  if (!asker.ok()) return asker.status();
  absl::StatusOr<SessionPtr> session = Find(ref);
  const Rights& rights = asker->terms.rights;
  if (session.ok() && !rights.admin && !asker->IsUserOf(**session)) {
    return absl::PermissionDeniedError("the session belongs to another user: to look into it takes the right ADMIN");
  }
  // Only observers may learn the names of other users' sessions.
  if (absl::IsInvalidArgument(session.status()) && !ref.or_name().empty() && !rights.admin && !rights.observer) {
    return absl::InvalidArgumentError(
        "session: the number is one session's id and another one's name; id:NUMBER or name:NUMBER says which is meant");
  }
  return session;
}

grpc::ServerUnaryReactor* AdminService::ListSessions(grpc::CallbackServerContext* context,
                                                     const v1::ListSessionsRequest* /*request*/,
                                                     v1::ListSessionsResponse* response) {
  // Costs as much as asking for each.
  const absl::StatusOr<Asker> asker = Ask(*context, 1 + broker_.sessions().size());
  if (!asker.ok()) return Reply(context, asker.status());
  // A caller inside a claim sees the claim's sessions.
  const bool is_in_claim = asker->caller.claim.has_value();
  if (!asker->terms.rights.observer && !is_in_claim) {
    return Reply(context, asker->Refusal("list sessions", "OBSERVER"));
  }
  for (const SessionView& info : broker_.operator_view().Look().sessions) {
    if (!is_in_claim || info.terms.claim_id == asker->caller.claim) *response->add_sessions() = ToProto(info);
  }
  response->set_run_id(broker_.run_id());
  return Reply(context, absl::OkStatus());
}

grpc::ServerUnaryReactor* AdminService::GetSession(grpc::CallbackServerContext* context,
                                                   const v1::GetSessionRequest* request,
                                                   v1::GetSessionResponse* response) {
  const absl::StatusOr<Asker> asker = Ask(*context);
  if (!asker.ok()) return Reply(context, asker.status());
  absl::StatusOr<SessionPtr> session = Find(request->session());
  if (!asker->terms.rights.observer && !(session.ok() && asker->IsUserOf(**session))) {
    // Hides even the existence of the session.
    return Reply(context, asker->Refusal("look at other users' sessions", "OBSERVER"));
  }
  if (!session.ok()) return Reply(context, session.status());
  if (!asker->terms.rights.admin && !asker->IsUserOf(**session)) {
    // Observers get the last figures: an observer cannot make another user's client work.
    *response->mutable_session() = ToProto(broker_.operator_view().Describe(**session));
    return Reply(context, absl::OkStatus());
  }
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  (*session)->Refresh([this, reactor, response, session = *session] {
    *response->mutable_session() = ToProto(broker_.operator_view().Describe(*session));
    reactor->Finish(grpc::Status::OK);
  });
  return reactor;
}

template <typename Response>
void AdminService::Describe(const Session& session, Response* response) const {
  *response->mutable_session() = ToProto(broker_.operator_view().Describe(session));
  if (const absl::Status kept = broker_.settings().status(); !kept.ok()) {
    response->set_warning(absl::StrCat("in effect, but a daemon that is started again will not know it: ",
                                       absl::string_view(kept.message())));
  }
}

grpc::ServerUnaryReactor* AdminService::SetLimit(grpc::CallbackServerContext* context,
                                                 const v1::SetLimitRequest* request, v1::SetLimitResponse* response) {
  absl::StatusOr<SessionPtr> session = FindForChange(*context, request->session());
  if (!session.ok()) return Reply(context, session.status());
  const std::optional<Limit> limit = FromProto(request->limit());
  if (!limit.has_value()) return Reply(context, absl::InvalidArgumentError("limit: neither bytes nor fraction is set"));
  const absl::Status status = broker_.limits().SetLimit(*session, *limit);
  if (status.ok()) Describe(**session, response);
  return Reply(context, status);
}

grpc::ServerUnaryReactor* AdminService::SetGuarantee(grpc::CallbackServerContext* context,
                                                     const v1::SetGuaranteeRequest* request,
                                                     v1::SetGuaranteeResponse* response) {
  absl::StatusOr<SessionPtr> session = FindForChange(*context, request->session());
  if (!session.ok()) return Reply(context, session.status());
  const std::optional<Limit> guarantee = FromProto(request->guarantee());
  if (!guarantee.has_value()) {
    return Reply(context, absl::InvalidArgumentError("guarantee: neither bytes nor fraction is set"));
  }
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  broker_.limits().SetGuarantee(*session, *guarantee,
                                [this, reactor, response, session = *session](const absl::Status& status) {
                                  if (status.ok()) Describe(*session, response);
                                  reactor->Finish(ToGrpc(status));
                                });
  return reactor;
}

grpc::ServerUnaryReactor* AdminService::SetPriority(grpc::CallbackServerContext* context,
                                                    const v1::SetPriorityRequest* request,
                                                    v1::SetPriorityResponse* response) {
  absl::StatusOr<SessionPtr> session = FindForChange(*context, request->session());
  if (!session.ok()) return Reply(context, session.status());
  const absl::Status status = broker_.limits().SetPriority(*session, request->priority(), /*is_operators=*/true);
  if (status.ok()) Describe(**session, response);
  return Reply(context, status);
}

grpc::ServerUnaryReactor* AdminService::ListQuarantine(grpc::CallbackServerContext* context,
                                                       const v1::ListQuarantineRequest* /*request*/,
                                                       v1::ListQuarantineResponse* response) {
  const absl::StatusOr<Asker> asker = Ask(*context, 1 + broker_.sessions().size());
  if (!asker.ok()) return Reply(context, asker.status());
  // A caller inside a claim sees only charges to the claim (ListClaims).
  if (asker->caller.claim.has_value()) return Reply(context, absl::OkStatus());
  if (!asker->terms.rights.observer) return Reply(context, asker->Refusal("list the quarantine", "OBSERVER"));
  const BrokerView view = broker_.operator_view().Look();
  for (size_t device = 0; device < view.devices.size(); ++device) {
    for (const QuarantinedView& quarantined : view.devices[device].quarantine) {
      v1::ListQuarantineResponse::Holding* holding = response->add_holdings();
      holding->set_device(static_cast<uint32_t>(device));
      holding->set_client(quarantined.holding.client);
      holding->set_pid(quarantined.holding.pid);
      holding->set_bytes(quarantined.holding.bytes);
      holding->set_segments(static_cast<uint32_t>(quarantined.holding.segments));
      holding->set_age_ms(static_cast<uint64_t>(quarantined.age.count()));
      for (const pid_t pid : quarantined.holding.holders) holding->add_holders(pid);
    }
    for (const CarriedOver::Holding& carried : view.devices[device].carried_over) {
      if (carried.session != kNoSession) continue;
      v1::ListQuarantineResponse::Holding* holding = response->add_holdings();
      holding->set_device(static_cast<uint32_t>(device));
      holding->set_bytes(carried.bytes);
      holding->set_segments(static_cast<uint32_t>(carried.segments));
      for (const ProcessId& process : carried.holders) holding->add_holders(process.pid);
      holding->set_carried_over(true);
    }
  }
  return Reply(context, absl::OkStatus());
}

grpc::ServerUnaryReactor* AdminService::TrimSession(grpc::CallbackServerContext* context,
                                                    const v1::TrimSessionRequest* request,
                                                    v1::TrimSessionResponse* response) {
  absl::StatusOr<SessionPtr> session = FindForChange(*context, request->session());
  if (!session.ok()) return Reply(context, session.status());
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  (*session)->Trim(/*bytes=*/0, [reactor, response](const absl::StatusOr<uint64_t>& bytes) {
    response->set_released_bytes(bytes.value_or(0));
    reactor->Finish(ToGrpc(bytes.status()));
  });
  return reactor;
}

grpc::ServerUnaryReactor* AdminService::ReleaseIdle(grpc::CallbackServerContext* context,
                                                    const v1::ReleaseIdleRequest* request,
                                                    v1::ReleaseIdleResponse* response) {
  const absl::StatusOr<Asker> asker = Ask(*context);
  if (!asker.ok()) return Reply(context, asker.status());
  if (!asker->terms.rights.admin) return Reply(context, asker->Refusal("release idle memory", "ADMIN"));
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  const bool is_of_one = request->optional_device_case() == v1::ReleaseIdleRequest::kDevice;
  broker_.idle_releases().Release(is_of_one ? std::optional<uint64_t>(request->device()) : std::nullopt,
                                  [reactor, response](const absl::StatusOr<SegmentPool::Released>& released) {
                                    if (released.ok()) {
                                      response->set_released_bytes(released->bytes);
                                      response->set_refused_bytes(released->refused_bytes);
                                    }
                                    reactor->Finish(ToGrpc(released.status()));
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
  const absl::StatusOr<Asker> asker = Ask(*context);
  absl::StatusOr<SessionPtr> session = FindForSnapshots(asker, request->session());
  absl::Status status = session.ok() ? broker_.CheckDevice(request->device()) : session.status();
  absl::StatusOr<UserSlots::Slot> slot = status.ok() ? snapshots_.Take(asker->caller.user()) : status;
  status = slot.status();
  auto* writer = new SnapshotWriter(status.ok() ? *std::move(slot) : UserSlots::Slot());
  if (!status.ok()) {
    writer->Start(status);
  } else {
    (*session)->Snapshot(
        static_cast<int>(request->device()),
        [writer](absl::StatusOr<HeapSnapshot> snapshot) { writer->Start(std::move(snapshot)); },
        /*with_history=*/!request->without_history());
  }
  return writer;
}

grpc::ServerWriteReactor<v1::GetSnapshotResponse>* AdminService::GetRefusalSnapshot(
    grpc::CallbackServerContext* context, const v1::GetRefusalSnapshotRequest* request) {
  const absl::StatusOr<Asker> asker = Ask(*context);
  const absl::StatusOr<std::shared_ptr<const HeapSnapshot>> recording =
      asker.ok() ? FindRecording(*asker, request->refusal()) : asker.status();
  absl::StatusOr<UserSlots::Slot> slot =
      recording.ok() ? snapshots_.Take(asker->caller.user()) : absl::StatusOr<UserSlots::Slot>(recording.status());
  const absl::Status status = slot.status();
  auto* writer = new SnapshotWriter(status.ok() ? *std::move(slot) : UserSlots::Slot());
  writer->Start(status.ok() ? absl::StatusOr<HeapSnapshot>(**recording) : status);
  return writer;
}

absl::StatusOr<std::shared_ptr<const HeapSnapshot>> AdminService::FindRecording(const Asker& asker,
                                                                                uint64_t refusal) const {
  const std::vector<std::shared_ptr<const OomEvent>> events = broker_.refusals().log().NewestFirst();
  const auto event = std::find_if(events.begin(), events.end(),
                                  [&](const auto& candidate) { return candidate->report.refusal == refusal; });
  if (event == events.end()) {
    return absl::NotFoundError(absl::StrCat("no refusal ", refusal, " is on record: the daemon keeps the last ",
                                            OomLog::kMaxEvents, " (vramctl ooms)"));
  }
  if (!asker.terms.rights.admin && !asker.IsUserOf((*event)->uid, (*event)->claim)) {
    return absl::PermissionDeniedError("the session belonged to another user");
  }
  if (auto recording = broker_.refusals().recordings().Find(refusal)) return recording;
  if (!(*event)->report.is_recorded) {
    return absl::NotFoundError(absl::StrCat(
        "nothing was recorded of what led to refusal ", refusal,
        (*event)->report.cause == OomCause::kLargerThanDevice ? ": no device has that much" : kWhyNotRecorded));
  }
  const std::vector<uint64_t> others = broker_.refusals().recordings().Of((*event)->session);
  std::string kept;
  if (!others.empty()) {
    kept =
        absl::StrCat(others.size() == 1 ? "; that of refusal " : "; those of refusals ", absl::StrJoin(others, " and "),
                     " of the same session ", others.size() == 1 ? "is" : "are", " kept");
  }
  return absl::NotFoundError(absl::StrCat("the recording of refusal ", refusal, " has made room for later ones", kept));
}

grpc::ServerUnaryReactor* AdminService::SetRecording(grpc::CallbackServerContext* context,
                                                     const v1::SetRecordingRequest* request,
                                                     v1::SetRecordingResponse* /*response*/) {
  absl::StatusOr<SessionPtr> session = FindForSnapshots(Ask(*context), request->session());
  if (!session.ok()) return Reply(context, session.status());
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  broker_.recordings().Set(*session, request->max_events(),
                           [reactor](const absl::Status& status) { reactor->Finish(ToGrpc(status)); });
  return reactor;
}

grpc::ServerWriteReactor<v1::HoldRecordingResponse>* AdminService::HoldRecording(
    grpc::CallbackServerContext* context, const v1::HoldRecordingRequest* request) {
  const absl::StatusOr<Asker> asker = Ask(*context);
  const absl::StatusOr<SessionPtr> session = FindForSnapshots(asker, request->session());
  auto* writer = new HoldWriter;
  if (session.ok()) {
    broker_.recordings().Hold(*session, request->events(), asker->caller.user(),
                              [writer](const auto& hold) { writer->Start(hold); });
  } else {
    writer->Start(session.status());
  }
  return writer;
}

grpc::ServerUnaryReactor* AdminService::ListOutOfMemory(grpc::CallbackServerContext* context,
                                                        const v1::ListOutOfMemoryRequest* request,
                                                        v1::ListOutOfMemoryResponse* response) {
  // Collects up to a thousand events.
  const absl::StatusOr<Asker> asker = Ask(*context, 100);
  if (!asker.ok()) return Reply(context, asker.status());
  // The advice must work for its reader, who may be any session's user.
  const bool own_only = !asker->terms.rights.observer;
  const std::optional<uid_t> uid = own_only ? std::optional(asker->caller.uid) : std::nullopt;
  const auto only_own = [&](Refusals::Events& events) {
    if (own_only) std::erase_if(events, [&](const auto& e) { return !asker->IsUserOf(e->uid, e->claim); });
  };
  absl::StatusOr<Refusals::Events> events = broker_.refusals().Last(uid);
  only_own(*events);
  const size_t own = events->size();
  if (request->has_session()) {
    const absl::StatusOr<SessionRef> wanted = FromProto(request->session());
    events = wanted.ok() ? broker_.refusals().LastOf(*wanted, uid) : wanted.status();
    if (!events.ok()) return Reply(context, events.status());
    only_own(*events);
  }
  response->set_matching_events(events->size());
  response->set_own_only(own_only);
  response->set_run_id(broker_.run_id());
  // Other users' refusals are not disclosed, not even their number.
  response->set_total_events(own_only ? own : broker_.refusals().log().total());
  if (request->max_events() > 0 && events->size() > request->max_events()) events->resize(request->max_events());
  for (const auto& event : *events) *response->add_events() = ToProto(*event, broker_.refusals().recordings());
  return Reply(context, absl::OkStatus());
}

grpc::ServerUnaryReactor* AdminService::ExplainPolicy(grpc::CallbackServerContext* context,
                                                      const v1::ExplainPolicyRequest* request,
                                                      v1::ExplainPolicyResponse* response) {
  const absl::StatusOr<Asker> asker = Ask(*context);
  if (!asker.ok()) return Reply(context, asker.status());
  if (request->subject_case() != v1::ExplainPolicyRequest::SUBJECT_NOT_SET && !asker->terms.rights.admin &&
      request->pid() != asker->caller.pid) {
    return Reply(context, asker->Refusal("ask about other users or processes", "ADMIN"));
  }
  absl::StatusOr<PolicySubject> subject = PolicySubject();
  switch (request->subject_case()) {
    case v1::ExplainPolicyRequest::kPid:
      subject = SubjectOfProcess(request->pid());
      break;
    case v1::ExplainPolicyRequest::kUser:
      subject = FromProto(request->user());
      break;
    case v1::ExplainPolicyRequest::SUBJECT_NOT_SET:
      subject = broker_.SubjectOf(asker->caller, std::nullopt);
      // The policy does not apply to a caller inside a claim.
      if (subject.ok() && asker->caller.claim.has_value()) {
        *response = ToProto(*subject, {.rules = {}, .terms = asker->terms});
        return Reply(context, absl::OkStatus());
      }
      break;
  }
  if (!subject.ok()) return Reply(context, subject.status());
  if (request->has_session_name()) {
    if (const absl::Status status = CheckName(request->session_name()); !status.ok()) {
      return Reply(context, absl::InvalidArgumentError(absl::StrCat("session_name: ", status.message())));
    }
    subject->session_name = request->session_name();
  }
  PolicyExplanation explanation = broker_.policy()->Explain(*subject);
  // An existing claim has terms of its own: an operator created the claim, or the policy was reloaded since.
  if (const absl::StatusOr<Claim> claim = broker_.claims().Find(explanation.terms.claim); claim.ok()) {
    explanation.terms.claim_limit = claim->terms.limit;
    explanation.terms.claim_guarantee = claim->terms.guarantee;
  }
  *response = ToProto(*subject, explanation);
  return Reply(context, absl::OkStatus());
}

grpc::ServerUnaryReactor* AdminService::ReloadConfig(grpc::CallbackServerContext* context,
                                                     const v1::ReloadConfigRequest* /*request*/,
                                                     v1::ReloadConfigResponse* response) {
  const absl::StatusOr<Asker> asker = Ask(*context);
  if (!asker.ok()) return Reply(context, asker.status());
  if (!asker->terms.rights.admin) return Reply(context, asker->Refusal("reload the configuration", "ADMIN"));
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  reload_([reactor, response](const absl::StatusOr<ReloadReport>& report) {
    if (!report.ok()) return reactor->Finish(ToGrpc(ReloadRefused(report.status())));
    response->set_rules(static_cast<uint32_t>(report->rules));
    for (const std::string& field : report->needs_restart) response->add_needs_restart(field);
    reactor->Finish(grpc::Status::OK);
  });
  return reactor;
}

}  // namespace vrambroker
