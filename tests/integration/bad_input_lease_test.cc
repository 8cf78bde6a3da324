// SPDX-License-Identifier: Apache-2.0
//
// Wrong messages of leasing sessions, and duties that clients of leasing sessions neglect.
#include <atomic>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "absl/time/clock.h"
#include "allocator/base/bytes.h"
#include "tests/integration/bad_input_fixture.h"

namespace vrambroker::testing_support {
namespace {

using absl::StatusCode;

TEST_F(BadInputTest, LeasesAreCheckedAsCallsAndOnTheStream) {
  RawStream stream(*raw_);
  ASSERT_OK_AND_ASSIGN(const v1::Welcome welcome, stream.Open(LeasingHello("lessee")));
  const auto on_the_stream = [&](const v1::SessionRequest& request) {
    stream.Send(request);
    const std::optional<v1::SessionResponse> response = stream.Receive();
    return response.has_value() ? response->result() : v1::CallResult();
  };
  const auto check_lease = [&](const std::vector<uint64_t>& sizes, uint32_t device, StatusCode code) {
    v1::LeaseSegmentsRequest request;
    request.set_session_id(welcome.session_id());
    request.set_device(device);
    request.mutable_segment_bytes()->Add(sizes.begin(), sizes.end());
    v1::LeaseSegmentsResponse response;
    EXPECT_EQ(RawClient::Call(raw_->broker(), &v1::Broker::Stub::LeaseSegments, request, &response).code(), code);
    v1::SessionRequest message;
    *message.mutable_lease()->mutable_request() = request;
    EXPECT_EQ(on_the_stream(message).error().code(), static_cast<int>(code));
  };
  check_lease({}, 0, StatusCode::kInvalidArgument);
  check_lease({0}, 0, StatusCode::kInvalidArgument);
  check_lease({1}, 0, StatusCode::kInvalidArgument);
  check_lease({2_MiB, 2_MiB + 512}, 0, StatusCode::kInvalidArgument);
  check_lease(std::vector<uint64_t>(65, 2_MiB), 0, StatusCode::kInvalidArgument);
  check_lease(std::vector<uint64_t>(5000, 2_MiB), 0, StatusCode::kInvalidArgument);
  check_lease({2_MiB}, 1, StatusCode::kNotFound);
  check_lease({2_MiB}, ~uint32_t{0}, StatusCode::kNotFound);
  check_lease({~uint64_t{0} - (2_MiB - 1)}, 0, StatusCode::kResourceExhausted);
  check_lease(std::vector<uint64_t>(64, uint64_t{1} << 62), 0, StatusCode::kResourceExhausted);
  check_lease({200_MiB, 200_MiB}, 0, StatusCode::kResourceExhausted);

  v1::SessionRequest lease;
  lease.mutable_lease()->mutable_request()->add_segment_bytes(2_MiB);
  const uint64_t segment = on_the_stream(lease).leased().segments(0).segment_id();
  const auto check_return = [&](const std::vector<uint64_t>& ids, uint32_t device, StatusCode code) {
    v1::ReturnSegmentsRequest request;
    request.set_session_id(welcome.session_id());
    request.set_device(device);
    request.mutable_segment_ids()->Add(ids.begin(), ids.end());
    v1::ReturnSegmentsResponse response;
    EXPECT_EQ(RawClient::Call(raw_->broker(), &v1::Broker::Stub::ReturnSegments, request, &response).code(), code);
    v1::SessionRequest message;
    *message.mutable_return_segments()->mutable_request() = request;
    EXPECT_EQ(on_the_stream(message).error().code(), static_cast<int>(code));
  };
  // Segment ids of another leasing session, the witness, are among the ids.
  for (const uint64_t other : {uint64_t{0}, segment + 1, segment - 1, ~uint64_t{0}}) {
    check_return({other}, 0, StatusCode::kNotFound);
    check_return({segment, other}, 0, StatusCode::kNotFound);
  }
  check_return({}, 0, StatusCode::kInvalidArgument);
  check_return({segment, segment}, 0, StatusCode::kInvalidArgument);
  check_return(std::vector<uint64_t>(4097, segment), 0, StatusCode::kInvalidArgument);
  check_return({segment}, 7, StatusCode::kNotFound);
  ASSERT_OK_AND_ASSIGN(const v1::ListSessionsResponse sessions, raw_->ListSessions());  // asks no client
  EXPECT_EQ(sessions.sessions(1).devices(0).reserved_bytes(), 2_MiB);

  v1::SessionRequest explain;
  explain.mutable_explain();
  EXPECT_EQ(on_the_stream(explain).error().code(), static_cast<int>(StatusCode::kInvalidArgument));
  explain.mutable_explain()->mutable_request()->set_cause(v1::OutOfMemory::CAUSE_LIMIT);
  // Sends more entries than a report names.
  v1::OutOfMemory::Holes& holes = *explain.mutable_explain()->mutable_request()->mutable_holes();
  for (int i = 0; i < 4; ++i) holes.add_most_bytes();
  EXPECT_EQ(on_the_stream(explain).error().code(), static_cast<int>(StatusCode::kInvalidArgument));
  holes.mutable_most_bytes()->RemoveLast();
  for (int i = 0; i < 4; ++i) holes.mutable_most_bytes(0)->add_longest_held()->set_held_seconds(~uint64_t{0});
  EXPECT_EQ(on_the_stream(explain).error().code(), static_cast<int>(StatusCode::kInvalidArgument));
  holes.mutable_most_bytes(0)->mutable_longest_held()->RemoveLast();
  for (int i = 0; i < 3; ++i) holes.mutable_most_bytes(i)->set_hole_bytes(~uint64_t{0});
  holes.set_hole_bytes(~uint64_t{0});
  holes.set_holes(~uint64_t{0});
  for (int i = 0; i < 100; ++i) {
    v1::OutOfMemory::ScopeUse* const use = explain.mutable_explain()->mutable_request()->add_scopes();
    use->set_scope(std::string(300, 'x') + "\x1b[2J");
    use->set_allocated_bytes(~uint64_t{0});
  }
  explain.mutable_explain()->mutable_request()->set_requested_bytes(~uint64_t{0});
  explain.mutable_explain()->mutable_request()->set_allocated_bytes(~uint64_t{0});
  const v1::StatusDetails error = on_the_stream(explain).error();
  EXPECT_EQ(error.code(), static_cast<int>(StatusCode::kResourceExhausted));
  v1::OutOfMemory oom;
  ASSERT_EQ(error.details_size(), 1);
  ASSERT_TRUE(oom.ParseFromString(error.details(0).value()));
  EXPECT_EQ(oom.scopes_size(), 3);
  EXPECT_EQ(oom.scopes(0).scope(), std::string(40, 'x'));
  EXPECT_OK(stream.Goodbye());
}

TEST_F(BadInputTest, AnotherProcessCannotReturnALease) {
  RawStream stream(*raw_);
  ASSERT_OK_AND_ASSIGN(const v1::Welcome welcome, stream.Open(LeasingHello("thief")));
  v1::ReturnSegmentsRequest request;
  request.set_session_id(WitnessId());
  request.add_segment_ids(1);
  v1::ReturnSegmentsResponse response;
  EXPECT_STATUS(RawClient::Call(raw_->broker(), &v1::Broker::Stub::ReturnSegments, request, &response),
                StatusCode::kPermissionDenied, "another process");
  v1::LeaseSegmentsRequest lease;
  lease.set_session_id(WitnessId());
  lease.add_segment_bytes(2_MiB);
  v1::LeaseSegmentsResponse leased;
  EXPECT_STATUS(RawClient::Call(raw_->broker(), &v1::Broker::Stub::LeaseSegments, lease, &leased),
                StatusCode::kPermissionDenied, "another process");
}

TEST_F(BadInputTest, FiguresAndAnswersThatNobodyAskedFor) {
  {
    RawStream stream(*raw_);
    ASSERT_OK(stream.Hello());
    v1::SessionRequest stats;
    stats.mutable_stats();
    stream.Send(stats);
    EXPECT_STATUS(stream.End(), StatusCode::kFailedPrecondition, "remote");
  }
  RawStream stream(*raw_);
  ASSERT_OK(stream.Open(LeasingHello("liar")));
  v1::SessionRequest answer;
  answer.mutable_answer()->set_question_id(1);
  answer.mutable_answer()->set_released_bytes(~uint64_t{0});
  stream.Send(answer);
  v1::SessionRequest stats;
  for (v1::Stat* stat : {stats.mutable_stats()->mutable_stats()->mutable_allocated_bytes()->mutable_all(),
                         stats.mutable_stats()->mutable_stats()->mutable_reserved_bytes()->mutable_all()}) {
    stat->set_current(~uint64_t{0});
    stat->set_peak(1);
  }
  stream.Send(stats);
  // The daemon's own account does not depend on the figures of a client.
  EXPECT_TRUE(WaitFor([&] {
    const auto sessions = raw_->ListSessions();
    for (const v1::Session& session : sessions->sessions()) {
      if (session.name() == "liar") {
        const v1::Stat& allocated = session.devices(0).stats().allocated_bytes().all();
        return session.devices(0).reserved_bytes() == 0 && allocated.current() == 0 && allocated.peak() == 1;
      }
    }
    return false;
  }));
  stats.mutable_stats()->set_device(9);
  stream.Send(stats);
  EXPECT_STATUS(stream.End(), StatusCode::kNotFound, "device");
}

TEST_F(BadInputTest, AClientThatDoesNotAnswerQuestions) {
  Begin({.config = "client_timeout: '3s'"});
  RawStream stream(*raw_);
  ASSERT_OK(stream.Open(LeasingHello("mute")));
  const absl::Time asked = absl::Now();
  EXPECT_STATUS(raw_->TrimSession(Ref("mute")), StatusCode::kDeadlineExceeded, "does not answer");
  EXPECT_GE(absl::Now() - asked, absl::Seconds(3));
  EXPECT_OK(raw_->GetSession(Ref("mute"))) << "with the last figures";
  EXPECT_STATUS(raw_->GetSnapshot(Ref("mute"), 0), StatusCode::kDeadlineExceeded, "does not answer");
}

TEST_F(BadInputTest, AnAnswerThatMakesNoSenseEndsTheQuestionNotTheSession) {
  RawStream stream(*raw_);
  ASSERT_OK(stream.Open(LeasingHello("liar")));
  std::thread liar([&] {
    while (const std::optional<v1::SessionResponse> response = stream.Receive()) {
      v1::SessionRequest answer;
      answer.mutable_answer()->set_question_id(response->question().question_id());
      answer.mutable_answer()->mutable_snapshot()->set_alloc_conf("max_split_size_mb:nonsense");
      stream.Send(answer);
    }
  });
  EXPECT_STATUS(raw_->GetSnapshot(Ref("liar"), 0), StatusCode::kInvalidArgument, "alloc_conf");
  EXPECT_OK(raw_->GetSession(Ref("liar")));
  stream.Cancel();
  liar.join();
}

TEST_F(BadInputTest, Resuming) {
  Begin({.config = "client_timeout: '2s'"});
  const auto resume = [&](const std::string& token) {
    v1::SessionRequest request = LeasingHello("");
    request.mutable_hello()->mutable_resume()->set_token(token);
    RawStream stream(*raw_);
    return stream.Open(request).status();
  };
  EXPECT_STATUS(resume(""), StatusCode::kInvalidArgument, "16 bytes");
  EXPECT_STATUS(resume(std::string(17, 'x')), StatusCode::kInvalidArgument, "16 bytes");
  EXPECT_STATUS(resume(std::string(16, 'x')), StatusCode::kNotFound, "resume.token");
  for (const auto& [version, placement, field] :
       {std::tuple(7, 1, "protocol_version"), std::tuple(1, 0, "placement"), std::tuple(1, 99, "placement")}) {
    v1::SessionRequest request = LeasingHello("");
    request.mutable_hello()->set_protocol_version(static_cast<uint32_t>(version));
    request.mutable_hello()->set_placement(static_cast<v1::Placement>(placement));
    request.mutable_hello()->mutable_resume()->set_token(std::string(16, 'x'));
    RawStream stream(*raw_);
    EXPECT_STATUS(stream.Open(request), version == 1 ? StatusCode::kInvalidArgument : StatusCode::kFailedPrecondition,
                  field);
  }
  std::string token;
  {
    RawStream stream(*raw_);
    ASSERT_OK_AND_ASSIGN(const v1::Welcome welcome, stream.Open(LeasingHello("lessee")));
    token = welcome.resume_token();
    EXPECT_STATUS(resume(token), StatusCode::kUnavailable, "old stream");
    v1::SessionRequest lease;
    lease.mutable_lease()->mutable_request()->add_segment_bytes(20_MiB);
    stream.Send(lease);
    ASSERT_TRUE(stream.Receive().has_value());
  }
  // The stream broke. Segments that the client does not claim come back to the daemon. A client cannot claim a segment
  // that the client never had.
  EXPECT_TRUE(WaitFor([&] {
    v1::SessionRequest request = LeasingHello("");
    request.mutable_hello()->mutable_resume()->set_token(token);
    request.mutable_hello()->mutable_resume()->add_segment_ids(1);  // a segment of the witness
    RawStream stream(*raw_);
    if (!stream.Open(request).ok()) return false;
    EXPECT_EQ(raw_->GetSession(Ref("lessee"))->devices(0).reserved_bytes(), 0u);
    EXPECT_OK(stream.Goodbye());
    return true;
  }));
  EXPECT_STATUS(resume(token), StatusCode::kNotFound, "resume.token") << "it has ended";
}

TEST_F(BadInputTest, AResumeListInParts) {
  std::string token;
  std::vector<uint64_t> segments;
  {
    RawStream stream(*raw_);
    ASSERT_OK_AND_ASSIGN(const v1::Welcome welcome, stream.Open(LeasingHello("lessee")));
    EXPECT_TRUE(welcome.takes_resume_in_parts());
    token = welcome.resume_token();
    v1::SessionRequest lease;
    for (int i = 0; i < 4; ++i) lease.mutable_lease()->mutable_request()->add_segment_bytes(2_MiB);
    stream.Send(lease);
    const std::optional<v1::SessionResponse> leased = stream.Receive();
    ASSERT_TRUE(leased.has_value());
    for (const auto& segment : leased->result().leased().segments()) segments.push_back(segment.segment_id());
    ASSERT_EQ(segments.size(), 4u);
  }
  const auto with_ids = [](auto* part, size_t count, uint64_t first_id) {
    for (uint64_t i = 0; i < count; ++i) part->add_segment_ids(first_id + i);
    part->set_more(true);
  };
  v1::SessionRequest first = LeasingHello("");
  first.mutable_hello()->mutable_resume()->set_token(token);
  with_ids(first.mutable_hello()->mutable_resume(), 4096, 100'000);
  const auto refusal = [&](const v1::SessionRequest& hello, const std::vector<v1::SessionRequest>& more) {
    RawStream stream(*raw_);
    stream.Send(hello);
    for (const v1::SessionRequest& message : more) stream.Send(message);
    return stream.End();
  };
  EXPECT_STATUS(refusal(first, {first}), StatusCode::kInvalidArgument, "must be resume_more");
  v1::SessionRequest part;
  part.mutable_resume_more()->set_more(true);
  EXPECT_STATUS(refusal(first, {part}), StatusCode::kInvalidArgument, "must not be empty");
  with_ids(part.mutable_resume_more(), 4096, 200'000);
  EXPECT_STATUS(refusal(first, std::vector<v1::SessionRequest>(17, part)), StatusCode::kInvalidArgument,
                "max_segments_per_session");
  part.mutable_resume_more()->add_segment_ids(1);
  EXPECT_STATUS(refusal(first, {part}), StatusCode::kInvalidArgument, "4097 ids");
  part.mutable_resume_more()->set_more(false);
  EXPECT_STATUS(refusal(first, {part}), StatusCode::kInvalidArgument, "4097 ids");
  v1::SessionRequest few = first;
  few.mutable_hello()->mutable_resume()->clear_segment_ids();
  EXPECT_STATUS(refusal(few, {}), StatusCode::kInvalidArgument, "0 ids");
  v1::SessionRequest unknown = first;
  unknown.mutable_hello()->mutable_resume()->set_token(std::string(16, 'x'));
  EXPECT_STATUS(refusal(unknown, {}), StatusCode::kNotFound, "resume.token") << "before the list is whole";
  // The daemon does not read a message beyond the allowed size.
  v1::SessionRequest large = first;
  with_ids(large.mutable_hello()->mutable_resume(), 30'000, 1'000'000);
  EXPECT_STATUS(refusal(large, {}), StatusCode::kResourceExhausted, "larger than max");
  {
    std::vector<std::unique_ptr<RawStream>> unfinished;
    std::vector<std::thread> ends;
    std::atomic<int> refused{0};
    for (int i = 0; i < 12; ++i) {
      unfinished.push_back(std::make_unique<RawStream>(*raw_));
      unfinished.back()->Send(first);
      ends.emplace_back([&, stream = unfinished.back().get()] {
        if (absl::IsResourceExhausted(stream->End())) ++refused;
      });
    }
    EXPECT_TRUE(WaitFor([&] { return refused == 4; })) << refused;
    for (const std::unique_ptr<RawStream>& stream : unfinished) stream->Cancel();
    for (std::thread& end : ends) end.join();
  }
  // The client still has three of four segments.
  part.Clear();
  for (size_t i = 0; i < 3; ++i) part.mutable_resume_more()->add_segment_ids(segments[i]);
  EXPECT_TRUE(WaitFor([&] {
    RawStream stream(*raw_);
    stream.Send(first);
    stream.Send(part);
    const std::optional<v1::SessionResponse> welcome = stream.Receive();
    if (!welcome.has_value()) return false;
    EXPECT_TRUE(welcome->has_welcome());
    const absl::StatusOr<v1::ListSessionsResponse> sessions = raw_->ListSessions();  // the call asks no client
    EXPECT_OK(sessions);
    for (const v1::Session& session : sessions->sessions()) {
      if (session.name() != "lessee") continue;
      EXPECT_EQ(session.devices(0).reserved_bytes(), 6_MiB);
    }
    stream.Send(part);
    EXPECT_STATUS(stream.End(), StatusCode::kFailedPrecondition, "right after the hello only");
    return true;
  }));
}

TEST_F(BadInputTest, AFloodOfMessagesOnAStream) {
  RawStream stream(*raw_);
  ASSERT_OK_AND_ASSIGN(const v1::Welcome welcome, stream.Hello());
  const int count = kSanitized ? 10000 : 30000;
  // Answers without a question: the daemon reads and drops the answers.
  v1::SessionRequest closed;
  for (uint64_t i = 0; i < 4; ++i) closed.mutable_segments_closed()->add_segment_ids(i);
  for (int i = 0; i < count; ++i) ASSERT_TRUE(stream.Send(closed)) << i;
  // Frees of an unknown block: the daemon answers every call, and the client reads the answers.
  std::atomic<int> answered{0};
  std::thread reader([&] {
    for (; answered < count; ++answered) {
      const std::optional<v1::SessionResponse> response = stream.Receive();
      ASSERT_TRUE(response.has_value()) << answered;
      ASSERT_EQ(response->result().error().code(), static_cast<int>(StatusCode::kNotFound));
    }
  });
  v1::SessionRequest free;
  free.mutable_free()->mutable_request()->add_block_ids(999);
  for (int i = 0; i < count; ++i) {
    free.mutable_free()->set_call_id(static_cast<uint64_t>(i));
    ASSERT_TRUE(stream.Send(free)) << i;
    // The daemon queues a bounded number of answers: the sender stays within that bound. AClientThatNeverReadsItsStream
    // has a client that does not read at all.
    while (answered < i - 500 && !HasFatalFailure()) std::this_thread::yield();
  }
  reader.join();
  EXPECT_OK(raw_->Allocate(welcome.session_id(), 1));
  EXPECT_OK(stream.Goodbye());
}

TEST_F(BadInputTest, AClientThatNeverReadsItsStream) {
  ASSERT_OK_AND_ASSIGN(RawClient deaf, RawClient::Connect(dir()));
  uint64_t id = 0;
  {
    RawStream stream(deaf);
    ASSERT_OK_AND_ASSIGN(const v1::Welcome welcome, stream.Hello("deaf"));
    id = welcome.session_id();
    v1::SessionRequest allocate;
    allocate.mutable_allocate()->mutable_request()->set_requested_bytes(~uint64_t{0});
    // Answers have hundreds of bytes, and nobody takes the answers: the daemon must stop somewhere.
    std::thread writer([&] {
      for (int i = 0; i < 20000 && stream.Send(allocate); ++i) {
      }
    });
    for (int i = 0; i < 20; ++i) ExpectUnharmed();
    stream.Cancel();
    writer.join();
  }
  EXPECT_TRUE(WaitFor([&] {
    const auto session = raw_->GetSession(Ref(id));
    return session.ok() && session->state() == v1::SESSION_STATE_DISCONNECTED;
  }));
}

}  // namespace
}  // namespace vrambroker::testing_support
