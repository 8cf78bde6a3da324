// SPDX-License-Identifier: Apache-2.0
//
// Tests of the HTTP server's connections: number, users and duration. http_router_test.cc tests the pages.
#include "server/http/http_server.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <latch>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "allocator/base/unique_fd.h"
#include "server/base/http_address.h"
#include "tests/support/http.h"
#include "tests/support/util.h"

namespace vrambroker {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;
using testing_support::HttpGet;
using testing_support::WaitFor;

class HttpServerTest : public ::testing::Test {
 protected:
  ~HttpServerTest() override { Unblock(); }

  void Start(size_t max_connections, const std::string& address = "127.0.0.1:0") {
    std::vector<HttpPage> pages;
    pages.push_back(
        {.path = "/", .parameters = {}, .answer = [](const HttpParameters&) { return HttpText(200, "hi"); }});
    pages.push_back({.path = "/large", .parameters = {}, .answer = [](const HttpParameters&) {
                       return HttpText(200, std::string(16 << 20, 'x'));
                     }});
    pages.push_back({.path = "/costly",
                     .parameters = {},
                     .answer = [](const HttpParameters&) { return HttpText(200, std::string(16 << 20, 'x')); },
                     .cost = PageCost::kCostly});
    pages.push_back({.path = "/blocked",
                     .parameters = {},
                     .answer =
                         [this](const HttpParameters&) {
                           ++blocked_;
                           blocks_.wait(true);
                           return HttpText(200, "at last");
                         },
                     .cost = PageCost::kCostly});
    pages.push_back({.path = "/alone",
                     .parameters = {},
                     .answer =
                         [this](const HttpParameters&) {
                           EXPECT_EQ(++alone_, 1);
                           ++blocked_;
                           blocks_.wait(true);
                           --alone_;
                           return HttpText(200, "alone");
                         },
                     .cost = PageCost::kLarge});
    absl::StatusOr<std::unique_ptr<HttpServer>> server = HttpServer::Start(
        address, std::move(pages),
        {.max_connections = max_connections, .stats = &figures_, .listens = [this] { listens_.count_down(); }});
    ASSERT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
  }
  int port() const {
    const std::string address = server_->address();
    return std::stoi(address.substr(address.rfind(':') + 1));
  }
  static UniqueFd ConnectTo(int port) {
    UniqueFd fd(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_in address = {};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<uint16_t>(port));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    EXPECT_EQ(connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address), 0);
    return fd;
  }
  UniqueFd Connect(const std::string& request = "") const {
    UniqueFd fd = ConnectTo(port());
    EXPECT_EQ(send(fd.get(), request.data(), request.size(), MSG_NOSIGNAL), static_cast<ssize_t>(request.size()));
    return fd;
  }
  // Opens `number` connections. Each connection asks for the path, and takes one byte of the answer.
  std::vector<UniqueFd> ReadOneByteEach(const std::string& path, int number) const {
    std::vector<UniqueFd> connections;
    for (int i = 0; i < number; ++i) {
      connections.push_back(Connect("GET " + path + " HTTP/1.0\r\n\r\n"));
      char byte = 0;
      EXPECT_EQ(recv(connections.back().get(), &byte, 1, 0), 1);
    }
    return connections;
  }
  // Opens `number` connections of another user, and sends the request on each connection.
  std::vector<UniqueFd> ConnectAs(uid_t uid, int number, const std::string& request = "") const {
    std::vector<UniqueFd> connections;
    std::thread([&] {
      ASSERT_EQ(syscall(SYS_setresuid, -1, uid, -1), 0);  // changes this thread's user only
      for (int i = 0; i < number; ++i) connections.push_back(Connect(request));
    }).join();
    return connections;
  }
  static std::string ReadAll(const UniqueFd& fd) {
    std::string text;
    std::string buffer(1 << 16, '\0');
    for (ssize_t size; (size = recv(fd.get(), buffer.data(), buffer.size(), 0)) > 0;) {
      text.append(buffer, 0, static_cast<size_t>(size));
    }
    return text;
  }
  static bool IsClosed(const UniqueFd& fd) {
    char byte = 0;
    return recv(fd.get(), &byte, 1, MSG_DONTWAIT | MSG_PEEK) >= 0 || errno != EAGAIN;
  }
  uint64_t dropped(HttpDrop reason) const { return figures_.dropped[static_cast<size_t>(reason)]; }

