// SPDX-License-Identifier: Apache-2.0
//
// Many leasing clients at once, through every event that can happen to clients: the program checks that no byte is
// lost, and that the daemon gets all memory back.
//
// The first part: worker processes with a few threads each replay recorded traces, scaled down. A thread verifies the
// written bytes of a block before the thread frees the block. Meanwhile the parent trims, limits, records and looks at
// sessions, and kills and replaces workers. The second part: clients start, allocate, and end in every way, again and
// again. Each time the daemon gives all memory back to the device once the decay time is over.
//
// Exit codes: 0 for success, 1 for a failure. Exit codes of workers: 3 for other bytes than were written, 4 for an
// unexplained error.
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/flags/usage.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "allocator/replay/trace.h"
#include "client/vrambroker/client.h"
#include "tests/support/child_process.h"
#include "tests/support/daemon_process.h"
#include "tests/support/marks.h"
#include "tests/support/paths.h"
#include "tests/support/raw_client.h"
#include "tests/support/shared_counters.h"
#include "tests/support/util.h"

ABSL_FLAG(int, seconds, 60, "How long the first part takes.");
ABSL_FLAG(int, cycles, 100, "How often clients start and end in the second part.");
ABSL_FLAG(int, workers, 8, "Processes at a time.");
ABSL_FLAG(int, threads, 4, "Threads of each.");
ABSL_FLAG(uint64_t, seed, 1, "Of everything that is random.");
ABSL_FLAG(std::string, worker, "", "Internal: replay, tidy, abrupt or churning.");
ABSL_FLAG(std::string, socket_dir, "", "Internal: of the daemon.");
ABSL_FLAG(std::string, counters, "", "Internal: file of the counters that all workers share.");

namespace vrambroker::testing_support {
namespace {

constexpr const char* kTraces[] = {"resnet50_b64", "gpt2_124m", "llm_serving", "two_stream_overlap",
                                   "rand_streams_10k"};
// Divisors of real sizes: the written pages then fit any machine.
constexpr uint64_t kScales[] = {16, 64, 256};
constexpr uint64_t kCapacity = uint64_t{2} << 30;
constexpr absl::Duration kDecay = absl::Milliseconds(100);

// Counters in memory that all processes share: the counts of a killed worker are not lost.
struct Counters {
  std::atomic<bool> stop{false};
  std::atomic<uint64_t> allocated{0};
  std::atomic<uint64_t> refused{0};
  std::atomic<uint64_t> verified_blocks{0};
  std::atomic<uint64_t> verified_bytes{0};
  std::atomic<uint64_t> wrong_blocks{0};
  std::atomic<uint64_t> whole_segments{0};
};

// Ends the process if the block has other bytes than were written. `marked`: the return value of Mark().
void Verify(const void* block, uint64_t bytes, uint64_t key, uint64_t marked, Counters& counters) {
  if (const std::optional<uint64_t> wrong = FindOtherBytes(block, bytes, key)) {
    ++counters.wrong_blocks;
    std::fprintf(stderr, "block %p of %llu bytes, key %llx: other bytes than were written at %llu\n", block,
                 static_cast<unsigned long long>(bytes), static_cast<unsigned long long>(key),
                 static_cast<unsigned long long>(*wrong));
    std::fflush(stderr);
    _exit(3);
  }
  counters.verified_blocks.fetch_add(1, std::memory_order_relaxed);
  counters.verified_bytes.fetch_add(marked, std::memory_order_relaxed);
}

[[noreturn]] void Unexplained(const char* what, const absl::Status& status) {
  std::fprintf(stderr, "%s: %s\n", what, status.ToString().c_str());
  std::fflush(stderr);
  _exit(4);
}

void Expect(const char* what, const absl::Status& status) {
  if (!status.ok()) Unexplained(what, status);
}

// ---- A worker of the first part ----

// Replays a trace over and over, in a thread of a worker.
class Replayer {
 public:
  Replayer(Client& client, Counters& counters, const Trace& trace, uint64_t seed)
      : client_(client), counters_(counters), trace_(trace), random_(seed), key_(seed << 32), held_(trace.ids) {}

