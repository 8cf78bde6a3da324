// SPDX-License-Identifier: Apache-2.0
//
// StreamWaits: waits for work on the GPU before memory that it may use is closed.
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

// For a batch of segments that were given back and are closed together: waits once for each stream. Used by one
// thread, which holds no lock.
class StreamWaits {
 public:
  // `device` outlives it.
  explicit StreamWaits(Device* device) : device_(*device) {}

  // Until what was queued on `stream` is done; without one, all work on the device. An error: it may not be done, since
  // the stream is being captured, for example. Then the memory must not be closed yet.
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

  Device& device_;
  std::map<std::optional<Stream>, absl::Status> waited_;
};

}  // namespace vrambroker::client_internal

#endif  // VRAMBROKER_CLIENT_HEAP_STREAM_WAITS_H_
