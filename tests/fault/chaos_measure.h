// SPDX-License-Identifier: Apache-2.0
//
// Parts of the chaos test that measure times. Printed times are never judged.
#ifndef VRAMBROKER_TESTS_FAULT_CHAOS_MEASURE_H_
#define VRAMBROKER_TESTS_FAULT_CHAOS_MEASURE_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "tests/fault/chaos_setup.h"

namespace vrambroker::fault {

// Measures how soon another client can use half of the device after the holder is killed, and while the holder keeps
// the memory idle. Takes each time `times` times.
absl::Status MeasureHandOvers(ChaosSetup& setup, int times);

// Measures storms of restarts, on a separate daemon: `clients` processes hold all of the device in equal shares, are
// killed at once, and start again at once. The time of a client ends when the client has its memory and has written to
// all of the memory. Storms of the build `beside`, if given, take turns with storms of this build, so that the
// machine's load affects both builds.
absl::Status MeasureStorms(const ChaosSetup::Options& options, int rounds, uint64_t clients, const std::string& beside);

}  // namespace vrambroker::fault

#endif  // VRAMBROKER_TESTS_FAULT_CHAOS_MEASURE_H_
