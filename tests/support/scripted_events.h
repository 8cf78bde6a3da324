// SPDX-License-Identifier: Apache-2.0
//
// ScriptedEvents: the streams of a SimulatedDevice, with failures on demand and a record of the answers.
#ifndef VRAMBROKER_TESTS_SUPPORT_SCRIPTED_EVENTS_H_
#define VRAMBROKER_TESTS_SUPPORT_SCRIPTED_EVENTS_H_

#include <algorithm>
#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <utility>

#include "allocator/base/mutex.h"
#include "allocator/replay/simulated_device.h"

namespace vrambroker {

// The class is thread-safe; tests set the switches and the hooks between calls. A ScriptedEvents outlives its events.
class ScriptedEvents : public EventSource {
 public:
  explicit ScriptedEvents(SimulatedDevice* device) : device_(*device) {}

  std::atomic<bool> fail_record = false, fail_query = false, fail_wait = false;
  std::atomic<bool> lose_streams = false;          // streams of events recorded from now on no longer exist
  std::function<void(Stream)> on_record, on_wait;  // tests set hooks before use; calls hold no lock

  // recorded() counts the events that were recorded on a stream. known_done() is the number of the last event that the
  // allocator knows to be done.
  uint64_t recorded(Stream stream) const { return Read(recorded_, stream); }
  uint64_t known_done(Stream stream) const { return Read(known_done_, stream); }

  absl::StatusOr<std::unique_ptr<Event>> RecordEvent(Stream stream) override {
    if (on_record) on_record(stream);
    if (fail_record) return absl::InternalError("the event cannot be recorded");
    MutexLock lock(mu_);
    absl::StatusOr<std::unique_ptr<Event>> event = device_.RecordEvent(stream);
    if (!event.ok()) return event;
    return std::make_unique<ScriptedEvent>(this, stream, ++recorded_[stream], *std::move(event), lose_streams);
  }

 private:
  class ScriptedEvent : public Event {
   public:
    ScriptedEvent(ScriptedEvents* owner, Stream stream, uint64_t number, std::unique_ptr<Event> event, bool is_lost)
        : owner_(*owner), stream_(stream), number_(number), event_(std::move(event)), is_lost_(is_lost) {}

    absl::StatusOr<bool> Query() override {
      if (owner_.fail_query) return absl::InternalError("the event cannot be asked");
      if (is_lost_) return absl::NotFoundError("the stream does not exist any more");
      absl::StatusOr<bool> done = event_->Query();
      if (done.value_or(false)) Note();
      return done;
    }
    absl::Status Wait() override {
      if (owner_.on_wait) owner_.on_wait(stream_);
      if (owner_.fail_wait) return absl::InternalError("the event cannot be waited for");
      absl::Status status = event_->Wait();
      if (status.ok()) Note();
      return status;
    }

   private:
    void Note() {
      MutexLock lock(owner_.mu_);
      uint64_t& known = owner_.known_done_[stream_];
      known = std::max(known, number_);
    }

    ScriptedEvents& owner_;
    const Stream stream_;
    const uint64_t number_;
    const std::unique_ptr<Event> event_;
    const bool is_lost_;
  };

  using Numbers = std::map<Stream, uint64_t>;
  uint64_t Read(const Numbers& numbers, Stream stream) const {
    MutexLock lock(mu_);
    const auto it = numbers.find(stream);
    return it == numbers.end() ? 0 : it->second;
  }

  SimulatedDevice& device_;
  mutable Mutex mu_ ABSL_ACQUIRED_AFTER(lock_level::kDevice)
      ABSL_ACQUIRED_BEFORE(lock_level::kLeaf){lock_level::kDevice};
  Numbers recorded_;    // guard: mu_
  Numbers known_done_;  // guard: mu_
};

}  // namespace vrambroker

#endif  // VRAMBROKER_TESTS_SUPPORT_SCRIPTED_EVENTS_H_
