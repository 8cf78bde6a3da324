// SPDX-License-Identifier: Apache-2.0
#include "allocator/replay/diagnose.h"

#include <algorithm>
#include <set>
#include <tuple>
#include <utility>

#include "allocator/base/bytes.h"
#include "allocator/heap/size_class.h"
#include "allocator/replay/in_parallel.h"
#include "allocator/replay/tune.h"

namespace vrambroker {
namespace {

// The recording up to the request, replayed with its settings and as much memory as needed.
struct Before {
  std::vector<bool> was_refused;  // by operation
  // By operation: a call of the program, not an action of the heap or an addition for the replay.
  std::vector<bool> is_call;
  // By operation: gives segments back, perhaps by the heap itself for the next segment needed.
  std::vector<bool> is_own_flush;
  bool has_own_flushes = false;
  uint64_t peak_reserved_bytes = 0;
  uint64_t reserved_bytes = 0;                // at the request
  std::vector<EmptiedCache> least_allocated;  // moments to empty the cache at, latest last; not tried yet
};

// Returns the lowest points of allocated bytes in the last half of `calls`, in the last quarter, and so on: the ends of
// a job's steps. `calls`: all before the request, each with the bytes allocated then.
std::vector<EmptiedCache> LeastAllocated(const std::vector<EmptiedCache>& calls) {
  std::vector<EmptiedCache> points;
  for (size_t window = calls.size(); window >= 2; window /= 2) {
    // Picks the last of equals.
    const auto least = std::min_element(
        calls.rbegin(), calls.rbegin() + static_cast<std::ptrdiff_t>(window),
        [](const EmptiedCache& a, const EmptiedCache& b) { return a.allocated_bytes < b.allocated_bytes; });
    if (!points.empty() && points.back().op == least->op) continue;
    points.push_back(*least);
    points.back().calls_before = static_cast<uint64_t>(least - calls.rbegin()) + 1;
  }
  return points;
}

// A refused allocation is a call of the program; its immediate free is made up.
std::vector<bool> CallsOf(const Trace& trace) {
  std::vector<bool> is_call(trace.ops.size());
  std::vector<bool> is_refused(trace.ids);
  for (const size_t op : trace.recorded_refusals) is_refused[trace.ops[op].id] = true;
  for (size_t i = 0; i < trace.ops.size(); ++i) {
    const TraceOp& op = trace.ops[i];
    is_call[i] = op.kind == TraceOp::Kind::kAllocate || (op.kind == TraceOp::Kind::kFree && !is_refused[op.id]);
  }
  return is_call;
}

bool GivesBack(const TraceOp& op) {
  return op.kind == TraceOp::Kind::kGiveBack || op.kind == TraceOp::Kind::kTrim;
}

class Diagnoser {
 public:
  Diagnoser(const Trace& trace, const ReplayConfig& config, const RefusalToDiagnose& refusal,
            const std::function<bool()>& may_go_on)
      : trace_(trace), config_(config), refusal_(refusal), may_go_on_(may_go_on) {
    config_.device_bytes = refusal.capacity_bytes;
    config_.fraction.reset();
    before_.was_refused.assign(trace.ops.size(), false);
    before_.is_own_flush.assign(trace.ops.size(), false);
    before_.is_call = CallsOf(trace);
    for (const size_t op : trace.recorded_refusals) before_.was_refused[op] = true;
    LookAtRecording();
  }

  const std::vector<EmptiedCache>& least_allocated() const { return before_.least_allocated; }

  // Tries the recorded settings. nullopt, here and below: time is over.
  std::optional<Trial> TryRecorded() const {
    return Try(config_.options, {.requested_bytes = refusal_.requested_bytes}, Flushes::kAll);
  }
  std::optional<Trial> TryOthers(const AllocatorOptions& options) const {
    std::optional<Trial> trial = TryBothWays(options, {});
    if (trial.has_value() && trial->Helps()) trial->spare_bytes = SpareBytes(*trial);
    return trial;
  }
  std::optional<Trial> TryEmptied(size_t op) const { return TryBothWays(config_.options, op); }

