// SPDX-License-Identifier: Apache-2.0
//
// vramctl diagnose, vramctl ooms --diagnose: finds settings able to serve a refused request, by trying them.
#include "allocator/replay/diagnose.h"

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "allocator/base/bytes.h"
#include "allocator/heap/size_class.h"
#include "allocator/replay/torch_snapshot.h"
#include "allocator/replay/torch_trace.h"
#include "allocator/replay/tune.h"
#include "allocator/wire/admin_json.h"
#include "client/heap/out_of_memory.h"
#include "client/vramctl/commands/commands.h"
#include "client/vramctl/commands/heap_file.h"
#include "client/vramctl/commands/snapshot_file.h"
#include "client/vramctl/daemon/daemon_calls.h"
#include "client/vramctl/options/refusal.h"
#include "client/vramctl/views/output.h"

namespace vrambroker::vramctl {
namespace {

using Json = nlohmann::ordered_json;

// The refused job may still be running on these processors.
void YieldToOthers() {
  constexpr int kNice = 10;
  (void)setpriority(PRIO_PROCESS, 0, kNice);
}

// Each replay holds everything present at the start of the recording.
int ThreadsFor(const Trace& trace) {
  constexpr uint64_t kManyIds = 1'000'000;
  const int half = static_cast<int>(std::thread::hardware_concurrency()) / 2;
  return trace.ids > kManyIds ? 1 : std::clamp(half, 1, 8);
}

// Time limit for trying settings. A recording with many frees waiting for streams is slow to replay.
constexpr absl::Duration kTime = absl::Seconds(120);

std::string NotAll(bool is_complete) {
  return is_complete ? "" : absl::StrFormat(" (in %.0f s; not all)", absl::ToDoubleSeconds(kTime));
}

void ShowProgress(size_t done, size_t total) {
  if (isatty(STDERR_FILENO) == 0) return;
  std::fprintf(stderr, "\rtrying settings: %zu of %zu%s", done, total, done == total ? "\r\x1b[K" : "");
}

absl::StatusOr<Trace> TraceOf(const HeapSnapshot& heap) {
  absl::StatusOr<Trace> trace = TraceFromTorchSnapshot(TorchSnapshot({heap}), 0);
  if (!trace.ok()) {
    return Refusal(
        {trace.status().code(), absl::StrCat("what was recorded cannot be replayed: ", trace.status().message())});
  }
  return trace;
}

// Lists differences between the replay and the recording, except a start in the middle, reported elsewhere.
// `with_refused`: refused requests are replayed, too.
std::vector<std::string> NotesOf(const Trace& trace, bool with_refused) {
  std::vector<std::string> notes;
  for (const std::string& note : trace.notes) {
    const bool is_known = absl::StartsWith(note, "the recording began with") ||
                          (!with_refused && absl::StrContains(note, "failed allocation"));
    if (!is_known) notes.push_back(note);
  }
  return notes;
}

double SecondsOf(const HeapSnapshot& heap) {
  if (heap.history.empty()) return 0;
  // Clients can send any number.
  return (static_cast<double>(heap.history.back().time_us) - static_cast<double>(heap.history.front().time_us)) / 1e6;
}

std::string SettingsName(const AllocatorOptions& options) {
  const std::string text = FormatAllocConf(options);
  return text.empty() ? "default" : text;
}

// Adds the session's memory fraction, omitted by replays: new settings replace the old ones as a whole.
AllocatorOptions WithFraction(AllocatorOptions options, const HeapSnapshot& heap, const SettingsTarget& target) {
  options.per_process_memory_fraction = heap.options.per_process_memory_fraction;
  return target.Nearest(options);
}

Json TrialJson(const Trial& trial, const HeapSnapshot& heap, const SettingsTarget& target) {
  return {{"alloc_conf", FormatAllocConf(trial.options)},
          {"use", target.Use(WithFraction(trial.options, heap, target))},
          {"served", trial.is_served},
          {"refused_before", trial.refused_before},
          {"missing_bytes", trial.missing_bytes},
          {"peak_allocated_bytes", trial.peak_allocated_bytes},
          {"peak_reserved_bytes", trial.peak_reserved_bytes},
          {"device_calls", trial.device_calls},
          {"spare_bytes", trial.spare_bytes}};
}

// True if the recording began with no memory placed by the old settings. Segments leased whole do not count: no setting
// affects them.
bool IsFromTheBeginning(const HeapSnapshot& heap, const Trace& trace) {
  uint64_t whole = 0;
  for (const SegmentSnapshot& segment : heap.segments) whole += segment.whole ? segment.bytes : 0;
  return trace.start.ReservedBytes() <= whole;
}

// Explains why the diagnosis does not cover the whole job.
std::string OnlyTheEnd(const HeapSnapshot& heap) {
  // A free may be listed as two events, but is kept as a single event.
  const uint64_t events = std::min<uint64_t>(heap.history.size(), heap.max_events);
  return absl::StrCat("only the end of the session was tried, of the last ", Counted(events, "event"),
                      "; what was held before was placed by the old settings");
}

std::string RecordItAll(const std::string& session) {
  return absl::StrCat("start the job again and have all of it recorded, with vramctl trace ", session,
                      " --until-oom -o FILE or vramctl record ", session,
                      " 1000000 while it holds nothing yet; then diagnose it again");
}

struct Diagnosed {
  const v1::OutOfMemoryEvent& event;
  const OutOfMemory& oom;
  const HeapSnapshot& heap;
  const Trace& trace;
  const RefusalToDiagnose& refusal;
  const SettingsTarget& target;
  const Diagnosis& diagnosis;
  std::optional<uint64_t> live_limit_bytes;  // the session's current limit, if the session is live
  const bool is_from_the_beginning = IsFromTheBeginning(heap, trace);
};

// Advises how to reach the needed bound: each limiting bound must be raised. Empty: no bound up to the capacity serves
// the request.
std::string MoreRoom(const Diagnosed& of) {
  if (!of.diagnosis.needed_bound_bytes.has_value()) return "";
  const v1::OutOfMemory& report = of.event.out_of_memory();
  const uint64_t needed = *of.diagnosis.needed_bound_bytes;
  const uint64_t growth = needed - std::min(needed, report.reserved_bytes());
  const auto mib = [](uint64_t bytes) { return absl::StrCat(RoundUpTo(bytes, 1_MiB) / 1_MiB, "MiB"); };
  std::vector<std::string> parts;
  if (needed > report.limit_bytes()) {
    if (!of.live_limit_bytes.has_value()) {  // a later session may have taken the name
      parts.push_back(absl::StrCat("run it with a limit of ", mib(needed)));
    } else if (*of.live_limit_bytes >= needed) {
      parts.push_back(
          absl::StrCat("keep the limit of ", FormatBytes(*of.live_limit_bytes), " that it has been given since"));
    } else {
      parts.push_back(absl::StrCat("raise the limit to ", mib(needed), " (vramctl limit ",
                                   SessionText(of.event.client()), " ", mib(needed), ")"));
    }
  }
  // The user, or the claim, is already charged for growth within the guarantee.
  const uint64_t guaranteed = report.guarantee_bytes() - std::min(report.guarantee_bytes(), report.reserved_bytes());
  const uint64_t growth_of_share = growth - std::min(growth, guaranteed);
  if (report.user_limit_bytes() > 0 && report.user_reserved_bytes() + growth_of_share > report.user_limit_bytes()) {
    parts.push_back(absl::StrCat("have user_limit raised to ", mib(report.user_reserved_bytes() + growth_of_share)));
  }
  if (const uint64_t of_claim = report.claim_reserved_bytes() + growth_of_share;
      !report.claim().empty() && of_claim > report.claim_limit_bytes()) {
    parts.push_back(absl::StrCat("have the limit of claim ", report.claim(), " raised to ", mib(of_claim),
                                 " (vramctl claim set ", report.claim(), " --limit ", mib(of_claim), ")"));
  }
  const uint64_t free =
      report.device_available_bytes() - std::min(report.device_available_bytes(), report.device_kept_free_bytes());
  if (growth > free) {
    const uint64_t missing = growth - free;
    std::string from = "other sessions";
    for (const OutOfMemory::IdleHolder& holder : of.oom.idle_holders) {
      using Why = OutOfMemory::IdleHolder::Why;
      const bool can_be_had =
          holder.why == Why::kNotAsked || holder.why == Why::kKept || holder.why == Why::kDidNotAnswer;
      if (!can_be_had || holder.idle_bytes < missing) continue;
      from = absl::StrCat(holder.client, ", which held ", FormatBytes(holder.idle_bytes), " of reclaimable memory,");
      break;
    }
    parts.push_back(absl::StrCat("have ", from, " give ", FormatBytes(missing), " of the device back"));
  }
  return absl::StrJoin(parts, " and ");
}

// Lists advice, best first, where no tried setting helps, or not surely. All advice was tried, except for recording
// more.
std::vector<std::string> NextSteps(const Diagnosed& of) {
  const Diagnosis& diagnosis = of.diagnosis;
  std::vector<std::string> steps;
  if (diagnosis.recorded.is_served) return steps;
  if (diagnosis.emptied.has_value()) {
    steps.push_back(
        absl::StrCat("empty the cache ", diagnosis.emptied->calls_before, " allocations and frees earlier, when ",
                     FormatBytes(diagnosis.emptied->allocated_bytes),
                     " were allocated (empty_cache), with its own settings: it is served then, peak reserved ",
                     FormatBytes(diagnosis.emptied->trial.peak_reserved_bytes)));
  }
  if (!diagnosis.helping.empty()) {
    if (of.is_from_the_beginning) return {};
    steps.push_back(absl::StrCat("for a sure answer, ", RecordItAll(of.event.client())));
    return steps;
  }
  if (diagnosis.largest_served_bytes > 0) {
    steps.push_back(absl::StrCat("ask for less at that point, as with a smaller batch: up to ",
                                 FormatBytes(diagnosis.largest_served_bytes), " is served instead of ",
                                 FormatBytes(of.refusal.requested_bytes)));
  }
  if (const std::string more = MoreRoom(of); !more.empty()) steps.push_back(absl::StrCat(more, ": it is served then"));
  return steps;
}

void PrintTrials(const std::vector<Trial>& trials, const Trial& recorded) {
  std::vector<std::vector<std::string>> rows = {
      {"SETTINGS", ">PEAK RESERVED", ">TO SPARE", ">PEAK ALLOCATED", ">DEVICE CALLS", "REQUEST"}};
  const auto add = [&](const Trial& trial, const char* note) {
    rows.push_back({absl::StrCat(SettingsName(trial.options), note), FormatBytes(trial.peak_reserved_bytes),
                    trial.is_served ? FormatBytes(trial.spare_bytes) : "-", FormatBytes(trial.peak_allocated_bytes),
                    absl::StrCat(trial.device_calls),
                    trial.is_served ? "served" : absl::StrCat(FormatBytes(trial.missing_bytes), " missing")});
  };
  for (const Trial& trial : trials) add(trial, "");
  add(recorded, " (as it was)");
  std::fputs(Table(rows).c_str(), stdout);
}

void PrintSteps(const char* title, const std::vector<std::string>& steps) {
  std::printf("\n%s:\n", title);
  for (const std::string& step : steps) std::printf("- %s\n", step.c_str());
}

void PrintHelping(const Diagnosed& of) {
  const Diagnosis& diagnosis = of.diagnosis;
  const Trial& best = diagnosis.helping.front();
  std::printf("%s would have served it%s, peak reserved %s instead of %s.\n", SettingsName(best.options).c_str(),
              of.is_from_the_beginning ? "" : " from there on", FormatBytes(best.peak_reserved_bytes).c_str(),
              FormatBytes(diagnosis.recorded.peak_reserved_bytes).c_str());
  if (best.spare_bytes < EnoughToSpare(of.refusal.bound_bytes)) {
    std::printf("It had %s to spare of %s: a job that does a little more is refused again.\n",
                best.spare_bytes == 0 ? "nothing" : absl::StrCat("only ", FormatBytes(best.spare_bytes)).c_str(),
                FormatBytes(of.refusal.bound_bytes).c_str());
  }
  if (!of.is_from_the_beginning) {
    std::printf("That is not sure: %s. With the new ones from its start, the job may be refused earlier.\n",
                OnlyTheEnd(of.heap).c_str());
  }
  std::printf("\n");
  PrintTrials(diagnosis.helping, diagnosis.recorded);
  std::printf("\nTo use it:\n  %s\n", of.target.Use(WithFraction(best.options, of.heap, of.target)).c_str());
  if (!of.is_from_the_beginning) PrintSteps("What is sure", NextSteps(of));
}

void PrintDiagnosis(const Diagnosed& of) {
  const Diagnosis& diagnosis = of.diagnosis;
  const Trial& recorded = diagnosis.recorded;
  if (of.refusal.never_fits() && !recorded.is_served) {
    std::printf("It can never fit: it asks for %s, and the session could have %s in all. No setting changes that.\n",
                FormatBytes(of.refusal.requested_bytes).c_str(), FormatBytes(of.refusal.bound_bytes).c_str());
    PrintSteps("What helps", NextSteps(of));
    return;
  }
  std::printf("recorded: %s in the %.1f s before it, with %s reserved at the beginning\n",
              Counted(of.refusal.op, "operation").c_str(), SecondsOf(of.heap),
              FormatBytes(of.trace.start.ReservedBytes()).c_str());
  for (const std::string& note : NotesOf(of.trace, /*with_refused=*/false)) std::printf("note: %s\n", note.c_str());
  if (diagnosis.tried == 0 && !diagnosis.is_complete) {
    std::printf("It takes too long to replay these, since many frees wait for other streams.\n");
    return;
  }
  if (recorded.is_served) {
    std::printf(
        "A replay of the recording serves the request with the session's own settings, so what was tried on it would "
        "say nothing about the refusal. What made it is not in the recording: memory that has come back since, other "
        "threads, streams that were not done, or the device.\n");
    return;
  }
  if (recorded.refused_before > 0) {
    std::printf("note: a replay with the session's own settings refuses %s before it that were served.\n",
                Counted(recorded.refused_before, "request").c_str());
  }
  std::printf("tried: %s that %s has%s, each on these operations and then on the request\n\n",
              Counted(diagnosis.tried, "setting").c_str(), of.target.name().c_str(),
              NotAll(diagnosis.is_complete).c_str());
  if (!diagnosis.helping.empty()) {
    PrintHelping(of);
    return;
  }
  if (!of.is_from_the_beginning) std::printf("Note: %s.\n", OnlyTheEnd(of.heap).c_str());
  std::printf("None of %zu settings would have helped; with its own settings the job needs %s more.\n", diagnosis.tried,
              FormatBytes(recorded.missing_bytes).c_str());
  if (diagnosis.nearest.has_value()) {
    std::printf("The nearest, %s, needs %s more.\n", SettingsName(diagnosis.nearest->options).c_str(),
                FormatBytes(diagnosis.nearest->missing_bytes).c_str());
  }
  const std::vector<std::string> steps = NextSteps(of);
  if (steps.empty()) {
    std::printf("Nothing else that was tried would have served it either.\n");
    return;
  }
  PrintSteps("The next best", steps);
}

// Null if the diagnosis covers the whole session.
Json Caveat(const HeapSnapshot& heap, bool is_from_the_beginning) {
  return is_from_the_beginning ? Json() : Json(OnlyTheEnd(heap));
}

Json DiagnosisJson(const Diagnosed& of) {
  const Diagnosis& diagnosis = of.diagnosis;
  Json helping = Json::array();
  for (const Trial& trial : diagnosis.helping) helping.push_back(TrialJson(trial, of.heap, of.target));
  Json json = {{"event", ToJson(of.event)},
               {"for", of.target.name()},
               {"operations", of.refusal.op},
               {"seconds", SecondsOf(of.heap)},
               {"start_reserved_bytes", of.trace.start.ReservedBytes()},
               {"from_start", of.is_from_the_beginning},
               {"caveat", Caveat(of.heap, of.is_from_the_beginning)},
               {"bound_bytes", of.refusal.bound_bytes},
               {"reproduced", !diagnosis.recorded.is_served},
               {"notes", NotesOf(of.trace, /*with_refused=*/false)},
               {"recorded", TrialJson(diagnosis.recorded, of.heap, of.target)},
               {"tried", diagnosis.tried},
               {"complete", diagnosis.is_complete},
               {"never_fits", of.refusal.never_fits()},
               {"helping", std::move(helping)},
               {"nearest", nullptr},
               {"empty_cache", nullptr},
               {"largest_served_bytes", diagnosis.largest_served_bytes},
               {"needed_bound_bytes", nullptr},
               {"next_steps", NextSteps(of)}};
  if (diagnosis.nearest.has_value()) json["nearest"] = TrialJson(*diagnosis.nearest, of.heap, of.target);
  if (diagnosis.emptied.has_value()) {
    json["empty_cache"] = {{"operations_before", of.refusal.op - diagnosis.emptied->op},
                           {"calls_before", diagnosis.emptied->calls_before},
                           {"allocated_bytes", diagnosis.emptied->allocated_bytes},
                           {"trial", TrialJson(diagnosis.emptied->trial, of.heap, of.target)}};
  }
  if (diagnosis.needed_bound_bytes.has_value()) json["needed_bound_bytes"] = *diagnosis.needed_bound_bytes;
  return json;
}

void PrintRefusal(const v1::OutOfMemoryEvent& event, const OutOfMemory& oom) {
  std::printf("refusal %s: %s, device %d, %s, %s\n", absl::StrCat(event.out_of_memory().refusal()).c_str(),
              event.client().c_str(), oom.device,
              absl::FormatTime("%Y-%m-%d %H:%M:%S", TimeOf(event.time()), absl::LocalTimeZone()).c_str(),
              OutOfMemoryCauseName(oom.cause));
  std::printf("why: %s\n", oom.explanation.c_str());
}

// Handles a request larger than the device. No recording exists, since no setting can help.
void SayThatNoDeviceHasIt(const Context& context, const SettingsTarget& target, const v1::OutOfMemoryEvent& event,
                          const OutOfMemory& oom) {
  const std::string step = absl::StrCat("ask for less: the device has ", FormatBytes(oom.device_capacity_bytes));
  if (!context.json) {
    PrintRefusal(event, oom);
    std::printf("It can never fit: it asks for %s. No setting changes that.\n",
                FormatBytes(oom.requested_bytes).c_str());
    PrintSteps("What helps", {step});
    return;
  }
  Print({{"event", ToJson(event)},
         {"for", target.name()},
         {"operations", 0},
         {"seconds", 0},
         {"start_reserved_bytes", 0},
         {"from_start", true},
         {"caveat", nullptr},
         {"bound_bytes", oom.device_capacity_bytes},
         {"reproduced", true},
         {"notes", Json::array()},
         {"recorded", nullptr},
         {"tried", 0},
         {"complete", true},
         {"never_fits", true},
         {"helping", Json::array()},
         {"nearest", nullptr},
         {"empty_cache", nullptr},
         {"largest_served_bytes", 0},
         {"needed_bound_bytes", nullptr},
         {"next_steps", Json::array({step})}});
}

// Returns the refusals on record, newest first; of one session, or of all.
absl::StatusOr<v1::ListOutOfMemoryResponse> Refusals(Daemon& daemon, const std::optional<v1::SessionRef>& session) {
  v1::ListOutOfMemoryRequest request;
  if (session.has_value()) *request.mutable_session() = *session;
  v1::ListOutOfMemoryResponse response;
  if (absl::Status status = Call(daemon, &v1::Admin::Stub::ListOutOfMemory, request, &response); !status.ok()) {
    return status;
  }
  return response;
}

absl::Status DiagnoseEvent(const Context& context, const SettingsTarget& target, Daemon& daemon,
                           const v1::OutOfMemoryEvent& event) {
  const OutOfMemory oom = client_internal::FromProto(event.out_of_memory());
  if (oom.cause == OutOfMemory::Cause::kLargerThanDevice) {
    SayThatNoDeviceHasIt(context, target, event, oom);
    return absl::OkStatus();
  }
  const absl::StatusOr<HeapSnapshot> heap = ReadRefusalSnapshot(daemon, event.out_of_memory().refusal());
  if (!heap.ok()) return heap.status();
  if (absl::Status status = CheckHasBlocks({*heap}, event.client()); !status.ok()) return status;
  const absl::StatusOr<Trace> trace = TraceOf(*heap);
  if (!trace.ok()) return trace.status();
  // Take the last refusal of this size: more requests may have been refused before the recording was taken.
  const std::vector<size_t>& refused = trace->recorded_refusals;
  const auto found = std::find_if(refused.rbegin(), refused.rend(),
                                  [&](size_t op) { return trace->ops[op].bytes == oom.block_bytes; });
  if (found == refused.rend() || oom.requested_bytes >= kMaxRequestBytes) {
    return Refusal(absl::NotFoundError(absl::StrCat(
        "what was recorded does not show refusal ", event.out_of_memory().refusal(),
        ": the blocks are cut by an allocator of the application's own, as PyTorch's (record it with "
        "torch.cuda.memory._record_memory_history, and run vramctl tune on the snapshot), or other events have pushed "
        "it out")));
  }
  const uint64_t bound = oom.reserved_bytes + oom.room_bytes;
  const RefusalToDiagnose refusal{
      .op = *found,
      .requested_bytes = oom.requested_bytes,
      .bound_bytes = bound,
      .reserved_bytes = oom.reserved_bytes,
      .capacity_bytes = std::max({bound, oom.device_capacity_bytes, trace->start.ReservedBytes()}),
      .is_limit = bound == oom.limit_bytes && bound < oom.device_capacity_bytes};
  ReplayConfig config;
  config.options = trace->recorded_options.value_or(config.options);
  const absl::Time end = absl::Now() + kTime;
  DiagnoseOptions options{
      .target = target, .threads = ThreadsFor(*trace), .may_go_on = [end] { return absl::Now() < end; }};
  if (!context.json) options.progress = ShowProgress;
  const Diagnosis diagnosis = Diagnose(*trace, config, refusal, options);
  const absl::StatusOr<v1::Session> live = GetSession(daemon, SessionRefOf(event.session_id()));
  std::optional<uint64_t> live_limit;
  if (live.ok() && oom.device < live->devices_size()) live_limit = live->devices(oom.device).limit_bytes();
  const Diagnosed of{event, oom, *heap, *trace, refusal, target, diagnosis, live_limit};
  if (context.json) {
    Print(DiagnosisJson(of));
    return absl::OkStatus();
  }
  PrintRefusal(event, oom);
  PrintDiagnosis(of);
  return absl::OkStatus();
}

// Diagnoses a session without refusals: finds settings able to do its work so far with less memory.
absl::Status DiagnoseHeap(const Context& context, const SettingsTarget& target, Daemon& daemon,
                          const v1::Session& session) {
  const auto device = static_cast<uint32_t>(context.only_device.value_or(0));
  const absl::StatusOr<HeapSnapshot> heap = ReadSnapshot(daemon, session.id(), device);
  if (!heap.ok()) return heap.status();
  if (heap->max_events == 0) {
    return Refusal(
        absl::FailedPreconditionError(absl::StrCat(session.name(), " records no events: run vramctl record ",
                                                   SessionText(session.name()), " 100000, or set record_events")));
  }
  if (absl::Status status = CheckHasBlocks({*heap}, session.name()); !status.ok()) return status;
  const absl::StatusOr<Trace> trace = TraceOf(*heap);
  if (!trace.ok()) return trace.status();
  const bool is_from_the_beginning = IsFromTheBeginning(*heap, *trace);
  ReplayConfig config;
  config.options = trace->recorded_options.value_or(config.options);
  const auto progress = context.json ? [](size_t, size_t) {} : ShowProgress;
  const absl::Time end = absl::Now() + kTime;
  const TuneResult result =
      Tune(*trace, config, target, ThreadsFor(*trace), progress, [end] { return absl::Now() < end; });
  const TuneCandidate* const best = result.by_peak_reserved.empty() ? nullptr : &result.by_peak_reserved.front();
  if (context.json) {
    const auto candidate = [&](const TuneCandidate& of) {
      return Json{{"alloc_conf", FormatAllocConf(of.options)},
                  {"use", target.Use(WithFraction(of.options, *heap, target))},
                  {"peak_allocated_bytes", of.summary.peak_allocated_bytes},
                  {"peak_reserved_bytes", of.summary.peak_reserved_bytes},
                  {"device_calls", of.summary.device_calls}};
    };
    Json json = {{"event", nullptr},
                 {"session", session.name()},
                 {"for", target.name()},
                 {"operations", trace->ops.size()},
                 {"seconds", SecondsOf(*heap)},
                 {"from_start", is_from_the_beginning},
                 {"caveat", Caveat(*heap, is_from_the_beginning)},
                 {"notes", NotesOf(*trace, /*with_refused=*/true)},
                 {"tried", result.tried},
                 {"complete", result.is_complete},
                 {"recorded", candidate(result.baseline)},
                 {"best", nullptr}};
    if (best != nullptr) json["best"] = candidate(*best);
    Print(json);
    return absl::OkStatus();
  }
  std::printf("%s: no refused request on record\n", session.name().c_str());
  std::printf("recorded: %s in %.1f s; peak reserved %s, peak allocated %s\n",
              Counted(trace->ops.size(), "operation").c_str(), SecondsOf(*heap),
              FormatBytes(result.baseline.summary.peak_reserved_bytes).c_str(),
              FormatBytes(result.baseline.summary.peak_allocated_bytes).c_str());
  for (const std::string& note : NotesOf(*trace, /*with_refused=*/true)) std::printf("note: %s\n", note.c_str());
  std::printf("tried: %s that %s has%s, each on these operations\n\n", Counted(result.tried, "setting").c_str(),
              target.name().c_str(), NotAll(result.is_complete).c_str());
  if (best == nullptr) {
    std::printf("None would have reserved less.\n");
    return absl::OkStatus();
  }
  std::printf("%s would have reserved %s at the peak instead of %s.\n\nTo use it:\n  %s\n",
              SettingsName(best->options).c_str(), FormatBytes(best->summary.peak_reserved_bytes).c_str(),
              FormatBytes(result.baseline.summary.peak_reserved_bytes).c_str(),
              target.Use(WithFraction(best->options, *heap, target)).c_str());
  if (!is_from_the_beginning) {
    std::printf("\nThat is not sure: %s. For a sure answer, %s.\n", OnlyTheEnd(*heap).c_str(),
                RecordItAll(session.name()).c_str());
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status DiagnoseRefusal(const Context& context, uint64_t refusal) {
  const absl::StatusOr<SettingsTarget> target = TargetOf(context);
  if (!target.ok()) return target.status();
  absl::StatusOr<Daemon> daemon = Daemon::Connect(context);
  if (!daemon.ok()) return daemon.status();
  YieldToOthers();
  const absl::StatusOr<v1::ListOutOfMemoryResponse> refusals = Refusals(*daemon, std::nullopt);
  if (!refusals.ok()) return refusals.status();
  for (const v1::OutOfMemoryEvent& event : refusals->events()) {
    if (event.out_of_memory().refusal() == refusal) return DiagnoseEvent(context, *target, *daemon, event);
  }
  return Refusal(
      absl::NotFoundError(absl::StrCat("no refusal ", refusal, refusals->own_only() ? " of your own sessions" : "",
                                       " is on record; vramctl ooms lists those that are")));
}

absl::Status DiagnoseSession(const Context& context, const std::string& session) {
  if (IsHeapFile(session)) return DiagnoseFile(context, session);
  const absl::StatusOr<SettingsTarget> target = TargetOf(context);
  if (!target.ok()) return target.status();
  absl::StatusOr<Daemon> daemon = Daemon::Connect(context);
  if (!daemon.ok()) return daemon.status();
  YieldToOthers();
  // Names are unique among live sessions only: prefer a live session, else the last ended session.
  const v1::SessionRef wanted = ParseSessionRef(session);
  const absl::StatusOr<v1::Session> live = GetSession(*daemon, wanted);
  if (absl::IsInvalidArgument(live.status())) return live.status();  // the name matches two live sessions
  const absl::StatusOr<v1::ListOutOfMemoryResponse> refusals =
      Refusals(*daemon, live.ok() ? SessionRefOf(live->id()) : wanted);
  if (!refusals.ok()) return refusals.status();
  const v1::OutOfMemoryEvent* newest = nullptr;
  for (const v1::OutOfMemoryEvent& event : refusals->events()) {
    if (context.only_device.has_value() &&
        event.out_of_memory().device() != static_cast<uint32_t>(*context.only_device)) {
      continue;
    }
    if (newest == nullptr) newest = &event;
    if (event.session_id() != newest->session_id()) break;
    if (!event.recorded()) continue;
    if (newest != &event && !context.json) {
      std::printf("Refusal %s is newer, but nothing was recorded of it.\n",
                  absl::StrCat(newest->out_of_memory().refusal()).c_str());
    }
    return DiagnoseEvent(context, *target, *daemon, event);
  }
  if (newest != nullptr) return DiagnoseEvent(context, *target, *daemon, *newest);  // reports the missing recording
  if (!live.ok() && !refusals->events().empty() && context.only_device.has_value()) {
    return Refusal(absl::NotFoundError(absl::StrCat(session, " has ended, and was not refused on device ",
                                                    *context.only_device, " that is on record")));
  }
  if (!live.ok()) return live.status();
  return DiagnoseHeap(context, *target, *daemon, *live);
}

absl::StatusOr<SettingsTarget> TargetOf(const Context& context) {
  if (context.target.empty()) return SettingsTarget();
  absl::StatusOr<SettingsTarget> target = SettingsTarget::Parse(context.target);
  if (!target.ok()) return absl::InvalidArgumentError(absl::StrCat("--for: ", target.status().message()));
  return target;
}

}  // namespace vrambroker::vramctl
