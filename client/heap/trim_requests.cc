// SPDX-License-Identifier: Apache-2.0
#include "client/heap/trim_requests.h"

#include <algorithm>
#include <limits>

#include "absl/strings/str_cat.h"

namespace vrambroker::client_internal {

void TrimRequests::Serve(bool on) {
  {
    MutexLock lock(mu_);
    served_ = on;
    if (!on) {
      for (Entry& entry : entries_) entry.ended = true;
    }
    added_.NotifyAll();
  }
  changed_();
}

bool TrimRequests::Add(Question question) {
  {
    MutexLock lock(mu_);
    if (!served_) return false;
    entries_.push_back({.question = std::move(question)});
    added_.NotifyAll();
  }
  changed_();
  return true;
}

absl::StatusOr<TrimRequest> TrimRequests::Wait(absl::Duration timeout) {
  const Deadline deadline = DeadlineAfter(timeout);
  const auto is_open = [](const Entry& entry) { return entry.number == 0 && !entry.ended; };
  MutexLock lock(mu_);
  while (served_ && std::none_of(entries_.begin(), entries_.end(), is_open)) {
    if (!added_.WaitUntil(mu_, deadline) && std::none_of(entries_.begin(), entries_.end(), is_open)) {
      return absl::DeadlineExceededError("the daemon has not asked for memory");
    }
  }
  if (!served_) return absl::CancelledError("this program does not answer the daemon's requests for memory");
  TrimRequest request{.number = ++last_number_};
  bool is_first = true;
  Deadline end = Deadline::max();
  for (Entry& entry : entries_) {
    if (!is_open(entry)) continue;
    entry.number = request.number;
    const Question& question = entry.question;
    const uint64_t missing = question.wanted_bytes - std::min(question.wanted_bytes, question.released_bytes);
    request.bytes += std::min(missing, std::numeric_limits<uint64_t>::max() - request.bytes);
    end = std::min(end, question.deadline);
    const int device = question.device.value_or(-1);
    request.device = std::exchange(is_first, false) || request.device == device ? device : -1;
  }
  request.time = TimeUntil(end);
  return request;
}

absl::Status TrimRequests::End(uint64_t number) {
  {
    MutexLock lock(mu_);
    if (number == 0 || number > last_number_) {
      return absl::InvalidArgumentError(absl::StrCat("number: no request ", number, " was taken"));
    }
    for (Entry& entry : entries_) entry.ended = entry.ended || entry.number == number;
  }
  changed_();
  return absl::OkStatus();
}

void TrimRequests::Returned(int device, uint64_t bytes) {
  bool has_ended = false;
  {
    MutexLock lock(mu_);
    for (Entry& entry : entries_) {
      Question& question = entry.question;
      if (entry.ended || question.device.value_or(device) != device) continue;
      const uint64_t part = std::min(bytes, question.wanted_bytes - question.released_bytes);
      question.released_bytes += part;
      bytes -= part;
      if (question.released_bytes == question.wanted_bytes) has_ended = entry.ended = true;
      if (bytes == 0) break;
    }
  }
  if (has_ended) changed_();
}

std::vector<TrimRequests::Question> TrimRequests::TakeEnded(Deadline now) {
  std::vector<Question> ended;
  MutexLock lock(mu_);
  for (auto it = entries_.begin(); it != entries_.end();) {
    if (!it->ended && it->question.deadline > now) {
      ++it;
      continue;
    }
    ended.push_back(std::move(it->question));
    it = entries_.erase(it);
  }
  return ended;
}

std::optional<Deadline> TrimRequests::NextDeadline() const {
  std::optional<Deadline> next;
  MutexLock lock(mu_);
  for (const Entry& entry : entries_) {
    const Deadline deadline = entry.ended ? Deadline::min() : entry.question.deadline;
    if (!next.has_value() || deadline < *next) next = deadline;
  }
  return next;
}

}  // namespace vrambroker::client_internal
