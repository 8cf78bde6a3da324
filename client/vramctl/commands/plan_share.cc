// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "allocator/base/bytes.h"
#include "allocator/wire/admin_json.h"
#include "client/vramctl/commands/commands.h"
#include "client/vramctl/commands/plan_output.h"
#include "client/vramctl/commands/snapshot_file.h"
#include "client/vramctl/plan/share_plan.h"
#include "client/vramctl/views/output.h"

namespace vrambroker::vramctl {
namespace {

using Json = nlohmann::ordered_json;

absl::StatusOr<std::vector<plan::JobProfile>> ReadJobs(const Context& context, const ReplayConfig& config) {
  const std::vector<std::string>& paths = context.plan.jobs;
  if (paths.size() > plan::kMostJobs) {
    return absl::InvalidArgumentError(absl::StrCat(paths.size(), " jobs; at most ", plan::kMostJobs, " are planned"));
  }
  std::vector<plan::JobProfile> profiles;
  std::vector<std::string> names;
  for (const std::string& path : paths) {
    const absl::StatusOr<Trace> trace = ReadTraceArgument(context, path);
    if (!trace.ok()) return trace.status();
    names.push_back(plan::JobName(path, names));
    profiles.push_back(plan::ProfileOf(names.back(), *trace, config.options));
    if (profiles.back().peak_reserved == 0) {
      return absl::InvalidArgumentError(absl::StrCat(path, ": allocates nothing"));
    }
  }
  return profiles;
}

const char* NameOf(plan::Fit fit) {
  switch (fit) {
    case plan::Fit::kPrivately:
      return "privately";
    case plan::Fit::kReclaiming:
      return "reclaiming";
    case plan::Fit::kInTurns:
      return "in_turns";
    case plan::Fit::kNot:
      return "not";
  }
  return "";
}

// Explains why the jobs do not fit: one job alone is too large, or all jobs together are.
std::string Excess(const std::vector<plan::JobProfile>& profiles, uint64_t device_bytes) {
  const auto largest = std::max_element(profiles.begin(), profiles.end(), [](const auto& a, const auto& b) {
    return a.smallest_device < b.smallest_device;
  });
  if (largest->smallest_device <= device_bytes)
    return "what they have at all times leaves too little for the largest step";
  const auto too_large = std::count_if(profiles.begin(), profiles.end(), [&](const plan::JobProfile& profile) {
    return profile.smallest_device > device_bytes;
  });
  std::string needs = absl::StrCat(largest->name, " needs ", FormatBytes(largest->smallest_device), " even alone");
  if (too_large == 1) return needs;
  return absl::StrCat(needs, ", and ", too_large - 1, too_large == 2 ? " other does" : " others do",
                      " not fit alone either");
}

std::string Verdict(const std::vector<plan::JobProfile>& profiles, const plan::SharePlan& plan, uint64_t device_bytes) {
  switch (plan.fit) {
    case plan::Fit::kPrivately:
      return "They fit together, even with a private cache each. Nobody waits.";
    case plan::Fit::kReclaiming:
      return "They fit together: private caches would not, but what is reclaimable goes to others. Nobody waits.";
    case plan::Fit::kInTurns:
      return "They fit in turns: not all peaks at once, so jobs wait for memory.";
    case plan::Fit::kNot:
      return absl::StrCat(profiles.size() == 1 ? "It does" : "They do", " not fit: ", Excess(profiles, device_bytes),
                          ".");
  }
  return "";
}

std::string Waits(double ticks, const plan::JobProfile& profile) {
  const double share = ticks / static_cast<double>(plan::kTicks);
  return absl::StrFormat("%s (%.0f operations)", Percent(share), share * static_cast<double>(profile.step_operations));
}

void PrintShare(const std::vector<plan::JobProfile>& profiles, const plan::SharePlan& plan, uint64_t device_bytes) {
  std::printf("%s on %s. %s\n\n", Counted(profiles.size(), "job").c_str(), FormatBytes(device_bytes).c_str(),
              Verdict(profiles, plan, device_bytes).c_str());
  const bool fits = plan.fit != plan::Fit::kNot;
  std::vector<std::vector<std::string>> rows = {
      {"JOB", ">PEAK ALLOCATED", ">PEAK RESERVED", ">PEAK NEEDED", ">AT ALL TIMES", ">LIMIT", ">GUARANTEE", "STEP"}};
  for (size_t i = 0; i < profiles.size(); ++i) {
    const plan::JobProfile& profile = profiles[i];
    rows.push_back({profile.name, FormatBytes(profile.peak_allocated), FormatBytes(profile.peak_reserved),
                    FormatBytes(profile.peak_needed), FormatBytes(profile.floor_needed),
                    fits ? FormatBytes(plan.jobs[i].limit) : "-", fits ? FormatBytes(plan.jobs[i].guarantee) : "-",
                    absl::StrCat(profile.has_marks ? "last step, " : "second half, ",
                                 Counted(profile.step_operations, "operation"))});
  }
  std::fputs(Table(rows).c_str(), stdout);

  const auto way = [&](const char* name, uint64_t bytes, const char* meaning) {
    rows.push_back({name, FormatBytes(bytes), bytes <= device_bytes ? "fits" : "too much", meaning});
  };
  rows = {{"TOGETHER", ">BYTES", "", ""}};
  way("private caches", plan.private_bytes, "each keeps what it reserved at its peak");
  way("all peaks at once", plan.worst_bytes, "reclaimable memory goes to others");
  way("staggered", plan.staggered_bytes, "steps of equal length that begin as below");
  way("in turns", plan.turns_bytes, "one peak at a time, beside what the others have at all times");
  std::printf("\n");
  std::fputs(Table(rows).c_str(), stdout);
  std::printf("Saved against private caches: %s if all peaks come at once, %s in turns.\n",
              FormatBytes(plan.private_bytes - std::min(plan.private_bytes, plan.worst_bytes)).c_str(),
              FormatBytes(plan.private_bytes - std::min(plan.private_bytes, plan.turns_bytes)).c_str());

  if (!fits) return;
  rows = {{"JOB", ">BEGINS LATER BY", ">WAITS, ALL AT ONCE", ">WAITS, IN TURNS"}};
  for (size_t i = 0; i < profiles.size(); ++i) {
    const plan::JobShare& job = plan.jobs[i];
    rows.push_back({profiles[i].name,
                    absl::StrCat(Percent(static_cast<double>(job.shift) / plan::kTicks), " of a step"),
                    job.wait_together.has_value() ? Waits(*job.wait_together, profiles[i]) : "for ever",
                    Waits(job.wait_in_turns, profiles[i])});
  }
  std::printf("\nWaits are shares of a step; the traces have no times, so all steps are taken to last equally long.\n");
  std::fputs(Table(rows).c_str(), stdout);
  if (!plan.jobs.front().wait_together.has_value()) {
    std::printf(
        "If all begin a step at once, each can end up with part of what it needs and wait for the others. Requests "
        "are\n"
        "then refused after max_wait. Start the jobs staggered, or let only one at a time begin a step.\n");
  }
}

Json ShareJson(const std::vector<plan::JobProfile>& profiles, const plan::SharePlan& plan, uint64_t device_bytes,
               const std::string& policy) {
  Json jobs = Json::array();
  for (size_t i = 0; i < profiles.size(); ++i) {
    const plan::JobProfile& profile = profiles[i];
    const plan::JobShare& share = plan.jobs[i];
    Json job = {{"name", profile.name},
                {"operations", profile.operations},
                {"step_operations", profile.step_operations},
                {"peak_allocated_bytes", profile.peak_allocated},
                {"peak_reserved_bytes", profile.peak_reserved},
                {"peak_needed_bytes", profile.peak_needed},
                {"floor_needed_bytes", profile.floor_needed},
                {"limit_bytes", nullptr},
                {"guarantee_bytes", nullptr},
                {"shift_steps", static_cast<double>(share.shift) / plan::kTicks},
                {"wait_together_steps", nullptr},
                {"wait_in_turns_steps", nullptr}};
    if (share.wait_together.has_value()) job["wait_together_steps"] = *share.wait_together / plan::kTicks;
    if (plan.fit != plan::Fit::kNot) {
      job["limit_bytes"] = share.limit;
      job["guarantee_bytes"] = share.guarantee;
      job["wait_in_turns_steps"] = share.wait_in_turns / plan::kTicks;
    }
    jobs.push_back(std::move(job));
  }
  return {{"device_bytes", device_bytes},
          {"fit", NameOf(plan.fit)},
          {"private_bytes", plan.private_bytes},
          {"worst_bytes", plan.worst_bytes},
          {"staggered_bytes", plan.staggered_bytes},
          {"turns_bytes", plan.turns_bytes},
          {"jobs", std::move(jobs)},
          {"policy", policy}};
}

}  // namespace

absl::Status PlanShare(const Context& context) {
  const absl::StatusOr<ReplayConfig> config = PlanConfigOf(context.replay);
  if (!config.ok()) return config.status();
  if (config->device_bytes == ReplayConfig::kUnlimitedBytes) {
    return absl::InvalidArgumentError("share what? say --device-bytes, as 80GiB");
  }
  if (absl::Status status = CheckPlanOutput(context.output, context.plan.jobs); !status.ok()) return status;
  const absl::StatusOr<std::vector<plan::JobProfile>> profiles = ReadJobs(context, *config);
  if (!profiles.ok()) return profiles.status();
  const plan::SharePlan plan = plan::PlanShare(*profiles, config->device_bytes);
  const bool fits = plan.fit != plan::Fit::kNot;
  const std::string policy = fits ? plan::PolicyText(*profiles, plan, config->device_bytes) : "";
  const bool writes = !context.output.empty();
  if (writes && fits) {
    absl::Status written = WriteFile(context.output, policy);
    if (!written.ok() || context.output == "-") return written;
  }
  if (context.json) {
    std::printf("%s\n", JsonText(ShareJson(*profiles, plan, config->device_bytes, policy), /*indent=*/2).c_str());
  } else {
    PrintShare(*profiles, plan, config->device_bytes);
    if (fits) std::printf("\nRules for the daemon's configuration:\n\n%s", policy.c_str());
  }
  if (writes && !fits) return absl::FailedPreconditionError("the jobs do not fit, so there is no policy to write");
  return absl::OkStatus();
}

}  // namespace vrambroker::vramctl
