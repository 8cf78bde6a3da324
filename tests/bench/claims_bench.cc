// SPDX-License-Identifier: Apache-2.0
//
// Measures the cost of many claims for a daemon: memory, start, a scrape, and the creation of one more claim. The peer
// is the same daemon without claims, in the same round.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/flags/usage.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "allocator/base/bytes.h"
#include "tests/bench/fast_path.h"
#include "tests/support/raw_client.h"

ABSL_FLAG(std::vector<std::string>, claims, (std::vector<std::string>{"0", "100", "1000"}), "Numbers of claims.");
ABSL_FLAG(int, rounds, 9, "How often each daemon is started; five scrapes follow. Figures are medians.");
ABSL_FLAG(std::string, json, "", "Where to write the figures, too.");

namespace vrambroker::bench {
namespace {

double MillisecondsSince(int64_t start_ns) {
  return static_cast<double>(NowNs() - start_ns) / 1e6;
}

double Median(const std::vector<double>& values) {
  return Quantile(values, 0.5);
}

// A daemon with `claims` claims, and the figures of the daemon.
struct Subject {
  int claims = 0;
  std::unique_ptr<DaemonProcess> daemon;
  std::vector<double> create_ms, start_ms, start_cpu_ms, resident_mib, scrape_ms;
  double page_kib = 0;
};

absl::StatusOr<Subject> Make(int claims) {
  Subject subject = {.claims = claims};
  absl::StatusOr<std::unique_ptr<DaemonProcess>> daemon = DaemonProcess::Start({.capacity = "4GiB", .http = true});
  if (!daemon.ok()) return daemon.status();
  subject.daemon = *std::move(daemon);
  absl::StatusOr<testing_support::RawClient> raw = testing_support::RawClient::Connect(subject.daemon->socket_dir());
  if (!raw.ok()) return raw.status();
  for (int i = 0; i < claims; ++i) {
    v1::CreateClaimRequest request;
    request.set_name(absl::StrCat("slurm-", 100000 + i));
    request.mutable_terms()->mutable_limit()->set_bytes(64_MiB);
    request.mutable_terms()->set_owner_uid(static_cast<uint32_t>(1000 + i % 50));
    v1::CreateClaimResponse response;
    const int64_t start = NowNs();
    absl::Status status =
        testing_support::RawClient::Call(raw->admin(), &v1::Admin::Stub::CreateClaim, request, &response);
    if (!status.ok()) return status;
    subject.create_ms.push_back(MillisecondsSince(start));
  }
  return subject;
}

absl::Status Round(Subject& subject) {
  DaemonProcess& daemon = *subject.daemon;
  daemon.Kill();
  const int64_t start = NowNs();
  if (absl::Status status = daemon.Restart(); !status.ok()) return status;
  subject.start_ms.push_back(MillisecondsSince(start));
  subject.start_cpu_ms.push_back(CpuSeconds(daemon.pid()) * 1e3);
  subject.resident_mib.push_back(static_cast<double>(RssBytes(daemon.pid())) / (1 << 20));
  for (int i = 0; i < 5; ++i) {
    const int64_t scrape = NowNs();
    const absl::StatusOr<testing_support::HttpAnswer> page = daemon.Get("/metrics");
    if (!page.ok()) return page.status();
    subject.scrape_ms.push_back(MillisecondsSince(scrape));
    subject.page_kib = static_cast<double>(page->body.size()) / 1024;
  }
  return absl::OkStatus();
}

absl::Status Main(nlohmann::json& json) {
  std::vector<Subject> subjects;
  for (const std::string& text : absl::GetFlag(FLAGS_claims)) {
    int claims = 0;
    if (!absl::SimpleAtoi(text, &claims) || claims < 0) {
      return absl::InvalidArgumentError(absl::StrCat("--claims=", text, ": not a number"));
    }
    absl::StatusOr<Subject> subject = Make(claims);
    if (!subject.ok()) return subject.status();
    subjects.push_back(*std::move(subject));
  }
  for (int round = 0; round < std::max(1, absl::GetFlag(FLAGS_rounds)); ++round) {
    for (Subject& subject : subjects) {
      if (absl::Status status = Round(subject); !status.ok()) return status;
    }
  }
  Table table(&json, "claims", "Many claims",
              {"claims", "making one, ms", "the last tenth, ms", "RSS, MiB", "start, ms", "its processor time, ms",
               "scrape, ms", "page, KiB"});
  for (const Subject& of : subjects) {
    const auto tenth = static_cast<std::ptrdiff_t>(of.create_ms.size() / 10);
    table.Row({Table::Cell(static_cast<uint64_t>(of.claims)),
               {Median(of.create_ms), 2},
               {Median({of.create_ms.end() - tenth, of.create_ms.end()}), 2},
               {Median(of.resident_mib), 1},
               {Median(of.start_ms), 1},
               {Median(of.start_cpu_ms), 0},
               {Median(of.scrape_ms), 2},
               {of.page_kib, 0}});
  }
  return absl::OkStatus();
}

}  // namespace
}  // namespace vrambroker::bench

int main(int argc, char** argv) {
  absl::SetProgramUsageMessage("what many claims cost the daemon");
  absl::ParseCommandLine(argc, argv);
  nlohmann::json json;
  if (const absl::Status status = vrambroker::bench::Main(json); !status.ok()) {
    std::fprintf(stderr, "claims_bench: %s\n", std::string(status.message()).c_str());
    return 1;
  }
  if (const std::string path = absl::GetFlag(FLAGS_json); !path.empty()) std::ofstream(path) << json.dump(2) << "\n";
  return 0;
}
