// SPDX-License-Identifier: Apache-2.0
#include "server/core/idle_releases.h"

#include <utility>

#include "server/requests/check_device.h"

namespace vrambroker {

// A call for one device or for several. Thread-safe.
class IdleReleases::Call {
 public:
  Call(size_t devices, Done done) : done_(std::move(done)), left_(devices) {}

  void Add(const absl::StatusOr<SegmentPool::Released>& of_device) {
    {
      MutexLock lock(mu_);
      if (!of_device.ok()) {
        result_ = of_device.status();
      } else if (result_.ok()) {
        result_->bytes += of_device->bytes;
        result_->refused_bytes += of_device->refused_bytes;
      }
      if (--left_ > 0) return;
    }
    done_(result_);  // no other thread holds the call any more
  }

 private:
  const Done done_;
  Mutex mu_;
  size_t left_ ABSL_GUARDED_BY(mu_);  // devices
  absl::StatusOr<SegmentPool::Released> result_ = SegmentPool::Released();
};

IdleReleases::IdleReleases(std::vector<SegmentPool*> pools, Executor* workers)
    : pools_(std::move(pools)), workers_(*workers), devices_(pools_.size()) {}

void IdleReleases::Release(std::optional<uint64_t> device, Done done) {
  if (device.has_value()) {
    if (absl::Status status = CheckDevice(*device, pools_.size()); !status.ok()) return done(status);
  }
  const auto call = std::make_shared<Call>(device.has_value() ? 1 : pools_.size(), std::move(done));
  for (size_t i = 0; i < pools_.size(); ++i) {
    if (device.has_value() && *device != i) continue;
    {
      MutexLock lock(mu_);
      devices_[i].waiting.push_back(call);
      if (std::exchange(devices_[i].is_busy, true)) continue;
    }
    workers_.Submit([this, i] { Run(i); });
  }
}

void IdleReleases::Run(size_t device) {
  while (true) {
    std::vector<std::shared_ptr<Call>> calls;
    {
      MutexLock lock(mu_);
      calls.swap(devices_[device].waiting);
      devices_[device].is_busy = !calls.empty();
    }
    if (calls.empty()) return;
    const absl::StatusOr<SegmentPool::Released> released = pools_[device]->ReleaseIdle();
    for (const std::shared_ptr<Call>& call : calls) call->Add(released);
  }
}

}  // namespace vrambroker
