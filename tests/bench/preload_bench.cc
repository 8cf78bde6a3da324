// SPDX-License-Identifier: Apache-2.0
//
// Measures the cost of libvrambroker-preload.so for a program. The peer is the program without the library, on the same
// driver, in the same round. The benchmark uses two drivers: the substitute, whose calls cost time, and a driver whose
// calls are free.
#include <sys/resource.h>
#include <sys/time.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/flags/usage.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "allocator/base/bytes.h"
#include "tests/bench/fast_path.h"
#include "tests/cuda_substitute/substitute.h"
#include "tests/support/count_client.h"
#include "tests/support/paths.h"
#include "tests/support/raw_client.h"
#include "tests/support/test_device.h"

ABSL_FLAG(int, rounds, 11, "Of each measurement. Figures are medians.");
ABSL_FLAG(int, pairs, 100000, "Small allocations, each freed at once, in a round; of larger ones a tenth.");
ABSL_FLAG(int, calls, 300, "Charges in a round, one after the other.");
ABSL_FLAG(int, starts, 50, "How often /bin/true is started in a round; the longer programs a fifth of it.");
ABSL_FLAG(int, programs, 64, "Programs at once.");
ABSL_FLAG(std::string, json, "", "Where to write the figures, too.");

namespace vrambroker::bench {
namespace {

namespace paths = testing_support::paths;
using testing_support::Arguments;
using testing_support::CountClient;
using testing_support::Environment;

constexpr char kCapacity[] = "64GiB";

double Median(const std::vector<double>& values) {
  return Quantile(values, 0.5);
}

std::string FolderOf(const std::string& file) {
  return file.substr(0, file.rfind('/'));
}

struct Setting {
  const char* driver_name;
  const char* driver;
  bool preloaded;
};

Environment EnvironmentOf(const Setting& setting, const std::string& socket_dir) {
  Environment environment = {{"LD_LIBRARY_PATH", FolderOf(setting.driver)}, {"VRAMBROKER_SOCKET_DIR", socket_dir}};
  if (setting.preloaded) environment.emplace_back("LD_PRELOAD", paths::kPreload);
  return environment;
}

// A running preload_program.c.
class Program {
 public:
  static absl::StatusOr<Program> Start(const Setting& setting, const std::string& socket_dir) {
    absl::StatusOr<std::unique_ptr<ChildProcess>> process =
        ChildProcess::Start({paths::kPreloadBenchProgram}, EnvironmentOf(setting, socket_dir));
    if (!process.ok()) return process.status();
    Program program(*std::move(process));
    if (absl::StatusOr<std::vector<double>> ready = program.Hear(); !ready.ok()) return ready.status();
    return program;
  }

  absl::Status Tell(const std::string& command) { return process_->WriteLine(command); }
  // The numbers after the error in the answer. A driver's error other than `allowed` is a failure.
  absl::StatusOr<std::vector<double>> Hear(int allowed = 0) {
    const absl::StatusOr<std::string> line = process_->ReadLine();
    if (!line.ok()) return absl::InternalError(absl::StrCat(line.status().message(), process_->ErrorText()));
    std::vector<double> numbers;
    for (const absl::string_view word : absl::StrSplit(*line, ' ')) {
      if (double number = 0; absl::SimpleAtod(word, &number)) numbers.push_back(number);
    }
    if (numbers.empty() || (numbers[0] != 0 && numbers[0] != allowed)) {
      return absl::InternalError(
          absl::StrCat("the program answered '", line->substr(0, 100), "'\n", process_->ErrorText()));
    }
    numbers.erase(numbers.begin());
    return numbers;
  }
  absl::StatusOr<std::vector<double>> Ask(const std::string& command, int allowed = 0) {
    if (absl::Status status = Tell(command); !status.ok()) return status;
    return Hear(allowed);
  }
  std::string ErrorText() const { return process_->ErrorText(); }

