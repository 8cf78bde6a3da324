// SPDX-License-Identifier: Apache-2.0
//
// Several jobs on a device: whether they fit together, and the limits and guarantees to grant.
#ifndef VRAMBROKER_CLIENT_VRAMCTL_PLAN_SHARE_PLAN_H_
#define VRAMBROKER_CLIENT_VRAMCTL_PLAN_SHARE_PLAN_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "allocator/heap/allocator_options.h"
#include "allocator/replay/trace.h"

namespace vrambroker::plan {

inline constexpr size_t kMostJobs = 16;
// Number of parts of a job's step, of equally many operations each. Traces have no times, so all jobs' steps are
// assumed to last equally long.
inline constexpr size_t kTicks = 256;

// Memory needed by the trace of a job, in bytes. "Needed" means reserved without wholly free segments, since a reclaim
// returns free segments; but no more than the smallest device able to run the trace. With a reclaim after each
// operation a trace can need more, since blocks are placed differently: then the larger value counts.
struct JobProfile {
  std::string name;
  uint64_t operations = 0;
  uint64_t step_operations = 0;  // of the last step; without marks (kResetPeaks), of the second half
  bool has_marks = false;
  uint64_t peak_allocated = 0;
  uint64_t peak_reserved = 0;    // with a private cache, never reclaimed
  uint64_t peak_needed = 0;      // over the whole trace, including setup
  uint64_t smallest_device = 0;  // for running alone
  uint64_t floor_needed = 0;     // the least in a step: memory held at all times
  std::vector<uint64_t> step;    // kTicks values: the most needed in each part of a step
};

// Replays `trace`. Safe to call from any thread.
JobProfile ProfileOf(const std::string& name, const Trace& trace, const AllocatorOptions& options);

struct JobShare {
  uint64_t limit = 0;      // bytes
  uint64_t guarantee = 0;  // bytes
  size_t shift = 0;        // delay of its steps after the first job's, in ticks
  // Average wait per step, in ticks, if all jobs begin a step at the same moment and take any free memory. nullopt: the
  // jobs deadlock.
  std::optional<double> wait_together;
  // Average wait if a job begins a step only if its peak fits beside the possible needs of all jobs running.
  double wait_in_turns = 0;
};

enum class Fit {
  kPrivately,   // even with private caches
  kReclaiming,  // all peaks at once, if reclaimable memory goes to the jobs in need
  kInTurns,     // not all peaks at once; jobs wait for each other
  kNot,
};

struct SharePlan {
  Fit fit = Fit::kNot;
  uint64_t private_bytes = 0;    // private caches: sum of all peaks of reserved bytes
  uint64_t worst_bytes = 0;      // sum of all peaks of needed bytes
  uint64_t staggered_bytes = 0;  // the peak of the sum if each job starts later by its shift
  uint64_t turns_bytes = 0;      // a single job's peak at a time, beside the floors of the rest
  std::vector<JobShare> jobs;    // in the order of the profiles
};

// REQUIRES: 1 to kMostJobs profiles. Safe to call from any thread.
SharePlan PlanShare(const std::vector<JobProfile>& profiles, uint64_t device_bytes);

// Returns rules for the daemon's configuration, a rule per job, by session name. `vrambrokerd --check-config` accepts
// the rules for this device without a warning. The plan has a session per job, and each rule limits a user to a single
// session, so a guarantee is reserved once. Sizes are whole segments (2 MiB).
std::string PolicyText(const std::vector<JobProfile>& profiles, const SharePlan& plan, uint64_t device_bytes);

// Returns a name valid for a session and a rule, for a job read from `path`, and absent from `taken`.
std::string JobName(const std::string& path, const std::vector<std::string>& taken);

}  // namespace vrambroker::plan

#endif  // VRAMBROKER_CLIENT_VRAMCTL_PLAN_SHARE_PLAN_H_
