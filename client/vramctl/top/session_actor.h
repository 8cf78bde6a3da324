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

// Has the daemon change sessions, one after the other, on a thread of its own: a client that does not answer a trim
// holds it up, and the screen goes on meanwhile.
class SessionActor {
 public:
  explicit SessionActor(const Context& context);
  ~SessionActor();  // gives up what is under way: the daemon may have done it, or not
  SessionActor(const SessionActor&) = delete;
  SessionActor& operator=(const SessionActor&) = delete;

  // REQUIRES: Take() had the result of the one before.
  void Begin(SessionOrder order);

  // Readable when Take() has something.
  int fd() const { return ready_.get(); }
  // What came of it, for people; nullopt: nothing yet.
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