  void Run() {
    while (!counters_.stop) {
      scale_ = kScales[random_() % std::size(kScales)];
      by_pointer_ = random_() % 2 == 0;
      for (const TraceOp& op : trace_.ops) {
        if (counters_.stop) break;
        Do(op);
        if (random_() % 4096 == 0) DoSomethingElse();
      }
      for (Held& held : held_) Free(held);
    }
  }

 private:
  struct Held {
    Buffer buffer;
    void* pointer = nullptr;  // memory of Malloc(), or of `buffer`
    bool plain = false;
    uint64_t bytes = 0;
    uint64_t key = 0;
    uint64_t marked = 0;  // number of bytes that Mark() has written
    Stream last_stream = 0;
  };

  void Do(const TraceOp& op) {
    switch (op.kind) {
      case TraceOp::Kind::kAllocate:
        Free(held_[op.id]);
        Allocate(op, held_[op.id]);
        break;
      case TraceOp::Kind::kFree:
        Free(held_[op.id]);
        break;
      case TraceOp::Kind::kRecordStream: {
        Held& held = held_[op.id];
        if (held.pointer == nullptr) break;
        Expect("RecordStream",
               held.plain ? client_.RecordStream(held.pointer, op.stream) : held.buffer.RecordStream(op.stream));
        break;
      }
      default:  // the host device has nothing to wait for, and the cache is emptied at random
        break;
    }
  }

  void Allocate(const TraceOp& op, Held& held) {
    const uint64_t bytes = std::max<uint64_t>(1, op.bytes / scale_);
    absl::Status status;
    if (by_pointer_) {
      absl::StatusOr<void*> pointer = client_.Malloc(bytes, 0, op.stream);
      status = pointer.status();
      if (pointer.ok()) held.pointer = *pointer;
    } else {
      absl::StatusOr<Buffer> buffer = client_.Allocate(bytes, 0, op.stream);
      status = buffer.status();
      if (buffer.ok()) {
        held.buffer = *std::move(buffer);
        held.pointer = held.buffer.data();
      }
    }
    if (!status.ok()) {
      if (!absl::IsResourceExhausted(status)) Unexplained("an allocation", status);
      counters_.refused.fetch_add(1, std::memory_order_relaxed);
      return;
    }
    counters_.allocated.fetch_add(1, std::memory_order_relaxed);
    held.plain = by_pointer_;
    held.bytes = bytes;
    held.key = ++key_ * 0x1'0000'0001;
    held.last_stream = op.stream;
    held.marked = Mark(held.pointer, bytes, held.key);
  }

  void Free(Held& held) {
    if (held.pointer == nullptr) return;
    Verify(held.pointer, held.bytes, held.key, held.marked, counters_);
    if (held.plain) {
      Expect("Free", random_() % 8 == 0 ? client_.Free(held.pointer, held.last_stream) : client_.Free(held.pointer));
    } else {
      Expect("Reset", held.buffer.Reset());
    }
    held.pointer = nullptr;
  }

  void DoSomethingElse() {
    switch (random_() % 5) {
      case 0:
        Expect("EmptyCache", client_.EmptyCache().status());
        break;
      case 1:
        Expect("GetMemoryStats", client_.GetMemoryStats().status());
        break;
      case 2: {
        int other = 0;
        if (client_.Free(&other).ok()) Unexplained("Free", absl::InternalError("it took what is not its own"));
        break;
      }
      default: {
        const uint64_t bytes = (1 + random_() % 16) << 20;
        const absl::StatusOr<void*> segment = client_.LeaseSegment(bytes);
        if (absl::IsResourceExhausted(segment.status())) break;
        Expect("LeaseSegment", segment.status());
        const uint64_t key = ++key_ * 0x1'0000'0001;
        const uint64_t marked = Mark(*segment, bytes, key);
        std::this_thread::yield();
        Verify(*segment, bytes, key, marked, counters_);
        Expect("ReturnSegment", client_.ReturnSegment(*segment));
        counters_.whole_segments.fetch_add(1, std::memory_order_relaxed);
      }
    }
  }

