// SPDX-License-Identifier: Apache-2.0
#include "server/base/http_address.h"

#include <arpa/inet.h>
#include <linux/inet_diag.h>
#include <linux/netlink.h>
#include <linux/sock_diag.h>
#include <netdb.h>
#include <netinet/tcp.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <optional>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

namespace vrambroker {
namespace {

constexpr int kBacklog = 4096;  // the kernel's default maximum: other clients connect while somebody floods the port

const sockaddr_in& Ipv4(const SocketAddress& address) {
  return reinterpret_cast<const sockaddr_in&>(address.storage);
}
const sockaddr_in6& Ipv6(const SocketAddress& address) {
  return reinterpret_cast<const sockaddr_in6&>(address.storage);
}

// Converts ::ffff:192.0.2.1 to 192.0.2.1, so the other end of a connection to [::] recognizes its own address.
SocketAddress Unmapped(const SocketAddress& address) {
  if (!address.is_ipv6() || !IN6_IS_ADDR_V4MAPPED(&Ipv6(address).sin6_addr)) return address;
  sockaddr_in ipv4 = {};
  ipv4.sin_family = AF_INET;
  ipv4.sin_port = Ipv6(address).sin6_port;
  std::memcpy(&ipv4.sin_addr, Ipv6(address).sin6_addr.s6_addr + 12, sizeof ipv4.sin_addr);
  SocketAddress plain{.size = sizeof ipv4};
  std::memcpy(plain.get(), &ipv4, sizeof ipv4);
  return plain;
}

// Writes address and port in the form of the kernel's socket diagnosis.
void PutAddress(const SocketAddress& address, __be32 (&host)[4], __be16& port) {
  if (address.is_ipv6()) {
    std::memcpy(host, &Ipv6(address).sin6_addr, sizeof host);
    port = Ipv6(address).sin6_port;
  } else {
    std::memcpy(host, &Ipv4(address).sin_addr, sizeof(in_addr));
    port = Ipv4(address).sin_port;
  }
}

constexpr char kThisMachine[] = "this machine";

bool IsLoopback(const SocketAddress& address) {
  if (address.is_ipv6()) return IN6_IS_ADDR_LOOPBACK(&Ipv6(address).sin6_addr);
  return (ntohl(Ipv4(address).sin_addr.s_addr) >> IN_CLASSA_NSHIFT) == IN_LOOPBACKNET;
}

// The local peer connecting `from` to `to`. nullopt: no such peer, or the kernel does not tell.
std::optional<std::string> LocalPeer(const SocketAddress& from, const SocketAddress& to) {
  const UniqueFd netlink(socket(AF_NETLINK, SOCK_DGRAM | SOCK_CLOEXEC, NETLINK_SOCK_DIAG));
  struct {
    nlmsghdr header;
    inet_diag_req_v2 request;
  } question = {};
  question.header = {.nlmsg_len = sizeof question, .nlmsg_type = SOCK_DIAG_BY_FAMILY, .nlmsg_flags = NLM_F_REQUEST};
  question.request.sdiag_family = from.is_ipv6() ? AF_INET6 : AF_INET;
  question.request.sdiag_protocol = IPPROTO_TCP;
  question.request.idiag_states = ~0U;
  PutAddress(from, question.request.id.idiag_src, question.request.id.idiag_sport);
  PutAddress(to, question.request.id.idiag_dst, question.request.id.idiag_dport);
  question.request.id.idiag_cookie[0] = INET_DIAG_NOCOOKIE;
  question.request.id.idiag_cookie[1] = INET_DIAG_NOCOOKIE;
  struct {
    nlmsghdr header;
    inet_diag_msg socket;
    std::array<char, 4096> more;
  } answer = {};
  // The kernel answers during send().
  if (send(netlink.get(), &question, sizeof question, 0) != sizeof question) return std::nullopt;
  const ssize_t size = recv(netlink.get(), &answer, sizeof answer, MSG_DONTWAIT);
  if (size < static_cast<ssize_t>(sizeof answer.header + sizeof answer.socket) ||
      answer.header.nlmsg_type != SOCK_DIAG_BY_FAMILY) {
    return std::nullopt;
  }
  // Without a socket connecting the two addresses, the kernel names a listening socket.
  if (answer.socket.idiag_state == TCP_LISTEN) return std::nullopt;
  // A socket closed by all processes has no owner.
  if (answer.socket.idiag_inode == 0) return kThisMachine;
  return absl::StrCat("uid ", answer.socket.idiag_uid);
}

}  // namespace

absl::StatusOr<HttpAddress> ParseHttpAddress(const std::string& text) {
  const size_t colon = text.rfind(':');
  HttpAddress address{.host = text.substr(0, colon)};
  std::string& host = address.host;
  const bool in_brackets = host.size() > 2 && host.front() == '[' && host.back() == ']';
  if (in_brackets) host = host.substr(1, host.size() - 2);
  in6_addr ipv6 = {};
  in_addr ipv4 = {};
  const bool is_number = host.find_first_not_of("0123456789.") == std::string::npos;
  if (colon == std::string::npos || !absl::SimpleAtoi(text.substr(colon + 1), &address.port) || address.port < 0 ||
      address.port > 65535 || host.empty() || host == "*" ||
      (inet_pton(AF_INET6, host.c_str(), &ipv6) == 1) != in_brackets ||
      (absl::StrContains(host, ':') && !in_brackets) || (is_number && inet_pton(AF_INET, host.c_str(), &ipv4) != 1)) {
    return absl::InvalidArgumentError(
        absl::StrCat("'", text,
                     "' is not a host and a port; write it as 127.0.0.1:9477, "
                     "localhost:9477, [::1]:9477 or 0.0.0.0:9477 (all addresses), or off"));
  }
  return address;
}

int SocketAddress::port() const {
  return ntohs(is_ipv6() ? Ipv6(*this).sin6_port : Ipv4(*this).sin_port);
}

std::string SocketAddress::host() const {
  std::array<char, NI_MAXHOST> name = {};
  getnameinfo(get(), size, name.data(), name.size(), nullptr, 0, NI_NUMERICHOST);
  return is_ipv6() ? absl::StrCat("[", name.data(), "]") : std::string(name.data());
}

std::string SocketAddress::text() const {
  return absl::StrCat(host(), ":", port());
}

absl::StatusOr<SocketAddress> Resolve(const HttpAddress& where) {
  // RFC 6761: localhost is always loopback, even without a file saying so.
  const std::string host = where.host == "localhost" ? "127.0.0.1" : where.host;
  addrinfo hints = {};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  const int error = getaddrinfo(host.c_str(), absl::StrCat(where.port).c_str(), &hints, &found);
  if (error != 0) {
    return absl::UnavailableError(absl::StrCat("http_address: '", host, "' is not an address: ", gai_strerror(error)));
  }
  const absl::Cleanup free_found = [found] { freeaddrinfo(found); };
  const addrinfo* chosen = found;
  for (const addrinfo* each = found; each != nullptr && chosen->ai_family != AF_INET; each = each->ai_next)
    chosen = each;
  SocketAddress address;
  std::memcpy(address.get(), chosen->ai_addr, chosen->ai_addrlen);
  address.size = chosen->ai_addrlen;
  return address;
}

SocketAddress AddressOf(const UniqueFd& socket) {
  SocketAddress address;
  address.size = sizeof address.storage;
  if (getsockname(socket.get(), address.get(), &address.size) != 0) address = {};
  return address;
}

absl::StatusOr<UniqueFd> ListenHttp(const SocketAddress& address) {
  const auto failed = [&] {
    const std::string where = absl::StrCat("http_address ", address.text(), ": cannot listen");
    if (errno == EADDRINUSE) return absl::AlreadyExistsError(absl::StrCat(where, ": ", std::strerror(errno)));
    return absl::UnavailableError(absl::StrCat(where, "; choose another one, or off: ", std::strerror(errno)));
  };
  UniqueFd fd(socket(address.storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd.valid()) return failed();
  const int one = 1;
  const int off = 0;
  setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
  if (address.is_ipv6()) {
    setsockopt(fd.get(), IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off);  // [::] also accepts IPv4
  }
  if (bind(fd.get(), address.get(), address.size) != 0 || listen(fd.get(), kBacklog) != 0) return failed();
  return fd;
}

std::string HttpPeer(int connection) {
  SocketAddress from{.size = sizeof(sockaddr_storage)};
  SocketAddress to{.size = sizeof(sockaddr_storage)};
  if (getpeername(connection, from.get(), &from.size) != 0 || getsockname(connection, to.get(), &to.size) != 0) {
    return "gone";
  }
  from = Unmapped(from);
  if (std::optional<std::string> local = LocalPeer(from, Unmapped(to))) return *std::move(local);
  if (IsLoopback(from)) return kThisMachine;
  std::array<char, INET6_ADDRSTRLEN> name = {};
  if (!from.is_ipv6()) return inet_ntop(AF_INET, &Ipv4(from).sin_addr, name.data(), name.size());
  in6_addr network = Ipv6(from).sin6_addr;
  std::memset(network.s6_addr + 8, 0, 8);  // a machine may take any address of its network
  return absl::StrCat(inet_ntop(AF_INET6, &network, name.data(), name.size()), "/64");
}

}  // namespace vrambroker
