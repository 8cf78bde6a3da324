// SPDX-License-Identifier: Apache-2.0
#include "server/identity/client_socket.h"

#include <linux/close_range.h>
#include <linux/sockios.h>
#include <poll.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <exception>
#include <latch>
#include <thread>
#include <utility>

#include "allocator/base/mutex.h"

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

// Reads the next data without removing it from the queue. Sets MSG_CTRUNC in `flags` if ancillary data comes along,
// because the call has no room for ancillary data.
ssize_t Peek(int socket, void* buffer, size_t bytes, int* flags) {
  iovec data = {.iov_base = buffer, .iov_len = bytes};
  msghdr message = {};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  const ssize_t count = recvmsg(socket, &message, MSG_PEEK | MSG_DONTWAIT);
  *flags = count < 0 ? 0 : message.msg_flags;
  return count;
}

// Like recv(), but takes no descriptor out of the queue.
ssize_t ReceiveBytesOnly(int socket, void* buffer, size_t bytes) {
  int flags = 0;
  const ssize_t count = Peek(socket, buffer, bytes, &flags);
  if (count < 0 && errno != EAGAIN) return count;
  pollfd urgent = {.fd = socket, .events = POLLPRI, .revents = 0};
  if ((flags & MSG_CTRUNC) != 0 || (poll(&urgent, 1, 0) > 0 && (urgent.revents & POLLPRI) != 0)) {
    errno = EPROTO;
    return -1;
  }
  if (count < 0) {
    errno = EAGAIN;
    return -1;
  }
  // Reads no more than was peeked at: later data may carry descriptors.
  return recv(socket, buffer, count, MSG_DONTWAIT);
}

// Stops the input, and drops the bytes received. True: nothing is left that may take long to close.
bool DropBytes(int socket) {
  shutdown(socket, SHUT_RDWR);
  int type = 0;
  socklen_t size = sizeof type;
  if (getsockopt(socket, SOL_SOCKET, SO_TYPE, &type, &size) != 0) return false;
  std::array<char, 4096> dropped;
  if (type != SOCK_STREAM) {
    // An empty packet looks like the end, except for the sender's credentials, which come with every packet.
    const int on = 1;
    setsockopt(socket, SOL_SOCKET, SO_PASSCRED, &on, sizeof on);
    int flags = 0;
    return Peek(socket, dropped.data(), dropped.size(), &flags) == 0 && (flags & MSG_CTRUNC) == 0;
  }
  ssize_t count = 1;
  // The first call may report ECONNRESET, for bytes not read by the peer.
  while (count > 0 || (count < 0 && errno == ECONNRESET)) {
    count = ReceiveBytesOnly(socket, dropped.data(), dropped.size());
  }
  return count == 0;
}

// Hands the descriptor to a thread with a separate descriptor table; the thread's exit closes the descriptor.
// Serialized: a second such thread must not get a copy, and close the copy before exiting.
void CloseByAThread(UniqueFd fd) {
  static Mutex mu;
  MutexLock lock(mu);
  std::latch copied(1);
  std::latch closed(1);
  const auto take = [&copied, &closed, number = static_cast<unsigned>(fd.get())] {
    // Copies of further descriptors would keep their connections open.
    if (syscall(SYS_close_range, number + 1, ~0U, CLOSE_RANGE_UNSHARE) == 0) {
      if (number > 0) syscall(SYS_close_range, 0, number - 1, 0);
    } else {
      unshare(CLONE_FILES);  // before Linux 5.9; where forbidden, fd.Reset() below closes the descriptor
    }
    copied.count_down();
    closed.wait();
  };
  std::thread thread;
  try {
    thread = std::thread(take);
  } catch (const std::exception&) {
    return;  // no more threads: closes here, however long closing takes
  }
  copied.wait();
  fd.Reset();
  closed.count_down();
  thread.join();  // returns before the kernel closes the thread's descriptors
}

void Close(UniqueFd socket) {
  if (!DropBytes(socket.get())) CloseByAThread(std::move(socket));
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

bool ClientSocket::HasUnread() const {
  int bytes = 0;
  return ioctl(get(), SIOCOUTQ, &bytes) == 0 && bytes > 0;
}

void RefuseDescriptors(int socket) {
  const int none = 0;
  (void)setsockopt(socket, SOL_SOCKET, SO_PASSRIGHTS, &none, sizeof none);
}

}  // namespace vrambroker
