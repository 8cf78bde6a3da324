// SPDX-License-Identifier: Apache-2.0
//
// How many sequences a training step may have on a device.
#ifndef VRAMBROKER_CLIENT_VRAMCTL_PLAN_LARGEST_BATCH_H_
#define VRAMBROKER_CLIENT_VRAMCTL_PLAN_LARGEST_BATCH_H_

#include <cstdint>
#include <vector>

#include "allocator/replay/replay.h"
#include "client/vramctl/plan/model_config.h"
#include "client/vramctl/plan/training_memory.h"

namespace vrambroker::plan {

struct LargestBatch {
  uint64_t batch = 0;    // no request of its trace is refused; 0: not even one sequence fits
  bool is_exact = true;  // false: a larger one may fit, too
  // Batches below it with which a request is refused, ascending. Freed blocks of other sizes serve later requests less
  // well, so a smaller batch can need more segments. Not all are tried: those next below come first.
  std::vector<uint64_t> smaller_refused;
};

// The largest --batch for config.device_bytes. What a step has at a time grows with the batch, so there is one above
// which nothing can fit; what it reserves does not always grow. So all batches from there down are replayed until one
// fits. That takes some 20 million operations at most. Where it would take more, or where kMostBatch may fit,
// `is_exact` is false. `options` are of CheckTraining(); their batch is not used. Safe to call from any thread.
LargestBatch FindLargestBatch(const ModelShape& shape, const TrainingOptions& options, const ReplayConfig& config);

}  // namespace vrambroker::plan

#endif  // VRAMBROKER_CLIENT_VRAMCTL_PLAN_LARGEST_BATCH_H_