  // Returns the largest request, up to the refused request, that the recorded settings serve in its place.
  uint64_t LargestServed() const {
    uint64_t served = 0;
    uint64_t refused = refusal_.requested_bytes;
    // Precision: a thousandth of the request.
    const uint64_t step = std::max<uint64_t>(kMinBlockBytes, refusal_.requested_bytes / 1000);
    while (refused - served > step) {
      const uint64_t middle = served + (refused - served) / 2;
      const std::optional<Trial> trial = Try(config_.options, {.requested_bytes = middle}, Flushes::kAll);
      if (!trial.has_value()) return served;
      (trial->is_served ? served : refused) = middle;
    }
    return served;
  }

  // Returns the bound needed with the recorded settings. nullopt: beyond the capacity.
  std::optional<uint64_t> NeededBound(uint64_t missing_bytes) const {
    // With more room the heap flushes later or never, and may need still more.
    constexpr int kTries = 4;
    RefusalToDiagnose with_more = refusal_;
    for (int i = 0; i < kTries && missing_bytes > 0; ++i) {
      if (missing_bytes > refusal_.capacity_bytes - with_more.bound_bytes) return std::nullopt;
      with_more.bound_bytes += missing_bytes;
      const std::optional<Trial> trial = Diagnoser(*this, with_more).TryBothWays(config_.options, {});
      if (!trial.has_value()) return std::nullopt;
      if (trial->Helps()) return with_more.bound_bytes;
      missing_bytes = trial->missing_bytes;
    }
    return std::nullopt;
  }

 private:
  Diagnoser(const Diagnoser& other, const RefusalToDiagnose& refusal)
      : trace_(other.trace_),
        config_(other.config_),
        refusal_(refusal),
        may_go_on_(other.may_go_on_),
        before_(other.before_) {}

  struct Attempt {
    uint64_t requested_bytes = 0;
    std::optional<size_t> empty_before = std::nullopt;  // index of an operation
    uint64_t withheld_bytes = 0;                        // from the limit, all the time
  };
  enum class Flushes {
    kAll,        // as recorded
    kNotItsOwn,  // all but flushes possibly by the heap itself: a replay makes its own
  };

  void LookAtRecording();
  // Marks the operations giving segments back right before `next` as the heap's own flush for `next`.
  void MarkOwnFlush(size_t next);
  // Bound for the bytes held by the heap.
  uint64_t HeapBound() const {
    const uint64_t outside = refusal_.reserved_bytes - std::min(refusal_.reserved_bytes, before_.reserved_bytes);
    return refusal_.bound_bytes - std::min(refusal_.bound_bytes, outside);
  }
  std::optional<Trial> Try(const AllocatorOptions& options, const Attempt& attempt, Flushes flushes) const;
  // Returns the worse trial of the two.
  std::optional<Trial> TryBothWays(const AllocatorOptions& options, std::optional<size_t> empty_before,
                                   uint64_t withheld_bytes = 0) const;
  // Trial::spare_bytes of a helping trial.
  uint64_t SpareBytes(const Trial& trial) const;
  // Asks rarely: reading a clock costs as much as an operation.
  bool MayGoOn(size_t op) const { return op % 256 != 0 || may_go_on_(); }

