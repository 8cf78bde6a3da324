// SPDX-License-Identifier: Apache-2.0
//
// Two classic fragmentation experiments through a real daemon: allocate many tensors, free every second tensor, then
// request a large tensor. Enough bytes are free, yet the large tensor needs new memory; an empty-cache helps in only
// one of the experiments. The program explains why.
//
// With --pause the program waits for Enter after each step, leaving time to look at the daemon's web page, vramctl
// summary fragmentation, or a dashboard.
//
// Exits with 0 when both experiments ran, else 1.
#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <iostream>
#include <iterator>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "allocator/base/bytes.h"
#include "allocator/base/command_line.h"
#include "allocator/heap/memory_stats.h"
#include "vrambroker/client.h"

namespace {

struct Flags {
  bool pause = false;
};
Flags flags;

using vrambroker::Buffer;
using vrambroker::Client;
using vrambroker::FormatBytes;
using vrambroker::MemoryStats;

struct Experiment {
  const char* title;
  std::vector<uint64_t> sizes;  // frees every second tensor: the second, the fourth, ...
  uint64_t large;
};

// A free part of a segment, left by freed buffers.
struct Hole {
  uint64_t begin = 0;
  uint64_t end = 0;
};

// Holes of all segments. Freed neighbours merge, as in the allocator.
class Holes {
 public:
  void Add(const Buffer& freed) {
    std::vector<Hole>& holes = by_segment_[freed.segment_id()];
    const Hole hole{freed.offset_bytes(), freed.offset_bytes() + freed.block_bytes()};
    if (!holes.empty() && holes.back().end == hole.begin) {
      holes.back().end = hole.end;
    } else {
      holes.push_back(hole);
    }
  }
  size_t count() const {
    size_t n = 0;
    for (const auto& [segment, holes] : by_segment_) n += holes.size();
    return n;
  }
  uint64_t largest() const {
    uint64_t bytes = 0;
    for (const auto& [segment, holes] : by_segment_) {
      for (const Hole& hole : holes) bytes = std::max(bytes, hole.end - hole.begin);
    }
    return bytes;
  }

 private:
  std::map<uint64_t, std::vector<Hole>> by_segment_;
};

// Prints a line of figures after a step.
void Print(const char* when, const MemoryStats& stats) {
  const uint64_t reserved = stats.reserved_bytes.all.current;
  const uint64_t allocated = stats.allocated_bytes.all.current;
  std::printf("  %-24s reserved %11s  allocated %11s  fragmentation %4.1f%%\n", when, FormatBytes(reserved).c_str(),
              FormatBytes(allocated).c_str(), 100 * vrambroker::FragmentationRatio(allocated, reserved));
  std::fflush(stdout);
  std::string line;
  if (flags.pause) std::getline(std::cin, line);
}

absl::Status Run(const Experiment& experiment) {
  // A separate session per experiment, to begin with an empty heap.
  absl::StatusOr<Client> client = Client::Connect({.name = "fragmentation"});
  if (!client.ok()) return client.status();
  std::printf("\n%s\n", experiment.title);

  std::vector<Buffer> buffers;
  for (const uint64_t bytes : experiment.sizes) {
    absl::StatusOr<Buffer> buffer = client->Allocate(bytes);
    if (!buffer.ok()) return buffer.status();
    buffers.push_back(*std::move(buffer));
  }
  Holes holes;
  for (size_t i = 1; i < buffers.size(); i += 2) {
    holes.Add(buffers[i]);
    if (absl::Status status = buffers[i].Reset(); !status.ok()) return status;
  }
  const absl::StatusOr<MemoryStats> freed = client->GetMemoryStats();
  if (!freed.ok()) return freed.status();
  Print("every other one freed", *freed);

  absl::StatusOr<Buffer> large = client->Allocate(experiment.large);
  if (!large.ok()) return large.status();
  const absl::StatusOr<MemoryStats> after = client->GetMemoryStats();
  if (!after.ok()) return after.status();
  Print("the large one allocated", *after);
  const uint64_t free_bytes = freed->reserved_bytes.all.current - freed->allocated_bytes.all.current;
  if (after->num_device_alloc > freed->num_device_alloc) {
    std::printf("    %s needed new memory although %s were free: in %zu pieces, the largest of %s,\n",
                FormatBytes(experiment.large).c_str(), FormatBytes(free_bytes).c_str(), holes.count(),
                FormatBytes(holes.largest()).c_str());
    std::printf("    and a block must lie in one piece of one segment.\n");
  } else {
    std::printf("    it was served from free memory.\n");
  }

  const absl::StatusOr<uint64_t> returned = client->EmptyCache();
  if (!returned.ok()) return returned.status();
  const absl::StatusOr<MemoryStats> emptied = client->GetMemoryStats();
  if (!emptied.ok()) return emptied.status();
  Print("the cache emptied", *emptied);
  std::printf("    %s went back to the daemon; %s are free but stay, in segments that are still partly in use.\n",
              FormatBytes(*returned).c_str(), FormatBytes(emptied->inactive_split_bytes.all.current).c_str());
  return absl::OkStatus();
}

}  // namespace

int main(int argc, char** argv) {
  const std::unique_ptr<CLI::App> app = vrambroker::MakeCommandLine(
      "vrambroker-fragmentation", "Shows fragmentation, and what an empty-cache can do about it, on a running daemon.");
  app->add_flag("--pause", flags.pause, "Wait for Enter after each step.");
  if (const std::optional<int> code = vrambroker::ParseOrPrint(*app, argc, argv)) return *code;
  Experiment mixed{
      "30 tensors, three times 10, 50, 10, 100, 10, 200, 10, 50, 10 and 100 MB, then one of 500 MB", {}, 500'000'000};
  for (int round = 0; round < 3; ++round) {
    for (const uint64_t megabytes : {10, 50, 10, 100, 10, 200, 10, 50, 10, 100}) {
      mixed.sizes.push_back(megabytes * 1'000'000);
    }
  }
  for (const Experiment& experiment :
       {Experiment{"100 tensors of 4 MB, then one of 100 MB", std::vector<uint64_t>(100, 4'000'000), 100'000'000},
        mixed}) {
    if (absl::Status status = Run(experiment); !status.ok()) {
      std::fprintf(stderr, "vrambroker-fragmentation: %s\n", status.ToString().c_str());
      return 1;
    }
  }
  return 0;
}