  // Lets waiting requests for /blocked and /alone go on.
  void Unblock() {
    blocks_ = false;
    blocks_.notify_all();
  }

  HttpStats figures_;
  std::latch listens_{1};
  std::atomic<bool> blocks_ = true;
  std::atomic<int> blocked_ = 0;
  std::atomic<int> alone_ = 0;
  std::unique_ptr<HttpServer> server_;
};

TEST_F(HttpServerTest, SilentConnectionsAreBoundedAndTheOldestMakesRoom) {
  Start(64);
  std::vector<UniqueFd> silent;
  for (int i = 0; i < 200; ++i) {
    silent.push_back(Connect());
    ASSERT_EQ(HttpGet(port(), "/")->body, "hi") << i;
    EXPECT_LE(figures_.connections, 64u);
  }
  EXPECT_TRUE(IsClosed(silent.front()));
  EXPECT_FALSE(IsClosed(silent.back()));
  EXPECT_GT(dropped(HttpDrop::kTooMany), 100u);
}

// Covers also an IPv4 connection to an IPv6 socket.
TEST_F(HttpServerTest, APeerOfThisMachineIsItsUser) {
  for (const char* host : {"127.0.0.1", "::"}) {
    const absl::StatusOr<SocketAddress> any = Resolve({.host = host, .port = 0});
    const absl::StatusOr<UniqueFd> listener = any.ok() ? ListenHttp(*any) : any.status();
    if (!listener.ok()) GTEST_SKIP() << "no IPv6: " << listener.status();
    const UniqueFd client = ConnectTo(AddressOf(*listener).port());
    const UniqueFd accepted(accept4(listener->get(), nullptr, nullptr, SOCK_CLOEXEC));
    const std::string peer = HttpPeer(accepted.get());
    if (peer == "127.0.0.1") GTEST_SKIP() << "the kernel does not tell whose sockets are";
    EXPECT_EQ(peer, absl::StrCat("uid ", geteuid())) << host;
  }
}

TEST_F(HttpServerTest, ConnectionsGoByTheUserAtTheOtherEnd) {
  if (geteuid() != 0) GTEST_SKIP() << "only root can become another user";
  Start(64);
  const UniqueFd own = Connect();
  const std::vector<UniqueFd> others = ConnectAs(65534, 200);
  EXPECT_TRUE(WaitFor([&] { return dropped(HttpDrop::kTooMany) > 100; }));
  EXPECT_FALSE(IsClosed(own)) << "another user's share was full, not this one's";
}

// The kernel names no user for a client that has closed its end. All such clients are one peer, whatever address each
// client uses.
TEST_F(HttpServerTest, APeerOfThisMachineWithoutANameIsNoOtherPeerForEachOfItsAddresses) {
  const absl::StatusOr<SocketAddress> any = Resolve({.host = "127.0.0.1", .port = 0});
  const absl::StatusOr<UniqueFd> listener = any.ok() ? ListenHttp(*any) : any.status();
  ASSERT_TRUE(listener.ok()) << listener.status();
  for (const char* from : {"127.0.0.1", "127.0.0.2", "127.1.2.3"}) {
    const absl::StatusOr<SocketAddress> own = Resolve({.host = from, .port = 0});
    ASSERT_TRUE(own.ok()) << own.status();
    UniqueFd client(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    ASSERT_EQ(bind(client.get(), own->get(), own->size), 0);
    const SocketAddress to = AddressOf(*listener);
    ASSERT_EQ(connect(client.get(), to.get(), to.size), 0);
    client.Reset();
    const UniqueFd accepted(accept4(listener->get(), nullptr, nullptr, SOCK_CLOEXEC));
    EXPECT_EQ(HttpPeer(accepted.get()), "this machine") << from;
  }
}

// The server looks up each connection's user anew: the user is known once the kernel answers again.
TEST_F(HttpServerTest, APeerThatCouldNotBeFoundIsFoundTheNextTime) {
  const absl::StatusOr<SocketAddress> any = Resolve({.host = "127.0.0.1", .port = 0});
  const absl::StatusOr<UniqueFd> listener = any.ok() ? ListenHttp(*any) : any.status();
  ASSERT_TRUE(listener.ok()) << listener.status();
  const UniqueFd client = ConnectTo(AddressOf(*listener).port());
  const UniqueFd accepted(accept4(listener->get(), nullptr, nullptr, SOCK_CLOEXEC));
  const std::string known = HttpPeer(accepted.get());
  rlimit files = {};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &files), 0);
  rlimit none = files;
  none.rlim_cur = 0;
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &none), 0);
  const std::string unknown = HttpPeer(accepted.get());
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &files), 0);
  EXPECT_EQ(unknown, "this machine");
  EXPECT_EQ(HttpPeer(accepted.get()), known);
}

