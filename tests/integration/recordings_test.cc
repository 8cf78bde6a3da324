// SPDX-License-Identifier: Apache-2.0
//
// Recordings: vramctl record, snapshot, trace and replay, and clients that record themselves. Replays must reach the
// figures of the recorded sessions.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "allocator/base/bytes.h"
#include "allocator/replay/trace.h"
#include "tests/support/vramctl_test.h"

namespace vrambroker::testing_support {
namespace {

using Json = nlohmann::json;
using ::testing::HasSubstr;

class RecordingsTest : public VramctlDaemonTest, public ::testing::WithParamInterface<Placement> {
 protected:
  void SetUp() override {
    placement_ = GetParam();
    // Recording is off, except for recordings started by a test.
    ASSERT_OK(StartDaemon({.capacity = "1GiB", .config = "record_events: 0"}));
  }

  void TearDown() override {
    buffers_.clear();  // before the daemon stops
    VramctlDaemonTest::TearDown();
  }

  // Allocates 240 MiB, before a recording begins.
  void AllocateFirst(Client& client) {
    for (int i = 0; i < 60; ++i) {
      ASSERT_OK_AND_ASSIGN(Buffer buffer, client.Allocate(4_MiB));
      buffers_.push_back(std::move(buffer));
    }
  }
  // Goes from 240 MiB to the peak, and back.
  void GoOn(Client& client) {
    for (size_t i = 0; i < 60; i += 3) ASSERT_OK(buffers_[i].Reset());
    {
      std::vector<Buffer> more;
      for (int i = 0; i < 28; ++i) {
        ASSERT_OK_AND_ASSIGN(Buffer buffer, client.Allocate(12_MiB));
        more.push_back(std::move(buffer));
      }
    }
    ASSERT_OK_AND_ASSIGN(Buffer last, client.Allocate(3_MiB));
    buffers_.push_back(std::move(last));
  }

  // Compares the peaks of the replay with the session's peaks. REQUIRES: the session reached its peaks while recorded.
  void ExpectSamePeaks(Client& client, const std::string& file) {
    ASSERT_OK_AND_ASSIGN(const MemoryStats live, client.GetMemoryStats());
    ASSERT_EQ(live.allocated_bytes.all.peak, 496_MiB);
    const Json replay = CtlJson({"replay", file});
    EXPECT_EQ(replay["peak_allocated_bytes"], live.allocated_bytes.all.peak);
    EXPECT_EQ(replay["peak_reserved_bytes"], live.reserved_bytes.all.peak);
    EXPECT_EQ(replay["allocations"], 29);
    EXPECT_EQ(replay["start_reserved_bytes"], 240_MiB);
    EXPECT_EQ(CtlJson({"tune", file})["baseline"]["smallest_device_bytes"], live.reserved_bytes.all.peak);
    const RunResult text = Ctl({"replay", file});
    EXPECT_THAT(text.err, HasSubstr("the recording began with 240.00 MiB in use (60 blocks) of 240.00 MiB reserved"));
    const RunResult small = Ctl({"replay", file, "--device-bytes=200MiB"});
    EXPECT_EQ(small.exit_code, 1);
    EXPECT_THAT(small.err, HasSubstr("does not fit: 240.00 MiB was held when the recording began"));
  }

