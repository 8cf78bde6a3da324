// SPDX-License-Identifier: Apache-2.0
#include "client/vramctl/plan/share_plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "allocator/base/bytes.h"
#include "allocator/replay/replay.h"
#include "client/vramctl/plan/step_trace.h"
#include "tests/support/paths.h"
#include "tests/unit/client/vramctl/plan/plan_models.h"

namespace vrambroker::plan {
namespace {

// Returns a job with a step needing `low`, and `high` in `ticks` ticks from `from` on. Amounts are in GiB.
JobProfile Job(const std::string& name, uint64_t low, uint64_t high, size_t from, size_t ticks) {
  JobProfile job = {.name = name,
                    .operations = 2000,
                    .step_operations = 1000,
                    .has_marks = true,
                    .peak_allocated = high << 30,
                    .peak_reserved = (high + 1) << 30,
                    .peak_needed = high << 30,
                    .floor_needed = low << 30};
  job.step.assign(kTicks, low << 30);
  for (size_t tick = from; tick < from + ticks; ++tick) job.step[tick] = high << 30;
  return job;
}

TEST(SharePlanTest, TheFourWays) {
  const std::vector<JobProfile> jobs = {Job("a", 10, 30, 100, 50), Job("b", 10, 40, 100, 50)};
  const struct {
    uint64_t device;
    Fit fit;
  } cases[] = {{72, Fit::kPrivately}, {71, Fit::kReclaiming}, {70, Fit::kReclaiming}, {69, Fit::kInTurns},
               {50, Fit::kInTurns},   {49, Fit::kNot},        {1, Fit::kNot}};
  for (const auto& [device, fit] : cases) {
    const SharePlan plan = PlanShare(jobs, device << 30);
    EXPECT_EQ(plan.fit, fit) << device;
    EXPECT_EQ(plan.private_bytes, 72_GiB);
    EXPECT_EQ(plan.worst_bytes, 70_GiB);
    EXPECT_EQ(plan.staggered_bytes, 50_GiB) << "the peaks are short enough to miss one another";
    EXPECT_EQ(plan.turns_bytes, 50_GiB);
  }
}

TEST(SharePlanTest, GuaranteesFitAndLeaveEachJobItsPeak) {
  const std::vector<JobProfile> jobs = {Job("a", 10, 30, 100, 50), Job("b", 5, 40, 10, 50), Job("c", 1, 3, 0, 20)};
  for (uint64_t device = 46; device <= 80; ++device) {
    const SharePlan plan = PlanShare(jobs, device << 30);
    if (plan.fit == Fit::kNot) continue;
    uint64_t guaranteed = 0;
    for (const JobShare& share : plan.jobs) guaranteed += share.guarantee;
    EXPECT_LE(guaranteed, device << 30);
    for (size_t i = 0; i < jobs.size(); ++i) {
      const JobShare& share = plan.jobs[i];
      EXPECT_GE(share.limit, jobs[i].peak_needed) << "or the job can never run its step";
      EXPECT_LE(share.limit + guaranteed - share.guarantee, device << 30);
      EXPECT_GE(share.guarantee, jobs[i].floor_needed);
      EXPECT_EQ(share.limit % 2_MiB, 0u);
      EXPECT_EQ(share.guarantee % 2_MiB, 0u);
    }
  }
}

// A reclaim moves later blocks. A job can therefore need more memory than its reservation with an untouched cache.
TEST(SharePlanTest, NoGuaranteeIsAboveItsLimitNorAllAboveTheDevice) {
  std::vector<JobProfile> jobs = {Job("a", 10, 30, 100, 50), Job("b", 0, 40, 10, 50), Job("c", 1, 3, 0, 20)};
  jobs[0].peak_reserved -= 3_GiB;
  jobs[1].peak_reserved += 4_GiB;
  jobs[2].peak_reserved += 1;  // no whole segment
  jobs[2].peak_needed += 3;
  jobs[2].floor_needed += 5;
  jobs[2].step[0] += 3;
  std::set<Fit> fits;
  for (uint64_t device = 40_GiB; device <= 80_GiB; device += 509_MiB + 1) {
    const SharePlan plan = PlanShare(jobs, device);
    fits.insert(plan.fit);
    uint64_t guaranteed = 0;
    for (size_t i = 0; i < jobs.size(); ++i) {
      const JobShare& share = plan.jobs[i];
      SCOPED_TRACE(jobs[i].name + " on " + FormatBytes(device));
      guaranteed += share.guarantee;
      EXPECT_LE(share.guarantee, share.limit);
      EXPECT_LE(share.limit, device);
      EXPECT_EQ(share.limit % 2_MiB, 0u);
      EXPECT_EQ(share.guarantee % 2_MiB, 0u);
      if (plan.fit == Fit::kNot) continue;
      EXPECT_GE(share.guarantee, plan.fit == Fit::kReclaiming ? jobs[i].peak_needed : jobs[i].floor_needed);
      EXPECT_GE(share.limit, std::min(jobs[i].peak_needed, jobs[i].peak_reserved));
    }
    EXPECT_LE(guaranteed, device);
  }
  EXPECT_EQ(fits, (std::set<Fit>{Fit::kPrivately, Fit::kReclaiming, Fit::kInTurns, Fit::kNot}));
}

TEST(SharePlanTest, StaggeringFindsThePeaksAWayPastOneAnother) {
  const std::vector<JobProfile> jobs = {Job("a", 0, 10, 0, 64), Job("b", 0, 10, 0, 64), Job("c", 0, 10, 0, 64),
                                        Job("d", 0, 10, 0, 64)};
  const SharePlan plan = PlanShare(jobs, 40_GiB);
  EXPECT_EQ(plan.staggered_bytes, 10_GiB) << "four quarters of a step";
  std::vector<size_t> shifts;
  for (const JobShare& share : plan.jobs) shifts.push_back(share.shift);
  std::sort(shifts.begin(), shifts.end());
  EXPECT_THAT(shifts, ::testing::ElementsAre(0, 64, 128, 192));
}

TEST(SharePlanTest, WhoWaits) {
  // A device with room for all peaks makes no job wait.
  const std::vector<JobProfile> jobs = {Job("a", 10, 30, 100, 50), Job("b", 10, 40, 100, 50)};
  for (const JobShare& share : PlanShare(jobs, 70_GiB).jobs) {
    EXPECT_EQ(share.wait_together, 0.0);
    EXPECT_EQ(share.wait_in_turns, 0.0);
  }
  // The device has room for one peak. The second job waits once for the first job's peak of 50 ticks. Later peaks no
  // longer meet.
  const SharePlan plan = PlanShare(jobs, 50_GiB);
  double waits = 0;
  for (const JobShare& share : plan.jobs) {
    ASSERT_TRUE(share.wait_together.has_value());
    waits += *share.wait_together;
  }
  EXPECT_NEAR(waits, 50.0 / 8, 1) << "over the 8 steps that are run";
  EXPECT_GT(plan.jobs[0].wait_in_turns + plan.jobs[1].wait_in_turns, waits) << "a whole step is more than its peak";
}

// Each job rises in two steps, and holds the first step's memory while waiting for the second step.
TEST(SharePlanTest, JobsThatBlockOneAnotherAreFound) {
  std::vector<JobProfile> jobs = {Job("a", 10, 20, 50, 100), Job("b", 10, 20, 50, 100)};
  for (JobProfile& job : jobs) {
    std::fill(job.step.begin() + 100, job.step.begin() + 150, 30_GiB);
    job.peak_needed = job.peak_allocated = job.peak_reserved = 30_GiB;
  }
  const SharePlan plan = PlanShare(jobs, 45_GiB);
  EXPECT_EQ(plan.fit, Fit::kInTurns);
  for (const JobShare& share : plan.jobs) EXPECT_FALSE(share.wait_together.has_value());
  EXPECT_GT(plan.jobs[0].wait_in_turns + plan.jobs[1].wait_in_turns, 0) << "in turns they finish";
  EXPECT_EQ(plan.staggered_bytes, 40_GiB);
}

TEST(SharePlanTest, OneJobHasTheDevice) {
  const SharePlan plan = PlanShare({Job("a", 10, 30, 100, 50)}, 40_GiB);
  EXPECT_EQ(plan.fit, Fit::kPrivately);
  EXPECT_EQ(plan.staggered_bytes, 30_GiB);
  EXPECT_EQ(plan.jobs[0].limit, 31_GiB);
}

TEST(ProfileTest, OfAPlannedStep) {
  const ModelShape shape = *ParseModelConfig(models::kGpt2);
  const TrainingOptions options = {.batch = 8, .seq = 1024};
  const Trace trace = StepTrace(shape, options);
  const JobProfile profile = ProfileOf("gpt2", trace, {});
  const ReplaySummary summary = SummarizeReplay(trace, {});
  EXPECT_TRUE(profile.has_marks);
  EXPECT_EQ(profile.peak_reserved, summary.peak_reserved_bytes);
  EXPECT_EQ(profile.peak_allocated, summary.peak_allocated_bytes);
  EXPECT_LE(profile.peak_needed, profile.peak_reserved);
  EXPECT_GE(profile.peak_needed, profile.peak_allocated);
  EXPECT_EQ(profile.step.size(), kTicks);
  EXPECT_EQ(*std::max_element(profile.step.begin(), profile.step.end()), profile.peak_needed);
  // Weights and optimizer remain between two steps.
  const TrainingMemory memory = *TrainingMemoryOf(shape, options);
  const uint64_t persistent = memory.weights.bytes + memory.optimizer.bytes;
  EXPECT_GE(profile.floor_needed, persistent);
  EXPECT_LT(profile.floor_needed, persistent / 2 * 3) << "and the holes beside them, which no reclaim returns";
  // The job runs on its stated need.
  EXPECT_EQ(SummarizeReplay(trace, {.device_bytes = profile.peak_needed}).ooms, 0u);
}

// All allocators run in step, and idle memory is taken away above the planned amount. A reclaim halfway changes the
// places of later blocks. The rest can therefore be a little above the plan made from each job alone.
TEST(ProfileTest, ReclaimLeavesWhatIsNeeded) {
  const ModelShape shape = *ParseModelConfig(models::kGpt2Xl);
  const Trace traces[] = {
      StepTrace(shape, {.batch = 8, .seq = 1024, .flash = true}),
      StepTrace(shape, {.batch = 4, .seq = 1024, .checkpoint = Checkpoint::kFull, .flash = true}),
      *ReadTraceFile(std::string(testing_support::paths::kGoldenDir) + "/two_stream_overlap.trace.gz")};
  std::vector<JobProfile> profiles;
  std::vector<std::unique_ptr<Replay>> replays;
  size_t longest = 0;
  for (const Trace& trace : traces) {
    profiles.push_back(ProfileOf("job", trace, {}));
    replays.push_back(std::make_unique<Replay>(ReplayConfig(), trace));
    longest = std::max(longest, trace.ops.size());
  }
  const SharePlan plan = PlanShare(profiles, 80_GiB);
  const auto reserved = [&] {
    uint64_t bytes = 0;
    for (const auto& replay : replays) bytes += replay->allocator().GetMemoryStats().reserved_bytes.all.current;
    return bytes;
  };
  uint64_t most_private = 0;
  uint64_t most = 0;
  for (size_t i = 0; i < longest; ++i) {
    for (size_t job = 0; job < replays.size(); ++job) {
      if (i < traces[job].ops.size()) replays[job]->Do(traces[job].ops[i]);
    }
    most_private = std::max(most_private, reserved());
    if (reserved() > plan.worst_bytes) {
      for (const auto& replay : replays) replay->allocator().Trim();
    }
    most = std::max(most, reserved());
  }
  EXPECT_GT(most_private, plan.worst_bytes) << "or this shows nothing";
  EXPECT_LE(static_cast<double>(most), 1.03 * static_cast<double>(plan.worst_bytes));
}

TEST(ProfileTest, OfTracesWithoutMarks) {
  const JobProfile two = ProfileOf("two", *ParseTraceText("a 0 31457280 0\na 1 31457280 0\nf 1\nf 0\n"), {});
  EXPECT_FALSE(two.has_marks);
  EXPECT_EQ(two.step_operations, 2u);
  EXPECT_EQ(two.floor_needed, 0u) << "all has been freed at the end";
  EXPECT_EQ(two.step.front(), 30_MiB) << "one of the two is left, in its segment";
  EXPECT_EQ(two.step[kTicks / 2 - 1], 30_MiB);
  const JobProfile none = ProfileOf("none", *ParseTraceText(""), {});
  EXPECT_EQ(none.peak_reserved, 0u);
  EXPECT_EQ(none.floor_needed, 0u);
  // A mark at the end marks no step.
  EXPECT_FALSE(ProfileOf("end", *ParseTraceText("p\na 0 512 0\np\n"), {}).has_marks);
}

TEST(PolicyTextTest, NamesAreThoseThatTheDaemonTakes) {
  EXPECT_EQ(JobName("/a/b/trainer.trace.gz", {}), "trainer");
  EXPECT_EQ(JobName("trainer.pickle", {"trainer"}), "trainer-2");
  EXPECT_EQ(JobName("trainer", {"trainer", "trainer-2"}), "trainer-3");
  EXPECT_EQ(JobName("a*b?\"c\n.x", {}), "a-b--c-");
  EXPECT_EQ(JobName("/folder/", {}), "job");
  EXPECT_EQ(JobName(std::string(500, 'x'), {}).size(), 48u);
}

TEST(PolicyTextTest, HasARuleForEachJob) {
  const std::vector<JobProfile> jobs = {Job("a", 10, 30, 100, 50), Job("b", 10, 40, 100, 50)};
  EXPECT_EQ(PolicyText(jobs, PlanShare(jobs, 60_GiB), 60_GiB),
            "# For a device with a capacity of 60.00 GiB. The names are those that the jobs give their sessions,\n"
            "# one session a job.\n"
            "rules {\n  name: \"a\"\n  session_name: \"a\"\n  limit { bytes: \"31744MiB\" }\n"
            "  guarantee { bytes: \"10240MiB\" }\n  max_sessions: 1\n}\n"
            "rules {\n  name: \"b\"\n  session_name: \"b\"\n  limit { bytes: \"41984MiB\" }\n"
            "  guarantee { bytes: \"10240MiB\" }\n  max_sessions: 1\n}\n");
}

}  // namespace
}  // namespace vrambroker::plan
