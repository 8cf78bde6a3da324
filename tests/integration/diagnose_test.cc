// SPDX-License-Identifier: Apache-2.0
//
// vramctl diagnose and vramctl ooms --diagnose: the events before a refusal are on record by default, the record
// survives the job, and the advice is true.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "allocator/base/bytes.h"
#include "tests/support/raw_client.h"
#include "tests/support/vramctl_test.h"

namespace vrambroker::testing_support {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr uint64_t kLimit = 520_MiB;
constexpr uint64_t kRequest = 64_MiB;
// Tries a twentieth of the settings: vramctl runs with low priority, and other tests run beside vramctl.
constexpr char kFewer[] = "--for=torch-2.6";

class DiagnoseTest : public VramctlDaemonTest, public ::testing::WithParamInterface<Placement> {
 protected:
  void SetUp() override { placement_ = GetParam(); }

  absl::StatusOr<Client> ConnectWith(const std::string& name, const std::string& alloc_conf) {
    ClientOptions options;
    options.socket_dir = dir();
    options.name = name;
    options.limit = Limit(kLimit);
    options.placement = placement_;
    options.call_timeout = options.connect_timeout = kPatience;
    options.alloc_conf = alloc_conf;
    return Client::Connect(options);
  }

  // Makes 8 segments of 64 MiB, each with a block of 13 MiB and holes: 104 MiB of 512 MiB is in use.
  static absl::StatusOr<std::vector<Buffer>> MakeHoles(Client& client) {
    std::vector<Buffer> kept;
    for (const auto& [bytes, stays] : {std::pair(64_MiB, false), std::pair(40_MiB, false), std::pair(13_MiB, true)}) {
      std::vector<Buffer> blocks;
      for (int i = 0; i < 8; ++i) {
        absl::StatusOr<Buffer> block = client.Allocate(bytes);
        if (!block.ok()) return block.status();
        blocks.push_back(*std::move(block));
      }
      if (bytes == 40_MiB) {
        held_ = std::move(blocks);  // the blocks stay until the small blocks are there
      } else if (stays) {
        kept = std::move(blocks);
      }
    }
    held_.clear();
    return kept;
  }
  // Runs a job that is refused, and ends.
  void RunJob(const std::string& name = "job") {
    ASSERT_OK_AND_ASSIGN(Client client, ConnectWith(name, ""));
    ASSERT_OK_AND_ASSIGN(const std::vector<Buffer> kept, MakeHoles(client));
    const absl::Status refused = client.Allocate(kRequest).status();
    ASSERT_TRUE(absl::IsResourceExhausted(refused)) << refused;
    EXPECT_EQ(GetOutOfMemory(refused)->cause, OutOfMemory::Cause::kFragmentation);
    refused_ = std::string(refused.message());
  }

