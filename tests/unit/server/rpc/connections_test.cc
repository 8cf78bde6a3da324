// SPDX-License-Identifier: Apache-2.0
//
// With gRPC, in one process: callers are told apart by the sockets that they have connected to.
#include "server/rpc/connections.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "allocator/base/mutex.h"
#include "tests/support/http2_frame.h"
#include "tests/support/unix_client.h"
#include "tests/support/util.h"
#include "vrambroker/v1/broker.grpc.pb.h"

namespace vrambroker {
namespace {

using testing_support::ConnectUnix;
using testing_support::Http2FrameText;
using testing_support::kHttp2Preface;
using testing_support::MakeTempDir;
using testing_support::WaitFor;

constexpr ClaimId kClaimOfListener{7};

bool IsOpen(int descriptor) {
  return fcntl(descriptor, F_GETFD) >= 0;
}

// Answers a call with whose it is, at once or when it is let go.
class WhoService : public v1::Broker::CallbackService {
 public:
  explicit WhoService(const Connections* connections) : connections_(*connections) {}

  grpc::ServerUnaryReactor* GetDevices(grpc::CallbackServerContext* context, const v1::GetDevicesRequest* /*request*/,
                                       v1::GetDevicesResponse* response) override {
    grpc::ServerUnaryReactor* const reactor = context->DefaultReactor();
    MutexLock lock(mu_);
    if (keeps_) {
      kept_ = context;
      kept_reactor_ = reactor;
      changed_.NotifyAll();
      return reactor;
    }
    const absl::StatusOr<Caller> caller = connections_.Peer(*context);
    if (caller.ok()) response->add_devices()->set_ordinal(Raw(caller->claim.value_or(ClaimId{0})));
    reactor->Finish(grpc::Status(static_cast<grpc::StatusCode>(caller.status().code()), ""));
    return reactor;
  }

  void KeepCalls() {
    MutexLock lock(mu_);
    keeps_ = true;
  }
  const grpc::CallbackServerContext& WaitForKept() {
    MutexLock lock(mu_);
    while (kept_ == nullptr) changed_.Wait(mu_);
    return *kept_;
  }
  void LetGo() {
    MutexLock lock(mu_);
    kept_reactor_->Finish(grpc::Status::OK);
  }

 private:
  const Connections& connections_;
  Mutex mu_;
  CondVar changed_;
  bool keeps_ ABSL_GUARDED_BY(mu_) = false;
  grpc::CallbackServerContext* kept_ ABSL_GUARDED_BY(mu_) = nullptr;
  grpc::ServerUnaryReactor* kept_reactor_ ABSL_GUARDED_BY(mu_) = nullptr;
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
    const auto counts_in_claim = [this](ClaimId, const Caller&) {
      MutexLock lock(mu_);
      accepted_ = true;
      changed_.NotifyAll();
      return false;
    };
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
  // The claim, or 0, that the daemon sees.
  static absl::StatusOr<uint64_t> Call(v1::Broker::Stub& stub, const std::optional<std::string>& token = {}) {
    grpc::ClientContext context;
    if (token.has_value()) context.AddMetadata("vrambroker-connection", *token);
    v1::GetDevicesResponse response;
    const grpc::Status status = stub.GetDevices(&context, {}, &response);
    if (!status.ok()) return absl::Status(static_cast<absl::StatusCode>(status.error_code()), status.error_message());
    return response.devices(0).ordinal();
  }
  void WaitUntilAccepted() {
    MutexLock lock(mu_);
    while (!accepted_) changed_.Wait(mu_);
  }

  const std::string dir_ = MakeTempDir();
  CallRates rates_{1000};
  ProcessWatch processes_;
  Connections connections_{&rates_, &processes_};
  WhoService service_{&connections_};
  std::unique_ptr<grpc::Server> server_;
  ClientSocket own_;
  ClientSocket claims_;
  Mutex mu_;
  CondVar changed_;
  bool accepted_ ABSL_GUARDED_BY(mu_) = false;
};

TEST_F(ConnectionsTest, EachCallIsOfItsConnection) {
  const std::unique_ptr<v1::Broker::Stub> own = Stub(OwnPath());
  const std::unique_ptr<v1::Broker::Stub> claims = Stub(ClaimsPath());
  for (int round = 0; round < 3; ++round) {
    EXPECT_EQ(Call(*own).value_or(99), 0U);
    EXPECT_EQ(Call(*claims).value_or(99), Raw(kClaimOfListener));
  }
}

TEST_F(ConnectionsTest, ATokenOfTheClientsOwnIsNobodys) {
  const std::unique_ptr<v1::Broker::Stub> stub = Stub(OwnPath());
  EXPECT_TRUE(absl::IsUnauthenticated(Call(*stub, std::string(32, '0')).status()));
  EXPECT_TRUE(absl::IsUnauthenticated(Call(*stub, "").status()));
  EXPECT_TRUE(Call(*stub).ok());
}

// GRPC may close a descriptor while a call of its connection runs. The next connection gets its number.
TEST_F(ConnectionsTest, ACallIsNotOfTheConnectionThatGetsItsDescriptorNumber) {
  UniqueFd below(open("/dev/null", O_RDONLY | O_CLOEXEC));
  service_.KeepCalls();
  std::thread caller([this] { EXPECT_FALSE(Call(*Stub(OwnPath())).ok()); });
  const grpc::CallbackServerContext& call = service_.WaitForKept();
  ASSERT_TRUE(connections_.Peer(call).ok());
  const std::string peer = call.peer();
  absl::string_view text = peer;
  int number = -1;
  ASSERT_TRUE(absl::ConsumePrefix(&text, "fd:") && absl::SimpleAtoi(text, &number)) << peer;

  UniqueFd next = ConnectUnix(ClaimsPath(), SOCK_STREAM);
  WaitUntilAccepted();
  close(number);
  caller.join();  // its connection has ended
  std::vector<UniqueFd> filling;
  do {
    filling.emplace_back(open("/dev/null", O_RDONLY | O_CLOEXEC));
  } while (filling.back().get() < number);
  for (UniqueFd& each : filling) {
    if (each.get() == number) each.Reset();
  }
  below.Reset();  // of a pair of sockets the first one gets this number, and gRPC's the other
  const std::string greeting = absl::StrCat(kHttp2Preface, Http2FrameText(4, 0, 0));
  ASSERT_EQ(send(next.get(), greeting.data(), greeting.size(), MSG_NOSIGNAL), static_cast<ssize_t>(greeting.size()));
  char first = 0;
  ASSERT_EQ(recv(next.get(), &first, 1, 0), 1);  // gRPC has greeted
  ASSERT_TRUE(IsOpen(number));
  EXPECT_TRUE(absl::IsUnauthenticated(connections_.Peer(call).status()));

  // GRPC closes the number for each of the two.
  next.Reset();
  ASSERT_TRUE(WaitFor([&] { return !IsOpen(number); }));
  ASSERT_EQ(dup2(filling.back().get(), number), number);
  service_.LetGo();
}

}  // namespace
}  // namespace vrambroker
