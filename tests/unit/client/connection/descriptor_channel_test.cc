// SPDX-License-Identifier: Apache-2.0
//
// DescriptorChannel against a descriptor socket, with the test at the other end.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/connection/descriptor_channel.h"

namespace vrambroker::client_internal {
namespace {

using ::testing::HasSubstr;

constexpr absl::Duration kLong = absl::Seconds(60);

// Returns a file with `text`, like a daemon's answer to the ticket `text`.
UniqueFd FileWith(const std::string& text) {
  UniqueFd fd(memfd_create("answer", MFD_CLOEXEC));
  EXPECT_EQ(write(fd.get(), text.data(), text.size()), static_cast<ssize_t>(text.size()));
  return fd;
}

std::string TextIn(const UniqueFd& fd) {
  std::array<char, 64> text;
  const ssize_t size = pread(fd.get(), text.data(), text.size(), 0);
  return size < 0 ? "unreadable" : std::string(text.data(), static_cast<size_t>(size));
}

class DescriptorChannelTest : public ::testing::Test {
 protected:
  DescriptorChannelTest() {
    std::string name = ::testing::TempDir() + "/vrambroker_channel_XXXXXX";
    EXPECT_NE(mkdtemp(name.data()), nullptr);
    dir_ = name;
    Listen();
  }
  ~DescriptorChannelTest() override { std::filesystem::remove_all(dir_); }

  // Starts a daemon, perhaps after an earlier daemon.
  void Listen() {
    sockaddr_un address = {};
    address.sun_family = AF_UNIX;
    const std::string path = dir_ + "/vrambroker-fd.sock";
    ASSERT_LT(path.size(), sizeof address.sun_path);
    std::memcpy(address.sun_path, path.c_str(), path.size());
    unlink(path.c_str());
    listener_ = UniqueFd(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
    ASSERT_EQ(bind(listener_.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address), 0);
    ASSERT_EQ(listen(listener_.get(), 64), 0);
  }
  UniqueFd Accept() const { return UniqueFd(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC)); }
  bool AnotherConnects() const {
    const int flags = fcntl(listener_.get(), F_GETFL);
    fcntl(listener_.get(), F_SETFL, flags | O_NONBLOCK);
    const bool connects = Accept().valid();
    fcntl(listener_.get(), F_SETFL, flags);
    return connects;
  }

  // Returns the next packet on a connection; empty if the client has closed the connection.
  static std::string NextPacket(const UniqueFd& connection) {
    std::array<char, 64> packet;
    const ssize_t size = recv(connection.get(), packet.data(), packet.size(), 0);
    return size <= 0 ? "" : std::string(packet.data(), static_cast<size_t>(size));
  }
  static void Send(const UniqueFd& connection, std::string packet, const UniqueFd& descriptor = UniqueFd()) {
    iovec data = {.iov_base = packet.data(), .iov_len = packet.size()};
    msghdr message = {};
    message.msg_iov = &data;
    message.msg_iovlen = 1;
    alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> control = {};
    if (descriptor.valid()) {
      message.msg_control = control.data();
      message.msg_controllen = control.size();
      cmsghdr* header = CMSG_FIRSTHDR(&message);
      header->cmsg_level = SOL_SOCKET;
      header->cmsg_type = SCM_RIGHTS;
      header->cmsg_len = CMSG_LEN(sizeof(int));
      const int fd = descriptor.get();
      std::memcpy(CMSG_DATA(header), &fd, sizeof fd);
    }
    (void)sendmsg(connection.get(), &message, MSG_NOSIGNAL);  // client may be gone
  }
  // Answers the next ticket with a file containing the ticket.
  static void Serve(const UniqueFd& connection) {
    const std::string ticket = NextPacket(connection);
    Send(connection, std::string(1, '\0'), FileWith(ticket));
  }

  void ExpectFetches(const std::string& ticket) {
    const absl::StatusOr<UniqueFd> fd = channel().Fetch(ticket, kLong);
    ASSERT_TRUE(fd.ok()) << fd.status();
    EXPECT_EQ(TextIn(*fd), ticket);
    EXPECT_NE(fcntl(fd->get(), F_GETFD) & FD_CLOEXEC, 0);
  }
  DescriptorChannel& channel() {
    if (channel_ == nullptr) channel_ = std::make_unique<DescriptorChannel>(dir_);
    return *channel_;
  }

