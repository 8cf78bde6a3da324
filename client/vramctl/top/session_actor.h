// SPDX-License-Identifier: Apache-2.0
#ifndef VRAMBROKER_CLIENT_VRAMCTL_TOP_SESSION_ACTOR_H_
#define VRAMBROKER_CLIENT_VRAMCTL_TOP_SESSION_ACTOR_H_

#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/statusor.h"
#include "allocator/base/mutex.h"
#include "allocator/base/unique_fd.h"
#include "client/vramctl/daemon/daemon_calls.h"
#include "client/vramctl/views/session_change.h"

namespace vrambroker::vramctl {

// Makes the daemon change sessions, sequentially, on a separate thread: a client not answering a trim delays the
// thread, not the screen.
class SessionActor {
 public:
  explicit SessionActor(const Context& context);
  ~SessionActor();  // cancels the call in progress: the daemon may have made the change, or not
  SessionActor(const SessionActor&) = delete;
  SessionActor& operator=(const SessionActor&) = delete;

  // REQUIRES: Take() has returned the previous result.
  void Begin(SessionOrder order);

  // Readable when Take() has a result.
  int fd() const { return ready_.get(); }
  // Result of a change, for people; nullopt: no result yet.
  using Result = absl::StatusOr<std::vector<std::string>>;
  std::optional<Result> Take() ABSL_LOCKS_EXCLUDED(mu_);

 private:
  Result CarryOutNow(const SessionOrder& order);

  const Context context_;
  const UniqueFd ready_;  // an eventfd
  CallCanceller canceller_;
  Mutex mu_;
  std::optional<Result> result_ ABSL_GUARDED_BY(mu_);
  std::thread thread_;
};

}  // namespace vrambroker::vramctl

#endif  // VRAMBROKER_CLIENT_VRAMCTL_TOP_SESSION_ACTOR_H_
