// SPDX-License-Identifier: Apache-2.0
//
// Bad input of clients: the daemon answers with a status and stays up, and the figures of other sessions do not change.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <functional>
#include <limits>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "allocator/base/bytes.h"
#include "allocator/wire/heap_convert.h"
#include "client/connection/descriptor_channel.h"
#include "tests/integration/bad_input_fixture.h"
#include "tests/support/test_device.h"

namespace vrambroker::testing_support {
namespace {

using absl::StatusCode;

// Returns a socket that is connected to `path`; empty if the connection fails.
UniqueFd ConnectTo(const std::string& path, int type) {
  UniqueFd fd(socket(AF_UNIX, type | SOCK_CLOEXEC, 0));
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, path.c_str(), std::min(path.size(), sizeof address.sun_path - 1));
  if (connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0) fd.Reset();
  return fd;
}

// ---- Unary calls ----

TEST_F(BadInputTest, Sizes) {
  RawStream stream(*raw_);
  ASSERT_OK_AND_ASSIGN(const v1::Welcome welcome, stream.Hello());
  const uint64_t id = welcome.session_id();
  EXPECT_STATUS(raw_->Allocate(id, 0), StatusCode::kInvalidArgument, "requested_bytes");
  for (const uint64_t bytes :
       {~uint64_t{0}, ~uint64_t{0} - 511, uint64_t{1} << 63, uint64_t{1} << 60, (uint64_t{1} << 60) - 1, 257_MiB}) {
    const auto refused = raw_->Allocate(id, bytes);
    EXPECT_STATUS(refused, StatusCode::kResourceExhausted, "larger_than_device");
    const std::optional<OutOfMemory> oom = GetOutOfMemory(refused.status());
    ASSERT_TRUE(oom.has_value()) << bytes;
    EXPECT_EQ(oom->requested_bytes, bytes);
    EXPECT_EQ(oom->cause, OutOfMemory::Cause::kLargerThanDevice);
  }
  ASSERT_OK_AND_ASSIGN(const v1::GetMemoryStatsResponse stats, raw_->GetMemoryStats(id));
  EXPECT_EQ(stats.stats().reserved_bytes().all().current(), 0u);
  EXPECT_EQ(stats.stats().num_ooms(), 6u);
  EXPECT_OK(raw_->Allocate(id, 1));
  EXPECT_OK(stream.Goodbye());
}

TEST_F(BadInputTest, Scopes) {
  RawStream stream(*raw_);
  ASSERT_OK_AND_ASSIGN(const v1::Welcome welcome, stream.Hello());
  v1::AllocateRequest request;
  request.set_session_id(welcome.session_id());
  request.set_requested_bytes(1000);
  for (int i = 0; i < 65; ++i) request.add_scope()->set_name("within");
  EXPECT_STATUS(raw_->Allocate(request), StatusCode::kInvalidArgument, "scope: 65");
  request.mutable_scope()->RemoveLast();
  EXPECT_OK(raw_->Allocate(request));
  // A client may send any number of scopes. The daemon shows all scopes beyond the bound as one scope.
  for (int i = 0; i < 5000; ++i) {
    request.clear_scope();
    v1::MemoryScope* const scope = request.add_scope();
    scope->set_name(absl::StrCat(std::string(i % 3 == 0 ? 2000 : 10, 'n'), i));
    scope->set_file(std::string(1000, 'f'));
    scope->set_line(static_cast<uint32_t>(i));
    const auto allocated = raw_->Allocate(request);
    ASSERT_OK(allocated.status());
    ASSERT_OK(raw_->Free(welcome.session_id(), {allocated->block_id()}));
  }
  ASSERT_OK_AND_ASSIGN(const std::vector<v1::GetSnapshotResponse> parts,
                       raw_->GetSnapshot(Ref(welcome.session_id()), /*device=*/0));
  HeapSnapshot heap;
  for (const v1::GetSnapshotResponse& part : parts) ASSERT_OK(AddSnapshotPart(part, &heap));
  EXPECT_LE(heap.scopes.size(), ScopeTable::kMaxScopes + 1);
  size_t bytes = 0;
  for (const Scope& scope : heap.scopes) bytes += scope.name.size() + scope.file.size();
  EXPECT_LE(bytes, ScopeTable::kMaxTextBytes + 100);
  EXPECT_OK(stream.Goodbye());
}

TEST_F(BadInputTest, SessionsOfOthersAndOfNobody) {
  for (const uint64_t id : {uint64_t{0}, uint64_t{999999}, ~uint64_t{0}}) {
    EXPECT_STATUS(raw_->Allocate(id, 1000), StatusCode::kNotFound, "session_id");
    EXPECT_STATUS(raw_->Free(id, {1}), StatusCode::kNotFound, "session_id");
    EXPECT_STATUS(raw_->EmptyCache(id), StatusCode::kNotFound, "session_id");
    EXPECT_STATUS(raw_->GetMemoryStats(id), StatusCode::kNotFound, "session_id");
    EXPECT_STATUS(raw_->ResetPeakStats(id), StatusCode::kNotFound, "session_id");
  }
  // The test's process is not the witness.
  EXPECT_STATUS(raw_->Allocate(WitnessId(), 1000), StatusCode::kPermissionDenied, "another process");
  EXPECT_STATUS(raw_->Free(WitnessId(), {1}), StatusCode::kPermissionDenied, "another process");
  EXPECT_STATUS(raw_->EmptyCache(WitnessId()), StatusCode::kPermissionDenied, "another process");
  EXPECT_STATUS(raw_->GetMemoryStats(WitnessId()), StatusCode::kPermissionDenied, "another process");
  EXPECT_STATUS(raw_->ResetPeakStats(WitnessId()), StatusCode::kPermissionDenied, "another process");
}

TEST_F(BadInputTest, Devices) {
  RawStream stream(*raw_);
  ASSERT_OK_AND_ASSIGN(const v1::Welcome welcome, stream.Hello());
  const uint64_t id = welcome.session_id();
  for (const uint32_t device : {1u, 1u << 31, ~0u}) {
    EXPECT_STATUS(raw_->Allocate(id, 1000, device), StatusCode::kNotFound, "device");
    EXPECT_STATUS(raw_->GetMemoryStats(id, device), StatusCode::kNotFound, "device");
    EXPECT_STATUS(raw_->ResetPeakStats(id, device), StatusCode::kNotFound, "device");
    EXPECT_STATUS(raw_->GetSnapshot(Ref(id), device), StatusCode::kNotFound, "device");
  }
  EXPECT_OK(stream.Goodbye());
}

TEST_F(BadInputTest, FreeTakesAllOrNothing) {
  RawStream stream(*raw_);
  ASSERT_OK_AND_ASSIGN(const v1::Welcome welcome, stream.Hello());
  const uint64_t id = welcome.session_id();
  std::vector<uint64_t> blocks;
  for (int i = 0; i < 3; ++i) {
    ASSERT_OK_AND_ASSIGN(const v1::AllocateResponse block, raw_->Allocate(id, 1000));
    blocks.push_back(block.block_id());
  }
  const auto held = [&] {
    const auto stats = raw_->GetMemoryStats(id);
    return stats.ok() ? stats->stats().allocation().all().current() : 999;
  };
  EXPECT_STATUS(raw_->Free(id, {}), StatusCode::kInvalidArgument, "block_ids");
  EXPECT_STATUS(raw_->Free(id, std::vector<uint64_t>(1025, blocks[0])), StatusCode::kInvalidArgument, "1024");
  EXPECT_STATUS(raw_->Free(id, {blocks[0], blocks[1], blocks[0]}), StatusCode::kInvalidArgument, "twice");
  EXPECT_STATUS(raw_->Free(id, {blocks[0], blocks[1], 999999}), StatusCode::kNotFound, "999999");
  EXPECT_STATUS(raw_->Free(id, {0}), StatusCode::kNotFound, "block_ids");
  EXPECT_STATUS(raw_->Free(id, {~uint64_t{0}}), StatusCode::kNotFound, "block_ids");
  EXPECT_EQ(held(), 3u);
  EXPECT_OK(raw_->Free(id, {blocks[1]}));
  EXPECT_STATUS(raw_->Free(id, {blocks[1]}), StatusCode::kNotFound, "freed before");
  EXPECT_STATUS(raw_->Free(id, {blocks[0], blocks[1]}), StatusCode::kNotFound, "freed before");
  EXPECT_EQ(held(), 2u);

  // A session cannot free a block of another session of the same process.
  RawStream other(*raw_);
  ASSERT_OK_AND_ASSIGN(const v1::Welcome second, other.Hello());
  EXPECT_STATUS(raw_->Free(second.session_id(), {blocks[0]}), StatusCode::kNotFound, "holds no block");
  EXPECT_EQ(held(), 2u);
  EXPECT_OK(raw_->Free(id, {blocks[0], blocks[2]}));
  EXPECT_EQ(held(), 0u);
  EXPECT_OK(other.Goodbye());
  EXPECT_OK(stream.Goodbye());
}

TEST_F(BadInputTest, ManyBlocksInOneFree) {
  RawStream stream(*raw_);
  ASSERT_OK_AND_ASSIGN(const v1::Welcome welcome, stream.Hello());
  std::vector<uint64_t> blocks;
  for (int i = 0; i < 1024; ++i) {
    ASSERT_OK_AND_ASSIGN(const v1::AllocateResponse block, raw_->Allocate(welcome.session_id(), 1));
    blocks.push_back(block.block_id());
  }
  EXPECT_OK(raw_->Free(welcome.session_id(), blocks));
  EXPECT_OK(stream.Goodbye());
}

TEST_F(BadInputTest, AdminCalls) {
  const v1::SessionRef unset;
  const std::vector<std::pair<v1::SessionRef, StatusCode>> refs = {
      {unset, StatusCode::kInvalidArgument},        {Ref(uint64_t{0}), StatusCode::kNotFound},
      {Ref(~uint64_t{0}), StatusCode::kNotFound},   {Ref(""), StatusCode::kNotFound},
      {Ref("no such name"), StatusCode::kNotFound}, {Ref(std::string("a\0b\n\"", 5)), StatusCode::kNotFound}};
  for (const auto& [ref, code] : refs) {
    EXPECT_EQ(raw_->GetSession(ref).status().code(), code) << ref.DebugString();
    EXPECT_EQ(raw_->SetLimit(ref, BytesLimit(0)).status().code(), code) << ref.DebugString();
    EXPECT_EQ(raw_->TrimSession(ref).status().code(), code) << ref.DebugString();
    EXPECT_EQ(raw_->EndSession(ref).status().code(), code) << ref.DebugString();
    EXPECT_EQ(raw_->GetSnapshot(ref, 0).status().code(), code) << ref.DebugString();
    EXPECT_EQ(raw_->SetRecording(ref, 1).code(), code) << ref.DebugString();
    EXPECT_EQ(raw_->HoldRecording(ref, 1).code(), code) << ref.DebugString();
  }
  EXPECT_STATUS(raw_->SetLimit(Ref("witness"), v1::Limit()), StatusCode::kInvalidArgument, "limit");
  for (const double fraction : {std::nan(""), -1.0, -0.001, 1.001, 1.5, std::numeric_limits<double>::infinity()}) {
    EXPECT_STATUS(raw_->SetLimit(Ref("witness"), FractionLimit(fraction)), StatusCode::kInvalidArgument, "fraction");
  }
  EXPECT_STATUS(raw_->GetSnapshot(Ref("witness"), 1), StatusCode::kNotFound, "device");
  EXPECT_OK(raw_->GetSnapshot(Ref("witness"), 0));
  for (const uint32_t events : {1000001u, ~0u}) {
    EXPECT_STATUS(raw_->SetRecording(Ref("witness"), events), StatusCode::kInvalidArgument,
                  absl::StrCat("max_events: ", events, " is above 1000000"));
  }
  for (const uint32_t events : {0u, 1000001u, ~0u}) {
    EXPECT_STATUS(raw_->HoldRecording(Ref("witness"), events), StatusCode::kInvalidArgument,
                  absl::StrCat("events: ", events, " is not within [1, 1000000]"));
  }
}

TEST_F(BadInputTest, OversizedAndMalformedMessages) {
  // gRPC refuses a message above 64 KiB before the daemon's code sees the message.
  EXPECT_EQ(raw_->GetSession(Ref(std::string(70000, 'n'))).status().code(), StatusCode::kResourceExhausted);
  EXPECT_EQ(raw_->Free(1, std::vector<uint64_t>(70000, 1)).code(), StatusCode::kResourceExhausted);

  // Sends bytes that are no message to every method, and to a method and a service that do not exist.
  const std::string garbage = "\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x07garbage";
  for (const char* method :
       {"Broker/Allocate",           "Broker/Free",       "Broker/EmptyCache",   "Broker/GetMemoryStats",
        "Broker/ResetPeakStats",     "Broker/GetDevices", "Broker/NoSuchMethod", "Admin/ListSessions",
        "Admin/GetSession",          "Admin/SetLimit",    "Admin/TrimSession",   "Admin/ReleaseIdle",
        "Admin/EndSession",          "Admin/GetSnapshot", "Admin/SetRecording",  "Admin/HoldRecording",
        "Admin/CreateClaim",         "Admin/UpdateClaim", "Admin/DeleteClaim",   "Admin/ListClaims",
        "NoSuchService/NoSuchMethod"}) {
    const auto answer = CallBytes(raw_->channel(), absl::StrCat("/vrambroker.v1.", method), garbage);
    EXPECT_FALSE(answer.ok()) << method;
    EXPECT_FALSE(absl::IsDeadlineExceeded(answer.status()) || absl::IsUnavailable(answer.status()))
        << method << ": " << answer.status();
  }
  // Garbage on the stream ends the call without an answer.
  EXPECT_FALSE(absl::IsDeadlineExceeded(CallBytes(raw_->channel(), "/vrambroker.v1.Broker/Session", garbage).status()));
}

// ---- The session stream ----

TEST_F(BadInputTest, Hellos) {
  const auto hello = [&](const std::function<void(v1::Hello&)>& change) {
    RawStream stream(*raw_);
    v1::SessionRequest request;
    request.mutable_hello()->set_protocol_version(1);
    change(*request.mutable_hello());
    return stream.Open(request).status();
  };
  for (const uint32_t version : {0u, 2u, ~0u}) {
    EXPECT_STATUS(hello([&](v1::Hello& h) { h.set_protocol_version(version); }), StatusCode::kFailedPrecondition,
                  "protocol_version");
  }
  for (const std::string& name :
       {std::string(64, 'n'), std::string(60000, 'n'), std::string("two words"), std::string("tab\t"),
        std::string("line\nbreak"), std::string("quote\""), std::string("brace}"), std::string("back\\slash"),
        std::string("nul\0nul", 7), std::string("\x7f"), std::string("\xc3\xa4"), std::string("a,b"),
        std::string("a=b")}) {
    EXPECT_STATUS(hello([&](v1::Hello& h) { h.set_name(name); }), StatusCode::kInvalidArgument, "name");
  }
  for (const double fraction :
       {std::nan(""), -1.0, 1.5, -std::numeric_limits<double>::infinity(), std::numeric_limits<double>::infinity()}) {
    EXPECT_STATUS(hello([&](v1::Hello& h) { h.mutable_limit()->set_fraction(fraction); }), StatusCode::kInvalidArgument,
                  "limit.fraction");
  }
  for (const int placement : {2, 99, -1}) {
    EXPECT_STATUS(hello([&](v1::Hello& h) { h.set_placement(static_cast<v1::Placement>(placement)); }),
                  StatusCode::kInvalidArgument, "placement");
  }
  for (const std::string& device : {std::string(), std::string("two words"), std::string(65, '0')}) {
    EXPECT_STATUS(hello([&](v1::Hello& h) { h.add_devices(device); }), StatusCode::kInvalidArgument, "devices: ");
  }
  EXPECT_STATUS(hello([&](v1::Hello& h) {
                  for (int i = 0; i < 65; ++i) h.add_devices("0");
                }),
                StatusCode::kInvalidArgument, "devices: 65 are named");
  EXPECT_STATUS(hello([&](v1::Hello& h) { h.add_devices("99"); }), StatusCode::kNotFound, "devices: no device 99");
  // Refused hellos leave no session behind.
  ASSERT_OK_AND_ASSIGN(const v1::ListSessionsResponse sessions, raw_->ListSessions());
  EXPECT_EQ(sessions.sessions_size(), 1);

  // Hellos at the edges of the allowed values succeed.
  RawStream longest(*raw_);
  ASSERT_OK_AND_ASSIGN(const v1::Welcome a, longest.Hello(std::string(63, 'n')));
  EXPECT_EQ(a.name(), std::string(63, 'n'));
  RawStream punctuated(*raw_);
  EXPECT_OK(punctuated.Hello("host-1/job_2:gpu@3.4", BytesLimit(~uint64_t{0})));
  RawStream unnamed(*raw_);
  ASSERT_OK_AND_ASSIGN(const v1::Welcome c, unnamed.Hello("", FractionLimit(0)));
  EXPECT_FALSE(c.name().empty());
  EXPECT_EQ(c.devices(0).limit_bytes(), 0u);
  // A hello whose mark is no mark is like a hello without a mark.
  for (const uint32_t fd : {0u, 123456u, ~0u}) {
    EXPECT_OK(hello([&](v1::Hello& h) { h.mutable_mark()->set_fd(fd); }));
  }
}

TEST_F(BadInputTest, FirstMessages) {
  std::vector<v1::SessionRequest> firsts(10);
  firsts[1].mutable_goodbye();
  firsts[2].mutable_segments_closed()->add_segment_ids(1);
  firsts[3].mutable_allocate()->mutable_request()->set_requested_bytes(1000);
  firsts[4].mutable_free()->mutable_request()->add_block_ids(1);
  firsts[5].mutable_lease()->mutable_request()->add_segment_bytes(2_MiB);
  firsts[6].mutable_return_segments()->mutable_request()->add_segment_ids(1);
  firsts[7].mutable_explain();
  firsts[8].mutable_stats();
  firsts[9].mutable_answer()->set_question_id(1);
  for (const v1::SessionRequest& first : firsts) {
    RawStream stream(*raw_);
    EXPECT_STATUS(stream.Open(first), StatusCode::kInvalidArgument, "first message must be hello");
  }
}

TEST_F(BadInputTest, LaterMessages) {
  {
    RawStream stream(*raw_);
    ASSERT_OK(stream.Hello());
    v1::SessionRequest again;
    again.mutable_hello()->set_protocol_version(1);
    stream.Send(again);
    EXPECT_STATUS(stream.End(), StatusCode::kFailedPrecondition, "hello was already sent");
  }
  {
    RawStream stream(*raw_);
    ASSERT_OK(stream.Hello());
    stream.Send(v1::SessionRequest());
    EXPECT_STATUS(stream.End(), StatusCode::kInvalidArgument, "empty");
  }
  {
    RawStream stream(*raw_);
    ASSERT_OK(stream.Hello());
    v1::SessionRequest closed;
    for (uint64_t i = 0; i < 4097; ++i) closed.mutable_segments_closed()->add_segment_ids(i);
    stream.Send(closed);
    EXPECT_STATUS(stream.End(), StatusCode::kInvalidArgument, "4096");
  }
  {
    RawStream stream(*raw_);
    ASSERT_OK(stream.Hello());
    v1::SessionRequest cannot_open;
    cannot_open.mutable_cannot_open()->set_error("a line\nof mine" + std::string(60'000, 'x') + "the end");
    stream.Send(cannot_open);
    cannot_open.mutable_cannot_open()->set_device(99);
    stream.Send(cannot_open);
    EXPECT_STATUS(stream.End(), StatusCode::kNotFound, "no device 99");
    EXPECT_TRUE(absl::StrContains(daemon_->log(), "why=\"a line\\nof mine"));
    EXPECT_FALSE(absl::StrContains(daemon_->log(), "xthe end")) << "cut";
  }
}

TEST_F(BadInputTest, SegmentsClosedUnaskedFreesNothing) {
  RawStream stream(*raw_);
  ASSERT_OK_AND_ASSIGN(const v1::Welcome welcome, stream.Hello());
  ASSERT_OK_AND_ASSIGN(const v1::AllocateResponse held, raw_->Allocate(welcome.session_id(), 1000));
  ASSERT_OK_AND_ASSIGN(const v1::AllocateResponse cached, raw_->Allocate(welcome.session_id(), 12_MiB));
  ASSERT_OK(raw_->Free(welcome.session_id(), {cached.block_id()}));
  v1::SessionRequest closed;
  // The ids name the session's own segments, used and free, the witness's segments, whose ids are easy to guess, and
  // segments that do not exist.
  for (uint64_t i = 0; i < 100; ++i) closed.mutable_segments_closed()->add_segment_ids(i);
  closed.mutable_segments_closed()->add_segment_ids(~uint64_t{0});
  for (int i = 0; i < 10; ++i) EXPECT_TRUE(stream.Send(closed));
  // A call over the same stream follows the messages: an answer to the call means that the daemon has read the
  // messages.
  v1::SessionRequest marker;
  marker.mutable_free()->set_call_id(7);
  marker.mutable_free()->mutable_request()->add_block_ids(999);
  EXPECT_TRUE(stream.Send(marker));
  const std::optional<v1::SessionResponse> answer = stream.Receive();
  ASSERT_TRUE(answer.has_value());
  EXPECT_EQ(answer->result().call_id(), 7u);
  EXPECT_EQ(answer->result().error().code(), static_cast<int>(StatusCode::kNotFound));

  ASSERT_OK_AND_ASSIGN(const v1::Session session, raw_->GetSession(Ref(welcome.session_id())));
  EXPECT_EQ(session.devices(0).reserved_bytes(), 14_MiB);
  EXPECT_OK(raw_->Free(welcome.session_id(), {held.block_id()}));
  EXPECT_OK(stream.Goodbye());
}

TEST_F(BadInputTest, AnAnswerToCloseSegmentsCountsOnce) {
  RawStream stream(*raw_);
  ASSERT_OK_AND_ASSIGN(const v1::Welcome welcome, stream.Hello());
  ASSERT_OK_AND_ASSIGN(const v1::AllocateResponse block, raw_->Allocate(welcome.session_id(), 12_MiB));
  ASSERT_OK(raw_->Free(welcome.session_id(), {block.block_id()}));
  absl::StatusOr<uint64_t> released;
  std::thread emptying([&] { released = raw_->EmptyCache(welcome.session_id()); });
  const std::optional<v1::SessionResponse> asked = stream.Receive();
  ASSERT_TRUE(asked.has_value());
  ASSERT_EQ(asked->close_segments().segment_ids_size(), 1);
  EXPECT_EQ(asked->close_segments().segment_ids(0), block.segment_id());
  v1::SessionRequest closed;
  for (int i = 0; i < 1000; ++i) closed.mutable_segments_closed()->add_segment_ids(block.segment_id());
  EXPECT_TRUE(stream.Send(closed));
  EXPECT_TRUE(stream.Send(closed));
  emptying.join();
  ASSERT_OK(released);
  EXPECT_EQ(*released, 12_MiB);
  ASSERT_OK_AND_ASSIGN(const v1::Session session, raw_->GetSession(Ref(welcome.session_id())));
  EXPECT_EQ(session.devices(0).reserved_bytes(), 0u);
  EXPECT_OK(stream.Goodbye());
}

TEST_F(BadInputTest, CallsOverTheStreamAreCheckedLikeOthers) {
  RawStream stream(*raw_);
  ASSERT_OK(stream.Hello());
  const auto ask = [&](const v1::SessionRequest& request) {
    stream.Send(request);
    const std::optional<v1::SessionResponse> response = stream.Receive();
    return response.has_value() ? response->result() : v1::CallResult();
  };
  v1::SessionRequest allocate;
  allocate.mutable_allocate()->set_call_id(~uint64_t{0});
  v1::AllocateRequest& what = *allocate.mutable_allocate()->mutable_request();
  what.set_session_id(WitnessId());  // the daemon ignores the id on the stream
  EXPECT_EQ(ask(allocate).error().code(), static_cast<int>(StatusCode::kInvalidArgument));
  what.set_requested_bytes(~uint64_t{0});
  const v1::CallResult refused = ask(allocate);
  EXPECT_EQ(refused.call_id(), ~uint64_t{0});
  EXPECT_EQ(refused.error().code(), static_cast<int>(StatusCode::kResourceExhausted));
  ASSERT_EQ(refused.error().details_size(), 1);
  EXPECT_EQ(refused.error().details(0).type_url(), "type.googleapis.com/vrambroker.v1.OutOfMemory");
  what.set_requested_bytes(1000);
  what.set_device(5);
  EXPECT_EQ(ask(allocate).error().code(), static_cast<int>(StatusCode::kNotFound));
  what.set_device(0);
  const v1::CallResult allocated = ask(allocate);
  EXPECT_EQ(allocated.allocated().block_bytes(), 1024u);

  v1::SessionRequest free;
  v1::FreeRequest& which = *free.mutable_free()->mutable_request();
  EXPECT_EQ(ask(free).error().code(), static_cast<int>(StatusCode::kInvalidArgument));
  which.add_block_ids(allocated.allocated().block_id());
  which.add_block_ids(allocated.allocated().block_id());
  EXPECT_EQ(ask(free).error().code(), static_cast<int>(StatusCode::kInvalidArgument));
  which.mutable_block_ids()->RemoveLast();
  EXPECT_TRUE(ask(free).has_freed());
  EXPECT_EQ(ask(free).error().code(), static_cast<int>(StatusCode::kNotFound));
  EXPECT_OK(stream.Goodbye());
}

// ---- Connections ----

TEST_F(BadInputTest, ManyConnectionsOpenedAndDropped) {
  const int count = kSanitized ? 400 : 2000;
  for (const char* name : {"/vrambroker.sock", "/vrambroker-fd.sock"}) {
    const int type = std::string(name) == "/vrambroker.sock" ? SOCK_STREAM : SOCK_SEQPACKET;
    for (int i = 0; i < count; ++i) {
      const UniqueFd fd = ConnectTo(dir() + name, type);
      ASSERT_TRUE(fd.valid()) << i << ": " << std::strerror(errno);
    }
  }
  // Many connections are open at the same time.
  std::vector<UniqueFd> open;
  for (int i = 0; i < 300; ++i) open.push_back(ConnectTo(dir() + "/vrambroker.sock", SOCK_STREAM));
  ExpectUnharmed();
  open.clear();
  // The daemon gives every descriptor back.
  EXPECT_TRUE(WaitFor([&] {
    const auto entries = std::filesystem::directory_iterator(absl::StrCat("/proc/", daemon_->pid(), "/fd"));
    return std::distance(begin(entries), end(entries)) < 100;
  }));
}

// Returns the HTTP/2 bytes that begin a call: the headers, without the message.
std::string BeginningOfCall(const std::string& method) {
  const auto frame = [](char type, char flags, char stream, const std::string& payload) {
    return std::string{0, 0, static_cast<char>(payload.size()), type, flags, 0, 0, 0, stream} + payload;
  };
  const auto header = [](const std::string& name, const std::string& value) {  // HPACK: a literal, not indexed
    return absl::StrCat(std::string{0, static_cast<char>(name.size())}, name,
                        std::string{static_cast<char>(value.size())}, value);
  };
  const std::string headers = absl::StrCat(
      header(":method", "POST"), header(":scheme", "http"), header(":path", absl::StrCat("/vrambroker.v1.", method)),
      header(":authority", "localhost"), header("te", "trailers"), header("content-type", "application/grpc"));
  return absl::StrCat("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", frame(/*SETTINGS*/ 4, 0, 0, ""),
                      frame(/*HEADERS*/ 1, /*END_HEADERS*/ 4, 1, headers));
}

TEST_F(BadInputTest, CallsWhoseConnectionVanishedCountAsCancelled) {
  Begin({.http = true});
  const auto count = [&](const char* method, const char* code) {
    return daemon_->Metrics().Sum("vrambroker_rpc_requests_total", {{"method", method}, {"code", code}});
  };
  EXPECT_FALSE(CallBytes(raw_->channel(), "/vrambroker.v1.Broker/Free", "\xff").ok());
  EXPECT_TRUE(WaitFor([&] { return count("Free", "UNIMPLEMENTED") == 1; })) << "what its caller was told";
  for (const auto& [service, method] : {std::pair("Broker", "Allocate"), std::pair("Admin", "GetSession")}) {
    const std::string beginning = BeginningOfCall(absl::StrCat(service, "/", method));
    ASSERT_LT(beginning.size(), 256u);
    EXPECT_TRUE(WaitFor([&, method = method] {
      // gRPC drops some of the calls unseen.
      const UniqueFd stream = ConnectTo(dir() + "/vrambroker.sock", SOCK_STREAM);
      EXPECT_EQ(send(stream.get(), beginning.data(), beginning.size(), MSG_NOSIGNAL),
                static_cast<ssize_t>(beginning.size()));
      return count(method, "CANCELLED") + count(method, "UNIMPLEMENTED") >= 3;
    }));
    EXPECT_EQ(count(method, "UNIMPLEMENTED"), 0);
    EXPECT_EQ(count(method, "UNAUTHENTICATED"), 0);
    EXPECT_TRUE(WaitFor([&, method = method] {
      return daemon_->Metrics().Value("vrambroker_rpc_in_flight", {{"method", method}}) == 0;
    }));
  }
}

TEST_F(BadInputTest, GarbageOnBothSockets) {
  std::vector<std::string> garbage = {
      std::string("GET / HTTP/1.1\r\n\r\n"), std::string(100000, '\xff'), std::string(100000, '\0'),
      std::string("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n") + std::string(5000, 'x'),
      std::string("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n") + std::string("\xff\xff\xff\x00\x00\x00\x00\x00\x00", 9)};
  std::string noise(65536, 0);
  Fill(noise.data(), noise.size(), 5);
  garbage.push_back(noise);
  for (const std::string& bytes : garbage) {
    const UniqueFd stream = ConnectTo(dir() + "/vrambroker.sock", SOCK_STREAM);
    ASSERT_TRUE(stream.valid());
    (void)!send(stream.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    const UniqueFd packets = ConnectTo(dir() + "/vrambroker-fd.sock", SOCK_SEQPACKET);
    ASSERT_TRUE(packets.valid());
    (void)!send(packets.get(), bytes.data(), std::min<size_t>(bytes.size(), 60000), MSG_NOSIGNAL | MSG_DONTWAIT);
    ExpectUnharmed();
  }
}

// ---- The descriptor socket ----

TEST_F(BadInputTest, Tickets) {
  HOST_DEVICE_ONLY();
  client_internal::DescriptorChannel channel(dir());  // all fetches share one connection, which survives bad tickets
  const auto fetch = [&](absl::string_view ticket) { return channel.Fetch(ticket, kPatience); };
  RawStream stream(*raw_);
  ASSERT_OK_AND_ASSIGN(const v1::Welcome welcome, stream.Hello());
  ASSERT_OK_AND_ASSIGN(const v1::AllocateResponse block, raw_->Allocate(welcome.session_id(), 1000));
  const std::string ticket = block.handle().descriptor_ticket();
  ASSERT_EQ(ticket.size(), 16u);
  EXPECT_STATUS(fetch(ticket.substr(0, 15)), StatusCode::kInternal, "16 bytes");
  EXPECT_STATUS(fetch(ticket + "x"), StatusCode::kInternal, "16 bytes");
  EXPECT_STATUS(fetch(std::string(60000, 't')), StatusCode::kInternal, "16 bytes");
  EXPECT_STATUS(fetch("t"), StatusCode::kInternal, "16 bytes");
  EXPECT_STATUS(fetch(std::string(16, '\0')), StatusCode::kUnavailable, "ticket");
  std::string wrong = ticket;
  wrong[15] = static_cast<char>(wrong[15] ^ 1);
  EXPECT_STATUS(fetch(wrong), StatusCode::kUnavailable, "ticket");
  // Another process cannot use the ticket, and does not use up the ticket.
  EXPECT_FALSE(witness_->Call(absl::StrCat("fetch ", absl::BytesToHexString(ticket))).ok());
  EXPECT_OK(fetch(ticket));
  EXPECT_STATUS(fetch(ticket), StatusCode::kUnavailable, "ticket");
  // An unused ticket ends with its session.
  ASSERT_OK_AND_ASSIGN(const v1::AllocateResponse unused, raw_->Allocate(welcome.session_id(), 12_MiB));
  EXPECT_OK(stream.Goodbye());
  EXPECT_STATUS(fetch(unused.handle().descriptor_ticket()), StatusCode::kUnavailable, "ticket");
}

TEST_F(BadInputTest, SilentAndPushyDescriptorConnections) {
  std::vector<UniqueFd> silent;
  for (int i = 0; i < 100; ++i) silent.push_back(ConnectTo(dir() + "/vrambroker-fd.sock", SOCK_SEQPACKET));
  // A flood of packets whose answers nobody reads.
  for (const UniqueFd& fd : silent) {
    for (int i = 0; i < 300; ++i) (void)!send(fd.get(), "xxxxxxxxxxxxxxxx", 16, MSG_NOSIGNAL | MSG_DONTWAIT);
  }
  ExpectUnharmed();
  silent.clear();
  EXPECT_TRUE(WaitFor([&] {
    const auto answer = client_internal::DescriptorChannel(dir()).Fetch(std::string(16, 'x'), kPatience);
    return absl::StrContains(answer.status().message(), "ticket");
  }));
}

// ---- Caps ----

TEST_F(BadInputTest, SessionsPerUser) {
  Begin({.config = "max_sessions_per_uid: 5"});
  std::vector<std::unique_ptr<RawStream>> streams;
  for (int i = 0; i < 4; ++i) {  // the witness has the fifth session
    streams.push_back(std::make_unique<RawStream>(*raw_));
    ASSERT_OK(streams.back()->Hello("many"));
  }
  {
    RawStream more(*raw_);
    EXPECT_STATUS(more.Hello("more"), StatusCode::kResourceExhausted, "max_sessions_per_uid");
  }
  EXPECT_OK(streams.back()->Goodbye());
  RawStream again(*raw_);
  EXPECT_OK(again.Hello("again"));
}

TEST_F(BadInputTest, BlocksPerSession) {
  Begin({.config = "max_blocks_per_session: 10"});
  RawStream stream(*raw_);
  ASSERT_OK_AND_ASSIGN(const v1::Welcome welcome, stream.Hello());
  std::vector<uint64_t> blocks;
  for (int i = 0; i < 10; ++i) {
    ASSERT_OK_AND_ASSIGN(const v1::AllocateResponse block, raw_->Allocate(welcome.session_id(), 1000));
    blocks.push_back(block.block_id());
  }
  const auto refused = raw_->Allocate(welcome.session_id(), 1000);
  EXPECT_STATUS(refused, StatusCode::kResourceExhausted, "max_blocks_per_session");
  EXPECT_FALSE(GetOutOfMemory(refused.status()).has_value()) << "this is not about memory";
  EXPECT_OK(raw_->Free(welcome.session_id(), {blocks[3]}));
  EXPECT_OK(raw_->Allocate(welcome.session_id(), 1000));
  EXPECT_OK(stream.Goodbye());
}

TEST_F(BadInputTest, ACallMadeWhileItsSessionEnds) {
  for (int i = 0; i < (kSanitized ? 5 : 30); ++i) {
    RawStream stream(*raw_);
    ASSERT_OK_AND_ASSIGN(const v1::Welcome welcome, stream.Hello());
    std::atomic<bool> stop{false};
    std::thread caller([&] {
      while (!stop) {
        const auto block = raw_->Allocate(welcome.session_id(), 12_MiB);
        const StatusCode code = block.status().code();
        EXPECT_TRUE(block.ok() || code == StatusCode::kAborted || code == StatusCode::kNotFound ||
                    code == StatusCode::kResourceExhausted)
            << block.status();
        if (code == StatusCode::kNotFound) break;
      }
    });
    EXPECT_OK(stream.Goodbye());
    stop = true;
    caller.join();
  }
}

TEST_F(BadInputTest, AnEndlessSessionName) {
  RawStream stream(*raw_);
  ASSERT_OK(stream.Hello());
  const absl::Status status = raw_->GetSession(Ref(std::string(60000, 'n'))).status();
  EXPECT_TRUE(absl::IsInvalidArgument(status)) << absl::StatusCodeToString(status.code());
  // The connection still works, and so does the stream on the connection.
  EXPECT_OK(raw_->ListSessions());
  EXPECT_OK(stream.Goodbye());
}

}  // namespace
}  // namespace vrambroker::testing_support
