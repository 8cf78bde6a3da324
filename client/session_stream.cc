// SPDX-License-Identifier: Apache-2.0
#include "client/session_stream.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "client/connection.h"

namespace vrambroker::client_internal {

SessionStream::SessionStream(v1::Broker::Stub* stub, const v1::Hello& hello, Handlers handlers)
    : handlers_(std::move(handlers)) {
  stub->async()->Session(&context_, this);
  // Send() starts writes from other threads than gRPC's: the hold keeps the call from being done in between.
  AddHold();
  v1::SessionRequest request;
  *request.mutable_hello() = hello;
  Send(std::move(request));
  StartRead(&response_);
  StartCall();
}

bool SessionStream::WaitFor(const std::function<bool()>& condition, absl::Duration timeout) {
  const auto deadline = std::chrono::steady_clock::now() + absl::ToChronoMilliseconds(timeout);
  while (!condition()) {
    if (!changed_.WaitUntil(mu_, deadline)) return condition();
  }
  return true;
}

absl::Status SessionStream::WaitForWelcome(absl::Duration timeout) {
  MutexLock lock(mu_);
  WaitFor([this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return welcomed_ || !status_.ok(); }, timeout);
  if (status_.ok() && !welcomed_) {
    return absl::DeadlineExceededError(
        absl::StrCat("the daemon accepted the connection but did not answer within ", absl::FormatDuration(timeout)));
  }
  return status_;
}

void SessionStream::Send(v1::SessionRequest request) {
  MutexLock lock(mu_);
  if (!writable_) return;
  outgoing_.push_back(std::move(request));
  WriteNext();
}

void SessionStream::WriteNext() {
  if (writing_ || outgoing_.empty()) return;
  writing_ = true;
  StartWrite(&outgoing_.front());
}

void SessionStream::OnWriteDone(bool ok) {
  MutexLock lock(mu_);
  writing_ = false;
  outgoing_.pop_front();
  if (!ok) {
    writable_ = false;
    outgoing_.clear();
  }
  WriteNext();
}

void SessionStream::OnReadDone(bool ok) {
  if (!ok) {  // the end of the stream: let OnDone come
    {
      MutexLock lock(mu_);
      writable_ = false;
    }
    RemoveHold();
    return;
  }
  switch (response_.message_case()) {
    case v1::SessionResponse::kWelcome: {
      handlers_.welcomed(response_.welcome());
      MutexLock lock(mu_);
      welcomed_ = true;
      changed_.NotifyAll();
      break;
    }
    case v1::SessionResponse::kCloseSegments:
      handlers_.close_segments(response_.close_segments());
      break;
    case v1::SessionResponse::kLimitChanged:
      handlers_.limit_changed(response_.limit_changed());
      break;
    case v1::SessionResponse::kEnded: {
      const absl::Status ended =
          absl::AbortedError(absl::StrCat("the session has ended: ", response_.ended().reason()));
      {
        MutexLock lock(mu_);
        status_.Update(ended);
      }
      handlers_.lost(ended);
      break;
    }
    case v1::SessionResponse::kDraining:  // calls go on until the daemon stops; then the stream breaks
    case v1::SessionResponse::kResult:
    case v1::SessionResponse::MESSAGE_NOT_SET:
      break;
  }
  StartRead(&response_);
}

void SessionStream::OnDone(const grpc::Status& grpc_status) {
  absl::Status lost = FromGrpc(grpc_status);
  bool tell = false;
  {
    MutexLock lock(mu_);
    if (welcomed_ && !closing_ && (lost.ok() || absl::IsUnavailable(lost) || absl::IsCancelled(lost))) {
      lost = absl::UnavailableError(absl::StrCat(
          "the daemon went away", lost.message().empty() ? "" : " (", lost.message(), lost.message().empty() ? "" : ")",
          "; what is held stays usable, nothing can be allocated: connect again"));
    }
    tell = welcomed_ && !closing_ && status_.ok();
    status_.Update(lost.ok() ? absl::UnavailableError("the session is closed") : lost);
  }
  if (tell) handlers_.lost(lost);
  MutexLock lock(mu_);
  done_ = true;
  changed_.NotifyAll();  // this object may be gone as soon as the lock is released
}

void SessionStream::Close(absl::Duration timeout) {
  v1::SessionRequest goodbye;
  goodbye.mutable_goodbye();
  Send(std::move(goodbye));
  bool done = false;
  {
    MutexLock lock(mu_);
    closing_ = true;
    done = WaitFor([this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return done_; }, timeout);
  }
  if (done) return;
  context_.TryCancel();
  MutexLock lock(mu_);
  while (!done_) changed_.Wait(mu_);
}

absl::Status SessionStream::status() const {
  MutexLock lock(mu_);
  return status_;
}

}  // namespace vrambroker::client_internal
