// SPDX-License-Identifier: Apache-2.0
#include "client/session_client.h"

#include <grpcpp/grpcpp.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "allocator/cuda_device.h"
#include "allocator/host_device.h"
#include "allocator/mutex.h"
#include "client/alloc_conf_text.h"
#include "client/connection.h"
#include "client/mappings.h"
#include "client/session_stream.h"
#include "client/stats_convert.h"

namespace vrambroker::client_internal {
namespace {

constexpr uint32_t kProtocolVersion = 1;
constexpr absl::Duration kGoodbyeTimeout = absl::Seconds(2);
constexpr int kMaxIdsInMessage = 4096;

v1::Limit ToProto(const Limit& limit) {
  v1::Limit proto;
  if (const uint64_t* bytes = std::get_if<uint64_t>(&limit)) {
    proto.set_bytes(*bytes);
  } else {
    proto.set_fraction(std::get<double>(limit));
  }
  return proto;
}

}  // namespace

struct SessionClient::Connection {
  std::shared_ptr<grpc::Channel> channel;
  std::unique_ptr<v1::Broker::Stub> stub;
  Mutex mu;
  std::vector<std::unique_ptr<Device>> devices ABSL_GUARDED_BY(mu);  // by ordinal; null until used
  Mappings mappings;                                                 // after the devices: closed before they go
  std::unique_ptr<SessionStream> stream;
};

SessionClient::SessionClient(const ClientOptions& options)
    : options_(options), pid_(getpid()), connection_(std::make_unique<Connection>()) {}

absl::StatusOr<std::shared_ptr<SessionClient>> SessionClient::Open(const ClientOptions& options) {
  absl::StatusOr<AllocConfText> conf = FindAllocConf(options.alloc_conf);
  if (!conf.ok()) return conf.status();
  absl::StatusOr<std::shared_ptr<grpc::Channel>> channel = ConnectChannel(options.socket_dir, options.connect_timeout);
  if (!channel.ok()) return channel.status();
  std::shared_ptr<SessionClient> self(new SessionClient(options));
  Connection& connection = *self->connection_;
  connection.channel = *std::move(channel);
  connection.stub = v1::Broker::NewStub(connection.channel);

  v1::Hello hello;
  hello.set_protocol_version(kProtocolVersion);
  hello.set_name(options.name);
  if (options.limit.has_value()) *hello.mutable_limit() = ToProto(*options.limit);
  hello.set_alloc_conf(conf->text);
  self->warnings_ = conf->warnings;
  SessionClient* raw = self.get();  // the stream is closed before the session goes
  connection.stream = std::make_unique<SessionStream>(
      connection.stub.get(), hello,
      SessionStream::Handlers{.welcomed =
                                  [raw, source = conf->source](const v1::Welcome& welcome) {
                                    raw->Welcomed(welcome);
                                    for (const std::string& warning : welcome.warnings())
                                      raw->warnings_.push_back(absl::StrCat(source, ": ", warning));
                                  },
                              .close_segments =
                                  [raw](const v1::CloseSegments& message) {
                                    v1::SessionRequest answer;
                                    for (const uint64_t id : message.segment_ids()) {
                                      raw->connection_->mappings.Close(id);
                                      answer.mutable_segments_closed()->add_segment_ids(id);
                                      if (answer.segments_closed().segment_ids_size() == kMaxIdsInMessage) {
                                        raw->connection_->stream->Send(std::exchange(answer, {}));
                                      }
                                    }
                                    if (answer.segments_closed().segment_ids_size() > 0)
                                      raw->connection_->stream->Send(std::move(answer));
                                  },
                              .limit_changed =
                                  [raw](const v1::LimitChanged& message) {
                                    if (message.device() < raw->devices_.size())
                                      raw->limits_[message.device()] = message.limit_bytes();
                                  },
                              .lost =
                                  [raw](const absl::Status& why) {
                                    if (raw->options_.on_lost) raw->options_.on_lost(why);
                                  }});
  const absl::Status welcomed = connection.stream->WaitForWelcome(options.connect_timeout);
  if (absl::IsUnimplemented(welcomed)) {
    return absl::FailedPreconditionError("the daemon is of another version: it does not know Broker.Session");
  }
  if (!welcomed.ok()) return conf->NameSource(welcomed);
  return self;
}

void SessionClient::Welcomed(const v1::Welcome& welcome) {
  session_id_ = welcome.session_id();
  name_ = welcome.name();
  limits_ = std::make_unique<std::atomic<uint64_t>[]>(static_cast<size_t>(welcome.devices_size()));
  for (const v1::Welcome::DeviceGrant& grant : welcome.devices()) {
    limits_[devices_.size()] = grant.limit_bytes();
    devices_.push_back({.ordinal = static_cast<int>(grant.device().ordinal()),
                        .uuid = grant.device().uuid(),
                        .name = grant.device().name(),
                        .kind = grant.device().kind() == v1::DEVICE_KIND_CUDA ? "cuda" : "host",
                        .total_bytes = grant.device().total_bytes(),
                        .capacity_bytes = grant.device().capacity_bytes()});
  }
  MutexLock lock(connection_->mu);
  connection_->devices.resize(devices_.size());
}

SessionClient::~SessionClient() {
  if (getpid() != pid_) {
    (void)connection_.release();  // a child after fork(): see Connection
    return;
  }
  connection_->mappings.CloseAll();
  if (connection_->stream != nullptr) connection_->stream->Close(kGoodbyeTimeout);
}

absl::Status SessionClient::CheckUsable() const {
  if (getpid() != pid_) {
    return absl::FailedPreconditionError(absl::StrCat("this session belongs to process ", pid_,
                                                      ", and this is its child ", getpid(),
                                                      " made by fork(): use it in the parent only"));
  }
  return connection_->stream->status();
}

absl::Status SessionClient::status() const {
  return CheckUsable();
}

template <typename Method, typename Request, typename Response>
absl::Status SessionClient::Call(Method method, const Request& request, Response* response) {
  if (absl::Status status = CheckUsable(); !status.ok()) return status;
  connection_->stream->WaitForFrees(options_.call_timeout);  // these calls show or depend on what is free
  grpc::ClientContext context;
  context.set_deadline(absl::ToChronoTime(absl::Now() + options_.call_timeout));
  absl::Status status = FromGrpc((connection_->stub.get()->*method)(&context, request, response));
  if (absl::IsUnavailable(status) || absl::IsCancelled(status)) {
    const absl::Status lost = connection_->stream->status();
    return lost.ok() ? absl::UnavailableError(absl::StrCat("the daemon went away: ", status.message())) : lost;
  }
  return status;
}

absl::StatusOr<Device*> SessionClient::DeviceFor(int ordinal) {
  const DeviceInfo& info = devices_[ordinal];
  MutexLock lock(connection_->mu);
  std::unique_ptr<Device>& device = connection_->devices[ordinal];
  if (device != nullptr) return device.get();
  if (info.kind == "host") {
    device = MakeHostDevice(ordinal, 0);
    return device.get();
  }
  // By UUID: the ordinals of this process may differ from the daemon's.
  absl::StatusOr<std::vector<std::unique_ptr<Device>>> visible = MakeCudaDevices();
  if (!visible.ok()) return visible.status();
  for (std::unique_ptr<Device>& candidate : *visible) {
    if (candidate->properties().uuid == info.uuid) {
      device = std::move(candidate);
      return device.get();
    }
  }
  return absl::FailedPreconditionError(
      absl::StrCat("device ", ordinal, " (", info.uuid, ") is not visible to this process; see CUDA_VISIBLE_DEVICES"));
}

absl::StatusOr<Buffer> SessionClient::Allocate(uint64_t bytes, int device, uint64_t stream) {
  if (bytes == 0) return absl::InvalidArgumentError("bytes: must be 1 or more");
  if (device < 0 || static_cast<size_t>(device) >= devices_.size()) {
    return absl::NotFoundError(absl::StrCat("no device ", device, "; there are ", devices_.size()));
  }
  if (absl::Status status = CheckUsable(); !status.ok()) return status;
  absl::StatusOr<Device*> opener = DeviceFor(device);
  if (!opener.ok()) return opener.status();

  v1::AllocateRequest request;
  request.set_device(static_cast<uint32_t>(device));
  request.set_requested_bytes(bytes);
  request.set_stream(stream);
  const absl::StatusOr<v1::AllocateResponse> allocated = connection_->stream->Allocate(request, options_.call_timeout);
  if (!allocated.ok()) return allocated.status();
  const v1::AllocateResponse& response = *allocated;

  const auto fetch = [&]() -> absl::StatusOr<SegmentHandle> {
    if (const std::string& ipc = response.handle().cuda_ipc(); ipc.size() == sizeof(CudaIpcHandle)) {
      CudaIpcHandle handle;
      std::memcpy(handle.data(), ipc.data(), ipc.size());
      return SegmentHandle(handle);
    }
    absl::StatusOr<UniqueFd> fd =
        FetchDescriptor(options_.socket_dir, response.handle().descriptor_ticket(), options_.call_timeout);
    if (!fd.ok()) return fd.status();
    return SegmentHandle(*std::move(fd));
  };
  absl::StatusOr<void*> base =
      connection_->mappings.Open(response.segment_id(), response.segment_bytes(), *opener, fetch);
  if (!base.ok()) {
    FreeLater(response.block_id());
    return base.status();
  }
  Buffer buffer;
  buffer.session_ = shared_from_this();
  buffer.opener_ = *opener;
  buffer.data_ = static_cast<char*>(*base) + response.offset_bytes();
  buffer.size_ = bytes;
  buffer.block_bytes_ = response.block_bytes();
  buffer.block_id_ = response.block_id();
  buffer.segment_id_ = response.segment_id();
  buffer.offset_bytes_ = response.offset_bytes();
  buffer.device_ = device;
  return buffer;
}

absl::Status SessionClient::Free(uint64_t block_id) {
  if (absl::Status status = CheckUsable(); !status.ok()) return status;
  return connection_->stream->Free(block_id, options_.call_timeout);
}

void SessionClient::FreeLater(uint64_t block_id) {
  if (getpid() == pid_) connection_->stream->FreeLater(block_id);
}

absl::StatusOr<uint64_t> SessionClient::EmptyCache() {
  v1::EmptyCacheRequest request;
  request.set_session_id(session_id_);
  v1::EmptyCacheResponse response;
  if (absl::Status status = Call(&v1::Broker::Stub::EmptyCache, request, &response); !status.ok()) return status;
  return response.released_bytes();
}

absl::StatusOr<MemoryStats> SessionClient::GetMemoryStats(int device) {
  v1::GetMemoryStatsRequest request;
  request.set_session_id(session_id_);
  request.set_device(static_cast<uint32_t>(device));
  v1::GetMemoryStatsResponse response;
  if (absl::Status status = Call(&v1::Broker::Stub::GetMemoryStats, request, &response); !status.ok()) return status;
  return FromProto(response.stats());
}

absl::Status SessionClient::ResetPeakStats(int device, bool accumulated) {
  v1::ResetPeakStatsRequest request;
  request.set_session_id(session_id_);
  request.set_device(static_cast<uint32_t>(device));
  request.set_accumulated(accumulated);
  v1::ResetPeakStatsResponse response;
  return Call(&v1::Broker::Stub::ResetPeakStats, request, &response);
}

uint64_t SessionClient::limit_bytes(int device) const {
  return device >= 0 && static_cast<size_t>(device) < devices_.size() ? limits_[device].load() : 0;
}

}  // namespace vrambroker::client_internal
