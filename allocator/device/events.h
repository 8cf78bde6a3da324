// SPDX-License-Identifier: Apache-2.0
//
// Streams of a device, and points in streams.
#ifndef VRAMBROKER_ALLOCATOR_DEVICE_EVENTS_H_
#define VRAMBROKER_ALLOCATOR_DEVICE_EVENTS_H_

#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace vrambroker {

// Work queue of a device, as the value of a cudaStream_t. 0 is the default stream.
using Stream = uint64_t;

// A point in a stream. May be destroyed while pending.
class Event {
 public:
  virtual ~Event() = default;
  // Returns true when all work queued before the event is done. Never blocks. NotFound: the stream no longer exists,
  // and only Wait() can tell.
  virtual absl::StatusOr<bool> Query() = 0;
  // Blocks until all work queued before the event is done.
  virtual absl::Status Wait() = 0;
};

// Thread-safe.
class EventSource {
 public:
  virtual ~EventSource() = default;
  // Marks the end of the work queued on `stream` so far. An error means: not now; try again later.
  virtual absl::StatusOr<std::unique_ptr<Event>> RecordEvent(Stream stream) = 0;
};

}  // namespace vrambroker

#endif  // VRAMBROKER_ALLOCATOR_DEVICE_EVENTS_H_
