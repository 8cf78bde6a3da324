// SPDX-License-Identifier: Apache-2.0
//
// The count socket and clients that mean harm, or are broken. Well-behaved clients keep their memory and are served,
// whatever bad clients send. Afterwards the sessions and the device agree on the charged bytes.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <iterator>
#include <limits>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "tests/integration/count_socket_fixture.h"
#include "tests/support/test_device.h"
#include "tests/support/unix_client.h"

namespace vrambroker::testing_support {
namespace {

using ::absl::StatusCode;
using ::testing::HasSubstr;

// A witness holds memory before and after each test.
class CountSocketHostileTest : public CountSocketTest {
 protected:
  void Begin(const DaemonOptions& options = {}) {
    ASSERT_NO_FATAL_FAILURE(CountSocketTest::Begin(options));
    auto witness = ClientProcess::Start(dir());
    ASSERT_OK(witness);
    ASSERT_OK(witness->Call("count_hello witness -"));
    ASSERT_OK(witness->Call(absl::StrCat("charge ", kOfWitness)));
    witness_.emplace(*std::move(witness));
  }
  void TearDown() override {
    if (daemon_ == nullptr) return;  // the test was skipped
    if (!HasFatalFailure()) ExpectUnharmed();
    witness_.reset();
    CountSocketTest::TearDown();
  }
  void ExpectUnharmed(uint64_t others = 0) {
    ASSERT_TRUE(daemon_->Running());
    EXPECT_TRUE(IsCharged(kOfWitness + others));
    EXPECT_EQ(Reserved("witness"), kOfWitness);
    EXPECT_OK(witness_->Call(absl::StrCat("charge ", 2_MiB)));
    EXPECT_OK(witness_->Call(absl::StrCat("uncharge ", 2_MiB)));
  }

