// SPDX-License-Identifier: Apache-2.0
//
// ClientQuestions: questions to a session's client without an answer yet.
#ifndef VRAMBROKER_SERVER_SESSIONS_CLIENT_QUESTIONS_H_
#define VRAMBROKER_SERVER_SESSIONS_CLIENT_QUESTIONS_H_

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "allocator/base/mutex.h"
#include "allocator/heap/heap_snapshot.h"

namespace vrambroker {

// Questions to a client with its own allocators.
struct ClientQuestion {
  enum class Kind { kTrim, kStats, kSnapshot, kRecord, kHoldRecording };
  Kind kind = Kind::kStats;
  uint64_t bytes = 0;                 // kTrim: bytes wanted; 0: all free bytes
  int device = 0;                     // kSnapshot; kTrim (-1: all devices)
  std::chrono::milliseconds time{0};  // kTrim: time limit for an answer
  bool with_history = true;           // kSnapshot
  uint64_t max_events = 0;            // kRecord; kHoldRecording: for clients without kHoldRecording
  uint64_t held_events = 0;           // kHoldRecording
};

struct ClientAnswer {
  uint64_t released_bytes = 0;  // kTrim
  HeapSnapshot snapshot;        // kSnapshot
};

// Thread-safe.
class ClientQuestions {
 public:
  // Most blocks and events accepted in a client's snapshot.
  static constexpr size_t kMaxSnapshotItems = 3'000'000;
  static constexpr size_t kMaxItemsWithoutHistory = 300'000;  // lower, since many clients are asked at a time

  // Bound on the total time of an answer, in multiples of `patience`, against clients answering drop by drop.
  static constexpr int kMostPatience = 30;

  // Sends a question by `send(id)`. Waits until the answer is complete, until `patience` passes without a new part, or
  // until Close(). DeadlineExceeded, Aborted. `max_items`: bound for a snapshot; 0 if not a snapshot. `most_patience`:
  // as kMostPatience.
  absl::StatusOr<ClientAnswer> Ask(const std::function<void(uint64_t id)>& send, std::chrono::milliseconds patience,
                                   size_t max_items = kMaxSnapshotItems, int most_patience = kMostPatience)
      ABSL_LOCKS_EXCLUDED(mu_);

  // As Ask(), without waiting: calls `done` once, with the answer or with Aborted, perhaps at once. Ends only with an
  // answer in a single part, or by Close().
  void AskLater(const std::function<void(uint64_t id)>& send,
                const std::function<void(absl::StatusOr<ClientAnswer>)>& done) ABSL_LOCKS_EXCLUDED(mu_);

  // Adds a part with `items` blocks and events to the answer of question `id`; `change` returns an error to end the
  // answer. The answer is complete unless `more` follows. Ignored if the question has ended.
  void Receive(uint64_t id, size_t items, bool more, const std::function<absl::Status(ClientAnswer&)>& change)
      ABSL_LOCKS_EXCLUDED(mu_);

  // Ends all questions, present and future, with Aborted, until Open(). The caller must call the results, for
  // AskLater(), without a lock.
  [[nodiscard]] std::vector<std::function<void()>> Close() ABSL_LOCKS_EXCLUDED(mu_);
  void Open() ABSL_LOCKS_EXCLUDED(mu_);

 private:
  struct Waiting {
    ClientAnswer answer;
    absl::Status status;
    size_t items = 0;      // in the snapshot
    size_t max_items = 0;  // a larger snapshot ends the question with an error
    bool complete = false;
    std::function<void(absl::StatusOr<ClientAnswer>)> done;  // from AskLater()
  };

  Mutex mu_;
  CondVar changed_;
  bool open_ ABSL_GUARDED_BY(mu_) = true;
  uint64_t next_id_ ABSL_GUARDED_BY(mu_) = 1;
  absl::flat_hash_map<uint64_t, std::shared_ptr<Waiting>> waiting_ ABSL_GUARDED_BY(mu_);
};

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_SESSIONS_CLIENT_QUESTIONS_H_
