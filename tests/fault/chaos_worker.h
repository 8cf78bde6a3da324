// SPDX-License-Identifier: Apache-2.0
//
// Clients of the chaos test. A client writes into all its memory, and verifies the bytes before returning the memory,
// and sometimes in between. Clients end when ChaosCounters::stop is set, or when the test ends them.
#ifndef VRAMBROKER_TESTS_FAULT_CHAOS_WORKER_H_
#define VRAMBROKER_TESTS_FAULT_CHAOS_WORKER_H_

#include <string>

#include "tests/fault/chaos_counters.h"

namespace vrambroker::fault {

struct WorkerOptions {
  // guaranteed  holds whole segments, never more than its guarantee; a refusal is a broken promise
  // waiting     holds whole segments; requests wait for memory for two seconds ("urgent": with a higher priority)
  // urgent
  // asking      holds whole segments; requests do not wait, but other sessions are asked for idle memory
  // victim      a caching client that hoards: most of its reserved memory is idle; has children that outlive it
  // cut         a victim that breaks its own connection now and then
  // full        for measuring: holds three quarters of the device until killed
  // idle        for measuring: caches three quarters of the device, again for each line of its input
  // storm       for measuring: takes an equal share of the device, waiting if necessary, and holds it until killed
  std::string role;
  std::string socket_dir;
  std::string proxy_dir;  // for "cut": an empty directory
  uint64_t seed = 0;
};

// Returns the exit code: 0, 3 when a block held other bytes than were written, 4 for an unexplained error.
int RunWorker(const WorkerOptions& options, ChaosCounters& counters);

}  // namespace vrambroker::fault

#endif  // VRAMBROKER_TESTS_FAULT_CHAOS_WORKER_H_
