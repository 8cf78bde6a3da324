// SPDX-License-Identifier: Apache-2.0
#include "server/base/systemd.h"

#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>

#include <cstddef>
#include <cstdlib>
#include <cstring>

#include "allocator/base/mutex.h"
#include "allocator/base/unique_fd.h"

namespace vrambroker {
namespace {

// Uses a single socket for all messages. Before Linux 6.9, closing a unix socket may take as long as another user
// likes: see ClientSocket. -1 when the process is out of descriptors; the next message tries again.
int Socket() {
  static Mutex mu;
  static UniqueFd fd;
  MutexLock lock(mu);
  if (fd.valid()) return fd.get();
  fd = UniqueFd(socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  // A supervisor that does not read must not hold the daemon up for long.
  const timeval patience = {.tv_sec = 1, .tv_usec = 0};
  setsockopt(fd.get(), SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof patience);
  return fd.get();
}

}  // namespace

void NotifySystemd(const std::string& state) {
  const char* path = std::getenv("NOTIFY_SOCKET");
  if (path == nullptr) return;
  sockaddr_un address = {.sun_family = AF_UNIX};
  const size_t length = std::strlen(path);
  if (length == 0 || length >= sizeof address.sun_path) return;
  std::memcpy(address.sun_path, path, length);
  if (path[0] == '@') address.sun_path[0] = '\0';  // an abstract socket
  sendto(Socket(), state.data(), state.size(), MSG_NOSIGNAL, reinterpret_cast<const sockaddr*>(&address),
         static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + length));
}

}  // namespace vrambroker
