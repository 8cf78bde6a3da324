// SPDX-License-Identifier: Apache-2.0
#ifndef VRAMBROKER_CLIENT_HEAP_TRIM_REQUESTS_H_
#define VRAMBROKER_CLIENT_HEAP_TRIM_REQUESTS_H_

#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "allocator/base/mutex.h"
#include "client/connection/deadline.h"
#include "client/vrambroker/client.h"

namespace vrambroker::client_internal {

class SessionStream;

// The daemon's questions for memory passed to the application: only the application's own allocator over whole segments
// knows the free segments. Any number of application threads may wait for questions.
//
// A question ends when the application reports the end, when enough bytes have come back, or at its deadline, whatever
// the application does: the daemon is never kept waiting. Thread-safe.
class TrimRequests {
 public:
  struct Question {
    uint64_t id = 0;
    std::shared_ptr<SessionStream> stream;  // source of the question and target of the answer
    std::optional<int> device;              // none: any device
    uint64_t wanted_bytes = 0;
    uint64_t released_bytes = 0;  // so far
    Deadline deadline;
  };

  // `changed`: NextDeadline() may be earlier, or a question has ended. Called without a lock.
  explicit TrimRequests(std::function<void()> changed) : changed_(std::move(changed)) {}

  // Sets whether the application answers. Stopping ends all questions, and Wait() returns.
  void Serve(bool on) ABSL_LOCKS_EXCLUDED(mu_);
  // False when the application does not answer questions: the caller must answer `question`.
  bool Add(Question question) ABSL_LOCKS_EXCLUDED(mu_);

  // Waits for an untaken question. Takes all open questions together: the bytes add up, and the shortest time counts.
  // DeadlineExceeded; Cancelled when the application does not answer.
  absl::StatusOr<TrimRequest> Wait(absl::Duration timeout) ABSL_LOCKS_EXCLUDED(mu_);
  // The application has given back all it could. A question already ended is no error. InvalidArgument: no such
  // request.
  absl::Status End(uint64_t number) ABSL_LOCKS_EXCLUDED(mu_);
  // Notes that the daemon has `bytes` back.
  void Returned(int device, uint64_t bytes) ABSL_LOCKS_EXCLUDED(mu_);

  // Returns the questions ended by `now`, each once.
  std::vector<Question> TakeEnded(Deadline now) ABSL_LOCKS_EXCLUDED(mu_);
  // The latest time when the next question ends; in the past when a question has ended.
  std::optional<Deadline> NextDeadline() const ABSL_LOCKS_EXCLUDED(mu_);

 private:
  struct Entry {
    Question question;
    uint64_t number = 0;  // of the TrimRequest including this question; 0: not taken
    bool ended = false;
  };

  const std::function<void()> changed_;
  mutable Mutex mu_;
  CondVar added_;
  bool served_ ABSL_GUARDED_BY(mu_) = false;
  uint64_t last_number_ ABSL_GUARDED_BY(mu_) = 0;
  std::list<Entry> entries_ ABSL_GUARDED_BY(mu_);
};

}  // namespace vrambroker::client_internal

#endif  // VRAMBROKER_CLIENT_HEAP_TRIM_REQUESTS_H_
