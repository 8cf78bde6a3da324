// SPDX-License-Identifier: Apache-2.0
//
// Tests of scrapes: of a broker with known sessions, of many sessions, and of failures.
#include "server/monitoring/metrics.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <prometheus/histogram.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <regex>
#include <set>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "allocator/base/bytes.h"
#include "server/base/worker_pool.h"
#include "server/rpc/rpc_meter.h"
#include "tests/support/fake_device.h"
#include "tests/support/http.h"
#include "tests/support/paths.h"

namespace vrambroker {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;
using testing_support::Labels;
using testing_support::MetricsPage;

constexpr size_t kNoBound = 100'000;

// Returns the families' text as a page shows the text.
std::string Written(const std::vector<prometheus::MetricFamily>& families) {
  std::string text;
  AppendText(families, text);
  return text;
}

std::string WrittenLabel(const std::string& value) {
  MetricFamilies out;
  out.Family("a", "", prometheus::MetricType::Gauge);
  out.Sample(MakeLabels({{"b", value}}), uint64_t{1});
  return Written(out.Take());
}

TEST(MetricFamiliesTest, HostileLabelsDoNotBreakThePage) {
  EXPECT_EQ(WrittenLabel("x"), "# TYPE a gauge\na{b=\"x\"} 1\n");
  EXPECT_EQ(WrittenLabel(""), "# TYPE a gauge\na{b=\"\"} 1\n");
  EXPECT_EQ(WrittenLabel("q\"b\\n\nü,} 1"), "# TYPE a gauge\na{b=\"q\\\"b\\\\n\\nü,} 1\"} 1\n");
  EXPECT_THAT(WrittenLabel("\xF0\x9F\x98\x80"), HasSubstr("\"\xF0\x9F\x98\x80\""));
  // Covers a lone byte, an overlong slash, a surrogate, a code point beyond Unicode, and a sequence that is cut off.
  EXPECT_THAT(WrittenLabel("\xFFz"), HasSubstr("\"\xEF\xBF\xBDz\""));
  for (const char* bad : {"\xC0\xAF", "\xED\xA0\x80", "\xF4\x90\x80\x80", "\xE2\x82"}) {
    const std::string written = WrittenLabel(bad);
    EXPECT_THAT(written, Not(HasSubstr(bad)));
    EXPECT_THAT(written, HasSubstr("\xEF\xBF\xBD"));
  }
}

TEST(MetricFamiliesTest, FamiliesAndHistogramsAreWritten) {
  prometheus::Histogram histogram({0.001, 0.5});
  histogram.Observe(0.001);  // a bucket includes its bound
  histogram.Observe(0.002);
  histogram.Observe(3);
  MetricFamilies out;
  out.Single("a_total", "What.", prometheus::MetricType::Counter, uint64_t{1} << 53);
  out.Family("b_seconds", "How long.", prometheus::MetricType::Histogram);
  out.Sample(MakeLabels({{"x", "y"}}), histogram.Collect().histogram);
  out.Single("c", "Not used yet.", prometheus::MetricType::Gauge, 0.25);
  out.Sample(MakeLabels({{"x", "y"}}), "z", "1", 0.5);
  EXPECT_EQ(Written(out.Take()),
            "# HELP a_total What.\n# TYPE a_total counter\na_total 9007199254740992\n"
            "# HELP b_seconds How long.\n# TYPE b_seconds histogram\n"
            "b_seconds_count{x=\"y\"} 3\nb_seconds_sum{x=\"y\"} 3.003\n"
            "b_seconds_bucket{x=\"y\",le=\"0.001\"} 1\nb_seconds_bucket{x=\"y\",le=\"0.5\"} 2\n"
            "b_seconds_bucket{x=\"y\",le=\"+Inf\"} 3\n"
            "# HELP c Not used yet.\n# TYPE c gauge\nc 0.25\nc{x=\"y\",z=\"1\"} 0.5\n");
}

TEST(MeteredDeviceTest, CountsCallsErrorsAndScrubs) {
  auto fake = std::make_unique<FakeDevice>(8_MiB);
  const auto control = fake->control();
  MeteredDevice device(std::move(fake));
  const absl::StatusOr<DeviceSegment> segment = device.AllocateSegment(2_MiB);
  ASSERT_TRUE(segment.ok());
  EXPECT_FALSE(device.AllocateSegment(8_MiB).ok());
  EXPECT_TRUE(device.FreeSegment(*segment).ok());
  EXPECT_TRUE(device.Health().ok());
  const DeviceMeterStats stats = device.GetStats();
  const auto of = [&](DeviceCall call) { return stats.calls[static_cast<size_t>(call)]; };
  EXPECT_EQ(of(DeviceCall::kAllocate).durations.sample_count, 2u);
  EXPECT_EQ(of(DeviceCall::kAllocate).errors, 1u);
  EXPECT_EQ(of(DeviceCall::kFree).durations.sample_count, 1u);
  EXPECT_EQ(of(DeviceCall::kFree).errors, 0u);
  EXPECT_EQ(of(DeviceCall::kHealth).durations.sample_count, 1u);
  EXPECT_EQ(of(DeviceCall::kHolders).durations.sample_count, 0u);
  EXPECT_EQ(stats.scrubs, 0u) << "a device that gets its memory zeroed";
}

TEST(RpcMeterTest, CountsByMethodAndCode) {
  RpcMeter meter;
  EXPECT_EQ(meter.Find("NoSuchMethod"), nullptr);
  ASSERT_NE(meter.Find("Session.LeaseSegments"), nullptr);
  const RpcMeter::Call open = RpcMeter::Start(meter.Find("Session"));
  RpcMeter::Start(meter.Find("Allocate")).Done(absl::StatusCode::kResourceExhausted);
  RpcMeter::Start(meter.Find("Allocate")).Done(absl::StatusCode::kOk);
  const Metrics metrics({.view = [] { return BrokerView(); }, .rpcs = &meter});
  const MetricsPage before(metrics.Text());
  EXPECT_EQ(before.Value("vrambroker_rpc_in_flight", {{"method", "Session"}}), 1);
  EXPECT_EQ(before.Value("vrambroker_rpc_in_flight", {{"method", "Allocate"}}), 0);
  EXPECT_EQ(before.Count("vrambroker_rpc_requests_total", {{"method", "ReloadConfig"}}), 1u) << "of the other service";
  open.Done(absl::StatusCode::kCancelled);
  const MetricsPage page(metrics.Text());
  EXPECT_EQ(page.Value("vrambroker_rpc_requests_total", {{"method", "Allocate"}, {"code", "RESOURCE_EXHAUSTED"}}), 1);
  EXPECT_EQ(page.Value("vrambroker_rpc_requests_total", {{"method", "Allocate"}, {"code", "OK"}}), 1);
  EXPECT_EQ(page.Value("vrambroker_rpc_requests_total", {{"method", "Session"}, {"code", "CANCELLED"}}), 1);
  EXPECT_EQ(page.Value("vrambroker_rpc_in_flight", {{"method", "Session"}}), 0);
  EXPECT_EQ(page.Value("vrambroker_rpc_requests_total", {{"method", "Free"}}), 0) << "known from the start";
  EXPECT_EQ(page.Value("vrambroker_rpc_duration_seconds_count", {{"method", "Allocate"}}), 2);
  EXPECT_EQ(page.Count("vrambroker_rpc_duration_seconds_count", {{"method", "Session"}}), 0u);
}

// ---- A broker ----

class Client : public SessionEvents {
 public:
  void CloseSegments(absl::Span<const SegmentId> segments) override {
    if (const SessionPtr alive = session.lock()) alive->remote()->SegmentsClosed(segments);
  }
  void LimitChanged(int, uint64_t) override {}
  void Draining(const std::string&) override {}
  void Ended(const std::string&) override {}
  void Ask(uint64_t, const ClientQuestion&) override {}

