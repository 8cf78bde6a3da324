// SPDX-License-Identifier: Apache-2.0
#include "allocator/replay/diagnose.h"

#include <algorithm>
#include <set>
#include <tuple>
#include <utility>

#include "allocator/bytes.h"
#include "allocator/replay/in_parallel.h"
#include "allocator/replay/tune.h"
#include "allocator/size_class.h"

namespace vrambroker {
namespace {

// What the recording showed up to the request, with its settings and as much memory as it took.
struct Before {
  std::vector<bool> was_refused;  // by operation
  // By operation: gives back what the heap may have given back by itself, for the segment that it needed next.
  std::vector<bool> is_own_flush;
  bool has_own_flushes = false;
  uint64_t peak_reserved_bytes = 0;
  uint64_t reserved_bytes = 0;                // when the request came
  std::vector<EmptiedCache> least_allocated;  // moments to empty the cache at, the last one last; not tried yet
};

// The lowest points of allocated bytes of the last half of the recording, of its last quarter, and so on: where a step
// of a job ends.
std::vector<EmptiedCache> LeastAllocated(const std::vector<uint64_t>& allocated_before) {
  std::vector<EmptiedCache> points;
  const size_t ops = allocated_before.size();
  for (size_t window = ops; window >= 2; window /= 2) {
    // Of equal ones the last.
    const auto least =
        std::min_element(allocated_before.rbegin(), allocated_before.rbegin() + static_cast<std::ptrdiff_t>(window));
    const auto op = static_cast<size_t>(allocated_before.rend() - least) - 1;
    if (points.empty() || points.back().op != op) points.push_back({.op = op, .allocated_bytes = *least});
  }
  return points;
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
    for (const size_t op : trace.recorded_refusals) before_.was_refused[op] = true;
    LookAtRecording();
  }

  const std::vector<EmptiedCache>& least_allocated() const { return before_.least_allocated; }

  // With the recorded settings. None, here and below: the time is over.
  std::optional<Trial> TryRecorded() const { return Try(config_.options, refusal_.requested_bytes, {}, Flushes::kAll); }
  std::optional<Trial> TryOthers(const AllocatorOptions& options) const { return TryBothWays(options, {}); }
  std::optional<Trial> TryEmptied(size_t op) const { return TryBothWays(config_.options, op); }

  // The largest request that the recorded settings serve in its place, up to it.
  uint64_t LargestServed() const {
    uint64_t served = 0;
    uint64_t refused = refusal_.requested_bytes;
    // To a thousandth of the request.
    const uint64_t step = std::max<uint64_t>(kMinBlockBytes, refusal_.requested_bytes / 1000);
    while (refused - served > step) {
      const uint64_t middle = served + (refused - served) / 2;
      const std::optional<Trial> trial = Try(config_.options, middle, {}, Flushes::kAll);
      if (!trial.has_value()) return served;
      (trial->is_served ? served : refused) = middle;
    }
    return served;
  }

