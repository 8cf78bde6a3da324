// SPDX-License-Identifier: Apache-2.0
//
// Workloads: sequences of allocations and frees, and what one of them costs in a given allocator.
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
  // Only allocations, frees and, in `timed`, emptying of the cache (which host allocators do not do).
  std::vector<TraceOp> setup;  // not timed
  std::vector<TraceOp> timed;
  uint32_t ids = 1;        // every id is below this
  int threads = 1;         // each performs all of it, with ids of its own
  bool own_heaps = false;  // a heap for each thread; host allocators have one all the same
};

// Names:
//   hot_512B, hot_64KiB, hot_4MiB   one block, allocated and freed
//   hot_mixed_1000_blocks           of 1000 live blocks of 512 B to 8 MiB one is freed, another allocated
//   mixed_live:N                    the same with N live blocks of 512 B to 64 KiB, and free ones between them
//   equal_live:N                    the same with blocks of 512 B: every other one of 2 N was freed
//   miss:BYTES                      an empty cache: a block is allocated and freed, the cache emptied
//   threads_one_heap, threads_own_heaps   4 threads, each hot_mixed_1000_blocks
//   anything else                   the trace of tests/golden with this name, without its other operations
// `ops`: how many operations a loop has; traces have their own number.
absl::StatusOr<Workload> MakeWorkload(const std::string& name, const std::string& golden_dir, size_t ops);

enum class Subject {
  kVrambroker,
  kRecording,  // the same, with a full ring of as many events as sessions keep by default
  kHost,       // malloc and free of this process
  kEmpty,      // nothing: what the loop itself costs
};

struct Cost {
  double ns = 0;                  // per operation; processor time, or wall time over all operations of several threads
  double metadata_per_block = 0;  // vrambroker, one thread: bytes for each live block, at the end
};

Cost Perform(const Workload& workload, Subject subject);

}  // namespace vrambroker::bench

#endif  // VRAMBROKER_TESTS_BENCH_WORKLOAD_H_
