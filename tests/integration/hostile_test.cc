// SPDX-License-Identifier: Apache-2.0
//
// Clients that mean harm: a client cannot read, free or change memory of another process, and a refusal names the
// daemon's bound. bad_input_test.cc covers malformed input.
#include <google/protobuf/util/message_differencer.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "allocator/base/bytes.h"
#include "tests/support/daemon_test.h"
#include "tests/support/raw_client.h"

namespace vrambroker::testing_support {
namespace {

using absl::StatusCode;
using BrokerStub = v1::Broker::Stub;

absl::StatusOr<v1::LeaseSegmentsResponse> Lease(RawClient& client, uint64_t session, size_t count) {
  v1::LeaseSegmentsRequest request;
  request.set_session_id(session);
  for (size_t i = 0; i < count; ++i) request.add_segment_bytes(2_MiB);
  v1::LeaseSegmentsResponse response;
  absl::Status status = RawClient::Call(client.broker(), &BrokerStub::LeaseSegments, request, &response);
  if (!status.ok()) return status;
  return response;
}

absl::Status Return(RawClient& client, uint64_t session, const std::vector<uint64_t>& segments) {
  v1::ReturnSegmentsRequest request;
  request.set_session_id(session);
  request.mutable_segment_ids()->Add(segments.begin(), segments.end());
  v1::ReturnSegmentsResponse response;
  return RawClient::Call(client.broker(), &BrokerStub::ReturnSegments, request, &response);
}

class HostileTest : public DaemonTest {
 protected:
  void Begin(const std::string& config, int devices = 1) {
    ASSERT_OK(StartDaemon({.config = config, .devices = devices}));
    ASSERT_OK_AND_ASSIGN(RawClient raw, RawClient::Connect(dir()));
    raw_.emplace(std::move(raw));
  }
  void TearDown() override {
    raw_.reset();
    DaemonTest::TearDown();
  }

  std::optional<RawClient> raw_;
};

// ---- Memory of other processes ----

// Two processes of the same user hold memory, one process of each placement. The test's own process tries every call
// with the ids of the two processes.
class VictimsTest : public HostileTest {
 protected:
  void SetUp() override {
    Begin("");
    if (HasFatalFailure()) return;
    for (const char* placement : {"leased", "remote"}) {
      auto victim = ClientProcess::Start(dir());
      ASSERT_OK(victim);
      ASSERT_OK(victim->Call(absl::StrCat("connect ", placement, " - ", placement)));
      ASSERT_OK(victim->Call("fill 5 300000 41"));
      victims_.push_back(*std::move(victim));
      ASSERT_OK_AND_ASSIGN(const v1::Session session, raw_->GetSession(Ref(std::string(placement))));
      before_.push_back(session);
    }
  }

  void TearDown() override {
    if (!HasFatalFailure()) ExpectUnharmed();
    victims_.clear();
    HostileTest::TearDown();
  }

  void ExpectUnharmed() {
    for (size_t i = 0; i < victims_.size(); ++i) {
      EXPECT_OK(victims_[i].Call("check 41"));
      ASSERT_OK_AND_ASSIGN(const v1::Session now, raw_->GetSession(Ref(before_[i].id())));
      EXPECT_TRUE(google::protobuf::util::MessageDifferencer::Equals(Lasting(before_[i]), Lasting(now)))
          << before_[i].DebugString() << now.DebugString();
    }
  }

