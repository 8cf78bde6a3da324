// SPDX-License-Identifier: Apache-2.0
//
// Clients beside a played daemon of an earlier version.
#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "allocator/base/bytes.h"
#include "client/vrambroker/client.h"
#include "tests/support/util.h"
#include "vrambroker/v1/broker.grpc.pb.h"

namespace vrambroker::testing_support {
namespace {

using ::testing::HasSubstr;

// OlderDaemon has one host device and opens every session; its welcome names none of the newer abilities.
class OlderDaemon final : public v1::Broker::Service {
 public:
  explicit OlderDaemon(const std::string& dir) {
    server_ = grpc::ServerBuilder()
                  .AddListeningPort(absl::StrCat("unix:", dir, "/vrambroker.sock"), grpc::InsecureServerCredentials())
                  .RegisterService(this)
                  .BuildAndStart();
  }
  ~OlderDaemon() override { server_->Shutdown(); }

 private:
  grpc::Status Session(grpc::ServerContext* /*context*/,
                       grpc::ServerReaderWriter<v1::SessionResponse, v1::SessionRequest>* stream) override {
    v1::SessionRequest request;
    while (stream->Read(&request) && !request.has_goodbye()) {
      if (!request.has_hello()) continue;
      v1::SessionResponse response;
      v1::Welcome& welcome = *response.mutable_welcome();
      welcome.set_session_id(1);
      welcome.set_name("client");
      welcome.set_protocol_version(1);
      welcome.set_daemon_version("0.1.0");
      v1::Welcome::DeviceGrant& grant = *welcome.add_devices();
      grant.mutable_device()->set_uuid("HOST-0");
      grant.mutable_device()->set_kind(v1::DEVICE_KIND_HOST);
      grant.mutable_device()->set_capacity_bytes(64_MiB);
      grant.set_limit_bytes(64_MiB);
      stream->Write(response);
    }
    return grpc::Status::OK;
  }

  std::unique_ptr<grpc::Server> server_;
};

class OlderDaemonTest : public ::testing::Test {
 protected:
  ~OlderDaemonTest() override { std::filesystem::remove_all(dir_); }
  ClientOptions Options() const { return {.socket_dir = dir_, .name = "client", .placement = Placement::kRemote}; }

  const std::string dir_ = MakeTempDir();
  const OlderDaemon daemon_{dir_};
};

TEST_F(OlderDaemonTest, ServesSessionsWithoutNamedDevices) {
  EXPECT_EQ(Client::Connect(Options()).status(), absl::OkStatus());
}

// The older daemon ignores the names. The session would get memory, and a guarantee, on every device.
TEST_F(OlderDaemonTest, IsRefusedWithNamedDevices) {
  ClientOptions options = Options();
  options.devices = {"0"};
  const absl::Status status = Client::Connect(options).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("too old for sessions that name devices: update the daemon"));
}

}  // namespace
}  // namespace vrambroker::testing_support
