// SPDX-License-Identifier: Apache-2.0
#include "server/base/event_loop.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <utility>

namespace vrambroker {
namespace {
constexpr uint64_t kWakeSerial = 0;
}

EventLoop::EventLoop() : epoll_(epoll_create1(EPOLL_CLOEXEC)), wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  epoll_event event = {.events = EPOLLIN, .data = {.u64 = kWakeSerial}};
  epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, wake_.get(), &event);
}

absl::Status EventLoop::Watch(std::shared_ptr<const UniqueFd> fd, uint32_t events, std::function<void()> ready) {
  MutexLock lock(mu_);
  const uint64_t serial = next_serial_++;
  const int number = fd->get();
  epoll_event event = {.events = events, .data = {.u64 = serial}};
  if (epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, number, &event) != 0) {
    return absl::ErrnoToStatus(errno, "epoll_ctl(EPOLL_CTL_ADD) failed");
  }
  watched_[serial] =
      Watched{.fd = std::move(fd), .ready = std::make_shared<const std::function<void()>>(std::move(ready))};
  serial_of_[number] = serial;
  return absl::OkStatus();
}

void EventLoop::Change(int fd, uint32_t events) {
  MutexLock lock(mu_);
  const auto it = serial_of_.find(fd);
  if (it == serial_of_.end()) return;
  epoll_event event = {.events = events, .data = {.u64 = it->second}};
  epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, fd, &event);
}

void EventLoop::Unwatch(int fd) {
  Watched dropped;  // closed after the lock is released
  MutexLock lock(mu_);
  const auto it = serial_of_.find(fd);
  if (it == serial_of_.end()) return;
  epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, fd, nullptr);
  dropped = std::move(watched_.at(it->second));
  watched_.erase(it->second);
  serial_of_.erase(it);
}

void EventLoop::Run(std::chrono::milliseconds period, const std::function<void()>& tick) {
  auto next_tick = std::chrono::steady_clock::now() + period;
  while (!stop_) {
    const auto left =
        std::chrono::duration_cast<std::chrono::milliseconds>(next_tick - std::chrono::steady_clock::now());
    std::array<epoll_event, 64> events;
    const int count = epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()),
                                 static_cast<int>(std::max<int64_t>(left.count(), 0)));
    for (int i = 0; i < count && !stop_; ++i) {
      const uint64_t serial = events[i].data.u64;  // a copy: references into the packed epoll_event are not aligned
      std::shared_ptr<const std::function<void()>> ready;
      {
        MutexLock lock(mu_);
        const auto it = watched_.find(serial);
        if (it != watched_.end()) ready = it->second.ready;
      }
      if (ready != nullptr) (*ready)();
    }
    if (std::chrono::steady_clock::now() >= next_tick) {
      tick();
      next_tick = std::chrono::steady_clock::now() + period;
    }
  }
}

void EventLoop::Stop() {
  stop_ = true;
  const uint64_t one = 1;
  (void)!write(wake_.get(), &one, sizeof one);
}

}  // namespace vrambroker