  std::vector<ClientProcess> victims_;
  std::vector<v1::Session> before_;
};

// Ids of the victims' blocks and segments, and a few more ids: the daemon counts both kinds from 1.
constexpr uint64_t kSomeIds = 20;

TEST_F(VictimsTest, NoCallTakesTheSessionOfAnotherProcess) {
  for (const v1::Session& victim : before_) {
    const uint64_t id = victim.id();
    const auto expect_denied = [](const absl::Status& status) {
      EXPECT_STATUS(status, StatusCode::kPermissionDenied, "another process");
    };
    expect_denied(raw_->Allocate(id, 1000).status());
    expect_denied(Lease(*raw_, id, 1).status());
    expect_denied(raw_->EmptyCache(id).status());
    expect_denied(raw_->GetMemoryStats(id).status());
    expect_denied(raw_->ResetPeakStats(id));
    for (uint64_t guess = 1; guess <= kSomeIds; ++guess) {
      expect_denied(raw_->Free(id, {guess}));
      expect_denied(Return(*raw_, id, {guess}));
    }
  }
}

TEST_F(VictimsTest, NoSessionFreesWhatAnotherHolds) {
  RawStream remote(*raw_);
  ASSERT_OK_AND_ASSIGN(const v1::Welcome freeing, remote.Hello("freeing"));
  RawStream leased(*raw_);
  ASSERT_OK_AND_ASSIGN(const v1::Welcome returning, leased.Open(LeasingHello("returning")));
  const auto ask = [](RawStream& stream, const v1::SessionRequest& request) {
    stream.Send(request);
    const std::optional<v1::SessionResponse> response = stream.Receive();
    return response.has_value() ? response->result().error().code() : -1;
  };
  constexpr auto kNotFound = static_cast<int>(StatusCode::kNotFound);
  v1::SessionRequest closed;
  for (uint64_t guess = 1; guess <= kSomeIds; ++guess) {
    EXPECT_STATUS(raw_->Free(freeing.session_id(), {guess}), StatusCode::kNotFound, "holds no block");
    EXPECT_STATUS(Return(*raw_, returning.session_id(), {guess}), StatusCode::kNotFound, "holds no segment");
    v1::SessionRequest free;
    free.mutable_free()->mutable_request()->add_block_ids(guess);
    free.mutable_free()->mutable_request()->set_session_id(before_[1].id());  // the daemon ignores the id here
    EXPECT_EQ(ask(remote, free), kNotFound);
    v1::SessionRequest give_back;
    give_back.mutable_return_segments()->mutable_request()->add_segment_ids(guess);
    give_back.mutable_return_segments()->mutable_request()->set_session_id(before_[0].id());
    EXPECT_EQ(ask(leased, give_back), kNotFound);
    closed.mutable_segments_closed()->add_segment_ids(guess);
  }
  for (RawStream* stream : {&remote, &leased}) stream->Send(closed);
  EXPECT_OK(remote.Goodbye());
  EXPECT_OK(leased.Goodbye());
}

TEST_F(VictimsTest, NoSessionIsResumedWithoutItsToken) {
  for (const std::string& token : {std::string(16, '\0'), std::string(16, '\xff')}) {
    v1::SessionRequest request = LeasingHello("leased");
    request.mutable_hello()->mutable_resume()->set_token(token);
    for (uint64_t guess = 1; guess <= kSomeIds; ++guess) {
      request.mutable_hello()->mutable_resume()->add_segment_ids(guess);
    }
    RawStream stream(*raw_);
    EXPECT_STATUS(stream.Open(request), StatusCode::kNotFound, "resume.token");
  }
}

TEST_F(VictimsTest, AnswersToTheQuestionsOfOthersAreNobodys) {
  RawStream stream(*raw_);
  ASSERT_OK(stream.Open(LeasingHello("eager")));
  v1::SessionRequest answer;
  answer.mutable_answer()->set_released_bytes(1_GiB);
  answer.mutable_answer()->mutable_snapshot()->add_segments()->set_id(12345);
  for (uint64_t guess = 1; guess <= kSomeIds; ++guess) {
    answer.mutable_answer()->set_question_id(guess);
    ASSERT_TRUE(stream.Send(answer));
  }
  ASSERT_OK_AND_ASSIGN(const std::vector<v1::GetSnapshotResponse> parts, raw_->GetSnapshot(Ref("leased"), 0));
  for (const v1::GetSnapshotResponse& part : parts) {
    for (const auto& segment : part.segments()) EXPECT_NE(segment.id(), 12345u);
  }
  EXPECT_OK(stream.Goodbye());
}

// ---- Bounds ----

TEST_F(HostileTest, SegmentsPerSession) {
  Begin("max_segments_per_session: 5", 2);
  RawStream stream(*raw_);
  ASSERT_OK_AND_ASSIGN(const v1::Welcome welcome, stream.Open(LeasingHello("many")));
  const uint64_t id = welcome.session_id();
  EXPECT_STATUS(Lease(*raw_, id, 6), StatusCode::kResourceExhausted, "max_segments_per_session");
  ASSERT_OK_AND_ASSIGN(const v1::LeaseSegmentsResponse held, Lease(*raw_, id, 4));
  const auto refused = Lease(*raw_, id, 2);
  EXPECT_STATUS(refused, StatusCode::kResourceExhausted, "holds 4 segments, and max_segments_per_session allows 5");
  EXPECT_FALSE(GetOutOfMemory(refused.status()).has_value()) << "this is not about memory";
  EXPECT_OK(Lease(*raw_, id, 1));
  v1::SessionRequest lease;  // a lease over the stream, and from the other device
  lease.mutable_lease()->mutable_request()->set_device(1);
  lease.mutable_lease()->mutable_request()->add_segment_bytes(2_MiB);
  stream.Send(lease);
  EXPECT_EQ(stream.Receive()->result().error().code(), static_cast<int>(StatusCode::kResourceExhausted));
  // Another session has its own bound. A returned segment makes room for a new lease.
  RawStream other(*raw_);
  ASSERT_OK_AND_ASSIGN(const v1::Welcome second, other.Open(LeasingHello("another")));
  EXPECT_OK(Lease(*raw_, second.session_id(), 5));
  EXPECT_OK(Return(*raw_, id, {held.segments(0).segment_id()}));
  EXPECT_OK(Lease(*raw_, id, 1));
  EXPECT_OK(stream.Goodbye());
  EXPECT_OK(other.Goodbye());
}

bool Refused(const absl::Status& status, absl::string_view part) {
  return absl::IsResourceExhausted(status) && absl::StrContains(status.message(), part);
}

bool IsOverTheRate(const absl::Status& status) {
  return Refused(status, "max_calls_per_second_per_uid");
}

TEST_F(HostileTest, EveryCallCountsAgainstTheRate) {
  Begin("max_calls_per_second_per_uid: 3");
  const std::vector<std::pair<const char*, std::function<absl::Status()>>> calls = {
      {"Allocate", [&] { return raw_->Allocate(999, 1).status(); }},
      {"Free", [&] { return raw_->Free(999, {1}); }},
      {"LeaseSegments", [&] { return Lease(*raw_, 999, 1).status(); }},
      {"ReturnSegments", [&] { return Return(*raw_, 999, {1}); }},
      {"EmptyCache", [&] { return raw_->EmptyCache(999).status(); }},
      {"GetMemoryStats", [&] { return raw_->GetMemoryStats(999).status(); }},
      {"ResetPeakStats", [&] { return raw_->ResetPeakStats(999); }},
      {"GetDevices", [&] { return raw_->GetDevice().status(); }},
      {"Session", [&] { return RawStream(*raw_).Hello().status(); }},
      {"ListSessions", [&] { return raw_->ListSessions().status(); }},
      {"GetSession", [&] { return raw_->GetSession(Ref(999)).status(); }},
      {"SetLimit", [&] { return raw_->SetLimit(Ref(999), BytesLimit(1)).status(); }},
      {"TrimSession", [&] { return raw_->TrimSession(Ref(999)).status(); }},
      {"EndSession", [&] { return raw_->EndSession(Ref(999)).status(); }},
      {"GetSnapshot", [&] { return raw_->GetSnapshot(Ref(999), 0).status(); }},
      {"SetRecording", [&] { return raw_->SetRecording(Ref(999), 1); }},
      {"HoldRecording", [&] { return raw_->HoldRecording(Ref(999), 1); }},
  };
  for (const auto& [name, call] : calls) {
    // Six calls succeed at once, then three calls a second.
    EXPECT_TRUE(WaitFor([&, &call = call] { return IsOverTheRate(call()); })) << name;
    EXPECT_TRUE(WaitFor([&, &call = call] { return !IsOverTheRate(call()); })) << name << " works again";
  }
}

TEST_F(HostileTest, WhatIsGivenBackOverTheRateIsTaken) {
  Begin("max_calls_per_second_per_uid: 20");
  ASSERT_OK_AND_ASSIGN(Client leased, Connect("leased"));
  ASSERT_OK_AND_ASSIGN(void* const segment, leased.LeaseSegment(40_MiB));
  EXPECT_OK(leased.Allocate(80_MiB));
  placement_ = Placement::kRemote;
  ASSERT_OK_AND_ASSIGN(Client remote, Connect("remote"));
  ASSERT_OK_AND_ASSIGN(Buffer block, remote.Allocate(20_MiB));
  RawStream raw_session(*raw_);
  ASSERT_OK_AND_ASSIGN(const v1::Welcome welcome, raw_session.Hello());
  ASSERT_OK_AND_ASSIGN(const v1::AllocateResponse raw_block, raw_->Allocate(welcome.session_id(), 20_MiB));

  std::atomic<bool> stop{false};
  std::thread flood([&] {
    while (!stop) (void)raw_->GetDevice();
  });
  const auto expect_over_the_rate = [&] {
    EXPECT_TRUE(WaitFor([&] { return IsOverTheRate(raw_->GetDevice().status()); }));
  };
  expect_over_the_rate();
  EXPECT_OK(leased.ReturnSegment(segment));
  expect_over_the_rate();
  ASSERT_OK_AND_ASSIGN(const uint64_t emptied, leased.EmptyCache());
  EXPECT_EQ(emptied, 80_MiB);
  expect_over_the_rate();
  EXPECT_OK(block.Reset());
  expect_over_the_rate();
  EXPECT_OK(raw_->Free(welcome.session_id(), {raw_block.block_id()}));
  stop = true;
  flood.join();

  absl::StatusOr<v1::ListSessionsResponse> sessions;
  ASSERT_TRUE(WaitFor([&] {
    sessions = raw_->ListSessions();
    return sessions.ok();
  }));
  for (const v1::Session& session : sessions->sessions()) {
    EXPECT_EQ(session.devices(0).stats().allocated_bytes().all().current(), 0u) << session.name();
    const bool leases = session.name() == "leased";  // the daemon owns the caches of the other sessions
    EXPECT_EQ(leases ? session.devices(0).reserved_bytes() : 0, 0u);
  }
}

TEST_F(HostileTest, CallsOverTheRateDoNotEndASession) {
  Begin("max_calls_per_second_per_uid: 1");
  RawStream stream(*raw_);
  ASSERT_OK(stream.Hello());
  v1::SessionRequest free;
  free.mutable_free()->mutable_request()->add_block_ids(999);
  int refused = 0;
  // Sends more messages than a stream may have without answers.
  for (uint64_t i = 0; i < 2000; ++i) {
    free.mutable_free()->set_call_id(i);
    ASSERT_TRUE(stream.Send(free));
    const std::optional<v1::SessionResponse> response = stream.Receive();
    ASSERT_TRUE(response.has_value());
    EXPECT_EQ(response->result().call_id(), i);
    if (response->result().error().code() == static_cast<int>(StatusCode::kNotFound)) continue;
    ++refused;
    EXPECT_EQ(response->result().error().code(), static_cast<int>(StatusCode::kResourceExhausted));
    EXPECT_TRUE(absl::StrContains(response->result().error().message(), "max_calls_per_second_per_uid"));
  }
  EXPECT_GT(refused, 0);
  EXPECT_OK(stream.Goodbye()) << "which is never refused";
}

TEST_F(HostileTest, AFloodOfMessagesWithoutAnswersEndsTheStream) {
  Begin("max_calls_per_second_per_uid: 1");
  RawStream stream(*raw_);
  ASSERT_OK(stream.Open(LeasingHello("flood")));
  v1::SessionRequest stats;
  stats.mutable_stats();
  const absl::Time deadline = absl::Now() + kPatience;
  while (stream.Send(stats) && absl::Now() < deadline) {
  }
  EXPECT_STATUS(stream.End(), StatusCode::kResourceExhausted, "max_calls_per_second_per_uid");
}

TEST_F(HostileTest, OneUserDoesNotSlowDownAnother) {
  if (geteuid() != 0) GTEST_SKIP() << "needs root, to become another user";
  Begin("max_calls_per_second_per_uid: 1 socket_mode: '0666'");
  auto other = ClientProcess::Start(dir());
  ASSERT_OK(other);
  ASSERT_OK(other->Call("setuid 65534"));
  ASSERT_TRUE(WaitFor([&] { return IsOverTheRate(raw_->GetDevice().status()); }));
  EXPECT_OK(other->Call("list"));
}

// Repeats a call until destruction, in a separate thread: a call is always under way, however slow this machine is.
class Again {
 public:
  explicit Again(std::function<void()> call)
      : thread_([this, call = std::move(call)] {
          while (!stop_) call();
        }) {}
  ~Again() {
    stop_ = true;
    thread_.join();
  }