  std::weak_ptr<Session> session;
};

class BrokerMetricsTest : public ::testing::Test {
 protected:
  static constexpr uint64_t kCapacity = 64_MiB;

  BrokerMetricsTest() {
    for (int i = 0; i < 2; ++i) {
      auto device = std::make_unique<FakeDevice>(kCapacity);
      controls_.push_back(device->control());
      pools_.push_back(std::make_unique<SegmentPool>(std::move(device), kCapacity, &next_segment_));
    }
    BrokerOptions options;
    options.watch_process = [](const UniqueFd&, const std::function<void()>&) { return 0; };
    options.unwatch_process = [](int) {};
    broker_ = std::make_unique<Broker>(std::move(options), std::vector<SegmentPool*>{pools_[0].get(), pools_[1].get()},
                                       workers_.get());
  }
  ~BrokerMetricsTest() override {
    broker_->CloseAll("end of the test");
    workers_.reset();
  }

  SessionPtr Open(const std::string& name, uid_t uid = 1000, bool leases = false) {
    const auto client = std::make_shared<Client>();
    const Caller caller{.pid = 1, .uid = uid, .pidfd = std::make_shared<UniqueFd>()};
    absl::StatusOr<SessionPtr> session = broker_->OpenSession(
        caller, {.name = name, .placement = leases ? Placement::kLeased : Placement::kRemote}, client);
    EXPECT_TRUE(session.ok()) << session.status();
    client->session = *session;
    return *session;
  }
  // Returns the answer once the workers have nothing left to do for the session.
  absl::StatusOr<Allocation> Allocate(const SessionPtr& session, uint64_t bytes, uint64_t device = 0) {
    const auto answered = std::make_shared<Gate>();
    answered->Open();
    absl::StatusOr<Allocation> answer = absl::UnknownError("no answer");
    broker_->allocations().Allocate(session, device, bytes, /*stream=*/0,
                                    [&answer, answered](absl::StatusOr<Allocation> allocation) {
                                      answer = std::move(allocation);
                                      answered->Pass();
                                    });
    answered->AwaitArrivals(1);
    const auto idle = std::make_shared<Gate>();
    idle->Open();
    session->slow_calls().Submit([idle] { idle->Pass(); });
    idle->AwaitArrivals(1);
    return answer;
  }
  std::string Text(size_t max_clients = kNoBound) const {
    return Metrics({.view = [this] { return broker_->operator_view().Look(); },
                    .rpcs = &rpcs_,
                    .reload = &reload_,
                    .http = &http_,
                    .max_clients = max_clients,
                    .max_clients_per_uid = max_clients})
        .Text();
  }
  MetricsPage Page() const { return MetricsPage(Text()); }

