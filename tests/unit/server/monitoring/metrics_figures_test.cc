// SPDX-License-Identifier: Apache-2.0
//
// Figures of the exposition. Each figure in the view is a different prime: the test notices a series that takes its
// neighbour's figure, forgets a part of a sum, or has another type.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "server/monitoring/metrics.h"
#include "tests/support/http.h"

namespace vrambroker {
namespace {

using std::chrono::hours;
using std::chrono::milliseconds;
using std::chrono::seconds;
using testing_support::Labels;
using testing_support::MetricsPage;

prometheus::ClientMetric::Histogram Times(uint64_t count, double sum) {
  prometheus::ClientMetric::Histogram times;
  times.sample_count = count;
  times.sample_sum = sum;
  return times;
}

Stat Figures(uint64_t current, uint64_t peak, uint64_t allocated, uint64_t freed) {
  return {.current = current, .peak = peak, .allocated = allocated, .freed = freed};
}

// Returns the figures of Ann's heap.
MemoryStats HeapOfAnn() {
  MemoryStats stats;
  stats.allocation.all = Figures(1009, 1013, 1019, 1021);
  stats.allocated_bytes.all = Figures(1031, 1033, 1039, 1049);
  stats.reserved_bytes.all = Figures(1051, 1061, 1063, 1069);
  stats.active_bytes.all = Figures(1087, 1091, 1093, 1097);
  stats.inactive_split_bytes.all = Figures(1103, 1109, 1117, 1123);
  stats.requested_bytes.all = Figures(1129, 1151, 1153, 1163);
  stats.num_alloc_retries = 1171;
  stats.num_ooms = 1181;
  stats.free.blocks = {1187, 1193, 1201, 1213, 1217, 1223, 1229, 1231};
  stats.free.bytes = {1237, 1249, 1259, 1277, 1279, 1283, 1289, 1291};
  stats.free.largest_bytes = 1297;
  return stats;
}

SessionDeviceView HeldByAnn() {
  SessionDeviceView held{.account = {.limit_bytes = 1301,
                                     .guarantee_bytes = 1303,
                                     .reserved_bytes = 100003,
                                     .carried_over_bytes = 1307,
                                     .returning_bytes = 1319,
                                     .came_back_bytes = 1321,
                                     .segments = 1327,
                                     .counted_bytes = 1361},
                         .stats = HeapOfAnn(),
                         .idle_bytes = 1367,
                         .unknown_bytes = 1373,
                         .used_bytes = 1381,
                         .overhead_bytes = 1399,
                         .waiting = std::vector<SessionDeviceView::Waiting>(3),
                         .ooms = {1409, 1423, 1427, 1429},
                         .fragmentation = {.bytes_per_second = 1433, .seconds_to_refusal = 1439}};
  return held;
}

SessionView& AddSession(BrokerView& view, const std::string& name, const std::string& tenant, uint64_t limit_bytes) {
  SessionView& session = view.sessions.emplace_back();
  session.id = SessionId{view.sessions.size()};
  session.name = name;
  session.terms.tenant = tenant;
  session.devices.resize(view.devices.size());
  session.devices[0].account.limit_bytes = limit_bytes;
  return session;
}

// Adds sessions. Two pairs of session and device have room for their own series, both of the first session: the other
// pairs are folded. Some folded pairs have a single figure that shows their use. The last sessions have no figures.
void AddSessions(BrokerView& view) {
  SessionView& ann = AddSession(view, "ann", "a", 0);
  ann.caller.uid = 7;
  ann.terms.rule = "r";
  ann.placement = Placement::kLeased;
  ann.devices[0] = HeldByAnn();
  ann.devices[1].account.reserved_bytes = 1447;
  ann.devices[1].ooms[1] = 1451;

  SessionView& ben = AddSession(view, "ben", "b", 1453);
  ben.state = SessionState::kDisconnected;
  SessionDeviceView& of_ben = ben.devices[0];
  of_ben.account.reserved_bytes = 100019;
  of_ben.account.guarantee_bytes = 1459;
  of_ben.account.carried_over_bytes = 1471;
  of_ben.account.segments = 1481;
  of_ben.stats.allocation.all.current = 1483;
  of_ben.stats.allocated_bytes.all.current = 1487;
  of_ben.stats.allocated_bytes.all.peak = 1489;
  of_ben.stats.reserved_bytes.all.peak = 1493;
  of_ben.stats.active_bytes.all.current = 1499;
  of_ben.stats.inactive_split_bytes.all.current = 1511;
  of_ben.stats.requested_bytes.all.current = 1523;
  of_ben.stats.free.blocks[1] = 1531;
  of_ben.stats.free.bytes[1] = 1543;
  of_ben.stats.free.largest_bytes = 1549;
  of_ben.idle_bytes = 1553;
  of_ben.unknown_bytes = 1559;
  of_ben.used_bytes = 1567;
  of_ben.overhead_bytes = 1571;
  of_ben.fragmentation = {.bytes_per_second = 1579, .seconds_to_refusal = 1583};
  ben.devices[1].account.reserved_bytes = 1597;

  SessionView& cid = AddSession(view, "cid", "c", 1601);
  cid.state = SessionState::kEnded;
  cid.devices[0].account.reserved_bytes = 1607;
  cid.devices[0].stats.allocated_bytes.all.current = 1609;
  cid.devices[0].idle_bytes = 1613;
  cid.devices[0].fragmentation = {.bytes_per_second = 1619, .seconds_to_refusal = 1621};
  AddSession(view, "guaranteed", "c", 1627).devices[0].account.guarantee_bytes = 1637;
  AddSession(view, "waiting", "c", 1657).devices[0].waiting.resize(2);
  AddSession(view, "refused", "c", 1663).devices[0].ooms[3] = 1667;
  AddSession(view, "held once", "c", 1669).devices[0].stats.reserved_bytes.all.peak = 1693;
  AddSession(view, "in a claim", "c", 1709).devices[0].account.guarantee_bytes = 1699;
  view.sessions.back().devices[0].account.share = ClaimId{1};
  view.sessions.back().devices[0].account.share_limit_bytes = 1697;  // the lower limit of the two
  AddSession(view, "new", "c", 1721);
  AddSession(view, "ending", "c", 1723).state = SessionState::kClosed;
}

void AddClaims(BrokerView& view) {
  const auto add = [&](const char* name, size_t sessions, std::vector<ClaimDeviceView> devices) {
    ClaimView& of = view.claims.emplace_back();
    of.claim.name = name;
    of.claim.sessions = sessions;
    of.devices = std::move(devices);
  };
  add("x", 1733,
      {{.limit_bytes = 1741,
        .guarantee_bytes = 1747,
        .reserved_bytes = 1753,
        .left_behind_bytes = 1759,
        .allocated_bytes = 1777,
        .idle_bytes = 1783,
        .peak_bytes = 1787,
        .waiting = 1789,
        .waits = {.waits = 1801, .waited = seconds(1811)},
        .ooms = {1823, 1831, 1847, 1861}},
       {.reserved_bytes = 1867}});
  view.claims[0].claim.terms.owner.uid = 8;
  view.claims[0].claim.terms.labels = {{"team", "t"}};
  view.claims[0].claim.state = ClaimState::kDraining;
  for (const char* name : {"y", "z"}) {
    const uint64_t times = name[0] == 'y' ? 1 : 100'000;
    add(name, 1871 * times,
        {{.limit_bytes = 1873 * times,
          .guarantee_bytes = 1877 * times,
          .reserved_bytes = 1879 * times,
          .left_behind_bytes = 1889 * times,
          .allocated_bytes = 1901 * times,
          .idle_bytes = 1907 * times,
          .peak_bytes = 1913 * times,
          .waiting = 1931 * times,
          .waits = {.waits = 1933, .waited = seconds(1949)},
          .ooms = {1951, 1973, 1979, 1987}},
         {.reserved_bytes = 1993 * times}});
  }
}

void FillDevices(BrokerView& view) {
  DeviceView& first = view.devices[0];
  first.properties = {.kind = "cuda", .uuid = "GPU-1", .name = "first", .total_bytes = 1997};
  first.pool = {.capacity_bytes = 1999,
                .charged_bytes = 2003,
                .committed_bytes = 2011,
                .guaranteed_bytes = 2017,
                .quarantined_bytes = 2027,
                .carried_over_bytes = 2029,
                .outside_bytes = 2039,
                .free_bytes = 2053,
                .held_back_bytes = 2063,
                .idle_bytes = 2069,
                .reserved_bytes = 100043,
                .unfreed_bytes = 2081,
                .segments = 2083,
                .segment_allocs = 2087,
                .segment_frees = 2089,
                .handovers = 2099,
                .handover_bytes = 2111};
  first.quarantine = {{.age = seconds(5), .holding = {.bytes = 2113}},
                      {.age = seconds(11), .holding = {.bytes = 2129, .holders = {1}}},
                      {.age = seconds(7), .holding = {.bytes = 2131, .holders = {2, 3}}},
                      {.age = seconds(3), .holding = {.bytes = 2137}}};
  first.carried_over = {{.session = SessionId{1}, .bytes = 3001, .segments = 1},  // in this session's figures
                        {.session = kNoSession, .bytes = 3011, .segments = 2},
                        {.session = kNoSession, .bytes = 3019}};
  first.idle_sizes.blocks = {2141, 2143, 2153, 2161, 2179, 2203, 2207, 2213};
  first.idle_sizes.bytes = {2221, 2237, 2239, 2243, 2251, 2267, 2269, 2273};
  first.idle_sizes.largest_bytes = 100049;
  first.reclaims = {.reclaims = 2281, .asked_bytes = 2287, .reclaimed_bytes = 2293, .durations = Times(2297, 2309)};
  for (uint64_t call = 0; call < kDeviceCalls.size(); ++call) {
    first.calls.calls.push_back(
        {.durations = Times(2311 + call, 2333 + static_cast<double>(call)), .errors = 2339 + call});
  }
  first.calls.scrubs = 2341;
  first.calls.scrubbed_bytes = 2347;
  first.driver_free_bytes = 2351;
  first.waits = {.waiting = 2357, .durations = {Times(2371, 2377), Times(2381, 2383), Times(2389, 2393)}};
  first.longest_waiting = hours(1000);
  first.ooms = {2399, 2411, 2417, 2423};
  first.alloc_retries = 2437;
  auto processes = std::make_shared<DeviceProcesses>();
  processes->status = absl::OkStatus();
  processes->processes = {
      {.name = "train", .kind = ProcessView::Kind::kClient, .used_bytes = 2441, .charged_bytes = 2447},
      {.name = "desktop", .used_bytes = 2459, .charged_bytes = 2467, .overhead_bytes = 2473, .drift_bytes = 2477}};
  processes->overhead_bytes = 2503;
  processes->drift_bytes = 2521;
  processes->unused_bytes = 2531;
  processes->uncounted_bytes = 2539;
  first.processes = std::move(processes);
  first.stats.allocation.all = Figures(2543, 2549, 2551, 2557);
  first.stats.allocated_bytes.all = Figures(2579, 2591, 2593, 2609);
  first.stats.active_bytes.all = Figures(2617, 2621, 2633, 2647);
  first.stats.requested_bytes.all = Figures(2657, 2659, 2663, 2671);
  first.stats.inactive_split_bytes.all = Figures(2677, 2683, 2687, 2689);
  first.leased_bytes = 100057;
  first.reclaimable_bytes = 2693;
  first.unknown_bytes = 2699;
  first.quarantined_bytes = 2707;
  first.left_behind_bytes = 2711;

  // Figures that sessions count themselves are ahead of the daemon's figures.
  DeviceView& second = view.devices[1];
  second.properties = {.kind = "host", .uuid = "FAKE-2", .name = "second"};
  second.pool.idle_bytes = 2713;
  second.pool.reserved_bytes = 2719;
  second.health = absl::InternalError("gone");
  second.longest_waiting = hours(1);  // no request waits
  second.leased_bytes = 2729;
  second.stats.active_bytes.all.current = 100069;
  second.stats.allocated_bytes.all.current = 2731;
}

BrokerView Primes() {
  BrokerView view;
  view.devices.resize(2);
  FillDevices(view);
  AddSessions(view);
  AddClaims(view);
  for (const char* tenant : {"a", "b", "c"}) {
    const uint64_t times = tenant[0] == 'a' ? 1 : tenant[0] == 'b' ? 100'000 : 10'000'000'000;
    view.refusals.push_back(
        {tenant,
         {{.ooms = {2741 * times, 2749 * times, 2753 * times, 2767 * times}, .ended_sessions = 2777 * times},
          {.ooms = {2789 * times}, .ended_sessions = 2791 * times}}});
  }
  view.counts = {.opened = 2797, .refused = 2801, .closed = {2803, 2819, 2833, 2837}};
  return view;
}

// Returns each series that is not 0, with its type. Leaves out figures of the process and the build, ratios and
// buckets.
std::string NotZero(const std::string& page) {
  std::vector<std::string> lines;
  absl::string_view type;
  for (const absl::string_view line : absl::StrSplit(page, '\n')) {
    if (absl::StartsWith(line, "# TYPE")) type = line.substr(line.rfind(' ') + 1);
    const bool is_left_out = !absl::StartsWith(line, "vrambroker_") ||
                             absl::StartsWith(line, "vrambroker_build_info") ||
                             absl::StartsWith(line, "vrambroker_collect_duration") || absl::EndsWith(line, " 0") ||
                             absl::StrContains(line, "_bucket{") || absl::StrContains(line, "_ratio{") ||
                             absl::StrContains(line, "oldest_waiting_timestamp");
    if (!is_left_out) lines.push_back(absl::StrCat(type, " ", line.substr(sizeof("vrambroker_") - 1)));
  }
  return absl::StrJoin(lines, "\n");
}

class MetricFiguresTest : public ::testing::Test {
 protected:
  std::string Text() const {
    return Metrics({.view = [this] { return view_; },
                    .reload = &reload_,
                    .http = &http_,
                    .max_clients = 2,
                    .max_claims = 1})
        .Text();
  }