  static thread_local std::vector<Buffer> held_;
  std::string refused_;
};

thread_local std::vector<Buffer> DiagnoseTest::held_;

INSTANTIATE_TEST_SUITE_P(Placements, DiagnoseTest, ::testing::Values(Placement::kLeased, Placement::kRemote),
                         [](const auto& test) { return test.param == Placement::kLeased ? "Leased" : "Remote"; });

TEST_P(DiagnoseTest, TheFirstRefusalOfAJobThatIsGoneIsExplained) {
  ASSERT_OK(StartDaemon({.capacity = "1GiB"}));
  RunJob();
  EXPECT_THAT(refused_, HasSubstr("look for settings that make fewer holes: vramctl ooms --diagnose 1 tries them."));
  const Json json = CtlJson({"ooms", "--diagnose", "1", kFewer});
  EXPECT_EQ(json["event"]["refusal"], 1);
  EXPECT_EQ(json["event"]["client"], "job");
  EXPECT_EQ(json["reproduced"], true);
  EXPECT_EQ(json["bound_bytes"], kLimit);
  EXPECT_EQ(json["recorded"]["missing_bytes"], 512_MiB + kRequest - kLimit);
  EXPECT_EQ(json["recorded"]["peak_reserved_bytes"], 512_MiB);
  EXPECT_EQ(json["notes"].size(), 0u);
  ASSERT_GT(json["helping"].size(), 0u) << json;

  // Repeats the job with each of the settings: the settings keep their promise to the letter.
  for (const Json& setting : json["helping"]) {
    SCOPED_TRACE(setting["alloc_conf"]);
    ASSERT_OK_AND_ASSIGN(Client client, ConnectWith("again", setting["alloc_conf"]));
    ASSERT_OK_AND_ASSIGN(const std::vector<Buffer> kept, MakeHoles(client));
    EXPECT_OK(client.Allocate(kRequest));
    ASSERT_OK_AND_ASSIGN(const MemoryStats stats, client.GetMemoryStats());
    EXPECT_EQ(stats.reserved_bytes.all.peak, setting["peak_reserved_bytes"]);
  }

  // The session's name gives the same result, and so does the text.
  EXPECT_EQ(CtlJson({"diagnose", "job", kFewer})["helping"], json["helping"]);
  const RunResult text = Ctl({"diagnose", "job", kFewer});
  EXPECT_EQ(text.exit_code, 0) << text.err;
  const std::string best = json["helping"][0]["alloc_conf"];
  EXPECT_THAT(text.out,
              AllOf(HasSubstr("refusal 1: job, device 0, "), HasSubstr("FRAGMENTATION\nwhy: what is allocated"),
                    HasSubstr(absl::StrCat(best, " would have served it, peak reserved ")),
                    HasSubstr(" instead of 512.00 MiB."),
                    HasSubstr(absl::StrCat("To use it:\n  PYTORCH_CUDA_ALLOC_CONF=", best, "\n"))));
  const RunResult list = Ctl({"ooms"});
  EXPECT_THAT(list.out, AllOf(HasSubstr("ID  TIME"), HasSubstr("vramctl ooms --diagnose 1")));
}

TEST_P(DiagnoseTest, TheRefusalThatEndsAJobIsRecordedAlsoRightAfterOthers) {
  ASSERT_OK(StartDaemon({.capacity = "1GiB", .devices = 2}));
  {
    ASSERT_OK_AND_ASSIGN(Client client, ConnectWith("job", ""));
    ASSERT_OK_AND_ASSIGN(const std::vector<Buffer> kept, MakeHoles(client));
    const std::optional<OutOfMemory> first = GetOutOfMemory(client.Allocate(2 * kRequest).status());
    ASSERT_TRUE(first.has_value());
    EXPECT_EQ(first->refusal, 1u);
    EXPECT_THAT(first->advice, HasSubstr("vramctl ooms --diagnose 1 tries them"));
    EXPECT_STATUS(client.Allocate(kLimit + 1_MiB, /*device=*/1), absl::StatusCode::kResourceExhausted, "");
    EXPECT_STATUS(client.Allocate(kRequest), absl::StatusCode::kResourceExhausted, "");
  }
  const Json events = CtlJson({"ooms"})["events"];
  ASSERT_EQ(events.size(), 3u);
  EXPECT_EQ(events[0]["recorded"], true) << "the last one, in the place of the one before";
  EXPECT_EQ(events[1]["recorded"], false);
  EXPECT_EQ(events[2]["recorded"], true) << "the first one, which is what there is to explain";
  EXPECT_EQ(CtlJson({"ooms", "--diagnose", "1", kFewer})["event"]["refusal"], 1);
  const RunResult between = Ctl({"ooms", "--diagnose", "2", kFewer});
  EXPECT_EQ(between.exit_code, 1);
  EXPECT_THAT(between.err,
              HasSubstr("has made room for later ones; those of refusals 1 and 3 of the same session are"));
  const Json json = CtlJson({"diagnose", "job", "--device=0", kFewer});
  EXPECT_EQ(json["event"]["refusal"], 3);
  EXPECT_GT(json["helping"].size(), 0u);
  const RunResult other = Ctl({"diagnose", "job", "--device=7"});
  EXPECT_EQ(other.exit_code, 1);
  EXPECT_THAT(other.err, HasSubstr("job has ended, and was not refused on device 7"));
}

TEST_P(DiagnoseTest, ALimitThatHasBeenRaisedSinceIsNotToBeLowered) {
  ASSERT_OK(StartDaemon({.capacity = "1GiB"}));
  ASSERT_OK_AND_ASSIGN(Client client, ConnectWith("job", ""));
  ASSERT_OK_AND_ASSIGN(const Buffer held, client.Allocate(500_MiB));
  EXPECT_STATUS(client.Allocate(100_MiB), absl::StatusCode::kResourceExhausted, "");
  EXPECT_THAT(Ctl({"diagnose", "job", kFewer}).out, HasSubstr("raise the limit to 600MiB (vramctl limit job 600MiB)"));
  ASSERT_EQ(Ctl({"limit", "job", "900MiB"}).exit_code, 0);
  EXPECT_THAT(Ctl({"diagnose", "job", kFewer}).out,
              AllOf(HasSubstr("keep the limit of 900.00 MiB that it has been given since: it is served then"),
                    Not(HasSubstr("vramctl limit"))));
}

TEST_P(DiagnoseTest, TheLimitOfTheClaimIsToBeRaisedToo) {
  ASSERT_OK(StartDaemon({.capacity = "1GiB"}));
  ASSERT_EQ(Ctl({"claim", "create", "team", "--limit=540MiB"}).exit_code, 0);
  ClientOptions options;
  options.socket_dir = dir() + "/claims/team";
  options.name = "job";
  options.limit = Limit(kLimit);
  options.placement = placement_;
  options.call_timeout = options.connect_timeout = kPatience;
  ASSERT_OK_AND_ASSIGN(Client client, Client::Connect(options));
  ASSERT_OK_AND_ASSIGN(const Buffer held, client.Allocate(500_MiB));
  EXPECT_STATUS(client.Allocate(100_MiB), absl::StatusCode::kResourceExhausted, "");
  EXPECT_THAT(
      Ctl({"diagnose", "job", kFewer}).out,
      HasSubstr("raise the limit to 600MiB (vramctl limit job 600MiB) and have the limit of claim team raised to "
                "600MiB (vramctl claim set team --limit 600MiB): it is served then"));
  ASSERT_EQ(Ctl({"limit", "job", "600MiB"}).exit_code, 0);
  EXPECT_STATUS(client.Allocate(100_MiB), absl::StatusCode::kResourceExhausted, "");
  EXPECT_THAT(Ctl({"diagnose", "job", kFewer}).out, HasSubstr("- have the limit of claim team raised to 600MiB"));
  ASSERT_EQ(Ctl({"claim", "set", "team", "--limit", "600MiB"}).exit_code, 0);
  EXPECT_OK(client.Allocate(100_MiB));
}

TEST_P(DiagnoseTest, WhatIsRecommendedIsThereWhereItIsToBeUsed) {
  ASSERT_OK(StartDaemon({.capacity = "1GiB"}));
  RunJob();
  const Json json = CtlJson({"diagnose", "job", "--for=torch-2.6"});
  EXPECT_EQ(json["for"], "torch-2.6");
  EXPECT_LT(json["tried"], 200);
  ASSERT_GT(json["helping"].size(), 0u);
  for (const Json& setting : json["helping"]) {
    const std::string use = setting["use"];
    EXPECT_THAT(use, AllOf(HasSubstr("PYTORCH_CUDA_ALLOC_CONF="), Not(HasSubstr("large_segment_size_mb"))));
  }
  const RunResult wrong = Ctl({"diagnose", "job", "--for=torch-1.2"});
  EXPECT_EQ(wrong.exit_code, 2);
  EXPECT_THAT(wrong.err, HasSubstr("--for: \"torch-1.2\": the settings of releases before 1.13 are not known here; "
                                   "accepted: vrambroker, torch-MAJOR.MINOR as torch-2.6"));
}

TEST_P(DiagnoseTest, WhereNothingHelpsTheNextStepsDo) {
  ASSERT_OK(StartDaemon({.capacity = "2GiB"}));
  ASSERT_OK_AND_ASSIGN(Client client, ConnectWith("job", ""));
  std::vector<Buffer> blocks;
  for (int i = 0; i < 100; ++i) {
    ASSERT_OK_AND_ASSIGN(blocks.emplace_back(), client.Allocate(4_MiB));
  }
  for (size_t i = 0; i < 100; i += 2) ASSERT_OK(blocks[i].Reset());
  EXPECT_FALSE(client.Allocate(250_MiB).ok());
  const Json json = CtlJson({"diagnose", "job", kFewer});
  EXPECT_EQ(json["helping"].size(), 0u);
  EXPECT_EQ(json["recorded"]["missing_bytes"], 400_MiB + 250_MiB - kLimit);
  EXPECT_EQ(json["needed_bound_bytes"], 650_MiB);
  const RunResult text = Ctl({"diagnose", "job", kFewer});
  EXPECT_THAT(text.out,
              AllOf(HasSubstr("settings would have helped; with its own settings the job needs 130.00 MiB more."),
                    HasSubstr("ask for less at that point, as with a smaller batch: up to "),
                    HasSubstr("raise the limit to 650MiB (vramctl limit job 650MiB)")));
  // The two suggestions hold to the letter.
  const uint64_t less = json["largest_served_bytes"];
  EXPECT_GT(less, 100_MiB);
  { ASSERT_OK_AND_ASSIGN(const Buffer served, client.Allocate(less)); }
  ASSERT_OK(client.EmptyCache());
  ASSERT_EQ(Ctl({"limit", "job", "650MiB"}).exit_code, 0);
  EXPECT_OK(client.Allocate(250_MiB));
}

TEST_P(DiagnoseTest, WhatWasTriedOnTheEndAloneIsCalledNotSure) {
  ASSERT_OK(StartDaemon({.capacity = "1GiB", .config = "record_events: 20"}));
  RunJob();
  const Json json = CtlJson({"diagnose", "job", kFewer});
  EXPECT_EQ(json["from_start"], false);
  EXPECT_GT(json["start_reserved_bytes"], 0);
  EXPECT_EQ(json["caveat"],
            "only the end of the session was tried, of the last 20 events; what was held before was placed "
            "by the old settings");
  const RunResult text = Ctl({"diagnose", "job", kFewer});
  ASSERT_EQ(text.exit_code, 0) << text.err;
  EXPECT_THAT(text.out, HasSubstr(json["caveat"].get<std::string>()));
  if (!json["helping"].empty()) {
    EXPECT_THAT(text.out,
                AllOf(HasSubstr(" would have served it from there on, "), HasSubstr("That is not sure: only the"),
                      HasSubstr("What is sure:"), HasSubstr("vramctl trace job --until-oom -o FILE")));
    EXPECT_GT(json["next_steps"].size(), 0u);
  }
  // The replay of a session without a refusal starts at the last recorded events, too.
  ASSERT_OK_AND_ASSIGN(Client client, ConnectWith("live", ""));
  ASSERT_OK_AND_ASSIGN(const std::vector<Buffer> kept, MakeHoles(client));
  EXPECT_EQ(CtlJson({"diagnose", "live", kFewer})["from_start"], false);
}

// Advice on the cache counts allocations and frees: a program that empties its cache at that point is served.
TEST_P(DiagnoseTest, EmptiedWhereItSaysTheRequestIsServed) {
  ASSERT_OK(StartDaemon({.capacity = "1GiB"}));
  // Segments of 300 and 60 MiB stay cached; the last phase keeps 10 MiB of a segment each time. The small segment of
  // the 512 KiB block goes back without a call of the program.
  const auto run = [&](Client& client, const std::string& name, uint64_t empty_before) -> absl::StatusOr<uint64_t> {
    uint64_t call = 0;
    std::vector<Buffer> kept;
    std::vector<Buffer> phase;
    const auto next = [&] { return ++call == empty_before ? client.EmptyCache().status() : absl::OkStatus(); };
    const auto get = [&](uint64_t bytes, std::vector<Buffer>& into) {
      absl::Status status = next();
      if (!status.ok()) return status;
      absl::StatusOr<Buffer> block = client.Allocate(bytes);
      if (block.ok()) into.push_back(*std::move(block));
      return block.status();
    };
    for (const uint64_t bytes : {300_MiB, 60_MiB, 50_MiB}) {
      absl::Status status;
      for (int i = 0; status.ok() && i < (bytes == 300_MiB ? 1 : 8); ++i) {
        status = get(bytes, phase);
        if (status.ok() && bytes == 50_MiB) status = get(10_MiB, kept);
      }
      if (status.ok() && bytes == 60_MiB) status = get(512 * 1024, phase);
      for (Buffer& block : phase) {
        if (status.ok()) status = next();
        if (status.ok()) status = block.Reset();
      }
      if (!status.ok()) return status;
      phase.clear();
    }
    EXPECT_EQ(Ctl({"trim", name}).exit_code, 0);
    const absl::Status last = get(200_MiB, phase);
    if (empty_before > 0 && !last.ok()) return last;
    EXPECT_EQ(last.ok(), empty_before > 0);
    return call;
  };
  uint64_t refused_call = 0;
  {
    ASSERT_OK_AND_ASSIGN(Client client, ConnectWith("job", ""));
    ASSERT_OK_AND_ASSIGN(refused_call, run(client, "job", 0));
  }
  const Json json = CtlJson({"diagnose", "job", kFewer});
  ASSERT_TRUE(json["empty_cache"].is_object()) << json;
  EXPECT_EQ(json["from_start"], true);
  EXPECT_EQ(json["caveat"], nullptr);
  const uint64_t calls = json["empty_cache"]["calls_before"];
  ASSERT_LT(calls, refused_call);
  EXPECT_LT(calls, json["empty_cache"]["operations_before"]) << "the heap's own give-backs are not the program's";
  ASSERT_OK_AND_ASSIGN(Client client, ConnectWith("again", ""));
  EXPECT_OK(run(client, "again", refused_call - calls).status());
  if (json["helping"].empty()) {
    EXPECT_THAT(Ctl({"diagnose", "job", kFewer}).out,
                HasSubstr(absl::StrCat("empty the cache ", calls, " allocations and frees earlier, when ")));
  }
}

TEST_P(DiagnoseTest, ASessionThatWasNeverRefusedIsLookedAtAllTheSame) {
  ASSERT_OK(StartDaemon({.capacity = "1GiB"}));
  ASSERT_OK_AND_ASSIGN(Client client, ConnectWith("job", ""));
  ASSERT_OK_AND_ASSIGN(const std::vector<Buffer> kept, MakeHoles(client));
  const Json json = CtlJson({"diagnose", "job", kFewer});
  EXPECT_EQ(json["event"], nullptr);
  EXPECT_EQ(json["recorded"]["peak_reserved_bytes"], 512_MiB);
  const RunResult text = Ctl({"diagnose", "job", kFewer});
  EXPECT_THAT(text.out, AllOf(HasSubstr("job: no refused request on record"), HasSubstr("settings that")));
}

TEST_P(DiagnoseTest, TurnedOffNothingIsRecorded) {
  ASSERT_OK(StartDaemon({.capacity = "1GiB", .config = "record_events: 0"}));
  RunJob();
  EXPECT_THAT(refused_, HasSubstr("vramctl tune tries them on a recording of this session"));
  for (const Arguments& command : std::vector<Arguments>{{"ooms", "--diagnose=1"}, {"diagnose", "job"}}) {
    const RunResult result = Ctl(command);
    EXPECT_EQ(result.exit_code, 1);
    EXPECT_THAT(result.err,
                HasSubstr("nothing was recorded of what led to refusal 1: the session kept no events (record_events of "
                          "the daemon's configuration)"));
  }
  ASSERT_OK_AND_ASSIGN(Client client, ConnectWith("idle", ""));
  const RunResult live = Ctl({"diagnose", "idle"});
  EXPECT_EQ(live.exit_code, 1);
  EXPECT_THAT(live.err, HasSubstr("idle records no events"));
}

TEST_P(DiagnoseTest, WhatAClientRecordsByItselfIsAskedForToo) {
  ASSERT_OK(StartDaemon({.capacity = "1GiB", .config = "record_events: 0"}));
  ASSERT_OK_AND_ASSIGN(Client client, ConnectWith("job", ""));
  ASSERT_OK(client.SetRecording(1000));
  ASSERT_OK_AND_ASSIGN(const std::vector<Buffer> kept, MakeHoles(client));
  EXPECT_FALSE(client.Allocate(kRequest).ok());
  EXPECT_EQ(CtlJson({"diagnose", "job", kFewer})["reproduced"], true);
}

TEST_P(DiagnoseTest, WrongUseSaysWhatIsRight) {
  ASSERT_OK(StartDaemon({.capacity = "1GiB"}));
  const RunResult nothing = Ctl({"ooms", "--diagnose=7"});
  EXPECT_EQ(nothing.exit_code, 1);
  EXPECT_THAT(nothing.err, HasSubstr("no refusal 7 is on record; vramctl ooms lists those that are"));
  EXPECT_EQ(Ctl({"diagnose", "nobody"}).exit_code, 1);
  for (const Arguments& arguments : std::vector<Arguments>{{"ooms", "--diagnose=x"},
                                                           {"ooms", "--diagnose=-1"},
                                                           {"ooms", "--diagnose"},
                                                           {"ooms", "--diagnose=1", "--last=3"},
                                                           {"ooms", "--diagnose=1", "--session=job"},
                                                           {"ooms", "--for=torch-2.6"},
                                                           {"ooms", "--diagnose=1", "--for=torch"},
                                                           {"diagnose"},
                                                           {"diagnose", "a", "b"}}) {
    EXPECT_EQ(Ctl(arguments).exit_code, 2) << ::testing::PrintToString(arguments);
  }
}

// ---- Clients that lie ----

class DiagnoseLiarTest : public VramctlDaemonTest {
 protected:
  // Opens a leasing session of a client that answers as the test says.
  void Begin(const std::string& config) {
    ASSERT_OK(StartDaemon({.capacity = "1GiB", .config = config}));
    ASSERT_OK_AND_ASSIGN(RawClient raw, RawClient::Connect(dir()));
    raw_.emplace(std::move(raw));
    stream_ = std::make_unique<RawStream>(*raw_);
    ASSERT_OK(stream_->Open(LeasingHello("liar")).status());
  }
  bool Explain(uint64_t id) {
    v1::SessionRequest message;
    message.mutable_explain()->set_call_id(id);
    v1::ExplainRequest* request = message.mutable_explain()->mutable_request();
    request->set_cause(v1::OutOfMemory::CAUSE_LIMIT);
    request->set_requested_bytes(5_MiB);
    request->set_block_bytes(5_MiB);
    request->set_segment_bytes(20_MiB);
    return stream_->Send(message);
  }
  // Returns the next message that `wanted` accepts; drops all messages before that message.
  template <typename Wanted>
  std::optional<v1::SessionResponse> Next(const Wanted& wanted) {
    while (std::optional<v1::SessionResponse> response = stream_->Receive()) {
      if (wanted(*response)) return response;
    }
    return std::nullopt;
  }
  std::optional<v1::Question> NextSnapshotQuestion() {
    const auto found = Next([](const v1::SessionResponse& response) { return response.question().has_snapshot(); });
    return found.has_value() ? std::optional<v1::Question>(found->question()) : std::nullopt;
  }
  absl::StatusCode NextResult() {
    const auto found = Next([](const v1::SessionResponse& response) { return response.has_result(); });
    return found.has_value() ? static_cast<absl::StatusCode>(found->result().error().code())
                             : absl::StatusCode::kUnknown;
  }

