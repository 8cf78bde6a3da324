// SPDX-License-Identifier: Apache-2.0
//
// Reader for the segments of PyTorch's memory snapshots.
#ifndef VRAMBROKER_ALLOCATOR_REPLAY_TORCH_SEGMENTS_H_
#define VRAMBROKER_ALLOCATOR_REPLAY_TORCH_SEGMENTS_H_

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "allocator/heap/heap_snapshot.h"
#include "allocator/heap/scopes.h"
#include "allocator/replay/pickle.h"

namespace vrambroker {

// The segments of a device at the end of the recording.
struct TorchSegments {
  std::vector<SegmentSnapshot> segments;  // by address
  bool are_expandable = false;            // at least one of them
  uint64_t in_private_pools = 0;          // COUNT
};

// Reads the segments of a device (its ordinal). With `scopes`, a block has the scope of its allocation: the names given
// by the program, and within them the place in the program (see torch_segments.cc). InvalidArgument names the path of a
// field missing or of the wrong type: "segments[3].blocks[0].size: missing". Thread-safe.
absl::StatusOr<TorchSegments> ReadTorchSegments(const PickleValue::Items& segments, int device,
                                                ScopeTable* scopes = nullptr);

// Reads the heaps of a snapshot by device, up to the last device with segments or events. Without history. Devices
// absent from the file are empty. InvalidArgument as above.
absl::StatusOr<std::vector<HeapSnapshot>> HeapsOfTorchSnapshot(const PickleValue& snapshot);

}  // namespace vrambroker

#endif  // VRAMBROKER_ALLOCATOR_REPLAY_TORCH_SEGMENTS_H_
