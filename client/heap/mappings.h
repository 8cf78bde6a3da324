// SPDX-License-Identifier: Apache-2.0
#ifndef VRAMBROKER_CLIENT_HEAP_MAPPINGS_H_
#define VRAMBROKER_CLIENT_HEAP_MAPPINGS_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/inlined_vector.h"
#include "absl/status/statusor.h"
#include "allocator/base/mutex.h"
#include "allocator/device/device.h"
#include "allocator/device/events.h"

namespace vrambroker::client_internal {

// The segments mapped by this process: each handle is opened once. Thread-safe.
class Mappings {
 public:
  // Closes the remaining segments.
  ~Mappings() { CloseAll(); }

  // Returns the address of a segment, for use on `stream`. The first caller opens the segment, with the handle returned
  // by `fetch`; concurrent callers wait. `device` outlives the mapping.
  absl::StatusOr<void*> Open(uint64_t segment_id, uint64_t bytes, Stream stream, SegmentOpener* device,
                             const std::function<absl::StatusOr<SegmentHandle>()>& fetch) ABSL_LOCKS_EXCLUDED(mu_);

  // Waits for the streams of the segments, and closes the segments. Returns the ids not open now. The device may refuse
  // to close segments, for example while a stream of theirs is captured in a CUDA graph, and may still use the memory:
  // these segments stay open, for CloseRefused(). REQUIRES: no block of the segments is in use any more.
  std::vector<uint64_t> Close(const std::vector<uint64_t>& segment_ids) ABSL_LOCKS_EXCLUDED(mu_);
  // Tries to close refused segments again. Returns the ids closed now.
  std::vector<uint64_t> CloseRefused() ABSL_LOCKS_EXCLUDED(mu_);
  // False when the device refused to close a segment.
  bool CloseAll() ABSL_LOCKS_EXCLUDED(mu_);

 private:
  struct Mapping {
    SegmentOpener* device = nullptr;
    uint64_t bytes = 0;
    void* address = nullptr;                 // null while being opened
    absl::InlinedVector<Stream, 1> streams;  // of blocks in the segment; one in the daemon's order
  };

  static void AddStream(Mapping& mapping, Stream stream);

  Mutex mu_;
  CondVar opened_;
  absl::flat_hash_map<uint64_t, Mapping> mappings_ ABSL_GUARDED_BY(mu_);
  std::vector<uint64_t> refused_ ABSL_GUARDED_BY(mu_);  // in mappings_
};

}  // namespace vrambroker::client_internal

#endif  // VRAMBROKER_CLIENT_HEAP_MAPPINGS_H_
