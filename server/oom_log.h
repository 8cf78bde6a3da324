// SPDX-License-Identifier: Apache-2.0
//
// The last refusals for lack of memory, for operators who come when the program has gone.
#ifndef VRAMBROKER_SERVER_OOM_LOG_H_
#define VRAMBROKER_SERVER_OOM_LOG_H_

#include <sys/types.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "allocator/ids.h"
#include "allocator/mutex.h"
#include "server/out_of_memory.h"

namespace vrambroker {

struct OomEvent {
  std::chrono::system_clock::time_point time;
  SessionId session{};
  std::string client;  // the session's name
  uid_t uid = 0;
  OomReport report;
};

// Safe to call from any thread.
class OomLog {
 public:
  static constexpr size_t kMaxEvents = 1000;  // about 1 KB each; all of them fit in one answer of gRPC (4 MiB)

  // The oldest one makes room.
  void Add(OomEvent event) ABSL_LOCKS_EXCLUDED(mu_);
  std::vector<std::shared_ptr<const OomEvent>> NewestFirst() const ABSL_LOCKS_EXCLUDED(mu_);
  // Events ever added.
  uint64_t total() const ABSL_LOCKS_EXCLUDED(mu_);

 private:
  mutable Mutex mu_;
  std::deque<std::shared_ptr<const OomEvent>> events_ ABSL_GUARDED_BY(mu_);  // oldest first
  uint64_t total_ ABSL_GUARDED_BY(mu_) = 0;
};

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_OOM_LOG_H_