 private:
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

TEST_F(HostileTest, QuestionsThatWaitForOneUser) {
  Begin("max_questions_per_uid: 2 client_timeout: '2s'");
  std::vector<std::unique_ptr<RawStream>> mute;
  for (int i = 0; i < 3; ++i) {
    mute.push_back(std::make_unique<RawStream>(*raw_));
    ASSERT_OK(mute.back()->Open(LeasingHello(absl::StrCat("mute", i))));
  }
  {
    const Again first([&] { (void)raw_->TrimSession(Ref("mute0")); });
    const Again second([&] { (void)raw_->TrimSession(Ref("mute1")); });
    EXPECT_TRUE(WaitFor([&] { return Refused(raw_->TrimSession(Ref("mute2")).status(), "max_questions_per_uid"); }));
    for (const auto& stream : mute) stream->Cancel();  // no caller waits for the streams any longer
  }
  RawStream late(*raw_);
  ASSERT_OK(late.Open(LeasingHello("late")));
  EXPECT_STATUS(raw_->TrimSession(Ref("late")), StatusCode::kDeadlineExceeded, "does not answer");
}

TEST_F(HostileTest, SnapshotsAtATime) {
  for (const auto& [config, field] :
       {std::pair("max_snapshots_per_uid: 1", "max_snapshots_per_uid"),
        std::pair("max_snapshots_per_uid: 9 max_snapshots: 1", "the most that max_snapshots allows")}) {
    SCOPED_TRACE(config);
    raw_.reset();
    Begin(config);
    RawStream mute(*raw_);
    ASSERT_OK(mute.Open(LeasingHello("mute")));
    RawStream remote(*raw_);
    ASSERT_OK(remote.Hello("remote"));
    {
      const Again waiting([&] { (void)raw_->GetSnapshot(Ref("mute"), 0); });
      EXPECT_TRUE(
          WaitFor([&, &field = field] { return Refused(raw_->GetSnapshot(Ref("remote"), 0).status(), field); }));
      mute.Cancel();
    }
    EXPECT_TRUE(WaitFor([&] { return raw_->GetSnapshot(Ref("remote"), 0).ok(); })) << "the other is done";
    EXPECT_OK(remote.Goodbye());
  }
}

TEST_F(HostileTest, SnapshotsOneAfterTheOtherAreNotAtATime) {
  Begin("max_snapshots_per_uid: 1");
  RawStream remote(*raw_);
  ASSERT_OK(remote.Hello("remote"));
  for (int i = 0; i < 300; ++i) {
    const absl::Status status = raw_->GetSnapshot(Ref("remote"), 0).status();
    ASSERT_OK(status) << i;
  }
  EXPECT_OK(remote.Goodbye());
}

TEST_F(HostileTest, UnreadableMessagesDoNotFillTheLog) {
  const absl::Time begin = absl::Now();
  Begin("");
  // A name that is no UTF-8 makes protobuf write a line.
  const std::string bad("\x0a\x03\x12\x01\xff", 5);
  constexpr int kCount = 5000;
  for (int i = 0; i < kCount; ++i) {
    EXPECT_FALSE(CallBytes(raw_->channel(), "/vrambroker.v1.Admin/GetSession", bad).ok());
  }
  const std::vector<std::string> lines = absl::StrSplit(daemon_->log(), '\n');
  const auto complaints = std::count_if(
      lines.begin(), lines.end(), [](const std::string& line) { return absl::StrContains(line, "invalid UTF-8"); });
  EXPECT_GT(complaints, 0) << "they are not lost altogether";
  EXPECT_LE(complaints, 1001 + 100 * absl::ToDoubleSeconds(absl::Now() - begin))
      << "a thousand at once, and a hundred a second";
}

TEST_F(HostileTest, StreamsThatNeverSayHello) {
  Begin("max_sessions_per_uid: 2");
  std::vector<std::unique_ptr<RawStream>> silent;
  EXPECT_TRUE(WaitFor([&] {
    // Opens one more stream each time: the daemon may see an older stream after a newer stream, and then refuse the
    // older stream.
    silent.push_back(std::make_unique<RawStream>(*raw_));
    RawStream stream(*raw_);
    const auto answer = stream.Hello();
    // Four silent streams are enough for a refusal. A session that stays would count below.
    if (answer.ok()) {
      EXPECT_OK(stream.Goodbye());
    }
    return Refused(answer.status(), "session streams open");
  }));
  silent.clear();
  EXPECT_TRUE(WaitFor([&] {
    RawStream stream(*raw_);
    return stream.Hello().ok();
  }));
}

}  // namespace
}  // namespace vrambroker::testing_support
