// SPDX-License-Identifier: Apache-2.0
//
// Leases and returns over the descriptor socket: results for honest clients, and bad input.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>

#include <array>
#include <cstring>
#include <filesystem>
#include <iterator>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "allocator/base/bytes.h"
#include "client/connection/descriptor_channel.h"
#include "tests/integration/bad_input_fixture.h"
#include "tests/support/proxy.h"
#include "tests/support/test_device.h"
#include "tests/support/unix_client.h"

namespace vrambroker::testing_support {
namespace {

using ::absl::StatusCode;
using client_internal::DescriptorChannel;
using ::testing::HasSubstr;

class SegmentCallsTest : public BadInputTest {
 protected:
  void SetUp() override {}  // Open() starts the daemon

  // Opens a leasing session for the test's calls.
  void Open(const DaemonOptions& options = {}) {
    Begin(options);
    stream_.emplace(*raw_);
    ASSERT_OK_AND_ASSIGN(welcome_, stream_->Open(LeasingHello("direct")));
    ASSERT_TRUE(welcome_.takes_segment_calls());
  }
  void TearDown() override {
    if (daemon_ == nullptr) return;  // skipped test
    if (stream_.has_value() && daemon_->Running()) {
      EXPECT_OK(stream_->Goodbye());
    }
    BadInputTest::TearDown();
    stream_.reset();
  }

  v1::SegmentCall ToLease(const std::vector<uint64_t>& sizes) const {
    v1::SegmentCall call;
    call.set_session_id(welcome_.session_id());
    call.set_resume_token(welcome_.resume_token());
    call.mutable_lease()->mutable_segment_bytes()->Add(sizes.begin(), sizes.end());
    return call;
  }
  v1::SegmentCall ToReturn(const std::vector<uint64_t>& ids) const {
    v1::SegmentCall call = ToLease({});
    call.mutable_return_segments()->mutable_segment_ids()->Add(ids.begin(), ids.end());
    return call;
  }
  absl::StatusOr<DescriptorChannel::Answer> Make(const v1::SegmentCall& call) {
    if (!channel_.has_value()) channel_.emplace(dir());
    return channel_->Call(call, kPatience);
  }
  // Returns the daemon's error.
  absl::Status ErrorOf(const v1::SegmentCall& call) {
    const absl::StatusOr<DescriptorChannel::Answer> answer = Make(call);
    if (!answer.ok()) return absl::InternalError(absl::StrCat("no answer: ", answer.status().message()));
    return client_internal::FromProto(answer->result.error());
  }
  uint64_t Reserved() { return ListedDevice(dir(), "direct").reserved_bytes(); }

  UniqueFd ConnectRaw() { return ConnectUnix(dir() + "/vrambroker-fd.sock", SOCK_SEQPACKET); }
  static void Send(const UniqueFd& socket, const v1::SegmentCall& call) {
    const std::string packet = call.SerializeAsString();
    ASSERT_EQ(send(socket.get(), packet.data(), packet.size(), MSG_NOSIGNAL), static_cast<ssize_t>(packet.size()));
  }
  // Returns the next packet without its descriptors; empty at the end.
  static std::string Receive(const UniqueFd& socket) {
    std::array<char, 8192> bytes;
    pollfd readable = {.fd = socket.get(), .events = POLLIN, .revents = 0};
    EXPECT_EQ(poll(&readable, 1, static_cast<int>(absl::ToInt64Milliseconds(kPatience))), 1);
    const ssize_t size = recv(socket.get(), bytes.data(), bytes.size(), MSG_DONTWAIT);
    return size <= 0 ? "" : std::string(bytes.data(), static_cast<size_t>(size));
  }
  static v1::CallResult ReceiveResult(const UniqueFd& socket) {
    v1::CallResult result;
    EXPECT_TRUE(result.ParseFromString(Receive(socket)));
    return result;
  }

