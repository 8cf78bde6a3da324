// SPDX-License-Identifier: Apache-2.0
//
// Requests that the client's cache serves: the cost beside the allocator alone and host allocators, the absence of
// calls, and the cost of brokers without a cache in the client.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "allocator/replay/direct_heap.h"
#include "allocator/replay/simulated_device.h"
#include "tests/bench/fast_path.h"
#include "tests/bench/workload.h"

namespace vrambroker::bench {
namespace {

using Kind = TraceOp::Kind;

[[noreturn]] void Die(const char* what, const absl::Status& status) {
  std::fprintf(stderr, "fast_path_bench: %s: %s\n", what, status.ToString().c_str());
  std::abort();
}

// ---- Ways to allocate: a Slot names what an id of a workload holds ----

struct BareHeap {
  using Slot = Block*;
  void Allocate(const TraceOp& op, Slot& slot) {
    slot = allocator.TryAllocate(op.bytes, op.stream);
    if (slot != nullptr) return;
    const absl::StatusOr<Block*> block = allocator.Allocate(op.bytes, op.stream);
    if (!block.ok()) Die("allocate", block.status());
    slot = *block;
  }
  void Free(Slot& slot) { allocator.Free(std::exchange(slot, nullptr)); }
  static bool Holds(const Slot& slot) { return slot != nullptr; }

  SimulatedDevice device{ReplayConfig::kUnlimitedBytes};
  DirectHeap allocator{&device, &device};
};

struct BufferHeap {
  using Slot = Buffer;
  void Allocate(const TraceOp& op, Slot& slot) {
    absl::StatusOr<Buffer> buffer = client.Allocate(op.bytes, 0, op.stream);
    if (!buffer.ok()) Die("allocate", buffer.status());
    slot = *std::move(buffer);
  }
  static void Free(Slot& slot) { (void)slot.Reset(); }
  static bool Holds(const Slot& slot) { return slot.data() != nullptr; }

  Client& client;
};

struct PointerHeap {
  using Slot = void*;
  void Allocate(const TraceOp& op, Slot& slot) {
    const absl::StatusOr<void*> pointer = client.Malloc(op.bytes, 0, op.stream);
    if (!pointer.ok()) Die("allocate", pointer.status());
    slot = *pointer;
  }
  void Free(Slot& slot) {
    if (absl::Status status = client.Free(std::exchange(slot, nullptr)); !status.ok()) Die("free", status);
  }
  static bool Holds(const Slot& slot) { return slot != nullptr; }

  Client& client;
};

// A first simple broker: a call and a device allocation for each request.
struct SegmentHeap {
  using Slot = void*;
  void Allocate(const TraceOp& op, Slot& slot) {
    const absl::StatusOr<void*> segment = client.LeaseSegment(op.bytes);
    if (!segment.ok()) Die("lease", segment.status());
    slot = *segment;
  }
  void Free(Slot& slot) {
    if (absl::Status status = client.ReturnSegment(std::exchange(slot, nullptr)); !status.ok()) Die("return", status);
  }
  static bool Holds(const Slot& slot) { return slot != nullptr; }

  Client& client;
};

template <typename Heap>
void Perform(const TraceOp* begin, const TraceOp* end, Heap& heap, std::vector<typename Heap::Slot>& slots) {
  for (const TraceOp* op = begin; op != end; ++op) {
    if (op->kind == Kind::kAllocate) {
      heap.Allocate(*op, slots[op->id]);
      asm volatile("" : : "r"(&slots[op->id]) : "memory");
    } else if (Heap::Holds(slots[op->id])) {
      heap.Free(slots[op->id]);
    }
  }
}

template <typename Heap>
void FreeAll(Heap& heap, std::vector<typename Heap::Slot>& slots) {
  for (auto& slot : slots) {
    if (Heap::Holds(slot)) heap.Free(slot);
  }
}

// A heap with the slots of a workload.
template <typename Heap>
struct Measured {
  Heap heap;
  std::vector<typename Heap::Slot> slots;

