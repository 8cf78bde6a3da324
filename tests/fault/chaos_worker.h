// SPDX-License-Identifier: Apache-2.0
//
// The clients of the chaos test. Each writes into all that it gets and verifies it before it gives it back, and then
// some. They end when ChaosCounters::stop is set, or however the test ends them.
#ifndef VRAMBROKER_TESTS_FAULT_CHAOS_WORKER_H_
#define VRAMBROKER_TESTS_FAULT_CHAOS_WORKER_H_

#include <string>

#include "tests/fault/chaos_counters.h"

namespace vrambroker::fault {

struct WorkerOptions {
  // guaranteed  holds whole segments, never more than its guarantee; a refusal is a broken promise
  // waiting     whole segments; its requests wait for memory for two seconds ("urgent": with a higher priority)
  // urgent
  // asking      whole segments; its requests do not wait, but others are asked for what they hold idle
  // victim      a caching client that hoards: most of what it reserves is idle; has children that outlive it
  // cut         the same, and breaks its own connection now and then
  // full        for measuring: holds three quarters of the device until it is killed
  // idle        for measuring: caches three quarters of the device, again for each line of its input
  // storm       for measuring: takes its equal share of the device, waits for it if need be, and holds it until killed
  std::string role;
  std::string socket_dir;
  std::string proxy_dir;  // of cut: an empty directory
  uint64_t seed = 0;
};

// The exit code: 0, 3 when other bytes than were written were found, 4 for an error that nothing explains.
int RunWorker(const WorkerOptions& options, ChaosCounters& counters);

}  // namespace vrambroker::fault

#endif  // VRAMBROKER_TESTS_FAULT_CHAOS_WORKER_H_
