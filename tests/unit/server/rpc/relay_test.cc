// SPDX-License-Identifier: Apache-2.0
#include "server/rpc/relay.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "allocator/base/mutex.h"
#include "tests/support/http2_frame.h"
#include "tests/support/unix_client.h"

namespace vrambroker {
namespace {

using testing_support::Http2FrameText;
using testing_support::kHttp2Preface;
using testing_support::SendWithDescriptor;

const std::string& Greeting() {
  static const auto* const greeting = new std::string(absl::StrCat(kHttp2Preface, Http2FrameText(4, 0, 0)));
  return *greeting;
}

// The loop runs in its own thread; the test plays the client and gRPC.
class RelayTest : public testing::Test, public Relay::Owner {
 protected:
  void SetUp() override {
    auto [client, far] = Pair();
    client_ = std::move(client);
    relay_ = std::make_unique<Relay>(&loop_, ClientSocket(std::move(far)), Http2Header("who", "me"), this);
    ASSERT_TRUE(relay_->Start().ok());
    thread_ = std::thread([this] { loop_.Run(std::chrono::hours(1), [] {}); });
  }
  void TearDown() override {
    loop_.Stop();
    thread_.join();
  }

  absl::Status OnClientFrame(const Http2Frame& frame) override {
    return frame.type == Http2FrameType::kRstStream ? absl::ResourceExhaustedError("a reset") : absl::OkStatus();
  }
  absl::Status OnServerFrame(const Http2Frame& /*frame*/) override {
    ++server_frames_;
    return absl::OkStatus();
  }
  absl::StatusOr<UniqueFd> OpenServer() override {
    MutexLock lock(mu_);
    asked_ = true;
    changed_.NotifyAll();
    if (!may_open_.ok()) return may_open_;
    auto [server, far] = Pair();
    server_ = std::move(server);
    return std::move(far);
  }
  void OnEnd(const absl::Status& why) override {
    relay_.reset();
    MutexLock lock(mu_);
    EXPECT_FALSE(end_.has_value());
    end_ = why;
    changed_.NotifyAll();
  }

  // Returns the two ends of a connection. The relay's end does not block, the test's end blocks.
  static std::pair<UniqueFd, UniqueFd> Pair() {
    std::array<int, 2> ends = {-1, -1};
    EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends.data()), 0);
    EXPECT_EQ(fcntl(ends[1], F_SETFL, O_NONBLOCK), 0);
    return {UniqueFd(ends[0]), UniqueFd(ends[1])};
  }

  // Runs `run` on the loop's thread.
  void Post(std::function<void()> run) {
    UniqueFd ready(eventfd(1, EFD_CLOEXEC));
    const int number = ready.get();
    ASSERT_TRUE(loop_
                    .Watch(std::move(ready), EPOLLIN,
                           [this, number, run = std::move(run)] {
                             loop_.Unwatch(number);
                             run();
                           })
                    .ok());
  }

  static void Send(const UniqueFd& fd, absl::string_view bytes) {
    ASSERT_EQ(send(fd.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL), static_cast<ssize_t>(bytes.size()));
  }
  // Receives `bytes` bytes, or fewer at the end of the stream.
  static std::string Receive(const UniqueFd& fd, size_t bytes) {
    std::string text(bytes, '\0');
    const ssize_t count = recv(fd.get(), text.data(), bytes, MSG_WAITALL);
    text.resize(std::max<ssize_t>(count, 0));
    return text;
  }
  // Returns true if the stream has ended.
  static bool IsAtEnd(const UniqueFd& fd) { return Receive(fd, 1).empty(); }

  void WaitUntilAsked() {
    MutexLock lock(mu_);
    while (!asked_) changed_.Wait(mu_);
    asked_ = false;
  }
  absl::Status WaitForEnd() {
    MutexLock lock(mu_);
    while (!end_.has_value()) changed_.Wait(mu_);
    return *end_;
  }
  void Connect() {
    Send(client_, Greeting());
    WaitUntilAsked();
    EXPECT_EQ(Receive(server_, Greeting().size()), Greeting());
  }
  // Expects all bytes to arrive, and then the end of the stream.
  void SendAndClose(UniqueFd& from, const UniqueFd& to) {
    const std::string much = Http2FrameText(0, 0, 1, std::string(1 << 20, 'm'));
    std::thread sender([&] {
      Send(from, much);
      from.Reset();
    });
    EXPECT_EQ(Receive(to, much.size()), much);
    EXPECT_TRUE(IsAtEnd(to));
    sender.join();
    EXPECT_TRUE(WaitForEnd().ok());
  }
  void SetMayOpen(absl::Status status) {
    MutexLock lock(mu_);
    may_open_ = std::move(status);
  }

  EventLoop loop_;
  std::thread thread_;
  UniqueFd client_;
  UniqueFd server_;               // gRPC's end
  std::unique_ptr<Relay> relay_;  // used on the loop's thread
  std::atomic<int> server_frames_{0};
  Mutex mu_;
  CondVar changed_;
  bool asked_ ABSL_GUARDED_BY(mu_) = false;
  absl::Status may_open_ ABSL_GUARDED_BY(mu_);
  std::optional<absl::Status> end_ ABSL_GUARDED_BY(mu_);
};

TEST_F(RelayTest, CarriesBytesBothWays) {
  Connect();
  const std::string question = Http2FrameText(0, 0, 1, "question");
  const std::string answer = Http2FrameText(0, 0, 1, "answer");
  Send(client_, question);
  EXPECT_EQ(Receive(server_, question.size()), question);
  Send(server_, answer);
  EXPECT_EQ(Receive(client_, answer.size()), answer);
  EXPECT_EQ(server_frames_, 1);
}

