// SPDX-License-Identifier: Apache-2.0
//
// The daemon's HTTP port: answers agree with vramctl, and no HTTP client keeps other clients out.
#include <arpa/inet.h>
#include <netinet/in.h>
#include <pwd.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <latch>
#include <optional>
#include <semaphore>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "allocator/base/bytes.h"
#include "allocator/device/device.h"
#include "tests/support/raw_client.h"
#include "tests/support/status_macros.h"
#include "tests/support/vramctl_test.h"

namespace vrambroker::testing_support {
namespace {

using absl::StrContains;
using Json = nlohmann::json;

class HttpTest : public VramctlDaemonTest {
 protected:
  void SetUp() override {
    ASSERT_OK(StartDaemon({.capacity = "256MiB", .config = "idle_decay: \"1h\"", .http = true}));
  }

  Json Get(const std::string& path) {
    const absl::StatusOr<HttpAnswer> answer = daemon_->Get(path);
    EXPECT_OK(answer.status());
    if (!answer.ok()) return {};
    EXPECT_EQ(answer->code, 200) << path << ": " << answer->body;
    EXPECT_TRUE(StrContains(answer->headers, "Content-Type: application/json")) << answer->headers;
    Json json = Json::parse(answer->body, nullptr, /*allow_exceptions=*/false);
    EXPECT_FALSE(json.is_discarded()) << answer->body.substr(0, 200);
    return json;
  }

  // Returns the map once the map has the blocks of all `sessions` sessions: a session that is slow to answer is in the
  // next map.
  Json MapOf(size_t sessions) {
    Json map;
    EXPECT_TRUE(WaitFor([&] {
      map = Get("/api/v1/map");
      return map["sessions"].size() == sessions &&
             std::all_of(map["sessions"].begin(), map["sessions"].end(),
                         [](const Json& session) { return session["answer"] == "blocks"; });
    })) << map;
    return map;
  }

  // Connects to the port. `flags`: SOCK_NONBLOCK does not wait for the daemon to take the connection.
  UniqueFd Connect(int flags = 0) const {
    UniqueFd fd(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | flags, 0));
    sockaddr_in address = {};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<uint16_t>(daemon_->http_port()));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    const int connected = connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address);
    EXPECT_TRUE(connected == 0 || (flags == SOCK_NONBLOCK && errno == EINPROGRESS));
    return fd;
  }
  // Tells whether the daemon still has a connection that has got no answer.
  static bool IsOpen(const UniqueFd& fd) {
    char byte;
    return recv(fd.get(), &byte, 1, MSG_PEEK | MSG_DONTWAIT) < 0 && errno == EAGAIN;
  }
  // Returns the answer to a raw request; empty if there is no answer.
  std::string Ask(const std::string& request) const {
    const UniqueFd fd = Connect();
    EXPECT_EQ(send(fd.get(), request.data(), request.size(), MSG_NOSIGNAL), static_cast<ssize_t>(request.size()));
    return ReadAll(fd);
  }
  static std::string ReadAll(const UniqueFd& fd) {
    std::string answer;
    std::string buffer(1 << 16, '\0');
    for (ssize_t size; (size = recv(fd.get(), buffer.data(), buffer.size(), 0)) > 0;) {
      answer.append(buffer, 0, static_cast<size_t>(size));
    }
    return answer;
  }
};

// Checks that `actual` has everything that `expected` has.
void ExpectContains(const Json& actual, const Json& expected, const std::string& where) {
  if (expected.is_object()) {
    for (const auto& [key, value] : expected.items()) {
      ASSERT_TRUE(actual.contains(key)) << where << " has no " << key;
      ExpectContains(actual.at(key), value, absl::StrCat(where, ".", key));
    }
  } else if (expected.is_array()) {
    ASSERT_EQ(actual.size(), expected.size()) << where;
    for (size_t i = 0; i < expected.size(); ++i)
      ExpectContains(actual[i], expected[i], absl::StrCat(where, "[", i, "]"));
  } else {
    EXPECT_EQ(actual, expected) << where;
  }
}