  static constexpr uint64_t kOfWitness = 40_MiB;
  std::optional<ClientProcess> witness_;
};

absl::Status Say(CountClient& client, const CountRequest& request) {
  const absl::StatusOr<CountAnswer> answer = client.Call(request);
  return answer.ok() ? StatusOfAnswer(*answer) : answer.status();
}

std::string BytesOf(const CountRequest& request) {
  return {reinterpret_cast<const char*>(&request), sizeof request};
}

// ---- Packets ----

TEST_F(CountSocketHostileTest, PacketsOfOtherSizes) {
  ASSERT_NO_FATAL_FAILURE(Begin());
  ASSERT_OK_AND_ASSIGN(CountClient opened, Open("opened"));
  ASSERT_OK(opened.Charge(2_MiB));
  const std::string charge = BytesOf(MakeCountRequest(VRAMBROKER_COUNT_CHARGE, 0, 2_MiB));
  ASSERT_OK_AND_ASSIGN(CountClient fresh, CountClient::Connect(dir()));
  for (CountClient* client : {&opened, &fresh}) {
    for (const size_t size :
         {size_t{1}, size_t{8}, charge.size() - 1, charge.size() + 1, size_t{1000}, size_t{100'000}}) {
      std::string packet = charge;
      packet.resize(size, '\0');
      ASSERT_TRUE(client->SendBytes(packet)) << size;
      ASSERT_OK_AND_ASSIGN(const CountAnswer answer, client->Receive());
      EXPECT_STATUS(StatusOfAnswer(answer), StatusCode::kInvalidArgument, "a request has 192, 216 or 728") << size;
    }
  }
  EXPECT_EQ(opened.ChargedBytes(), 2_MiB);
  const std::string hello = BytesOf(CountHello("fresh"));
  ASSERT_OK_AND_ASSIGN(CountClient older, CountClient::Connect(dir()));
  for (const auto& [client, size] : {std::pair(&fresh, VRAMBROKER_COUNT_SHORT_REQUEST_BYTES),
                                     std::pair(&older, VRAMBROKER_COUNT_NO_DEVICES_REQUEST_BYTES)}) {
    ASSERT_TRUE(client->SendBytes(hello.substr(0, size))) << "an older program's";
    ASSERT_OK_AND_ASSIGN(const CountAnswer welcome, client->Receive());
    EXPECT_OK(StatusOfAnswer(welcome)) << size;
  }
  // An empty packet looks like the end.
  ASSERT_TRUE(fresh.SendBytes(""));
  EXPECT_TRUE(WaitFor([&] { return fresh.HasEnded(); }));
  EXPECT_OK(opened.Uncharge(2_MiB));
}

TEST_F(CountSocketHostileTest, VersionsCallsAndDevices) {
  ASSERT_NO_FATAL_FAILURE(Begin());
  ASSERT_OK_AND_ASSIGN(CountClient client, Open("client"));
  CountRequest request = MakeCountRequest(VRAMBROKER_COUNT_CHARGE, 0, 2_MiB);
  for (const uint32_t version : {0U, 2U, ~0U}) {
    request.version = version;
    EXPECT_STATUS(Say(client, request), StatusCode::kFailedPrecondition, "of one release");
    ASSERT_OK_AND_ASSIGN(CountClient fresh, CountClient::Connect(dir()));
    EXPECT_STATUS(Say(fresh, request), StatusCode::kFailedPrecondition, "of one release");
  }
  request.version = VRAMBROKER_COUNT_VERSION;
  for (const uint32_t call : {0U, 8U, 1000U, ~0U}) {
    request.call = call;
    EXPECT_STATUS(Say(client, request), StatusCode::kInvalidArgument, "is not a call");
  }
  ASSERT_OK_AND_ASSIGN(CountClient joined, client.Join());
  for (const vrambroker_count_call call : {VRAMBROKER_COUNT_HOLD, VRAMBROKER_COUNT_CHARGE, VRAMBROKER_COUNT_WAIT,
                                           VRAMBROKER_COUNT_UNCHARGE, VRAMBROKER_COUNT_INFO}) {
    for (const uint32_t device : {1U, 2U, 0x7fffffffU, 0x80000000U, ~0U}) {
      EXPECT_STATUS(Say(joined, MakeCountRequest(call, device, 2_MiB)), StatusCode::kNotFound, "device") << call;
    }
  }
  ASSERT_OK_AND_ASSIGN(CountClient fresh, CountClient::Connect(dir()));
  for (const vrambroker_count_call call : {VRAMBROKER_COUNT_HOLD, VRAMBROKER_COUNT_CHARGE, VRAMBROKER_COUNT_WAIT,
                                           VRAMBROKER_COUNT_UNCHARGE, VRAMBROKER_COUNT_INFO}) {
    EXPECT_STATUS(Say(fresh, MakeCountRequest(call, 0, 2_MiB)), StatusCode::kFailedPrecondition, "begins with HELLO");
  }
}

TEST_F(CountSocketHostileTest, Bytes) {
  ASSERT_NO_FATAL_FAILURE(Begin());
  ASSERT_OK_AND_ASSIGN(CountClient client, Open("client"));
  ASSERT_OK_AND_ASSIGN(CountClient joined, client.Join());
  ASSERT_OK(client.Charge(2_MiB));
  for (const uint64_t bytes : {uint64_t{0}, uint64_t{1}, 2_MiB - 1, 2_MiB + 1, ~uint64_t{0}, (~uint64_t{0}) - 2_MiB + 1,
                               uint64_t{1} << 63, (uint64_t{1} << 63) + 2_MiB}) {
    for (const vrambroker_count_call call :
         {VRAMBROKER_COUNT_HOLD, VRAMBROKER_COUNT_CHARGE, VRAMBROKER_COUNT_WAIT, VRAMBROKER_COUNT_UNCHARGE}) {
      const absl::Status status = Say(joined, MakeCountRequest(call, 0, bytes));
      EXPECT_FALSE(status.ok()) << call << " of " << bytes;
      EXPECT_NE(status.code(), StatusCode::kUnavailable) << call << " of " << bytes << ": " << status;
    }
    EXPECT_EQ(client.ChargedBytes(), 2_MiB) << bytes;
  }
  for (const uint64_t bytes : {4_MiB, 256_MiB, uint64_t{1} << 62}) {
    EXPECT_STATUS(client.Uncharge(bytes), StatusCode::kInvalidArgument, "bytes: ");
  }
  EXPECT_OK(client.Uncharge(2_MiB));
  EXPECT_STATUS(client.Uncharge(2_MiB), StatusCode::kInvalidArgument, "charged only 0");
}

TEST_F(CountSocketHostileTest, LimitsAndNames) {
  ASSERT_NO_FATAL_FAILURE(Begin());
  constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  for (const double fraction : {kNan, -kNan, kInfinity, -kInfinity, -0.1, 1.0000001, 1e308}) {
    EXPECT_STATUS(CountClient::Open(dir(), CountHello("fraction", fraction)), StatusCode::kInvalidArgument, "limit")
        << fraction;
  }
  for (const double fraction : {0.0, -0.0, 5e-324}) {
    ASSERT_OK_AND_ASSIGN(CountClient nothing, CountClient::Open(dir(), CountHello("nothing", fraction)));
    EXPECT_EQ(nothing.Info()->limit_bytes, 0u);
    EXPECT_STATUS(nothing.Charge(2_MiB), StatusCode::kResourceExhausted, "");
  }
  CountRequest hello = CountHello("kind");
  for (const uint32_t kind : {3U, ~0U}) {
    hello.limit_kind = kind;
    EXPECT_STATUS(CountClient::Open(dir(), hello), StatusCode::kInvalidArgument, "limit_kind");
  }
  hello = CountHello("guarantee");
  for (const uint32_t kind : {3U, ~0U}) {
    hello.guarantee_kind = kind;
    EXPECT_STATUS(CountClient::Open(dir(), hello), StatusCode::kInvalidArgument, "guarantee_kind");
  }
  hello.guarantee_kind = VRAMBROKER_COUNT_LIMIT_FRACTION;
  for (const double fraction : {kNan, kInfinity, -0.1, 1.0000001}) {
    hello.guarantee_fraction = fraction;
    EXPECT_STATUS(CountClient::Open(dir(), hello), StatusCode::kInvalidArgument, "guarantee") << fraction;
  }
  hello.guarantee_fraction = 0.1;
  EXPECT_STATUS(CountClient::Open(dir(), hello), StatusCode::kPermissionDenied, "the policy allows 0 B");
  ASSERT_OK_AND_ASSIGN(CountClient most, Open("most", ~uint64_t{0}));
  EXPECT_EQ(most.Info()->limit_bytes, 256_MiB);
  for (const std::string& name : {std::string(128, 'a'), std::string(127, '\xff'), std::string("\xc3\x28"),
                                  std::string("two\nlines"), std::string("\x1b[31mred"), std::string("\xed\xa0\x80")}) {
    EXPECT_STATUS(CountClient::Open(dir(), CountHello(name)), StatusCode::kInvalidArgument, "name") << name;
  }
  ASSERT_OK_AND_ASSIGN(CountClient unnamed, Open(""));
  EXPECT_FALSE(raw_->GetSession(Ref(unnamed.session()))->name().empty()) << "the command's";
}

TEST_F(CountSocketHostileTest, HelloAgainAndWaitOnTheMainConnection) {
  ASSERT_NO_FATAL_FAILURE(Begin());
  ASSERT_OK_AND_ASSIGN(CountClient client, Open("client"));
  ASSERT_OK(client.Charge(4_MiB));
  EXPECT_STATUS(Say(client, CountHello("again")), StatusCode::kFailedPrecondition, "has its session already");
  EXPECT_STATUS(Say(client, CountJoin(client.token())), StatusCode::kFailedPrecondition, "has its session already");
  EXPECT_STATUS(client.Wait(2_MiB, 10), StatusCode::kFailedPrecondition, "JOIN");
  EXPECT_STATUS(client.Hold(2_MiB), StatusCode::kFailedPrecondition, "already");
  EXPECT_EQ(client.ChargedBytes(), 4_MiB);
  EXPECT_OK(client.Uncharge(4_MiB));
}

TEST_F(CountSocketHostileTest, HoldOfMoreThanCanBeTrue) {
  HOST_DEVICE_ONLY();
  ASSERT_NO_FATAL_FAILURE(Begin());
  ASSERT_OK_AND_ASSIGN(CountClient liar, Open("liar", 64_MiB));
  ASSERT_OK_AND_ASSIGN(const CountAnswer answer, liar.Call(MakeCountRequest(VRAMBROKER_COUNT_HOLD, 0, 4096_MiB)));
  EXPECT_OK(StatusOfAnswer(answer));
  EXPECT_EQ(answer.charged_bytes, 64_MiB) << "its limit";
  EXPECT_STATUS(liar.Hold(2_MiB), StatusCode::kFailedPrecondition, "already");
  EXPECT_STATUS(liar.Charge(2_MiB), StatusCode::kResourceExhausted, "");
  ASSERT_OK_AND_ASSIGN(CountClient greedy, Open("greedy"));
  ASSERT_OK_AND_ASSIGN(const CountAnswer rest, greedy.Call(MakeCountRequest(VRAMBROKER_COUNT_HOLD, 0, 4096_MiB)));
  EXPECT_EQ(rest.charged_bytes, 256_MiB - 64_MiB - kOfWitness) << "what the device has left";
  EXPECT_STATUS(liar.Uncharge(66_MiB), StatusCode::kInvalidArgument, "charged only");
  EXPECT_OK(liar.Uncharge(64_MiB));
  EXPECT_OK(greedy.Uncharge(rest.charged_bytes));
}

// ---- Access rights ----

TEST_F(CountSocketHostileTest, OnlyTheSessionsOwnProcessWithItsToken) {
  ASSERT_NO_FATAL_FAILURE(Begin({.config = "socket_mode: '0666'"}));
  ASSERT_OK_AND_ASSIGN(CountClient client, Open("client"));
  ASSERT_OK_AND_ASSIGN(const auto token, witness_->Call("count_token"));
  EXPECT_EQ(token[0].size(), 32u);
  CountToken others = {};
  for (size_t i = 0; i < others.size(); ++i) {
    others[i] = static_cast<uint8_t>(std::stoul(token[0].substr(2 * i, 2), nullptr, 16));
  }
  CountToken wrong = client.token();
  wrong.back() ^= 1;
  for (const CountToken& guess : {others, wrong, CountToken{}}) {
    EXPECT_STATUS(CountClient::Open(dir(), CountJoin(guess)), StatusCode::kNotFound, "token");
  }
  // Other processes, of the same user and of another user, fail with the right token, too.
  const std::string right(client.token().begin(), client.token().end());
  EXPECT_STATUS(witness_->Call(absl::StrCat("count_join ", absl::BytesToHexString(right))), StatusCode::kNotFound,
                "token");
  if (geteuid() != 0) return;
  ASSERT_OK(witness_->Call("setuid 65534"));
  EXPECT_STATUS(witness_->Call(absl::StrCat("count_join ", absl::BytesToHexString(right))), StatusCode::kNotFound,
                "token");
}

TEST_F(CountSocketHostileTest, RightsOfOtherUsers) {
  if (geteuid() != 0) GTEST_SKIP() << "needs root, to become another user";
  ASSERT_NO_FATAL_FAILURE(Begin({.config = R"(socket_mode: "0666" rules { uid: "65533" rights: NONE })"}));
  ASSERT_EQ(Ctl({"claim", "create", "team", "--owner=65534"}).exit_code, 0);
  const auto as = [&](uid_t uid, const std::string& where) -> absl::Status {
    absl::StatusOr<ClientProcess> process = ClientProcess::Start(where);
    if (!process.ok()) return process.status();
    for (const std::string& command :
         {absl::StrCat("setuid ", uid), std::string("count_hello other -"), absl::StrCat("charge ", 2_MiB)}) {
      if (const auto done = process->Call(command); !done.ok()) return done.status();
    }
    return absl::OkStatus();
  };
  EXPECT_OK(as(65534, dir()));
  EXPECT_STATUS(as(65533, dir()), StatusCode::kPermissionDenied, "rules[0]");
  EXPECT_OK(as(65534, dir() + "/claims/team"));
  EXPECT_STATUS(as(65532, dir() + "/claims/team"), StatusCode::kUnavailable, "Permission denied");
}

TEST_F(CountSocketHostileTest, NobodyMaySendDescriptors) {
  ASSERT_NO_FATAL_FAILURE(Begin());
  const auto descriptors = [&] {
    const std::filesystem::directory_iterator files(absl::StrCat("/proc/", daemon_->pid(), "/fd"));
    return std::distance(begin(files), end(files));
  };
  const auto before = descriptors();
  for (int i = 0; i < 20; ++i) {
    ASSERT_OK_AND_ASSIGN(CountClient client, CountClient::Connect(dir()));
    if (SendWithDescriptor(client.fd(), BytesOf(CountHello("sends")), client.fd()) < 0) {
      EXPECT_EQ(errno, EPERM);
      continue;
    }
    EXPECT_TRUE(WaitFor([&] { return client.HasEnded(); })) << "the daemon drops the connection";
  }
  EXPECT_TRUE(WaitFor([&] { return descriptors() <= before; }));
}

// ---- Clients that do not wait for their answers, or do not read them ----

TEST_F(CountSocketHostileTest, ASecondPacketBeforeTheAnswerIsReadEndsTheConnection) {
  ASSERT_NO_FATAL_FAILURE(Begin());
  ASSERT_OK_AND_ASSIGN(CountClient client, Open("client"));
  const CountRequest charge = MakeCountRequest(VRAMBROKER_COUNT_CHARGE, 0, 2_MiB);
  ASSERT_TRUE(client.Send(charge));
  pollfd readable = {.fd = client.fd(), .events = POLLIN, .revents = 0};
  ASSERT_EQ(poll(&readable, 1, static_cast<int>(absl::ToInt64Milliseconds(kPatience))), 1);
  (void)client.Send(charge);
  EXPECT_TRUE(WaitFor([&] { return client.HasEnded(); }));
  EXPECT_TRUE(WaitFor([&] { return StateOf("client") == "SESSION_STATE_DISCONNECTED"; })) << StateOf("client");
  EXPECT_LE(Reserved("client"), 2_MiB);
  // A second packet while the first call is under way ends the connection, too.
  ASSERT_OK_AND_ASSIGN(CountClient next, Open("next"));
  ASSERT_OK_AND_ASSIGN(CountClient joined, next.Join());
  ASSERT_OK(next.Charge(40_MiB));
  ASSERT_TRUE(joined.Send(CountWait(0, 200_MiB, 3'600'000)));
  EXPECT_TRUE(Waits(1));
  ASSERT_TRUE(joined.Send(charge));
  EXPECT_TRUE(WaitFor([&] { return joined.HasEnded(); }));
  EXPECT_TRUE(Waits(0));
  EXPECT_OK(next.Uncharge(40_MiB));
}

// A client that never reads does not make the daemon keep the client's packets.
TEST_F(CountSocketHostileTest, AnswersThatAreNeverRead) {
  ASSERT_NO_FATAL_FAILURE(Begin());
  for (int i = 0; i < 20; ++i) {
    ASSERT_OK_AND_ASSIGN(CountClient client, Open("deaf"));
    const std::string charge = BytesOf(MakeCountRequest(VRAMBROKER_COUNT_CHARGE, 0, 2_MiB));
    int sent = 0;
    while (sent < 1000 && send(client.fd(), charge.data(), charge.size(), MSG_NOSIGNAL | MSG_DONTWAIT) > 0) ++sent;
    EXPECT_TRUE(WaitFor([&] { return client.HasEnded(); }));
  }
  ASSERT_OK_AND_ASSIGN(CountClient last, Open("last"));
  ExpectUnharmed();
}

// The test kills processes with a call under way, or with an answer unread.
TEST_F(CountSocketHostileTest, ClientsThatDieBetweenRequestAndAnswer) {
  ASSERT_NO_FATAL_FAILURE(Begin());
  ASSERT_OK_AND_ASSIGN(CountClient holder, Open("holder"));
  for (int i = 0; i < 60; ++i) {
    ASSERT_TRUE(IsCharged(kOfWitness));  // memory that the last victim may have got has come back
    ASSERT_OK(holder.Charge(200_MiB));
    ASSERT_OK_AND_ASSIGN(ClientProcess victim, OpenProcess("victim"));
    const char* const calls[] = {"charge ", "wait ", "hold "};
    ASSERT_OK(victim.Send(absl::StrCat(calls[i % 3], i % 2 == 0 ? 4_MiB : 100_MiB, " 3600000")));
    absl::SleepFor(absl::Microseconds(200 * (i % 7)));
    victim.process().Signal(SIGKILL);
    ASSERT_OK(holder.Uncharge(200_MiB));
  }
  EXPECT_TRUE(IsCharged(kOfWitness));
  EXPECT_TRUE(Waits(0));
  EXPECT_OK(holder.Charge(216_MiB));
  EXPECT_OK(holder.Uncharge(216_MiB));
}

TEST_F(CountSocketHostileTest, ConnectionsThatBreakRightAfterHello) {
  ASSERT_NO_FATAL_FAILURE(Begin());
  for (int i = 0; i < 300; ++i) {
    ASSERT_OK_AND_ASSIGN(CountClient client, CountClient::Connect(dir()));
    if (i % 2 == 0) {  // the next hello is the second hello
      EXPECT_STATUS(Say(client, CountHello("\xff")), StatusCode::kInvalidArgument, "name");
    }
    ASSERT_TRUE(client.Send(i % 3 == 0 ? CountHello("\xff") : CountHello("gone")));
  }
  // A hello replaces lost sessions of the process.
  EXPECT_TRUE(WaitFor([&] {
    const absl::StatusOr<CountClient> last = Open("last");
    return last.ok() && raw_->ListSessions()->sessions_size() == 2;  // the witness, and "last"
  }));
}

// The process lives: only the connections break.
TEST_F(CountSocketHostileTest, ConnectionsThatBreakAtAnyMoment) {
  ASSERT_NO_FATAL_FAILURE(Begin());
  ASSERT_OK_AND_ASSIGN(CountClient keeper, Open("keeper"));
  for (int i = 0; i < 300; ++i) {
    ASSERT_OK_AND_ASSIGN(CountClient joined, keeper.Join());
    ASSERT_TRUE(
        joined.Send(i % 2 == 0 ? MakeCountRequest(VRAMBROKER_COUNT_CHARGE, 0, 2_MiB) : CountWait(0, 2_MiB, 50)));
    if (i % 3 == 0) {
      pollfd readable = {.fd = joined.fd(), .events = POLLIN, .revents = 0};
      ASSERT_EQ(poll(&readable, 1, static_cast<int>(absl::ToInt64Milliseconds(kPatience))), 1);
    }
  }
  EXPECT_TRUE(WaitFor([&] { return keeper.ChargedBytes() == 0; })) << keeper.ChargedBytes();
}

// ---- Large numbers ----

// A client that finds no room hears the reason, even after its HELLO.
TEST_F(CountSocketHostileTest, ThousandsOfConnections) {
  if (geteuid() != 0) GTEST_SKIP() << "needs root, to become other users";
  ASSERT_NO_FATAL_FAILURE(Begin({.config = "socket_mode: '0666'", .descriptors = 1024}));
  std::vector<CountClient> open;
  int refused = 0;
  // The raw system call changes the user of this thread alone.
  std::thread attacker([&] {
    EXPECT_EQ(syscall(SYS_setresuid, -1, 54321, -1), 0);
    for (int i = 0; i < 3000; ++i) {
      absl::StatusOr<CountClient> client = CountClient::Connect(dir());
      ASSERT_OK(client);
      if (i >= 100) {
        const absl::StatusOr<CountAnswer> answer = client->Call(CountHello("many"));
        ASSERT_OK(answer) << i;
        if (answer->code == static_cast<uint32_t>(StatusCode::kResourceExhausted)) {
          EXPECT_THAT(answer->message, HasSubstr("LimitNOFILE"));
          ++refused;
          continue;
        }
        EXPECT_OK(StatusOfAnswer(*answer));
      }
      open.push_back(*std::move(client));
    }
  });
  attacker.join();
  EXPECT_GT(refused, 2800);
  // Users other than the attacker find room.
  for (const uid_t uid : {54322, 54323, 0}) {
    ASSERT_OK_AND_ASSIGN(ClientProcess other, ClientProcess::Start(dir()));
    if (uid != 0) {
      ASSERT_OK(other.Call(absl::StrCat("setuid ", uid)));
    }
    EXPECT_OK(other.Call("count_hello other -")) << uid;
    EXPECT_OK(other.Call(absl::StrCat("charge ", 2_MiB))) << uid;
    EXPECT_OK(other.Call(absl::StrCat("wait ", 2_MiB, " 0"))) << uid;
    EXPECT_OK(other.Call("connect leased -")) << uid;
  }
  ExpectUnharmed();
}

TEST_F(CountSocketHostileTest, ConnectionsThatSayNothingAreDropped) {
  ASSERT_NO_FATAL_FAILURE(Begin());
  ASSERT_OK_AND_ASSIGN(CountClient opened, Open("quiet"));
  ASSERT_OK_AND_ASSIGN(CountClient joined, opened.Join());
  ASSERT_OK_AND_ASSIGN(CountClient silent, CountClient::Connect(dir()));
  ASSERT_OK_AND_ASSIGN(CountClient babbling, CountClient::Connect(dir()));
  EXPECT_TRUE(WaitFor([&] {
    (void)babbling.SendBytes("x");
    (void)babbling.Receive(absl::Seconds(1));
    return silent.HasEnded() && babbling.HasEnded();
  }));
  EXPECT_OK(opened.Charge(2_MiB)) << "a session may be as quiet as it likes";
  EXPECT_OK(joined.Uncharge(2_MiB));
}

TEST_F(CountSocketTest, CallsTooOften) {  // calls of a witness would be too many
  ASSERT_NO_FATAL_FAILURE(Begin({.config = "max_calls_per_second_per_uid: 20 socket_mode: '0666'"}));
  ASSERT_OK_AND_ASSIGN(CountClient client, Open("often"));
  ASSERT_OK_AND_ASSIGN(CountClient joined, client.Join());
  ASSERT_OK(client.Charge(200_MiB));
  const auto is_too_often = [](const absl::Status& status) {
    return absl::IsUnavailable(status) && absl::StrContains(status.message(), "max_calls_per_second_per_uid");
  };
  // WaitFor() would leave too much time between its looks.
  const auto soon = [](const auto& condition) {
    for (int i = 0; i < 10'000; ++i) {
      if (condition()) return true;
    }
    return false;
  };
  for (const auto& [name, request] :
       {std::pair("charge", MakeCountRequest(VRAMBROKER_COUNT_CHARGE, 0, 256_MiB)),
        std::pair("wait", CountWait(0, 256_MiB, 0)), std::pair("info", MakeCountRequest(VRAMBROKER_COUNT_INFO)),
        std::pair("hold", MakeCountRequest(VRAMBROKER_COUNT_HOLD, 0, 2_MiB)), std::pair("again", CountHello("x"))}) {
    EXPECT_TRUE(soon([&, &request = request] { return is_too_often(Say(joined, request)); })) << name;
  }
  for (const CountRequest& first : {CountHello("x"), CountJoin(client.token())}) {
    EXPECT_TRUE(soon([&] { return is_too_often(CountClient::Open(dir(), first).status()); }));
  }
  // The daemon takes memory back at any rate of calls.
  EXPECT_TRUE(soon([&] { return is_too_often(client.Info().status()); }));
  for (int i = 0; i < 100; ++i) EXPECT_OK(client.Uncharge(2_MiB));
  EXPECT_TRUE(is_too_often(client.Info().status())) << "and it owes these calls";
  absl::StatusOr<CountAnswer> info;
  EXPECT_TRUE(WaitFor([&] {
    info = client.Info();
    return info.ok();
  }));
  EXPECT_EQ(info->charged_bytes, 0u);
  if (geteuid() != 0) return;
  ASSERT_OK_AND_ASSIGN(ClientProcess other, ClientProcess::Start(dir()));
  ASSERT_OK(other.Call("setuid 65534"));
  EXPECT_TRUE(soon([&] { return is_too_often(Say(joined, MakeCountRequest(VRAMBROKER_COUNT_INFO))); }));
  EXPECT_OK(other.Call("count_hello other -")) << "each user has a rate of his own";
  EXPECT_OK(other.Call(absl::StrCat("charge ", 2_MiB)));
}

TEST_F(CountSocketHostileTest, SessionsAndWaitingOfOneUser) {
  ASSERT_NO_FATAL_FAILURE(Begin({.config = "max_sessions_per_uid: 4 max_waiting_per_uid: 2"}));
  std::vector<CountClient> sessions;
  for (int i = 0; i < 3; ++i) {  // the witness has the fourth session
    ASSERT_OK_AND_ASSIGN(CountClient client, Open(absl::StrCat("s", i)));
    sessions.push_back(std::move(client));
  }
  EXPECT_STATUS(Open("one_more"), StatusCode::kResourceExhausted, "max_sessions_per_uid");
  ASSERT_OK(sessions[0].Charge(200_MiB));
  std::vector<CountClient> waiting;
  for (int i = 0; i < 2; ++i) {
    ASSERT_OK_AND_ASSIGN(CountClient joined, sessions[1].Join());
    ASSERT_TRUE(joined.Send(CountWait(0, 100_MiB, 3'600'000)));
    waiting.push_back(std::move(joined));
  }
  ASSERT_TRUE(Waits(2));
  ASSERT_OK_AND_ASSIGN(CountClient third, sessions[2].Join());
  EXPECT_STATUS(third.Wait(100_MiB, 3'600'000), StatusCode::kResourceExhausted, "max_waiting_per_uid");
  waiting.clear();
  EXPECT_TRUE(Waits(0));
  EXPECT_OK(sessions[0].Uncharge(200_MiB));
}

TEST_F(CountSocketHostileTest, AFloodHarmsNobody) {
  ASSERT_NO_FATAL_FAILURE(Begin());
  std::vector<std::thread> flooding;
  for (int t = 0; t < 8; ++t) {
    flooding.emplace_back([&, t] {
      for (int k = 0; k < 100; ++k) {
        absl::StatusOr<CountClient> client = Open(absl::StrCat("flood", t), 8_MiB);
        if (!client.ok()) continue;
        for (int i = 0; i < 20; ++i) {
          (void)client->Charge(2_MiB * static_cast<uint64_t>(1 + i % 3));
          (void)client->Uncharge(2_MiB * static_cast<uint64_t>(1 + i % 4));
          absl::StatusOr<CountClient> unread = client->Join();
          if (!unread.ok()) continue;
          for (int n = 0; n < 3; ++n) {
            const std::string charge = BytesOf(MakeCountRequest(VRAMBROKER_COUNT_CHARGE, 0, 2_MiB));
            (void)send(unread->fd(), charge.data(), charge.size() - static_cast<size_t>(n),
                       MSG_NOSIGNAL | MSG_DONTWAIT);
          }
        }
        const uint64_t left = client->ChargedBytes();
        if (left > 0 && left < 1_GiB) (void)client->Uncharge(left);
      }
    });
  }
  for (int i = 0; i < 20; ++i) {
    EXPECT_OK(witness_->Call(absl::StrCat("charge ", 2_MiB)));
    EXPECT_OK(witness_->Call(absl::StrCat("uncharge ", 2_MiB)));
  }
  for (std::thread& thread : flooding) thread.join();
  // Memory granted to connections that never read the answer is charged at most until the next hello of this process.
  ASSERT_TRUE(WaitFor([&] { return Open("last").ok(); }));
}

}  // namespace
}  // namespace vrambroker::testing_support
