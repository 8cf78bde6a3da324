// SPDX-License-Identifier: Apache-2.0
//
// ClientQuestions: what the client of a session has been asked and has not answered yet.
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

// Questions to a client that runs its own allocators.
struct ClientQuestion {
  enum class Kind { kTrim, kStats, kSnapshot, kRecord, kHoldRecording };
  Kind kind = Kind::kStats;
  uint64_t bytes = 0;                 // kTrim: how many; 0: all that is free
  int device = 0;                     // kSnapshot; kTrim, -1 there: all of them
  std::chrono::milliseconds time{0};  // kTrim: an answer is waited for so long
  bool with_history = true;           // kSnapshot
  uint64_t max_events = 0;            // kRecord; kHoldRecording: for clients that do not know it
  uint64_t held_events = 0;           // kHoldRecording
};

struct ClientAnswer {
  uint64_t released_bytes = 0;  // kTrim
  HeapSnapshot snapshot;        // kSnapshot
};

// Thread-safe.
class ClientQuestions {
 public:
  // Blocks and events of a snapshot that is accepted from a client; more is not believed.
  static constexpr size_t kMaxSnapshotItems = 3'000'000;
  static constexpr size_t kMaxItemsWithoutHistory = 300'000;  // such snapshots are asked of many clients at a time

  // How many times `patience` an answer may take in all: a client that sends it drop by drop is not waited for.
  static constexpr int kMostPatience = 30;

  // Sends a question by `send(id)` and waits until it is answered, until `patience` passes without a new part of it, or
  // until Close(). DeadlineExceeded, Aborted.
  // `max_items`: of a snapshot; 0 where none was asked for. `most_patience`: as kMostPatience.
  absl::StatusOr<ClientAnswer> Ask(const std::function<void(uint64_t id)>& send, std::chrono::milliseconds patience,
                                   size_t max_items = kMaxSnapshotItems, int most_patience = kMostPatience)
      ABSL_LOCKS_EXCLUDED(mu_);

  // The same without waiting: `done` is called once, with the answer or with Aborted, perhaps at once. Nothing ends it
  // but an answer, of one part, and Close().
  void AskLater(const std::function<void(uint64_t id)>& send,
                const std::function<void(absl::StatusOr<ClientAnswer>)>& done) ABSL_LOCKS_EXCLUDED(mu_);

  // Changes the answer that is being put together for question `id`, by `items` blocks and events; `change` returns an
  // error to end it with. The answer is complete unless `more` follows. Nothing happens when nobody waits for it any
  // more.
  void Receive(uint64_t id, size_t items, bool more, const std::function<absl::Status(ClientAnswer&)>& change)
      ABSL_LOCKS_EXCLUDED(mu_);

  // Nobody answers any more: all questions, and those to come, end with Aborted, until Open(). The caller is to call
  // what is returned, for those that nobody waits for, without a lock.
  [[nodiscard]] std::vector<std::function<void()>> Close() ABSL_LOCKS_EXCLUDED(mu_);
  void Open() ABSL_LOCKS_EXCLUDED(mu_);

 private:
  struct Waiting {
    ClientAnswer answer;
    absl::Status status;
    size_t items = 0;      // of the snapshot
    size_t max_items = 0;  // more ends the question with an error
    bool complete = false;
    std::function<void(absl::StatusOr<ClientAnswer>)> done;  // of AskLater()
  };

  Mutex mu_;
  CondVar changed_;
  bool open_ ABSL_GUARDED_BY(mu_) = true;
  uint64_t next_id_ ABSL_GUARDED_BY(mu_) = 1;
  absl::flat_hash_map<uint64_t, std::shared_ptr<Waiting>> waiting_ ABSL_GUARDED_BY(mu_);
};

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_SESSIONS_CLIENT_QUESTIONS_H_
