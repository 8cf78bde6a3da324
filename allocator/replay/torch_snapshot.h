// SPDX-License-Identifier: Apache-2.0
//
// Writer for PyTorch's memory snapshots (torch.cuda.memory._dump_snapshot).
#ifndef VRAMBROKER_ALLOCATOR_REPLAY_TORCH_SNAPSHOT_H_
#define VRAMBROKER_ALLOCATOR_REPLAY_TORCH_SNAPSHOT_H_

#include "absl/types/span.h"
#include "allocator/heap/heap_snapshot.h"
#include "allocator/replay/pickle.h"

namespace vrambroker {

// Returns heaps in PyTorch's layout. WritePickle() turns the value into a file for pytorch.org/memory_viz and
// _memory_viz.py. A heap's index is its device's ordinal; the settings shown are the first heap's.
//
// PyTorch's viewer plays the history backwards from the segments, and shows an empty page when history and segments
// contradict each other. A contradicting history (recording had been interrupted) is therefore cut: the latest event
// that cannot be undone is left out, and all events before. Never fails. Thread-safe.
PickleValue TorchSnapshot(absl::Span<const HeapSnapshot> devices);

}  // namespace vrambroker

#endif  // VRAMBROKER_ALLOCATOR_REPLAY_TORCH_SNAPSHOT_H_
