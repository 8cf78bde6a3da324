// SPDX-License-Identifier: Apache-2.0
//
// ClientSocket: the daemon's end of a connection made by a client.
//
// Clients can send descriptors over the socket. The daemon needs none. Dropping a descriptor closes it, and closing a
// socket can take as long as its SO_LINGER says: a client could block a thread shared by all clients. Since Linux 6.16
// the kernel refuses descriptors (SO_PASSRIGHTS). On older kernels, the daemon stops reading a connection that brings a
// descriptor, and a thread closes the connection by exiting: inet_release() in the kernel's net/ipv4/af_inet.c does not
// linger for an exiting thread.
//
// A gap remains before Linux 6.9, or a kernel with its commit 8b90a9f819dc: a descriptor sent to no receiver, in a
// circle of sockets, is closed by the next thread to close a unix socket, possibly here.
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
  // Takes a non-blocking unix socket. The last owner closes the socket, without waiting for data sent by a client.
  explicit ClientSocket(UniqueFd socket);

  bool valid() const { return fd_ != nullptr; }
  int get() const { return fd_->get(); }
  const std::shared_ptr<const UniqueFd>& fd() const { return fd_; }

  // Like recv(). EPROTO: the client has sent a descriptor, or urgent data, which may carry a descriptor; nothing was
  // read.
  ssize_t Receive(void* buffer, size_t bytes) const;
  // Whether the client has unread data.
  bool HasUnread() const;

 private:
  std::shared_ptr<const UniqueFd> fd_;
  bool may_bring_descriptors_ = false;
};

// Makes the kernel refuse descriptors on connections accepted by the listening socket. No effect before Linux 6.16.
void RefuseDescriptors(int socket);

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_IDENTITY_CLIENT_SOCKET_H_
