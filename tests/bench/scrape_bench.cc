// SPDX-License-Identifier: Apache-2.0
//
// Measures the cost of a scrape for the daemon: processor time of Metrics::Text(), with OperatorView::Look(), for a
// broker whose many sessions all use every device. Remote sessions have free blocks of many sizes.
#include <spdlog/spdlog.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <ctime>
#include <fstream>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/flags/usage.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "allocator/base/bytes.h"
#include "allocator/replay/direct_heap.h"
#include "server/base/worker_pool.h"
#include "server/monitoring/metrics.h"
#include "server/rpc/rpc_meter.h"
#include "tests/support/allocate_slowly.h"
#include "tests/support/fake_device.h"

ABSL_FLAG(std::vector<std::string>, sessions, (std::vector<std::string>{"10", "100", "1000"}), "Numbers of sessions.");
ABSL_FLAG(std::vector<std::string>, remote_percent, (std::vector<std::string>{"0", "50"}),
          "How many of the sessions are remote; the library leases unless told otherwise.");
ABSL_FLAG(int, devices, 8, "Devices.");
ABSL_FLAG(int, rounds, 21, "Scrapes of which the median is told.");
ABSL_FLAG(int, heap_blocks, 1000000, "Free blocks of the heap whose figures are read.");
ABSL_FLAG(std::string, json, "", "Where to write the figures, too.");

namespace vrambroker {
namespace {

class NoEvents : public SessionEvents {
 public:
  void CloseSegments(absl::Span<const SegmentId>) override {}
  void LimitChanged(int, uint64_t) override {}
  void Draining(const std::string& /*reason*/) override {}
  void Ended(const std::string&) override {}
  void Ask(uint64_t, const ClientQuestion&) override {}
};

// Processor time of all threads of the process, so that other programs do not count.
double Milliseconds(const std::function<void()>& run) {
  const auto now = [] {
    timespec time = {};
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
    return static_cast<double>(time.tv_sec) * 1e3 + static_cast<double>(time.tv_nsec) / 1e6;
  };
  const double start = now();
  run();
  return now() - start;
}

// Median and maximum of `rounds` runs.
std::pair<double, double> Measure(int rounds, const std::function<void()>& run) {
  std::vector<double> times;
  times.reserve(static_cast<size_t>(rounds));
  for (int i = 0; i < rounds; ++i) times.push_back(Milliseconds(run));
  std::sort(times.begin(), times.end());
  return {times[times.size() / 2], times.back()};
}

// A broker whose sessions all hold a cut segment of 20 MiB on every device.
class Scene {
 public:
  Scene(int sessions, int devices, int remote_percent) {
    std::vector<SegmentPool*> pools;
    for (int i = 0; i < devices; ++i) {
      pools_.push_back(std::make_unique<SegmentPool>(std::make_unique<FakeDevice>(1024_GiB), 1024_GiB, &next_segment_));
      pools.push_back(pools_.back().get());
    }
    BrokerOptions options;
    options.watch_process = [](const UniqueFd&, const std::function<void()>&) { return 0; };
    options.unwatch_process = [](int) {};
    broker_ = std::make_unique<Broker>(std::move(options), std::move(pools), &workers_);
    for (int i = 0; i < sessions; ++i) Open(i, devices, i % 100 >= remote_percent);
  }
  ~Scene() { broker_->CloseAll("done"); }

  const Broker& broker() const { return *broker_; }

 private:
  void Open(int i, int devices, bool leases) {
    const Caller caller{.pid = 1, .uid = static_cast<uid_t>(i % 50), .pidfd = std::make_shared<UniqueFd>()};
    const SessionPtr session = broker_
                                   ->OpenSession(caller,
                                                 {.name = absl::StrCat("training-of-a-large-model-", i),
                                                  .placement = leases ? Placement::kLeased : Placement::kRemote},
                                                 std::make_shared<NoEvents>())
                                   .value();
    for (int device = 0; device < devices; ++device) {
      if (leases) {
        (void)session->leased()->LeaseSlowly(device, std::vector<uint64_t>{20_MiB});
        MemoryStats stats;
        stats.allocated_bytes.Up(PoolKind::kLarge, 3_MiB);
        stats.reserved_bytes.Up(PoolKind::kLarge, 20_MiB);
        stats.free.Add(17_MiB);
        session->leased()->Report(device, stats);
        continue;
      }
      std::vector<BlockId> blocks;
      for (uint64_t bytes = 512; bytes <= 512_KiB; bytes += 8_KiB) {
        if (absl::StatusOr<Allocation> block = AllocateSlowly(*session->remote(), device, bytes); block.ok()) {
          if (blocks.size() % 2 == 0) blocks.push_back(block->block);
        }
      }
      (void)session->remote()->Free(blocks);
    }
  }

