// SPDX-License-Identifier: Apache-2.0
#include "tests/support/raw_client.h"

#include <grpcpp/generic/generic_stub.h>

#include <utility>

namespace vrambroker::testing_support {

absl::StatusOr<RawClient> RawClient::Connect(const std::string& socket_dir) {
  absl::StatusOr<std::shared_ptr<grpc::Channel>> channel = client_internal::ConnectChannel(socket_dir, kPatience);
  if (!channel.ok()) return channel.status();
  RawClient client;
  client.channel_ = *std::move(channel);
  client.broker_ = v1::Broker::NewStub(client.channel_);
  client.admin_ = v1::Admin::NewStub(client.channel_);
  return client;
}

absl::StatusOr<v1::AllocateResponse> RawClient::Allocate(uint64_t session, uint64_t bytes, uint32_t device) {
  v1::AllocateRequest request;
  request.set_session_id(session);
  request.set_device(device);
  request.set_requested_bytes(bytes);
  return Allocate(request);
}

absl::StatusOr<v1::AllocateResponse> RawClient::Allocate(const v1::AllocateRequest& request) {
  v1::AllocateResponse response;
  if (absl::Status status = Call(*broker_, &v1::Broker::Stub::Allocate, request, &response); !status.ok()) {
    return status;
  }
  return response;
}

absl::Status RawClient::Free(uint64_t session, const std::vector<uint64_t>& blocks) {
  v1::FreeRequest request;
  request.set_session_id(session);
  for (const uint64_t block : blocks) request.add_block_ids(block);
  v1::FreeResponse response;
  return Call(*broker_, &v1::Broker::Stub::Free, request, &response);
}

absl::StatusOr<uint64_t> RawClient::EmptyCache(uint64_t session) {
  v1::EmptyCacheRequest request;
  request.set_session_id(session);
  v1::EmptyCacheResponse response;
  if (absl::Status status = Call(*broker_, &v1::Broker::Stub::EmptyCache, request, &response); !status.ok()) {
    return status;
  }
  return response.released_bytes();
}

absl::StatusOr<v1::GetMemoryStatsResponse> RawClient::GetMemoryStats(uint64_t session, uint32_t device) {
  v1::GetMemoryStatsRequest request;
  request.set_session_id(session);
  request.set_device(device);
  v1::GetMemoryStatsResponse response;
  absl::Status status = Call(*broker_, &v1::Broker::Stub::GetMemoryStats, request, &response);
  if (!status.ok()) return status;
  return response;
}

absl::Status RawClient::ResetPeakStats(uint64_t session, uint32_t device) {
  v1::ResetPeakStatsRequest request;
  request.set_session_id(session);
  request.set_device(device);
  v1::ResetPeakStatsResponse response;
  return Call(*broker_, &v1::Broker::Stub::ResetPeakStats, request, &response);
}

absl::StatusOr<v1::Device> RawClient::GetDevice() {
  v1::GetDevicesResponse response;
  absl::Status status = Call(*broker_, &v1::Broker::Stub::GetDevices, v1::GetDevicesRequest(), &response);
  if (!status.ok()) return status;
  if (response.devices().empty()) return absl::InternalError("no devices");
  return response.devices(0);
}

absl::StatusOr<v1::ListSessionsResponse> RawClient::ListSessions() {
  v1::ListSessionsResponse response;
  absl::Status status = Call(*admin_, &v1::Admin::Stub::ListSessions, v1::ListSessionsRequest(), &response);
  if (!status.ok()) return status;
  return response;
}

absl::StatusOr<v1::Session> RawClient::GetSession(const v1::SessionRef& ref) {
  v1::GetSessionRequest request;
  *request.mutable_session() = ref;
  v1::GetSessionResponse response;
  absl::Status status = Call(*admin_, &v1::Admin::Stub::GetSession, request, &response);
  if (!status.ok()) return status;
  return response.session();
}

absl::StatusOr<v1::Session> RawClient::SetLimit(const v1::SessionRef& ref, const v1::Limit& limit) {
  v1::SetLimitRequest request;
  *request.mutable_session() = ref;
  *request.mutable_limit() = limit;
  v1::SetLimitResponse response;
  absl::Status status = Call(*admin_, &v1::Admin::Stub::SetLimit, request, &response);
  if (!status.ok()) return status;
  return response.session();
}

absl::StatusOr<uint64_t> RawClient::TrimSession(const v1::SessionRef& ref) {
  v1::TrimSessionRequest request;
  *request.mutable_session() = ref;
  v1::TrimSessionResponse response;
  absl::Status status = Call(*admin_, &v1::Admin::Stub::TrimSession, request, &response);
  if (!status.ok()) return status;
  return response.released_bytes();
}

absl::StatusOr<uint64_t> RawClient::EndSession(const v1::SessionRef& ref) {
  v1::EndSessionRequest request;
  *request.mutable_session() = ref;
  v1::EndSessionResponse response;
  absl::Status status = Call(*admin_, &v1::Admin::Stub::EndSession, request, &response);
  if (!status.ok()) return status;
  return response.quarantined_bytes();
}

namespace {

absl::StatusOr<std::vector<v1::GetSnapshotResponse>> AllParts(grpc::ClientReader<v1::GetSnapshotResponse>& reader) {
  std::vector<v1::GetSnapshotResponse> parts;
  v1::GetSnapshotResponse part;
  while (reader.Read(&part)) parts.push_back(part);
  if (absl::Status status = client_internal::FromGrpc(reader.Finish()); !status.ok()) return status;
  return parts;
}

}  // namespace

absl::StatusOr<std::vector<v1::GetSnapshotResponse>> RawClient::GetSnapshot(const v1::SessionRef& ref,
                                                                            uint32_t device) {
  v1::GetSnapshotRequest request;
  *request.mutable_session() = ref;
  request.set_device(device);
  grpc::ClientContext context;
  context.set_deadline(absl::ToChronoTime(absl::Now() + kPatience));
  return AllParts(*admin_->GetSnapshot(&context, request));
}

absl::StatusOr<std::vector<v1::GetSnapshotResponse>> RawClient::GetRefusalSnapshot(uint64_t refusal) {
  v1::GetRefusalSnapshotRequest request;
  request.set_refusal(refusal);
  grpc::ClientContext context;
  context.set_deadline(absl::ToChronoTime(absl::Now() + kPatience));
  return AllParts(*admin_->GetRefusalSnapshot(&context, request));
}

RawHold::RawHold(v1::Admin::Stub& admin, const v1::SessionRef& session, uint32_t events) {
  v1::HoldRecordingRequest request;
  *request.mutable_session() = session;
  request.set_events(events);
  context_.set_deadline(absl::ToChronoTime(absl::Now() + kPatience));
  reader_ = admin.HoldRecording(&context_, request);
}

RawHold::~RawHold() {
  if (!is_held_) return;
  context_.TryCancel();
  (void)reader_->Finish();
}

absl::Status RawHold::WaitForStart() {
  v1::HoldRecordingResponse response;
  is_held_ = reader_->Read(&response);
  return is_held_ ? absl::OkStatus() : client_internal::FromGrpc(reader_->Finish());
}

absl::Status RawClient::SetRecording(const v1::SessionRef& ref, uint32_t max_events) {
  v1::SetRecordingRequest request;
  *request.mutable_session() = ref;
  request.set_max_events(max_events);
  v1::SetRecordingResponse response;
  return Call(*admin_, &v1::Admin::Stub::SetRecording, request, &response);
}

absl::StatusOr<std::string> CallBytes(const std::shared_ptr<grpc::Channel>& channel, const std::string& method,
                                      const std::string& request) {
  grpc::GenericStub stub(channel);
  grpc::ClientContext context;
  context.set_deadline(absl::ToChronoTime(absl::Now() + kPatience));
  const grpc::Slice slice(request);
  const grpc::ByteBuffer bytes(&slice, 1);
  grpc::ByteBuffer answer;
  grpc::Status status;
  grpc::CompletionQueue queue;
  const std::unique_ptr<grpc::GenericClientAsyncResponseReader> call =
      stub.PrepareUnaryCall(&context, method, bytes, &queue);
  call->StartCall();
  call->Finish(&answer, &status, nullptr);
  void* tag = nullptr;
  bool ok = false;
  (void)queue.Next(&tag, &ok);
  queue.Shutdown();
  while (queue.Next(&tag, &ok)) {
  }
  if (!status.ok()) return client_internal::FromGrpc(status);
  std::vector<grpc::Slice> slices;
  std::string text;
  if (!answer.Valid() || !answer.Dump(&slices).ok()) return text;
  for (const grpc::Slice& part : slices) text.append(reinterpret_cast<const char*>(part.begin()), part.size());
  return text;
}

v1::SessionRef Ref(uint64_t id) {
  v1::SessionRef ref;
  ref.set_id(id);
  return ref;
}

v1::SessionRef Ref(const std::string& name) {
  v1::SessionRef ref;
  ref.set_name(name);
  return ref;
}

v1::SessionDevice ListedDevice(const std::string& socket_dir, const std::string& name) {
  absl::StatusOr<RawClient> raw = RawClient::Connect(socket_dir);
  if (!raw.ok()) return {};
  const absl::StatusOr<v1::ListSessionsResponse> sessions = raw->ListSessions();
  if (!sessions.ok()) return {};
  for (const v1::Session& session : sessions->sessions()) {
    if (session.name() == name) return session.devices(0);
  }
  return {};
}

v1::Limit BytesLimit(uint64_t bytes) {
  v1::Limit limit;
  limit.set_bytes(bytes);
  return limit;
}

v1::Limit FractionLimit(double fraction) {
  v1::Limit limit;
  limit.set_fraction(fraction);
  return limit;
}

v1::SessionRequest LeasingHello(const std::string& name) {
  v1::SessionRequest request;
  request.mutable_hello()->set_protocol_version(1);
  request.mutable_hello()->set_name(name);
  request.mutable_hello()->set_placement(v1::PLACEMENT_LEASED);
  return request;
}

RawStream::RawStream(RawClient& client) {
  context_.set_deadline(absl::ToChronoTime(absl::Now() + 2 * kPatience));
  stream_ = client.broker().Session(&context_);
}

RawStream::~RawStream() {
  context_.TryCancel();
  if (!ended_) (void)stream_->Finish();
}

std::optional<v1::SessionResponse> RawStream::Receive() {
  v1::SessionResponse response;
  if (!stream_->Read(&response)) return std::nullopt;
  return response;
}

absl::StatusOr<v1::Welcome> RawStream::Hello(const std::string& name, const std::optional<v1::Limit>& limit) {
  v1::SessionRequest request;
  request.mutable_hello()->set_protocol_version(1);
  request.mutable_hello()->set_name(name);
  if (limit.has_value()) *request.mutable_hello()->mutable_limit() = *limit;
  return Open(request);
}

absl::StatusOr<v1::Welcome> RawStream::Open(const v1::SessionRequest& first) {
  (void)Send(first);
  std::optional<v1::SessionResponse> response = Receive();
  if (!response.has_value()) return End();
  if (!response->has_welcome()) return absl::InternalError("something else than a welcome: " + response->DebugString());
  return response->welcome();
}

absl::Status RawStream::Goodbye() {
  v1::SessionRequest request;
  request.mutable_goodbye();
  (void)Send(request);
  return End();
}

absl::Status RawStream::End() {
  while (Receive().has_value()) {
  }
  ended_ = true;
  return client_internal::FromGrpc(stream_->Finish());
}

v1::Session Lasting(v1::Session session) {
  session.clear_idle_ms();
  session.clear_user();
  session.clear_command();
  return session;
}

}  // namespace vrambroker::testing_support
