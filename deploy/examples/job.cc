// SPDX-License-Identifier: Apache-2.0
//
// Allocates and frees memory as directed by standard input, writes and verifies every byte, and prints a timeline line
// for each action. For the scripts in this folder.
//
//   take COUNT SIZE   COUNT tensors of SIZE each, requested in sequence; stops at the first refusal
//   drop COUNT        frees the newest COUNT tensors: their memory stays in the job's own cache
//   verify            checks every byte held
//
// Exits at the end of input: with 0, or 1 when bytes were wrong.
#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdio>
#include <iostream>
#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "allocator/base/bytes.h"
#include "allocator/base/command_line.h"
#include "vrambroker/client.h"

namespace {

struct Flags {
  std::string name = "job";
  int wait_seconds = 0;
  int64_t began_ms = 0;
};
Flags& flags() {
  static Flags values;
  return values;
}

using vrambroker::Buffer;
using vrambroker::Client;
using vrambroker::FormatBytes;

// Words of 8 bytes, different for each tensor and index.
uint64_t Word(uint64_t tensor, uint64_t index) {
  return (tensor << 40) ^ (index * 0x9E3779B97F4A7C15u);
}

class Job {
 public:
  explicit Job(Client client) : client_(std::move(client)) {}

  // False when bytes were wrong.
  bool Do(const std::string& line) {
    std::istringstream words(line);
    std::string command;
    uint64_t count = 0;
    std::string size;
    words >> command >> count >> size;
    if (command == "take") Take(count, size);
    if (command == "drop") Drop(count);
    return command != "verify" || Verify();
  }

  void Say(const std::string& text) const {
    const double seconds = static_cast<double>(absl::ToUnixMillis(absl::Now()) - flags().began_ms) / 1000;
    std::printf("  %6.2f s  %-10s %s\n", seconds, flags().name.c_str(), text.c_str());
    std::fflush(stdout);
  }

 private:
  struct Tensor {
    uint64_t number = 0;
    Buffer buffer;
  };

  void Take(uint64_t count, const std::string& size) {
    const uint64_t bytes = vrambroker::ParseBytes(size).value_or(0);
    Say("asks for " + FormatBytes(count * bytes));
    absl::Duration longest;  // of a single request, without the writing
    for (uint64_t i = 0; i < count; ++i) {
      const absl::Time began = absl::Now();
      absl::StatusOr<Buffer> buffer = client_.Allocate(bytes);
      longest = std::max(longest, absl::Now() - began);
      if (!buffer.ok()) return Refused(buffer.status(), i * bytes);
      auto* words = static_cast<uint64_t*>(buffer->data());
      ++number_;
      for (uint64_t k = 0; k < bytes / sizeof(uint64_t); ++k) words[k] = Word(number_, k);
      tensors_.push_back({.number = number_, .buffer = *std::move(buffer)});
    }
    Say("got it; its longest request took " + FormatMs(longest) + "; " + Holds());
  }

  void Refused(const absl::Status& status, uint64_t got) const {
    Say("REFUSED after " + FormatBytes(got) + ": " + std::string(status.message()));
    const auto oom = vrambroker::GetOutOfMemory(status);
    if (!oom.has_value()) return;
    Say(std::string("cause ") + vrambroker::OutOfMemoryCauseName(oom->cause) + ", while others hold " +
        FormatBytes(oom->idle_elsewhere_bytes) + " unused");
  }

  void Drop(uint64_t count) {
    while (count-- > 0 && !tensors_.empty()) tensors_.pop_back();
    Say("freed some of it, and keeps that for later; " + Holds());
  }

  bool Verify() const {
    uint64_t bytes = 0;
    for (const Tensor& tensor : tensors_) {
      const auto* words = static_cast<const uint64_t*>(tensor.buffer.data());
      for (uint64_t k = 0; k < tensor.buffer.size() / sizeof(uint64_t); ++k) {
        if (words[k] == Word(tensor.number, k)) continue;
        Say("found OTHER BYTES than it wrote");
        return false;
      }
      bytes += tensor.buffer.size();
    }
    Say("verified " + FormatBytes(bytes) + ": as it wrote them");
    return true;
  }

  static std::string FormatMs(absl::Duration duration) {
    std::array<char, 32> text{};
    std::snprintf(text.data(), text.size(), "%.1f ms", absl::ToDoubleMilliseconds(duration));
    return text.data();
  }

  std::string Holds() {
    const absl::StatusOr<vrambroker::MemoryStats> stats = client_.GetMemoryStats();
    if (!stats.ok()) return std::string(stats.status().message());
    const uint64_t in_use = stats->allocated_bytes.all.current;
    return FormatBytes(in_use) + " in use, " + FormatBytes(stats->reserved_bytes.all.current - in_use) + " unused";
  }

  Client client_;
  std::vector<Tensor> tensors_;
  uint64_t number_ = 0;
};

}  // namespace

int main(int argc, char** argv) {
  const std::unique_ptr<CLI::App> app = vrambroker::MakeCommandLine(
      "vrambroker-job", "Takes and drops memory as standard input says; see deploy/examples.");
  app->add_option("--name", flags().name, "Name of the session. Default: job.")->type_name("NAME");
  app->add_option("--wait-seconds", flags().wait_seconds, "How long a request waits for memory. Default: not at all.")
      ->type_name("N");
  app->add_option("--began-ms", flags().began_ms, "When the timeline began: milliseconds since 1970.")->type_name("N");
  if (const std::optional<int> code = vrambroker::ParseOrPrint(*app, argc, argv)) return *code;
  absl::StatusOr<Client> client =
      Client::Connect({.name = flags().name, .wait = absl::Seconds(flags().wait_seconds), .alloc_conf = ""});
  if (!client.ok()) {
    std::fprintf(stderr, "%s: %s\n", flags().name.c_str(), client.status().ToString().c_str());
    return 1;
  }
  Job job(*std::move(client));
  job.Say("starts");
  std::string line;
  while (std::getline(std::cin, line)) {
    if (!job.Do(line)) return 1;
  }
  job.Say("ends");
  return 0;
}
