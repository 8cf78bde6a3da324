// SPDX-License-Identifier: Apache-2.0
//
// History: the last N events of a heap, for snapshots.
#ifndef VRAMBROKER_ALLOCATOR_HISTORY_H_
#define VRAMBROKER_ALLOCATOR_HISTORY_H_

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "allocator/heap_snapshot.h"

namespace vrambroker {

// A ring, off at first. Not thread-safe.
class History {
 public:
  bool on() const { return max_events_ > 0; }

  void Restart(size_t max_events) {
    events_.clear();
    events_.shrink_to_fit();
    max_events_ = max_events;
    oldest_ = 0;
  }

  // `block_bytes`: of a block that the event is about.
  void Add(HistoryAction action, uint64_t address, uint64_t bytes, Stream stream, uint64_t block_bytes = 0) {
    if (!on()) return;
    const auto now = std::chrono::system_clock::now().time_since_epoch();
    HistoryEvent event{.action = action,
                       .address = address,
                       .bytes = bytes,
                       .stream = stream,
                       .time_us = std::chrono::duration_cast<std::chrono::microseconds>(now).count()};
    event.set_block_bytes(block_bytes);
    if (events_.size() < max_events_) {
      events_.push_back(event);
      return;
    }
    events_[oldest_] = event;
    oldest_ = (oldest_ + 1) % max_events_;
  }

  // Oldest first.
  std::vector<HistoryEvent> Events() const {
    const auto oldest = events_.begin() + static_cast<std::ptrdiff_t>(oldest_);
    std::vector<HistoryEvent> events;
    events.reserve(events_.size());
    events.insert(events.end(), oldest, events_.end());
    events.insert(events.end(), events_.begin(), oldest);
    return events;
  }

 private:
  size_t max_events_ = 0;
  std::vector<HistoryEvent> events_;
  size_t oldest_ = 0;  // in events_, once it is full
};

}  // namespace vrambroker

#endif  // VRAMBROKER_ALLOCATOR_HISTORY_H_
