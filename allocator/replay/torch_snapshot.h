// SPDX-License-Identifier: Apache-2.0
//
// PyTorch's memory snapshots (torch.cuda.memory._dump_snapshot): heaps written as one.
#ifndef VRAMBROKER_ALLOCATOR_REPLAY_TORCH_SNAPSHOT_H_
#define VRAMBROKER_ALLOCATOR_REPLAY_TORCH_SNAPSHOT_H_

#include "absl/types/span.h"
#include "allocator/heap/heap_snapshot.h"
#include "allocator/replay/pickle.h"

namespace vrambroker {

// The heaps in PyTorch's layout; WritePickle() of it is a file for pytorch.org/memory_viz and _memory_viz.py. A heap's
// index is its device's ordinal; the settings shown are the first heap's.
//
// PyTorch's viewer plays the history backwards from the segments and shows an empty page when the two contradict one
// another. A history that does (recording had been interrupted) is therefore cut: the latest event that cannot be
// undone is left out, and all before it. Never fails. Safe to call from any thread.
PickleValue TorchSnapshot(absl::Span<const HeapSnapshot> devices);

}  // namespace vrambroker

#endif  // VRAMBROKER_ALLOCATOR_REPLAY_TORCH_SNAPSHOT_H_
