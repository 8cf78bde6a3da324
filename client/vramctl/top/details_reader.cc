// SPDX-License-Identifier: Apache-2.0
#include "client/vramctl/top/details_reader.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <utility>

#include "client/vramctl/top/daemon_poller.h"

namespace vrambroker::vramctl {
namespace {

constexpr size_t kMostRefusals = 5;
// The daemon lists refusals by session: search the last 200 for the refusals of a claim.
constexpr uint32_t kSearchedRefusals = 200;

}  // namespace

DetailsReader::DetailsReader(const Context& context, absl::Duration interval)
    : context_(context), interval_(interval), ready_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  // The thread inherits the caller's blocked signals.
  thread_ = std::thread([this] { Run(); });
}

DetailsReader::~DetailsReader() {
  {
    MutexLock lock(mu_);
    stops_ = true;
    changed_.NotifyAll();
  }
  canceller_.Cancel();
  thread_.join();
}

void DetailsReader::Want(const std::optional<DetailsRequest>& request) {
  MutexLock lock(mu_);
  if (request == wanted_) return;
  wanted_ = request;
  is_new_ = request.has_value();
  changed_.NotifyAll();
}

std::optional<DetailsData> DetailsReader::Take() {
  uint64_t count = 0;
  (void)!read(ready_.get(), &count, sizeof count);
  MutexLock lock(mu_);
  return std::exchange(unread_, std::nullopt);
}

std::optional<DetailsRequest> DetailsReader::Next() {
  const auto until = std::chrono::steady_clock::now() + absl::ToChronoNanoseconds(interval_);
  MutexLock lock(mu_);
  while (!stops_ && !is_new_) {
    if (!wanted_.has_value()) {
      changed_.Wait(mu_);
    } else if (!changed_.WaitUntil(mu_, until)) {
      break;
    }
  }
  is_new_ = false;
  return stops_ ? std::nullopt : wanted_;
}

void DetailsReader::Run() {
  for (std::optional<DetailsRequest> request; (request = Next()).has_value();) {
    DetailsData data = Read(*request);
    {
      MutexLock lock(mu_);
      unread_ = std::move(data);
    }
    const uint64_t one = 1;
    (void)!write(ready_.get(), &one, sizeof one);
  }
}

DetailsData DetailsReader::Read(const DetailsRequest& request) {
  DetailsData data = {.request = request, .maps = {}, .refusals = std::vector<v1::OutOfMemoryEvent>()};
  // Open a new connection, since the daemon may have restarted.
  absl::StatusOr<Daemon> daemon = Daemon::Connect(context_, DaemonPoller::kTimeout);
  if (daemon.ok()) daemon->canceller = &canceller_;
  for (const uint32_t device : request.devices) {
    data.maps.push_back({.device = device,
                         .heap = daemon.ok() ? ReadSegments(*daemon, request.session, device)
                                             : absl::StatusOr<HeapSnapshot>(daemon.status())});
  }
  data.refusals = daemon.ok() ? ReadRefusals(*daemon, data.request) : daemon.status();
  return data;
}

absl::StatusOr<std::vector<v1::OutOfMemoryEvent>> DetailsReader::ReadRefusals(Daemon& daemon, DetailsRequest& asked) {
  v1::ListOutOfMemoryRequest request;
  const bool is_claim = asked.session == 0;
  if (!is_claim) request.mutable_session()->set_id(asked.session);
  request.set_max_events(is_claim ? kSearchedRefusals : static_cast<uint32_t>(kMostRefusals));
  v1::ListOutOfMemoryResponse response;
  absl::Status status = Call(daemon, &v1::Admin::Stub::ListOutOfMemory, request, &response);
  if (!status.ok()) return status;
  asked.run_id = response.run_id();
  std::vector<v1::OutOfMemoryEvent> refusals;
  for (v1::OutOfMemoryEvent& event : *response.mutable_events()) {
    if (is_claim && event.out_of_memory().claim() != asked.claim) continue;
    if (refusals.size() == kMostRefusals) break;
    refusals.push_back(std::move(event));
  }
  return refusals;
}

}  // namespace vrambroker::vramctl