  // With the recorded settings. None: beyond the capacity.
  std::optional<uint64_t> NeededBound(uint64_t missing_bytes) const {
    // With more room the heap flushes later or never, so that it may need more again.
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

  enum class Flushes {
    kAll,        // as recorded
    kNotItsOwn,  // but those that the heap may have made by itself: a replay makes its own
  };

  void LookAtRecording();
  // Marks the run of operations that give back, up to `next`, if that is what it was for.
  void MarkOwnFlush(size_t next);
  // The bound of what the heap held.
  uint64_t HeapBound() const {
    const uint64_t outside = refusal_.reserved_bytes - std::min(refusal_.reserved_bytes, before_.reserved_bytes);
    return refusal_.bound_bytes - std::min(refusal_.bound_bytes, outside);
  }
  std::optional<Trial> Try(const AllocatorOptions& options, uint64_t requested, std::optional<size_t> empty_before,
                           Flushes flushes) const;
  // The worse of the two.
  std::optional<Trial> TryBothWays(const AllocatorOptions& options, std::optional<size_t> empty_before) const;
  // Reading a clock costs as much as an operation.
  bool MayGoOn(size_t op) const { return op % 256 != 0 || may_go_on_(); }

  const Trace& trace_;
  ReplayConfig config_;
  const RefusalToDiagnose refusal_;
  const std::function<bool()>& may_go_on_;
  Before before_;
};

void Diagnoser::LookAtRecording() {
  Replay replay(config_, trace_);
  std::vector<uint64_t> allocated_before;
  allocated_before.reserve(refusal_.op);
  uint64_t allocated = replay.allocator().GetMemoryStats().allocated_bytes.all.current;
  std::vector<uint64_t> bytes_of(trace_.ids, 0);
  for (uint32_t id = 0; id < trace_.ids; ++id) {
    if (const Block* block = replay.block(id); block != nullptr) bytes_of[id] = block->bytes;
  }
  for (size_t i = 0; i < refusal_.op; ++i) {
    if (!MayGoOn(i)) break;
    const TraceOp& op = trace_.ops[i];
    allocated_before.push_back(allocated);
    if (before_.was_refused[i]) {  // what took no memory then
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
  before_.least_allocated = LeastAllocated(allocated_before);
}

void Diagnoser::MarkOwnFlush(size_t next) {
  for (size_t i = next; i > 0 && GivesBack(trace_.ops[i - 1]); --i) {
    before_.is_own_flush[i - 1] = true;
    before_.has_own_flushes = true;
  }
}

std::optional<Trial> Diagnoser::TryBothWays(const AllocatorOptions& options, std::optional<size_t> empty_before) const {
  const std::optional<Trial> trial = Try(options, refusal_.requested_bytes, empty_before, Flushes::kNotItsOwn);
  if (!trial.has_value() || !trial->Helps() || !before_.has_own_flushes) return trial;
  const std::optional<Trial> as_recorded = Try(options, refusal_.requested_bytes, empty_before, Flushes::kAll);
  return !as_recorded.has_value() || !as_recorded->Helps() ? as_recorded : trial;
}

std::optional<Trial> Diagnoser::Try(const AllocatorOptions& options, uint64_t requested,
                                    std::optional<size_t> empty_before, Flushes flushes) const {
  ReplayConfig config = config_;
  config.options = options;
  Replay replay(config, trace_);
  CachingAllocator& allocator = replay.allocator();
  // What the session could have before the request is not known; as much as it had, at least.
  allocator.SetLimit(std::max(HeapBound(), before_.peak_reserved_bytes));
  Trial trial{.options = options};
  for (size_t i = 0; i < refusal_.op; ++i) {
    if (!MayGoOn(i)) return std::nullopt;
    if (empty_before == i) allocator.EmptyCache();
    if (flushes == Flushes::kNotItsOwn && before_.is_own_flush[i]) continue;
    // What was refused took no memory. It only left the cache empty.
    if (before_.was_refused[i]) {
      allocator.EmptyCache();
    } else if (replay.Do(trace_.ops[i]) == Replay::Result::kOutOfMemory) {
      ++trial.refused_before;
    }
  }
  allocator.SetLimit(HeapBound());
  TraceOp request = trace_.ops[refusal_.op];
  request.bytes = requested;
  trial.is_served = replay.Do(request) == Replay::Result::kOk;
  const MemoryStats stats = allocator.GetMemoryStats();
  trial.peak_allocated_bytes = stats.allocated_bytes.all.peak;
  trial.peak_reserved_bytes = stats.reserved_bytes.all.peak;
  trial.device_calls = stats.num_device_alloc + stats.num_device_free;
  if (!trial.is_served) {
    const uint64_t needed = stats.reserved_bytes.all.current + allocator.NeededSegmentBytes(requested);
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
  // These first: it is little, and the settings may take all of the time.
  const uint64_t largest_served_bytes = diagnoser.LargestServed();
  const std::optional<uint64_t> needed_bound_bytes = diagnoser.NeededBound(recorded->missing_bytes);

  // PyTorch collects only where a program has set its fraction.
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
        // First what needs no other settings: it is little.
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

  // Stable: the grid has the simple ones first.
  std::stable_sort(trials.begin(), trials.end(), [](const Trial& a, const Trial& b) {
    const auto key = [](const Trial& trial) {
      return std::tuple(!trial.Helps(), trial.refused_before, trial.missing_bytes, trial.peak_reserved_bytes,
                        trial.device_calls);
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
