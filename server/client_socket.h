// SPDX-License-Identifier: Apache-2.0
//
// ClientSocket: the daemon's end of a connection that a client has made.
//
// Clients can send descriptors over it. Nobody here wants them, but whoever drops one closes it, and closing a socket
// takes as long as its SO_LINGER says: a client could stop a thread that all others need. Since Linux 6.16 the kernel
// refuses them (SO_PASSRIGHTS: see ListenUnix()). Before it, a connection over which one came is never read, and closed
// by a thread that ends: "we never linger" then, as inet_release() in the kernel's net/ipv4/af_inet.c has it.
#ifndef VRAMBROKER_SERVER_CLIENT_SOCKET_H_
#define VRAMBROKER_SERVER_CLIENT_SOCKET_H_

#include <sys/types.h>

#include <cstddef>
#include <memory>

#include "allocator/device.h"

namespace vrambroker {

class ClientSocket {
 public:
  ClientSocket() = default;
  // A non-blocking unix socket. Closed with its last owner, which does not wait for anything that a client has sent.
  explicit ClientSocket(UniqueFd socket);

  bool valid() const { return fd_ != nullptr; }
  int get() const { return fd_->get(); }
  const std::shared_ptr<const UniqueFd>& fd() const { return fd_; }

  // As recv(). EPROTO: the client has sent a descriptor, or urgent data, with which one may come. Nothing was read
  // then.
  ssize_t Receive(void* buffer, size_t bytes) const;

 private:
  std::shared_ptr<const UniqueFd> fd_;
  bool may_bring_descriptors_ = false;
};

// Makes the kernel refuse descriptors that are sent over `socket`, or over what a listening one accepts. False before
// Linux 6.16.
bool RefuseDescriptors(int socket);

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_CLIENT_SOCKET_H_
