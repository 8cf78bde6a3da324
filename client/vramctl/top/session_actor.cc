// SPDX-License-Identifier: Apache-2.0
#include "client/vramctl/top/session_actor.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <utility>

#include "client/vramctl/daemon/change_session.h"
#include "client/vramctl/top/daemon_poller.h"

namespace vrambroker::vramctl {

SessionActor::SessionActor(const Context& context)
    : context_(context), ready_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {}

SessionActor::~SessionActor() {
  canceller_.Cancel();
  if (thread_.joinable()) thread_.join();
}

void SessionActor::Begin(SessionOrder order) {
  if (thread_.joinable()) thread_.join();
  // The thread inherits the caller's blocked signals.
  thread_ = std::thread([this, order = std::move(order)] {
    Result result = CarryOutNow(order);
    {
      MutexLock lock(mu_);
      result_ = std::move(result);
    }
    const uint64_t one = 1;
    (void)!write(ready_.get(), &one, sizeof one);
  });
}

std::optional<SessionActor::Result> SessionActor::Take() {
  uint64_t count = 0;
  (void)!read(ready_.get(), &count, sizeof count);
  MutexLock lock(mu_);
  return std::exchange(result_, std::nullopt);
}

SessionActor::Result SessionActor::CarryOutNow(const SessionOrder& order) {
  // Open a new connection, since the daemon may have restarted since the last change.
  absl::StatusOr<Daemon> daemon = Daemon::Connect(context_, std::min(context_.timeout, DaemonPoller::kTimeout));
  if (!daemon.ok()) return daemon.status();
  daemon->timeout = context_.timeout;
  daemon->canceller = &canceller_;
  absl::StatusOr<ChangeResult> result = CarryOut(*daemon, order);
  if (!result.ok()) return result.status();
  if (!result->warning.empty()) result->lines.push_back(std::move(result->warning));
  return std::move(result->lines);
}

}  // namespace vrambroker::vramctl