  Client& client_;
  Counters& counters_;
  const Trace& trace_;
  std::mt19937_64 random_;
  uint64_t key_;
  std::vector<Held> held_;  // blocks by id
  uint64_t scale_ = 1;
  bool by_pointer_ = false;
};

absl::StatusOr<Client> Connect(absl::Duration idle_decay) {
  return Client::Connect({.socket_dir = absl::GetFlag(FLAGS_socket_dir),
                          .name = "stress",
                          .alloc_conf = "",
                          .idle_decay = idle_decay,
                          .connect_timeout = kPatience,
                          .call_timeout = kPatience});
}

int ReplayTraces(Counters& counters) {
  const uint64_t seed = absl::GetFlag(FLAGS_seed);
  std::vector<Trace> traces;
  for (int i = 0; i < absl::GetFlag(FLAGS_threads); ++i) {
    const char* name = kTraces[(seed + static_cast<uint64_t>(i)) % std::size(kTraces)];
    absl::StatusOr<Trace> trace = ReadTraceFile(absl::StrCat(paths::kGoldenDir, "/", name, ".trace.gz"));
    Expect(name, trace.status());
    traces.push_back(*std::move(trace));
  }
  const bool decays = seed % 2 == 0;
  absl::StatusOr<Client> client = Connect(decays ? kDecay : absl::InfiniteDuration());
  Expect("Connect", client.status());
  std::vector<std::thread> threads;
  for (size_t i = 0; i < traces.size(); ++i) {
    threads.emplace_back([&, i] { Replayer(*client, counters, traces[i], seed * 16 + i).Run(); });
  }
  for (std::thread& thread : threads) thread.join();
  const absl::StatusOr<MemoryStats> stats = client->GetMemoryStats();
  Expect("GetMemoryStats", stats.status());
  if (stats->allocation.all.current != 0 || stats->allocated_bytes.all.current != 0) {
    Unexplained("at the end", absl::InternalError(absl::StrCat(stats->allocation.all.current, " blocks are left")));
  }
  return 0;
}

// ---- A worker of the second part ----

int AllocateAndEnd(Counters& counters, const std::string& how) {
  absl::StatusOr<Client> client = Connect(absl::InfiniteDuration());
  Expect("Connect", client.status());
  std::mt19937_64 random(absl::GetFlag(FLAGS_seed));
  std::vector<Buffer> buffers(20);
  bool told = false;
  do {
    for (Buffer& buffer : buffers) {
      absl::StatusOr<Buffer> got = client->Allocate(1 + random() % (uint64_t{1} << (9 + random() % 16)));
      Expect("Allocate", got.status());
      Mark(got->data(), got->size(), random());
      counters.allocated.fetch_add(1, std::memory_order_relaxed);
      buffer = *std::move(got);
    }
    if (!std::exchange(told, true)) {
      std::printf("ready\n");
      std::fflush(stdout);
    }
    if (how == "churning") Expect("EmptyCache", client->EmptyCache().status());
  } while (how == "churning");  // the parent kills the process
  if (how == "abrupt") _exit(0);
  return 0;
}

// ---- The parent ----

class Stress {
 public:
  bool Run() {
    counters_path_ = MakeTempDir() + "/counters";
    counters_ = MapCounters<Counters>(counters_path_);
    DaemonOptions options;
    options.capacity = absl::StrCat(kCapacity);
    options.config = absl::StrCat("idle_decay: \"", absl::FormatDuration(kDecay), "\"\n");
    absl::StatusOr<std::unique_ptr<DaemonProcess>> daemon = DaemonProcess::Start(options);
    if (!daemon.ok()) return Fail(daemon.status().ToString());
    daemon_ = *std::move(daemon);
    absl::StatusOr<RawClient> admin = RawClient::Connect(daemon_->socket_dir());
    if (!admin.ok()) return Fail(admin.status().ToString());
    admin_ = std::make_unique<RawClient>(*std::move(admin));

    bool well = Replay();
    well = well && Cycle();
    admin_.reset();
    const absl::StatusOr<int> code = daemon_->Stop();
    if (!code.ok() || *code != 0) well = Fail(absl::StrCat("the daemon ended with ", code.value_or(-1)));
    if (!well) std::fprintf(stderr, "---- the daemon's log ----\n%s----\n", daemon_->log().c_str());
    return well;
  }

 private:
  using Worker = std::unique_ptr<ChildProcess>;

  static bool Fail(const std::string& why) {
    std::fprintf(stderr, "fast_path_stress: %s\n", why.c_str());
    return false;
  }

