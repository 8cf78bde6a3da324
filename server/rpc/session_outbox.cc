// SPDX-License-Identifier: Apache-2.0
#include "server/rpc/session_outbox.h"

#include <utility>

#include "server/sessions/client_questions.h"
#include "server/wire/convert.h"

namespace vrambroker {
namespace {

constexpr size_t kMaxQueued = 1024;  // messages to a client that does not read

}  // namespace

void SessionOutbox::Send(v1::SessionResponse response) {
  MutexLock lock(mu_);
  Queue(std::move(response));
}

void SessionOutbox::End(const absl::Status& status) {
  MutexLock lock(mu_);
  SetEnd(status);
}

bool SessionOutbox::Open(const std::function<absl::StatusOr<v1::SessionResponse>()>& welcome) {
  MutexLock lock(mu_);
  if (stream_ == nullptr) return false;
  absl::StatusOr<v1::SessionResponse> message = welcome();
  if (!message.ok()) {
    SetEnd(message.status());
    return true;
  }
  Queue(*std::move(message));
  // Runs outside gRPC's reactions: the RPC may be over already.
  if (!finished_) stream_->ReadOn();
  return true;
}

void SessionOutbox::Queue(v1::SessionResponse response) {
  if (stream_ == nullptr || ending_) return;
  if (outgoing_.size() < kMaxQueued) {
    outgoing_.push_back(std::move(response));
    return WriteNext();
  }
  // The client does not read. The write in progress may never finish, so the RPC has to be broken.
  outgoing_.resize(1);
  ending_ = true;
  final_status_ = grpc::Status(grpc::StatusCode::RESOURCE_EXHAUSTED, "the client does not read its session stream");
  stream_->Break();
}

void SessionOutbox::SetEnd(const absl::Status& status) {
  if (stream_ == nullptr || ending_) return;
  ending_ = true;
  final_status_ = ToGrpc(status);
  WriteNext();
}

void SessionOutbox::WriteNext() {
  if (writing_ || finished_) return;
  if (!outgoing_.empty()) {
    writing_ = true;
    stream_->Write(outgoing_.front());
  } else if (ending_) {
    finished_ = true;
    stream_->FinishWith(final_status_);
  }
}

void SessionOutbox::OnWritten(bool ok) {
  MutexLock lock(mu_);
  writing_ = false;
  if (ok && outgoing_.front().has_welcome()) welcomed_ = true;
  outgoing_.pop_front();
  if (!ok) {
    outgoing_.clear();
    ending_ = true;
  }
  WriteNext();
}

SessionOutbox::Ending SessionOutbox::Detach() {
  MutexLock lock(mu_);
  stream_ = nullptr;
  return {.welcomed = welcomed_, .code = static_cast<absl::StatusCode>(final_status_.error_code())};
}

// ---- Events ----

void SessionOutbox::Ask(uint64_t question_id, const ClientQuestion& question) {
  v1::SessionResponse response;
  v1::Question* message = response.mutable_question();
  message->set_question_id(question_id);
  switch (question.kind) {
    case ClientQuestion::Kind::kTrim:
      message->mutable_trim()->set_bytes(question.bytes);
      if (question.device >= 0) message->mutable_trim()->set_device(static_cast<uint32_t>(question.device));
      message->mutable_trim()->set_time_ms(static_cast<uint32_t>(question.time.count()));
      break;
    case ClientQuestion::Kind::kStats:
      message->mutable_stats();
      break;
    case ClientQuestion::Kind::kSnapshot:
      message->mutable_snapshot()->set_device(static_cast<uint32_t>(question.device));
      message->mutable_snapshot()->set_without_history(!question.with_history);
      break;
    case ClientQuestion::Kind::kRecord:
      message->mutable_record()->set_max_events(static_cast<uint32_t>(question.max_events));
      break;
    case ClientQuestion::Kind::kHoldRecording:
      message->mutable_record()->set_max_events(static_cast<uint32_t>(question.max_events));
      message->mutable_record()->set_held_events(static_cast<uint32_t>(question.held_events));
      break;
  }
  Send(std::move(response));
}

void SessionOutbox::CloseSegments(absl::Span<const SegmentId> segments) {
  v1::SessionResponse response;
  for (const SegmentId id : segments) response.mutable_close_segments()->add_segment_ids(Raw(id));
  Send(std::move(response));
}

void SessionOutbox::LimitChanged(int device, uint64_t limit_bytes) {
  v1::SessionResponse response;
  response.mutable_limit_changed()->set_device(static_cast<uint32_t>(device));
  response.mutable_limit_changed()->set_limit_bytes(limit_bytes);
  Send(std::move(response));
}

void SessionOutbox::Draining(const std::string& reason) {
  v1::SessionResponse response;
  response.mutable_draining()->set_reason(reason);
  Send(std::move(response));
}

void SessionOutbox::Ended(const std::string& reason) {
  v1::SessionResponse response;
  response.mutable_ended()->set_reason(reason);
  Send(std::move(response));
}

}  // namespace vrambroker
