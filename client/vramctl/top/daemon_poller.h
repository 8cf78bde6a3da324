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

// Polls the daemon's figures on a separate thread, so that keys work while the daemon does not answer. Reconnects to a
// stopped daemon when it is back. The poller's thread, and gRPC's threads, receive no signals.
class DaemonPoller {
 public:
  DaemonPoller(const Context& context, absl::Duration interval);
  ~DaemonPoller();  // waits for a call in progress, kTimeout at most
  DaemonPoller(const DaemonPoller&) = delete;
  DaemonPoller& operator=(const DaemonPoller&) = delete;

  // Readable when Take() has data.
  int fd() const { return ready_.get(); }
  // Returns the data read since the last call; nullopt: no new data.
  std::optional<TopData> Take() ABSL_LOCKS_EXCLUDED(mu_);
  // Reads now, after a change, instead of after the interval.
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
  std::optional<Daemon> daemon_;  // used by the thread only
  std::thread thread_;
};

}  // namespace vrambroker::vramctl

#endif  // VRAMBROKER_CLIENT_VRAMCTL_TOP_DAEMON_POLLER_H_
