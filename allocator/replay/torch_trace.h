// SPDX-License-Identifier: Apache-2.0
//
// PyTorch's memory snapshots (torch.cuda.memory._dump_snapshot): a trace made of one.
#ifndef VRAMBROKER_ALLOCATOR_REPLAY_TORCH_TRACE_H_
#define VRAMBROKER_ALLOCATOR_REPLAY_TORCH_TRACE_H_

#include "absl/status/statusor.h"
#include "allocator/replay/pickle.h"
#include "allocator/replay/trace.h"

namespace vrambroker {

// The events of one device (its ordinal) as a trace that can be replayed. What was left out or guessed is in the
// trace's notes. InvalidArgument names the path of what is missing or of the wrong type:
// "device_traces[0][17].action: missing". Safe to call from any thread.
absl::StatusOr<Trace> TraceFromTorchSnapshot(const PickleValue& snapshot, int device);

}  // namespace vrambroker

#endif  // VRAMBROKER_ALLOCATOR_REPLAY_TORCH_TRACE_H_
