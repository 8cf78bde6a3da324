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

// The segments that this process has mapped: each handle is opened once. Thread-safe.
class Mappings {
 public:
  // Closes what is still open.
  ~Mappings() { CloseAll(); }

  // The address of a segment, for use on `stream`. The first caller opens it, with the handle that `fetch` gets; others
  // wait for it. `device` outlives the mapping.
  absl::StatusOr<void*> Open(uint64_t segment_id, uint64_t bytes, Stream stream, Device* device,
                             const std::function<absl::StatusOr<SegmentHandle>()>& fetch) ABSL_LOCKS_EXCLUDED(mu_);

  // Waits for the streams that used the segments, and closes them. Returns those that are not open now. The others the
  // device has refused to close, as it does while a stream of theirs is captured in a CUDA graph, and may still use:
  // they stay open, for CloseRefused(). REQUIRES: no block of them is in use any more.
  std::vector<uint64_t> Close(const std::vector<uint64_t>& segment_ids) ABSL_LOCKS_EXCLUDED(mu_);
  // Tries again. Returns those that are closed now.
  std::vector<uint64_t> CloseRefused() ABSL_LOCKS_EXCLUDED(mu_);
  // False when the device has refused any.
  bool CloseAll() ABSL_LOCKS_EXCLUDED(mu_);

 private:
  struct Mapping {
    Device* device = nullptr;
    uint64_t bytes = 0;
    void* address = nullptr;                 // null while it is being opened
    absl::InlinedVector<Stream, 1> streams;  // that blocks of it were for: in the daemon's order, one
  };

  static void AddStream(Mapping& mapping, Stream stream);

  Mutex mu_;
  CondVar opened_;
  absl::flat_hash_map<uint64_t, Mapping> mappings_ ABSL_GUARDED_BY(mu_);
  std::vector<uint64_t> refused_ ABSL_GUARDED_BY(mu_);  // of mappings_
};

}  // namespace vrambroker::client_internal

#endif  // VRAMBROKER_CLIENT_HEAP_MAPPINGS_H_
