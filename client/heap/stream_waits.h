// SPDX-License-Identifier: Apache-2.0
//
// StreamWaits: waits for GPU work before closing memory possibly in use by the work.
#ifndef VRAMBROKER_CLIENT_HEAP_STREAM_WAITS_H_
#define VRAMBROKER_CLIENT_HEAP_STREAM_WAITS_H_

#include <map>
#include <memory>
#include <optional>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "allocator/device/device.h"
#include "allocator/device/events.h"

namespace vrambroker::client_internal {

// For a batch of returned segments closed together: waits once per stream. Used by a single thread holding no lock.
class StreamWaits {
 public:
  // `device` outlives this object.
  explicit StreamWaits(SegmentOpener* device) : device_(*device) {}

  // Waits until all work queued on `stream` is done; without a stream, all work on the device. After an error the work
  // may be unfinished, for example because the stream is being captured; do not close the memory yet.
  absl::Status WaitFor(std::optional<Stream> stream) {
    const auto [it, is_new] = waited_.try_emplace(stream);
    if (is_new) it->second = Wait(stream);
    return it->second;
  }

 private:
  absl::Status Wait(std::optional<Stream> stream) {
    if (!stream.has_value()) return device_.WaitForAllStreams();
    const absl::StatusOr<std::unique_ptr<Event>> event = device_.RecordEvent(*stream);
    return event.ok() ? (*event)->Wait() : event.status();
  }

  SegmentOpener& device_;
  std::map<std::optional<Stream>, absl::Status> waited_;
};

}  // namespace vrambroker::client_internal

#endif  // VRAMBROKER_CLIENT_HEAP_STREAM_WAITS_H_
