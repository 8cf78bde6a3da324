// SPDX-License-Identifier: Apache-2.0
//
// Figures through ends of sessions, removals of claims and restarts of the daemon: a counter never falls and counts
// nothing of an earlier run, a sum is the sum of its parts, and JSON agrees with the metrics.
#include <gtest/gtest.h>
#include <signal.h>

#include <map>
#include <string>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "allocator/base/bytes.h"
#include "tests/support/test_device.h"
#include "tests/support/util.h"
#include "tests/support/vramctl_test.h"

namespace vrambroker::testing_support {
namespace {

using Series = std::map<std::string, double>;

// Reads counters and the parts of histograms, which may not fall.
Series CountersOf(const std::string& page) {
  Series counters;
  bool counts = false;
  for (const absl::string_view line : absl::StrSplit(page, '\n', absl::SkipEmpty())) {
    if (absl::StartsWith(line, "# TYPE ")) counts = !absl::EndsWith(line, " gauge");
    if (!counts || line[0] == '#') continue;
    const size_t space = line.rfind(' ');
    EXPECT_TRUE(absl::SimpleAtod(line.substr(space + 1), &counters[std::string(line.substr(0, space))])) << line;
  }
  return counters;
}

class CountersTest : public VramctlDaemonTest {
 protected:
  static constexpr uint64_t kLimit = 32_MiB;  // the limit of each session

  // Leaves room for two tenants with their own series.
  void SetUp() override {
    ASSERT_OK(StartDaemon({.config = "metrics { max_clients: 4 max_clients_per_uid: 4 }", .devices = 2, .http = true}));
  }

  absl::StatusOr<Client> ConnectIn(const std::string& claim, const std::string& name) const {
    ClientOptions options;
    options.socket_dir = claim.empty() ? dir() : absl::StrCat(dir(), "/claims/", claim);
    options.name = name;
    options.limit = kLimit;
    options.call_timeout = options.connect_timeout = kPatience;
    return Client::Connect(options);
  }
  void Create(const std::string& claim) { ASSERT_EQ(Ctl({"claim", "create", claim, "--limit=64MiB"}).exit_code, 0); }
  void Remove(const std::string& claim) {
    ASSERT_EQ(Ctl({"claim", "rm", claim}).exit_code, 0);
    ASSERT_TRUE(WaitFor([&] { return Ctl({"claim", "show", claim}).exit_code != 0; }));
  }
  // Asks for more than the limit. The daemon refuses after the client has given its cache back.
  static void Refuse(Client& client, int times, int device = 0) {
    for (int i = 0; i < times; ++i) {
      EXPECT_STATUS(client.Allocate(kLimit + 2_MiB, device), absl::StatusCode::kResourceExhausted, "");
    }
  }

  // Scrapes the metrics. Checks that no counter has fallen since the last scrape of this run.
  MetricsPage Scrape() {
    const absl::StatusOr<HttpAnswer> answer = daemon_->Get("/metrics");
    EXPECT_OK(answer.status());
    if (!answer.ok()) return MetricsPage("");
    Series counters = CountersOf(answer->body);
    for (const auto& [series, value] : counters) {
      if (const auto before = counters_.find(series); before != counters_.end()) {
        EXPECT_GE(value, before->second) << series;
      }
    }
    counters_ = std::move(counters);
    return MetricsPage(answer->body);
  }
  Json State() const {
    const absl::StatusOr<HttpAnswer> answer = daemon_->Get("/api/v1/state");
    return answer.ok() ? Json::parse(answer->body, nullptr, /*allow_exceptions=*/false) : Json();
  }

  // Lists sums that differ from the sum of their parts; empty once clients have reported. `gone_refusals`: refusals of
  // tenants whose series went with their claims.
  std::string Differences(const MetricsPage& page, const Json& state, double gone_refusals) const {
    if (!state.is_object()) return "no answer";
    std::string text;
    const auto same = [&](const std::string& what, double sum, double whole) {
      if (sum != whole) absl::StrAppend(&text, what, ": ", sum, ", not ", whole, "\n");
    };
    const auto sum_of = [&](const std::string& name, const Labels& labels) {
      return page.Sum("vrambroker_" + name, labels);
    };
    for (size_t i = 0; i < 2; ++i) {
      const Json& json = state["devices"][i];
      const Labels gpu = {{"gpu", absl::StrCat(i)}};
      const auto device = [&](const std::string& name) { return sum_of("device_" + name, gpu); };
      for (const char* name : {"capacity_bytes", "reserved_bytes", "leased_bytes", "idle_bytes", "allocated_bytes",
                               "inactive_split_bytes", "carried_over_bytes", "held_back_bytes", "guaranteed_bytes",
                               "committed_bytes", "segments", "quarantined_bytes"}) {
        same(absl::StrCat("metric and JSON of ", name), device(name), json[name]);
      }
      double left_behind = device("quarantined_bytes");
      double refusals = 0;
      for (const char* reason : {"disconnected", "ended"}) {
        left_behind -= sum_of("device_quarantined_bytes", {{"gpu", absl::StrCat(i)}, {"reason", reason}});
      }
      for (const auto& [reason, count] : json["refusals"].items()) {
        same(absl::StrCat("refusals for ", reason),
             sum_of("device_ooms_total", {{"gpu", absl::StrCat(i)}, {"reason", reason}}), count);
        refusals += count.get<double>();
      }
      same("left behind", left_behind, json["left_behind_bytes"]);
      same("refusals of tenants", sum_of("tenant_ooms_total", gpu) + (i == 0 ? gone_refusals : 0), refusals);
      for (const char* of : {"client", "tenant"}) {
        same(absl::StrCat("reserved by each ", of), sum_of(absl::StrCat(of, "_reserved_bytes"), gpu),
             device("leased_bytes"));
        same(absl::StrCat("allocated by each ", of), sum_of(absl::StrCat(of, "_allocated_bytes"), gpu),
             device("allocated_bytes"));
      }
    }
    same("all refusals", page.Sum("vrambroker_device_ooms_total"), state["total_ooms"]);
    return text;
  }
  void ExpectSums(double gone_refusals = 0) {
    std::string differences;
    EXPECT_TRUE(WaitFor([&] {
      differences = Differences(Scrape(), State(), gone_refusals);
      return differences.empty();
    })) << differences;
  }
  double Retries() { return Scrape().Sum("vrambroker_device_alloc_retries_total"); }
  double RefusalsOf(const std::string& tenant) {
    return Scrape().Sum("vrambroker_tenant_ooms_total", {{"tenant", tenant}});
  }

