// SPDX-License-Identifier: Apache-2.0
#ifndef VRAMBROKER_CLIENT_VRAMCTL_TOP_DAEMON_POLLER_H_
#define VRAMBROKER_CLIENT_VRAMCTL_TOP_DAEMON_POLLER_H_

#include <optional>
#include <thread>

#include "absl/time/time.h"
#include "allocator/base/mutex.h"
#include "allocator/base/unique_fd.h"
#include "client/vramctl/daemon/daemon_calls.h"
#include "client/vramctl/views/top_view.h"

namespace vrambroker::vramctl {

// Reads the daemon's figures again and again on a thread of its own, so that keys work while a daemon does not answer.
// A daemon that goes away is looked for until it is back. Its thread, and gRPC's, take no signals.
class DaemonPoller {
 public:
  DaemonPoller(const Context& context, absl::Duration interval);
  ~DaemonPoller();  // waits for a call that is under way, kTimeout at most
  DaemonPoller(const DaemonPoller&) = delete;
  DaemonPoller& operator=(const DaemonPoller&) = delete;

  // Readable when Take() has something.
  int fd() const { return ready_.get(); }
  // What was read since the last time; nullopt: nothing.
  std::optional<TopData> Take() ABSL_LOCKS_EXCLUDED(mu_);
  // Reads now, since something has changed, and not only after the interval.
  void Hurry() ABSL_LOCKS_EXCLUDED(mu_);

  static constexpr absl::Duration kTimeout = absl::Seconds(3);

 private:
  void Run() ABSL_LOCKS_EXCLUDED(mu_);
  absl::Status Read(TopData& data);
  bool WaitToRead(absl::Duration pause) ABSL_LOCKS_EXCLUDED(mu_);  // false: stop

  const Context context_;
  const absl::Duration interval_;
  const UniqueFd ready_;  // an eventfd
  Mutex mu_;
  CondVar changed_;
  bool stops_ ABSL_GUARDED_BY(mu_) = false;
  bool hurries_ ABSL_GUARDED_BY(mu_) = false;
  std::optional<TopData> unread_ ABSL_GUARDED_BY(mu_);
  std::optional<Daemon> daemon_;  // the thread's own
  std::thread thread_;
};

}  // namespace vrambroker::vramctl

#endif  // VRAMBROKER_CLIENT_VRAMCTL_TOP_DAEMON_POLLER_H_
