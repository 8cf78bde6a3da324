// SPDX-License-Identifier: Apache-2.0
#include "server/rpc/broker_service.h"

#include <atomic>
#include <utility>

#include "allocator/base/version.h"
#include "allocator/wire/heap_convert.h"
#include "server/requests/waiting_requests.h"
#include "server/rpc/session_reactor.h"
#include "server/wire/convert.h"

namespace vrambroker {
namespace {

// Limit per user, at a time. Each list may take a megabyte.
constexpr size_t kMaxResumeLists = 8;

// Reaction to a call that may wait: ends at once when the caller gives up. Deletes itself.
class WaitingCall : public grpc::ServerUnaryReactor {
 public:
  WaitingCall(Broker* broker, SessionPtr session) : broker_(*broker), session_(std::move(session)) {}
  const SessionPtr& session() const { return session_; }
  uint64_t cancel_key() const { return cancel_key_; }
  void OnCancel() override { broker_.waiting().Cancel(session_, cancel_key_); }
  void OnDone() override { delete this; }

 private:
  static uint64_t NextKey() {
    static std::atomic<uint64_t> next{uint64_t{1} << 63};  // clear of the clients' own keys on their streams
    return next.fetch_add(1, std::memory_order_relaxed);
  }

  Broker& broker_;
  const SessionPtr session_;
  const uint64_t cancel_key_ = NextKey();
};

}  // namespace

BrokerService::BrokerService(Broker* broker, const SessionCalls* calls, const Connections* connections,
                             const RpcMeter* rpcs, size_t max_streams_per_uid)
    : broker_(*broker),
      calls_(*calls),
      connections_(*connections),
      rpcs_(*rpcs),
      streams_(
          {.what = "session streams open", .per_uid = max_streams_per_uid, .per_uid_bound = "max_sessions_per_uid"}),
      resume_lists_({.what = "unfinished resume lists", .per_uid = kMaxResumeLists, .per_uid_bound = "the daemon"}) {}

absl::StatusOr<SessionPtr> BrokerService::OwnSession(const grpc::CallbackServerContext& context, uint64_t id) const {
  absl::StatusOr<Caller> caller = connections_.Identify(context);
  if (!caller.ok()) return caller.status();
  return broker_.sessions().Find(SessionId{id}, *caller);
}

absl::Status BrokerService::GiveBack(
    const grpc::CallbackServerContext& context, uint64_t id,
    const std::function<absl::Status(const SessionPtr& session, const Admission& admitted)>& call) const {
  const absl::StatusOr<Caller> caller = connections_.Peer(context);
  if (!caller.ok()) return caller.status();
  const Admission admitted = calls_.Admit(caller->user());
  const absl::StatusOr<SessionPtr> session = broker_.sessions().Find(SessionId{id}, *caller);
  if (session.ok()) return call(*session, admitted);
  return admitted.status.ok() ? session.status() : admitted.status;
}

grpc::ServerBidiReactor<v1::SessionRequest, v1::SessionResponse>* BrokerService::Session(
    grpc::CallbackServerContext* context) {
  absl::StatusOr<Caller> caller = connections_.Identify(*context);
  absl::StatusOr<UserSlots::Slot> slot = caller.ok() ? streams_.Take(caller->user()) : caller.status();
  const bool taken = slot.ok();
  if (!taken) caller = slot.status();
  return new SessionReactor(&broker_, &calls_, &rpcs_, context, std::move(caller),
                            taken ? *std::move(slot) : UserSlots::Slot(), &resume_lists_);
}

grpc::ServerUnaryReactor* BrokerService::Allocate(grpc::CallbackServerContext* context,
                                                  const v1::AllocateRequest* request, v1::AllocateResponse* response) {
  absl::StatusOr<SessionPtr> session = OwnSession(*context, request->session_id());
  if (!session.ok()) return Reply(context, session.status());
  auto* const reactor = new WaitingCall(&broker_, *std::move(session));
  calls_.Allocate(reactor->session(), *request, reactor->cancel_key(), Admission(),
                  [this, context, reactor, response](absl::StatusOr<v1::AllocateResponse> allocated) {
                    const absl::Status status = allocated.status();
                    if (status.ok() && context->IsCancelled()) calls_.Abandon(reactor->session(), *allocated);
                    if (status.ok()) *response = *std::move(allocated);
                    reactor->Finish(ToGrpc(status));
                  });
  return reactor;
}

grpc::ServerUnaryReactor* BrokerService::Free(grpc::CallbackServerContext* context, const v1::FreeRequest* request,
                                              v1::FreeResponse* /*response*/) {
  return Reply(context,
               GiveBack(*context, request->session_id(), [&](const SessionPtr& session, const Admission& admitted) {
                 return calls_.Free(session, *request, admitted);
               }));
}

grpc::ServerUnaryReactor* BrokerService::LeaseSegments(grpc::CallbackServerContext* context,
                                                       const v1::LeaseSegmentsRequest* request,
                                                       v1::LeaseSegmentsResponse* response) {
  absl::StatusOr<SessionPtr> session = OwnSession(*context, request->session_id());
  if (!session.ok()) return Reply(context, session.status());
  auto* const reactor = new WaitingCall(&broker_, *std::move(session));
  calls_.LeaseSegments(reactor->session(), *request, reactor->cancel_key(), Admission(),
                       [this, context, reactor, request, response](absl::StatusOr<v1::LeaseSegmentsResponse> leased) {
                         const absl::Status status = leased.status();
                         if (status.ok() && context->IsCancelled()) {
                           calls_.Abandon(reactor->session(), *request, *leased);
                         }
                         if (status.ok()) *response = *std::move(leased);
                         reactor->Finish(ToGrpc(status));
                       });
  return reactor;
}

grpc::ServerUnaryReactor* BrokerService::ReturnSegments(grpc::CallbackServerContext* context,
                                                        const v1::ReturnSegmentsRequest* request,
                                                        v1::ReturnSegmentsResponse* /*response*/) {
  return Reply(context,
               GiveBack(*context, request->session_id(), [&](const SessionPtr& session, const Admission& admitted) {
                 return calls_.ReturnSegments(session, *request, admitted);
               }));
}

grpc::ServerUnaryReactor* BrokerService::EmptyCache(grpc::CallbackServerContext* context,
                                                    const v1::EmptyCacheRequest* request,
                                                    v1::EmptyCacheResponse* response) {
  absl::StatusOr<SessionPtr> session = OwnSession(*context, request->session_id());
  if (!session.ok()) return Reply(context, session.status());
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  (*session)->Trim(/*bytes=*/0, [reactor, response](const absl::StatusOr<uint64_t>& bytes) {
    response->set_released_bytes(bytes.value_or(0));
    reactor->Finish(ToGrpc(bytes.status()));
  });
  return reactor;
}

grpc::ServerUnaryReactor* BrokerService::GetMemoryStats(grpc::CallbackServerContext* context,
                                                        const v1::GetMemoryStatsRequest* request,
                                                        v1::GetMemoryStatsResponse* response) {
  absl::StatusOr<SessionPtr> session = OwnSession(*context, request->session_id());
  if (!session.ok()) return Reply(context, session.status());
  if (absl::Status status = broker_.CheckDevice(request->device()); !status.ok()) return Reply(context, status);
  const int device = static_cast<int>(request->device());
  *response->mutable_stats() = StatsToProto((*session)->GetMemoryStats(device));
  response->set_limit_bytes(
      broker_.pools()[device]->GetAccount((*session)->id()).value_or(AccountState()).effective_limit_bytes());
  return Reply(context, absl::OkStatus());
}

grpc::ServerUnaryReactor* BrokerService::ResetPeakStats(grpc::CallbackServerContext* context,
                                                        const v1::ResetPeakStatsRequest* request,
                                                        v1::ResetPeakStatsResponse* /*response*/) {
  absl::StatusOr<SessionPtr> session = OwnSession(*context, request->session_id());
  if (!session.ok()) return Reply(context, session.status());
  if (absl::Status status = broker_.CheckDevice(request->device()); !status.ok()) return Reply(context, status);
  return Reply(context, (*session)->ResetStats(static_cast<int>(request->device()), request->accumulated()));
}

grpc::ServerUnaryReactor* BrokerService::GetDevices(grpc::CallbackServerContext* context,
                                                    const v1::GetDevicesRequest* /*request*/,
                                                    v1::GetDevicesResponse* response) {
  const auto caller = connections_.Identify(*context);
  if (!caller.ok()) return Reply(context, caller.status());
  // Other users' programs are shown only to callers who may list other users' sessions.
  const absl::StatusOr<SessionTerms> terms = broker_.TermsOf(*caller);
  const bool is_observer = terms.ok() && terms->rights.observer && !caller->claim.has_value();
  for (size_t i = 0; i < broker_.pools().size(); ++i) {
    const SegmentPool& pool = *broker_.pools()[i];
    v1::Device& device = *response->add_devices();
    device = ToProto(pool);
    AddSensors(broker_.reconciliation().GetSensors(i), device);
    if (is_observer && pool.properties().has_contexts) AddProcesses(*broker_.reconciliation().Get(i), device);
  }
  response->set_daemon_version(kVersion);
  response->set_run_id(broker_.run_id());
  return Reply(context, absl::OkStatus());
}

}  // namespace vrambroker
