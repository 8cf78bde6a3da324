// SPDX-License-Identifier: Apache-2.0
//
// Many clients: cost for the daemon, and memory of all clients together.
#include <algorithm>
#include <atomic>
#include <thread>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "allocator/replay/replay.h"
#include "tests/bench/fast_path.h"
#include "tests/support/raw_client.h"

namespace vrambroker::bench {
namespace {

using testing_support::RawClient;
using testing_support::RawStream;

using Workers = std::vector<std::unique_ptr<ChildProcess>>;

absl::StatusOr<Workers> StartWorkers(const DaemonProcess& daemon, int count, const std::string& first_command) {
  Workers workers;
  for (int i = 0; i < count; ++i) {
    absl::StatusOr<std::unique_ptr<ChildProcess>> worker = StartWorker(daemon);
    if (!worker.ok()) return worker.status();
    workers.push_back(*std::move(worker));
    if (absl::Status status = workers.back()->WriteLine(first_command); !status.ok()) return status;
  }
  for (const auto& worker : workers) {
    const absl::StatusOr<std::string> answer = worker->ReadLine();
    if (!answer.ok() || *answer != "ok") {
      return absl::InternalError(absl::StrCat("a worker: ", answer.value_or(answer.status().ToString())));
    }
  }
  return workers;
}

absl::Status AskAll(const Workers& workers, const std::string& command) {
  for (const auto& worker : workers) {
    if (absl::Status status = worker->WriteLine(command); !status.ok()) return status;
  }
  for (const auto& worker : workers) {
    const absl::StatusOr<std::string> answer = worker->ReadLine();
    if (!answer.ok() || *answer != "ok") {
      return absl::InternalError(absl::StrCat(command, ": ", answer.value_or(answer.status().ToString())));
    }
  }
  return absl::OkStatus();
}

// Peaks of the device's figures. A thread looks at the device all the time.
class Watch {
 public:
  explicit Watch(RawClient admin) : admin_(std::move(admin)), thread_([this] { Look(); }) {}
  ~Watch() {
    stop_ = true;
    thread_.join();
  }
  uint64_t peak_reserved() const { return reserved_; }
  uint64_t peak_leased() const { return leased_; }

 private:
  void Look() {
    while (!stop_) {
      if (const absl::StatusOr<v1::Device> device = admin_.GetDevice(); device.ok()) {
        reserved_ = std::max(reserved_.load(), device->reserved_bytes());
        leased_ = std::max(leased_.load(), device->reserved_bytes() - device->idle_bytes());
      }
      absl::SleepFor(absl::Milliseconds(2));
    }
  }