  const Trace& trace_;
  ReplayConfig config_;
  const RefusalToDiagnose refusal_;
  const std::function<bool()>& may_go_on_;
  Before before_;
};

void Diagnoser::LookAtRecording() {
  Replay replay(config_, trace_);
  std::vector<EmptiedCache> calls;
  uint64_t allocated = replay.allocator().GetMemoryStats().allocated_bytes.all.current;
  std::vector<uint64_t> bytes_of(trace_.ids, 0);
  for (uint32_t id = 0; id < trace_.ids; ++id) {
    if (const Block* block = replay.block(id); block != nullptr) bytes_of[id] = block->bytes;
  }
  for (size_t i = 0; i < refusal_.op; ++i) {
    if (!MayGoOn(i)) break;
    const TraceOp& op = trace_.ops[i];
    if (before_.is_call[i]) calls.push_back({.op = i, .allocated_bytes = allocated});
    if (before_.was_refused[i]) {  // a refused allocation took no memory
      MarkOwnFlush(i);
      continue;
    }
    const bool follows_flush = op.kind == TraceOp::Kind::kAllocate && i > 0 && GivesBack(trace_.ops[i - 1]);
    const uint64_t segments = follows_flush ? replay.allocator().GetMemoryStats().num_device_alloc : 0;
    const Replay::Result result = replay.Do(op);
    if (follows_flush && replay.allocator().GetMemoryStats().num_device_alloc > segments) MarkOwnFlush(i);
    if (result != Replay::Result::kOk) continue;
    if (op.kind == TraceOp::Kind::kAllocate) {
      bytes_of[op.id] = replay.block(op.id)->bytes;
      allocated += bytes_of[op.id];
    } else if (op.kind == TraceOp::Kind::kFree) {
      allocated -= std::min(allocated, std::exchange(bytes_of[op.id], 0));
    }
  }
  MarkOwnFlush(refusal_.op);
  const MemoryStats stats = replay.allocator().GetMemoryStats();
  before_.peak_reserved_bytes = stats.reserved_bytes.all.peak;
  before_.reserved_bytes = stats.reserved_bytes.all.current;
  before_.least_allocated = LeastAllocated(calls);
}

void Diagnoser::MarkOwnFlush(size_t next) {
  for (size_t i = next; i > 0 && GivesBack(trace_.ops[i - 1]); --i) {
    before_.is_own_flush[i - 1] = true;
    before_.has_own_flushes = true;
  }
}

std::optional<Trial> Diagnoser::TryBothWays(const AllocatorOptions& options, std::optional<size_t> empty_before,
                                            uint64_t withheld_bytes) const {
  const Attempt attempt = {
      .requested_bytes = refusal_.requested_bytes, .empty_before = empty_before, .withheld_bytes = withheld_bytes};
  const std::optional<Trial> trial = Try(options, attempt, Flushes::kNotItsOwn);
  if (!trial.has_value() || !trial->Helps() || !before_.has_own_flushes) return trial;
  const std::optional<Trial> as_recorded = Try(options, attempt, Flushes::kAll);
  return !as_recorded.has_value() || !as_recorded->Helps() ? as_recorded : trial;
}

// Tries a lower limit if needed: a heap fills its limit with cached bytes, so the peak alone does not show the need.
uint64_t Diagnoser::SpareBytes(const Trial& trial) const {
  const uint64_t unused = HeapBound() - std::min(HeapBound(), trial.peak_reserved_bytes);
  const uint64_t enough = EnoughToSpare(refusal_.bound_bytes);
  if (unused >= enough) return unused;
  const std::optional<Trial> with_less = TryBothWays(trial.options, {}, enough);
  return with_less.has_value() && with_less->Helps() ? enough : unused;
}

std::optional<Trial> Diagnoser::Try(const AllocatorOptions& options, const Attempt& attempt, Flushes flushes) const {
  ReplayConfig config = config_;
  config.options = options;
  Replay replay(config, trace_);
  DirectHeap& allocator = replay.allocator();
  // The session's bound before the request is unknown, but was at least the peak.
  const auto set_limit = [&](uint64_t bytes) { allocator.SetLimit(bytes - std::min(bytes, attempt.withheld_bytes)); };
  set_limit(std::max(HeapBound(), before_.peak_reserved_bytes));
  Trial trial{.options = options};
  for (size_t i = 0; i < refusal_.op; ++i) {
    if (!MayGoOn(i)) return std::nullopt;
    if (attempt.empty_before == i) allocator.EmptyCache();
    if (flushes == Flushes::kNotItsOwn && before_.is_own_flush[i]) continue;
    // A refused allocation took no memory, and only left the cache empty.
    if (before_.was_refused[i]) {
      allocator.EmptyCache();
    } else if (replay.Do(trace_.ops[i]) == Replay::Result::kOutOfMemory) {
      ++trial.refused_before;
    }
  }
  set_limit(HeapBound());
  TraceOp request = trace_.ops[refusal_.op];
  request.bytes = attempt.requested_bytes;
  trial.is_served = replay.Do(request) == Replay::Result::kOk;
  const MemoryStats stats = allocator.GetMemoryStats();
  trial.peak_allocated_bytes = stats.allocated_bytes.all.peak;
  trial.peak_reserved_bytes = stats.reserved_bytes.all.peak;
  trial.device_calls = stats.num_device_alloc + stats.num_device_free;
  if (!trial.is_served) {
    const uint64_t needed = stats.reserved_bytes.all.current + allocator.NeededSegmentBytes(attempt.requested_bytes);
    trial.missing_bytes = needed - std::min(needed, HeapBound());
  }
  return trial;
}

}  // namespace

Diagnosis Diagnose(const Trace& trace, const ReplayConfig& given, const RefusalToDiagnose& refusal,
                   const DiagnoseOptions& options) {
  ReplayConfig config = given;
  if (!refusal.is_limit) config.options.garbage_collection_threshold = 0;
  const Diagnoser diagnoser(trace, config, refusal, options.may_go_on);
  Diagnosis diagnosis;
  const std::optional<Trial> recorded = diagnoser.TryRecorded();
  diagnosis.is_complete = recorded.has_value();
  if (!recorded.has_value()) return diagnosis;
  diagnosis.recorded = *recorded;
  diagnosis.recorded.options = given.options;
  if (recorded->is_served) return diagnosis;
  // Cheap results first: the settings may take all of the time.
  const uint64_t largest_served_bytes = diagnoser.LargestServed();
  const std::optional<uint64_t> needed_bound_bytes = diagnoser.NeededBound(recorded->missing_bytes);
  if (refusal.never_fits()) {
    diagnosis.largest_served_bytes = largest_served_bytes;
    diagnosis.needed_bound_bytes = needed_bound_bytes;
    return diagnosis;
  }

  // PyTorch collects garbage only if the program has set a fraction.
  ReplayConfig base = config;
  if (options.target.is_torch()) base.options.garbage_collection_threshold = 0;
  const bool collects = refusal.is_limit && !options.target.is_torch();
  const std::vector<AllocatorOptions> grid = TuneGrid(base, options.target, /*has_limit=*/collects);
  std::vector<std::optional<Trial>> tried(grid.size());
  std::vector<EmptiedCache> emptied = diagnoser.least_allocated();
  const size_t total = grid.size() + emptied.size();
  InParallel(
      total, options.threads,
      [&](size_t i) {
        // Emptied caches first: cheap, and in no need of other settings.
        if (i >= emptied.size()) {
          tried[i - emptied.size()] = diagnoser.TryOthers(grid[i - emptied.size()]);
        } else if (const std::optional<Trial> trial = diagnoser.TryEmptied(emptied[i].op); trial.has_value()) {
          emptied[i].trial = *trial;
        }
      },
      [&](size_t done) { options.progress(done, total); });
  std::vector<Trial> trials;
  for (const std::optional<Trial>& trial : tried) {
    if (trial.has_value()) trials.push_back(*trial);
  }
  diagnosis.tried = trials.size();
  diagnosis.is_complete = trials.size() == grid.size();

  const uint64_t enough = EnoughToSpare(refusal.bound_bytes);
  // Stable: the grid has the simple settings first.
  std::stable_sort(trials.begin(), trials.end(), [enough](const Trial& a, const Trial& b) {
    const auto key = [enough](const Trial& trial) {
      return std::tuple(!trial.Helps(), trial.refused_before, trial.missing_bytes, trial.spare_bytes < enough,
                        trial.peak_reserved_bytes, trial.device_calls);
    };
    return key(a) < key(b);
  });
  std::set<std::pair<uint64_t, uint64_t>> seen;
  for (const Trial& trial : trials) {
    if (!trial.Helps() || diagnosis.helping.size() == Diagnosis::kBest) break;
    if (seen.emplace(trial.peak_reserved_bytes, trial.device_calls).second) diagnosis.helping.push_back(trial);
  }
  for (const EmptiedCache& moment : emptied) {
    if (moment.trial.Helps()) diagnosis.emptied = moment;
  }
  if (!diagnosis.helping.empty()) return diagnosis;
  if (!trials.empty() && trials[0].refused_before == 0 && trials[0].missing_bytes < diagnosis.recorded.missing_bytes) {
    diagnosis.nearest = trials[0];
  }
  diagnosis.largest_served_bytes = largest_served_bytes;
  diagnosis.needed_bound_bytes = needed_bound_bytes;
  return diagnosis;
}

}  // namespace vrambroker
