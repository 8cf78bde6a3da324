// SPDX-License-Identifier: Apache-2.0
//
// Workloads: sequences of allocations and frees, and the cost of a sequence in an allocator.
#ifndef VRAMBROKER_TESTS_BENCH_WORKLOAD_H_
#define VRAMBROKER_TESTS_BENCH_WORKLOAD_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "allocator/replay/replay.h"
#include "allocator/replay/trace.h"

namespace vrambroker::bench {

struct Workload {
  ReplayConfig config;
  // Contains only allocations and frees. `timed` may empty the cache, too, except in host allocators.
  std::vector<TraceOp> setup;  // not timed
  std::vector<TraceOp> timed;
  uint32_t ids = 1;        // above every id
  int threads = 1;         // each performs the whole workload, with separate ids
  bool own_heaps = false;  // a heap for each thread, except for host allocators
};

// Names:
//   hot_512B, hot_64KiB, hot_4MiB   one block, allocated and freed
//   hot_mixed_1000_blocks           a random block of 1000 (512 B to 8 MiB) is freed, and another allocated
//   mixed_live:N                    like hot_mixed_1000_blocks with N live blocks of 512 B to 64 KiB, and free blocks
//                                   between the live blocks
//   equal_live:N                    like mixed_live:N with blocks of 512 B, after a free of every second block of 2 N
//   miss:BYTES                      an empty cache: a block is allocated and freed, the cache emptied
//   threads_one_heap, threads_own_heaps   4 threads, each hot_mixed_1000_blocks
//   any other name                  the trace of tests/golden with the name: only allocations and frees
// `ops`: operations of a loop. A trace has its own number of operations.
absl::StatusOr<Workload> MakeWorkload(const std::string& name, const std::string& golden_dir, size_t ops);

enum class Subject {
  kVrambroker,
  kRecording,  // kVrambroker with a full ring of as many events as sessions keep by default
  kHost,       // malloc and free of the process
  kEmpty,      // no allocator: the cost of the loop itself
};

struct Cost {
  double ns = 0;                  // per operation; processor time, or wall time over all operations of several threads
  double metadata_per_block = 0;  // vrambroker, one thread: bytes for each live block, at the end
};

Cost Perform(const Workload& workload, Subject subject);

}  // namespace vrambroker::bench

#endif  // VRAMBROKER_TESTS_BENCH_WORKLOAD_H_