  std::optional<RawClient> raw_;
  std::unique_ptr<RawStream> stream_;
};

TEST_F(DiagnoseLiarTest, WhoDoesNotAnswerIsToldAllTheSame) {
  Begin("client_timeout: '300ms'");
  ASSERT_TRUE(Explain(1));
  EXPECT_TRUE(NextSnapshotQuestion().has_value());
  EXPECT_EQ(NextResult(), absl::StatusCode::kResourceExhausted) << "without an answer";
  EXPECT_EQ(CtlJson({"ooms"})["events"][0]["recorded"], false);
  const RunResult result = Ctl({"ooms", "--diagnose=1"});
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(result.err, HasSubstr("nothing was recorded of what led to refusal 1: the session kept no events"));
}

TEST_F(DiagnoseLiarTest, NonsenseIsKeptFromNobody) {
  Begin("");
  ASSERT_TRUE(Explain(1));
  const std::optional<v1::Question> question = NextSnapshotQuestion();
  ASSERT_TRUE(question.has_value());
  v1::SessionRequest message;
  message.mutable_answer()->set_question_id(question->question_id());
  v1::GetSnapshotResponse* snapshot = message.mutable_answer()->mutable_snapshot();
  // Adds blocks outside of their segment, events of unknown blocks, and many refusals.
  v1::GetSnapshotResponse::Segment* segment = snapshot->add_segments();
  segment->set_id(1);
  segment->set_segment_bytes(2_MiB);
  segment->set_address(1);
  segment->add_blocks()->set_block_bytes(~uint64_t{0});
  segment->mutable_blocks(0)->set_state(v1::GetSnapshotResponse::BLOCK_STATE_ALLOCATED);
  for (int i = 0; i < 100; ++i) {
    v1::GetSnapshotResponse::Event* event = snapshot->add_events();
    event->set_action(static_cast<v1::GetSnapshotResponse::Event::Action>(1 + i % 7));
    event->set_address(~uint64_t{0} - static_cast<uint64_t>(i));
    event->set_bytes(i % 7 == 6 ? 5_MiB : ~uint64_t{0});
  }
  ASSERT_TRUE(stream_->Send(message));
  EXPECT_EQ(NextResult(), absl::StatusCode::kResourceExhausted);
  const RunResult result = Ctl({"ooms", "--diagnose=1"});
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(result.err, HasSubstr("what was recorded cannot be replayed: "));
  EXPECT_TRUE(daemon_->Running());
}

TEST_F(DiagnoseLiarTest, RefusalsInALoopAreNotAllRecorded) {
  const absl::Time begin = absl::Now();
  Begin("");
  constexpr uint64_t kRefusals = 50;
  for (uint64_t id = 1; id <= kRefusals; ++id) ASSERT_TRUE(Explain(id));
  uint64_t questions = 0;
  uint64_t results = 0;
  while (results < kRefusals) {
    const std::optional<v1::SessionResponse> response = stream_->Receive();
    ASSERT_TRUE(response.has_value());
    results += response->has_result() ? 1 : 0;
    if (!response->question().has_snapshot()) continue;
    ++questions;
    v1::SessionRequest message;
    message.mutable_answer()->set_question_id(response->question().question_id());
    v1::GetSnapshotResponse::Event* event = message.mutable_answer()->mutable_snapshot()->add_events();
    event->set_action(v1::GetSnapshotResponse::Event::ACTION_SNAPSHOT);
    ASSERT_TRUE(stream_->Send(message));
  }
  EXPECT_GE(questions, 1u);
  EXPECT_LE(questions, 12 + absl::ToDoubleSeconds(absl::Now() - begin)) << "ten in a row, and one a second";
  EXPECT_EQ(CtlJson({"ooms"})["total_events"], kRefusals);
}

TEST_F(DiagnoseLiarTest, WhoDiesWhileItIsAskedIsCountedAllTheSame) {
  Begin("");
  ASSERT_TRUE(Explain(1));
  ASSERT_TRUE(NextSnapshotQuestion().has_value());
  stream_->Cancel();
  stream_.reset();
  EXPECT_TRUE(WaitFor([&] { return CtlJson({"ooms"})["total_events"] == 1; }));
  EXPECT_EQ(CtlJson({"ooms"})["events"][0]["recorded"], false);
}

}  // namespace
}  // namespace vrambroker::testing_support
