// SPDX-License-Identifier: Apache-2.0
//
// Keeps the last refusals for lack of memory, for diagnosis after the program has gone.
#ifndef VRAMBROKER_SERVER_OOM_OOM_LOG_H_
#define VRAMBROKER_SERVER_OOM_OOM_LOG_H_

#include <sys/types.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "allocator/base/ids.h"
#include "allocator/base/mutex.h"
#include "server/oom/out_of_memory.h"

namespace vrambroker {

struct OomEvent {
  std::chrono::system_clock::time_point time;
  SessionId session{};
  std::string client;  // the session's name
  uid_t uid = 0;
  std::optional<ClaimId> claim;  // containing the session
  OomReport report;
};

// Safe to call from any thread.
class OomLog {
 public:
  static constexpr size_t kMaxEvents = 1000;  // about 1 KB each; all events fit in a gRPC answer (4 MiB)

  // A full log drops the oldest event of the user with most events, so a user who is refused constantly cannot push out
  // everybody else's events. Each user's share is divided in three: events without a recording, events with a session's
  // first recording, and events with a later recording. The division matters because recordings are found through
  // events, and a retrying program makes many events but keeps two recordings.
  void Add(OomEvent event) ABSL_LOCKS_EXCLUDED(mu_);
  std::vector<std::shared_ptr<const OomEvent>> NewestFirst() const ABSL_LOCKS_EXCLUDED(mu_);
  // Events ever added.
  uint64_t total() const ABSL_LOCKS_EXCLUDED(mu_);

 private:
  struct Kept {
    uint64_t number = 0;  // in the order of Add()
    std::shared_ptr<const OomEvent> event;
  };
  struct OfUser {
    std::deque<Kept> first_recorded;  // oldest first, as in the lists below
    std::deque<Kept> later_recorded;
    std::deque<Kept> others;

    std::deque<Kept>& Of(const OomReport& report) {
      return report.is_first_recorded ? first_recorded : report.is_recorded ? later_recorded : others;
    }
    // On a tie, returns the first of the tied lists.
    std::deque<Kept>& Largest() {
      return *std::max({&others, &later_recorded, &first_recorded},
                       [](const auto* a, const auto* b) { return a->size() < b->size(); });
    }
    size_t size() const { return first_recorded.size() + later_recorded.size() + others.size(); }
  };

  std::shared_ptr<const OomEvent> MakeRoom() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  mutable Mutex mu_;
  std::map<uid_t, OfUser> events_ ABSL_GUARDED_BY(mu_);
  size_t kept_ ABSL_GUARDED_BY(mu_) = 0;
  uint64_t total_ ABSL_GUARDED_BY(mu_) = 0;
};

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_OOM_OOM_LOG_H_