  std::atomic<uint64_t> next_segment_ = 1;
  std::unique_ptr<WorkerPool> workers_ = std::make_unique<WorkerPool>(4);
  std::vector<std::shared_ptr<FakeDevice::Control>> controls_;  // indexed by device
  std::vector<std::unique_ptr<SegmentPool>> pools_;
  std::unique_ptr<Broker> broker_;
  RpcMeter rpcs_;
  ReloadState reload_;
  HttpStats http_;
};

double Mib(double mib) {
  return mib * (1 << 20);
}

TEST_F(BrokerMetricsTest, FiguresOfClientsAndDevices) {
  const SessionPtr remote = Open("remote");
  const SessionPtr leased = Open("leased", 2000, /*leases=*/true);
  const absl::StatusOr<Allocation> small = Allocate(remote, 1000);
  ASSERT_TRUE(small.ok());
  const absl::StatusOr<Allocation> large = Allocate(remote, 3_MiB);
  ASSERT_TRUE(large.ok());
  ASSERT_TRUE(broker_->allocations().Free(remote, {large->block}).ok());  // a wholly free segment of 20 MiB
  EXPECT_FALSE(Allocate(remote, 65_MiB).ok());                            // larger than the device
  MemoryStats reported;
  reported.allocation.Up(PoolKind::kLarge, 2);
  reported.allocated_bytes.Up(PoolKind::kLarge, 5_MiB);
  reported.active_bytes.Up(PoolKind::kLarge, 5_MiB);
  reported.reserved_bytes.Up(PoolKind::kLarge, 10_MiB);
  reported.free.Add(1_GiB);  // more than the session holds
  reported.num_alloc_retries = 7;
  leased->leased()->Report(0, reported);
  std::optional<absl::Status> leasing;
  const auto answered = std::make_shared<Gate>();
  answered->Open();
  broker_->leases().LeaseSegments(leased, 0, {10_MiB}, [&](const absl::StatusOr<std::vector<Lease>>& leases) {
    leasing = leases.status();
    answered->Pass();
  });
  answered->AwaitArrivals(1);
  ASSERT_TRUE(leasing->ok()) << *leasing;

  const MetricsPage page = Page();
  const auto device = [&](const std::string& name) { return page.Value("vrambroker_device_" + name, {{"gpu", "0"}}); };
  const auto client = [&](const std::string& who, const std::string& name) {
    return page.Value("vrambroker_client_" + name, {{"client", who}, {"gpu", "0"}});
  };
  EXPECT_EQ(device("memory_total_bytes"), Mib(64));
  EXPECT_EQ(device("capacity_bytes"), Mib(64));
  EXPECT_EQ(device("memory_free_bytes"), Mib(64)) << "as of the last health check";
  ASSERT_TRUE(pools_[0]->UpdateHealth().ok());
  // The refused request gives the session's cache back to the daemon.
  EXPECT_EQ(device("idle_bytes"), Mib(20));
  EXPECT_EQ(device("leased_bytes"), Mib(12));
  EXPECT_EQ(device("reserved_bytes"), Mib(32));
  EXPECT_EQ(device("allocated_bytes"), 1024 + Mib(5));
  EXPECT_EQ(device("cached_free_bytes"), Mib(27) - 1024);
  EXPECT_EQ(device("committed_bytes"), Mib(12));
  EXPECT_EQ(device("guaranteed_bytes"), 0);
  EXPECT_EQ(device("segments"), 2);
  EXPECT_EQ(device("blocks"), 3);
  EXPECT_EQ(device("segment_allocs_total"), 3);
  EXPECT_EQ(device("segment_frees_total"), 0);
  EXPECT_EQ(device("alloc_retries_total"), 8);
  EXPECT_EQ(device("healthy"), 1);
  EXPECT_EQ(device("largest_free_block_bytes"), Mib(20)) << "a segment that the daemon caches";
  EXPECT_EQ(page.Value("vrambroker_device_free_blocks", {{"gpu", "0"}, {"size", "262144"}}), 1);
  EXPECT_EQ(page.Value("vrambroker_device_free_block_bytes", {{"gpu", "0"}, {"size", "16777216"}}), Mib(20));
  EXPECT_EQ(*device("external_fragmentation_ratio"), 0)
      << "in one piece, and what the daemon caches is in nobody's way";
  EXPECT_EQ(page.Value("vrambroker_device_call_duration_seconds_count", {{"gpu", "0"}, {"call", "allocate"}}), 3);

  controls_[0]->Fail(FakeDevice::Call::kFree, 1, 1, absl::InternalError("busy"));
  pools_[0]->ReleaseIdleSince(std::chrono::steady_clock::now());
  const auto unfreed = [&] { return Page().Value("vrambroker_device_unfreed_bytes", {{"gpu", "0"}}); };
  EXPECT_EQ(unfreed(), Mib(20)) << "the driver still has it as the daemon's";
  pools_[0]->RetryFrees();
  EXPECT_EQ(unfreed(), 0);

  EXPECT_EQ(client("remote", "reserved_bytes"), Mib(2));
  EXPECT_EQ(client("remote", "peak_reserved_bytes"), Mib(22));
  EXPECT_EQ(client("remote", "largest_free_block_bytes"), Mib(2) - 1024);
  EXPECT_EQ(page.Value("vrambroker_client_free_block_bytes", {{"client", "remote"}, {"gpu", "0"}, {"size", "262144"}}),
            Mib(2) - 1024);
  EXPECT_EQ(client("remote", "external_fragmentation_ratio"), 0) << "in one piece";
  EXPECT_EQ(client("remote", "allocs_total"), 2);
  EXPECT_EQ(client("remote", "frees_total"), 1);
  EXPECT_EQ(client("remote", "alloc_retries_total"), 1);
  EXPECT_EQ(page.Value("vrambroker_client_ooms_total",
                       {{"client", "remote"}, {"gpu", "0"}, {"reason", "larger_than_device"}}),
            1);
  EXPECT_EQ(client("leased", "largest_free_block_bytes"), Mib(10)) << "what a client says is cut to what can be";
  EXPECT_EQ(client("leased", "limit_bytes"), Mib(64));
  EXPECT_EQ(client("leased", "blocks"), 2);
  EXPECT_EQ(client("leased", "segments"), 1);

  // Sums of sessions and devices agree at rest.
  for (const char* name : {"allocated_bytes", "active_bytes", "requested_bytes", "inactive_split_bytes", "blocks",
                           "segments", "alloc_retries_total", "waiting_requests"}) {
    EXPECT_EQ(page.Sum(absl::StrCat("vrambroker_client_", name), {{"gpu", "0"}}), device(name)) << name;
  }
  EXPECT_EQ(page.Sum("vrambroker_client_reserved_bytes", {{"gpu", "0"}}), device("leased_bytes"));
  EXPECT_EQ(page.Sum("vrambroker_tenant_reserved_bytes", {{"gpu", "0"}}), device("leased_bytes"));
  EXPECT_EQ(page.Sum("vrambroker_client_ooms_total"), page.Sum("vrambroker_device_ooms_total"));
  EXPECT_EQ(page.Value("vrambroker_tenant_sessions", {{"tenant", "uid:2000"}, {"gpu", "1"}}), 1);
  EXPECT_EQ(page.Value("vrambroker_sessions", {{"state", "active"}}), 2);
  EXPECT_EQ(page.Value("vrambroker_client_info", {{"client", "leased"},
                                                  {"session", absl::StrCat(Raw(leased->id()))},
                                                  {"uid", "2000"},
                                                  {"tenant", "uid:2000"},
                                                  {"placement", "leased"}}),
            1);
}

TEST_F(BrokerMetricsTest, WhatProcessesUse) {
  auto processes = std::make_shared<DeviceProcesses>();
  processes->status = absl::OkStatus();
  processes->overhead_bytes = 5_MiB;
  processes->drift_bytes = 2_MiB;
  processes->unused_bytes = 3_MiB;
  for (int i = 1; i <= 25; ++i) {
    processes->processes.push_back({.name = absl::StrCat("program-", i), .used_bytes = i * 1_MiB});
    processes->uncounted_bytes += i * 1_MiB;
  }
  processes->processes.push_back({.name = "program-25", .used_bytes = 1_MiB});
  processes->uncounted_bytes += 1_MiB;
  processes->processes.push_back({.name = "train", .kind = ProcessView::Kind::kClient, .used_bytes = 50_MiB});
  BrokerView view = broker_->operator_view().Look();
  view.devices[0].processes = processes;
  const MetricsPage page(Metrics({.view = [&] { return view; }, .rpcs = &rpcs_}).Text());
  const auto device = [&](const std::string& name, const Labels& labels) {
    return page.Value("vrambroker_device_" + name, labels);
  };
  EXPECT_EQ(device("overhead_bytes", {{"gpu", "0"}}), Mib(5));
  EXPECT_EQ(device("drift_bytes", {{"gpu", "0"}, {"kind", "uncharged"}}), Mib(2));
  EXPECT_EQ(device("drift_bytes", {{"gpu", "0"}, {"kind", "unused"}}), Mib(3));
  EXPECT_EQ(device("processes_known", {{"gpu", "0"}}), 1);
  EXPECT_EQ(device("processes_known", {{"gpu", "1"}}), 0);
  EXPECT_EQ(device("uncounted_bytes", {{"gpu", "0"}}), Mib(326));
  EXPECT_EQ(page.Sum("vrambroker_device_uncounted_process_bytes"), Mib(326));
  EXPECT_EQ(page.Count("vrambroker_device_uncounted_process_bytes"), 21u);
  EXPECT_EQ(device("uncounted_process_bytes", {{"process", "program-25"}}), Mib(26)) << "two of that name";
  EXPECT_EQ(device("uncounted_process_bytes", {{"process", "_other"}}), Mib(15)) << "the five smallest";
}

// Returns each counter of devices and of the daemon, by name and labels.
std::map<std::string, double> Counters(const std::string& text) {
  std::map<std::string, double> counters;
  for (const absl::string_view line : absl::StrSplit(text, '\n')) {
    const bool is_one = absl::StartsWith(line, "vrambroker_device_") || absl::StartsWith(line, "vrambroker_sessions_");
    const size_t brace = line.find_first_of("{ ");
    if (!is_one) continue;
    const absl::string_view name = line.substr(0, brace);
    if (!absl::EndsWith(name, "_total") && !absl::EndsWith(name, "_bucket") && !absl::EndsWith(name, "_count")) {
      continue;
    }
    counters[std::string(line.substr(0, line.rfind(' ')))] = std::stod(std::string(line.substr(line.rfind(' '))));
  }
  return counters;
}

TEST_F(BrokerMetricsTest, SeriesOfASessionEndWithItAndCountersOfDevicesDoNotFall) {
  const SessionPtr session = Open("short");
  ASSERT_TRUE(Allocate(session, 3_MiB, 1).ok());
  EXPECT_FALSE(Allocate(session, 65_MiB, 1).ok());
  const std::string text = Text();
  EXPECT_THAT(text, HasSubstr("short"));
  const std::map<std::string, double> before = Counters(text);
  EXPECT_EQ(before.at("vrambroker_device_alloc_retries_total{gpu=\"1\"}"), 1);
  ASSERT_TRUE(session->ResetStats(1, /*accumulated=*/true).ok());
  EXPECT_EQ(Counters(Text()).at("vrambroker_device_alloc_retries_total{gpu=\"1\"}"), 1) << "the client reset its own";
  broker_->Close(session, "goodbye");
  EXPECT_THAT(Text(), Not(HasSubstr("short")));
  const std::map<std::string, double> after = Counters(Text());
  EXPECT_EQ(after.size(), before.size());
  for (const auto& [series, value] : before) EXPECT_GE(after.at(series), value) << series;
  EXPECT_EQ(after.at("vrambroker_sessions_closed_total{reason=\"goodbye\"}"), 1);
  EXPECT_EQ(after.at("vrambroker_sessions_opened_total"), 1);
  // The daemon hands the memory of the ended session over to the tenant's next session.
  ASSERT_TRUE(Allocate(Open("next"), 3_MiB, 1).ok());
  EXPECT_EQ(Page().Value("vrambroker_device_handovers_total", {{"gpu", "1"}}), 1);
  EXPECT_EQ(Page().Value("vrambroker_device_handover_bytes_total", {{"gpu", "1"}}), Mib(20));
}

TEST_F(BrokerMetricsTest, ReclaimAndWaits) {
  const SessionPtr holder = Open("holder");
  const absl::StatusOr<Allocation> block = Allocate(holder, 50_MiB);
  ASSERT_TRUE(block.ok());
  ASSERT_TRUE(broker_->allocations().Free(holder, {block->block}).ok());
  const SessionPtr needy = Open("needy", 2000);
  ASSERT_TRUE(Allocate(needy, 30_MiB).ok());  // the other session gives its idle segment back
  // The last step of the task that frees the memory counts the reclaim.
  const auto counted = std::make_shared<Gate>();
  counted->Open();
  holder->slow_calls().Submit([counted] { counted->Pass(); });
  counted->AwaitArrivals(1);
  const MetricsPage page = Page();
  const auto device = [&](const std::string& name) { return page.Value("vrambroker_device_" + name, {{"gpu", "0"}}); };
  EXPECT_EQ(device("reclaims_total"), 1);
  EXPECT_EQ(device("reclaim_asked_bytes_total"), Mib(16));
  EXPECT_EQ(device("reclaimed_bytes_total"), Mib(50));
  EXPECT_EQ(device("reclaim_duration_seconds_count"), 1);
  const auto waits = [&](const char* outcome) {
    return page.Value("vrambroker_device_wait_duration_seconds_count", {{"gpu", "0"}, {"outcome", outcome}});
  };
  EXPECT_EQ(waits("granted"), 1);
  EXPECT_EQ(waits("refused"), 0);
  EXPECT_EQ(device("waiting_requests"), 0);
  EXPECT_EQ(device("oldest_waiting_timestamp_seconds"), 0);
}

TEST_F(BrokerMetricsTest, NobodyIsCalledAsTheFoldedOnes) {
  EXPECT_EQ(Open("_other")->name(), "_other-2");
}

// ---- Names ----

std::string FileText(const std::filesystem::path& path) {
  std::stringstream text;
  text << std::ifstream(path).rdbuf();
  return text.str();
}

TEST_F(BrokerMetricsTest, TheDocumentNamesWhatIsExportedAndNothingElse) {
  const SessionPtr session = Open("one");
  std::set<std::string> exported;
  for (const absl::string_view line : absl::StrSplit(Text(), '\n')) {
    if (!absl::StartsWith(line, "# TYPE ")) continue;
    const std::vector<std::string> words = absl::StrSplit(line, ' ');
    EXPECT_TRUE(exported.insert(words[2]).second) << words[2] << " twice";
  }
  std::set<std::string> documented;
  for (const absl::string_view line :
       absl::StrSplit(FileText(absl::StrCat(testing_support::paths::kSourceDir, "/deploy/METRICS.md")), '\n')) {
    if (!absl::StartsWith(line, "| `vrambroker_") && !absl::StartsWith(line, "| `process_")) continue;
    const std::vector<std::string> parts = absl::StrSplit(line, '`');
    EXPECT_TRUE(documented.insert(parts[1]).second) << parts[1] << " twice";
  }
  EXPECT_EQ(exported, documented);
}

TEST(LogDocumentTest, NamesEachEvent) {
  const std::string root = testing_support::paths::kSourceDir;
  const std::string document = FileText(root + "/deploy/METRICS.md");
  const std::regex event(
      R"re((?:LogLine|SessionLine|ClaimLine)(?: \w+)?\((?:[^;"]*\?)?\s*"([^"]+)"(?:\s*:\s*"([^"]+)")?)re");
  std::set<std::string> events;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(root + "/server")) {
    if (entry.path().extension() != ".cc") continue;
    const std::string code = FileText(entry.path());
    for (std::sregex_iterator it(code.begin(), code.end(), event), end; it != end; ++it) {
      events.insert((*it)[1]);
      if ((*it)[2].matched) events.insert((*it)[2]);
    }
  }
  EXPECT_GT(events.size(), 40u);
  for (const std::string& name : events) EXPECT_TRUE(absl::StrContains(document, "`" + name)) << name;
}

