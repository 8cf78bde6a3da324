// SPDX-License-Identifier: Apache-2.0
//
// Finds the number of sequences per training step possible on a device.
#ifndef VRAMBROKER_CLIENT_VRAMCTL_PLAN_LARGEST_BATCH_H_
#define VRAMBROKER_CLIENT_VRAMCTL_PLAN_LARGEST_BATCH_H_

#include <cstdint>
#include <vector>

#include "allocator/replay/replay.h"
#include "client/vramctl/plan/model_config.h"
#include "client/vramctl/plan/training_memory.h"

namespace vrambroker::plan {

struct LargestBatch {
  uint64_t batch = 0;    // no request of the batch's trace is refused; 0: not even a single sequence fits
  bool is_exact = true;  // false: a larger batch may fit, too
  // Smaller batches with a refused request, ascending. Freed blocks of different sizes serve later requests less well,
  // so a smaller batch can need more segments. Not all smaller batches are tried: those next below come first.
  std::vector<uint64_t> smaller_refused;
};

// Returns the largest --batch for config.device_bytes. The peak of allocated bytes grows with the batch, so above some
// bound nothing can fit; the reserved bytes do not always grow. Therefore all batches from the bound down are replayed
// until a batch fits, for at most some 20 million operations. `is_exact` is false if more would be needed, or if
// kMostBatch may fit. `options` come from CheckTraining(); their batch is not used. Safe to call from any thread.
LargestBatch FindLargestBatch(const ModelShape& shape, const TrainingOptions& options, const ReplayConfig& config);

}  // namespace vrambroker::plan

#endif  // VRAMBROKER_CLIENT_VRAMCTL_PLAN_LARGEST_BATCH_H_
