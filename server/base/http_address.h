// SPDX-License-Identifier: Apache-2.0
//
// Address of the HTTP port, and the peers of its connections.
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

// Reads "127.0.0.1:9477", "[::1]:9477" or "localhost:9477"; looks no name up. InvalidArgument names the fault and the
// correct form.
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

// Looks the host's name up, which may take long. Among several addresses, chooses the first IPv4 address: every program
// tries IPv4.
absl::StatusOr<SocketAddress> Resolve(const HttpAddress& where);

// The address of a socket.
SocketAddress AddressOf(const UniqueFd& socket);

// A non-blocking listening socket. AlreadyExists: another program listens there. Errors name the address.
absl::StatusOr<UniqueFd> ListenHttp(const SocketAddress& address);

// The peer of a connection: "uid 1000" on this machine, else "192.0.2.1" or "2001:db8::/64". Bounds per peer use the
// peer's text. A local user has as many loopback addresses as he likes: all local connections without a user known to
// the kernel, such as connections closed at the user's end, are one peer, "this machine". Asks the kernel each time.
// Takes microseconds.
std::string HttpPeer(int connection);

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_BASE_HTTP_ADDRESS_H_