  std::unique_ptr<ChildProcess> StartTrace(const std::string& file, const std::vector<std::string>& flags) {
    Arguments arguments = {VramctlProgram(), "trace", "job", "-o", file, "--format=json", "--socket_dir=" + dir()};
    arguments.insert(arguments.end(), flags.begin(), flags.end());
    absl::StatusOr<std::unique_ptr<ChildProcess>> process = ChildProcess::Start(arguments);
    EXPECT_OK(process.status());
    return process.ok() ? *std::move(process) : nullptr;
  }
  size_t Events() { return CtlJson({"snapshot", "job", "-o", folder_ + "/look.pickle"})["events"]; }
  bool IsRecording() { return Events() > 0; }
  // Returns true when a trace of a session without recording has begun: the trace marks its beginning, and reads from
  // the mark on. The mark and the read are events, and so are the looks of this test.
  bool HasBegun() {
    const size_t events = Events();
    return events > 0 && events >= ++looks_ + 2;
  }
  // Counts the events in the client's own snapshot.
  static size_t EventsOf(Client& client) {
    const absl::StatusOr<std::string> text = client.SnapshotJson();
    EXPECT_OK(text.status());
    return Json::parse(text.value_or("{}"), nullptr, /*allow_exceptions=*/false)["device_traces"][0].size();
  }
  Json JsonFile(const std::string& name) {
    std::ifstream file(folder_ + name);
    return Json::parse(file, nullptr, /*allow_exceptions=*/false);
  }
  size_t Logged(const std::string& event) {
    return std::vector<std::string>(absl::StrSplit(daemon_->log(), event)).size() - 1;
  }
  static std::ptrdiff_t FilesIn(const std::string& folder) {
    return std::distance(std::filesystem::directory_iterator(folder), {});
  }
  static rlimit FileSizes() {
    rlimit limit = {};
    EXPECT_EQ(getrlimit(RLIMIT_FSIZE, &limit), 0);
    return limit;
  }

