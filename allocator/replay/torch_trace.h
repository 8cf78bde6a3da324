// SPDX-License-Identifier: Apache-2.0
//
// Converter from PyTorch's memory snapshots (torch.cuda.memory._dump_snapshot) to traces.
#ifndef VRAMBROKER_ALLOCATOR_REPLAY_TORCH_TRACE_H_
#define VRAMBROKER_ALLOCATOR_REPLAY_TORCH_TRACE_H_

#include "absl/status/statusor.h"
#include "allocator/replay/pickle.h"
#include "allocator/replay/trace.h"

namespace vrambroker {

// Converts the events of a device (its ordinal) to a trace for replays. The trace's notes list everything left out or
// guessed. InvalidArgument names the path of a field missing or of the wrong type: "device_traces[0][17].action:
// missing". Thread-safe.
absl::StatusOr<Trace> TraceFromTorchSnapshot(const PickleValue& snapshot, int device);

}  // namespace vrambroker

#endif  // VRAMBROKER_ALLOCATOR_REPLAY_TORCH_TRACE_H_