// A user has a share of the places for making costly pages. A page of another user takes a place beside that share.
TEST_F(HttpServerTest, CostlyPagesOfOneUserDoNotKeepThoseOfAnotherWaiting) {
  if (geteuid() != 0) GTEST_SKIP() << "only root can become another user";
  Start(512);
  const std::vector<UniqueFd> others = ConnectAs(65534, 20, "GET /blocked HTTP/1.0\r\n\r\n");
  EXPECT_TRUE(WaitFor([&] { return blocked_ >= 3; }));
  EXPECT_EQ(HttpGet(port(), "/costly")->code, 200);
  EXPECT_EQ(HttpGet(port(), "/")->code, 200);
  EXPECT_EQ(blocked_, 3) << "of six places";
  Unblock();
}

// Two users together have all places. Waiting users then take turns, however many requests a user has sent before.
TEST_F(HttpServerTest, UsersTakeTurnsWhereAllPlacesAreTaken) {
  if (geteuid() != 0) GTEST_SKIP() << "only root can become another user";
  Start(512);
  const std::vector<UniqueFd> first = ConnectAs(65534, 10, "GET /blocked HTTP/1.0\r\n\r\n");
  const std::vector<UniqueFd> second = ConnectAs(65533, 10, "GET /blocked HTTP/1.0\r\n\r\n");
  EXPECT_TRUE(WaitFor([&] { return blocked_ == 6; }));
  const UniqueFd own = Connect("GET /costly HTTP/1.0\r\n\r\n");
  EXPECT_EQ(HttpGet(port(), "/")->code, 200) << "the request before it has arrived";
  Unblock();
  EXPECT_THAT(ReadAll(own), StartsWith("HTTP/1.1 200 OK\r\n"));
  EXPECT_THAT(ReadAll(first.back()), HasSubstr("at last"));
  EXPECT_THAT(ReadAll(second.back()), HasSubstr("at last"));
}

// A place is for making a page: a client that does not read its finished page holds no place.
TEST_F(HttpServerTest, WhoDoesNotReadCostlyPagesTakesNoPlace) {
  Start(512);
  const std::vector<UniqueFd> slow = ReadOneByteEach("/costly", 6);
  EXPECT_EQ(HttpGet(port(), "/costly")->code, 200);
  EXPECT_EQ(dropped(HttpDrop::kTooMany), 0u) << "they could still read";
}

TEST_F(HttpServerTest, LargePagesAreMadeOneAtATime) {
  Start(512);
  std::vector<UniqueFd> asking;
  for (int i = 0; i < 5; ++i) asking.push_back(Connect("GET /alone HTTP/1.0\r\n\r\n"));
  EXPECT_TRUE(WaitFor([&] { return blocked_ == 1; }));
  EXPECT_EQ(HttpGet(port(), "/costly")->code, 200) << "others are made beside them";
  Unblock();
  for (const UniqueFd& each : asking) EXPECT_THAT(ReadAll(each), HasSubstr("alone"));
  EXPECT_EQ(blocked_, 5);
}

TEST_F(HttpServerTest, StopsWhileCostlyPagesWaitForTheirTurn) {
  Start(512);
  const UniqueFd silent = Connect();
  std::vector<UniqueFd> waiting;
  for (int i = 0; i < 10; ++i) waiting.push_back(Connect("GET /blocked HTTP/1.0\r\n\r\n"));
  EXPECT_TRUE(WaitFor([&] { return figures_.connections == 11; }));
  EXPECT_TRUE(WaitFor([&] { return blocked_ >= 3; }));
  Unblock();
  server_.reset();
  EXPECT_EQ(figures_.connections, 0u);
}

