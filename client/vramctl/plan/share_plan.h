// SPDX-License-Identifier: Apache-2.0
//
// Several jobs on one device: whether they fit together, and what to grant each of them.
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
// A job's step is divided into so many parts of equally many operations. Traces have no times, so every job's step is
// taken to last as long as the others'.
inline constexpr size_t kTicks = 256;

// What one job's trace needs, in bytes. "Needed" is what is reserved less the segments that are wholly free, since a
// reclaim takes these away; but no more than the smallest device on which the trace runs. With a reclaim after each
// operation a trace can need more, since blocks lie elsewhere: then it is that.
struct JobProfile {
  std::string name;
  uint64_t operations = 0;
  uint64_t step_operations = 0;  // of its last step, or of its second half where it has no marks (kResetPeaks)
  bool has_marks = false;
  uint64_t peak_allocated = 0;
  uint64_t peak_reserved = 0;    // with a cache of its own that nobody reclaims
  uint64_t peak_needed = 0;      // of the whole trace, setting up included
  uint64_t smallest_device = 0;  // on which it runs alone
  uint64_t floor_needed = 0;     // the least in a step: what the job has at all times
  std::vector<uint64_t> step;    // kTicks values: the most needed in each part of a step
};

// Replays `trace`. Safe to call from any thread.
JobProfile ProfileOf(const std::string& name, const Trace& trace, const AllocatorOptions& options);

struct JobShare {
  uint64_t limit = 0;      // bytes
  uint64_t guarantee = 0;  // bytes
  size_t shift = 0;        // ticks by which its steps start later than the first job's
  // Ticks that it waits in a step, on average, when all jobs begin a step at the same moment and take what there is.
  // None: jobs end up waiting for one another for ever.
  std::optional<double> wait_together;
  // The same when a job begins a step only if its peak fits beside what the others may still need.
  double wait_in_turns = 0;
};

enum class Fit {
  kPrivately,   // even with private caches
  kReclaiming,  // all peaks at once, if reclaimable memory goes to others
  kInTurns,     // not all peaks at once; jobs wait for one another
  kNot,
};

struct SharePlan {
  Fit fit = Fit::kNot;
  uint64_t private_bytes = 0;    // private caches: all peaks of what is reserved
  uint64_t worst_bytes = 0;      // all peaks of what is needed, at once
  uint64_t staggered_bytes = 0;  // the peak of the sum when each job starts by its shift later
  uint64_t turns_bytes = 0;      // one job's peak at a time, beside what the others have at all times
  std::vector<JobShare> jobs;    // in the order of the profiles
};

// REQUIRES: 1 to kMostJobs profiles. Safe to call from any thread.
SharePlan PlanShare(const std::vector<JobProfile>& profiles, uint64_t device_bytes);

// Rules for the daemon's configuration, one a job, by the name of its session. `vrambrokerd --check-config` accepts
// them, without a warning, for this device. The plan has one session a job, and each rule lets a user have no more: its
// guarantee is kept once. Sizes are whole segments (2 MiB).
std::string PolicyText(const std::vector<JobProfile>& profiles, const SharePlan& plan, uint64_t device_bytes);

// A name that a session and a rule may have, for a job that was read from `path`, and that is none of `taken`.
std::string JobName(const std::string& path, const std::vector<std::string>& taken);

}  // namespace vrambroker::plan

#endif  // VRAMBROKER_CLIENT_VRAMCTL_PLAN_SHARE_PLAN_H_