 private:
  explicit Program(std::unique_ptr<ChildProcess> process) : process_(std::move(process)) {}
  std::unique_ptr<ChildProcess> process_;
};

int Rounds() {
  return std::max(1, absl::GetFlag(FLAGS_rounds));
}

// --- One program ---

// Runs `command` in a program without the library and in a program with the library, in turn.
absl::Status Compare(const std::string& what, const std::string& command, const std::vector<Setting>& settings,
                     const std::string& socket_dir, Table& table) {
  for (size_t i = 0; i + 1 < settings.size(); i += 2) {
    absl::StatusOr<Program> without = Program::Start(settings[i], socket_dir);
    if (!without.ok()) return without.status();
    absl::StatusOr<Program> with = Program::Start(settings[i + 1], socket_dir);
    if (!with.ok()) return with.status();
    std::vector<double> ns_without;
    std::vector<double> ns_with;
    std::vector<double> ratios;
    for (int round = 0; round < Rounds(); ++round) {
      const absl::StatusOr<std::vector<double>> one = without->Ask(command);
      if (!one.ok()) return one.status();
      const absl::StatusOr<std::vector<double>> other = with->Ask(command);
      if (!other.ok()) return other.status();
      ns_without.push_back(one->at(0));
      ns_with.push_back(other->at(0));
      ratios.push_back(ns_with.back() / ns_without.back());
    }
    table.Row({what,
               settings[i].driver_name,
               {Median(ns_without), 1},
               {Median(ns_with), 1},
               {Median(ns_with) - Median(ns_without), 1},
               {Median(ratios), 2}});
  }
  return absl::OkStatus();
}

absl::Status MeasureCalls(const std::vector<Setting>& settings, const DaemonProcess& daemon, nlohmann::json& json) {
  const int pairs = std::max(100, absl::GetFlag(FLAGS_pairs));
  Table table(&json, "pairs", "Calls, ns", {"what", "driver", "without", "with", "added", "ratio"});
  for (const auto& [what, command] : std::vector<std::pair<std::string, std::string>>{
           {"1 KiB, allocated and freed", absl::StrCat("pairs ", pairs, " ", 1_KiB)},
           {"2 MiB, allocated and freed", absl::StrCat("pairs ", pairs / 10, " ", 2_MiB)},
           {"64 MiB, allocated and freed", absl::StrCat("pairs ", pairs / 10, " ", 64_MiB)},
           {"cuMemGetInfo", absl::StrCat("info ", pairs / 10)}}) {
    if (absl::Status status = Compare(what, command, settings, daemon.socket_dir(), table); !status.ok()) return status;
  }
  return absl::OkStatus();
}

void AddTimes(Table& table, const std::string& what, const std::string& driver, const std::vector<double>& ns) {
  table.Row({what,
             driver,
             {Median(ns) / 1e3, 1},
             {Quantile(ns, 0.99) / 1e3, 1},
             {*std::max_element(ns.begin(), ns.end()) / 1e3, 0}});
}

// A program takes 2 MiB again and again, and gives no memory back in between. The daemon charges each 2 MiB.
absl::Status MeasureCharges(const std::vector<Setting>& settings, const DaemonProcess& daemon, nlohmann::json& json) {
  const int calls = std::max(1, absl::GetFlag(FLAGS_calls));
  Table table(&json, "charges", "A charge, us", {"what", "driver", "median", "p99", "longest"});
  {
    absl::StatusOr<CountClient> client = CountClient::Open(daemon.socket_dir(), testing_support::CountHello("bench"));
    if (!client.ok()) return client.status();
    std::vector<double> ns;
    for (int i = 0; i < calls; ++i) {
      const int64_t start = NowNs();
      if (absl::Status status = client->Charge(2_MiB); !status.ok()) return status;
      ns.push_back(static_cast<double>(NowNs() - start));
    }
    if (absl::Status status = client->Uncharge(2_MiB * static_cast<uint64_t>(calls)); !status.ok()) return status;
    AddTimes(table, "the exchange with the daemon, alone", "", ns);
  }
  for (const Setting& setting : settings) {
    absl::StatusOr<Program> program = Program::Start(setting, daemon.socket_dir());
    if (!program.ok()) return program.status();
    std::vector<double> ns;
    for (int round = 0; round < Rounds(); ++round) {
      absl::StatusOr<std::vector<double>> took = program->Ask(absl::StrCat("calls ", calls, " ", 2_MiB));
      if (!took.ok()) return took.status();
      // The first call starts the thread that looks after the session.
      ns.insert(ns.end(), took->begin() + (round == 0 ? 1 : 0), took->end());
    }
    AddTimes(table, setting.preloaded ? "cuMemAlloc of 2 MiB" : "without the library", setting.driver_name, ns);
  }
  std::vector<double> first;
  for (int round = 0; round < Rounds() * 5; ++round) {
    absl::StatusOr<Program> program = Program::Start(settings.back(), daemon.socket_dir());
    if (!program.ok()) return program.status();
    absl::StatusOr<std::vector<double>> took = program->Ask(absl::StrCat("first ", 2_MiB));
    if (!took.ok()) return took.status();
    first.push_back(took->at(0));
  }
  AddTimes(table, "a process's first context and cuMemAlloc", settings.back().driver_name, first);
  return absl::OkStatus();
}

// --- Programs that never allocate ---

// Processor time of all ended programs. Unlike wall time, processor time stays the same on a busy machine.
double ChildrenCpuMs() {
  rusage usage = {};
  getrusage(RUSAGE_CHILDREN, &usage);
  const auto ms = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) * 1e3 + static_cast<double>(time.tv_usec) / 1e3;
  };
  return ms(usage.ru_utime) + ms(usage.ru_stime);
}

