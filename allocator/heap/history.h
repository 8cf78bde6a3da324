// SPDX-License-Identifier: Apache-2.0
//
// History: the last N events of a heap, for snapshots.
#ifndef VRAMBROKER_ALLOCATOR_HEAP_HISTORY_H_
#define VRAMBROKER_ALLOCATOR_HEAP_HISTORY_H_

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "allocator/heap/heap_snapshot.h"

namespace vrambroker {

// A ring, off at first. Memory grows with the events kept, 40 bytes an event. A free completed at once is one event in
// the ring and two in Expand(). Not thread-safe.
class History {
 public:
  static constexpr size_t kDefaultEvents = 100'000;  // of a session, unless configured

  // Stands for kFreeRequested with kFreeCompleted right after.
  static constexpr HistoryAction kFreed = HistoryAction{0xFF};

  bool on() const { return max_events_ > 0; }
  size_t max_events() const { return max_events_; }
  // True if events get exact times. Exact times cost more than everything else; see HeapClock.
  bool exact_times() const { return exact_times_; }

  // Keeps the last `max_events` events from now on, including events kept before; 0: none.
  void Keep(size_t max_events, bool exact_times) {
    wanted_ = max_events;
    wants_exact_times_ = exact_times;
    Update();
  }
  // Keeps at least `events` events, with exact times, regardless of earlier and later Keep(); 0: as Keep() says.
  void Hold(size_t events) {
    held_ = events;
    Update();
  }

  // Returns the place for the next event; nullptr while off.
  HistoryEvent* Next() {
    if (next_ == end_) [[unlikely]] {
      if (!on()) return nullptr;
      NextChunk();
    }
    // Prefetches: in a ring larger than the cache, the place to write next is not cached.
    __builtin_prefetch(next_ + kPrefetchEvents, 1);
    return next_++;
  }

  // Returns the kept events, oldest first. For Expand(), a function without need of the lock.
  std::vector<HistoryEvent> Kept() const {
    std::vector<HistoryEvent> events;
    if (chunks_.empty()) return events;
    events.reserve(is_full_ ? max_events_ : chunks_.size() * kChunkEvents);
    if (is_full_) {
      events.insert(events.end(), static_cast<const HistoryEvent*>(next_), static_cast<const HistoryEvent*>(end_));
      for (size_t i = current_ + 1; i < chunks_.size(); ++i) AddAll(i, &events);
    }
    for (size_t i = 0; i < current_; ++i) AddAll(i, &events);
    const HistoryEvent* const first = chunks_[current_]->data();
    events.insert(events.end(), first, static_cast<const HistoryEvent*>(next_));
    return events;
  }

  // Returns `kept` with two events for each kFreed.
  static std::vector<HistoryEvent> Expand(const std::vector<HistoryEvent>& kept) {
    std::vector<HistoryEvent> events;
    const auto freed =
        std::count_if(kept.begin(), kept.end(), [](const auto& event) { return event.action == kFreed; });
    events.reserve(kept.size() + static_cast<size_t>(freed));
    for (HistoryEvent event : kept) {
      const bool is_freed = event.action == kFreed;
      if (is_freed) event.action = HistoryAction::kFreeRequested;
      events.push_back(event);
      if (!is_freed) continue;
      event.action = HistoryAction::kFreeCompleted;
      events.push_back(event);
    }
    return events;
  }

 private:
  static constexpr size_t kChunkEvents = 1024;
  static constexpr size_t kPrefetchEvents = 6;
  using Chunk = std::array<HistoryEvent, kChunkEvents>;

  // All chunks but the last are used as a whole.
  size_t EventsIn(size_t chunk) const { return std::min(kChunkEvents, max_events_ - chunk * kChunkEvents); }

  void Update() {
    exact_times_ = wants_exact_times_ || held_ > 0;
    if (const size_t max_events = std::max(wanted_, held_); max_events != max_events_) Resize(max_events);
  }

  void Resize(size_t max_events) {
    const std::vector<HistoryEvent> events = Kept();
    chunks_.clear();
    chunks_.shrink_to_fit();
    next_ = end_ = nullptr;
    current_ = 0;
    is_full_ = false;
    max_events_ = max_events;
    for (size_t i = events.size() - std::min(events.size(), max_events); i < events.size(); ++i) *Next() = events[i];
  }

  void NextChunk() {
    if (next_ != nullptr && ++current_ * kChunkEvents >= max_events_) {
      current_ = 0;
      is_full_ = true;
    }
    if (current_ == chunks_.size()) chunks_.push_back(std::make_unique_for_overwrite<Chunk>());
    next_ = chunks_[current_]->data();
    end_ = next_ + EventsIn(current_);
  }

  void AddAll(size_t chunk, std::vector<HistoryEvent>* events) const {
    const HistoryEvent* const first = chunks_[chunk]->data();
    events->insert(events->end(), first, first + EventsIn(chunk));
  }

  size_t wanted_ = 0;  // see Keep()
  bool wants_exact_times_ = false;
  size_t held_ = 0;  // see Hold()
  size_t max_events_ = 0;
  bool exact_times_ = false;
  std::vector<std::unique_ptr<Chunk>> chunks_;
  size_t current_ = 0;            // the chunk being filled
  HistoryEvent* next_ = nullptr;  // in the current chunk; an event there is the oldest
  HistoryEvent* end_ = nullptr;   // end of the chunk's usable part
  bool is_full_ = false;          // new events replace the oldest
};

}  // namespace vrambroker

#endif  // VRAMBROKER_ALLOCATOR_HEAP_HISTORY_H_
