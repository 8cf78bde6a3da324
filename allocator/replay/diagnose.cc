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
  uint64_t peak_reserved_bytes = 0;
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

class Diagnoser {
 public:
  Diagnoser(const Trace& trace, const ReplayConfig& config, const RefusalToDiagnose& refusal,
            const std::function<bool()>& may_go_on)
      : trace_(trace), config_(config), refusal_(refusal), may_go_on_(may_go_on) {
    config_.device_bytes = refusal.capacity_bytes;
    config_.fraction.reset();
    before_.was_refused.assign(trace.ops.size(), false);
    for (const size_t op : trace.recorded_refusals) before_.was_refused[op] = true;
    LookAtRecording();
  }

  const std::vector<EmptiedCache>& least_allocated() const { return before_.least_allocated; }

  // None: the time is over.
  std::optional<Trial> Try(const AllocatorOptions& options) const { return Try(options, refusal_.requested_bytes, {}); }
  std::optional<Trial> TryEmptied(size_t op) const { return Try(config_.options, refusal_.requested_bytes, op); }

  // The largest request that the recorded settings serve in its place, up to it.
  uint64_t LargestServed() const {
    uint64_t served = 0;
    uint64_t refused = refusal_.requested_bytes;
    // To a thousandth of the request.
    const uint64_t step = std::max<uint64_t>(kMinBlockBytes, refusal_.requested_bytes / 1000);
    while (refused - served > step) {
      const uint64_t middle = served + (refused - served) / 2;
      const std::optional<Trial> trial = Try(config_.options, middle, {});
      if (!trial.has_value()) return served;
      (trial->is_served ? served : refused) = middle;
    }
    return served;
  }

  // With the recorded settings. None: beyond the capacity.
  std::optional<uint64_t> NeededBound(uint64_t missing_bytes) const {
    RefusalToDiagnose with_more = refusal_;
    if (missing_bytes > refusal_.capacity_bytes - refusal_.bound_bytes) return std::nullopt;
    with_more.bound_bytes += missing_bytes;
    const std::optional<Trial> trial = Diagnoser(*this, with_more).Try(config_.options);
    return trial.has_value() && trial->Helps() ? std::optional<uint64_t>(with_more.bound_bytes) : std::nullopt;
  }

 private:
  Diagnoser(const Diagnoser& other, const RefusalToDiagnose& refusal)
      : trace_(other.trace_),
        config_(other.config_),
        refusal_(refusal),
        may_go_on_(other.may_go_on_),
        before_(other.before_) {}

  void LookAtRecording();
  std::optional<Trial> Try(const AllocatorOptions& options, uint64_t requested,
                           std::optional<size_t> empty_before) const;
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
    if (before_.was_refused[i]) continue;  // what took no memory then
    const Replay::Result result = replay.Do(op);
    if (result != Replay::Result::kOk) continue;
    if (op.kind == TraceOp::Kind::kAllocate) {
      bytes_of[op.id] = replay.block(op.id)->bytes;
      allocated += bytes_of[op.id];
    } else if (op.kind == TraceOp::Kind::kFree) {
      allocated -= std::min(allocated, std::exchange(bytes_of[op.id], 0));
    }
  }
  before_.peak_reserved_bytes = replay.allocator().GetMemoryStats().reserved_bytes.all.peak;
  before_.least_allocated = LeastAllocated(allocated_before);
}

std::optional<Trial> Diagnoser::Try(const AllocatorOptions& options, uint64_t requested,
                                    std::optional<size_t> empty_before) const {
  ReplayConfig config = config_;
  config.options = options;
  Replay replay(config, trace_);
  CachingAllocator& allocator = replay.allocator();
  // What the session could have before the request is not known; as much as it had, at least.
  allocator.SetLimit(std::max(refusal_.bound_bytes, before_.peak_reserved_bytes));
  Trial trial{.options = options};
  for (size_t i = 0; i < refusal_.op; ++i) {
    if (!MayGoOn(i)) return std::nullopt;
    if (empty_before == i) allocator.EmptyCache();
    // What was refused took no memory. It only left the cache empty.
    if (before_.was_refused[i]) {
      allocator.EmptyCache();
    } else if (replay.Do(trace_.ops[i]) == Replay::Result::kOutOfMemory) {
      ++trial.refused_before;
    }
  }
  allocator.SetLimit(refusal_.bound_bytes);
  TraceOp request = trace_.ops[refusal_.op];
  request.bytes = requested;
  trial.is_served = replay.Do(request) == Replay::Result::kOk;
  const MemoryStats stats = allocator.GetMemoryStats();
  trial.peak_allocated_bytes = stats.allocated_bytes.all.peak;
  trial.peak_reserved_bytes = stats.reserved_bytes.all.peak;
  trial.device_calls = stats.num_device_alloc + stats.num_device_free;
  if (!trial.is_served) {
    const uint64_t needed = stats.reserved_bytes.all.current + allocator.NeededSegmentBytes(requested);
    trial.missing_bytes = needed - std::min(needed, refusal_.bound_bytes);
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
  const std::optional<Trial> recorded = diagnoser.Try(config.options);
  diagnosis.is_complete = recorded.has_value();
  if (!recorded.has_value()) return diagnosis;
  diagnosis.recorded = *recorded;
  diagnosis.recorded.options = given.options;
  if (recorded->is_served) return diagnosis;

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
          tried[i - emptied.size()] = diagnoser.Try(grid[i - emptied.size()]);
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
  diagnosis.largest_served_bytes = diagnoser.LargestServed();
  diagnosis.needed_bound_bytes = diagnoser.NeededBound(diagnosis.recorded.missing_bytes);
  return diagnosis;
}

}  // namespace vrambroker
