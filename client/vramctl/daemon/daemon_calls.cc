// SPDX-License-Identifier: Apache-2.0
#include "client/vramctl/daemon/daemon_calls.h"

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <system_error>
#include <utility>

#include "absl/strings/cord.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "allocator/wire/admin_json.h"
#include "client/heap/snapshot_parts.h"
#include "client/vramctl/options/refusal.h"

namespace vrambroker::vramctl {

namespace {

// Longer than client_timeout, after which the daemon answers for unresponsive clients.
constexpr absl::Duration kSilence = absl::Seconds(3);
std::atomic<bool> said_that_it_waits{false};

}  // namespace

WaitingNotice::WaitingNotice(absl::Duration timeout) {
  if (timeout <= kSilence) return;
  try {
    thread_ = std::thread([this, timeout] { Wait(timeout); });
    // Without a thread, no notice is printed.
  } catch (const std::system_error&) {  // NOLINT(bugprone-empty-catch)
  }
}

void WaitingNotice::Wait(absl::Duration timeout) {
  const auto until = std::chrono::steady_clock::now() + absl::ToChronoNanoseconds(kSilence);
  MutexLock lock(mu_);
  while (!done_) {
    if (changed_.WaitUntil(mu_, until)) continue;
    if (!done_ && !said_that_it_waits.exchange(true)) {
      std::fprintf(stderr, "vramctl: no answer yet; waiting for up to %s (--timeout)\n",
                   absl::FormatDuration(timeout).c_str());
    }
    return;
  }
}

WaitingNotice::~WaitingNotice() {
  if (!thread_.joinable()) return;
  {
    MutexLock lock(mu_);
    done_ = true;
    changed_.NotifyAll();
  }
  thread_.join();
}

void CallCanceller::Cancel() {
  MutexLock lock(mu_);
  cancelled_ = true;
  if (call_ != nullptr) call_->TryCancel();
}

CallCanceller::Scope::Scope(CallCanceller* canceller, grpc::ClientContext* call) : canceller_(canceller) {
  if (canceller_ == nullptr) return;
  MutexLock lock(canceller_->mu_);
  canceller_->call_ = call;
  if (canceller_->cancelled_) call->TryCancel();
}

CallCanceller::Scope::~Scope() {
  if (canceller_ == nullptr) return;
  MutexLock lock(canceller_->mu_);
  canceller_->call_ = nullptr;
}

absl::StatusOr<Daemon> Daemon::Connect(const Context& context) {
  std::optional<WaitingNotice> notice;
  if (!context.json) notice.emplace(context.timeout);
  absl::StatusOr<Daemon> daemon = Connect(context, context.timeout);
  if (daemon.ok()) daemon->says_that_it_waits = !context.json;
  return daemon;
}

absl::StatusOr<Daemon> Daemon::Connect(const Context& context, absl::Duration timeout) {
  absl::StatusOr<std::shared_ptr<grpc::Channel>> channel = client_internal::ConnectChannel(context.socket_dir, timeout);
  if (!channel.ok()) return ConnectRefusal(channel.status());
  return Daemon{.broker = v1::Broker::NewStub(*channel), .admin = v1::Admin::NewStub(*channel), .timeout = timeout};
}

absl::Status ConnectRefusal(const absl::Status& status) {
  const std::string message = absl::StrReplaceAll(
      status.message(),
      {{client_internal::kSocketDirAdvice, "name its directory with --socket-dir or VRAMBROKER_SOCKET_DIR"}});
  absl::Status refusal = Refusal(absl::Status(status.code(), message));
  status.ForEachPayload([&](absl::string_view url, const absl::Cord& payload) { refusal.SetPayload(url, payload); });
  return refusal;
}

absl::Status StatusOfCall(const grpc::Status& status, absl::Duration timeout) {
  // gRPC's own message; the daemon's messages name the operation past its deadline.
  if (status.error_code() == grpc::StatusCode::DEADLINE_EXCEEDED && status.error_message() == "Deadline Exceeded") {
    return absl::DeadlineExceededError(
        absl::StrCat("the daemon accepts connections but did not answer within ", absl::FormatDuration(timeout),
                     "; it may be stopped, or it waits for a client: its log shows what it did last"));
  }
  return Refusal(client_internal::ExplainClosed(client_internal::FromGrpc(status)));
}

absl::StatusOr<v1::Session> GetSession(Daemon& daemon, const v1::SessionRef& session) {
  v1::GetSessionRequest request;
  *request.mutable_session() = session;
  v1::GetSessionResponse response;
  absl::Status status = Call(daemon, &v1::Admin::Stub::GetSession, request, &response);
  if (!status.ok()) return status;
  return response.session();
}

absl::StatusOr<Overview> ReadOverview(Daemon& daemon) {
  Overview overview;
  absl::Status status = Call(daemon, &v1::Broker::Stub::GetDevices, v1::GetDevicesRequest(), &overview.devices);
  if (status.ok()) {
    status = Call(daemon, &v1::Admin::Stub::ListSessions, v1::ListSessionsRequest(), &overview.sessions);
  }
  if (status.ok()) {
    status = Call(daemon, &v1::Admin::Stub::ListQuarantine, v1::ListQuarantineRequest(), &overview.quarantine);
  }
  if (!status.ok()) return status;
  return overview;
}

absl::StatusOr<v1::ListClaimsResponse> ReadClaims(Daemon& daemon, const std::string& name) {
  v1::ListClaimsRequest request;
  request.set_name(name);
  v1::ListClaimsResponse all;
  for (;;) {
    v1::ListClaimsResponse part;
    absl::Status status = Call(daemon, &v1::Admin::Stub::ListClaims, request, &part);
    if (!status.ok()) return status;
    const bool more = part.more() && !part.claims().empty();
    if (more) request.set_after(part.claims(part.claims_size() - 1).name());
    all.MergeFrom(part);
    if (!more) return all;
  }
}

absl::StatusOr<v1::Claim> ReadClaim(Daemon& daemon, const std::string& name) {
  absl::StatusOr<v1::ListClaimsResponse> claims = ReadClaims(daemon, name);
  if (!claims.ok()) return claims.status();
  if (claims->claims().empty()) return absl::InternalError("the daemon has answered without the claim");
  return std::move(*claims->mutable_claims(0));
}

namespace {

// Reads the snapshot requested from the daemon by `call`.
template <typename Request>
absl::StatusOr<HeapSnapshot> ReadParts(Daemon& daemon,
                                       std::unique_ptr<grpc::ClientReader<v1::GetSnapshotResponse>> (
                                           v1::Admin::Stub::*call)(grpc::ClientContext*, const Request&),
                                       const Request& request) {
  std::optional<WaitingNotice> notice;
  if (daemon.says_that_it_waits) notice.emplace(daemon.timeout);
  grpc::ClientContext context;
  client_internal::SetTimeout(context, daemon.timeout);
  const CallCanceller::Scope scope(daemon.canceller, &context);
  HeapSnapshot heap;
  const grpc::Status read =
      client_internal::ReadSnapshotParts((*daemon.admin.*call)(&context, request).get(), &context, &heap);
  if (absl::Status status = StatusOfCall(read, daemon.timeout); !status.ok()) return status;
  return heap;
}

}  // namespace

absl::StatusOr<HeapSnapshot> ReadSnapshot(Daemon& daemon, uint64_t session, uint32_t device) {
  v1::GetSnapshotRequest request;
  request.mutable_session()->set_id(session);
  request.set_device(device);
  return ReadParts(daemon, &v1::Admin::Stub::GetSnapshot, request);
}

absl::StatusOr<HeapSnapshot> ReadSegments(Daemon& daemon, uint64_t session, uint32_t device) {
  v1::GetSnapshotRequest request;
  request.mutable_session()->set_id(session);
  request.set_device(device);
  request.set_without_history(true);
  return ReadParts(daemon, &v1::Admin::Stub::GetSnapshot, request);
}

absl::StatusOr<HeapSnapshot> ReadRefusalSnapshot(Daemon& daemon, uint64_t refusal) {
  v1::GetRefusalSnapshotRequest request;
  request.set_refusal(refusal);
  return ReadParts(daemon, &v1::Admin::Stub::GetRefusalSnapshot, request);
}

absl::StatusOr<std::vector<HeapSnapshot>> ReadSnapshots(Daemon& daemon, uint64_t session) {
  const absl::StatusOr<v1::Session> found = GetSession(daemon, SessionRefOf(session));
  if (!found.ok()) return found.status();
  std::vector<HeapSnapshot> heaps;
  for (const v1::SessionDevice& device : found->devices()) {
    absl::StatusOr<HeapSnapshot> heap = ReadSnapshot(daemon, session, device.device());
    if (!heap.ok()) return heap.status();
    heaps.push_back(*std::move(heap));
  }
  return heaps;
}

void Print(const nlohmann::ordered_json& json) {
  std::printf("%s\n", JsonText(json, /*indent=*/2).c_str());
}

}  // namespace vrambroker::vramctl