  const std::string folder_ = MakeTempDir();
  std::vector<Buffer> buffers_;
  size_t looks_ = 0;  // looks of HasBegun() that are events
};

INSTANTIATE_TEST_SUITE_P(Placements, RecordingsTest, ::testing::Values(Placement::kLeased, Placement::kRemote),
                         [](const auto& test) { return test.param == Placement::kLeased ? "Leased" : "Remote"; });

TEST_P(RecordingsTest, ReplayHasThePeaksOfTheSession) {
  ASSERT_OK_AND_ASSIGN(Client client, Connect("job"));
  AllocateFirst(client);
  ASSERT_EQ(Ctl({"record", "job", "100000"}).exit_code, 0);
  GoOn(client);
  const std::string file = folder_ + "/job.pickle";
  ASSERT_EQ(Ctl({"snapshot", "job", "-o", file}).exit_code, 0);
  ExpectSamePeaks(client, file);
}

TEST_P(RecordingsTest, ASnapshotWithoutEventsIsRefused) {
  ASSERT_OK_AND_ASSIGN(Client client, Connect("job"));
  AllocateFirst(client);
  const std::string file = folder_ + "/job.pickle";
  ASSERT_EQ(Ctl({"snapshot", "job", "-o", file}).exit_code, 0);
  for (const char* command : {"replay", "tune"}) {
    const RunResult result = Ctl({command, file});
    EXPECT_EQ(result.exit_code, 2);
    EXPECT_EQ(result.out, "");
    EXPECT_THAT(result.err, HasSubstr("records no events to replay; run `vramctl record SESSION 100000`"));
  }
}

TEST_P(RecordingsTest, TraceRecordsUntilASignalAndStops) {
  ASSERT_OK_AND_ASSIGN(Client client, Connect("job"));
  AllocateFirst(client);
  const std::string file = folder_ + "/job.pickle";
  const std::unique_ptr<ChildProcess> trace = StartTrace(file, {"--seconds=3600"});
  ASSERT_NE(trace, nullptr);
  ASSERT_TRUE(WaitFor([&] { return HasBegun(); }));
  GoOn(client);
  trace->Signal(SIGINT);
  ASSERT_OK_AND_ASSIGN(const int exit_code, trace->Wait());
  EXPECT_EQ(exit_code, 0) << trace->ErrorText();
  const Json json = Json::parse(trace->ReadRest(), nullptr, /*allow_exceptions=*/false);
  EXPECT_EQ(json["ended_by"], "signal");
  EXPECT_EQ(json["file"], file);
  EXPECT_GT(json["events"], 100);
  EXPECT_EQ(trace->ErrorText(), "") << "no terminal, no progress";
  EXPECT_TRUE(WaitFor([&] { return !IsRecording(); })) << "as it was before";
  ExpectSamePeaks(client, file);
}

TEST_P(RecordingsTest, TraceLeavesARecordingThatGoesOnAlready) {
  ASSERT_OK_AND_ASSIGN(Client client, Connect("job"));
  ASSERT_EQ(Ctl({"record", "job", "100000"}).exit_code, 0);
  AllocateFirst(client);
  const size_t before = Events();
  const std::string file = folder_ + "/job.pickle";
  const std::unique_ptr<ChildProcess> trace = StartTrace(file, {"--seconds=3600"});
  ASSERT_NE(trace, nullptr);
  // Events include the looks of this test, and the first look of the command.
  size_t looks = 0;
  ASSERT_TRUE(WaitFor([&] { return Events() > before + ++looks; }));
  GoOn(client);
  trace->Signal(SIGTERM);
  ASSERT_OK_AND_ASSIGN(const int exit_code, trace->Wait());
  EXPECT_EQ(exit_code, 0) << trace->ErrorText();
  EXPECT_GT(Events(), before + 100) << "goes on, and has all that it had";
  ExpectSamePeaks(client, file);
}

TEST_P(RecordingsTest, NobodyTakesATracesEventsAway) {
  ASSERT_OK_AND_ASSIGN(Client client, Connect("job"));
  AllocateFirst(client);
  const std::string file = folder_ + "/job.pickle";
  const std::unique_ptr<ChildProcess> trace = StartTrace(file, {"--seconds=3600"});
  ASSERT_NE(trace, nullptr);
  ASSERT_TRUE(WaitFor([&] { return HasBegun(); }));
  ASSERT_EQ(Ctl({"record", "job", "20"}).exit_code, 0);
  ASSERT_OK(client.SetRecording(10));
  GoOn(client);
  trace->Signal(SIGHUP);
  ASSERT_OK_AND_ASSIGN(const int exit_code, trace->Wait());
  EXPECT_EQ(exit_code, 0) << trace->ErrorText();
  EXPECT_EQ(Json::parse(trace->ReadRest(), nullptr, false)["complete"], true);
  ExpectSamePeaks(client, file);
  EXPECT_TRUE(WaitFor([&] { return EventsOf(client) <= 2 * 10 + 1; })) << "what was said last counts then";
}

TEST_P(RecordingsTest, TwoTracesAtATime) {
  ASSERT_OK_AND_ASSIGN(Client client, Connect("job"));
  AllocateFirst(client);
  const std::string first_file = folder_ + "/first.pickle";
  const std::string second_file = folder_ + "/second.pickle";
  const std::unique_ptr<ChildProcess> first = StartTrace(first_file, {"--seconds=3600"});
  ASSERT_NE(first, nullptr);
  ASSERT_TRUE(WaitFor([&] { return IsRecording(); }));
  const std::unique_ptr<ChildProcess> second = StartTrace(second_file, {"--seconds=3600"});
  ASSERT_NE(second, nullptr);
  ASSERT_TRUE(WaitFor([&] { return Logged("trace started") == 2; }));
  first->Signal(SIGINT);
  ASSERT_OK_AND_ASSIGN(int exit_code, first->Wait());
  EXPECT_EQ(exit_code, 0) << first->ErrorText();
  ASSERT_TRUE(WaitFor([&] { return Logged("trace ended") == 1; }));
  GoOn(client);
  second->Signal(SIGINT);
  ASSERT_OK_AND_ASSIGN(exit_code, second->Wait());
  EXPECT_EQ(exit_code, 0) << second->ErrorText();
  EXPECT_EQ(Json::parse(second->ReadRest(), nullptr, false)["complete"], true);
  ExpectSamePeaks(client, second_file);
  EXPECT_TRUE(WaitFor([&] { return !IsRecording(); })) << "as it was before the first";
}

TEST_P(RecordingsTest, ATraceThatIsKilledLeavesNothingBehind) {
  ASSERT_OK_AND_ASSIGN(Client client, Connect("job"));
  const std::unique_ptr<ChildProcess> trace = StartTrace(folder_ + "/job.pickle", {"--seconds=3600"});
  ASSERT_NE(trace, nullptr);
  ASSERT_TRUE(WaitFor([&] { return IsRecording(); }));
  trace->Signal(SIGKILL);
  ASSERT_OK(trace->Wait());
  EXPECT_TRUE(WaitFor([&] { return !IsRecording(); }));
}

// Overflow of a trace: only remote placement is tested, because a leased client keeps more than a test can fill.
class RemoteRecordingsTest : public RecordingsTest {};
INSTANTIATE_TEST_SUITE_P(Placements, RemoteRecordingsTest, ::testing::Values(Placement::kRemote));

TEST_P(RemoteRecordingsTest, TraceSaysThatItsBeginningIsLost) {
  ASSERT_EQ(*daemon_->Stop(), 0);
  ASSERT_OK(StartDaemon({.capacity = "1GiB", .config = "record_events: 0 max_recorded_events_per_uid: 2000"}));
  ASSERT_OK_AND_ASSIGN(Client client, Connect("job"));
  const std::unique_ptr<ChildProcess> trace = StartTrace(folder_ + "/job.pickle", {"--seconds=3600"});
  ASSERT_NE(trace, nullptr);
  ASSERT_TRUE(WaitFor([&] { return HasBegun(); }));
  for (int i = 0; i < 2000; ++i) EXPECT_OK(client.Allocate(1_MiB));
  trace->Signal(SIGHUP);
  ASSERT_OK_AND_ASSIGN(const int exit_code, trace->Wait());
  EXPECT_EQ(exit_code, 0) << trace->ErrorText();
  EXPECT_EQ(Json::parse(trace->ReadRest(), nullptr, false)["complete"], false);
}

TEST_P(RecordingsTest, TraceHasWhatAJobDidThatDiesOfItsRefusal) {
  const std::string file = folder_ + "/job.pickle";
  ASSERT_OK_AND_ASSIGN(ClientProcess job, ClientProcess::Start(dir()));
  ASSERT_OK(job.Call(absl::StrCat("connect job -", placement_ == Placement::kRemote ? " remote" : "")));
  ASSERT_OK(job.Call(absl::StrCat("alloc ", 5_MiB)));
  const std::unique_ptr<ChildProcess> trace = StartTrace(file, {"--until-oom"});
  ASSERT_NE(trace, nullptr);
  ASSERT_TRUE(WaitFor([&] { return HasBegun(); }));
  ASSERT_OK(job.Call(absl::StrCat("alloc ", 6_MiB)));
  // Stopped, the command sees neither request in time.
  trace->Signal(SIGSTOP);
  ASSERT_OK(job.Call(absl::StrCat("alloc ", 7_MiB)));
  EXPECT_FALSE(job.Call(absl::StrCat("alloc ", 1010_MiB)).ok());
  EXPECT_FALSE(job.Call(absl::StrCat("alloc ", 1010_MiB)).ok()) << "of a second try nothing may be recorded";
  ASSERT_OK(job.Call("goodbye"));
  trace->Signal(SIGCONT);
  ASSERT_OK_AND_ASSIGN(const int exit_code, trace->Wait());
  EXPECT_EQ(exit_code, 0) << trace->ErrorText();
  const Json json = Json::parse(trace->ReadRest(), nullptr, /*allow_exceptions=*/false);
  EXPECT_EQ(json["ended_by"], "refusal");
  EXPECT_EQ(json["complete"], true);
  const Json replay = CtlJson({"replay", file, "--device-bytes=1GiB"});
  EXPECT_GE(replay["allocations"], 3);
  EXPECT_EQ(replay["peak_allocated_bytes"], 18_MiB);
  EXPECT_GE(replay["ooms"], 1);
}

TEST_P(RecordingsTest, TraceSaysWhenNothingIsKeptOfAJobThatDied) {
  const std::string file = folder_ + "/job.pickle";
  ASSERT_OK_AND_ASSIGN(ClientProcess job, ClientProcess::Start(dir()));
  ASSERT_OK(job.Call(absl::StrCat("connect job -", placement_ == Placement::kRemote ? " remote" : "")));
  const std::unique_ptr<ChildProcess> trace = StartTrace(file, {"--until-oom"});
  ASSERT_NE(trace, nullptr);
  ASSERT_TRUE(WaitFor([&] { return HasBegun(); }));
  ASSERT_OK(job.Call(absl::StrCat("alloc ", 6_MiB)));
  trace->Signal(SIGSTOP);
  EXPECT_FALSE(job.Call(absl::StrCat("alloc ", 2_GiB)).ok()) << "what no device has is not worth a recording";
  ASSERT_OK(job.Call("goodbye"));
  trace->Signal(SIGCONT);
  ASSERT_OK_AND_ASSIGN(const int exit_code, trace->Wait());
  EXPECT_EQ(exit_code, 1);
  EXPECT_THAT(trace->ErrorText(), HasSubstr("a request was refused, and the session ended before it could be read"));
  EXPECT_THAT(trace->ErrorText(), HasSubstr("no device has that much"));
}

TEST_P(RecordingsTest, TraceEndsWhenTheTimeIsOver) {
  ASSERT_OK_AND_ASSIGN(Client client, Connect("job"));
  const std::string file = folder_ + "/job.json";
  const Json json = CtlJson({"trace", "job", "-o", file, "--seconds=0.1"});
  EXPECT_EQ(json["ended_by"], "time");
  EXPECT_GE(json["seconds"], 0.1);
  EXPECT_TRUE(std::filesystem::exists(file));
  EXPECT_TRUE(WaitFor([&] { return !IsRecording(); }));
}

TEST_P(RecordingsTest, TraceUntilOomEndsWithARefusal) {
  ASSERT_OK_AND_ASSIGN(Client client, Connect("job"));
  EXPECT_FALSE(client.Allocate(2_GiB).ok()) << "an earlier one does not count";
  const std::string file = folder_ + "/job.pickle";
  const std::unique_ptr<ChildProcess> trace = StartTrace(file, {"--until-oom"});
  ASSERT_NE(trace, nullptr);
  ASSERT_TRUE(WaitFor([&] { return HasBegun(); }));
  AllocateFirst(client);
  EXPECT_TRUE(trace->Running());
  EXPECT_FALSE(client.Allocate(900_MiB).ok());
  ASSERT_OK_AND_ASSIGN(const int exit_code, trace->Wait());
  EXPECT_EQ(exit_code, 0) << trace->ErrorText();
  EXPECT_EQ(Json::parse(trace->ReadRest(), nullptr, false)["ended_by"], "refusal");
  ASSERT_OK_AND_ASSIGN(const Trace read, ReadTraceFile(file));
  EXPECT_EQ(CtlJson({"replay", file, "--device-bytes=1GiB"})["ooms"], 1);
}

TEST_P(RecordingsTest, TraceOfASessionThatEndsSaysSo) {
  const std::string file = folder_ + "/job.pickle";
  ASSERT_OK_AND_ASSIGN(ClientProcess job, ClientProcess::Start(dir()));
  ASSERT_OK(job.Call(absl::StrCat("connect job -", placement_ == Placement::kRemote ? " remote" : "")));
  const std::unique_ptr<ChildProcess> trace = StartTrace(file, {"--seconds=3600"});
  ASSERT_NE(trace, nullptr);
  ASSERT_TRUE(WaitFor([&] { return HasBegun(); }));
  ASSERT_OK(job.Call(absl::StrCat("alloc ", 5_MiB)));
  // Waits until the command has looked again; looks are events.
  const size_t before = Events();
  size_t looks = 0;
  ASSERT_TRUE(WaitFor([&] { return Events() > before + ++looks; }));
  ASSERT_OK(job.Call("goodbye"));
  ASSERT_OK_AND_ASSIGN(const int exit_code, trace->Wait());
  EXPECT_EQ(exit_code, 1);
  const Json error = Json::parse(trace->ErrorText(), nullptr, /*allow_exceptions=*/false);
  EXPECT_THAT(error["error"]["message"].get<std::string>(),
              ::testing::MatchesRegex("job could not be recorded to the end: .*job.pickle has its [0-9]+ events of the "
                                      "first [0-9.]+ seconds"));
  const Json replay = CtlJson({"replay", file});
  EXPECT_EQ(replay["allocations"], 1);
  EXPECT_EQ(replay["peak_allocated_bytes"], 5_MiB);
}

TEST_P(RecordingsTest, TraceOfAnEndedSessionSaysSo) {
  const std::string file = folder_ + "/job.pickle";
  ASSERT_OK_AND_ASSIGN(ClientProcess job, ClientProcess::Start(dir()));
  ASSERT_OK(job.Call(absl::StrCat("connect job -", placement_ == Placement::kRemote ? " remote" : "")));
  ASSERT_OK(job.Call(absl::StrCat("alloc ", 5_MiB)));
  ASSERT_EQ(Ctl({"end", "job"}).exit_code, 0);
  const RunResult result = Ctl({"trace", "job", "-o", file, "--seconds=3600"});
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(result.err, HasSubstr("job has ended"));
  EXPECT_FALSE(std::filesystem::exists(file));
}

TEST_P(RecordingsTest, TraceOfNoSessionWritesNothing) {
  const std::string file = folder_ + "/job.pickle";
  const RunResult result = Ctl({"trace", "job", "-o", file});
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_FALSE(std::filesystem::exists(file));
}

TEST_P(RecordingsTest, TraceRefusesWrongUse) {
  ASSERT_OK_AND_ASSIGN(Client client, Connect("job"));
  const std::string file = folder_ + "/job.pickle";
  for (const Arguments& arguments :
       std::vector<Arguments>{{"trace", "job"},
                              {"trace", "-o", file},
                              {"trace", "job", "-o", folder_},
                              {"trace", "job", "-o", file, "--seconds=0"},
                              {"trace", "job", "-o", file, "--seconds=nan"},
                              {"trace", "job", "-o", file, "--seconds=1", "--until-oom"}}) {
    EXPECT_EQ(Ctl(arguments).exit_code, 2) << ::testing::PrintToString(arguments);
  }
  const RunResult nowhere = Ctl({"trace", "job", "-o", folder_ + "/no/such/file", "--seconds=3600"});
  EXPECT_EQ(nowhere.exit_code, 1) << "at once";
  EXPECT_THAT(nowhere.err, HasSubstr("cannot write into its folder: No such file or directory"));
  const RunResult nobody = Ctl({"trace", "nobody", "-o", file});
  EXPECT_EQ(nobody.exit_code, 1);
  EXPECT_THAT(nobody.err, HasSubstr("nobody"));
  EXPECT_FALSE(std::filesystem::exists(file));
}

// ---- Recordings by the session itself ----

TEST_P(RecordingsTest, AClientRecordsAndDumpsItself) {
  ASSERT_OK_AND_ASSIGN(Client client, Connect("job"));
  ASSERT_OK(client.SetRecording(100'000));
  AllocateFirst(client);
  GoOn(client);
  ASSERT_OK_AND_ASSIGN(const MemoryStats live, client.GetMemoryStats());
  ASSERT_OK(client.DumpSnapshot(folder_ + "/job.pickle"));
  const Json replay = CtlJson({"replay", folder_ + "/job.pickle"});
  EXPECT_EQ(replay["peak_allocated_bytes"], live.allocated_bytes.all.peak);
  EXPECT_EQ(replay["peak_reserved_bytes"], live.reserved_bytes.all.peak);
  EXPECT_EQ(replay["allocations"], 60 + 29);
  ASSERT_OK(client.DumpSnapshot(folder_ + "/job.json"));
  // SnapshotJson() returns the dump as text, with or without the history.
  ASSERT_OK_AND_ASSIGN(const std::string text, client.SnapshotJson());
  const Json whole = Json::parse(text, nullptr, /*allow_exceptions=*/false);
  EXPECT_EQ(whole["segments"], JsonFile("/job.json")["segments"]);
  EXPECT_GT(whole["device_traces"][0].size(), 60u + 29u);
  ASSERT_OK_AND_ASSIGN(const std::string without, client.SnapshotJson(/*with_history=*/false));
  const Json state = Json::parse(without, nullptr, /*allow_exceptions=*/false);
  EXPECT_EQ(state["segments"], whole["segments"]);
  EXPECT_EQ(state["device_traces"][0].size(), 0u);
}

TEST_P(RecordingsTest, AClientKeepsNoMoreEventsThanItSays) {
  ASSERT_OK_AND_ASSIGN(Client client, Connect("job"));
  ASSERT_OK(client.SetRecording(10));
  AllocateFirst(client);
  EXPECT_EQ(EventsOf(client), 10u);
  ASSERT_OK(client.SetRecording(Client::kMaxRecordedEvents));
  AllocateFirst(client);
  EXPECT_GT(EventsOf(client), 60u);
  EXPECT_STATUS(client.SetRecording(Client::kMaxRecordedEvents + 1), absl::StatusCode::kInvalidArgument,
                "1000001 is above 1000000, the most that is kept");
  EXPECT_GT(EventsOf(client), 60u) << "as before";
}

TEST_P(RecordingsTest, ADumpThatCannotBeWrittenLeavesWhatWasThere) {
  ASSERT_OK_AND_ASSIGN(Client client, Connect("job"));
  ASSERT_OK(client.SetRecording(1000));
  AllocateFirst(client);
  const auto refused = [&](const std::string& file, absl::StatusCode code, const std::string& why) {
    EXPECT_STATUS(client.DumpSnapshot(file), code, why);
  };
  refused("", absl::StatusCode::kInvalidArgument, "the name of a file is needed");
  refused(folder_, absl::StatusCode::kInvalidArgument, folder_ + ": it exists and is not a file");
  refused(folder_ + "/no/such/file", absl::StatusCode::kNotFound, "cannot write into its folder");
  const std::string file = folder_ + "/job.pickle";
  ASSERT_OK(client.DumpSnapshot(file));
  const auto bytes = std::filesystem::file_size(file);
  {
    // Simulates a disk that is full after the first bytes.
    const rlimit all = FileSizes();
    rlimit few = all;
    few.rlim_cur = 1000;
    const auto before = signal(SIGXFSZ, SIG_IGN);
    ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &few), 0);
    const absl::Status full = client.DumpSnapshot(file);
    ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &all), 0);
    signal(SIGXFSZ, before);
    EXPECT_THAT(std::string(full.message()), HasSubstr("cannot write " + file + ": write: File too large"));
  }
  EXPECT_EQ(std::filesystem::file_size(file), bytes);
  EXPECT_EQ(FilesIn(folder_), 1) << "nothing else is left behind";
  EXPECT_EQ(CtlJson({"replay", file})["allocations"], 60);
}

