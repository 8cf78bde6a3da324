// SPDX-License-Identifier: Apache-2.0
//
// Streams of a device and points in them.
#ifndef VRAMBROKER_ALLOCATOR_DEVICE_EVENTS_H_
#define VRAMBROKER_ALLOCATOR_DEVICE_EVENTS_H_

#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace vrambroker {

// Work queue of a device, as cudaStream_t's value. 0 is the default stream.
using Stream = uint64_t;

// A point in a stream. Destroying it while it is pending is allowed.
class Event {
 public:
  virtual ~Event() = default;
  // True when all work that was queued before the event is done. Never blocks. NotFound: the stream does not exist any
  // more, and only Wait() can tell.
  virtual absl::StatusOr<bool> Query() = 0;
  // Blocks until all that work is done.
  virtual absl::Status Wait() = 0;
};

// Safe to call from any thread.
class EventSource {
 public:
  virtual ~EventSource() = default;
  // Marks the end of the work queued on `stream` so far. An error: not now; try again later.
  virtual absl::StatusOr<std::unique_ptr<Event>> RecordEvent(Stream stream) = 0;
};

}  // namespace vrambroker

#endif  // VRAMBROKER_ALLOCATOR_DEVICE_EVENTS_H_