  std::string dir_;
  UniqueFd listener_;
  std::unique_ptr<DescriptorChannel> channel_;
};

TEST_F(DescriptorChannelTest, KeepsItsConnection) {
  std::thread daemon([this] {
    const UniqueFd connection = Accept();
    for (int i = 0; i < 3; ++i) Serve(connection);
    EXPECT_EQ(NextPacket(connection), "") << "closed with the channel";
  });
  for (const char* ticket : {"first", "second", "third"}) ExpectFetches(ticket);
  channel_.reset();
  daemon.join();
  EXPECT_FALSE(AnotherConnects());
}

TEST_F(DescriptorChannelTest, RefusalsCarryTheReasonAndLeaveTheConnection) {
  std::thread daemon([this] {
    const UniqueFd connection = Accept();
    for (const char* reason : {"the ticket was issued to another process", ""}) {
      NextPacket(connection);
      Send(connection, absl::StrCat("\x01", reason));
    }
    NextPacket(connection);
    Send(connection, std::string("\x01") + "and a descriptor", FileWith("not for anyone"));
    NextPacket(connection);
    Send(connection, std::string(1, '\0'));
    Serve(connection);
  });
  EXPECT_EQ(channel().Fetch("a", kLong).status(),
            absl::InternalError("descriptor socket: the ticket was issued to another process"));
  EXPECT_EQ(channel().Fetch("b", kLong).status(), absl::InternalError("descriptor socket: "));
  EXPECT_EQ(channel().Fetch("c", kLong).status(), absl::InternalError("descriptor socket: and a descriptor"));
  const absl::Status nothing = channel().Fetch("d", kLong).status();
  EXPECT_TRUE(absl::IsInternal(nothing)) << nothing;
  EXPECT_THAT(std::string(nothing.message()), HasSubstr("no descriptor arrived"));
  ExpectFetches("e");
  daemon.join();
}

// A daemon gives the same answer after a restart between the lease and the ticket.
TEST_F(DescriptorChannelTest, ATicketThatTheDaemonDoesNotKnowMeansThatTheLeaseIsGone) {
  std::thread daemon([this] {
    const UniqueFd connection = Accept();
    NextPacket(connection);
    Send(connection, absl::StrCat(std::string(1, static_cast<char>(absl::StatusCode::kNotFound)), "no such ticket"));
  });
  const absl::Status status = channel().Fetch("a", kLong).status();
  EXPECT_TRUE(absl::IsUnavailable(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("the daemon has restarted"));
  daemon.join();
}

TEST_F(DescriptorChannelTest, ConnectsAgainWhenTheConnectionWasClosed) {
  UniqueFd connection;
  std::thread daemon([&] {
    connection = Accept();
    Serve(connection);
  });
  ExpectFetches("before");
  daemon.join();
  connection.Reset();  // daemon closes the silent connection
  daemon = std::thread([&] {
    connection = Accept();
    Serve(connection);
  });
  ExpectFetches("after");
  daemon.join();
}

TEST_F(DescriptorChannelTest, ConnectsAgainWhenItIsClosedWithTheTicketUnread) {
  std::thread daemon([this] {
    UniqueFd connection = Accept();
    Serve(connection);
    std::array<char, 1> some;
    EXPECT_EQ(recv(connection.get(), some.data(), 1, MSG_PEEK), 1);
    connection.Reset();
    Serve(Accept());
  });
  ExpectFetches("before");
  ExpectFetches("after");
  daemon.join();
}

TEST_F(DescriptorChannelTest, ConnectsOnceAgainAndNoMore) {
  std::thread daemon([this] {
    UniqueFd connection = Accept();
    Serve(connection);
    connection.Reset();
    connection = Accept();
    NextPacket(connection);
  });
  ExpectFetches("before");
  EXPECT_EQ(channel().Fetch("after", kLong).status(),
            absl::UnavailableError("descriptor socket: the daemon closed the connection"));
  daemon.join();
  EXPECT_FALSE(AnotherConnects());
}

TEST_F(DescriptorChannelTest, FindsADaemonThatWasRestarted) {
  std::thread daemon([this] { Serve(Accept()); });
  ExpectFetches("of the first");
  daemon.join();
  listener_.Reset();
  const absl::Status gone = channel().Fetch("meanwhile", kLong).status();
  EXPECT_TRUE(absl::IsUnavailable(gone)) << gone;
  EXPECT_THAT(std::string(gone.message()), HasSubstr("nobody listens on"));
  Listen();
  daemon = std::thread([this] { Serve(Accept()); });
  ExpectFetches("of the second");
  daemon.join();
}

TEST_F(DescriptorChannelTest, ALateAnswerIsNobodyElses) {
  for (const bool kept : {false, true}) {
    SCOPED_TRACE(kept ? "on the kept connection" : "on a new connection");
    channel_.reset();
    UniqueFd slow;
    std::thread daemon([&] {
      slow = Accept();
      if (kept) Serve(slow);
      EXPECT_EQ(NextPacket(slow), "late");
    });
    if (kept) ExpectFetches("before");
    const absl::Status status = channel().Fetch("late", absl::Milliseconds(20)).status();
    EXPECT_EQ(status, absl::DeadlineExceededError("the daemon did not answer within 20ms (descriptor socket)"));
    daemon.join();
    Send(slow, std::string(1, '\0'), FileWith("late"));
    daemon = std::thread([this] { Serve(Accept()); });
    ExpectFetches("next");
    daemon.join();
    EXPECT_EQ(NextPacket(slow), "") << "closed by the client";
  }
}

TEST_F(DescriptorChannelTest, ThreadsDoNotWaitForEachOther) {
  constexpr int kThreads = 8;
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([i, &channel = channel()] {
      const std::string ticket = absl::StrCat("ticket ", i);
      const absl::StatusOr<UniqueFd> fd = channel.Fetch(ticket, kLong);
      ASSERT_TRUE(fd.ok()) << fd.status();
      EXPECT_EQ(TextIn(*fd), ticket) << "its own, not another thread's";
    });
  }
  std::vector<std::pair<UniqueFd, std::string>> asking;
  for (int i = 0; i < kThreads; ++i) {  // all threads ask before the first answer
    UniqueFd connection = Accept();
    std::string ticket = NextPacket(connection);
    asking.push_back({std::move(connection), std::move(ticket)});
  }
  for (const auto& [connection, ticket] : asking) Send(connection, std::string(1, '\0'), FileWith(ticket));
  for (std::thread& thread : threads) thread.join();
}

TEST_F(DescriptorChannelTest, SaysThatThereIsNoDaemon) {
  DescriptorChannel nowhere(dir_ + "/none");
  const absl::Status status = nowhere.Fetch("t", kLong).status();
  EXPECT_TRUE(absl::IsUnavailable(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("no vrambrokerd: there is no socket"));
}

// ---- Calls ----

v1::SegmentCall AnyCall(uint64_t id) {
  v1::SegmentCall call;
  call.mutable_return_segments()->add_segment_ids(id);
  return call;
}

std::string Leased(uint64_t id) {
  v1::CallResult result;
  result.mutable_leased()->add_segments()->set_segment_id(id);
  return result.SerializeAsString();
}

TEST_F(DescriptorChannelTest, ACallBringsItsDescriptorAlong) {
  std::thread daemon([this] {
    const UniqueFd connection = Accept();
    for (const uint64_t id : {5, 6}) {
      v1::SegmentCall call;
      EXPECT_TRUE(call.ParseFromString(NextPacket(connection)));
      EXPECT_EQ(call.return_segments().segment_ids(0), id);
      Send(connection, Leased(id), id == 5 ? FileWith("of five") : UniqueFd());
    }
    Serve(connection);
  });
  absl::StatusOr<DescriptorChannel::Answer> answer = channel().Call(AnyCall(5), kLong);
  ASSERT_TRUE(answer.ok()) << answer.status();
  EXPECT_EQ(answer->result.leased().segments(0).segment_id(), 5u);
  ASSERT_EQ(answer->descriptors.size(), 1u);
  EXPECT_EQ(TextIn(answer->descriptors[0]), "of five");
  EXPECT_NE(fcntl(answer->descriptors[0].get(), F_GETFD) & FD_CLOEXEC, 0);
  answer = channel().Call(AnyCall(6), kLong);
  ASSERT_TRUE(answer.ok()) << answer.status();
  EXPECT_TRUE(answer->descriptors.empty());
  ExpectFetches("a ticket over the same connection");
  daemon.join();
}

TEST_F(DescriptorChannelTest, TellsACallThatIsNotTakenFromAnAnswerThatIsNotReadable) {
  std::thread daemon([this] {
    const UniqueFd connection = Accept();
    NextPacket(connection);
    Send(connection,
         "\x03"
         "expected a ticket of 16 bytes");
    NextPacket(connection);
    Send(connection, "\x2a\xff");
  });
  const absl::Status not_taken = channel().Call(AnyCall(1), kLong).status();
  EXPECT_TRUE(absl::IsUnavailable(not_taken)) << not_taken;
  const absl::Status not_readable = channel().Call(AnyCall(1), kLong).status();
  EXPECT_TRUE(absl::IsInternal(not_readable)) << not_readable;
  daemon.join();
}

// The notice lets the daemon take back memory leased meanwhile.
TEST_F(DescriptorChannelTest, TheDaemonIsToldThatNobodyWaitsForItsAnswer) {
  UniqueFd connection;
  std::thread daemon([&] {
    connection = Accept();
    NextPacket(connection);
  });
  const absl::Status status = channel().Call(AnyCall(1), absl::Milliseconds(20)).status();
  EXPECT_TRUE(absl::IsDeadlineExceeded(status)) << status;
  daemon.join();
  const std::string late = Leased(1);
  EXPECT_EQ(send(connection.get(), late.data(), late.size(), MSG_NOSIGNAL), -1);
  EXPECT_EQ(errno, EPIPE);
}

TEST_F(DescriptorChannelTest, StopWaitingEndsACallAndAllThatFollow) {
  UniqueFd connection;
  DescriptorChannel& waiting = channel();  // channel is made before two threads use the channel
  std::thread daemon([&] {
    connection = Accept();
    NextPacket(connection);
    waiting.StopWaiting();
  });
  EXPECT_TRUE(absl::IsUnavailable(channel().Call(AnyCall(1), absl::InfiniteDuration()).status()));
  daemon.join();
  const std::string late = Leased(1);
  EXPECT_EQ(send(connection.get(), late.data(), late.size(), MSG_NOSIGNAL), -1);
  EXPECT_TRUE(absl::IsUnavailable(channel().Call(AnyCall(1), absl::InfiniteDuration()).status()));
}

}  // namespace
}  // namespace vrambroker::client_internal