// ---- Many sessions ----

// Returns a view of `sessions` sessions that use each of `devices` devices; earlier sessions use more.
BrokerView Crowd(size_t sessions, size_t devices) {
  BrokerView view;
  view.devices.resize(devices);
  for (size_t i = 0; i < sessions; ++i) {
    SessionView& session = view.sessions.emplace_back();
    session.id = SessionId{i + 1};
    session.name = absl::StrCat("training-of-a-large-model-", i);
    session.terms.tenant = absl::StrCat("tenant-", i % 300);
    session.caller.uid = 1000 + static_cast<uid_t>(i % 4);
    session.devices.resize(devices);
    for (size_t device = 0; device < devices; ++device) {
      SessionDeviceView& held = session.devices[device];
      held.account.reserved_bytes = 20_MiB + 2_MiB * (sessions - i);
      view.devices[device].leased_bytes += held.account.reserved_bytes;
      held.stats.allocated_bytes.all.Up(3_MiB);
      held.stats.allocation.all.Up(5);
      held.stats.free.Add(17_MiB);
      held.fragmentation = {.bytes_per_second = 0.5, .seconds_to_refusal = 60.0 * static_cast<double>(sessions - i)};
    }
  }
  return view;
}

TEST(FoldingTest, ThoseBeyondTheBoundAreSummedUp) {
  const BrokerView view = Crowd(10, 2);
  const Metrics metrics({.view = [&] { return view; }, .max_clients = 7});
  const MetricsPage page(metrics.Text());
  // Seven pairs of session and device, hence three and a half sessions, have their own series.
  EXPECT_EQ(page.Count("vrambroker_client_reserved_bytes"), 7u + 2u);
  EXPECT_EQ(page.Count("vrambroker_client_reserved_bytes", {{"client", "training-of-a-large-model-3"}}), 1u);
  EXPECT_EQ(page.Value("vrambroker_clients_folded"), 7);
  const Labels other = {{"client", "_other"}, {"gpu", "1"}, {"tenant", "_other"}};
  EXPECT_EQ(page.Value("vrambroker_client_allocated_bytes", other), Mib(7 * 3));
  EXPECT_EQ(page.Value("vrambroker_client_blocks", other), 7 * 5);
  EXPECT_EQ(page.Value("vrambroker_client_largest_free_block_bytes", other), Mib(17));
  EXPECT_EQ(page.Value("vrambroker_client_fragmentation_growth_bytes_per_second", other), 7 * 0.5);
  EXPECT_EQ(page.Value("vrambroker_client_refusal_expected_seconds", other), 60) << "the first of them";
  EXPECT_EQ(page.Sum("vrambroker_client_reserved_bytes", {{"gpu", "0"}}),
            page.Value("vrambroker_device_leased_bytes", {{"gpu", "0"}}));
  EXPECT_EQ(page.Count("vrambroker_client_allocs_total"), 7u) << "a sum of counters would fall";
  EXPECT_EQ(page.Count("vrambroker_client_ooms_total", other), 0u);
  EXPECT_EQ(page.Count("vrambroker_client_info"), 4u) << "of those that have series";
  EXPECT_EQ(page.Count("vrambroker_tenant_sessions"), 2 * (3u + 1u)) << "three tenants, and the others";
  EXPECT_EQ(page.Sum("vrambroker_tenant_sessions", {{"gpu", "0"}}), 10);
}

