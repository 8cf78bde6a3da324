// SPDX-License-Identifier: Apache-2.0
//
// Runs simulations of the broker, each with its own seed, until a simulation fails, all are done, or the time is up.
// Prints the totals, or the seed that repeats the failure.
#include <spdlog/spdlog.h>

#include <chrono>
#include <cstdio>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/flags/usage.h"
#include "tests/fault/simulation.h"

ABSL_FLAG(uint64_t, first_seed, 1, "The first seed.");
ABSL_FLAG(uint64_t, seeds, 1000, "How many.");
ABSL_FLAG(int, steps, 300, "Steps of each.");
ABSL_FLAG(double, seconds, 0, "Go on with further seeds for so long instead; 0: no.");
ABSL_FLAG(bool, log, false, "Show the daemon's log, for one seed.");

int main(int argc, char** argv) {
  using vrambroker::fault::Simulation;
  using vrambroker::fault::SimulationCounts;
  absl::SetProgramUsageMessage("simulates the broker under faults.\n\n  broker_simulation --seeds=10000");
  absl::ParseCommandLine(argc, argv);
  spdlog::set_level(absl::GetFlag(FLAGS_log) ? spdlog::level::debug : spdlog::level::off);

  const auto begin = std::chrono::steady_clock::now();
  const double seconds = absl::GetFlag(FLAGS_seconds);
  const auto time_is_left = [&] {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count() < seconds;
  };
  SimulationCounts all;
  const uint64_t first = absl::GetFlag(FLAGS_first_seed);
  uint64_t seed = first;
  for (; seconds > 0 ? time_is_left() : seed < first + absl::GetFlag(FLAGS_seeds); ++seed) {
    Simulation simulation(seed);
    const std::string failure = simulation.Run(absl::GetFlag(FLAGS_steps));
    if (!failure.empty()) {
      std::printf("FAILED: %s\nrepeat it with: broker_simulation --first_seed=%lu --seeds=1 --steps=%d --log\n",
                  failure.c_str(), seed, absl::GetFlag(FLAGS_steps));
      return 1;
    }
    const SimulationCounts& counts = simulation.counts();
    all.steps += counts.steps;
    all.sessions += counts.sessions;
    all.leases += counts.leases;
    all.charges += counts.charges;
    all.refusals += counts.refusals;
    all.waited += counts.waited;
    all.kills += counts.kills;
    all.disconnects += counts.disconnects;
    all.resumes += counts.resumes;
    all.lost_messages += counts.lost_messages;
    all.driver_failures += counts.driver_failures;
    all.quarantines += counts.quarantines;
    all.longest_held_back = std::max(all.longest_held_back, counts.longest_held_back);
  }
  std::printf(
      "%lu seeds, %lu steps: %lu sessions, %lu leases, %lu charges, %lu refusals, %lu granted after waiting, %lu "
      "kills, %lu broken "
      "connections, %lu resumed, %lu messages lost, %lu driver calls failed, %lu "
      "found held by a child; nothing lost, nothing owned twice, every promise kept. A request was held back for "
      "another one for at most %ld ms.\n",
      seed - first, all.steps, all.sessions, all.leases, all.charges, all.refusals, all.waited, all.kills,
      all.disconnects, all.resumes, all.lost_messages, all.driver_failures, all.quarantines,
      static_cast<long>(std::chrono::duration_cast<std::chrono::milliseconds>(all.longest_held_back).count()));
  return 0;
}