TEST_F(HttpTest, SaysWhatVramctlSays) {
  ASSERT_OK_AND_ASSIGN(Client leasing, VramctlDaemonTest::Connect("leasing", Limit(0.5)));
  placement_ = Placement::kRemote;
  ASSERT_OK_AND_ASSIGN(Client remote, VramctlDaemonTest::Connect("remote/1:a"));
  ASSERT_OK_AND_ASSIGN(Buffer a, leasing.Allocate(3_MiB));
  ASSERT_OK_AND_ASSIGN(Buffer b, leasing.Allocate(1000));
  ASSERT_OK_AND_ASSIGN(const Buffer c, remote.Allocate(30_MiB));
  EXPECT_FALSE(leasing.Allocate(200_MiB).ok());
  EXPECT_OK(a.Reset());
  // The client's own report, which the daemon shows, comes within a second.
  Json sessions;
  ASSERT_TRUE(WaitFor([&] {
    sessions = CtlJson({"sessions"})["sessions"];
    return sessions.size() == 2 && sessions[0]["devices"][0]["allocated_bytes"] == 1024;
  }));
  for (Json& session : sessions) {
    session.erase("idle_ms");  // the figure grows
    session.erase("user");     // the daemon may not know user and command yet
    session.erase("command");
  }
  const Json state = Get("/api/v1/state");
  ExpectContains(state["sessions"], sessions, "state.sessions");
  Json devices = CtlJson({"status"})["devices"];
  // The daemon asks a GPU's driver for processes and sensors at any time, also between the two answers.
  for (Json& device : devices) {
    device.erase("processes");
    device.erase("processes_fault");
    for (const char* sensor : {"use_percent", "temperature_celsius", "power_watts"}) device.erase(sensor);
  }
  ExpectContains(state["devices"], devices, "state.devices");
  ExpectContains(Get("/api/v1/sessions")["sessions"], sessions, "sessions");
  ExpectContains(Get("/api/v1/ooms"), CtlJson({"ooms"}), "ooms");
  EXPECT_EQ(Get("/api/ooms"), Get("/api/v1/ooms")) << "as it was called before it had a version";
  EXPECT_EQ(Get("/api/v1/ooms?session=leasing")["matching_events"], 1);
  EXPECT_EQ(Get("/api/v1/ooms?session=remote/1:a&last=0")["matching_events"], 0);
  for (const Json& session : sessions) {
    const RunResult file = Ctl({"snapshot", session["name"], "-o", "-"});
    ASSERT_EQ(file.exit_code, 0) << file.err;
    Json heap = Json::parse(file.out);
    for (Json& events : heap["device_traces"]) events = Json::array();  // events are not for everyone who can connect
    EXPECT_EQ(Get("/snapshot.json?session=" + std::string(session["name"])), heap);
    EXPECT_EQ(Get(absl::StrCat("/snapshot.json?device=0&session=", uint64_t{session["id"]})), heap);
  }
  ASSERT_TRUE(WaitFor([&] {
    const Json timeline = Get("/api/v1/timeline");
    return !timeline["time_ms"].empty() &&
           timeline["allocated_bytes"].back() == state["devices"][0]["allocated_bytes"] &&
           timeline["refusals"].back() == 1;
  }));
}

