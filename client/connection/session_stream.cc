// SPDX-License-Identifier: Apache-2.0
#include "client/connection/session_stream.h"

#include <algorithm>
#include <system_error>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/connection/connection.h"
#include "client/connection/deadline.h"

namespace vrambroker::client_internal {
namespace {

// Period for polling `give_up` in a waiting call.
constexpr std::chrono::milliseconds kGiveUpPeriod(10);
// Wait for the daemon's answer to a cancelled call: the daemon may be granting the call at that moment.
constexpr std::chrono::milliseconds kGaveUpPatience(500);
constexpr int kMaxBlocksInFree = 1024;  // the protocol's limit
constexpr size_t kEnoughQueued = 4;     // messages

absl::Status ClosingError() {
  return absl::UnavailableError("the client is being closed");
}

thread_local bool in_reaction = false;  // this thread belongs to gRPC

class Reaction {
 public:
  Reaction() { in_reaction = true; }
  ~Reaction() { in_reaction = false; }
  Reaction(const Reaction&) = delete;
  Reaction& operator=(const Reaction&) = delete;
};

}  // namespace

std::shared_ptr<SessionStream> SessionStream::Start(std::shared_ptr<grpc::Channel> channel,
                                                    std::vector<v1::SessionRequest> messages, Handlers handlers) {
  std::shared_ptr<SessionStream> stream(new SessionStream(std::move(channel), std::move(handlers)), &Destroy);
  stream->self_ = stream;
  stream->stub_->async()->Session(&stream->context_, stream.get());
  // Send() starts writes from threads outside gRPC: the hold keeps the call from ending in between.
  stream->AddHold();
  for (v1::SessionRequest& message : messages) stream->Send(std::move(message));
  stream->StartRead(&stream->response_);
  stream->StartCall();
  return stream;
}

void SessionStream::Destroy(const SessionStream* stream) {
  if (!in_reaction) {
    delete stream;
    return;
  }
  try {
    std::thread([stream] { delete stream; }).detach();
    // Without a thread for the deletion, leak the stream.
  } catch (const std::system_error&) {  // NOLINT(bugprone-empty-catch)
  }
}

bool SessionStream::WaitFor(const std::function<bool()>& condition, absl::Duration timeout) {
  const Deadline deadline = DeadlineAfter(timeout);
  while (!condition()) {
    if (!changed_.WaitUntil(mu_, deadline)) return condition();
  }
  return true;
}

absl::Status SessionStream::WaitForWelcome(absl::Duration timeout) {
  MutexLock lock(mu_);
  WaitFor([this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return welcomed_ || !status_.ok() || waiting_stopped_; },
          timeout);
  if (status_.ok() && !welcomed_) {
    if (waiting_stopped_) return ClosingError();
    return NoAnswerError(timeout);
  }
  return status_;
}

void SessionStream::Send(v1::SessionRequest request) {
  MutexLock lock(mu_);
  if (!writable_) return;
  outgoing_.push_back(std::move(request));
  WriteNext();
}

absl::StatusOr<v1::CallResult> SessionStream::Call(
    const std::function<v1::SessionRequest(uint64_t call_id)>& make_request, absl::Duration timeout,
    std::optional<uint32_t> lease_device, bool after_end, const std::function<bool()>& give_up) {
  Deadline deadline = DeadlineAfter(timeout);
  Waiter waiter;
  MutexLock lock(mu_);
  if (!status_.ok() && !(after_end && writable_)) return status_;
  const uint64_t call_id = next_call_++;
  waiters_.emplace(call_id, &waiter);
  if (writable_) {
    outgoing_.push_back(make_request(call_id));
    WriteNext();
  }
  bool gave_up = give_up == nullptr;
  while (!waiter.result.has_value() && writable_ && !waiting_stopped_) {
    const auto next_look = std::chrono::steady_clock::now() + kGiveUpPeriod;
    if (waiter.answered.WaitUntil(mu_, gave_up ? deadline : std::min(deadline, next_look))) continue;
    if (std::chrono::steady_clock::now() >= deadline) break;
    if (gave_up || !writable_ || waiting_stopped_ || !give_up()) continue;
    gave_up = true;  // the answer comes soon, unless the daemon hangs
    deadline = std::min(deadline, std::chrono::steady_clock::now() + kGaveUpPatience);
    v1::SessionRequest cancel;
    cancel.mutable_cancel()->set_call_id(call_id);
    outgoing_.push_back(std::move(cancel));
    WriteNext();
  }
  waiters_.erase(call_id);
  if (waiter.result.has_value()) return *std::move(waiter.result);
  if (writable_) {
    if (lease_device.has_value()) late_leases_.emplace(call_id, *lease_device);
    if (waiting_stopped_) return ClosingError();
    if (gave_up && give_up != nullptr) return absl::CancelledError("given up");
    return absl::DeadlineExceededError(
        absl::StrCat("the daemon did not answer within ", absl::FormatDuration(timeout)));
  }
  // The stream has broken; OnDone sets the reason in a moment.
  while (status_.ok() && !waiting_stopped_ && changed_.WaitUntil(mu_, deadline)) {
  }
  return status_.ok() ? absl::UnavailableError("the daemon went away") : status_;
}

absl::StatusOr<v1::AllocateResponse> SessionStream::Allocate(const v1::AllocateRequest& request, absl::Duration timeout,
                                                             const std::function<bool()>& give_up) {
  absl::StatusOr<v1::CallResult> result = Call(
      [&](uint64_t call_id) {
        v1::SessionRequest message;
        message.mutable_allocate()->set_call_id(call_id);
        *message.mutable_allocate()->mutable_request() = request;
        return message;
      },
      timeout + absl::Milliseconds(request.wait_ms()), /*lease_device=*/std::nullopt, /*after_end=*/false, give_up);
  if (!result.ok()) return result.status();
  if (result->has_error()) return FromProto(result->error());
  return std::move(*result->mutable_allocated());
}

absl::Status SessionStream::Free(uint64_t block_id, absl::Duration timeout) {
  const absl::StatusOr<v1::CallResult> result = Call(
      [&](uint64_t call_id) {
        v1::SessionRequest message;
        message.mutable_free()->set_call_id(call_id);
        message.mutable_free()->mutable_request()->add_block_ids(block_id);
        return message;
      },
      timeout);
  if (!result.ok()) return result.status();
  return result->has_error() ? FromProto(result->error()) : absl::OkStatus();
}

absl::StatusOr<v1::LeaseSegmentsResponse> SessionStream::Lease(const v1::LeaseSegmentsRequest& request,
                                                               absl::Duration timeout,
                                                               const std::function<bool()>& give_up) {
  absl::StatusOr<v1::CallResult> result = Call(
      [&](uint64_t call_id) {
        v1::SessionRequest message;
        message.mutable_lease()->set_call_id(call_id);
        *message.mutable_lease()->mutable_request() = request;
        return message;
      },
      timeout + absl::Milliseconds(request.wait_ms()), request.device(), /*after_end=*/false, give_up);
  if (!result.ok()) return result.status();
  if (result->has_error()) return FromProto(result->error());
  return std::move(*result->mutable_leased());
}

absl::Status SessionStream::Return(const v1::ReturnSegmentsRequest& request, absl::Duration timeout) {
  const absl::StatusOr<v1::CallResult> result = Call(
      [&](uint64_t call_id) {
        v1::SessionRequest message;
        message.mutable_return_segments()->set_call_id(call_id);
        *message.mutable_return_segments()->mutable_request() = request;
        return message;
      },
      timeout, /*lease_device=*/std::nullopt, /*after_end=*/true);
  if (!result.ok()) return result.status();
  return result->has_error() ? FromProto(result->error()) : absl::OkStatus();
}

absl::Status SessionStream::Explain(const v1::ExplainRequest& request, absl::Duration timeout) {
  const absl::StatusOr<v1::CallResult> result = Call(
      [&](uint64_t call_id) {
        v1::SessionRequest message;
        message.mutable_explain()->set_call_id(call_id);
        *message.mutable_explain()->mutable_request() = request;
        return message;
      },
      timeout);
  return result.ok() ? FromProto(result->error()) : result.status();
}

void SessionStream::QueueReturn(uint32_t device, const v1::LeaseSegmentsResponse& leased) {
  if (!writable_) return;
  v1::SessionRequest message;
  message.mutable_return_segments()->set_call_id(next_call_++);
  message.mutable_return_segments()->mutable_request()->set_device(device);
  for (const v1::LeaseSegmentsResponse::Segment& segment : leased.segments()) {
    message.mutable_return_segments()->mutable_request()->add_segment_ids(segment.segment_id());
  }
  outgoing_.push_back(std::move(message));
  WriteNext();
}

void SessionStream::FreeLater(uint64_t block_id) {
  MutexLock lock(mu_);
  QueueFree(block_id);
}

void SessionStream::QueueFree(uint64_t block_id) {
  if (!writable_) return;
  // The first queued message may be in transit; later messages may still grow.
  if (outgoing_.size() > 1 && outgoing_.back().has_free() && frees_.contains(outgoing_.back().free().call_id()) &&
      outgoing_.back().free().request().block_ids_size() < kMaxBlocksInFree) {
    outgoing_.back().mutable_free()->mutable_request()->add_block_ids(block_id);
    return;
  }
  const uint64_t call_id = next_call_++;
  frees_.insert(call_id);
  v1::SessionRequest message;
  message.mutable_free()->set_call_id(call_id);
  message.mutable_free()->mutable_request()->add_block_ids(block_id);
  outgoing_.push_back(std::move(message));
  WriteNext();
}

void SessionStream::WaitForFrees(absl::Duration timeout) {
  MutexLock lock(mu_);
  WaitFor([this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return frees_.empty() || !writable_ || waiting_stopped_; },
          timeout);
}

void SessionStream::HandleResult(const v1::CallResult& result) {
  MutexLock lock(mu_);
  if (frees_.erase(result.call_id()) > 0) {
    if (frees_.empty()) changed_.NotifyAll();
    return;
  }
  if (const auto it = waiters_.find(result.call_id()); it != waiters_.end()) {
    it->second->result = result;
    it->second->answered.NotifyOne();
  } else if (result.has_allocated()) {
    QueueFree(result.allocated().block_id());  // the caller has given up, so no caller knows the block
  } else if (const auto late = late_leases_.find(result.call_id()); late != late_leases_.end()) {
    if (result.has_leased()) QueueReturn(late->second, result.leased());
    late_leases_.erase(late);
  }
}

void SessionStream::EndOfStream() {
  MutexLock lock(mu_);
  writable_ = false;
  for (const auto& [call_id, waiter] : waiters_) waiter->answered.NotifyOne();
  changed_.NotifyAll();
}

void SessionStream::WriteNext() {
  if (writing_ || outgoing_.empty()) return;
  writing_ = true;
  StartWrite(&outgoing_.front());
}

void SessionStream::OnWriteDone(bool ok) {
  if (!ok) EndOfStream();
  MutexLock lock(mu_);
  writing_ = false;
  outgoing_.pop_front();
  if (!ok) outgoing_.clear();
  if (outgoing_.size() == kEnoughQueued - 1) changed_.NotifyAll();
  WriteNext();
}

void SessionStream::OnReadDone(bool ok) {
  if (!ok) {  // end of the stream: let OnDone run
    EndOfStream();
    RemoveHold();
    return;
  }
  {
    const Reaction reaction;
    gate_.Run([this] { Receive(response_); });
  }
  StartRead(&response_);
}

void SessionStream::Receive(const v1::SessionResponse& response) {
  switch (response.message_case()) {
    case v1::SessionResponse::kWelcome: {
      {
        MutexLock lock(mu_);
        if (welcomed_) break;  // the objects filled by the handler are gone
      }
      handlers_.welcomed(response.welcome());
      MutexLock lock(mu_);
      welcomed_ = true;
      changed_.NotifyAll();
      break;
    }
    case v1::SessionResponse::kCloseSegments:
      handlers_.close_segments(response.close_segments());
      break;
    case v1::SessionResponse::kLimitChanged:
      handlers_.limit_changed(response.limit_changed());
      break;
    case v1::SessionResponse::kEnded: {
      const absl::Status ended = absl::AbortedError(absl::StrCat("the session has ended: ", response.ended().reason()));
      {
        MutexLock lock(mu_);
        status_.Update(ended);
      }
      handlers_.lost(ended);
      break;
    }
    case v1::SessionResponse::kResult:
      HandleResult(response.result());
      break;
    case v1::SessionResponse::kQuestion:
      handlers_.question(response.question());
      break;
    case v1::SessionResponse::kDraining: {  // calls continue until the daemon stops; then the stream breaks
      MutexLock lock(mu_);
      why_draining_ = response.draining().reason();
      break;
    }
    case v1::SessionResponse::MESSAGE_NOT_SET:
      break;
  }
}

void SessionStream::OnDone(const grpc::Status& grpc_status) {
  const Reaction reaction;
  std::shared_ptr<SessionStream> self = std::move(self_);
  absl::Status lost = FromGrpc(grpc_status);
  bool tell = false;
  {
    MutexLock lock(mu_);
    if (welcomed_ && !closing_) {
      const std::string why = why_draining_.empty() ? std::string(lost.message()) : why_draining_;
      lost = absl::UnavailableError(
          absl::StrCat("the daemon went away", why.empty() ? "" : " (", why, why.empty() ? "" : ")",
                       "; held memory stays usable, but nothing can be allocated until the client connects again"));
    }
    if (!welcomed_) lost = ExplainClosed(lost);
    tell = welcomed_ && !closing_ && status_.ok();
    status_.Update(lost.ok() ? absl::UnavailableError("the session is closed") : lost);
    ended_well_ = grpc_status.ok();
    done_ = true;
    if (!tell && closers_ > 0) released_ = std::move(self);
    changed_.NotifyAll();  // a closer may destroy this object as soon as the lock is released
  }
  // Last: the handler may release everything that waits for the end of the call.
  if (tell) gate_.Run([&] { handlers_.lost(lost); });
}

absl::Status SessionStream::Close(absl::Duration timeout) {
  std::shared_ptr<SessionStream> released;  // destroyed without the lock
  MutexLock lock(mu_);
  if (!std::exchange(closing_, true) && writable_) {
    outgoing_.emplace_back().mutable_goodbye();
    WriteNext();
  }
  ++closers_;
  const bool done = WaitFor([this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return done_; }, timeout);
  --closers_;
  released = std::move(released_);
  if (!done) {
    return absl::DeadlineExceededError("the daemon does not answer the goodbye");
  }
  return ended_well_ ? absl::OkStatus() : absl::UnavailableError("the stream has broken");
}

void SessionStream::Abort() {
  {
    MutexLock lock(mu_);
    closing_ = true;
  }
  context_.TryCancel();
  gate_.Close();
}

void SessionStream::StopWaiting() {
  MutexLock lock(mu_);
  waiting_stopped_ = true;
  for (const auto& [call_id, waiter] : waiters_) waiter->answered.NotifyOne();
  changed_.NotifyAll();
}

void SessionStream::WaitForRoom() {
  MutexLock lock(mu_);
  while (writable_ && !waiting_stopped_ && outgoing_.size() >= kEnoughQueued) changed_.Wait(mu_);
}

absl::Status SessionStream::status() const {
  MutexLock lock(mu_);
  return status_;
}

}  // namespace vrambroker::client_internal