TEST_P(RecordingsTest, ThreadsDumpToOneFile) {
  ASSERT_OK_AND_ASSIGN(Client client, Connect("job"));
  ASSERT_OK(client.SetRecording(1000));
  AllocateFirst(client);
  const std::string file = folder_ + "/job.pickle";
  std::vector<std::thread> threads;
  for (int i = 0; i < 2; ++i) {
    threads.emplace_back([&] {
      for (int n = 0; n < 10; ++n) EXPECT_OK(client.DumpSnapshot(file));
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(CtlJson({"replay", file})["allocations"], 60);
  EXPECT_EQ(FilesIn(folder_), 1);
}

TEST_P(RecordingsTest, ADumpAfterTheDaemonHasGone) {
  ASSERT_OK_AND_ASSIGN(Client client, Connect("job"));
  ASSERT_OK(client.SetRecording(1000));
  AllocateFirst(client);
  ASSERT_OK(client.Allocate(1000).status());  // segment for the blocks below
  daemon_->Kill();
  ASSERT_TRUE(WaitFor([&] { return absl::IsUnavailable(client.status()); }));
  const std::string file = folder_ + "/job.pickle";
  if (placement_ == Placement::kRemote) {
    EXPECT_STATUS(client.DumpSnapshot(file), absl::StatusCode::kUnavailable, "");
    EXPECT_STATUS(client.SnapshotJson(), absl::StatusCode::kUnavailable, "");
    EXPECT_STATUS(client.SetRecording(10), absl::StatusCode::kUnavailable, "");
    EXPECT_EQ(FilesIn(folder_), 0);
    return;
  }
  ASSERT_OK(client.DumpSnapshot(file));
  EXPECT_EQ(RunProgram({VramctlProgram(), "replay", file}).exit_code, 0);
  ASSERT_OK(client.SetRecording(5));
  for (int i = 0; i < 10; ++i) EXPECT_OK(client.Allocate(1000).status());
  EXPECT_LE(EventsOf(client), 5u + 5u) << "a free may be two";
}

TEST_P(RecordingsTest, ADumpGoesToWhereALinkLeads) {
  ASSERT_OK_AND_ASSIGN(Client client, Connect("job"));
  const std::string target = folder_ + "/elsewhere.pickle";
  const std::string link = folder_ + "/job.pickle";
  std::ofstream(target) << "old";
  std::filesystem::create_symlink("elsewhere.pickle", link);
  ASSERT_OK(client.DumpSnapshot(link));
  EXPECT_TRUE(std::filesystem::is_symlink(link));
  EXPECT_GT(std::filesystem::file_size(target), 100u);
  ASSERT_EQ(Ctl({"snapshot", "job", "-o", link}).exit_code, 0);
  EXPECT_TRUE(std::filesystem::is_symlink(link));
}

TEST_P(RecordingsTest, AFileThatIsReplacedKeepsItsRights) {
  ASSERT_OK_AND_ASSIGN(Client client, Connect("job"));
  const std::string file = folder_ + "/private.pickle";
  const auto rights = [&] {
    struct stat info = {};
    EXPECT_EQ(stat(file.c_str(), &info), 0);
    return std::pair(info.st_mode & 07777, info.st_uid);
  };
  std::ofstream(file) << "old";
  ASSERT_EQ(chmod(file.c_str(), 0600), 0);
  const uid_t owner = getuid() == 0 ? 65534 : getuid();
  ASSERT_EQ(chown(file.c_str(), owner, static_cast<gid_t>(-1)), 0);
  ASSERT_OK(client.DumpSnapshot(file));
  EXPECT_GT(std::filesystem::file_size(file), 100u);
  EXPECT_EQ(rights(), std::pair(mode_t{0600}, owner));
  ASSERT_EQ(Ctl({"snapshot", "job", "-o", file}).exit_code, 0);
  EXPECT_EQ(rights(), std::pair(mode_t{0600}, owner));
}

TEST_P(RecordingsTest, AClientThatHasEndedItsRecordingKeepsWhatTheConfigurationSays) {
  ASSERT_EQ(*daemon_->Stop(), 0);
  ASSERT_OK(StartDaemon({.capacity = "1GiB", .config = "record_events: 5"}));
  ASSERT_OK_AND_ASSIGN(Client client, Connect("job"));
  AllocateFirst(client);
  EXPECT_EQ(EventsOf(client), 5u);
  ASSERT_OK(client.SetRecording(1000));
  AllocateFirst(client);
  EXPECT_GT(EventsOf(client), 60u);
  ASSERT_OK(client.SetRecording(0));
  AllocateFirst(client);
  EXPECT_EQ(EventsOf(client), 5u);
}

TEST_P(RecordingsTest, TheDaemonBoundsWhatRemoteClientsRecord) {
  ASSERT_EQ(*daemon_->Stop(), 0);
  ASSERT_OK(StartDaemon({.capacity = "1GiB", .config = "record_events: 0 max_recorded_events_per_uid: 1000"}));
  ASSERT_OK_AND_ASSIGN(Client client, Connect("job"));
  EXPECT_OK(client.SetRecording(1000));
  const absl::Status refused = client.SetRecording(1001);
  if (placement_ == Placement::kLeased) {
    EXPECT_OK(refused) << "that is in the client's own memory";
    return;
  }
  EXPECT_STATUS(refused, absl::StatusCode::kResourceExhausted, "max_recorded_events_per_uid");
  EXPECT_FALSE(GetOutOfMemory(refused).has_value());
}

}  // namespace
}  // namespace vrambroker::testing_support
