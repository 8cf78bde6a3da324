// SPDX-License-Identifier: Apache-2.0
//
// Calls the services by stubs. Tests send messages that the client library never sends.
#ifndef VRAMBROKER_TESTS_SUPPORT_RAW_CLIENT_H_
#define VRAMBROKER_TESTS_SUPPORT_RAW_CLIENT_H_

#include <grpcpp/grpcpp.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/clock.h"
#include "client/connection/connection.h"
#include "tests/support/util.h"
#include "vrambroker/v1/admin.grpc.pb.h"
#include "vrambroker/v1/broker.grpc.pb.h"

namespace vrambroker::testing_support {

// Holds a call of Admin::HoldRecording. The class is not thread-safe.
class RawHold {
 public:
  RawHold(v1::Admin::Stub& admin, const v1::SessionRef& session, uint32_t events);
  ~RawHold();
  RawHold(const RawHold&) = delete;
  RawHold& operator=(const RawHold&) = delete;

  // Waits until the session keeps the events. Tests call the function once.
  absl::Status WaitForStart();

 private:
  grpc::ClientContext context_;
  std::unique_ptr<grpc::ClientReader<v1::HoldRecordingResponse>> reader_;
  bool is_held_ = false;
};

// A connection with stubs of both services.
class RawClient {
 public:
  static absl::StatusOr<RawClient> Connect(const std::string& socket_dir);

  v1::Broker::Stub& broker() { return *broker_; }
  v1::Admin::Stub& admin() { return *admin_; }
  const std::shared_ptr<grpc::Channel>& channel() const { return channel_; }

  // Makes a unary call: `method` of `stub`.
  template <typename Stub, typename Request, typename Response>
  static absl::Status Call(Stub& stub, grpc::Status (Stub::*method)(grpc::ClientContext*, const Request&, Response*),
                           const Request& request, Response* response) {
    grpc::ClientContext context;
    context.set_deadline(absl::ToChronoTime(absl::Now() + kPatience));
    return client_internal::FromGrpc((stub.*method)(&context, request, response));
  }

  absl::StatusOr<v1::AllocateResponse> Allocate(uint64_t session, uint64_t bytes, uint32_t device = 0);
  absl::StatusOr<v1::AllocateResponse> Allocate(const v1::AllocateRequest& request);
  absl::Status Free(uint64_t session, const std::vector<uint64_t>& blocks);
  absl::StatusOr<uint64_t> EmptyCache(uint64_t session);
  absl::StatusOr<v1::GetMemoryStatsResponse> GetMemoryStats(uint64_t session, uint32_t device = 0);
  absl::Status ResetPeakStats(uint64_t session, uint32_t device = 0);
  absl::StatusOr<v1::Device> GetDevice();

  absl::StatusOr<v1::ListSessionsResponse> ListSessions();
  absl::StatusOr<v1::Session> GetSession(const v1::SessionRef& ref);
  absl::StatusOr<v1::Session> SetLimit(const v1::SessionRef& ref, const v1::Limit& limit);
  absl::StatusOr<uint64_t> TrimSession(const v1::SessionRef& ref);
  absl::StatusOr<uint64_t> EndSession(const v1::SessionRef& ref);
  absl::StatusOr<std::vector<v1::GetSnapshotResponse>> GetSnapshot(const v1::SessionRef& ref, uint32_t device);
  absl::StatusOr<std::vector<v1::GetSnapshotResponse>> GetRefusalSnapshot(uint64_t refusal);
  absl::Status SetRecording(const v1::SessionRef& ref, uint32_t max_events);
  // Holds the recording only until the call returns.
  absl::Status HoldRecording(const v1::SessionRef& ref, uint32_t events) {
    return RawHold(*admin_, ref, events).WaitForStart();
  }

 private:
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<v1::Broker::Stub> broker_;
  std::unique_ptr<v1::Admin::Stub> admin_;
};

// Calls any method with any bytes; returns the bytes of the answer.
absl::StatusOr<std::string> CallBytes(const std::shared_ptr<grpc::Channel>& channel, const std::string& method,
                                      const std::string& request);

v1::SessionRef Ref(uint64_t id);
v1::SessionRef Ref(const std::string& name);
// Returns the daemon's view of a session's first device, without asking the session's client; zeros when there is no
// such session.
v1::SessionDevice ListedDevice(const std::string& socket_dir, const std::string& name);
v1::Limit BytesLimit(uint64_t bytes);
v1::Limit FractionLimit(double fraction);
// Returns the first message of a session that leases.
v1::SessionRequest LeasingHello(const std::string& name);

// A call of Broker.Session, for one thread.
class RawStream {
 public:
  explicit RawStream(RawClient& client);
  // Cancels the call: to the daemon, the stream breaks.
  ~RawStream();

  // Returns false when the stream has ended.
  bool Send(const v1::SessionRequest& request) { return stream_->Write(request); }
  // Returns no message when the stream has ended.
  std::optional<v1::SessionResponse> Receive();
  // Sends a hello. Returns the daemon's welcome, or the status that ended the stream.
  absl::StatusOr<v1::Welcome> Hello(const std::string& name = "raw",
                                    const std::optional<v1::Limit>& limit = std::nullopt);
  absl::StatusOr<v1::Welcome> Open(const v1::SessionRequest& first);
  // Says goodbye and waits for the end.
  absl::Status Goodbye();
  // Returns the status with which the daemon ended the stream; reads the messages that are left.
  absl::Status End();
  void Cancel() { context_.TryCancel(); }

 private:
  grpc::ClientContext context_;
  std::unique_ptr<grpc::ClientReaderWriter<v1::SessionRequest, v1::SessionResponse>> stream_;
  bool ended_ = false;
};

// Removes fields that change while the session is idle: the idle time, and fields that the daemon finds out later.
v1::Session Lasting(v1::Session session);

}  // namespace vrambroker::testing_support

#endif  // VRAMBROKER_TESTS_SUPPORT_RAW_CLIENT_H_
