// SPDX-License-Identifier: Apache-2.0
#include "server/requests/memory_request.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/identity/policy.h"

namespace vrambroker {

absl::Status CheckWait(const RequestOptions& options) {
  if (options.wait <= kMaxWait) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("wait_ms: ", options.wait.count(), "; a request may wait for at most ", kMaxWait.count()));
}

MemoryRequest::MemoryRequest(SessionPtr session, int device, const RequestOptions& options)
    : session_(std::move(session)),
      device_(device),
      options_(options),
      cancelled_(session_->cancel_keys().Add(options.may_reclaim ? options.cancel_key : 0)) {}

void MemoryRequest::Granted(Reservation reservation) {
  const auto reserved = std::make_shared<Reservation>(std::move(reservation));
  const bool queued =
      session_->slow_calls().Submit([self = shared_from_this(), reserved] { self->RunReserved(std::move(*reserved)); });
  if (queued) return;
  reserved->Release();  // before the answer
  Refused(Session::TooManyCalls());
}

int MemoryRequest::StartWaiting(SteadyTime now) {
  MutexLock lock(mu_);
  if (!deadline_.has_value()) deadline_ = now + std::min(options_.wait, session_->max_wait());
  return current_wait_ = ++waits_;
}

bool MemoryRequest::EndWait(int wait, WaitRecord outcome) {
  MutexLock lock(mu_);
  if (current_wait_ != wait) return false;
  current_wait_ = 0;
  outcome_ = std::move(outcome);
  return true;
}

bool MemoryRequest::EndWaitOtherwise(int wait) {
  {
    MutexLock lock(mu_);
    if (current_wait_ != wait || !TryServeOtherwise()) return false;
    current_wait_ = 0;
  }
  ServedOtherwise();
  return true;
}

SteadyTime MemoryRequest::deadline() const {
  MutexLock lock(mu_);
  return deadline_.value_or(SteadyTime::min());
}

WaitRecord MemoryRequest::outcome() const {
  MutexLock lock(mu_);
  return outcome_;
}

}  // namespace vrambroker