  absl::StatusOr<Worker> Start(const std::string& how) {
    return ChildProcess::Start(
        {"/proc/self/exe", absl::StrCat("--worker=", how), absl::StrCat("--socket_dir=", daemon_->socket_dir()),
         absl::StrCat("--counters=", counters_path_), absl::StrCat("--threads=", absl::GetFlag(FLAGS_threads)),
         absl::StrCat("--seed=", absl::GetFlag(FLAGS_seed) + started_++)});
  }

  bool Replay() {
    std::vector<Worker> workers;
    while (workers.size() < static_cast<size_t>(absl::GetFlag(FLAGS_workers))) {
      absl::StatusOr<Worker> worker = Start("replay");
      if (!worker.ok()) return Fail(worker.status().ToString());
      workers.push_back(*std::move(worker));
    }
    std::mt19937_64 random(absl::GetFlag(FLAGS_seed));
    const absl::Time begin = absl::Now();
    const absl::Time end = begin + absl::Seconds(absl::GetFlag(FLAGS_seconds));
    absl::Time next_kill = begin;
    int kills = 0;
    while (absl::Now() < end) {
      absl::SleepFor(absl::Milliseconds(random() % 20));
      if (!Disturb(random)) return false;
      for (const Worker& worker : workers) {
        if (!worker->Running()) return EndedBy(*worker);
      }
      if (absl::Now() < next_kill) continue;
      next_kill = absl::Now() + absl::Milliseconds(300 + random() % 500);
      Worker& worker = workers[random() % workers.size()];
      worker->Signal(SIGKILL);
      (void)worker->Wait();
      ++kills;
      absl::StatusOr<Worker> next = Start("replay");
      if (!next.ok()) return Fail(next.status().ToString());
      worker = *std::move(next);
    }
    counters_->stop = true;
    for (const Worker& worker : workers) {
      if (worker->Wait().value_or(-1) != 0) return EndedBy(*worker);
    }
    const absl::StatusOr<absl::Duration> emptied = WaitUntilEmpty();
    std::printf(
        "%s of replays: %llu blocks allocated, %llu verified (%llu bytes), %llu wrong, %llu refused for lack of "
        "memory, %llu whole segments; %d workers killed\n",
        absl::FormatDuration(absl::Seconds(absl::GetFlag(FLAGS_seconds))).c_str(), Count(counters_->allocated),
        Count(counters_->verified_blocks), Count(counters_->verified_bytes), Count(counters_->wrong_blocks),
        Count(counters_->refused), Count(counters_->whole_segments), kills);
    for (const auto& [what, count] : done_) std::printf("  %s: %d\n", what.c_str(), count);
    if (!emptied.ok()) return Fail(emptied.status().ToString());
    std::printf("  nothing reserved %s after the last exit\n", absl::FormatDuration(*emptied).c_str());
    std::fflush(stdout);
    return counters_->wrong_blocks == 0;
  }

  // Does what operators do, to a session that may have ended by then.
  bool Disturb(std::mt19937_64& random) {
    const absl::StatusOr<v1::ListSessionsResponse> list = admin_->ListSessions();
    if (!list.ok()) return Fail(list.status().ToString());
    if (list->sessions().empty()) return true;
    const v1::SessionRef session =
        Ref(list->sessions(static_cast<int>(random() % static_cast<uint64_t>(list->sessions_size()))).id());
    const char* what = "";
    absl::Status status;
    switch (random() % 8) {
      case 0:
      case 1:
      case 2:
        what = "trim";
        status = admin_->TrimSession(session).status();
        break;
      case 3:
        what = "limit";
        status = admin_->SetLimit(session, BytesLimit(uint64_t{64} << (20 + random() % 5))).status();
        break;
      case 4:
        what = "no limit";
        status = admin_->SetLimit(session, FractionLimit(1.0)).status();
        break;
      case 5:
        what = "record";
        status = admin_->SetRecording(session, random() % 2 == 0 ? 0 : 2000);
        break;
      case 6:
        what = "snapshot";
        status = admin_->GetSnapshot(session, 0).status();
        break;
      case 7:
        what = "show";
        status = admin_->GetSession(session).status();
        break;
    }
    ++done_[absl::StrCat(what, status.ok() ? "" : absl::StrCat(", ", absl::StatusCodeToString(status.code())))];
    // The session has ended, or the daemon has not yet seen to the session's process.
    if (status.ok() || absl::IsNotFound(status) || absl::IsAborted(status) || absl::IsFailedPrecondition(status) ||
        absl::IsUnavailable(status)) {
      return true;
    }
    return Fail(absl::StrCat(what, ": ", status.ToString()));
  }