  BrokerView view_ = Primes();
  ReloadState reload_;
  HttpStats http_;
};

TEST_F(MetricFiguresTest, EachSeriesHasItsOwn) {
  reload_.last_success = 2843;
  http_.listen_failures = 2851;
  http_.connections = 2857;
  http_.dropped[0] = 2861;
  http_.dropped[1] = 2879;
  http_.dropped[2] = 2887;
  EXPECT_EQ(NotZero(Text()), R"(gauge ready 1
gauge config_last_reload_successful 1
gauge config_last_reload_success_timestamp_seconds 2843
gauge sessions{state="active"} 7
gauge sessions{state="disconnected"} 1
gauge sessions{state="ended"} 2
counter sessions_opened_total 2797
counter sessions_refused_total 2801
counter sessions_closed_total{reason="goodbye"} 2803
counter sessions_closed_total{reason="process_ended"} 2819
counter sessions_closed_total{reason="not_opened"} 2833
counter sessions_closed_total{reason="daemon_stops"} 2837
gauge device_info{gpu="0",uuid="GPU-1",name="first",kind="cuda"} 1
gauge device_info{gpu="1",uuid="FAKE-2",name="second",kind="host"} 1
gauge device_memory_total_bytes{gpu="0"} 1997
gauge device_memory_free_bytes{gpu="0"} 2351
gauge device_capacity_bytes{gpu="0"} 1999
gauge device_reserved_bytes{gpu="0"} 100043
gauge device_reserved_bytes{gpu="1"} 100069
gauge device_leased_bytes{gpu="0"} 100057
gauge device_leased_bytes{gpu="1"} 2729
gauge device_allocated_bytes{gpu="0"} 2579
gauge device_allocated_bytes{gpu="1"} 2731
gauge device_active_bytes{gpu="0"} 2617
gauge device_active_bytes{gpu="1"} 100069
gauge device_requested_bytes{gpu="0"} 2657
gauge device_inactive_split_bytes{gpu="0"} 2677
gauge device_cached_free_bytes{gpu="0"} 96810
gauge device_cached_free_bytes{gpu="1"} 2713
gauge device_idle_bytes{gpu="0"} 2069
gauge device_idle_bytes{gpu="1"} 2713
gauge device_largest_free_block_bytes{gpu="0"} 100049
gauge device_guaranteed_bytes{gpu="0"} 2017
gauge device_committed_bytes{gpu="0"} 2011
gauge device_carried_over_bytes{gpu="0"} 2029
gauge device_outside_bytes{gpu="0"} 2039
gauge device_held_back_bytes{gpu="0"} 2063
gauge device_unfreed_bytes{gpu="0"} 2081
gauge device_overhead_bytes{gpu="0"} 2503
gauge device_uncounted_bytes{gpu="0"} 2539
gauge device_processes_known{gpu="0"} 1
gauge device_segments{gpu="0"} 2083
gauge device_blocks{gpu="0"} 2543
gauge device_healthy{gpu="0"} 1
gauge device_waiting_requests{gpu="0"} 2357
counter device_alloc_retries_total{gpu="0"} 2437
counter device_segment_allocs_total{gpu="0"} 2087
counter device_segment_frees_total{gpu="0"} 2089
counter device_handovers_total{gpu="0"} 2099
counter device_handover_bytes_total{gpu="0"} 2111
counter device_scrubs_total{gpu="0"} 2341
counter device_scrubbed_bytes_total{gpu="0"} 2347
counter device_reclaims_total{gpu="0"} 2281
counter device_reclaim_asked_bytes_total{gpu="0"} 2287
counter device_reclaimed_bytes_total{gpu="0"} 2293
gauge device_free_blocks{gpu="0",size="512"} 3328
gauge device_free_blocks{gpu="0",size="4096"} 4867
gauge device_free_blocks{gpu="0",size="32768"} 3354
gauge device_free_blocks{gpu="0",size="262144"} 3374
gauge device_free_blocks{gpu="0",size="2097152"} 3396
gauge device_free_blocks{gpu="0",size="16777216"} 3426
gauge device_free_blocks{gpu="0",size="134217728"} 3436
gauge device_free_blocks{gpu="0",size="1073741824"} 3444
gauge device_free_block_bytes{gpu="0",size="512"} 3458
gauge device_free_block_bytes{gpu="0",size="4096"} 5029
gauge device_free_block_bytes{gpu="0",size="32768"} 3498
gauge device_free_block_bytes{gpu="0",size="262144"} 3520
gauge device_free_block_bytes{gpu="0",size="2097152"} 3530
gauge device_free_block_bytes{gpu="0",size="16777216"} 3550
gauge device_free_block_bytes{gpu="0",size="134217728"} 3558
gauge device_free_block_bytes{gpu="0",size="1073741824"} 3564
gauge device_quarantined_bytes{gpu="0",reason="carried_over"} 3011
gauge device_quarantined_bytes{gpu="0",reason="disconnected"} 100019
gauge device_quarantined_bytes{gpu="0",reason="ended"} 1607
gauge device_quarantined_bytes{gpu="0",reason="held_open"} 4260
gauge device_quarantined_bytes{gpu="0",reason="others"} 3019
gauge device_quarantined_bytes{gpu="0",reason="settling"} 4250
gauge device_quarantined_bytes{gpu="1",reason="disconnected"} 1597
gauge device_quarantine_age_seconds{gpu="0"} 11
gauge device_drift_bytes{gpu="0",kind="uncharged"} 2521
gauge device_drift_bytes{gpu="0",kind="unused"} 2531
gauge device_uncounted_process_bytes{gpu="0",process="desktop"} 2459
counter device_ooms_total{gpu="0",reason="limit"} 2399
counter device_ooms_total{gpu="0",reason="capacity"} 2411
counter device_ooms_total{gpu="0",reason="fragmentation"} 2417
counter device_ooms_total{gpu="0",reason="larger_than_device"} 2423
histogram device_wait_duration_seconds_count{gpu="0",outcome="granted"} 2371
histogram device_wait_duration_seconds_sum{gpu="0",outcome="granted"} 2377
histogram device_wait_duration_seconds_count{gpu="0",outcome="refused"} 2381
histogram device_wait_duration_seconds_sum{gpu="0",outcome="refused"} 2383
histogram device_wait_duration_seconds_count{gpu="0",outcome="cancelled"} 2389
histogram device_wait_duration_seconds_sum{gpu="0",outcome="cancelled"} 2393
histogram device_reclaim_duration_seconds_count{gpu="0"} 2297
histogram device_reclaim_duration_seconds_sum{gpu="0"} 2309
counter device_call_errors_total{gpu="0",call="allocate"} 2339
counter device_call_errors_total{gpu="0",call="free"} 2340
counter device_call_errors_total{gpu="0",call="export"} 2341
counter device_call_errors_total{gpu="0",call="health"} 2342
counter device_call_errors_total{gpu="0",call="memory"} 2343
counter device_call_errors_total{gpu="0",call="holders"} 2344
counter device_call_errors_total{gpu="0",call="processes"} 2345
histogram device_call_duration_seconds_count{gpu="0",call="allocate"} 2311
histogram device_call_duration_seconds_sum{gpu="0",call="allocate"} 2333
histogram device_call_duration_seconds_count{gpu="0",call="free"} 2312
histogram device_call_duration_seconds_sum{gpu="0",call="free"} 2334
histogram device_call_duration_seconds_count{gpu="0",call="export"} 2313
histogram device_call_duration_seconds_sum{gpu="0",call="export"} 2335
histogram device_call_duration_seconds_count{gpu="0",call="health"} 2314
histogram device_call_duration_seconds_sum{gpu="0",call="health"} 2336
histogram device_call_duration_seconds_count{gpu="0",call="memory"} 2315
histogram device_call_duration_seconds_sum{gpu="0",call="memory"} 2337
histogram device_call_duration_seconds_count{gpu="0",call="holders"} 2316
histogram device_call_duration_seconds_sum{gpu="0",call="holders"} 2338
histogram device_call_duration_seconds_count{gpu="0",call="processes"} 2317
histogram device_call_duration_seconds_sum{gpu="0",call="processes"} 2339
gauge claims 3
gauge claim_info{claim="x",owner="8",state="draining",label_team="t"} 1
gauge claim_sessions{claim="x"} 1733
gauge claim_sessions{claim="_other"} 187101871
gauge claim_limit_bytes{claim="x",gpu="0"} 1741
gauge claim_limit_bytes{claim="_other",gpu="0"} 187301873
gauge claim_guarantee_bytes{claim="x",gpu="0"} 1747
gauge claim_guarantee_bytes{claim="_other",gpu="0"} 187701877
gauge claim_reserved_bytes{claim="x",gpu="0"} 1753
gauge claim_reserved_bytes{claim="x",gpu="1"} 1867
gauge claim_reserved_bytes{claim="_other",gpu="0"} 187901879
gauge claim_reserved_bytes{claim="_other",gpu="1"} 199301993
gauge claim_peak_bytes{claim="x",gpu="0"} 1787
gauge claim_peak_bytes{claim="_other",gpu="0"} 191301913
gauge claim_left_behind_bytes{claim="x",gpu="0"} 1759
gauge claim_left_behind_bytes{claim="_other",gpu="0"} 188901889
gauge claim_allocated_bytes{claim="x",gpu="0"} 1777
gauge claim_allocated_bytes{claim="_other",gpu="0"} 190101901
gauge claim_idle_bytes{claim="x",gpu="0"} 1783
gauge claim_idle_bytes{claim="_other",gpu="0"} 190701907
gauge claim_waiting_requests{claim="x",gpu="0"} 1789
gauge claim_waiting_requests{claim="_other",gpu="0"} 193101931
counter claim_ooms_total{claim="x",gpu="0",reason="limit"} 1823
counter claim_ooms_total{claim="x",gpu="0",reason="capacity"} 1831
counter claim_ooms_total{claim="x",gpu="0",reason="fragmentation"} 1847
counter claim_ooms_total{claim="x",gpu="0",reason="larger_than_device"} 1861
counter claim_waits_total{claim="x",gpu="0"} 1801
counter claim_waited_seconds_total{claim="x",gpu="0"} 1811
gauge client_info{client="ann",tenant="a",session="1",uid="7",rule="r",placement="leased"} 1
counter client_allocs_total{client="ann",gpu="0",tenant="a"} 1019
counter client_frees_total{client="ann",gpu="0",tenant="a"} 1021
counter client_alloc_retries_total{client="ann",gpu="0",tenant="a"} 1171
counter client_ooms_total{client="ann",gpu="0",tenant="a",reason="limit"} 1409
counter client_ooms_total{client="ann",gpu="0",tenant="a",reason="capacity"} 1423
counter client_ooms_total{client="ann",gpu="0",tenant="a",reason="fragmentation"} 1427
counter client_ooms_total{client="ann",gpu="0",tenant="a",reason="larger_than_device"} 1429
counter client_ooms_total{client="ann",gpu="1",tenant="a",reason="capacity"} 1451
gauge client_reserved_bytes{client="ann",gpu="0",tenant="a"} 100003
gauge client_reserved_bytes{client="ann",gpu="1",tenant="a"} 1447
gauge client_reserved_bytes{client="_other",gpu="0",tenant="_other"} 101626
gauge client_reserved_bytes{client="_other",gpu="1",tenant="_other"} 1597
gauge client_allocated_bytes{client="ann",gpu="0",tenant="a"} 1031
gauge client_allocated_bytes{client="_other",gpu="0",tenant="_other"} 3096
gauge client_active_bytes{client="ann",gpu="0",tenant="a"} 1087
gauge client_active_bytes{client="_other",gpu="0",tenant="_other"} 1499
gauge client_requested_bytes{client="ann",gpu="0",tenant="a"} 1129
gauge client_requested_bytes{client="_other",gpu="0",tenant="_other"} 1523
gauge client_inactive_split_bytes{client="ann",gpu="0",tenant="a"} 1103
gauge client_inactive_split_bytes{client="_other",gpu="0",tenant="_other"} 1511
gauge client_idle_bytes{client="ann",gpu="0",tenant="a"} 1367
gauge client_idle_bytes{client="_other",gpu="0",tenant="_other"} 3166
gauge client_cached_free_bytes{client="ann",gpu="0",tenant="a"} 97543
gauge client_cached_free_bytes{client="ann",gpu="1",tenant="a"} 1447
gauge client_cached_free_bytes{client="_other",gpu="0",tenant="_other"} 98568
gauge client_cached_free_bytes{client="_other",gpu="1",tenant="_other"} 1597
gauge client_largest_free_block_bytes{client="ann",gpu="0",tenant="a"} 1297
gauge client_largest_free_block_bytes{client="_other",gpu="0",tenant="_other"} 1549
gauge client_limit_bytes{client="ann",gpu="0",tenant="a"} 1301
gauge client_limit_bytes{client="_other",gpu="0",tenant="_other"} 11367
gauge client_guarantee_bytes{client="ann",gpu="0",tenant="a"} 1303
gauge client_guarantee_bytes{client="_other",gpu="0",tenant="_other"} 4795
gauge client_carried_over_bytes{client="ann",gpu="0",tenant="a"} 1307
gauge client_carried_over_bytes{client="_other",gpu="0",tenant="_other"} 1471
gauge client_used_bytes{client="ann",gpu="0",tenant="a"} 1381
gauge client_used_bytes{client="_other",gpu="0",tenant="_other"} 1567
gauge client_overhead_bytes{client="ann",gpu="0",tenant="a"} 1399
gauge client_overhead_bytes{client="_other",gpu="0",tenant="_other"} 1571
gauge client_peak_allocated_bytes{client="ann",gpu="0",tenant="a"} 1033
gauge client_peak_allocated_bytes{client="_other",gpu="0",tenant="_other"} 1489
gauge client_peak_reserved_bytes{client="ann",gpu="0",tenant="a"} 1061
gauge client_peak_reserved_bytes{client="_other",gpu="0",tenant="_other"} 3186
gauge client_segments{client="ann",gpu="0",tenant="a"} 1327
gauge client_segments{client="_other",gpu="0",tenant="_other"} 1481
gauge client_blocks{client="ann",gpu="0",tenant="a"} 1009
gauge client_blocks{client="_other",gpu="0",tenant="_other"} 1483
gauge client_waiting_requests{client="ann",gpu="0",tenant="a"} 3
gauge client_waiting_requests{client="_other",gpu="0",tenant="_other"} 2
gauge client_fragmentation_growth_bytes_per_second{client="ann",gpu="0",tenant="a"} 1433
gauge client_fragmentation_growth_bytes_per_second{client="_other",gpu="0",tenant="_other"} 3198
gauge client_refusal_expected_seconds{client="ann",gpu="0",tenant="a"} 1439
gauge client_refusal_expected_seconds{client="_other",gpu="0",tenant="_other"} 1583
gauge client_free_block_bytes{client="ann",gpu="0",tenant="a",size="512"} 1237
gauge client_free_block_bytes{client="ann",gpu="0",tenant="a",size="4096"} 1249
gauge client_free_block_bytes{client="ann",gpu="0",tenant="a",size="32768"} 1259
gauge client_free_block_bytes{client="ann",gpu="0",tenant="a",size="262144"} 1277
gauge client_free_block_bytes{client="ann",gpu="0",tenant="a",size="2097152"} 1279
gauge client_free_block_bytes{client="ann",gpu="0",tenant="a",size="16777216"} 1283
gauge client_free_block_bytes{client="ann",gpu="0",tenant="a",size="134217728"} 1289
gauge client_free_block_bytes{client="ann",gpu="0",tenant="a",size="1073741824"} 1291
gauge client_free_block_bytes{client="_other",gpu="0",tenant="_other",size="4096"} 1543
gauge tenant_sessions{tenant="_other",gpu="0"} 9
gauge tenant_sessions{tenant="_other",gpu="1"} 9
gauge tenant_sessions{tenant="a",gpu="0"} 1
gauge tenant_sessions{tenant="a",gpu="1"} 1
gauge tenant_reserved_bytes{tenant="_other",gpu="0"} 101626
gauge tenant_reserved_bytes{tenant="_other",gpu="1"} 1597
gauge tenant_reserved_bytes{tenant="a",gpu="0"} 100003
gauge tenant_reserved_bytes{tenant="a",gpu="1"} 1447
gauge tenant_allocated_bytes{tenant="_other",gpu="0"} 3096
gauge tenant_allocated_bytes{tenant="a",gpu="0"} 1031
gauge tenant_idle_bytes{tenant="_other",gpu="0"} 3166
gauge tenant_idle_bytes{tenant="a",gpu="0"} 1367
gauge tenant_guarantee_bytes{tenant="_other",gpu="0"} 4795
gauge tenant_guarantee_bytes{tenant="a",gpu="0"} 1303
counter tenant_ooms_total{tenant="a",gpu="0",reason="limit"} 2741
counter tenant_ooms_total{tenant="a",gpu="0",reason="capacity"} 2749
counter tenant_ooms_total{tenant="a",gpu="0",reason="fragmentation"} 2753
counter tenant_ooms_total{tenant="a",gpu="0",reason="larger_than_device"} 2767
counter tenant_ooms_total{tenant="a",gpu="1",reason="limit"} 2789
counter tenant_ooms_total{tenant="b",gpu="0",reason="limit"} 274100000
counter tenant_ooms_total{tenant="b",gpu="0",reason="capacity"} 274900000
counter tenant_ooms_total{tenant="b",gpu="0",reason="fragmentation"} 275300000
counter tenant_ooms_total{tenant="b",gpu="0",reason="larger_than_device"} 276700000
counter tenant_ooms_total{tenant="b",gpu="1",reason="limit"} 278900000
counter tenant_ooms_total{tenant="c",gpu="0",reason="limit"} 27410000000000
counter tenant_ooms_total{tenant="c",gpu="0",reason="capacity"} 27490000000000
counter tenant_ooms_total{tenant="c",gpu="0",reason="fragmentation"} 27530000000000
counter tenant_ooms_total{tenant="c",gpu="0",reason="larger_than_device"} 27670000000000
counter tenant_ooms_total{tenant="c",gpu="1",reason="limit"} 27890000000000
counter tenant_sessions_ended_after_oom_total{tenant="a",gpu="0"} 2777
counter tenant_sessions_ended_after_oom_total{tenant="a",gpu="1"} 2791
counter tenant_sessions_ended_after_oom_total{tenant="b",gpu="0"} 277700000
counter tenant_sessions_ended_after_oom_total{tenant="b",gpu="1"} 279100000
counter tenant_sessions_ended_after_oom_total{tenant="c",gpu="0"} 27770000000000
counter tenant_sessions_ended_after_oom_total{tenant="c",gpu="1"} 27910000000000
gauge clients_folded 7
counter http_listen_failures_total 2851
gauge http_connections 2857
counter http_connections_dropped_total{reason="too_many"} 2861
counter http_connections_dropped_total{reason="slow_request"} 2879
counter http_connections_dropped_total{reason="slow_reader"} 2887)");
}

TEST_F(MetricFiguresTest, WhatIsNoWholeNumber) {
  MetricsPage page(Text());
  const DeviceView& first = view_.devices[0];
  const DeviceView& second = view_.devices[1];
  const SessionDeviceView& ann = view_.sessions[0].devices[0];
  const SessionDeviceView& ben = view_.sessions[1].devices[0];
  const SessionDeviceView& cid = view_.sessions[2].devices[0];
  const auto active = [](const auto& of) { return of.stats.active_bytes.all.current; };
  const auto allocated = [](const auto& of) { return of.stats.allocated_bytes.all.current; };
  const auto expect = [&](const std::string& name, const Labels& labels, uint64_t part, uint64_t whole) {
    const double ratio = 1 - static_cast<double>(part) / static_cast<double>(whole);
    EXPECT_NEAR(page.Value("vrambroker_" + name + "_ratio", labels).value_or(-1), ratio, 1e-6) << name;
  };
  const uint64_t leased = first.leased_bytes - first.unknown_bytes;
  expect("device_fragmentation", {{"gpu", "0"}}, allocated(first), leased);
  expect("device_fragmentation", {{"gpu", "1"}}, allocated(second), active(second));
  expect("device_external_fragmentation", {{"gpu", "0"}}, ben.stats.free.largest_bytes, leased - active(first));
  expect("device_external_fragmentation", {{"gpu", "1"}}, 1, 1);
  const Labels of_ann = {{"client", "ann"}, {"gpu", "0"}};
  const uint64_t known = ann.account.reserved_bytes - ann.unknown_bytes;
  expect("client_fragmentation", of_ann, allocated(ann), known);
  expect("client_external_fragmentation", of_ann, ann.stats.free.largest_bytes, known - active(ann));
  const Labels of_others = {{"client", "_other"}, {"gpu", "0"}};
  const uint64_t known_of_others = ben.account.reserved_bytes + cid.account.reserved_bytes - ben.unknown_bytes;
  expect("client_fragmentation", of_others, allocated(ben) + allocated(cid), known_of_others);
  expect("client_external_fragmentation", of_others, ben.stats.free.largest_bytes, known_of_others - active(ben));
  const double oldest = static_cast<double>(std::time(nullptr)) - 1000 * 3600;
  EXPECT_NEAR(page.Value("vrambroker_device_oldest_waiting_timestamp_seconds", {{"gpu", "0"}}).value_or(0), oldest,
              1800);
  EXPECT_EQ(page.Value("vrambroker_device_oldest_waiting_timestamp_seconds", {{"gpu", "1"}}), 0);
}

TEST_F(MetricFiguresTest, AFailureIsShown) {
  const auto value = [this](const std::string& name, const Labels& labels) {
    return MetricsPage(Text()).Value("vrambroker_" + name, labels);
  };
  EXPECT_EQ(value("device_healthy", {{"gpu", "1"}}), 0);
  EXPECT_EQ(value("device_processes_known", {{"gpu", "1"}}), 0);
  view_.is_serving = false;
  reload_.last_was_successful = false;
  EXPECT_EQ(value("ready", {}), 0);
  EXPECT_EQ(value("config_last_reload_successful", {}), 0);
}

}  // namespace
}  // namespace vrambroker