  std::atomic<uint64_t> next_segment_ = 1;
  std::vector<std::unique_ptr<SegmentPool>> pools_;
  WorkerPool workers_{4};
  std::unique_ptr<Broker> broker_;
};

class Segments : public SegmentSource {
 public:
  absl::StatusOr<AcquiredSegment> AcquireSegment(uint64_t) override {
    return AcquiredSegment{.id = SegmentId{next_++}};
  }
  uint64_t ReleaseSegments(absl::Span<const ReleasedSegment>) override { return 0; }
  uint64_t AvailableBytes() override { return 0; }

 private:
  uint64_t next_ = 1;
};

void MeasureHeap(int rounds, nlohmann::json* json) {
  Segments segments;
  DirectHeap heap(&segments);
  std::vector<Block*> blocks;
  const auto count = static_cast<size_t>(absl::GetFlag(FLAGS_heap_blocks));
  blocks.reserve(2 * count);
  for (size_t i = 0; i < 2 * count; ++i) blocks.push_back(heap.Allocate(512 * (1 + i % 61)).value());
  for (size_t i = 0; i < blocks.size(); i += 2) heap.Free(blocks[i]);
  constexpr int kReads = 100;
  const auto [median, most] = Measure(rounds, [&] {
    for (int i = 0; i < kReads; ++i) (void)heap.GetMemoryStats();
  });
  std::printf("\nfigures of a heap with %zu free blocks: %.2f us (most %.2f)\n", count, median / kReads * 1000,
              most / kReads * 1000);
  (*json)["heap"] = {{"free_blocks", count}, {"us", median / kReads * 1000}, {"most_us", most / kReads * 1000}};
}

void MeasureScrape(int sessions, int remote_percent, int rounds, nlohmann::json* json) {
  const int devices = absl::GetFlag(FLAGS_devices);
  const RpcMeter rpcs;
  const ReloadState reload;
  const Scene scene(sessions, devices, remote_percent);
  const Metrics metrics(
      {.view = [&] { return scene.broker().operator_view().Look(); }, .rpcs = &rpcs, .reload = &reload});
  const std::string page = metrics.Text();
  size_t series = 0;
  for (size_t at = 0; at < page.size(); at = page.find('\n', at) + 1) series += page[at] == '#' ? 0 : 1;
  const double view = Measure(rounds, [&] { (void)scene.broker().operator_view().Look(); }).first;
  const auto [median, most] = Measure(rounds, [&] { (void)metrics.Text(); });
  std::printf("| %d | %d %% | %d | %zu | %.2f | %.2f | %.2f | %.2f |\n", sessions, remote_percent, devices, series,
              static_cast<double>(page.size()) / 1e6, view, median, most);
  (*json)["scrapes"].push_back({{"sessions", sessions},
                                {"remote_percent", remote_percent},
                                {"devices", devices},
                                {"series", series},
                                {"bytes", page.size()},
                                {"view_ms", view},
                                {"ms", median},
                                {"most_ms", most}});
}

int Main() {
  nlohmann::json json;
  const int rounds = std::max(1, absl::GetFlag(FLAGS_rounds));
  std::printf("| sessions | remote | devices | series | page, MB | View, ms | scrape, ms | most, ms |\n");
  std::printf("| ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |\n");
  for (const std::string& text : absl::GetFlag(FLAGS_sessions)) {
    for (const std::string& percent : absl::GetFlag(FLAGS_remote_percent)) {
      int sessions = 0;
      int remote_percent = 0;
      if (!absl::SimpleAtoi(text, &sessions) || sessions < 1 || !absl::SimpleAtoi(percent, &remote_percent)) {
        std::fprintf(stderr, "scrape_bench: --sessions=%s, --remote_percent=%s: not numbers\n", text.c_str(),
                     percent.c_str());
        return 2;
      }
      MeasureScrape(sessions, remote_percent, rounds, &json);
    }
  }
  MeasureHeap(rounds, &json);
  if (const std::string path = absl::GetFlag(FLAGS_json); !path.empty()) std::ofstream(path) << json.dump(2) << "\n";
  return 0;
}

}  // namespace
}  // namespace vrambroker

int main(int argc, char** argv) {
  absl::SetProgramUsageMessage("what a scrape of the daemon's metrics costs");
  absl::ParseCommandLine(argc, argv);
  spdlog::set_level(spdlog::level::off);
  return vrambroker::Main();
}
