// SPDX-License-Identifier: Apache-2.0
//
// Where the HTTP port listens, and who is at the other end of its connections.
#ifndef VRAMBROKER_SERVER_BASE_HTTP_ADDRESS_H_
#define VRAMBROKER_SERVER_BASE_HTTP_ADDRESS_H_

#include <netinet/in.h>
#include <sys/socket.h>

#include <string>

#include "absl/status/statusor.h"
#include "allocator/base/unique_fd.h"

namespace vrambroker {

struct HttpAddress {
  std::string host;  // without brackets
  int port = 0;
};

// Reads "127.0.0.1:9477", "[::1]:9477" or "localhost:9477"; looks no name up. InvalidArgument says what is wrong and
// how to write it.
absl::StatusOr<HttpAddress> ParseHttpAddress(const std::string& text);

struct SocketAddress {
  sockaddr_storage storage = {};
  socklen_t size = 0;

  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage); }
  sockaddr* get() { return reinterpret_cast<sockaddr*>(&storage); }
  bool is_ipv6() const { return storage.ss_family == AF_INET6; }
  int port() const;
  std::string host() const;  // "127.0.0.1" or "[::1]"
  std::string text() const;  // "127.0.0.1:9477"
};

// Looks the host's name up, which may take long. Of several addresses the first of IPv4, which every program tries.
absl::StatusOr<SocketAddress> Resolve(const HttpAddress& where);

// The address that a socket has.
SocketAddress AddressOf(const UniqueFd& socket);

// A non-blocking listening socket. AlreadyExists: another program listens there. Errors name the address.
absl::StatusOr<UniqueFd> ListenHttp(const SocketAddress& address);

// Who is at the other end of a connection: "uid 1000" on this machine, else "192.0.2.1" or "2001:db8::/64". Bounds for
// each peer go by it. A local user has as many loopback addresses as he likes: all of this machine that the kernel
// names no user for, as one who has closed his end already, are one peer, "this machine". The kernel is asked each
// time. Takes microseconds.
std::string HttpPeer(int connection);

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_BASE_HTTP_ADDRESS_H_