  std::optional<RawStream> stream_;
  std::optional<DescriptorChannel> channel_;
  v1::Welcome welcome_;
};

// ---- Purpose of segment calls ----

TEST_F(SegmentCallsTest, LeaseWithDescriptorsAndReturn) {
  HOST_DEVICE_ONLY();
  Open({.http = true});
  for (int round = 0; round < 2; ++round) {  // segments from the device, then from the daemon's cache
    ASSERT_OK_AND_ASSIGN(DescriptorChannel::Answer answer, Make(ToLease({4_MiB, 2_MiB})));
    ASSERT_EQ(answer.result.leased().segments_size(), 2) << answer.result.DebugString();
    ASSERT_EQ(answer.descriptors.size(), 2u);
    std::vector<uint64_t> ids;
    for (int i = 0; i < 2; ++i) {
      const v1::LeaseSegmentsResponse::Segment& segment = answer.result.leased().segments(i);
      EXPECT_TRUE(segment.handle().descriptor_attached());
      struct stat file = {};
      ASSERT_EQ(fstat(answer.descriptors[i].get(), &file), 0);
      EXPECT_EQ(static_cast<uint64_t>(file.st_size), segment.segment_bytes());
      EXPECT_NE(fcntl(answer.descriptors[i].get(), F_GETFD) & FD_CLOEXEC, 0);
      ids.push_back(segment.segment_id());
    }
    EXPECT_EQ(Reserved(), 6_MiB);
    ASSERT_OK_AND_ASSIGN(answer, Make(ToReturn(ids)));
    EXPECT_TRUE(answer.result.has_returned()) << answer.result.DebugString();
    EXPECT_EQ(Reserved(), 0u);
  }
  for (const char* method : {"Session.LeaseSegments", "Session.ReturnSegments"}) {
    EXPECT_TRUE(WaitFor([&] {
      return daemon_->Metrics().Sum("vrambroker_rpc_requests_total", {{"method", method}, {"code", "OK"}}) >= 2;
    })) << method;
  }
}

TEST_F(SegmentCallsTest, MoreSegmentsThanDescriptorsInAnAnswerHaveTickets) {
  HOST_DEVICE_ONLY();
  Open();
  ASSERT_OK_AND_ASSIGN(const DescriptorChannel::Answer answer, Make(ToLease(std::vector<uint64_t>(10, 2_MiB))));
  EXPECT_EQ(answer.descriptors.size(), 8u);
  ASSERT_EQ(answer.result.leased().segments_size(), 10);
  EXPECT_TRUE(answer.result.leased().segments(7).handle().descriptor_attached());
  EXPECT_OK(channel_->Fetch(answer.result.leased().segments(8).handle().descriptor_ticket(), kPatience));
  EXPECT_OK(channel_->Fetch(answer.result.leased().segments(9).handle().descriptor_ticket(), kPatience));
}

TEST_F(SegmentCallsTest, ARefusalSaysWhatTheStreamSays) {
  Open();
  const absl::Status direct = ErrorOf(ToLease({200_MiB, 200_MiB}));
  v1::SessionRequest request;
  *request.mutable_lease()->mutable_request() = ToLease({200_MiB, 200_MiB}).lease();
  stream_->Send(request);
  const absl::Status streamed = client_internal::FromProto(stream_->Receive().value().result().error());
  EXPECT_EQ(direct.code(), StatusCode::kResourceExhausted);
  EXPECT_EQ(direct, streamed);
}

TEST_F(SegmentCallsTest, AClientThatCannotTakeADescriptorLosesNothing) {
  HOST_DEVICE_ONLY();
  Begin({});
  const std::string proxy_dir = MakeTempDir();
  ASSERT_OK_AND_ASSIGN(const std::unique_ptr<Proxy> proxy, Proxy::Start(proxy_dir, dir()));
  ASSERT_OK_AND_ASSIGN(
      Client client,
      Client::Connect(
          {.socket_dir = proxy_dir, .name = "full", .connect_timeout = kPatience, .call_timeout = kPatience}));
  ASSERT_OK_AND_ASSIGN(const Buffer held, client.Allocate(40_MiB));
  proxy->DropDescriptors();
  EXPECT_STATUS(client.Allocate(40_MiB).status(), StatusCode::kInternal, "too many files open");
  EXPECT_EQ(ListedDevice(dir(), "full").reserved_bytes(), 40_MiB);
}

// ---- Permissions ----

TEST_F(SegmentCallsTest, OnlyTheSessionsOwnProcessWithItsToken) {
  Open();
  ASSERT_OK_AND_ASSIGN(const DescriptorChannel::Answer mine, Make(ToLease({2_MiB})));
  v1::SegmentCall call = ToLease({2_MiB});
  call.mutable_resume_token()->back() ^= 1;
  EXPECT_STATUS(ErrorOf(call), StatusCode::kNotFound, "resume_token");
  call = ToReturn({mine.result.leased().segments(0).segment_id()});
  call.mutable_resume_token()->front() ^= 1;
  EXPECT_STATUS(ErrorOf(call), StatusCode::kNotFound, "resume_token");
  call = ToLease({2_MiB});
  call.set_session_id(WitnessId());
  EXPECT_STATUS(ErrorOf(call), StatusCode::kPermissionDenied, "another process");
  call.set_session_id(~uint64_t{0});
  EXPECT_STATUS(ErrorOf(call), StatusCode::kNotFound, "");
  EXPECT_EQ(Reserved(), 2_MiB);

  RawStream remote(*raw_);
  ASSERT_OK_AND_ASSIGN(const v1::Welcome welcome, remote.Hello());
  EXPECT_FALSE(welcome.takes_segment_calls());
  call.set_session_id(welcome.session_id());
  EXPECT_STATUS(ErrorOf(call), StatusCode::kFailedPrecondition, "remote");
  EXPECT_OK(remote.Goodbye());
}

TEST_F(SegmentCallsTest, ASessionThatWasEndedReturnsAndLeasesNothing) {
  Open();
  ASSERT_OK_AND_ASSIGN(const DescriptorChannel::Answer leased, Make(ToLease({2_MiB})));
  ASSERT_OK(raw_->EndSession(Ref("direct")));
  EXPECT_STATUS(ErrorOf(ToLease({2_MiB})), StatusCode::kAborted, "");
  EXPECT_OK(ErrorOf(ToReturn({leased.result.leased().segments(0).segment_id()})));
  EXPECT_EQ(Reserved(), 0u);
}

TEST_F(SegmentCallsTest, ASessionWhoseStreamBrokeLeasesNothing) {
  Open();
  ASSERT_OK(Make(ToLease({2_MiB})).status());
  stream_.reset();
  EXPECT_TRUE(WaitFor([&] {
    const auto session = raw_->GetSession(Ref("direct"));
    return session.ok() && session->state() == v1::SESSION_STATE_DISCONNECTED;
  }));
  EXPECT_STATUS(ErrorOf(ToLease({2_MiB})), StatusCode::kAborted, "");
  EXPECT_EQ(Reserved(), 2_MiB);
}

TEST_F(SegmentCallsTest, AnUnknownSegmentIsNotAnUnknownSession) {
  Open();
  v1::SegmentCall call = ToReturn({~uint64_t{0}});
  ASSERT_OK_AND_ASSIGN(const DescriptorChannel::Answer no_segment, Make(call));
  EXPECT_FALSE(no_segment.result.no_session());
  call.mutable_resume_token()->front() ^= 1;
  ASSERT_OK_AND_ASSIGN(const DescriptorChannel::Answer no_session, Make(call));
  EXPECT_TRUE(no_session.result.no_session());
}

// ---- Faulty calls ----

TEST_F(SegmentCallsTest, AreChecked) {
  Open();
  EXPECT_STATUS(ErrorOf(ToLease({})), StatusCode::kInvalidArgument, "segment_bytes");
  EXPECT_STATUS(ErrorOf(ToLease({1})), StatusCode::kInvalidArgument, "segment_bytes");
  EXPECT_STATUS(ErrorOf(ToLease(std::vector<uint64_t>(65, 2_MiB))), StatusCode::kInvalidArgument, "65 sizes");
  v1::SegmentCall call = ToLease({2_MiB});
  call.mutable_lease()->set_device(7);
  EXPECT_STATUS(ErrorOf(call), StatusCode::kNotFound, "");
  call = ToLease({2_MiB});
  call.mutable_lease()->set_last_resort(true);
  EXPECT_STATUS(ErrorOf(call), StatusCode::kInvalidArgument, "last_resort");
  EXPECT_STATUS(ErrorOf(ToReturn({})), StatusCode::kInvalidArgument, "");
  EXPECT_STATUS(ErrorOf(ToReturn(std::vector<uint64_t>(65, 1))), StatusCode::kInvalidArgument, "at most 64 here");
  EXPECT_STATUS(ErrorOf(ToReturn({~uint64_t{0}})), StatusCode::kNotFound, "");
  ASSERT_OK_AND_ASSIGN(const DescriptorChannel::Answer leased, Make(ToLease({2_MiB})));
  const uint64_t id = leased.result.leased().segments(0).segment_id();
  EXPECT_STATUS(ErrorOf(ToReturn({id, id})), StatusCode::kInvalidArgument, "");
  EXPECT_STATUS(ErrorOf(ToReturn({id, id + 1})), StatusCode::kNotFound, "");
  EXPECT_EQ(Reserved(), 2_MiB);
}

TEST_F(SegmentCallsTest, WhatIsNoCallIsRefusedAndLeavesTheConnection) {
  Open();
  v1::SegmentCall no_token = ToLease({2_MiB});
  no_token.set_resume_token("short");
  v1::SegmentCall no_call = ToLease({2_MiB});
  no_call.clear_call();
  std::string large = ToReturn(std::vector<uint64_t>(100, ~uint64_t{0})).SerializeAsString();
  ASSERT_GT(large.size(), 1024u);
  const UniqueFd socket = ConnectRaw();  // a single connection for all: no packet upsets the connection
  for (const std::string& packet : {no_token.SerializeAsString(), no_call.SerializeAsString(), large,
                                    std::string(17, '\xff'), std::string(100'000, '\0')}) {
    ASSERT_EQ(send(socket.get(), packet.data(), packet.size(), MSG_NOSIGNAL), static_cast<ssize_t>(packet.size()));
    const std::string answer = Receive(socket);
    ASSERT_FALSE(answer.empty());
    EXPECT_EQ(answer[0], static_cast<char>(StatusCode::kInvalidArgument));
    EXPECT_THAT(answer, HasSubstr("a SegmentCall of at most 1024"));
  }
  Send(socket, ToLease({2_MiB}));
  EXPECT_TRUE(ReceiveResult(socket).has_leased());
}

// ---- Clients that do not wait for their answers ----

TEST_F(SegmentCallsTest, WhatIsLeasedForAClientThatDoesNotReadIsTakenBack) {
  Open({.http = true});
  const UniqueFd socket = ConnectRaw();
  ASSERT_EQ(shutdown(socket.get(), SHUT_RD), 0);
  Send(socket, ToLease({2_MiB}));
  EXPECT_TRUE(WaitFor([&] {
    return daemon_->Metrics().Sum("vrambroker_rpc_requests_total",
                                  {{"method", "Session.LeaseSegments"}, {"code", "CANCELLED"}}) == 1;
  }));
  EXPECT_TRUE(WaitFor([&] { return Reserved() == 0; }));
}

TEST_F(SegmentCallsTest, ACallUnderWayKeepsNoDescriptorOfAClientThatHasGone) {
  HOST_DEVICE_ONLY();  // the test slows the host driver
  Open({.config = "host_driver_latency: \"1s\"", .http = true});
  const auto descriptors = [&] {
    const std::filesystem::directory_iterator files(absl::StrCat("/proc/", daemon_->process().pid(), "/fd"));
    return std::distance(begin(files), end(files));
  };
  const auto before = descriptors();
  // Closes each connection at once. Sizes differ, so that no returned segment serves a later call.
  for (uint64_t i = 1; i <= 10; ++i) Send(ConnectRaw(), ToLease({i * 2_MiB}));
  // The driver serves one call at a time: meanwhile there are more calls than descriptors.
  EXPECT_TRUE(WaitFor([&] {
    const double calls = daemon_->Metrics().Sum("vrambroker_rpc_in_flight", {{"method", "Session.LeaseSegments"}});
    return calls > 3 + static_cast<double>(descriptors() - before);
  }));
}

// The answer may come just as the client gives up. Then either the client or the daemon has the segment.
TEST_F(SegmentCallsTest, CallsThatTimeOutLeaveNothing) {
  Open();
  DescriptorChannel hasty(dir());
  int leases = 0;
  for (int i = 0; i < 600; ++i) {
    const absl::StatusOr<DescriptorChannel::Answer> answer =
        hasty.Call(ToLease({2_MiB}), absl::Microseconds(10 * (i % 30)));
    if (!answer.ok() || !answer->result.has_leased()) continue;
    ++leases;
    EXPECT_OK(ErrorOf(ToReturn({answer->result.leased().segments(0).segment_id()})));
  }
  EXPECT_TRUE(WaitFor([&] { return Reserved() == 0; })) << Reserved() << " after " << leases << " leases";
}

TEST_F(SegmentCallsTest, AConnectionHasOneCallUnderWay) {
  Open({.config = "host_driver_latency: \"500ms\""});
  const UniqueFd socket = ConnectRaw();
  Send(socket, ToLease({2_MiB}));
  Send(socket, ToLease({2_MiB}));
  const v1::CallResult first = ReceiveResult(socket);
  if (first.has_leased()) {  // the driver was faster than the second packet
    // A second packet read after this answer is an ordinary call; otherwise the daemon closes the connection.
    const bool is_closed = Receive(socket).empty();
    EXPECT_EQ(Reserved(), is_closed ? 2_MiB : 4_MiB);
    return;
  }
  EXPECT_EQ(first.error().code(), static_cast<int>(StatusCode::kFailedPrecondition)) << first.DebugString();
  EXPECT_TRUE(ReceiveResult(socket).has_leased());
  EXPECT_EQ(Reserved(), 2_MiB);
}

TEST_F(SegmentCallsTest, AConnectionWhoseAnswersNobodyReadsIsClosed) {
  Open();
  const UniqueFd socket = ConnectRaw();
  const auto await = [&](int16_t event) {
    pollfd polled = {.fd = socket.get(), .events = event, .revents = 0};
    return poll(&polled, 1, static_cast<int>(absl::ToInt64Milliseconds(kPatience))) == 1;
  };
  Send(socket, ToLease({2_MiB}));
  ASSERT_TRUE(await(POLLIN));
  Send(socket, ToLease({2_MiB}));
  ASSERT_TRUE(await(POLLRDHUP));
  EXPECT_TRUE(ReceiveResult(socket).has_leased());
  EXPECT_EQ(Receive(socket), "");
  EXPECT_EQ(Reserved(), 2_MiB);
}

TEST_F(SegmentCallsTest, AFloodHarmsNobody) {
  Open();
  std::vector<std::thread> flooding;
  for (int i = 0; i < 8; ++i) {
    flooding.emplace_back([&, i] {
      DescriptorChannel channel(dir());
      for (int k = 0; k < 500; ++k) {
        (void)channel.Call(i % 2 == 0 ? ToLease({2_MiB}) : ToReturn(std::vector<uint64_t>(64, 1'000'000)), kPatience);
        const UniqueFd unread = ConnectRaw();
        for (int n = 0; n < 3; ++n) (void)send(unread.get(), "xxxxxxxxxxxxxxxxxxxx", 20, MSG_NOSIGNAL | MSG_DONTWAIT);
      }
    });
  }
  ExpectUnharmed();
  for (std::thread& thread : flooding) thread.join();
}

}  // namespace
}  // namespace vrambroker::testing_support
