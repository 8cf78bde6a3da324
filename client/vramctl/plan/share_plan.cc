// SPDX-License-Identifier: Apache-2.0
#include "client/vramctl/plan/share_plan.h"

#include <algorithm>
#include <numeric>

#include "absl/strings/str_cat.h"
#include "allocator/base/bytes.h"

namespace vrambroker::plan {
namespace {

constexpr size_t kSimulatedSteps = 8;  // steps of each job

// A job in the simulation.
struct Runner {
  const std::vector<uint64_t>* step = nullptr;
  std::vector<uint64_t> rest;  // the most needed from a tick to the end of the step
  uint64_t floor = 0;
  size_t done = 0;      // ticks
  size_t waited = 0;    // ticks
  size_t patience = 0;  // ticks since the job last moved: the job with the longest wait goes first
  bool is_over() const { return done == kSimulatedSteps * kTicks; }
  bool is_between_steps() const { return done % kTicks == 0; }
  uint64_t held() const { return done == 0 || is_over() ? floor : (*step)[(done - 1) % kTicks]; }
  uint64_t next() const { return (*step)[done % kTicks]; }
  // Returns the larger of the bytes held and the most still needed before the job is back at its floor.
  uint64_t claim() const { return is_between_steps() ? floor : std::max(held(), rest[done % kTicks]); }
};

std::vector<Runner> RunnersOf(const std::vector<JobProfile>& profiles) {
  std::vector<Runner> runners;
  for (const JobProfile& profile : profiles) {
    Runner runner = {.step = &profile.step, .rest = profile.step, .floor = profile.floor_needed};
    for (size_t tick = kTicks - 1; tick-- > 0;) runner.rest[tick] = std::max(runner.rest[tick], runner.rest[tick + 1]);
    runners.push_back(std::move(runner));
  }
  return runners;
}

// Runs all jobs from the same moment. False: the jobs deadlock.
bool Simulate(std::vector<Runner>& runners, uint64_t device_bytes, bool in_turns) {
  std::vector<size_t> order(runners.size());
  std::iota(order.begin(), order.end(), size_t{0});
  const auto is_over = [](const Runner& runner) { return runner.is_over(); };
  while (!std::all_of(runners.begin(), runners.end(), is_over)) {
    std::stable_sort(order.begin(), order.end(),
                     [&](size_t a, size_t b) { return runners[a].patience > runners[b].patience; });
    bool moved = false;
    for (const size_t i : order) {
      Runner& runner = runners[i];
      if (runner.is_over()) continue;
      uint64_t others = 0;
      for (const Runner& other : runners) {
        if (&other != &runner) others += in_turns ? other.claim() : other.held();
      }
      const uint64_t wanted = in_turns ? runner.rest[runner.done % kTicks] : runner.next();
      // A job in its step keeps its turn until the end of the step.
      const bool has_turn = in_turns && !runner.is_between_steps();
      if (has_turn || others + wanted <= device_bytes) {
        ++runner.done;
        runner.patience = 0;
        moved = true;
      } else {
        ++runner.waited;
        ++runner.patience;
      }
    }
    if (!moved) return false;
  }
  return true;
}

double WaitOf(const Runner& runner) {
  return static_cast<double>(runner.waited) / kSimulatedSteps;
}

// Adds the jobs sequentially, each where the peak of the sum so far grows least.
uint64_t Stagger(const std::vector<JobProfile>& profiles, std::vector<JobShare>& shares) {
  std::vector<uint64_t> sum(kTicks, 0);
  for (size_t job = 0; job < profiles.size(); ++job) {
    const std::vector<uint64_t>& step = profiles[job].step;
    uint64_t least = UINT64_MAX;
    for (size_t shift = 0; shift < kTicks; ++shift) {
      uint64_t peak = 0;
      for (size_t tick = 0; tick < kTicks; ++tick) {
        peak = std::max(peak, sum[tick] + step[(tick + kTicks - shift) % kTicks]);
      }
      if (peak >= least) continue;
      least = peak;
      shares[job].shift = shift;
    }
    for (size_t tick = 0; tick < kTicks; ++tick) sum[tick] += step[(tick + kTicks - shares[job].shift) % kTicks];
  }
  return *std::max_element(sum.begin(), sum.end());
}

}  // namespace

SharePlan PlanShare(const std::vector<JobProfile>& profiles, uint64_t device_bytes) {
  SharePlan plan;
  plan.jobs.resize(profiles.size());
  const uint64_t device = device_bytes - device_bytes % 2_MiB;  // segments are at least 2 MiB
  uint64_t floors = 0;
  uint64_t tallest = 0;  // the largest peak above a floor
  for (const JobProfile& profile : profiles) {
    const uint64_t needed = RoundUpTo(profile.peak_needed, 2_MiB);
    const uint64_t floor = RoundUpTo(profile.floor_needed, 2_MiB);
    plan.private_bytes += RoundUpTo(profile.peak_reserved, 2_MiB);
    plan.worst_bytes += needed;
    floors += floor;
    tallest = std::max(tallest, needed - floor);
  }
  plan.turns_bytes = floors + tallest;
  plan.staggered_bytes = Stagger(profiles, plan.jobs);
  plan.fit = plan.private_bytes <= device ? Fit::kPrivately
             : plan.worst_bytes <= device ? Fit::kReclaiming
             : plan.turns_bytes <= device ? Fit::kInTurns
                                          : Fit::kNot;
  if (plan.fit == Fit::kNot) return plan;

  uint64_t guaranteed = 0;
  for (size_t i = 0; i < profiles.size(); ++i) {
    const JobProfile& profile = profiles[i];
    // With room for all peaks, guarantee each job its own peak; else guarantee the bytes held between its steps.
    const uint64_t sure = plan.fit == Fit::kPrivately    ? std::min(profile.peak_needed, profile.peak_reserved)
                          : plan.fit == Fit::kReclaiming ? profile.peak_needed
                                                         : profile.floor_needed;
    plan.jobs[i].guarantee = RoundUpTo(sure, 2_MiB);
    guaranteed += plan.jobs[i].guarantee;
  }
  for (size_t i = 0; i < profiles.size(); ++i) {
    // A job with reclaimed memory may need more than with a private cache.
    const uint64_t most = std::max(profiles[i].peak_needed, profiles[i].peak_reserved);
    JobShare& share = plan.jobs[i];
    share.limit = std::min(RoundUpTo(most, 2_MiB), device - (guaranteed - share.guarantee));
  }

  std::vector<Runner> together = RunnersOf(profiles);
  const bool all_finish = Simulate(together, device_bytes, /*in_turns=*/false);
  std::vector<Runner> turns = RunnersOf(profiles);
  Simulate(turns, device_bytes, /*in_turns=*/true);
  for (size_t i = 0; i < profiles.size(); ++i) {
    if (all_finish) plan.jobs[i].wait_together = WaitOf(together[i]);
    plan.jobs[i].wait_in_turns = WaitOf(turns[i]);
  }
  return plan;
}

std::string PolicyText(const std::vector<JobProfile>& profiles, const SharePlan& plan, uint64_t device_bytes) {
  std::string text = absl::StrCat("# For a device with a capacity of ", FormatBytes(device_bytes),
                                  ". The names are those that the jobs give their sessions,\n# "
                                  "one session a job.\n");
  for (size_t i = 0; i < profiles.size(); ++i) {
    const std::string& name = profiles[i].name;
    absl::StrAppend(&text, "rules {\n  name: \"", name, "\"\n  session_name: \"", name, "\"\n  limit { bytes: \"",
                    plan.jobs[i].limit / 1_MiB, "MiB\" }\n  guarantee { bytes: \"", plan.jobs[i].guarantee / 1_MiB,
                    "MiB\" }\n  max_sessions: 1\n}\n");
  }
  return text;
}

}  // namespace vrambroker::plan
