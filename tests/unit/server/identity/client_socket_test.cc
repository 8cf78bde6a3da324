// SPDX-License-Identifier: Apache-2.0
//
// Tests of sockets whose kernel does not refuse descriptors, or was not asked to refuse descriptors.
#include "server/identity/client_socket.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <optional>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/identity/unix_socket.h"
#include "tests/support/unix_client.h"

namespace vrambroker {
namespace {

using testing_support::ConnectUnix;
using testing_support::KernelRefusesDescriptors;
using testing_support::SendWithDescriptor;

class ClientSocketTest : public testing::Test {
 protected:
  void Connect(int type) {
    std::array<int, 2> ends = {-1, -1};
    ASSERT_EQ(socketpair(AF_UNIX, type | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends.data()), 0);
    client_ = UniqueFd(ends[0]);
    socket_.emplace(UniqueFd(ends[1]));
  }
  void Send(absl::string_view bytes, int flags = 0) {
    ASSERT_EQ(send(client_.get(), bytes.data(), bytes.size(), flags), static_cast<ssize_t>(bytes.size()));
  }
  std::string Receive() {
    std::string text(100, '\0');
    const ssize_t count = socket_->Receive(text.data(), text.size());
    if (count < 0) return std::strerror(errno);
    text.resize(count);
    return text;
  }
  static std::string Error(int number) { return std::strerror(number); }

