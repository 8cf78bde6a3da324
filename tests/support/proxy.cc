// SPDX-License-Identifier: Apache-2.0
#include "tests/support/proxy.h"

#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <functional>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"

namespace vrambroker::testing_support {
namespace {

sockaddr_un AddressIn(const std::string& dir) {
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  std::strncpy(address.sun_path, (dir + "/vrambroker.sock").c_str(), sizeof address.sun_path - 1);
  return address;
}

// Until either end is gone. What `passes` is false for is lost.
void Pass(int from, int to, const std::function<bool()>& passes) {
  std::vector<char> bytes(1 << 16);
  ssize_t size = 0;
  while ((size = read(from, bytes.data(), bytes.size())) > 0) {
    for (ssize_t sent = 0; sent < size && passes();) {
      const ssize_t more = send(to, bytes.data() + sent, static_cast<size_t>(size - sent), MSG_NOSIGNAL);
      if (more <= 0) break;
      sent += more;
    }
  }
  shutdown(to, SHUT_RDWR);
}

}  // namespace

absl::StatusOr<std::unique_ptr<Proxy>> Proxy::Start(const std::string& dir, const std::string& daemon_dir) {
  std::error_code error;
  std::filesystem::create_symlink(daemon_dir + "/vrambroker-fd.sock", dir + "/vrambroker-fd.sock", error);
  if (error) return absl::InternalError(absl::StrCat("create_symlink in ", dir, " failed: ", error.message()));
  UniqueFd listener(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const sockaddr_un address = AddressIn(dir);
  if (!listener.valid() || bind(listener.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0 ||
      listen(listener.get(), 16) != 0) {
    return absl::ErrnoToStatus(errno, absl::StrCat("no socket in ", dir));
  }
  std::unique_ptr<Proxy> proxy(new Proxy(daemon_dir, std::move(listener)));
  proxy->acceptor_ = std::thread([raw = proxy.get()] { raw->Accept(); });
  return proxy;
}

Proxy::~Proxy() {
  shutdown(listener_.get(), SHUT_RDWR);
  acceptor_.join();
  Break();
}

void Proxy::Break() {
  Release();
  std::vector<Connection> broken;
  {
    MutexLock lock(mu_);
    broken.swap(connections_);
  }
  for (Connection& connection : broken) {
    *connection.fate = Fate::kLost;
    shutdown(connection.client.get(), SHUT_RDWR);
    shutdown(connection.daemon.get(), SHUT_RDWR);
    connection.up.join();
    connection.down.join();
  }
}

void Proxy::Set(Fate fate) {
  MutexLock lock(mu_);
  for (Connection& connection : connections_) *connection.fate = fate;
}

void Proxy::Hold() {
  MutexLock lock(mu_);
  holds_ = true;
}

void Proxy::Release() {
  MutexLock lock(mu_);
  holds_ = false;
  released_.NotifyAll();
}

void Proxy::AwaitRelease() {
  MutexLock lock(mu_);
  while (holds_) released_.Wait(mu_);
}

void Proxy::Accept() {
  while (true) {
    Connection connection{.client = UniqueFd(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC)),
                          .daemon = UniqueFd(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0)),
                          .fate = std::make_unique<std::atomic<Fate>>(Fate::kPassedOn),
                          .up = {},
                          .down = {}};
    if (!connection.client.valid()) return;
    const sockaddr_un address = AddressIn(daemon_dir_);
    if (connect(connection.daemon.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0) continue;
    connection.up =
        std::thread(&Pass, connection.client.get(), connection.daemon.get(), [fate = connection.fate.get()] {
          while (*fate == Fate::kUnread) absl::SleepFor(absl::Milliseconds(5));
          return *fate == Fate::kPassedOn;
        });
    connection.down = std::thread(&Pass, connection.daemon.get(), connection.client.get(), [this] {
      AwaitRelease();
      return true;
    });
    MutexLock lock(mu_);
    connections_.push_back(std::move(connection));
  }
}

}  // namespace vrambroker::testing_support