// Pages take memory until clients read them. With 64 connections, answers have 64 MiB, and a peer's share is half.
TEST_F(HttpServerTest, AnswersThatNobodyReadsAreBoundedAndTheOldestMakesRoom) {
  Start(64);
  std::vector<UniqueFd> slow;
  for (int i = 0; i < 8; ++i) {
    slow.push_back(Connect("GET /large HTTP/1.0\r\n\r\n"));
    char byte = 0;
    ASSERT_EQ(recv(slow.back().get(), &byte, 1, 0), 1);  // reads no further byte
    ASSERT_EQ(HttpGet(port(), "/")->body, "hi") << i;
  }
  EXPECT_TRUE(WaitFor([&] { return dropped(HttpDrop::kTooMany) >= 4; }));
}

TEST_F(HttpServerTest, WhatIsNoRequestIsRefused) {
  Start(64);
  EXPECT_THAT(ReadAll(Connect("nonsense\r\n\r\n")), StartsWith("HTTP/1.1 400 Bad Request\r\n"));
  EXPECT_THAT(ReadAll(Connect("GET / HTTP/1.1\r\nX: " + std::string(20000, 'x') + "\r\n\r\n")),
              StartsWith("HTTP/1.1 431 "));
  EXPECT_THAT(ReadAll(Connect("GET http://localhost/ HTTP/1.1\r\nHost: a\r\n\r\n")), StartsWith("HTTP/1.1 200 OK\r\n"));
  EXPECT_THAT(ReadAll(Connect("GET http://evil.example/ HTTP/1.1\r\nHost: localhost\r\n\r\n")),
              StartsWith("HTTP/1.1 403 "));
  EXPECT_THAT(ReadAll(Connect("GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n")),
              AllOf(StartsWith("HTTP/1.1 400 "), HasSubstr("the request has 2 Host headers; send one")));
  EXPECT_THAT(ReadAll(Connect("GET / HTTP/1.1\r\n\r\n")),
              AllOf(StartsWith("HTTP/1.1 400 "), HasSubstr("the request has no Host header")));
  // The unread body does not keep the answer from its client.
  EXPECT_THAT(ReadAll(Connect("POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999\r\n\r\n" +
                              std::string(100000, 'x'))),
              StartsWith("HTTP/1.1 405 "));
}

TEST_F(HttpServerTest, APortThatIsTakenIsTriedAgain) {
  const absl::StatusOr<SocketAddress> any = Resolve({.host = "127.0.0.1", .port = 0});
  ASSERT_TRUE(any.ok());
  absl::StatusOr<UniqueFd> taken = ListenHttp(*any);
  ASSERT_TRUE(taken.ok());
  Start(64, AddressOf(*taken).text());
  EXPECT_FALSE(server_->listening());
  EXPECT_EQ(server_->address(), AddressOf(*taken).text());
  EXPECT_GE(figures_.listen_failures, 1u);
  taken->Reset();
  EXPECT_TRUE(WaitFor([&] { return listens_.try_wait(); }));
  EXPECT_TRUE(server_->listening());
  EXPECT_EQ(HttpGet(port(), "/")->body, "hi");
}

TEST_F(HttpServerTest, AnAddressOfAnotherMachineIsAnError) {
  const auto server = HttpServer::Start("192.0.2.1:0", {}, {.stats = &figures_});
  EXPECT_THAT(std::string(server.status().message()), HasSubstr("http_address 192.0.2.1:0: cannot listen"));
}

TEST_F(HttpServerTest, StopsWhileClientsAreConnected) {
  Start(64);
  const UniqueFd silent = Connect();
  const UniqueFd trickling = Connect("GET / HT");
  const UniqueFd reader = Connect("GET /large HTTP/1.0\r\n\r\n");
  EXPECT_TRUE(WaitFor([&] { return figures_.connections == 3; }));
  server_.reset();
  EXPECT_EQ(figures_.connections, 0u);
}

}  // namespace
}  // namespace vrambroker