TEST_F(RelayTest, EachCallGetsTheHeader) {
  Connect();
  Send(client_, Http2FrameText(1, 5, 1, "headers"));
  const std::string expected = Http2FrameText(1, 1, 1, "headers") + Http2FrameText(9, 4, 1, Http2Header("who", "me"));
  EXPECT_EQ(Receive(server_, expected.size()), expected);
  const std::string answer = Http2FrameText(1, 5, 1, "headers");
  Send(server_, answer);
  EXPECT_EQ(Receive(client_, answer.size()), answer);
}

TEST_F(RelayTest, AClientThatDoesNotSpeakHttp2IsNotHandedOver) {
  Send(client_, "GET / HTTP/1.1\r\n\r\n");
  EXPECT_TRUE(absl::IsInvalidArgument(WaitForEnd()));
  EXPECT_TRUE(IsAtEnd(client_));
  EXPECT_FALSE(server_.valid());
}

TEST_F(RelayTest, AClientThatHasGoneIsNotHandedOver) {
  SetMayOpen(absl::UnavailableError("not yet"));
  Send(client_, Greeting());
  WaitUntilAsked();
  client_.Reset();
  EXPECT_TRUE(WaitForEnd().ok());
  EXPECT_FALSE(server_.valid());
}

TEST_F(RelayTest, WaitsUntilItMayBeOpened) {
  SetMayOpen(absl::UnavailableError("not yet"));
  const std::string frame = Http2FrameText(0, 0, 1, "early");
  Send(client_, Greeting() + frame);
  WaitUntilAsked();
  Send(client_, frame);
  SetMayOpen(absl::OkStatus());
  Post([this] { relay_->Open(); });
  WaitUntilAsked();
  const std::string all = Greeting() + frame + frame;
  EXPECT_EQ(Receive(server_, all.size()), all);
}

TEST_F(RelayTest, WhatCannotBeOpenedEnds) {
  SetMayOpen(absl::ResourceExhaustedError("no descriptors"));
  Send(client_, Greeting());
  EXPECT_TRUE(absl::IsResourceExhausted(WaitForEnd()));
  EXPECT_TRUE(IsAtEnd(client_));
}

TEST_F(RelayTest, AForbiddenFrameDoesNotArrive) {
  Connect();
  Send(client_, Http2FrameText(3, 0, 1, "1234"));
  EXPECT_TRUE(absl::IsResourceExhausted(WaitForEnd()));
  EXPECT_TRUE(IsAtEnd(server_));
  EXPECT_TRUE(IsAtEnd(client_));
}

// The bytes exceed the room of sockets and relay: each direction stops and goes on by itself.
TEST_F(RelayTest, ASideThatDoesNotReadLosesNothing) {
  Connect();
  const std::string much = Http2FrameText(0, 0, 1, std::string(4 << 20, 'm'));
  for (auto [from, to] : {std::pair(&client_, &server_), std::pair(&server_, &client_)}) {
    std::thread sender([&, from = from] { Send(*from, much); });
    // The opposite direction works meanwhile.
    const std::string little = Http2FrameText(0, 0, 1, "little");
    Send(*to, little);
    EXPECT_EQ(Receive(*from, little.size()), little);
    EXPECT_EQ(Receive(*to, much.size()), much);
    sender.join();
  }
}

TEST_F(RelayTest, WhatAClientSentBeforeItClosedArrives) {
  Connect();
  SendAndClose(client_, server_);
}

TEST_F(RelayTest, WhatGrpcSentBeforeItClosedArrives) {
  Connect();
  SendAndClose(server_, client_);
}

TEST_F(RelayTest, AClientThatSendsADescriptorIsDropped) {
  Connect();
  const std::string frame = Http2FrameText(0, 0, 1, "with a descriptor");
  ASSERT_EQ(SendWithDescriptor(client_.get(), frame, client_.get()), static_cast<ssize_t>(frame.size()));
  EXPECT_TRUE(absl::IsPermissionDenied(WaitForEnd()));
  EXPECT_TRUE(IsAtEnd(server_));
  EXPECT_TRUE(IsAtEnd(client_));
}

TEST_F(RelayTest, AClientThatClosesWhileItIsNotReadEnds) {
  Connect();
  // gRPC reads no bytes, so the relay does not read the client.
  std::thread sender([&] {
    const std::string much = Http2FrameText(0, 0, 1, std::string(1 << 20, 'm'));
    (void)send(client_.get(), much.data(), much.size(), MSG_NOSIGNAL);
  });
  EXPECT_EQ(Receive(server_, 9).size(), 9);  // the transfer has begun
  Post([this] { relay_->HangUp(); });        // as at the end of the process
  sender.join();
  client_.Reset();
  Receive(server_, 2 << 20);
  EXPECT_TRUE(WaitForEnd().ok());
}

TEST_F(RelayTest, HungUpForAll) {
  Connect();
  const UniqueFd inherited(dup(client_.get()));
  Send(client_, Http2FrameText(0, 0, 1, "last"));
  Post([this] { relay_->HangUp(); });
  EXPECT_TRUE(IsAtEnd(client_));
  EXPECT_EQ(Receive(server_, 1 << 20), Http2FrameText(0, 0, 1, "last"));
  EXPECT_TRUE(WaitForEnd().ok());
}

}  // namespace
}  // namespace vrambroker