absl::Status MeasureStarts(const std::vector<Setting>& settings, const DaemonProcess& daemon, nlohmann::json& json) {
  Table table(&json, "starts", "Programs that never allocate: processor time of one, ms",
              {"program", "without", "with", "added", "ratio"});
  for (const auto& [what, arguments] : std::vector<std::pair<std::string, Arguments>>{
           {"/bin/true", {"/bin/true"}},
           {"sh, 20,000 steps", {"/bin/sh", "-c", "i=0; while [ $i -lt 20000 ]; do i=$((i+1)); done"}},
           {"python3, 5 imports", {paths::kPython, "-c", "import ctypes, json, ssl, decimal, sqlite3"}}}) {
    const int starts = std::max(1, absl::GetFlag(FLAGS_starts) / (arguments.size() > 1 ? 5 : 1));
    std::vector<double> ms_without;
    std::vector<double> ms_with;
    std::vector<double> ratios;
    for (int round = 0; round < Rounds(); ++round) {
      double ms[2];
      for (const size_t i : {size_t{0}, size_t{1}}) {
        const double start = ChildrenCpuMs();
        for (int each = 0; each < starts; ++each) {
          const testing_support::RunResult result =
              testing_support::RunProgram(arguments, EnvironmentOf(settings[i], daemon.socket_dir()));
          if (result.exit_code != 0 || !result.err.empty()) {
            return absl::InternalError(absl::StrCat(what, " ended with ", result.exit_code, ": ", result.err));
          }
        }
        ms[i] = (ChildrenCpuMs() - start) / starts;
      }
      ms_without.push_back(ms[0]);
      ms_with.push_back(ms[1]);
      ratios.push_back(ms[1] / ms[0]);
    }
    table.Row({what,
               {Median(ms_without), 2},
               {Median(ms_with), 2},
               {Median(ms_with) - Median(ms_without), 2},
               {Median(ratios), 2}});
  }
  return absl::OkStatus();
}

// --- Many programs ---

// Watches the memory in use on the machine all the time, and keeps the peak.
class Watch {
 public:
  explicit Watch(std::string machine)
      : machine_(std::move(machine)), thread_([this] {
          while (!stopped_.load()) {
            peak_ = std::max(peak_, cuda_substitute::UsedBytes(machine_, 0));
            ++looks_;
          }
        }) {}
  ~Watch() { Stop(); }
  void Stop() {
    if (!thread_.joinable()) return;
    stopped_ = true;
    thread_.join();
  }
  uint64_t peak() const { return peak_; }
  uint64_t looks() const { return looks_; }

 private:
  const std::string machine_;
  std::atomic<bool> stopped_ = false;
  uint64_t peak_ = 0;
  uint64_t looks_ = 0;
  std::thread thread_;
};

absl::StatusOr<std::string> MakeClaim(const DaemonProcess& daemon, const std::string& name, uint64_t limit) {
  absl::StatusOr<testing_support::RawClient> raw = testing_support::RawClient::Connect(daemon.socket_dir());
  if (!raw.ok()) return raw.status();
  v1::CreateClaimRequest request;
  request.set_name(name);
  request.mutable_terms()->mutable_limit()->set_bytes(limit);
  v1::CreateClaimResponse response;
  absl::Status status =
      testing_support::RawClient::Call(raw->admin(), &v1::Admin::Stub::CreateClaim, request, &response);
  if (!status.ok()) return status;
  return absl::StrCat(daemon.socket_dir(), "/claims/", name);
}

