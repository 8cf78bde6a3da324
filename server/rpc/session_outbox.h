// SPDX-License-Identifier: Apache-2.0
//
// SessionOutbox: sends messages to a session's client, in order: answers to calls, questions, and events.
#ifndef VRAMBROKER_SERVER_RPC_SESSION_OUTBOX_H_
#define VRAMBROKER_SERVER_RPC_SESSION_OUTBOX_H_

#include <grpcpp/grpcpp.h>

#include <cstdint>
#include <deque>
#include <functional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "allocator/base/ids.h"
#include "allocator/base/mutex.h"
#include "server/sessions/session.h"
#include "vrambroker/v1/broker.pb.h"

namespace vrambroker {

// Thread-safe. The session and its calls keep the outbox alive. The stream ends with its RPC; later messages are
// dropped.
class SessionOutbox : public SessionEvents {
 public:
  // The RPC. Called with the outbox's lock held, and not after Detach().
  class Stream {
   public:
    virtual ~Stream() = default;
    virtual void Write(const v1::SessionResponse& message) = 0;  // OnWritten() follows
    virtual void ReadOn() = 0;
    virtual void FinishWith(const grpc::Status& status) = 0;
    virtual void Break() = 0;  // without waiting for the write in progress
  };

  explicit SessionOutbox(Stream* stream) : stream_(stream) {}

  // Drops messages sent after the end. Ends a stream whose client does not read.
  void Send(v1::SessionResponse response) ABSL_LOCKS_EXCLUDED(mu_);
  // Ends the stream after the queued messages.
  void End(const absl::Status& status) ABSL_LOCKS_EXCLUDED(mu_);
  // Called when the session has opened, or failed to open: sends the result of `welcome` and reads on, or ends the
  // stream with the error of `welcome`. False: the stream has gone, and `welcome` is not called.
  bool Open(const std::function<absl::StatusOr<v1::SessionResponse>()>& welcome) ABSL_LOCKS_EXCLUDED(mu_);
  // The last message has been sent, or the stream is broken.
  void OnWritten(bool ok) ABSL_LOCKS_EXCLUDED(mu_);
  struct Ending {
    bool welcomed = false;  // the client knows of its session
    absl::StatusCode code = absl::StatusCode::kOk;
  };
  // Detaches the stream, which has gone. Returns its ending.
  Ending Detach() ABSL_LOCKS_EXCLUDED(mu_);

  void Ask(uint64_t question_id, const ClientQuestion& question) override;
  void CloseSegments(absl::Span<const SegmentId> segments) override;
  void LimitChanged(int device, uint64_t limit_bytes) override;
  void Draining(const std::string& reason) override;
  void Ended(const std::string& reason) override;

 private:
  void Queue(v1::SessionResponse response) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void SetEnd(const absl::Status& status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void WriteNext() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  Mutex mu_ ABSL_ACQUIRED_AFTER(lock_level::kStream) ABSL_ACQUIRED_BEFORE(lock_level::kSession){lock_level::kStream};
  Stream* stream_ ABSL_GUARDED_BY(mu_);  // null after Detach()
  std::deque<v1::SessionResponse> outgoing_ ABSL_GUARDED_BY(mu_);
  bool writing_ ABSL_GUARDED_BY(mu_) = false;
  bool ending_ ABSL_GUARDED_BY(mu_) = false;
  bool finished_ ABSL_GUARDED_BY(mu_) = false;
  bool welcomed_ ABSL_GUARDED_BY(mu_) = false;  // the welcome has been written
  grpc::Status final_status_ ABSL_GUARDED_BY(mu_);
};

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_RPC_SESSION_OUTBOX_H_