TEST_F(HttpTest, SaysWhoseASessionIsWhatItRunsAndSinceWhenItIsIdle) {
  const passwd* const entry = getpwuid(geteuid());
  const std::string user = entry == nullptr ? "" : entry->pw_name;
  for (const Placement placement : {Placement::kLeased, Placement::kRemote}) {
    placement_ = placement;
    ASSERT_OK_AND_ASSIGN(Client client, VramctlDaemonTest::Connect("client"));
    const auto session = [&] { return Get("/api/v1/sessions")["sessions"][0]; };
    ASSERT_TRUE(WaitFor([&] { return session()["user"] == user; })) << session();
    EXPECT_TRUE(WaitFor([&] { return session()["command"] == program_invocation_short_name; })) << session();
    const auto idle_ms = [&] { return session()["idle_ms"].get<int64_t>(); };
    constexpr int64_t kLongMs = 500;
    EXPECT_TRUE(WaitFor([&] { return idle_ms() > kLongMs; })) << session();
    EXPECT_TRUE(WaitFor([&] {
      EXPECT_OK(client.Allocate(3_MiB).status());  // allocates a block, and frees the block
      return idle_ms() < kLongMs;
    })) << session();
  }
  ASSERT_OK_AND_ASSIGN(const ClientProcess other, ConnectProcess("other"));
  EXPECT_TRUE(WaitFor([&] { return CtlJson({"sessions"})["sessions"].back()["command"] == "test_client"; }));
}

TEST_F(HttpTest, TheTimelineTellsWhatSessionsCouldGiveBack) {
  ASSERT_OK_AND_ASSIGN(Client client, VramctlDaemonTest::Connect("client"));
  ASSERT_OK_AND_ASSIGN(const Buffer kept, client.Allocate(24_MiB));
  ASSERT_OK_AND_ASSIGN(Buffer freed, client.Allocate(30_MiB));
  EXPECT_OK(freed.Reset());
  ASSERT_TRUE(WaitFor([&] {
    const Json state = Get("/api/v1/state");
    const Json timeline = Get("/api/v1/timeline");
    return !timeline["time_ms"].empty() && timeline["reclaimable_bytes"].size() == timeline["time_ms"].size() &&
           state["sessions"][0]["devices"][0]["idle_bytes"] == 30_MiB && timeline["reclaimable_bytes"].back() == 30_MiB;
  }));
}

TEST_F(HttpTest, TheTimelineOfASessionIsKeptByTheDaemon) {
  ASSERT_OK_AND_ASSIGN(const Client idle, VramctlDaemonTest::Connect("idle"));
  std::string path;
  {
    ASSERT_OK_AND_ASSIGN(Client client, VramctlDaemonTest::Connect("client", Limit(128_MiB)));
    ASSERT_OK_AND_ASSIGN(const Buffer buffer, client.Allocate(24_MiB));
    const Json session = CtlJson({"sessions"})["sessions"][1];
    path = absl::StrCat("/api/v1/timeline?device=0&session=id:", session["id"].get<uint64_t>());
    Json timeline;
    ASSERT_TRUE(WaitFor([&] {
      timeline = Get(path);
      return timeline["time_ms"].size() > 1 && timeline["allocated_bytes"].back() == 24_MiB;
    })) << timeline;
    EXPECT_EQ(timeline["reserved_bytes"].back(), session["devices"][0]["reserved_bytes"]);
    EXPECT_EQ(timeline["reserved_bytes"].size(), timeline["time_ms"].size());
    EXPECT_EQ(timeline["allocated_bytes"].size(), timeline["time_ms"].size());
    EXPECT_EQ(timeline["limit_bytes"], 128_MiB);
    EXPECT_EQ(timeline["name"], "client");
    EXPECT_EQ(timeline["session_id"], session["id"]);
    EXPECT_EQ(timeline["device"], 0);
    EXPECT_EQ(Get("/api/v1/timeline?session=client")["session_id"], session["id"]) << "by its name";
    EXPECT_TRUE(Get("/api/v1/timeline?session=idle")["time_ms"].empty()) << "it has held nothing";
  }
  const auto answer = [&](const std::string& asked) { return daemon_->Get(asked).value_or(HttpAnswer()); };
  EXPECT_TRUE(WaitFor([&] { return answer(path).code == 404; })) << answer(path).body << ": the session has ended";
  EXPECT_EQ(answer("/api/v1/timeline?session=nobody").code, 404);
  EXPECT_TRUE(StrContains(answer("/api/v1/timeline?session=nobody").body, "nobody"));
  EXPECT_EQ(answer("/api/v1/timeline?session=idle&device=9").code, 400);
}

