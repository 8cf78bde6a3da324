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

// The daemon's questions for memory that the application answers: it has an allocator of its own over whole segments,
// and that alone knows which of them are free. One thread of the application, or several, wait for them.
//
// A question ends when the application says that it is done, when as much as was asked for has come back, or when its
// time is up, whatever the application does: the daemon is never kept waiting. Thread-safe.
class TrimRequests {
 public:
  struct Question {
    uint64_t id = 0;
    std::shared_ptr<SessionStream> stream;  // that it came by, and is answered by
    std::optional<int> device;              // none: of any
    uint64_t wanted_bytes = 0;
    uint64_t released_bytes = 0;  // so far
    Deadline deadline;
  };

  // `changed`: NextDeadline() may be earlier, or a question has ended. Called without a lock.
  explicit TrimRequests(std::function<void()> changed) : changed_(std::move(changed)) {}

  // Whether the application answers. When it stops, all questions end, and Wait() returns.
  void Serve(bool on) ABSL_LOCKS_EXCLUDED(mu_);
  // False when the application does not answer questions: the caller then answers this one itself.
  bool Add(Question question) ABSL_LOCKS_EXCLUDED(mu_);

  // Waits for a question that nobody has taken. What is there by then is taken together: the bytes add up, and the
  // shortest time counts. DeadlineExceeded; Cancelled when the application does not answer.
  absl::StatusOr<TrimRequest> Wait(absl::Duration timeout) ABSL_LOCKS_EXCLUDED(mu_);
  // The application has given back what it could. One that has ended before is no error. InvalidArgument.
  absl::Status End(uint64_t number) ABSL_LOCKS_EXCLUDED(mu_);
  // The daemon has so much back.
  void Returned(int device, uint64_t bytes) ABSL_LOCKS_EXCLUDED(mu_);

  // Those that have ended by `now`, each once.
  std::vector<Question> TakeEnded(Deadline now) ABSL_LOCKS_EXCLUDED(mu_);
  // When the next one ends at the latest; the past when one has.
  std::optional<Deadline> NextDeadline() const ABSL_LOCKS_EXCLUDED(mu_);

 private:
  struct Entry {
    Question question;
    uint64_t number = 0;  // of the TrimRequest that it is part of; 0: nobody has taken it
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
