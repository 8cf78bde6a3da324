// SPDX-License-Identifier: Apache-2.0
#include "client/vramctl/top/daemon_poller.h"

#include <pthread.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <utility>

#include "absl/time/clock.h"

namespace vrambroker::vramctl {
namespace {

// Interval between attempts to reconnect to a stopped daemon.
constexpr absl::Duration kRetry = absl::Seconds(1);

}  // namespace

DaemonPoller::DaemonPoller(const Context& context, absl::Duration interval)
    : context_(context), interval_(interval), ready_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  // Block all signals in the threads, since the caller handles signals.
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  thread_ = std::thread([this] { Run(); });
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

DaemonPoller::~DaemonPoller() {
  {
    MutexLock lock(mu_);
    stops_ = true;
    changed_.NotifyAll();
  }
  thread_.join();
}

std::optional<TopData> DaemonPoller::Take() {
  uint64_t count = 0;
  (void)!read(ready_.get(), &count, sizeof count);
  MutexLock lock(mu_);
  return std::exchange(unread_, std::nullopt);
}

void DaemonPoller::Hurry() {
  MutexLock lock(mu_);
  hurries_ = true;
  changed_.NotifyAll();
}

absl::Status DaemonPoller::Read(TopData& data) {
  if (!daemon_.has_value()) {
    absl::StatusOr<Daemon> daemon = Daemon::Connect(context_, kTimeout);
    if (!daemon.ok()) return daemon.status();
    daemon_ = *std::move(daemon);
  }
  Daemon& daemon = *daemon_;
  absl::StatusOr<Overview> overview = ReadOverview(daemon);
  if (!overview.ok()) return overview.status();
  if (!WaitToRead(absl::ZeroDuration())) return absl::CancelledError("nobody waits for it any more");
  absl::StatusOr<v1::ListClaimsResponse> claims = ReadClaims(daemon, "");
  if (absl::IsUnimplemented(claims.status())) claims = v1::ListClaimsResponse();  // the daemon is too old
  if (!claims.ok()) return claims.status();
  v1::ListOutOfMemoryRequest request;
  request.set_max_events(1);
  v1::ListOutOfMemoryResponse refusals;
  absl::Status status = Call(daemon, &v1::Admin::Stub::ListOutOfMemory, request, &refusals);
  if (!status.ok()) return status;
  data.overview = *std::move(overview);
  data.claims = *std::move(claims);
  data.refusals = std::move(refusals);
  data.read_at = absl::Now();
  return status;
}

bool DaemonPoller::WaitToRead(absl::Duration pause) {
  const auto until = std::chrono::steady_clock::now() + absl::ToChronoNanoseconds(pause);
  MutexLock lock(mu_);
  while (!stops_ && !hurries_ && changed_.WaitUntil(mu_, until)) {
  }
  return !stops_;
}

void DaemonPoller::Run() {
  TopData data;
  do {
    {
      MutexLock lock(mu_);
      hurries_ = false;
    }
    const bool was_ok = data.status.ok();
    data.status = Read(data);
    if (!data.status.ok()) {
      daemon_.reset();  // a closed connection never recovers
      if (was_ok) data.failing_since = absl::Now();
    }
    {
      MutexLock lock(mu_);
      unread_ = data;
    }
    const uint64_t one = 1;
    (void)!write(ready_.get(), &one, sizeof one);
  } while (WaitToRead(data.status.ok() ? interval_ : std::min(interval_, kRetry)));
  daemon_.reset();
}

}  // namespace vrambroker::vramctl