  UniqueFd client_;
  std::optional<ClientSocket> socket_;
};

TEST_F(ClientSocketTest, ReadsBytes) {
  Connect(SOCK_STREAM);
  EXPECT_EQ(Receive(), Error(EAGAIN));
  Send("one");
  Send("two");
  EXPECT_EQ(Receive(), "onetwo");
  Send("last");
  client_.Reset();
  EXPECT_EQ(Receive(), "last");
  EXPECT_EQ(Receive(), "");
}

TEST_F(ClientSocketTest, ReadsPackets) {
  Connect(SOCK_SEQPACKET);
  Send("one");
  Send("");
  Send("two");
  EXPECT_EQ(Receive(), "one");
  EXPECT_EQ(Receive(), "");
  EXPECT_EQ(Receive(), "two");
}

TEST_F(ClientSocketTest, ReadsNothingWithADescriptor) {
  Connect(SOCK_STREAM);
  Send("before");
  ASSERT_EQ(SendWithDescriptor(client_.get(), "x", client_.get()), 1);
  EXPECT_EQ(Receive(), Error(EPROTO));
  EXPECT_EQ(Receive(), Error(EPROTO));
  Connect(SOCK_SEQPACKET);
  ASSERT_EQ(SendWithDescriptor(client_.get(), "", client_.get()), 0);
  EXPECT_EQ(Receive(), Error(EPROTO));
}

TEST_F(ClientSocketTest, ReadsNoUrgentData) {
  Connect(SOCK_STREAM);
  if (send(client_.get(), "x", 1, MSG_OOB) < 0) GTEST_SKIP() << "the kernel has none for unix sockets";
  EXPECT_EQ(Receive(), Error(EPROTO));
  Connect(SOCK_STREAM);
  Send("before");
  ASSERT_EQ(SendWithDescriptor(client_.get(), "x", client_.get(), MSG_OOB), 1);
  EXPECT_EQ(Receive(), Error(EPROTO));
}

// Holds a TCP socket that takes an hour to close: the peer does not read the written bytes.
class Slow {
 public:
  Slow() {
    const UniqueFd listener(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_in address = {.sin_family = AF_INET, .sin_port = 0, .sin_addr = {htonl(INADDR_LOOPBACK)}, .sin_zero = {}};
    socklen_t size = sizeof address;
    EXPECT_EQ(bind(listener.get(), reinterpret_cast<const sockaddr*>(&address), size), 0);
    EXPECT_EQ(getsockname(listener.get(), reinterpret_cast<sockaddr*>(&address), &size), 0);
    EXPECT_EQ(listen(listener.get(), 1), 0);
    fd_ = UniqueFd(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    EXPECT_EQ(connect(fd_.get(), reinterpret_cast<const sockaddr*>(&address), size), 0);
    reader_ = UniqueFd(accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
    const linger linger = {.l_onoff = 1, .l_linger = 3600};  // in seconds; ctest gives up long before
    EXPECT_EQ(setsockopt(fd_.get(), SOL_SOCKET, SO_LINGER, &linger, sizeof linger), 0);
    EXPECT_EQ(fcntl(fd_.get(), F_SETFL, O_NONBLOCK), 0);
    const std::string bytes(1 << 16, 'x');
    while (send(fd_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL) > 0) {
    }
  }
  ~Slow() {
    if (!fd_.valid()) return;
    const linger none = {};
    setsockopt(fd_.get(), SOL_SOCKET, SO_LINGER, &none, sizeof none);
  }

  // Sends the descriptor; only the receiver has the descriptor afterwards.
  void SendOver(int socket, int flags = 0) {
    ASSERT_EQ(SendWithDescriptor(socket, "x", fd_.get(), flags), 1) << std::strerror(errno);
    fd_.Reset();
  }
  // Reads until the socket is closed.
  void ReadAll() const {
    std::string bytes(1 << 16, '\0');
    while (recv(reader_.get(), bytes.data(), bytes.size(), 0) > 0) {
    }
  }

 private:
  UniqueFd fd_;
  UniqueFd reader_;
};

// A separate thread must close the descriptor. Without the thread, a test hangs: the test closes the descriptor itself,
// and reads only afterwards.
class SlowDescriptorTest : public ClientSocketTest {
 protected:
  Slow slow_;
};

TEST_F(SlowDescriptorTest, ClosesWithoutWaiting) {
  Connect(SOCK_STREAM);
  slow_.SendOver(client_.get());
  EXPECT_EQ(Receive(), Error(EPROTO));
  socket_.reset();
  slow_.ReadAll();
  EXPECT_EQ(send(client_.get(), "x", 1, MSG_NOSIGNAL), -1);
}

TEST_F(SlowDescriptorTest, AlsoBehindBytes) {
  Connect(SOCK_STREAM);
  Send(std::string(20'000, 'x'));
  slow_.SendOver(client_.get());
  socket_.reset();
  slow_.ReadAll();
}

TEST_F(SlowDescriptorTest, AlsoBehindPackets) {
  Connect(SOCK_SEQPACKET);
  Send("");
  Send("packet");
  slow_.SendOver(client_.get());
  socket_.reset();
  slow_.ReadAll();
}

TEST_F(SlowDescriptorTest, AlsoWithUrgentData) {
  Connect(SOCK_STREAM);
  if (send(client_.get(), "x", 1, MSG_OOB) < 0) GTEST_SKIP() << "the kernel has none for unix sockets";
  slow_.SendOver(client_.get(), MSG_OOB);
  socket_.reset();
  slow_.ReadAll();
}

TEST_F(SlowDescriptorTest, AlsoOfConnectionsThatWereNotAccepted) {
  const std::string path = absl::StrCat(testing::TempDir(), "/client_socket_test.", getpid());
  UniqueFd listener(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  sockaddr_un address = {.sun_family = AF_UNIX};
  std::memcpy(address.sun_path, path.data(), std::min(path.size(), sizeof address.sun_path - 1));
  ASSERT_EQ(bind(listener.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address), 0);
  ASSERT_EQ(listen(listener.get(), 1), 0);
  socket_.emplace(std::move(listener));
  client_ = ConnectUnix(path, SOCK_STREAM);
  unlink(path.c_str());
  slow_.SendOver(client_.get());
  socket_.reset();
  slow_.ReadAll();
}

TEST_F(SlowDescriptorTest, OtherDescriptorsStayOpen) {
  Connect(SOCK_STREAM);
  ClientSocket other = *std::exchange(socket_, std::nullopt);
  UniqueFd others_client = std::move(client_);
  Connect(SOCK_STREAM);
  slow_.SendOver(client_.get());
  socket_.reset();
  slow_.ReadAll();
  ASSERT_EQ(send(others_client.get(), "x", 1, MSG_NOSIGNAL), 1);
  socket_ = std::move(other);
  EXPECT_EQ(Receive(), "x");
}

TEST(ListenUnixTest, ConnectionsBringNoDescriptorsWhereTheKernelRefusesThem) {
  const std::string path = absl::StrCat(testing::TempDir(), "/listen_unix_test.", getpid());
  for (const int type : {SOCK_STREAM, SOCK_SEQPACKET}) {
    const absl::StatusOr<ClientSocket> listener = ListenUnix(path, type, 0600);
    ASSERT_TRUE(listener.ok()) << listener.status();
    const UniqueFd client = ConnectUnix(path, type);
    unlink(path.c_str());
    ASSERT_TRUE(client.valid());
    if (!KernelRefusesDescriptors(listener->get())) GTEST_SKIP() << "needs Linux 6.16";
    EXPECT_EQ(SendWithDescriptor(client.get(), "x", client.get()), -1);
    EXPECT_EQ(errno, EPERM);
    Acceptor acceptor;
    const ClientSocket accepted = acceptor.Accept(listener->get());
    ASSERT_TRUE(accepted.valid());
    EXPECT_EQ(SendWithDescriptor(client.get(), "x", client.get()), -1);
  }
}

}  // namespace
}  // namespace vrambroker
