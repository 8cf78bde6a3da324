// SPDX-License-Identifier: Apache-2.0
#include "server/client_socket.h"

#include <linux/close_range.h>
#include <poll.h>
#include <sched.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <latch>
#include <system_error>
#include <thread>
#include <utility>

#include "allocator/mutex.h"

#ifndef SO_PASSRIGHTS
#define SO_PASSRIGHTS 83
#endif

namespace vrambroker {
namespace {

bool MayBringDescriptors(int socket) {
  int passed = 1;
  socklen_t size = sizeof passed;
  return getsockopt(socket, SOL_SOCKET, SO_PASSRIGHTS, &passed, &size) != 0 || passed != 0;
}

// recv() that never meets a descriptor.
ssize_t ReceiveBytesOnly(int socket, void* buffer, size_t bytes) {
  iovec data = {.iov_base = buffer, .iov_len = bytes};
  msghdr message = {};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  const ssize_t count = recvmsg(socket, &message, MSG_PEEK | MSG_DONTWAIT);
  if (count < 0 && errno != EAGAIN) return count;
  // A descriptor for which there is no room stays in its message.
  const bool has_descriptor = count >= 0 && (message.msg_flags & MSG_CTRUNC) != 0;
  pollfd urgent = {.fd = socket, .events = POLLPRI, .revents = 0};
  if (has_descriptor || (poll(&urgent, 1, 0) > 0 && (urgent.revents & POLLPRI) != 0)) {
    errno = EPROTO;
    return -1;
  }
  if (count < 0) {
    errno = EAGAIN;
    return -1;
  }
  // Not more than was looked at: what comes behind it may be different.
  return recv(socket, buffer, count, MSG_DONTWAIT);
}

// Nothing can be left in the socket that takes long to close.
bool IsEmpty(int socket) {
  int type = 0;
  socklen_t size = sizeof type;
  // Of packets, an empty one looks like the end.
  if (getsockopt(socket, SOL_SOCKET, SO_TYPE, &type, &size) != 0 || type != SOCK_STREAM) return false;
  shutdown(socket, SHUT_RDWR);  // nothing more comes
  std::array<char, 4096> dropped;
  ssize_t count = 1;
  while (count > 0) count = ReceiveBytesOnly(socket, dropped.data(), dropped.size());
  return count == 0;
}

// Closes the descriptor with the end of a thread that has a table of descriptors of its own. One at a time: no other
// thread's table is to have the descriptor as well.
void CloseWithAThread(UniqueFd fd) {
  static Mutex mu;
  MutexLock lock(mu);
  std::latch copied(1);
  std::latch closed(1);
  const auto own_it_alone = [&copied, &closed, number = static_cast<unsigned>(fd.get())] {
    // The other descriptors of the copy would keep connections open.
    if (syscall(SYS_close_range, number + 1, ~0U, CLOSE_RANGE_UNSHARE) == 0) {
      if (number > 0) syscall(SYS_close_range, 0, number - 1, 0);
    } else {
      unshare(CLONE_FILES);  // before Linux 5.9
    }
    copied.count_down();
    closed.wait();
  };
  std::thread thread;
  try {
    thread = std::thread(own_it_alone);
  } catch (const std::system_error&) {
    return;  // no more threads: then it is closed here, however long that takes
  }
  copied.wait();
  fd.Reset();
  closed.count_down();
  thread.join();
}

void Close(UniqueFd socket) {
  if (!IsEmpty(socket.get())) CloseWithAThread(std::move(socket));
}

}  // namespace

ClientSocket::ClientSocket(UniqueFd socket) : may_bring_descriptors_(MayBringDescriptors(socket.get())) {
  if (may_bring_descriptors_) {
    fd_ = std::shared_ptr<const UniqueFd>(new UniqueFd(std::move(socket)), [](UniqueFd* fd) {
      Close(std::move(*fd));
      delete fd;
    });
  } else {
    fd_ = std::make_shared<const UniqueFd>(std::move(socket));
  }
}

ssize_t ClientSocket::Receive(void* buffer, size_t bytes) const {
  return may_bring_descriptors_ ? ReceiveBytesOnly(get(), buffer, bytes) : recv(get(), buffer, bytes, MSG_DONTWAIT);
}

bool RefuseDescriptors(int socket) {
  const int none = 0;
  return setsockopt(socket, SOL_SOCKET, SO_PASSRIGHTS, &none, sizeof none) == 0;
}

}  // namespace vrambroker