TEST_F(HttpTest, TheMapHasEverySegmentWithItsBlocks) {
  ASSERT_OK_AND_ASSIGN(ClientProcess leaving, ConnectProcess("leaving"));
  ASSERT_OK(leaving.Call("alloc 5000000"));
  ASSERT_OK_AND_ASSIGN(Client client, VramctlDaemonTest::Connect("client"));
  ASSERT_OK_AND_ASSIGN(Buffer first, client.Allocate(4_MiB));
  ASSERT_OK_AND_ASSIGN(const Buffer second, client.Allocate(6_MiB));
  EXPECT_OK(first.Reset());
  EXPECT_EQ(Get("/api/v1/map?device=0")["sessions"].size(), 2u);
  const Json map = MapOf(2);
  ASSERT_EQ(map["segments"].size(), 2u) << map;
  uint64_t bytes = 0;
  for (const Json& segment : map["segments"]) {
    EXPECT_EQ(segment["state"], "leased");
    EXPECT_EQ(segment["pool"], "large");
    uint64_t of_blocks = 0;
    for (size_t i = 0; i < segment["blocks"].size(); i += 3) of_blocks += uint64_t{segment["blocks"][i]};
    EXPECT_EQ(of_blocks, segment["bytes"]);
    bytes += uint64_t{segment["bytes"]};
  }
  EXPECT_EQ(bytes, Get("/api/v1/state")["devices"][0]["leased_bytes"]);
  // The second segment has a hole of 4 MiB, 6 MiB allocated, and the rest free.
  EXPECT_EQ(map["segments"][1]["blocks"], Json({4_MiB, 4_MiB, 0, 6_MiB, 6_MiB, 1, 10_MiB, 0, 0}));
  // The map draws memory that a client has given back, too, without blocks.
  ASSERT_OK(leaving.Call("goodbye"));
  EXPECT_TRUE(WaitFor([&] {
    const Json now = Get("/api/v1/map");
    for (const Json& segment : now["segments"]) {
      if (segment["state"] == "idle" && !segment.contains("blocks") && segment["bytes"] == 20_MiB) return true;
    }
    return false;
  }));
}

// A client may say anything of its heap: the map draws no lie over other clients' memory, and no more blocks than fit.
TEST_F(HttpTest, TheMapDoesNotBelieveWhatCannotBe) {
  ASSERT_OK_AND_ASSIGN(Client honest, VramctlDaemonTest::Connect("honest"));
  ASSERT_OK_AND_ASSIGN(const Buffer buffer, honest.Allocate(4_MiB));
  const uint64_t others = Get("/api/v1/map")["segments"][0]["id"];
  ASSERT_OK_AND_ASSIGN(RawClient raw, RawClient::Connect(dir()));
  RawStream stream(raw);
  ASSERT_OK(stream.Open(LeasingHello("liar")));
  v1::SessionRequest lease;
  lease.mutable_lease()->mutable_request()->add_segment_bytes(2_MiB);
  ASSERT_TRUE(stream.Send(lease));
  const std::optional<v1::SessionResponse> leased = stream.Receive();
  ASSERT_TRUE(leased.has_value() && leased->result().has_leased());
  const uint64_t own = leased->result().leased().segments(0).segment_id();

  std::atomic<uint64_t> blocks_of_own = 3;
  std::thread liar([&] {
    while (const std::optional<v1::SessionResponse> response = stream.Receive()) {
      if (!response->question().has_snapshot()) continue;
      const uint64_t count = blocks_of_own;
      v1::SessionRequest answer;
      answer.mutable_answer()->set_question_id(response->question().question_id());
      const auto add_segment = [&](uint64_t id, uint64_t bytes, uint64_t blocks) {
        v1::GetSnapshotResponse::Segment* segment = answer.mutable_answer()->mutable_snapshot()->add_segments();
        segment->set_id(id);
        segment->set_segment_bytes(bytes);
        for (uint64_t i = 0; i < blocks; ++i) {
          v1::GetSnapshotResponse::Block* block = segment->add_blocks();
          block->set_offset_bytes(i * bytes / blocks);
          block->set_block_bytes(bytes / blocks);
          block->set_state(v1::GetSnapshotResponse::BLOCK_STATE_FREE);
        }
      };
      add_segment(own, 2_MiB, count);
      add_segment(others, 20_MiB, 1);
      stream.Send(answer);
    }
  });
  const auto map_with = [&](const std::string& answer) {
    Json found;
    EXPECT_TRUE(WaitFor([&] {
      found = Get("/api/v1/map");
      return found["sessions"].size() == 2 && found["sessions"][0]["answer"] == "blocks" &&
             found["sessions"][1]["answer"] == answer;
    })) << found;
    return found;
  };
  const Json lies = map_with("blocks");
  for (const Json& segment : lies["segments"]) {
    EXPECT_EQ(segment["blocks"].size() / 3, segment["id"] == others ? 2u : 3u) << segment;
  }
  blocks_of_own = 2_MiB / 512;  // one block too many, with the block in the other session's segment
  const Json too_many = map_with("too_many_blocks");
  for (const Json& segment : too_many["segments"]) EXPECT_EQ(segment.contains("blocks"), segment["id"] == others);
  stream.Cancel();
  liar.join();
}

