// SPDX-License-Identifier: Apache-2.0
#include "server/rpc/broker_service.h"

#include <atomic>
#include <chrono>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "allocator/base/version.h"
#include "allocator/wire/heap_convert.h"
#include "server/rpc/session_reactor.h"
#include "server/wire/convert.h"

namespace vrambroker {
namespace {

// Of a user, at a time. Each may take a megabyte.
constexpr size_t kMaxResumeLists = 8;

// The reaction to a call that may wait: it ends at once when the caller gives up. Deletes itself.
class WaitingCall : public grpc::ServerUnaryReactor {
 public:
  WaitingCall(Broker* broker, SessionPtr session) : broker_(*broker), session_(std::move(session)) {}
  uint64_t cancel_key() const { return cancel_key_; }
  void OnCancel() override { broker_.waiting().Cancel(session_, cancel_key_); }
  void OnDone() override { delete this; }

 private:
  static uint64_t NextKey() {
    static std::atomic<uint64_t> next{uint64_t{1} << 63};  // out of the way of the clients' own, on their streams
    return next.fetch_add(1, std::memory_order_relaxed);
  }

  Broker& broker_;
  const SessionPtr session_;
  const uint64_t cancel_key_ = NextKey();
};

}  // namespace

BrokerService::BrokerService(Broker* broker, const Connections* connections, const RpcMeter* rpcs,
                             size_t max_streams_per_uid)
    : broker_(*broker),
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

absl::Status BrokerService::GiveBack(const grpc::CallbackServerContext& context, uint64_t id,
                                     const std::function<absl::Status(const SessionPtr&)>& give_back) const {
  const absl::StatusOr<Caller> caller = connections_.Peer(context);
  if (!caller.ok()) return caller.status();
  const auto now = std::chrono::steady_clock::now();
  absl::Status over_rate = connections_.rates().Take(caller->uid, now);
  const absl::StatusOr<SessionPtr> session = broker_.sessions().Find(SessionId{id}, *caller);
  absl::Status status = session.ok() ? give_back(*session) : session.status();
  if (over_rate.ok()) return status;
  if (!status.ok()) return over_rate;
  connections_.rates().Owe(caller->uid, now);
  return status;
}

grpc::ServerBidiReactor<v1::SessionRequest, v1::SessionResponse>* BrokerService::Session(
    grpc::CallbackServerContext* context) {
  absl::StatusOr<Caller> caller = connections_.Identify(*context);
  absl::StatusOr<UserSlots::Slot> slot = caller.ok() ? streams_.Take(caller->uid) : caller.status();
  const bool taken = slot.ok();
  if (!taken) caller = slot.status();
  return new SessionReactor(&broker_, &connections_.rates(), &rpcs_, context, std::move(caller),
                            taken ? *std::move(slot) : UserSlots::Slot(), &resume_lists_);
}

grpc::ServerUnaryReactor* BrokerService::Allocate(grpc::CallbackServerContext* context,
                                                  const v1::AllocateRequest* request, v1::AllocateResponse* response) {
  absl::StatusOr<SessionPtr> session = OwnSession(*context, request->session_id());
  if (!session.ok()) return Reply(context, session.status());
  auto* const reactor = new WaitingCall(&broker_, *session);
  const absl::StatusOr<RequestOptions> growth = RequestOptionsOf(*request, reactor->cancel_key(), session->get());
  if (!growth.ok()) {
    reactor->Finish(ToGrpc(growth.status()));
    return reactor;
  }
  broker_.allocations().Allocate(
      *session, request->device(), request->requested_bytes(), request->stream(),
      [this, context, reactor, response, session = *session](absl::StatusOr<Allocation> allocation) {
        // A caller that gave up will never learn the block's id, so nobody could free it.
        if (allocation.ok() && context->IsCancelled()) (void)broker_.allocations().Free(session, {allocation->block});
        if (allocation.ok()) *response = ToProto(*allocation);
        reactor->Finish(ToGrpc(allocation.status()));
      },
      *growth);
  return reactor;
}

grpc::ServerUnaryReactor* BrokerService::Free(grpc::CallbackServerContext* context, const v1::FreeRequest* request,
                                              v1::FreeResponse* /*response*/) {
  return Reply(context, GiveBack(*context, request->session_id(), [&](const SessionPtr& session) {
                 const absl::StatusOr<std::vector<BlockId>> blocks = BlockIds(*request);
                 return blocks.ok() ? broker_.allocations().Free(session, *blocks) : blocks.status();
               }));
}

grpc::ServerUnaryReactor* BrokerService::LeaseSegments(grpc::CallbackServerContext* context,
                                                       const v1::LeaseSegmentsRequest* request,
                                                       v1::LeaseSegmentsResponse* response) {
  absl::StatusOr<SessionPtr> session = OwnSession(*context, request->session_id());
  if (!session.ok()) return Reply(context, session.status());
  auto* const reactor = new WaitingCall(&broker_, *session);
  const auto done = [this, context, reactor, request, response,
                     session = *session](const absl::StatusOr<std::vector<Lease>>& leases) {
    if (leases.ok()) {
      *response = ToProto(*leases);
      // A caller that gave up will never learn the ids.
      if (context->IsCancelled())
        (void)broker_.leases().ReturnSegments(session, request->device(), SegmentIds(*leases));
    }
    reactor->Finish(ToGrpc(leases.status()));
  };
  broker_.leases().LeaseSegments(*session, request->device(),
                                 {request->segment_bytes().begin(), request->segment_bytes().end()}, done,
                                 RequestOptionsOf(*request, reactor->cancel_key()));
  return reactor;
}

grpc::ServerUnaryReactor* BrokerService::ReturnSegments(grpc::CallbackServerContext* context,
                                                        const v1::ReturnSegmentsRequest* request,
                                                        v1::ReturnSegmentsResponse* /*response*/) {
  return Reply(context, GiveBack(*context, request->session_id(), [&](const SessionPtr& session) {
                 const absl::StatusOr<std::vector<SegmentId>> segments = SegmentIds(*request);
                 return segments.ok() ? broker_.leases().ReturnSegments(session, request->device(), *segments)
                                      : segments.status();
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
  response->set_limit_bytes(broker_.pools()[device]->GetAccount((*session)->id()).value_or(AccountState()).limit_bytes);
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
  if (const auto caller = connections_.Identify(*context); !caller.ok()) return Reply(context, caller.status());
  for (const SegmentPool* pool : broker_.pools()) *response->add_devices() = ToProto(*pool);
  response->set_daemon_version(kVersion);
  return Reply(context, absl::OkStatus());
}

}  // namespace vrambroker
