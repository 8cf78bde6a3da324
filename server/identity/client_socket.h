// SPDX-License-Identifier: Apache-2.0
//
// ClientSocket: the daemon's end of a connection that a client has made.
//
// Clients can send descriptors over it. Nobody here wants them. But dropping one closes it, and closing a socket can
// take as long as its SO_LINGER says: a client could stop a thread that all others need. Since Linux 6.16 the kernel
// refuses them (SO_PASSRIGHTS). Before it, a connection that brings one is read no further, and a thread closes it by
// exiting: then inet_release() in the kernel's net/ipv4/af_inet.c does not linger.
//
// What remains, before Linux 6.9 or a kernel that has its commit 8b90a9f819dc: a descriptor that was sent to nobody, in
// a circle of sockets, is closed by whichever thread closes a unix socket next, also here.
#ifndef VRAMBROKER_SERVER_IDENTITY_CLIENT_SOCKET_H_
#define VRAMBROKER_SERVER_IDENTITY_CLIENT_SOCKET_H_

#include <sys/types.h>

#include <cstddef>
#include <memory>

#include "allocator/base/unique_fd.h"

namespace vrambroker {

class ClientSocket {
 public:
  ClientSocket() = default;
  // A non-blocking unix socket. The last owner closes it, without waiting for what a client has sent.
  explicit ClientSocket(UniqueFd socket);

  bool valid() const { return fd_ != nullptr; }
  int get() const { return fd_->get(); }
  const std::shared_ptr<const UniqueFd>& fd() const { return fd_; }

  // As recv(). EPROTO: the client has sent a descriptor, or urgent data, which may carry one. Nothing was read then.
  ssize_t Receive(void* buffer, size_t bytes) const;
  // The client has not read something that it was sent.
  bool HasUnread() const;

 private:
  std::shared_ptr<const UniqueFd> fd_;
  bool may_bring_descriptors_ = false;
};

// Has the kernel refuse descriptors that are sent over what this listening socket accepts. Nothing before Linux 6.16.
void RefuseDescriptors(int socket);

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_IDENTITY_CLIENT_SOCKET_H_