// The user has more clients than the daemon may ask at a time.
TEST_F(HttpTest, TheMapHasTheBlocksOfManySessions) {
  std::vector<Client> clients;
  std::vector<Buffer> buffers;
  for (int i = 0; i < 50; ++i) {
    ASSERT_OK_AND_ASSIGN(Client client, VramctlDaemonTest::Connect(absl::StrCat("s", i)));
    ASSERT_OK_AND_ASSIGN(Buffer buffer, client.Allocate(1000));
    clients.push_back(std::move(client));
    buffers.push_back(std::move(buffer));
  }
  const Json map = MapOf(50);
  ASSERT_EQ(map["segments"].size(), 50u);
  for (const Json& segment : map["segments"]) EXPECT_TRUE(segment.contains("blocks")) << segment;
}

// An open page does not write into the history that sessions record.
TEST_F(HttpTest, TheMapLeavesNoTraceInWhatASessionRecords) {
  ASSERT_OK_AND_ASSIGN(Client leasing, VramctlDaemonTest::Connect("leasing"));
  placement_ = Placement::kRemote;
  ASSERT_OK_AND_ASSIGN(Client remote, VramctlDaemonTest::Connect("remote"));
  for (const char* name : {"leasing", "remote"}) CtlJson({"record", name, "100"});
  ASSERT_OK_AND_ASSIGN(const Buffer a, leasing.Allocate(1000));
  ASSERT_OK_AND_ASSIGN(const Buffer b, remote.Allocate(1000));
  MapOf(2);
  for (const char* name : {"leasing", "remote"}) {
    EXPECT_EQ(Get(absl::StrCat("/snapshot.json?session=", name))["device_traces"], Json::array({Json::array()}))
        << "history takes a right";
    const Json snapshot = CtlJson({"snapshot", name, "--output=-"});
    int snapshots = 0;
    for (const Json& event : snapshot["device_traces"][0]) snapshots += event["action"] == "snapshot" ? 1 : 0;
    EXPECT_EQ(snapshots, 1) << snapshot;  // the snapshot of this command
  }
}

