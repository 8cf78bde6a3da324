// SPDX-License-Identifier: Apache-2.0
#include "tests/support/proxy.h"

#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <functional>
#include <iterator>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"

namespace vrambroker::testing_support {
namespace {

constexpr ssize_t kTicketBytes = 16;

sockaddr_un AddressOf(const std::string& path) {
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  std::strncpy(address.sun_path, path.c_str(), sizeof address.sun_path - 1);
  return address;
}

// Closes the descriptors that recvmsg() has put into `message`.
void CloseDescriptors(msghdr& message) {
  for (cmsghdr* header = CMSG_FIRSTHDR(&message); header != nullptr; header = CMSG_NXTHDR(&message, header)) {
    if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) continue;
    for (size_t at = 0; at + sizeof(int) <= header->cmsg_len - CMSG_LEN(0); at += sizeof(int)) {
      int fd = -1;
      std::memcpy(&fd, CMSG_DATA(header) + at, sizeof fd);
      close(fd);
    }
  }
}

// Passes data on until either end has gone. Data for which `passes` returns false is lost. Descriptors come along,
// unless `drops_descriptors` is set.
void Pass(int from, int to, const std::function<bool(ssize_t)>& passes, const std::atomic<bool>& drops_descriptors) {
  std::vector<char> bytes(1 << 16);
  alignas(cmsghdr) std::array<char, CMSG_SPACE(8 * sizeof(int))> control;
  while (true) {
    iovec data = {.iov_base = bytes.data(), .iov_len = bytes.size()};
    msghdr message = {};
    message.msg_iov = &data;
    message.msg_iovlen = 1;
    message.msg_control = control.data();
    message.msg_controllen = control.size();
    const ssize_t size = recvmsg(from, &message, MSG_CMSG_CLOEXEC);
    if (size <= 0) break;
    msghdr received = message;
    const bool is_passed = passes(size);
    if (drops_descriptors) message.msg_controllen = 0;
    for (ssize_t sent = 0; sent < size && is_passed;) {
      data = {.iov_base = bytes.data() + sent, .iov_len = static_cast<size_t>(size - sent)};
      const ssize_t more = sendmsg(to, &message, MSG_NOSIGNAL);
      if (more <= 0) break;
      sent += more;
      message.msg_control = nullptr;
      message.msg_controllen = 0;
    }
    CloseDescriptors(received);
  }
  shutdown(to, SHUT_RDWR);
}

}  // namespace

absl::StatusOr<std::unique_ptr<Proxy>> Proxy::Start(const std::string& dir, const std::string& daemon_dir) {
  std::unique_ptr<Proxy> proxy(new Proxy(daemon_dir));
  for (Listener& listener : proxy->listeners_) {
    listener.fd = UniqueFd(socket(AF_UNIX, listener.type | SOCK_CLOEXEC, 0));
    const sockaddr_un address = AddressOf(dir + listener.name);
    if (!listener.fd.valid() ||
        bind(listener.fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0 ||
        listen(listener.fd.get(), 16) != 0) {
      return absl::ErrnoToStatus(errno, absl::StrCat("no socket in ", dir));
    }
    listener.acceptor = std::thread([raw = proxy.get(), &listener] { raw->Accept(listener); });
  }
  return proxy;
}

Proxy::~Proxy() {
  for (Listener& listener : listeners_) {
    if (listener.fd.valid()) shutdown(listener.fd.get(), SHUT_RDWR);
    if (listener.acceptor.joinable()) listener.acceptor.join();
  }
  Break();
}

void Proxy::Break(Which which) {
  std::vector<Connection> broken;
  {
    MutexLock lock(mu_);
    const auto kept = std::partition(connections_.begin(), connections_.end(), [&](const Connection& connection) {
      return which != Which::kBoth && connection.which != which;
    });
    std::move(kept, connections_.end(), std::back_inserter(broken));
    connections_.erase(kept, connections_.end());
  }
  for (Connection& connection : broken) {
    {
      MutexLock lock(mu_);
      *connection.fate = Fate::kBroken;
      released_.NotifyAll();
    }
    shutdown(connection.daemon.get(), SHUT_RDWR);
    // Without a proxy, data sent on the descriptor socket has arrived, and the sender relies on the arrival. Pass()
    // ends the client's side after passing on the daemon's data.
    if (connection.which != Which::kDescriptors) shutdown(connection.client.get(), SHUT_RDWR);
  }
  for (Connection& connection : broken) {
    connection.up.join();
    connection.down.join();
  }
}

void Proxy::Set(Fate fate, Which which) {
  MutexLock lock(mu_);
  for (Connection& connection : connections_) {
    if (which == Which::kBoth || connection.which == which) *connection.fate = fate;
  }
}

void Proxy::SetHeld(bool held, Which which) {
  MutexLock lock(mu_);
  if (which != Which::kDescriptors) grpc_held_ = held;
  if (which != Which::kGrpc) descriptors_held_ = held;
  released_.NotifyAll();
}

void Proxy::AwaitRelease(Which which, const std::atomic<Fate>& fate) {
  MutexLock lock(mu_);
  const bool& held = which == Which::kGrpc ? grpc_held_ : descriptors_held_;
  if (held) ++held_;
  while (held && fate != Fate::kBroken) released_.Wait(mu_);
}

void Proxy::Accept(const Listener& listener) {
  while (true) {
    Connection connection{.which = listener.which,
                          .client = UniqueFd(accept4(listener.fd.get(), nullptr, nullptr, SOCK_CLOEXEC)),
                          .daemon = UniqueFd(socket(AF_UNIX, listener.type | SOCK_CLOEXEC, 0)),
                          .fate = std::make_unique<std::atomic<Fate>>(Fate::kPassedOn),
                          .up = {},
                          .down = {}};
    if (!connection.client.valid()) return;
    const sockaddr_un address = AddressOf(daemon_dir_ + listener.name);
    if (connect(connection.daemon.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0) continue;
    const auto up = [this, which = listener.which, fate = connection.fate.get()](ssize_t size) {
      if (which == Which::kDescriptors && size > kTicketBytes) ++segment_calls_;
      if (*fate == Fate::kUnread) ++stalled_;
      while (*fate == Fate::kUnread) absl::SleepFor(absl::Milliseconds(5));
      return *fate == Fate::kPassedOn;
    };
    const auto down = [this, which = listener.which, fate = connection.fate.get()](ssize_t /*size*/) {
      AwaitRelease(which, *fate);
      return true;
    };
    MutexLock lock(mu_);  // Break() and the other functions know the connection from now on
    connection.up =
        std::thread(&Pass, connection.client.get(), connection.daemon.get(), up, std::cref(drops_descriptors_));
    connection.down =
        std::thread(&Pass, connection.daemon.get(), connection.client.get(), down, std::cref(drops_descriptors_));
    connections_.push_back(std::move(connection));
  }
}

}  // namespace vrambroker::testing_support