TEST(FoldingTest, ClaimsBeyondTheBoundAreSummedUpButForWhatMayNotFall) {
  BrokerView view;
  view.devices.resize(1);
  for (const char* name : {"a", "b", "c"}) {
    ClaimView& of = view.claims.emplace_back();
    of.claim.name = name;
    of.claim.sessions = 2;
    of.devices = {{.reserved_bytes = 5_MiB}};
    of.devices[0].ooms[static_cast<size_t>(OomCause::kLimit)] = 7;
    of.devices[0].peak_bytes = 6_MiB;
    of.devices[0].waits = {.waits = 3, .waited = std::chrono::milliseconds(1500)};
  }
  const Metrics metrics({.view = [&] { return view; }, .max_claims = 1});
  const MetricsPage page(metrics.Text());
  EXPECT_EQ(page.Value("vrambroker_claims"), 3);
  EXPECT_EQ(page.Value("vrambroker_claim_reserved_bytes", {{"claim", "_other"}}), Mib(10));
  EXPECT_EQ(page.Value("vrambroker_claim_sessions", {{"claim", "_other"}}), 4);
  EXPECT_EQ(page.Value("vrambroker_claim_ooms_total", {{"claim", "a"}, {"reason", "limit"}}), 7);
  EXPECT_EQ(page.Value("vrambroker_claim_peak_bytes", {{"claim", "a"}}), Mib(6));
  EXPECT_EQ(page.Value("vrambroker_claim_waits_total", {{"claim", "a"}}), 3);
  EXPECT_EQ(page.Value("vrambroker_claim_waited_seconds_total", {{"claim", "a"}}), 1.5);
  for (const char* counter : {"ooms_total", "waits_total", "waited_seconds_total"}) {
    EXPECT_EQ(page.Count(absl::StrCat("vrambroker_claim_", counter), {{"claim", "_other"}}), 0u) << counter;
  }
}

