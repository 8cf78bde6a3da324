// SPDX-License-Identifier: Apache-2.0
//
// The parts of the chaos test that take times, print them and never judge them.
#ifndef VRAMBROKER_TESTS_FAULT_CHAOS_MEASURE_H_
#define VRAMBROKER_TESTS_FAULT_CHAOS_MEASURE_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "tests/fault/chaos_setup.h"

namespace vrambroker::fault {

// How soon can somebody else use half of the device when the process that holds it is killed, and how soon when it
// holds it idle? Each is done `times` times.
absl::Status MeasureHandOvers(ChaosSetup& setup, int times);

// Storms of restarts, on a daemon of their own: `clients` processes hold all of the device in equal shares, are killed
// at once, and start again at once. How soon has each of them its memory again, and written to all of it? Storms of
// another build of the daemon, if any, take turns with those of this one, so that the machine's load is in both.
absl::Status MeasureStorms(const ChaosSetup::Options& options, int rounds, uint64_t clients, const std::string& beside);

}  // namespace vrambroker::fault

#endif  // VRAMBROKER_TESTS_FAULT_CHAOS_MEASURE_H_
