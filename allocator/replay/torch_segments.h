// SPDX-License-Identifier: Apache-2.0
//
// The segments of PyTorch's memory snapshots, read.
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
  bool are_expandable = false;            // some of them
  uint64_t in_private_pools = 0;          // COUNT
};

// The segments of one device (its ordinal). Blocks have the scope in which they were allocated when `scopes` is given:
// what the program named, and within it the place in the program (see torch_segments.cc). InvalidArgument names the
// path of what is missing or of the wrong type: "segments[3].blocks[0].size: missing". Safe to call from any thread.
absl::StatusOr<TorchSegments> ReadTorchSegments(const PickleValue::Items& segments, int device,
                                                ScopeTable* scopes = nullptr);

// The heaps of a snapshot, by device: as many as there are devices with segments or events. Without history. The
// devices that the file has nothing of are empty. InvalidArgument as above.
absl::StatusOr<std::vector<HeapSnapshot>> HeapsOfTorchSnapshot(const PickleValue& snapshot);

}  // namespace vrambroker

#endif  // VRAMBROKER_ALLOCATOR_REPLAY_TORCH_SEGMENTS_H_