TEST(TenantRefusalsTest, CountsStayWhenSessionsAreGone) {
  TenantRefusals refusals(2, /*max_tenants=*/3);
  for (const char* tenant : {"a", "b", "c"}) refusals.Add(tenant);
  refusals.CountRefusal("b", 1, OomCause::kLimit);
  refusals.CountRefusal("b", 1, OomCause::kLimit);
  refusals.CountEndedSession("b", 1);
  refusals.CountRefusal("c", 0, OomCause::kCapacity);
  BrokerView view;
  view.devices.resize(2);
  const Metrics metrics({.view = [&] {
    view.refusals = refusals.Get();
    return view;
  }});
  const auto refused = [&](const std::string& tenant, const std::string& gpu) {
    return MetricsPage(metrics.Text()).Sum("vrambroker_tenant_ooms_total", {{"tenant", tenant}, {"gpu", gpu}});
  };
  const MetricsPage page(metrics.Text());
  EXPECT_EQ(page.Value("vrambroker_tenant_ooms_total", {{"tenant", "a"}, {"gpu", "0"}, {"reason", "limit"}}), 0)
      << "before the first, so that Prometheus sees it come";
  EXPECT_EQ(page.Value("vrambroker_tenant_ooms_total", {{"tenant", "b"}, {"gpu", "1"}, {"reason", "limit"}}), 2);
  EXPECT_EQ(page.Value("vrambroker_tenant_sessions_ended_after_oom_total", {{"tenant", "b"}, {"gpu", "1"}}), 1);
  EXPECT_EQ(page.Count("vrambroker_tenant_ooms_total", {{"tenant", "_other"}}), 0u);

  // Tenants beyond the bound share one count for good: a tenant that leaves takes no count away.
  for (const char* tenant : {"d", "e"}) refusals.Add(tenant);
  refusals.CountRefusal("d", 0, OomCause::kLimit);
  refusals.CountRefusal("e", 0, OomCause::kLimit);
  EXPECT_EQ(refused("_other", "0"), 2);
  refusals.Forget("e");
  EXPECT_EQ(refused("_other", "0"), 2);
  refusals.Forget("b");
  EXPECT_EQ(refused("_other", "0"), 2);
  EXPECT_EQ(refused("b", "1"), 0);
  refusals.CountRefusal("d", 0, OomCause::kLimit);
  EXPECT_EQ(refused("d", "0"), 1) << "what comes once there is room";
  EXPECT_EQ(refused("_other", "0"), 2);
  refusals.Forget("_other");
  EXPECT_EQ(refused("_other", "0"), 2) << "a tenant of that name is counted there";
}