  RawClient admin_;
  std::atomic<bool> stop_{false};
  std::atomic<uint64_t> reserved_{0};
  std::atomic<uint64_t> leased_{0};
  std::thread thread_;  // last: the thread uses the other members
};

}  // namespace

// Four processes replay a trace in parts. An idle process holds the trace's live memory from the end of a part, and its
// cache decays.
absl::Status MeasurePeaks(const Settings& settings, nlohmann::json* json) {
  constexpr int kProcesses = 4;
  constexpr int kDecayMs = 40;
  constexpr int kPartMs = 4 * kDecayMs;
  Table table(json, "peaks", "Four processes whose peaks do not coincide: memory reserved together",
              {"trace", "at work at a time", "private caches, MiB", "leased at most, MiB", "share",
               "held from the device at most, MiB", "share of that", "calls per 1000 operations"});
  for (const std::string& name : settings.traces) {
    absl::StatusOr<Trace> trace = ReadTraceFile(absl::StrCat(settings.golden, "/", name, ".trace.gz"));
    if (!trace.ok()) return trace.status();
    const uint64_t alone = SummarizeReplay(*trace, ReplayConfig()).peak_reserved_bytes;
    for (const int at_work : {1, 2, 4}) {
      const auto daemon = StartDaemon("256GiB", absl::StrCat("idle_decay: \"", kDecayMs, "ms\"\n"));
      if (!daemon.ok()) return daemon.status();
      const absl::StatusOr<Workers> workers = StartWorkers(**daemon, kProcesses, absl::StrCat("connect ", kDecayMs));
      if (!workers.ok()) return workers.status();
      const int parts = 20;
      if (absl::Status status = AskAll(*workers, absl::StrCat("trace ", settings.golden, " ", name, " ", parts));
          !status.ok()) {
        return status;
      }
      absl::StatusOr<RawClient> admin = RawClient::Connect((*daemon)->socket_dir());
      if (!admin.ok()) return admin.status();
      uint64_t leased = 0;
      uint64_t reserved = 0;
      {
        const Watch watch(*std::move(admin));
        for (int part = 0; part < settings.phases; ++part) {
          for (int first = 0; first < kProcesses; first += at_work) {
            for (int i = first; i < first + at_work; ++i) {
              if (absl::Status status = (*workers)[static_cast<size_t>(i)]->WriteLine(absl::StrCat("part ", kPartMs));
                  !status.ok()) {
                return status;
              }
            }
            for (int i = first; i < first + at_work; ++i) {
              const absl::StatusOr<std::string> answer = (*workers)[static_cast<size_t>(i)]->ReadLine();
              if (!answer.ok() || *answer != "ok") {
                return absl::InternalError(absl::StrCat("part: ", answer.value_or(answer.status().ToString())));
              }
            }
            // The caches of the stopped processes decay before the next processes begin.
            absl::SleepFor(absl::Milliseconds(2 * kDecayMs));
          }
        }
        leased = watch.peak_leased();
        reserved = watch.peak_reserved();
      }
      double calls = 0;
      for (const auto& worker : *workers) {
        double number = 0;
        const absl::StatusOr<std::string> answer = Ask(*worker, "calls");
        if (!answer.ok() || !absl::SimpleAtod(*answer, &number)) return absl::InternalError("calls: no number");
        calls += number;
      }
      const double together = static_cast<double>(kProcesses * alone);
      const double ops = kProcesses * static_cast<double>(trace->ops.size()) * settings.phases / parts;
      table.Row({name,
                 Table::Cell(static_cast<uint64_t>(at_work)),
                 {together / kMiB, 0},
                 {static_cast<double>(leased) / kMiB, 0},
                 {static_cast<double>(leased) / together, 2},
                 {static_cast<double>(reserved) / kMiB, 0},
                 {static_cast<double>(reserved) / together, 2},
                 {calls * 1e3 / ops, 1}});
    }
  }
  return absl::OkStatus();
}

absl::Status MeasureScale(const Settings& settings, nlohmann::json* json) {
  constexpr int kPeriodMs = 200;
  Table table(json, "scale",
              absl::StrCat("Many clients: each leases a segment and returns it every ", kPeriodMs, " ms"),
              {"clients", "daemon RSS, MiB", "KiB per client", "CPU when idle, %", "leases per s", "CPU under load, %",
               "daemon CPU us per pair", "lease p50, us", "p99, us"});
  for (const int count : settings.clients) {
    const auto daemon = StartDaemon("64GiB");
    if (!daemon.ok()) return daemon.status();
    const pid_t pid = (*daemon)->pid();
    const uint64_t rss_before = RssBytes(pid);
    const absl::StatusOr<Workers> workers = StartWorkers(**daemon, count, "connect");
    if (!workers.ok()) return workers.status();
    if (absl::Status status = AskAll(*workers, absl::StrCat("hold ", 2 * kMiB)); !status.ok()) return status;
    const uint64_t rss = RssBytes(pid);
    const absl::Duration length = absl::Milliseconds(settings.load_ms);
    absl::SleepFor(absl::Seconds(1));  // the clients' first report of held memory
    const double cpu_before = CpuSeconds(pid);
    absl::SleepFor(length);
    const double idle_cpu = CpuSeconds(pid) - cpu_before;

    const double cpu_loaded = CpuSeconds(pid);
    for (const auto& worker : *workers) {
      if (absl::Status status = worker->WriteLine(absl::StrCat("load ", settings.load_ms, " ", kPeriodMs));
          !status.ok()) {
        return status;
      }
    }
    std::vector<double> us;
    for (const auto& worker : *workers) {
      const absl::StatusOr<std::string> answer = worker->ReadLine();
      if (!answer.ok()) return answer.status();
      for (const absl::string_view word : absl::StrSplit(*answer, ' ', absl::SkipEmpty())) {
        double number = 0;
        if (!absl::SimpleAtod(word, &number)) return absl::InternalError(*answer);
        us.push_back(number);
      }
    }
    const double load_cpu = CpuSeconds(pid) - cpu_loaded;
    const double seconds = absl::ToDoubleSeconds(length);
    table.Row({Table::Cell(static_cast<uint64_t>(count)),
               {static_cast<double>(rss) / kMiB, 1},
               {static_cast<double>(rss - rss_before) / 1024 / count, 0},
               {idle_cpu / seconds * 100, 2},
               {static_cast<double>(us.size()) / seconds, 0},
               {load_cpu / seconds * 100, 1},
               {load_cpu * 1e6 / static_cast<double>(us.size()), 0},
               {Quantile(us, 0.5), 0},
               {Quantile(us, 0.99), 0}});
  }
  return absl::OkStatus();
}

absl::Status MeasureDaemonMemory(const Settings& settings, nlohmann::json* json) {
  Table table(json, "daemon_memory", "What the daemon keeps in mind",
              {"held", "RSS before, MiB", "after, MiB", "bytes each"});
  const auto row = [&table](const std::string& held, uint64_t before, uint64_t after, int count) {
    table.Row({held,
               {static_cast<double>(before) / kMiB, 1},
               {static_cast<double>(after) / kMiB, 1},
               {static_cast<double>(after - before) / count, 0}});
  };
  {
    const auto daemon = StartDaemon("8GiB");
    if (!daemon.ok()) return daemon.status();
    absl::StatusOr<RawClient> raw = RawClient::Connect((*daemon)->socket_dir());
    if (!raw.ok()) return raw.status();
    RawStream stream(*raw);
    if (absl::Status status = stream.Hello("blocks").status(); !status.ok()) return status;
    const uint64_t before = RssBytes((*daemon)->pid());
    constexpr int kAtATime = 64;
    for (int done = 0; done < settings.blocks;) {
      int sent = 0;
      for (; sent < kAtATime && done + sent < settings.blocks; ++sent) {
        v1::SessionRequest request;
        request.mutable_allocate()->set_call_id(static_cast<uint64_t>(done + sent + 1));
        request.mutable_allocate()->mutable_request()->set_requested_bytes(512);
        if (!stream.Send(request)) return stream.End();
      }
      for (int i = 0; i < sent; ++i) {
        if (!stream.Receive().has_value()) return stream.End();
      }
      done += sent;
    }
    row(absl::StrCat(settings.blocks, " blocks of 512 B of a remote session"), before, RssBytes((*daemon)->pid()),
        settings.blocks);
  }
  const auto daemon = StartDaemon("256GiB");
  if (!daemon.ok()) return daemon.status();
  absl::StatusOr<Client> client = ConnectTo((*daemon)->socket_dir());
  if (!client.ok()) return client.status();
  const uint64_t before = RssBytes((*daemon)->pid());
  std::vector<void*> held;
  for (int i = 0; i < settings.segments; ++i) {
    const absl::StatusOr<void*> segment = client->LeaseSegment(2 * kMiB);
    if (!segment.ok()) return segment.status();
    held.push_back(*segment);
  }
  row(absl::StrCat(settings.segments, " segments of a leasing session"), before, RssBytes((*daemon)->pid()),
      settings.segments);
  for (void* segment : held) {
    if (absl::Status status = client->ReturnSegment(segment); !status.ok()) return status;
  }
  return absl::OkStatus();
}

}  // namespace vrambroker::bench
