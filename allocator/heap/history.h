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

// A ring, off at first. It takes memory as it fills, 40 bytes an event. A free that completes at once is one event in
// it and two in Expand(). Not thread-safe.
class History {
 public:
  static constexpr size_t kDefaultEvents = 100'000;  // that a session keeps unless the configuration says otherwise

  // In the place of kFreeRequested and kFreeCompleted, one right after the other.
  static constexpr HistoryAction kFreed = HistoryAction{0xFF};

  bool on() const { return max_events_ > 0; }
  size_t max_events() const { return max_events_; }
  // Whether the times of events are to be exact, which costs more than everything else; see HeapClock.
  bool exact_times() const { return exact_times_; }

  // Keeps the last `max_events` from now on, of those that there are, too; 0: none.
  void Keep(size_t max_events, bool exact_times) {
    wanted_ = max_events;
    wants_exact_times_ = exact_times;
    Update();
  }
  // Keeps at least `events`, with exact times, whatever Keep() says before or afterwards; 0: as Keep() says.
  void Hold(size_t events) {
    held_ = events;
    Update();
  }

  // Where the next event is to be written; nullptr while it is off.
  HistoryEvent* Next() {
    if (next_ == end_) [[unlikely]] {
      if (!on()) return nullptr;
      NextChunk();
    }
    // Of a ring that is larger than the cache, what is written next is not there.
    __builtin_prefetch(next_ + kPrefetchEvents, 1);
    return next_++;
  }

  // As they are kept, oldest first. For Expand(), which needs no lock.
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

  // `kept` without kFreed.
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
  size_t current_ = 0;            // the chunk that is being filled
  HistoryEvent* next_ = nullptr;  // in it; what is there, if anything, is the oldest event
  HistoryEvent* end_ = nullptr;   // of what it may hold
  bool is_full_ = false;          // the oldest events make room
};

}  // namespace vrambroker

#endif  // VRAMBROKER_ALLOCATOR_HEAP_HISTORY_H_