// The refused session waits for its recording, and ends meanwhile.
TEST(TenantRefusalsTest, ARefusalThatComesLateDoesNotBringItsTenantBack) {
  TenantRefusals refusals(1);
  refusals.Add("a");
  refusals.CountRefusal("a", 0, OomCause::kLimit);
  refusals.Forget("a");
  refusals.CountRefusal("a", 0, OomCause::kLimit);
  refusals.CountEndedSession("a", 0);
  EXPECT_EQ(refusals.Get().size(), 0u);
}

TEST(TenantRefusalsTest, TheirNumberIsBounded) {
  TenantRefusals refusals(1);
  for (size_t i = 0; i < TenantRefusals::kMaxTenants + 10; ++i) {
    refusals.Add(absl::StrCat("tenant-", i));
    refusals.CountRefusal(absl::StrCat("tenant-", i), 0, OomCause::kLimit);
  }
  const TenantRefusals::ByTenant all = refusals.Get();
  ASSERT_EQ(all.size(), TenantRefusals::kMaxTenants + 1);
  EXPECT_EQ(all.back().first, "_other");
  EXPECT_EQ(all.back().second[0].ooms[static_cast<size_t>(OomCause::kLimit)], 10u);
}

TEST(FragmentationMetricsTest, ARefusalIsExpectedOnlyWhereThereIsATrend) {
  BrokerView view = Crowd(4, 2);
  view.sessions[1].devices[0].fragmentation = {};
  view.sessions[2].devices[0].fragmentation.seconds_to_refusal = 0;
  view.sessions[3].devices[1].fragmentation = {};
  const Metrics metrics({.view = [&] { return view; }, .max_clients = 6});
  const MetricsPage page(metrics.Text());
  const auto value = [&](const char* name, int session, const char* gpu) {
    const std::string client = session < 0 ? "_other" : absl::StrCat("training-of-a-large-model-", session);
    return page.Value(absl::StrCat("vrambroker_client_", name), {{"client", client}, {"gpu", gpu}});
  };
  EXPECT_EQ(value("fragmentation_growth_bytes_per_second", 0, "1"), 0.5);
  EXPECT_EQ(value("refusal_expected_seconds", 0, "1"), 4 * 60);
  EXPECT_EQ(value("fragmentation_growth_bytes_per_second", 1, "0"), 0);
  EXPECT_EQ(value("refusal_expected_seconds", 1, "0"), std::nullopt);
  EXPECT_EQ(value("refusal_expected_seconds", 2, "0"), 0) << "by now";
  EXPECT_EQ(value("fragmentation_growth_bytes_per_second", -1, "1"), 0);
  EXPECT_EQ(value("refusal_expected_seconds", -1, "1"), std::nullopt) << "nobody that is folded has a trend";
}

TEST(FoldingTest, PairsInUseComeFirst) {
  BrokerView view = Crowd(4, 2);
  for (size_t i = 0; i < 3; ++i) view.sessions[i].devices[1] = {};
  view.sessions[2].devices[0] = {};
  const Metrics metrics({.view = [&] { return view; }, .max_clients = 5});
  const MetricsPage page(metrics.Text());
  const auto count = [&](int session, const char* gpu) {
    return page.Count("vrambroker_client_limit_bytes",
                      {{"client", absl::StrCat("training-of-a-large-model-", session)}, {"gpu", gpu}});
  };
  EXPECT_EQ(count(0, "0"), 1u);
  EXPECT_EQ(count(1, "0"), 1u);
  EXPECT_EQ(count(3, "0"), 1u);
  EXPECT_EQ(count(3, "1"), 1u);
  EXPECT_EQ(count(0, "1"), 1u) << "there is room for one that is not in use";
  EXPECT_EQ(count(1, "1"), 0u);
  EXPECT_EQ(page.Value("vrambroker_clients_folded"), 0);
  EXPECT_EQ(page.Count("vrambroker_client_limit_bytes", {{"client", "_other"}}), 0u) << "nothing is missing";
}