// All programs run in one claim, with room for half of the wanted memory.
absl::Status MeasureMany(const Setting& setting, const std::string& machine, const DaemonProcess& daemon,
                         nlohmann::json& json) {
  const int most = std::max(1, absl::GetFlag(FLAGS_programs));
  Table table(&json, "many", "Programs at once, in a claim with room for half of what they want",
              {"programs", "limit, MiB", "held, MiB", "of it on the GPU, MiB", "the most there, MiB", "looks",
               "filled, ms", "then pairs of 48 MiB a second", "refused, of 200 each"});
  for (const int count : std::vector<int>{1, most}) {
    const uint64_t limit = 48_MiB * static_cast<uint64_t>(std::max(1, count / 2));
    const uint64_t wanted = 2 * limit / static_cast<uint64_t>(count);
    const absl::StatusOr<std::string> claim = MakeClaim(daemon, absl::StrCat("bench-", count), limit);
    if (!claim.ok()) return claim.status();
    std::vector<Program> programs;
    for (int i = 0; i < count; ++i) {
      absl::StatusOr<Program> program = Program::Start(setting, *claim);
      if (!program.ok()) return program.status();
      programs.push_back(*std::move(program));
    }
    Watch watch(machine);
    int64_t start = NowNs();
    for (Program& program : programs) {
      if (absl::Status status = program.Tell(absl::StrCat("hold ", wanted, " ", 2_MiB)); !status.ok()) return status;
    }
    uint64_t held = 0;
    for (Program& program : programs) {
      const absl::StatusOr<std::vector<double>> answer = program.Hear(/*allowed=*/2);
      if (!answer.ok()) return answer.status();
      held += static_cast<uint64_t>(answer->at(0));
    }
    const double filled_ms = static_cast<double>(NowNs() - start) / 1e6;
    const uint64_t on_gpu = cuda_substitute::UsedBytes(machine, 0);
    for (Program& program : programs) {
      if (absl::StatusOr<std::vector<double>> answer = program.Ask("release"); !answer.ok()) return answer.status();
    }
    constexpr int kTimes = 200;
    start = NowNs();
    for (Program& program : programs) {
      if (absl::Status status = program.Tell(absl::StrCat("churn ", kTimes, " ", 48_MiB)); !status.ok()) return status;
    }
    double had = 0;
    for (Program& program : programs) {
      const absl::StatusOr<std::vector<double>> answer = program.Hear();
      if (!answer.ok()) return answer.status();
      had += answer->at(0);
    }
    const double seconds = static_cast<double>(NowNs() - start) / 1e9;
    watch.Stop();
    if (watch.peak() > limit) {
      return absl::InternalError(absl::StrCat(count, " programs held ", watch.peak(), " bytes; the limit is ", limit));
    }
    if (on_gpu != held) {
      return absl::InternalError(
          absl::StrCat(count, " programs hold ", held, " bytes; the GPU has ", on_gpu, " in use"));
    }
    if (held != limit) {
      return absl::InternalError(absl::StrCat(count, " programs got ", held, " bytes; the limit is ", limit));
    }
    table.Row({Table::Cell(static_cast<uint64_t>(count)),
               Table::Cell(limit / 1_MiB),
               Table::Cell(held / 1_MiB),
               Table::Cell(on_gpu / 1_MiB),
               Table::Cell(watch.peak() / 1_MiB),
               Table::Cell(watch.looks()),
               {filled_ms, 1},
               {had / seconds, 0},
               {static_cast<double>(kTimes) * count - had, 0}});
  }
  return absl::OkStatus();
}

absl::Status Main(nlohmann::json& json) {
  setenv("VRAMBROKER_TEST_DEVICE", "substitute", 1);
  std::string machine;
  testing_support::OnSubstitute(&machine);
  absl::StatusOr<std::unique_ptr<DaemonProcess>> daemon =
      DaemonProcess::Start({.capacity = kCapacity, .devices = testing_support::kSubstituteDevices});
  if (!daemon.ok()) return daemon.status();
  const std::vector<Setting> settings = {{"substitute", paths::kPlainCudaSubstitute, false},
                                         {"substitute", paths::kPlainCudaSubstitute, true},
                                         {"empty", paths::kEmptyDriver, false},
                                         {"empty", paths::kEmptyDriver, true}};
  if (absl::Status status = MeasureCharges(settings, **daemon, json); !status.ok()) return status;
  if (absl::Status status = MeasureCalls(settings, **daemon, json); !status.ok()) return status;
  if (absl::Status status = MeasureStarts(settings, **daemon, json); !status.ok()) return status;
  return MeasureMany(settings[1], machine, **daemon, json);
}

}  // namespace
}  // namespace vrambroker::bench

int main(int argc, char** argv) {
  absl::SetProgramUsageMessage("what libvrambroker-preload.so costs programs");
  absl::ParseCommandLine(argc, argv);
  nlohmann::json json;
  if (const absl::Status status = vrambroker::bench::Main(json); !status.ok()) {
    std::fprintf(stderr, "preload_bench: %s\n", std::string(status.message()).c_str());
    return 1;
  }
  if (const std::string path = absl::GetFlag(FLAGS_json); !path.empty()) std::ofstream(path) << json.dump(2) << "\n";
  return 0;
}
