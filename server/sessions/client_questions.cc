// SPDX-License-Identifier: Apache-2.0
#include "server/sessions/client_questions.h"

#include <algorithm>
#include <utility>

namespace vrambroker {
namespace {

absl::Status NotConnected() {
  return absl::AbortedError("the client is not connected; try again once it is back");
}

}  // namespace

absl::StatusOr<ClientAnswer> ClientQuestions::Ask(const std::function<void(uint64_t id)>& send,
                                                  std::chrono::milliseconds patience, size_t max_items,
                                                  int most_patience) {
  const auto shared = std::make_shared<Waiting>();
  Waiting& waiting = *shared;
  waiting.max_items = max_items;
  uint64_t id = 0;
  {
    MutexLock lock(mu_);
    if (!open_) return NotConnected();
    id = next_id_++;
    waiting_.emplace(id, shared);
  }
  send(id);
  const auto last_deadline = std::chrono::steady_clock::now() + most_patience * patience;
  MutexLock lock(mu_);
  while (!waiting.complete) {
    const size_t items = waiting.items;
    const auto now = std::chrono::steady_clock::now();
    const auto deadline = std::min(now + patience, last_deadline);
    while (!waiting.complete && waiting.items == items && changed_.WaitUntil(mu_, deadline)) {
    }
    if (!waiting.complete && (waiting.items == items || now >= last_deadline)) {
      waiting.status = absl::DeadlineExceededError("the client does not answer");
      break;
    }
  }
  waiting_.erase(id);
  if (!waiting.status.ok()) return waiting.status;
  return std::move(waiting.answer);
}

void ClientQuestions::AskLater(const std::function<void(uint64_t id)>& send,
                               const std::function<void(absl::StatusOr<ClientAnswer>)>& done) {
  uint64_t id = 0;
  {
    MutexLock lock(mu_);
    if (open_) {
      id = next_id_++;
      waiting_.emplace(id, std::make_shared<Waiting>(Waiting{.done = done}));
    }
  }
  if (id == 0) return done(NotConnected());
  send(id);
}

void ClientQuestions::Receive(uint64_t id, size_t items, bool more,
                              const std::function<absl::Status(ClientAnswer&)>& change) {
  std::shared_ptr<Waiting> answered;
  {
    MutexLock lock(mu_);
    const auto it = waiting_.find(id);
    if (it == waiting_.end() || it->second->complete) return;
    Waiting& waiting = *it->second;
    waiting.items += items;
    if (waiting.max_items == 0 && (items > 0 || more)) {
      waiting.status = absl::InvalidArgumentError("the client's answer does not match the question");
    } else {
      waiting.status = waiting.items <= waiting.max_items ? change(waiting.answer)
                                                          : absl::ResourceExhaustedError("the snapshot is too large");
    }
    waiting.complete = !more || !waiting.status.ok();
    changed_.NotifyAll();
    if (!waiting.complete || !waiting.done) return;
    answered = it->second;
    waiting_.erase(it);
  }
  if (answered->status.ok()) return answered->done(std::move(answered->answer));
  answered->done(answered->status);
}

std::vector<std::function<void()>> ClientQuestions::Close() {
  std::vector<std::function<void()>> to_call;
  MutexLock lock(mu_);
  open_ = false;
  changed_.NotifyAll();
  for (auto it = waiting_.begin(); it != waiting_.end();) {
    if (it->second->done) {
      to_call.push_back([done = std::move(it->second->done)] { done(NotConnected()); });
      waiting_.erase(it++);
    } else if (!it->second->complete) {
      // Final: the client may reconnect before the waiting thread wakes up, without knowing the question.
      it->second->status = NotConnected();
      it->second->complete = true;
      ++it;
    } else {
      ++it;
    }
  }
  return to_call;
}

void ClientQuestions::Open() {
  MutexLock lock(mu_);
  open_ = true;
}

}  // namespace vrambroker
