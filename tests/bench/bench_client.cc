// SPDX-License-Identifier: Apache-2.0
#include "tests/bench/bench_client.h"

#include <grpcpp/grpcpp.h>

#include <utility>

#include "client/connection/connection.h"
#include "client/vrambroker/client.h"
#include "health.grpc.pb.h"
#include "vrambroker/v1/broker.grpc.pb.h"

namespace vrambroker::bench {
namespace {

using client_internal::ConnectChannel;
using client_internal::FromGrpc;

class EmptyClient : public BenchClient {
 public:
  explicit EmptyClient(const std::shared_ptr<grpc::Channel>& channel)
      : stub_(grpc::health::v1::Health::NewStub(channel)) {}

  absl::Status Pair() override {
    for (int call = 0; call < 2; ++call) {
      grpc::ClientContext context;
      grpc::health::v1::HealthCheckResponse response;
      if (grpc::Status status = stub_->Check(&context, {}, &response); !status.ok()) return FromGrpc(status);
    }
    return absl::OkStatus();
  }

 private:
  const std::unique_ptr<grpc::health::v1::Health::Stub> stub_;
};

// Raw stubs. The session stream is synchronous, and has no reader between calls.
class StubClient : public BenchClient {
 public:
  explicit StubClient(const std::shared_ptr<grpc::Channel>& channel)
      : stub_(v1::Broker::NewStub(channel)), stream_(stub_->Session(&context_)) {}
  ~StubClient() override {
    v1::SessionRequest request;
    request.mutable_goodbye();
    stream_->Write(request);
    stream_->WritesDone();
    v1::SessionResponse response;
    while (stream_->Read(&response)) {
    }
    (void)stream_->Finish();
  }

  absl::Status Hello() {
    v1::SessionRequest request;
    request.mutable_hello()->set_protocol_version(1);
    request.mutable_hello()->set_name("bench");
    v1::SessionResponse response;
    if (!stream_->Write(request) || !stream_->Read(&response) || !response.has_welcome()) {
      return absl::UnavailableError("the daemon opened no session");
    }
    session_id_ = response.welcome().session_id();
    return absl::OkStatus();
  }

 protected:
  uint64_t session_id_ = 0;
  grpc::ClientContext context_;
  const std::unique_ptr<v1::Broker::Stub> stub_;
  const std::unique_ptr<grpc::ClientReaderWriter<v1::SessionRequest, v1::SessionResponse>> stream_;
};

class UnaryClient : public StubClient {
 public:
  using StubClient::StubClient;

  absl::Status Pair() override {
    v1::FreeRequest free;
    {
      grpc::ClientContext context;
      v1::AllocateRequest request;
      request.set_session_id(session_id_);
      request.set_requested_bytes(kBlockBytes);
      v1::AllocateResponse response;
      if (grpc::Status status = stub_->Allocate(&context, request, &response); !status.ok()) return FromGrpc(status);
      free.add_block_ids(response.block_id());
    }
    grpc::ClientContext context;
    free.set_session_id(session_id_);
    v1::FreeResponse response;
    return FromGrpc(stub_->Free(&context, free, &response));
  }
};

class StreamClient : public StubClient {
 public:
  using StubClient::StubClient;

  absl::Status Pair() override {
    v1::SessionRequest allocate;
    allocate.mutable_allocate()->set_call_id(1);
    allocate.mutable_allocate()->mutable_request()->set_requested_bytes(kBlockBytes);
    v1::SessionResponse response;
    if (absl::Status status = Call(allocate, &response); !status.ok()) return status;
    v1::SessionRequest free;
    free.mutable_free()->set_call_id(2);
    free.mutable_free()->mutable_request()->add_block_ids(response.result().allocated().block_id());
    return Call(free, &response);
  }

 private:
  absl::Status Call(const v1::SessionRequest& request, v1::SessionResponse* response) {
    if (!stream_->Write(request) || !stream_->Read(response)) return absl::UnavailableError("the stream broke");
    if (!response->has_result() || response->result().has_error()) {
      return absl::InternalError(response->ShortDebugString());
    }
    return absl::OkStatus();
  }
};

class LibraryClient : public BenchClient {
 public:
  explicit LibraryClient(Client client) : client_(std::move(client)) {}

  absl::Status Pair() override {
    absl::StatusOr<Buffer> buffer = client_.Allocate(kBlockBytes);
    return buffer.ok() ? buffer->Reset() : buffer.status();
  }

 private:
  Client client_;
};

template <typename T>
absl::StatusOr<std::unique_ptr<BenchClient>> OpenSession(const std::shared_ptr<grpc::Channel>& channel) {
  auto client = std::make_unique<T>(channel);
  if (absl::Status status = client->Hello(); !status.ok()) return status;
  return client;
}

absl::StatusOr<std::unique_ptr<BenchClient>> ConnectWay(const std::string& socket_dir, Way way) {
  if (way == Way::kLibrary) {
    absl::StatusOr<Client> client =
        Client::Connect({.socket_dir = socket_dir, .name = "bench", .placement = Placement::kRemote});
    if (!client.ok()) return client.status();
    return std::make_unique<LibraryClient>(*std::move(client));
  }
  absl::StatusOr<std::shared_ptr<grpc::Channel>> channel = ConnectChannel(socket_dir, absl::Seconds(5));
  if (!channel.ok()) return channel.status();
  if (way == Way::kUnary) return OpenSession<UnaryClient>(*channel);
  if (way == Way::kStream) return OpenSession<StreamClient>(*channel);
  return std::make_unique<EmptyClient>(*channel);
}

}  // namespace

const char* WayName(Way way) {
  switch (way) {
    case Way::kEmpty:
      return "empty";
    case Way::kUnary:
      return "unary";
    case Way::kStream:
      return "stream";
    case Way::kLibrary:
      return "library";
  }
  return "unknown";
}

absl::StatusOr<std::unique_ptr<BenchClient>> BenchClient::Connect(const std::string& socket_dir, Way way) {
  absl::StatusOr<std::unique_ptr<BenchClient>> client = ConnectWay(socket_dir, way);
  if (!client.ok()) return client.status();
  if (absl::Status status = (*client)->Pair(); !status.ok()) return status;  // a miss: brings the segment
  return client;
}

}  // namespace vrambroker::bench