// A dashboard finds a session by its info, and then the session's series: info without series is of no use.
TEST(FoldingTest, WhoHasSeriesHasAnInfoAndNobodyElse) {
  BrokerView view = Crowd(12, 2);
  for (SessionView& session : view.sessions) {
    session.caller.uid = session.id <= SessionId{8} ? 7 : 8;
    if (Raw(session.id) % 2 == 1) session.devices.assign(2, {});  // sessions in use go first
  }
  for (const auto& [max_clients, max_clients_per_uid] :
       {std::pair<size_t, size_t>(100, 100), {7, 100}, {100, 3}, {9, 5}, {1, 1}}) {
    const Metrics metrics(
        {.view = [&] { return view; }, .max_clients = max_clients, .max_clients_per_uid = max_clients_per_uid});
    const MetricsPage page(metrics.Text());
    for (const SessionView& session : view.sessions) {
      const Labels client = {{"client", session.name}};
      EXPECT_EQ(page.Count("vrambroker_client_info", client),
                page.Count("vrambroker_client_limit_bytes", client) > 0 ? 1u : 0u)
          << session.name << " of " << max_clients << ", " << max_clients_per_uid;
    }
  }
}

TEST(FoldingTest, AUserHasAShareOfTheSeries) {
  BrokerView view = Crowd(12, 2);
  for (SessionView& session : view.sessions) session.caller.uid = session.id <= SessionId{10} ? 7 : 8;
  const Metrics metrics({.view = [&] { return view; }, .max_clients = 100, .max_clients_per_uid = 5});
  const MetricsPage page(metrics.Text());
  EXPECT_EQ(page.Count("vrambroker_client_reserved_bytes"), 5u + 4u + 2u) << "one's share, all of the other, _other";
  EXPECT_EQ(page.Count("vrambroker_client_reserved_bytes", {{"client", "training-of-a-large-model-11"}}), 2u);
  EXPECT_EQ(page.Count("vrambroker_client_info"), 3u + 2u);
  EXPECT_EQ(page.Value("vrambroker_clients_folded"), 8) << "two and a half have series of their own";
  for (const char* gpu : {"0", "1"}) {
    EXPECT_EQ(page.Sum("vrambroker_client_reserved_bytes", {{"gpu", gpu}}),
              page.Value("vrambroker_device_leased_bytes", {{"gpu", gpu}}));
  }
}

TEST(FoldingTest, OneUserCannotTakeTheSeriesOfAll) {
  BrokerView view = Crowd(1024, 1);
  for (SessionView& session : view.sessions) session.caller.uid = 7;
  const Metrics metrics({.view = [&] { return view; }});
  size_t series = 0;
  for (const absl::string_view line : absl::StrSplit(metrics.Text(), '\n', absl::SkipEmpty())) {
    if (absl::StartsWith(line, "vrambroker_client_")) ++series;
  }
  EXPECT_LE(series, 9600u) << "what deploy/METRICS.md promises";
}

TEST(FoldingTest, TheNumberOfSeriesIsBounded) {
  const BrokerView view = Crowd(1000, 8);
  RpcMeter rpcs;
  const Metrics metrics({.view = [&] { return view; }, .rpcs = &rpcs});
  size_t series = 0;
  for (const absl::string_view line : absl::StrSplit(metrics.Text(), '\n', absl::SkipEmpty())) {
    if (line[0] != '#') ++series;
  }
  RecordProperty("series", static_cast<int>(series));
  EXPECT_LE(series, 44'000u) << "what deploy/METRICS.md promises";
  EXPECT_GE(series, 37'000u) << "each of 1000 pairs has 37";
}

// ---- Failures ----

TEST(MetricsTest, AFailedScrapeSaysSo) {
  bool fails = true;
  const Metrics metrics({.view = [&]() -> BrokerView {
    if (fails) throw std::bad_alloc();
    return {};
  }});
  EXPECT_EQ(metrics.Text(),
            "# HELP vrambroker_collect_errors_total Scrapes that failed in the daemon.\n"
            "# TYPE vrambroker_collect_errors_total counter\nvrambroker_collect_errors_total 1\n");
  fails = false;
  const MetricsPage page(metrics.Text());
  EXPECT_EQ(page.Value("vrambroker_collect_errors_total"), 1);
  EXPECT_EQ(page.Value("vrambroker_ready"), 1);
  EXPECT_GE(page.Value("vrambroker_collect_duration_seconds").value_or(-1), 0);
}

TEST(MetricsTest, TheProcessIsThisOne) {
  const Metrics metrics({.view = [] { return BrokerView{.is_serving = false}; }});
  const MetricsPage page(metrics.Text());
  const double now = static_cast<double>(std::time(nullptr));
  EXPECT_EQ(page.Value("vrambroker_ready"), 0);
  EXPECT_NEAR(page.Value("process_start_time_seconds").value_or(0), now, 3600);
  EXPECT_LE(page.Value("process_start_time_seconds").value_or(1e18), now + 2);
  EXPECT_GT(page.Value("process_open_fds").value_or(0), 2);
  EXPECT_GT(page.Value("process_max_fds").value_or(0), page.Value("process_open_fds").value_or(1e9));
  EXPECT_GT(page.Value("process_resident_memory_bytes").value_or(0), 1e5);
  EXPECT_GT(page.Value("process_virtual_memory_bytes").value_or(0),
            page.Value("process_resident_memory_bytes").value_or(1e18));
  EXPECT_GT(page.Value("process_cpu_seconds_total").value_or(0), 0);
}

}  // namespace
}  // namespace vrambroker