TEST_F(HttpTest, AClientThatDoesNotAnswerIsNamedAndTheOthersAreShown) {
  ASSERT_OK_AND_ASSIGN(ClientProcess silent, ConnectProcess("silent"));
  ASSERT_OK(silent.Call("alloc 5000000"));
  ASSERT_OK_AND_ASSIGN(Client other, VramctlDaemonTest::Connect("other"));
  ASSERT_OK_AND_ASSIGN(const Buffer buffer, other.Allocate(4_MiB));
  silent.process().Signal(SIGSTOP);  // the client may answer once more
  Json map;
  const auto answers = [&](const std::string& of_silent) {
    map = Get("/api/v1/map");
    return map["sessions"].size() == 2 && map["sessions"][0]["answer"] == of_silent &&
           map["sessions"][1]["answer"] == "blocks";
  };
  EXPECT_TRUE(WaitFor([&] { return answers("none"); })) << map;
  for (const Json& segment : map["segments"]) EXPECT_EQ(segment.contains("blocks"), segment["session_id"] != 1) << map;
  silent.process().Signal(SIGCONT);
  EXPECT_TRUE(WaitFor([&] { return answers("blocks"); })) << map;
}

TEST_F(HttpTest, AnswersCarryWhatKeepsBrowsersSafe) {
  for (const char* path : {"/", "/app.js", "/api/v1/state", "/metrics", "/no/such/page"}) {
    ASSERT_OK_AND_ASSIGN(const HttpAnswer answer, daemon_->Get(path));
    for (const char* header :
         {"Content-Security-Policy: default-src 'none'; script-src 'self'", "X-Content-Type-Options: nosniff",
          "Cache-Control: no-store", "Cross-Origin-Resource-Policy: same-origin"}) {
      EXPECT_TRUE(StrContains(answer.headers, header)) << path << ": " << answer.headers;
    }
    EXPECT_FALSE(StrContains(answer.headers, "Access-Control")) << path << ": " << answer.headers;
  }
  ASSERT_OK_AND_ASSIGN(const HttpAnswer page, daemon_->Get("/"));
  EXPECT_TRUE(StrContains(page.headers, "Content-Type: text/html; charset=utf-8")) << page.headers;
  EXPECT_FALSE(StrContains(page.body, "<script>"));
  EXPECT_FALSE(StrContains(page.body, " style=") || StrContains(page.body, "://")) << "the page refers to itself only";
}

TEST_F(HttpTest, RefusesWhatItDoesNotUnderstand) {
  for (const auto& [request, code] : std::vector<std::pair<std::string, int>>{
           {"GET / HTTP/1.1\r\nHost: evil.example\r\n\r\n", 403},
           {"GET /metrics HTTP/1.1\r\nHost: evil.example:9477\r\n\r\n", 403},
           {"GET /metrics HTTP/1.0\r\n\r\n", 200},
           {"GET /metrics HTTP/1.1\r\n\r\n", 400},
           {"GET /metrics HTTP/1.1\r\nHost: localhost\r\nhost: evil.example\r\n\r\n", 400},
           {"GET /metrics HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n\r\n", 400},
           {"GET http://localhost/metrics HTTP/1.1\r\n\r\n", 400},
           {"GET /metrics HTTP/1.0\r\nHost: localhost\r\nHost: localhost\r\n\r\n", 400},
           {"GET /metrics HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\nContent-Length: 5\r\n\r\n", 400},
           {"GET /metrics HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n", 400},
           {"HEAD /api/v1/state HTTP/1.1\r\nHost: localhost\r\n\r\n", 200},
           {"POST /api/v1/state HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n", 405},
           {"DELETE /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n", 405},
           {"OPTIONS /metrics HTTP/1.1\r\nHost: localhost\r\nOrigin: http://evil.example\r\n"
            "Access-Control-Request-Method: GET\r\n\r\n",
            405},
           {"GET /api/v1/map?device=1 HTTP/1.1\r\nHost: localhost\r\n\r\n", 400},
           {"GET /api/v1/map?device=-1 HTTP/1.1\r\nHost: localhost\r\n\r\n", 400},
           {"GET /api/v1/map?device=x HTTP/1.1\r\nHost: localhost\r\n\r\n", 400},
           {"GET /api/v1/map?devices=0 HTTP/1.1\r\nHost: localhost\r\n\r\n", 400},
           {"GET /api/v1/ooms?last=few HTTP/1.1\r\nHost: localhost\r\n\r\n", 400},
           {"GET /snapshot.json HTTP/1.1\r\nHost: localhost\r\n\r\n", 400},
           {"GET /snapshot.json?session=nobody HTTP/1.1\r\nHost: localhost\r\n\r\n", 404},
           {"GET /api/v1/nothing HTTP/1.1\r\nHost: localhost\r\n\r\n", 404},
           {"GET /../etc/passwd HTTP/1.1\r\nHost: localhost\r\n\r\n", 404}}) {
    const std::string answer = Ask(request);
    EXPECT_TRUE(absl::StartsWith(answer, absl::StrCat("HTTP/1.1 ", code))) << request << answer.substr(0, 300);
    EXPECT_FALSE(StrContains(answer, "Access-Control-Allow")) << request << answer.substr(0, 600);
    if (absl::StartsWith(request, "HEAD")) {
      EXPECT_TRUE(absl::EndsWith(answer, "\r\n\r\n")) << answer;
    }
  }
  EXPECT_TRUE(
      StrContains(Ask("GET /api/v1/map?device=7 HTTP/1.0\r\n\r\n"), "device: no such device; the only device is 0"));
}

