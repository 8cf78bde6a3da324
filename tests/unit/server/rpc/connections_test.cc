// SPDX-License-Identifier: Apache-2.0
//
// Tests with gRPC in a single process: the server tells callers apart by the sockets of their connections.
#include "server/rpc/connections.h"

#include <gtest/gtest.h>
#include <sys/socket.h>

#include <memory>
#include <optional>
#include <string>

#include "absl/strings/str_cat.h"
#include "tests/support/util.h"
#include "vrambroker/v1/broker.grpc.pb.h"

namespace vrambroker {
namespace {

using testing_support::MakeTempDir;

constexpr ClaimId kClaimOfListener{7};

// Answers a call with the claim of the caller, and with the token of the connection.
class WhoService : public v1::Broker::CallbackService {
 public:
  explicit WhoService(const Connections* connections) : connections_(*connections) {}

  grpc::ServerUnaryReactor* GetDevices(grpc::CallbackServerContext* context, const v1::GetDevicesRequest* /*request*/,
                                       v1::GetDevicesResponse* response) override {
    grpc::ServerUnaryReactor* const reactor = context->DefaultReactor();
    const absl::StatusOr<Caller> caller = connections_.Peer(*context);
    if (caller.ok()) {
      v1::Device& answer = *response->add_devices();
      answer.set_ordinal(Raw(caller->claim.value_or(ClaimId{0})));
      const grpc::string_ref token = context->client_metadata().find("vrambroker-connection")->second;
      answer.set_name(std::string(token.data(), token.size()));
    }
    reactor->Finish(grpc::Status(static_cast<grpc::StatusCode>(caller.status().code()), ""));
    return reactor;
  }

 private:
  const Connections& connections_;
};

class ConnectionsTest : public testing::Test {
 protected:
  void SetUp() override {
    grpc::ServerBuilder builder;
    builder.RegisterService(&service_);
    server_ = builder.BuildAndStart();
    own_ = ListenUnix(OwnPath(), SOCK_STREAM, 0600).value();
    claims_ = ListenUnix(ClaimsPath(), SOCK_STREAM, 0600).value();
    ASSERT_TRUE(connections_.Serve(own_, server_.get(), DescriptorBudget::Of(1024, 0)).ok());
    const auto counts_in_claim = [](ClaimId, const Caller&) { return false; };
    ASSERT_TRUE(connections_.Listen(claims_, {.id = kClaimOfListener, .counts_in_claim = counts_in_claim}).ok());
  }
  void TearDown() override {
    connections_.StopAccepting();
    server_->Shutdown(std::chrono::system_clock::now());
    connections_.Stop();
  }

  std::string OwnPath() const { return absl::StrCat(dir_, "/own"); }
  std::string ClaimsPath() const { return absl::StrCat(dir_, "/claims"); }

  static std::unique_ptr<v1::Broker::Stub> Stub(const std::string& path) {
    return v1::Broker::NewStub(grpc::CreateChannel(absl::StrCat("unix:", path), grpc::InsecureChannelCredentials()));
  }
  static absl::StatusOr<v1::Device> Call(v1::Broker::Stub& stub, const std::optional<std::string>& token = {}) {
    grpc::ClientContext context;
    if (token.has_value()) context.AddMetadata("vrambroker-connection", *token);
    v1::GetDevicesResponse response;
    const grpc::Status status = stub.GetDevices(&context, {}, &response);
    if (!status.ok()) return absl::Status(static_cast<absl::StatusCode>(status.error_code()), status.error_message());
    return response.devices(0);
  }

  const std::string dir_ = MakeTempDir();
  CallRates rates_{1000};
  ProcessWatch processes_;
  Connections connections_{&rates_, &processes_};
  WhoService service_{&connections_};
  std::unique_ptr<grpc::Server> server_;
  ClientSocket own_;
  ClientSocket claims_;
};

TEST_F(ConnectionsTest, EachCallIsOfItsConnection) {
  const std::unique_ptr<v1::Broker::Stub> own = Stub(OwnPath());
  const std::unique_ptr<v1::Broker::Stub> claims = Stub(ClaimsPath());
  for (int round = 0; round < 3; ++round) {
    const absl::StatusOr<v1::Device> of_own = Call(*own);
    const absl::StatusOr<v1::Device> of_claims = Call(*claims);
    ASSERT_TRUE(of_own.ok() && of_claims.ok()) << of_own.status() << of_claims.status();
    EXPECT_EQ(of_own->ordinal(), 0U);
    EXPECT_EQ(of_claims->ordinal(), Raw(kClaimOfListener));
  }
}

TEST_F(ConnectionsTest, ATokenOfTheClientsOwnIsNobodys) {
  const std::unique_ptr<v1::Broker::Stub> stub = Stub(OwnPath());
  EXPECT_TRUE(absl::IsUnauthenticated(Call(*stub, std::string(32, '0')).status()));
  EXPECT_TRUE(absl::IsUnauthenticated(Call(*stub, "").status()));
  EXPECT_TRUE(Call(*stub).ok());
}

TEST_F(ConnectionsTest, ATokenOfAnotherConnectionIsOfNoUse) {
  const std::unique_ptr<v1::Broker::Stub> own = Stub(OwnPath());
  const std::unique_ptr<v1::Broker::Stub> claims = Stub(ClaimsPath());
  const absl::StatusOr<v1::Device> of_claims = Call(*claims);
  ASSERT_TRUE(of_claims.ok()) << of_claims.status();
  EXPECT_TRUE(absl::IsUnauthenticated(Call(*own, of_claims->name()).status()));
}

}  // namespace
}  // namespace vrambroker