  void Do(const std::vector<TraceOp>& ops) { Perform(ops.data(), ops.data() + ops.size(), heap, slots); }
  // Processor time of the calling thread.
  double NsPerOp(const std::vector<TraceOp>& ops) {
    const double from = ThreadCpuNs();
    Do(ops);
    return (ThreadCpuNs() - from) / static_cast<double>(ops.size());
  }
};

// A round takes only milliseconds, so the benchmark makes many.
constexpr int kTimesRounds = 5;

// Figures by way, then round.
class Figures {
 public:
  void Add(const std::string& way, double ns) { rounds_[way].push_back(ns); }
  double Best(const std::string& way) { return Quantile(rounds_[way], 0); }
  // Median over the rounds of the ratio between two ways. In one round, both ways have the same machine.
  double Ratio(const std::string& way, const std::string& other) {
    std::vector<double> ratios;
    for (size_t i = 0; i < rounds_[way].size(); ++i) ratios.push_back(rounds_[way][i] / rounds_[other][i]);
    return Quantile(ratios, 0.5);
  }

 private:
  std::map<std::string, std::vector<double>> rounds_;
};

absl::StatusOr<Trace> GoldenTrace(const Settings& settings, const std::string& name) {
  const std::string path = absl::StrCat(settings.golden, "/", name, ".trace");
  absl::StatusOr<Trace> trace = ReadTraceFile(std::filesystem::exists(path) ? path : path + ".gz");
  if (trace.ok()) {
    std::erase_if(trace->ops, [](const TraceOp& op) { return op.kind != Kind::kAllocate && op.kind != Kind::kFree; });
  }
  return trace;
}

// Peak of reserved bytes in PyTorch's own allocator.
absl::StatusOr<uint64_t> RecordedPeak(const Settings& settings, const std::string& name) {
  constexpr size_t kPeakReserved = 5;
  std::ifstream file(settings.golden + "/MANIFEST.csv");
  for (std::string line; std::getline(file, line);) {
    const std::vector<std::string> fields = absl::StrSplit(line, ',');
    uint64_t bytes = 0;
    if (fields[0] == name && fields.size() > kPeakReserved && absl::SimpleAtoi(fields[kPeakReserved], &bytes)) {
      return bytes;
    }
  }
  return absl::NotFoundError(absl::StrCat(name, ": not in MANIFEST.csv"));
}

}  // namespace

absl::Status MeasureHits(const Settings& settings, Peers& peers, nlohmann::json* json) {
  const auto daemon = StartDaemon("64GiB");
  if (!daemon.ok()) return daemon.status();
  absl::StatusOr<Client> client = ConnectTo((*daemon)->socket_dir());
  if (!client.ok()) return client.status();

  std::vector<std::string> columns = {"ns per operation", "allocator alone", "Client, Buffer", "Client, Malloc"};
  for (const auto& [name, process] : peers) columns.push_back(name);
  columns.insert(columns.end(), {"Buffer / alone", "Malloc / alone", "calls to the daemon"});
  Table table(json, "hits", "Hits: an allocation or a free that the cache serves", columns);
  for (const char* name : {"hot_512B", "hot_64KiB", "hot_4MiB", "hot_mixed_1000_blocks"}) {
    const absl::StatusOr<Workload> workload = MakeWorkload(name, settings.golden, static_cast<size_t>(settings.ops));
    if (!workload.ok()) return workload.status();
    Measured<BareHeap> bare{.slots = std::vector<Block*>(workload->ids)};
    Measured<BufferHeap> buffer{.heap = {*client}, .slots = std::vector<Buffer>(workload->ids)};
    Measured<PointerHeap> pointer{.heap = {*client}, .slots = std::vector<void*>(workload->ids)};
    Figures figures;
    uint64_t calls = 0;
    // The client's two ways share a heap, so the benchmark empties the heap between the ways.
    const auto measure = [&](auto& subject, const std::string& way) {
      subject.Do(workload->setup);
      subject.Do(workload->timed);
      const uint64_t before = client->calls();
      figures.Add(way, subject.NsPerOp(workload->timed));
      calls += client->calls() - before;
      FreeAll(subject.heap, subject.slots);
    };
    for (int round = 0; round < kTimesRounds * settings.rounds; ++round) {
      for (int turn = 0; turn < 3; ++turn) {
        switch ((round + turn) % 3) {
          case 0:
            measure(bare, "bare");
            break;
          case 1:
            measure(buffer, "buffer");
            break;
          case 2:
            measure(pointer, "pointer");
            break;
        }
      }
      for (auto& [peer, process] : peers) {
        const absl::StatusOr<Cost> cost = process->Measure(name);
        if (!cost.ok()) return cost.status();
        figures.Add(peer, cost->ns);
      }
    }
    std::vector<Table::Cell> row = {
        name, {figures.Best("bare"), 1}, {figures.Best("buffer"), 1}, {figures.Best("pointer"), 1}};
    for (const auto& [peer, process] : peers) row.emplace_back(figures.Best(peer), 1);
    row.emplace_back(figures.Ratio("buffer", "bare"), 2);
    row.emplace_back(figures.Ratio("pointer", "bare"), 2);
    row.emplace_back(calls);
    table.Row(row);
  }

  Table counted(json, "hit_calls", "Calls to the daemon in hits",
                {"way", "hits", "calls", "s", "daemon's processor time, ms"});
  const auto count = [&](const char* way, auto allocate_and_free) {
    allocate_and_free();
    const uint64_t calls = client->calls();
    const double cpu = CpuSeconds((*daemon)->pid());
    const int64_t from = NowNs();
    for (int i = 0; i < settings.hits; ++i) allocate_and_free();
    counted.Row({way,
                 Table::Cell(static_cast<uint64_t>(settings.hits)),
                 Table::Cell(client->calls() - calls),
                 {static_cast<double>(NowNs() - from) * 1e-9, 3},
                 {(CpuSeconds((*daemon)->pid()) - cpu) * 1e3, 1}});
  };
  count("Buffer", [&] {
    if (const absl::StatusOr<Buffer> buffer = client->Allocate(1 << 20); !buffer.ok()) Die("allocate", buffer.status());
  });
  count("Malloc", [&] {
    const absl::StatusOr<void*> pointer = client->Malloc(1 << 20);
    if (!pointer.ok() || !client->Free(*pointer).ok()) Die("allocate", pointer.status());
  });
  return absl::OkStatus();
}

absl::Status MeasureTraces(const Settings& settings, nlohmann::json* json) {
  const auto daemon = StartDaemon("256GiB");
  if (!daemon.ok()) return daemon.status();
  Table table(json, "traces", "Recorded traces through the client, with a live daemon",
              {"trace", "operations", "calls, first tenth", "calls, the rest", "calls, second lap",
               "peak reserved, MiB", "recorded, MiB", "ns per operation", "allocator alone", "ratio"});
  for (const std::string& name : settings.traces) {
    const absl::StatusOr<Trace> trace = GoldenTrace(settings, name);
    if (!trace.ok()) return trace.status();
    const absl::StatusOr<uint64_t> recorded = RecordedPeak(settings, name);
    if (!recorded.ok()) return recorded.status();
    absl::StatusOr<Client> client = ConnectTo((*daemon)->socket_dir());
    if (!client.ok()) return client.status();
    Measured<BareHeap> bare{.slots = std::vector<Block*>(trace->ids)};
    Measured<BufferHeap> buffer{.heap = {*client}, .slots = std::vector<Buffer>(trace->ids)};
    const TraceOp* const begin = trace->ops.data();
    const TraceOp* const end = begin + trace->ops.size();
    const TraceOp* const tenth = begin + trace->ops.size() / 10;
    const uint64_t calls_before = client->calls();
    Perform(begin, tenth, buffer.heap, buffer.slots);
    const uint64_t calls_first = client->calls();
    Perform(tenth, end, buffer.heap, buffer.slots);
    const uint64_t calls_rest = client->calls();
    const absl::StatusOr<MemoryStats> stats = client->GetMemoryStats();
    if (!stats.ok()) return stats.status();
    FreeAll(buffer.heap, buffer.slots);
    buffer.Do(trace->ops);
    const uint64_t calls_second = client->calls();
    FreeAll(buffer.heap, buffer.slots);
    bare.Do(trace->ops);
    FreeAll(bare.heap, bare.slots);
    Figures figures;
    for (int round = 0; round < kTimesRounds * settings.rounds; ++round) {
      for (const bool first : {round % 2 == 0, round % 2 != 0}) {
        if (first) {
          figures.Add("bare", bare.NsPerOp(trace->ops));
          FreeAll(bare.heap, bare.slots);
        } else {
          figures.Add("buffer", buffer.NsPerOp(trace->ops));
          FreeAll(buffer.heap, buffer.slots);
        }
      }
    }
    table.Row({name,
               Table::Cell(static_cast<uint64_t>(trace->ops.size())),
               Table::Cell(calls_first - calls_before),
               Table::Cell(calls_rest - calls_first),
               Table::Cell(calls_second - calls_rest),
               {static_cast<double>(stats->reserved_bytes.all.peak) / (1 << 20), 0},
               {static_cast<double>(*recorded) / (1 << 20), 0},
               {figures.Best("buffer"), 1},
               {figures.Best("bare"), 1},
               {figures.Ratio("buffer", "bare"), 2}});
    if (stats->reserved_bytes.all.peak != *recorded) {
      return absl::InternalError(
          absl::StrCat(name, ": reserved ", stats->reserved_bytes.all.peak, " bytes, not ", *recorded, " as recorded"));
    }
  }
  return absl::OkStatus();
}

absl::Status MeasureNaive(const Settings& settings, nlohmann::json* json) {
  const auto daemon = StartDaemon("256GiB");
  if (!daemon.ok()) return daemon.status();
  Table table(
      json, "naive", "Against a broker with a call for each request",
      {"workload", "way", "us per operation", "times the client's", "calls per 1000 operations", "peak reserved, MiB"});
  std::vector<std::string> names = {"hot_64KiB", "hot_4MiB"};
  names.insert(names.end(), settings.traces.begin(), settings.traces.end());
  for (const std::string& name : names) {
    absl::StatusOr<Workload> workload = MakeWorkload(name, settings.golden, static_cast<size_t>(settings.ops));
    if (!workload.ok()) return workload.status();
    // Calls take a hundred times as long as hits, so the benchmark runs only a part of the operations.
    const size_t limit = static_cast<size_t>(settings.ops) / 10;
    std::vector<TraceOp>& ops = workload->timed;
    if (ops.size() > limit) ops.resize(limit);
    double client_us = 0;
    const auto measure = [&](const char* way, auto make_heap, Placement placement) -> absl::Status {
      absl::StatusOr<Client> client = ConnectTo((*daemon)->socket_dir(), placement);
      if (!client.ok()) return client.status();
      auto heap = make_heap(*client);
      std::vector<typename decltype(heap)::Slot> slots(workload->ids);
      std::vector<double> us;
      uint64_t calls = 0;
      for (int round = 0; round < 4; ++round) {  // the first round fills the caches
        const uint64_t calls_before = client->calls();
        const int64_t from = NowNs();
        Perform(ops.data(), ops.data() + ops.size(), heap, slots);
        if (round > 0) us.push_back(static_cast<double>(NowNs() - from) * 1e-3 / static_cast<double>(ops.size()));
        calls = client->calls() - calls_before;
        FreeAll(heap, slots);
      }
      const absl::StatusOr<MemoryStats> stats = client->GetMemoryStats();
      if (!stats.ok()) return stats.status();
      const double best = *std::min_element(us.begin(), us.end());
      if (client_us == 0) client_us = best;
      table.Row({name,
                 way,
                 {best, 3},
                 {best / client_us, 0},
                 {static_cast<double>(calls) * 1e3 / static_cast<double>(ops.size()), 0},
                 {static_cast<double>(stats->reserved_bytes.all.peak) / (1 << 20), 0}});
      return absl::OkStatus();
    };
    absl::Status status = measure(
        "client, leased", [](Client& client) { return BufferHeap{client}; }, Placement::kLeased);
    if (status.ok()) {
      status = measure(
          "a call each, cached by the daemon", [](Client& client) { return BufferHeap{client}; }, Placement::kRemote);
    }
    if (status.ok()) {
      status = measure(
          "a segment each", [](Client& client) { return SegmentHeap{client}; }, Placement::kLeased);
    }
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

}  // namespace vrambroker::bench