TEST_F(HttpTest, SlowReadersAndSilentConnectionsKeepNobodyOut) {
  // Makes the answer large for clients that do not read the answer: 20,000 blocks.
  ASSERT_OK_AND_ASSIGN(ClientProcess client, ConnectProcess("client"));
  ASSERT_OK(client.Call("fill 20000 600 1"));
  std::vector<UniqueFd> slow;
  // A daemon that waited for each slow client would have dropped all of the slow clients before the daemon came to this
  // page.
  EXPECT_TRUE(WaitFor([&] {
    slow.clear();
    for (int i = 0; i < 40; ++i) {
      slow.push_back(Connect());
      const int small = 4096;
      setsockopt(slow.back().get(), SOL_SOCKET, SO_RCVBUF, &small, sizeof small);
      const std::string request = i % 4 == 0 ? "" : "GET /api/v1/map HTTP/1.1\r\nHost: localhost\r\n\r\n";
      send(slow.back().get(), request.data(), request.size(), MSG_NOSIGNAL);
    }
    return daemon_->Metrics().Value("vrambroker_http_connections").value_or(0) > 1;
  })) << "a page for others while they are there";
  ASSERT_OK_AND_ASSIGN(ClientProcess another, ConnectProcess("another"));  // the broker itself does not notice
  ASSERT_OK(another.Call("alloc 1000"));
}

// All connections stay while the test asks: 1,000 connections say nothing, and 100 connections never come to the end of
// a request.
TEST_F(HttpTest, SilentAndTricklingConnectionsKeepNobodyOut) {
  rlimit files = {};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &files), 0);
  files.rlim_cur = files.rlim_max;
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &files), 0);
  std::vector<UniqueFd> silent(1000);
  for (UniqueFd& each : silent) each = Connect(SOCK_NONBLOCK);
  std::vector<UniqueFd> trickling(100);
  // A trickling connection sends a byte for each page that the test asks for.
  constexpr int kPages = 40;
  constexpr int kRoundsBefore = 3;
  std::counting_semaphore<> rounds(kRoundsBefore);
  std::atomic<bool> done = false;
  std::latch begun(kRoundsBefore);
  std::thread trickle([&] {
    const std::string request = "GET /metrics HTTP/1.1\r\nX: ";
    for (size_t i = 0; rounds.acquire(), !done; ++i) {
      for (UniqueFd& each : trickling) {
        if (!each.valid()) each = Connect(SOCK_NONBLOCK);
        const char byte = i < request.size() ? request[i] : 'x';
        if (send(each.get(), &byte, 1, MSG_NOSIGNAL) != 1 && errno != EAGAIN) each.Reset();  // connect again
      }
      if (i < kRoundsBefore) begun.count_down();
    }
  });
  begun.wait();
  if (files.rlim_max >= 20'000) {  // fewer descriptors: old connections make room for new connections
    EXPECT_TRUE(WaitFor([&] {
      // The daemon drops a silent connection after half a minute: dropped connections come again.
      for (UniqueFd& each : silent) {
        if (!IsOpen(each)) each = Connect(SOCK_NONBLOCK);
      }
      rounds.release();
      return daemon_->Metrics().Value("vrambroker_http_connections").value_or(0) >= 1100;
    }));
  }
  for (int i = 0; i < kPages && !HasFailure(); ++i) {  // a failure may take minutes
    rounds.release();
    const char* path = i % 2 == 0 ? "/healthz" : "/metrics";
    const absl::StatusOr<HttpAnswer> answer = daemon_->Get(path);
    EXPECT_OK(answer.status()) << path;
    if (answer.ok()) {
      EXPECT_EQ(answer->code, 200) << path;
    }
  }
  done = true;
  rounds.release();
  trickle.join();
  // The daemon serves memory all the same: HTTP connections have a bounded part of the daemon's descriptors.
  ASSERT_OK_AND_ASSIGN(ClientProcess client, ConnectProcess("client"));
  ASSERT_OK(client.Call("alloc 1000"));
}