  bool Cycle() {
    absl::Duration longest;
    const absl::Time begin = absl::Now();
    for (int cycle = 0; cycle < absl::GetFlag(FLAGS_cycles); ++cycle) {
      std::vector<Worker> workers;
      for (const char* how : {"tidy", "abrupt", "churning"}) {
        absl::StatusOr<Worker> worker = Start(how);
        if (!worker.ok()) return Fail(worker.status().ToString());
        workers.push_back(*std::move(worker));
      }
      for (const Worker& worker : workers) {
        if (worker->ReadLine().value_or("") != "ready") return EndedBy(*worker);
      }
      workers.back()->Signal(SIGKILL);
      for (const Worker& worker : workers) {
        const int expected = worker == workers.back() ? 128 + SIGKILL : 0;
        if (worker->Wait().value_or(-1) != expected) return EndedBy(*worker);
      }
      const absl::StatusOr<absl::Duration> emptied = WaitUntilEmpty();
      if (!emptied.ok()) return Fail(emptied.status().ToString());
      longest = std::max(longest, *emptied);
    }
    std::printf("%d times 3 clients that started, allocated and ended, in %s: nothing reserved after at most %s\n",
                absl::GetFlag(FLAGS_cycles), absl::FormatDuration(absl::Now() - begin).c_str(),
                absl::FormatDuration(longest).c_str());
    return true;
  }

  // Returns the time until the daemon holds no device memory, no session and no file.
  absl::StatusOr<absl::Duration> WaitUntilEmpty() {
    const absl::Time begin = absl::Now();
    uint64_t reserved = 0;
    int sessions = 0;
    int files = 0;
    const bool empty = WaitFor([&] {
      const absl::StatusOr<v1::Device> device = admin_->GetDevice();
      const absl::StatusOr<v1::ListSessionsResponse> list = admin_->ListSessions();
      if (!device.ok() || !list.ok()) return false;
      reserved = device->reserved_bytes();
      sessions = list->sessions_size();
      files = reserved > 0 ? -1 : SegmentFiles();
      return reserved == 0 && sessions == 0 && files == 0;
    });
    if (empty) return absl::Now() - begin;
    return absl::DeadlineExceededError(
        absl::StrCat(reserved, " bytes stay reserved, ", sessions, " sessions and ", files, " files stay open"));
  }

  int SegmentFiles() const {
    int files = 0;
    std::error_code error;
    for (const auto& entry :
         std::filesystem::directory_iterator(absl::StrCat("/proc/", daemon_->pid(), "/fd"), error)) {
      if (absl::StrContains(std::filesystem::read_symlink(entry, error).string(), "vrambroker-segment")) ++files;
    }
    return files;
  }

  bool EndedBy(ChildProcess& worker) {
    return Fail(absl::StrCat("worker ", worker.pid(), " ended with ", worker.Wait(absl::ZeroDuration()).value_or(-1),
                             "; it wrote:\n", worker.ErrorText()));
  }

  static unsigned long long Count(const std::atomic<uint64_t>& counter) { return counter.load(); }

  std::string counters_path_;
  Counters* counters_ = nullptr;
  std::unique_ptr<DaemonProcess> daemon_;
  std::unique_ptr<RawClient> admin_;
  uint64_t started_ = 0;
  std::map<std::string, int> done_;
};

}  // namespace
}  // namespace vrambroker::testing_support

int main(int argc, char** argv) {
  namespace support = vrambroker::testing_support;
  absl::SetProgramUsageMessage("stresses leasing clients.\n\n  fast_path_stress --seconds=60 --cycles=100");
  absl::ParseCommandLine(argc, argv);
  const std::string how = absl::GetFlag(FLAGS_worker);
  if (how.empty()) return support::Stress().Run() ? 0 : 1;
  support::Counters& counters = *support::MapCounters<support::Counters>(absl::GetFlag(FLAGS_counters));
  return how == "replay" ? support::ReplayTraces(counters) : support::AllocateAndEnd(counters, how);
}
