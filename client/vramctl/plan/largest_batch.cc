// SPDX-License-Identifier: Apache-2.0
#include "client/vramctl/plan/largest_batch.h"

#include <algorithm>
#include <functional>

#include "allocator/heap/size_class.h"
#include "client/vramctl/plan/bounded.h"
#include "client/vramctl/plan/step_trace.h"

namespace vrambroker::plan {
namespace {

// Limits the replays between the bound and the batch known to fit, and then the replays below. About a second.
constexpr uint64_t kMostOperations = 10'000'000;
constexpr uint64_t kFewestReplays = 64;
constexpr uint64_t kMostSmaller = 256;

// Returns a number up to `most` for which `holds` is true; 0: none. Bisects: the result is the largest such number if
// `holds` is monotone.
uint64_t BisectedThat(const std::function<bool(uint64_t)>& holds, uint64_t most) {
  uint64_t holding = 0;
  uint64_t failing = 1;
  while (failing <= most && holds(failing)) {
    holding = failing;
    failing *= 2;
  }
  while (failing - holding > 1) {
    const uint64_t middle = holding + (failing - holding) / 2;
    (middle <= most && holds(middle) ? holding : failing) = middle;
  }
  return holding;
}

// Returns the peak of allocated bytes, whatever the allocator does with its segments.
uint64_t PeakOfBlocks(const Trace& trace, const AllocatorOptions& options) {
  std::vector<uint64_t> bytes(trace.ids, 0);
  uint64_t current = 0;
  uint64_t peak = 0;
  for (const TraceOp& op : trace.ops) {
    if (op.kind == TraceOp::Kind::kAllocate) {
      bytes[op.id] = RoundRequest(op.bytes, options);
      current += bytes[op.id];
      peak = std::max(peak, current);
    } else if (op.kind == TraceOp::Kind::kFree) {
      current -= bytes[op.id];
    }
  }
  return peak;
}

uint64_t UsableBytes(const ReplayConfig& config) {
  const double fraction = config.fraction.value_or(config.options.per_process_memory_fraction);
  if (fraction >= 1) return config.device_bytes;
  return static_cast<uint64_t>(fraction * static_cast<double>(config.device_bytes));
}

class Search {
 public:
  Search(const ModelShape& shape, const TrainingOptions& options, const ReplayConfig& config)
      : shape_(shape), options_(options), config_(config) {}

  // False: no allocator could fit the batch. If true for a batch, also true for all smaller batches.
  bool MayFit(uint64_t batch) const {
    return CanBePlanned(batch) && PeakOfBlocks(TraceOf(batch), config_.options) <= UsableBytes(config_);
  }
  bool CanBePlanned(uint64_t batch) const { return TrainingMemoryOf(shape_, With(batch)).ok(); }

  // REQUIRES: CanBePlanned(batch).
  bool Fits(uint64_t batch) const {
    const Trace trace = TraceOf(batch);
    Replay replay(config_, trace);
    return std::none_of(trace.ops.begin(), trace.ops.end(),
                        [&](const TraceOp& op) { return replay.Do(op) == Replay::Result::kOutOfMemory; });
  }
  uint64_t ReplaysAllowed() const { return std::max(kFewestReplays, kMostOperations / TraceOf(1).ops.size()); }

 private:
  TrainingOptions With(uint64_t batch) const {
    TrainingOptions options = options_;
    options.batch = batch;
    return options;
  }
  Trace TraceOf(uint64_t batch) const { return StepTrace(shape_, With(batch)); }

  const ModelShape& shape_;
  const TrainingOptions& options_;
  const ReplayConfig& config_;
};

}  // namespace

LargestBatch FindLargestBatch(const ModelShape& shape, const TrainingOptions& options, const ReplayConfig& config) {
  const Search search(shape, options, config);
  const uint64_t bound = BisectedThat([&](uint64_t batch) { return search.MayFit(batch); }, kMostBatch);
  LargestBatch largest;
  if (bound == 0) return largest;
  // Find a fitting batch by bisection, to leave fewer batches to try; larger batches may fit, too.
  largest.batch = BisectedThat([&](uint64_t batch) { return search.Fits(batch); }, bound);
  const uint64_t allowed = search.ReplaysAllowed();
  const uint64_t stride = std::max<uint64_t>(1, DividedUp(bound - largest.batch, allowed));
  for (uint64_t batch = bound; batch > largest.batch; batch -= std::min(stride, batch)) {
    if (search.Fits(batch)) largest.batch = batch;
  }
  largest.is_exact = stride == 1 && bound < kMostBatch && search.CanBePlanned(bound + 1);

  const uint64_t smaller = std::min({allowed, kMostSmaller, largest.batch});
  for (uint64_t batch = largest.batch - smaller + 1; batch < largest.batch; ++batch) {
    if (!search.Fits(batch)) largest.smaller_refused.push_back(batch);
  }
  return largest;
}

}  // namespace vrambroker::plan
