// SPDX-License-Identifier: Apache-2.0
//
// SimulatedSource: segments without memory, within a budget.
#ifndef VRAMBROKER_TESTS_SUPPORT_SIMULATED_SOURCE_H_
#define VRAMBROKER_TESTS_SUPPORT_SIMULATED_SOURCE_H_

#include <algorithm>
#include <cstdint>
#include <deque>
#include <functional>
#include <limits>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "allocator/base/mutex.h"
#include "allocator/replay/segment_source.h"

namespace vrambroker {

// Ids are 1, 2, 3, ... in the order of acquisition. The class is thread-safe, and calls the hooks without a lock.
class SimulatedSource : public SegmentSource {
 public:
  static constexpr uint64_t kUnlimited = std::numeric_limits<uint64_t>::max();

  explicit SimulatedSource(uint64_t device_bytes) : device_bytes_(device_bytes) {}

  // Tests set the hooks before use.
  std::function<void(int call)> on_acquire;  // `call` counts from 1
  std::function<void(int call)> on_release;

  void set_limit(uint64_t bytes) {
    MutexLock lock(mu_);
    limit_ = bytes;
  }
  // Answers the next acquisitions with these statuses; OK means the usual answer.
  void AnswerNext(std::deque<absl::Status> answers) {
    MutexLock lock(mu_);
    answers_ = std::move(answers);
  }
  // Makes ReleaseSegments() report all bytes of the segments, or no bytes. The bytes are free again in either case.
  void set_release_reports(bool all) {
    MutexLock lock(mu_);
    report_all_ = all;
  }

  uint64_t used_bytes() const {
    MutexLock lock(mu_);
    return used_;
  }
  int acquire_calls() const {
    MutexLock lock(mu_);
    return acquire_calls_;
  }
  int release_calls() const {
    MutexLock lock(mu_);
    return release_calls_;
  }
  // Returns the requested sizes, refused requests included.
  std::vector<uint64_t> asked_for() const {
    MutexLock lock(mu_);
    return asked_for_;
  }
  // Returns ids in the order of release.
  std::vector<uint64_t> released_ids() const {
    MutexLock lock(mu_);
    return released_ids_;
  }
  // Returns the bytes of a live segment, or 0.
  uint64_t BytesOf(SegmentId id) const {
    MutexLock lock(mu_);
    const auto it = live_.find(Raw(id));
    return it == live_.end() ? 0 : it->second;
  }
  bool CouldAcquire(uint64_t bytes) const {
    MutexLock lock(mu_);
    return Fits(bytes);
  }
  // Describes releases of segments that were not live, or had another size.
  std::string misuse() const {
    MutexLock lock(mu_);
    return misuse_;
  }

  absl::StatusOr<AcquiredSegment> AcquireSegment(uint64_t bytes) override {
    int call = 0;
    {
      MutexLock lock(mu_);
      call = ++acquire_calls_;
      asked_for_.push_back(bytes);
    }
    if (on_acquire) on_acquire(call);
    MutexLock lock(mu_);
    if (!answers_.empty()) {
      absl::Status answer = std::move(answers_.front());
      answers_.pop_front();
      if (!answer.ok()) return answer;
    }
    if (!Fits(bytes)) return absl::ResourceExhaustedError("simulated source: no room");
    used_ += bytes;
    live_[++last_id_] = bytes;
    return AcquiredSegment{.id = SegmentId{last_id_}};
  }

  uint64_t ReleaseSegments(absl::Span<const ReleasedSegment> segments) override {
    int call = 0;
    {
      MutexLock lock(mu_);
      call = ++release_calls_;
    }
    if (on_release) on_release(call);
    MutexLock lock(mu_);
    uint64_t bytes = 0;
    for (const ReleasedSegment& segment : segments) {
      const auto it = live_.find(Raw(segment.id));
      if (it == live_.end() || it->second != segment.bytes) {
        misuse_ += "a segment was released that is not live; ";
        continue;
      }
      released_ids_.push_back(it->first);
      used_ -= segment.bytes;
      bytes += segment.bytes;
      live_.erase(it);
    }
    return report_all_ ? bytes : 0;
  }

 private:
  bool Fits(uint64_t bytes) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    const uint64_t room = std::min(device_bytes_, limit_);
    return used_ <= room && bytes <= room - used_;
  }

  const uint64_t device_bytes_;
  mutable Mutex mu_;
  uint64_t limit_ ABSL_GUARDED_BY(mu_) = kUnlimited;
  uint64_t used_ ABSL_GUARDED_BY(mu_) = 0;
  uint64_t last_id_ ABSL_GUARDED_BY(mu_) = 0;
  bool report_all_ ABSL_GUARDED_BY(mu_) = true;
  int acquire_calls_ ABSL_GUARDED_BY(mu_) = 0;
  int release_calls_ ABSL_GUARDED_BY(mu_) = 0;
  std::deque<absl::Status> answers_ ABSL_GUARDED_BY(mu_);
  std::map<uint64_t, uint64_t> live_ ABSL_GUARDED_BY(mu_);  // id to bytes
  std::vector<uint64_t> asked_for_ ABSL_GUARDED_BY(mu_);
  std::vector<uint64_t> released_ids_ ABSL_GUARDED_BY(mu_);
  std::string misuse_ ABSL_GUARDED_BY(mu_);
};

}  // namespace vrambroker

#endif  // VRAMBROKER_TESTS_SUPPORT_SIMULATED_SOURCE_H_