// A snapshot may take much memory. A second snapshot waits for its turn.
TEST_F(HttpTest, OneSnapshotAtATime) {
  ASSERT_OK_AND_ASSIGN(RawClient raw, RawClient::Connect(dir()));
  RawStream mute(raw);
  ASSERT_OK(mute.Open(LeasingHello("mute")));
  ASSERT_OK_AND_ASSIGN(Client other, VramctlDaemonTest::Connect("other"));
  const UniqueFd asking = Connect();
  const std::string request = "GET /snapshot.json?session=mute HTTP/1.1\r\nHost: localhost\r\n\r\n";
  ASSERT_EQ(send(asking.get(), request.data(), request.size(), MSG_NOSIGNAL), static_cast<ssize_t>(request.size()));
  std::optional<v1::SessionResponse> asked;
  do {
    asked = mute.Receive();
  } while (asked.has_value() && !asked->question().has_snapshot());
  const UniqueFd second = Connect();
  const std::string another = "GET /snapshot.json?session=other HTTP/1.1\r\nHost: localhost\r\n\r\n";
  ASSERT_EQ(send(second.get(), another.data(), another.size(), MSG_NOSIGNAL), static_cast<ssize_t>(another.size()));
  EXPECT_EQ(Get("/api/v1/state")["sessions"].size(), 2u) << "other pages do not wait for it";
  mute.Cancel();
  EXPECT_TRUE(absl::StartsWith(ReadAll(second), "HTTP/1.1 200 OK")) << "its turn";
  EXPECT_TRUE(absl::StartsWith(ReadAll(asking), "HTTP/1.1 ")) << "the first one";
}

TEST_F(HttpTest, DaemonStopsWhileTheMapIsAskedFor) {
  ASSERT_OK_AND_ASSIGN(ClientProcess silent, ConnectProcess("silent"));
  ASSERT_OK(silent.Call("alloc 5000000"));
  silent.process().Signal(SIGSTOP);
  const UniqueFd asking = Connect();
  const std::string request = "GET /snapshot.json?session=silent HTTP/1.1\r\nHost: localhost\r\n\r\n";
  ASSERT_EQ(send(asking.get(), request.data(), request.size(), MSG_NOSIGNAL), static_cast<ssize_t>(request.size()));
  EXPECT_EQ(Get("/api/v1/map")["sessions"].size(), 1u);  // the earlier request has arrived by now
  daemon_->process().Signal(SIGTERM);
  daemon_->process().Signal(SIGTERM);
  EXPECT_EQ(daemon_->process().Wait().value_or(-1), 0);
  silent.process().Signal(SIGCONT);
}

}  // namespace
}  // namespace vrambroker::testing_support