  Series counters_;  // counters of the last scrape of this run
};

TEST_F(CountersTest, NoneFallsAndEachSumIsThatOfItsParts) {
  HOST_DEVICE_ONLY();
  // ---- A run ----
  ASSERT_OK_AND_ASSIGN(Client first, ConnectIn("", "first"));
  { ASSERT_OK_AND_ASSIGN(const Buffer small, first.Allocate(5_MiB)); }
  ASSERT_OK_AND_ASSIGN(const Buffer large, first.Allocate(30_MiB));  // the cached segment has to go
  Refuse(first, 2);
  Refuse(first, 1, /*device=*/1);
  EXPECT_TRUE(WaitFor([&] { return Retries() == 4; })) << Retries();
  ASSERT_NO_FATAL_FAILURE(Create("a"));
  ASSERT_NO_FATAL_FAILURE(Create("b"));
  ASSERT_NO_FATAL_FAILURE(Create("c"));
  ASSERT_OK_AND_ASSIGN(Client in_a, ConnectIn("a", "in-a"));
  ASSERT_OK_AND_ASSIGN(Client in_b, ConnectIn("b", "in-b"));
  ASSERT_OK_AND_ASSIGN(Client in_c, ConnectIn("c", "in-c"));
  Refuse(in_a, 1);
  Refuse(in_b, 2);
  Refuse(in_c, 3);
  ASSERT_OK_AND_ASSIGN(Buffer in_a_holds, in_a.Allocate(3_MiB));
  ExpectSums();
  EXPECT_EQ(RefusalsOf("claim:a"), 1);
  EXPECT_EQ(RefusalsOf("_other"), 5);

  // ---- Sessions end, and their claims go ----
  { const Client ends = std::move(in_b); }
  EXPECT_TRUE(WaitFor([&] { return Scrape().Value("vrambroker_claim_sessions", {{"claim", "b"}}) == 0; }));
  ExpectSums();
  ASSERT_NO_FATAL_FAILURE(Remove("b"));
  EXPECT_EQ(RefusalsOf("_other"), 5) << "who is no more was refused all the same";
  ExpectSums();
  // Tenants with their own series make room for later refusals.
  EXPECT_OK(in_a_holds.Reset());
  { const Client ends = std::move(in_a); }
  ASSERT_NO_FATAL_FAILURE(Remove("a"));
  EXPECT_EQ(RefusalsOf("_other"), 5);
  Refuse(in_c, 1);
  EXPECT_EQ(RefusalsOf("claim:c"), 1);
  EXPECT_EQ(RefusalsOf("_other"), 5);
  ExpectSums(/*gone_refusals=*/1);

  // ---- A process ends, and its child has its memory ----
  ASSERT_OK_AND_ASSIGN(ClientProcess parent, ConnectProcess("parent"));
  ASSERT_OK(parent.Call(absl::StrCat("alloc ", 64_MiB)));
  ASSERT_OK(parent.Call("fork"));
  parent.process().Signal(SIGKILL);
  ASSERT_OK(parent.process().Wait());
  const auto quarantined = [&](const std::string& reason) {
    return Scrape().Value("vrambroker_device_quarantined_bytes", {{"gpu", "0"}, {"reason", reason}});
  };
  EXPECT_TRUE(WaitFor([&] { return quarantined("held_open") == 64_MiB; }));
  ExpectSums(/*gone_refusals=*/1);

  // ---- The next runs ----
  const auto has_counted = [&](const std::string& client) {
    return Scrape().Value("vrambroker_client_alloc_retries_total", {{"client", client}, {"gpu", "0"}});
  };
  for (int run = 1; run <= 2; ++run) {
    run == 1 ? daemon_->Kill() : (void)daemon_->Stop();
    ASSERT_OK(daemon_->Restart());
    counters_.clear();
    ASSERT_TRUE(WaitFor([&] { return has_counted("first") == 2 + run && has_counted("in-c") == 4; }));
    EXPECT_EQ(Retries(), 0) << "they were in an earlier run";
    Refuse(first, 1);
    EXPECT_TRUE(WaitFor([&] { return Retries() == 1; })) << Retries();
    EXPECT_EQ(quarantined("carried_over"), 64_MiB) << "what the child has is nobody's";
    ExpectSums();
  }
}

}  // namespace
}  // namespace vrambroker::testing_support
