// SPDX-License-Identifier: Apache-2.0
#include "server/http_server.h"

#include <arpa/inet.h>
#include <civetweb.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <new>
#include <system_error>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "allocator/device.h"

namespace vrambroker {
namespace {

// Silent connections must not keep Prometheus out: a short timeout, and threads enough for what a browser opens in
// advance. Costly pages have a few of them only.
constexpr const char* kThreads = "16";
constexpr int kCostlyAtATime = 6;
constexpr const char* kTimeoutMs = "5000";  // for a request to arrive, and for a client to read a piece of the answer
constexpr std::chrono::seconds kSendTimeout(5);  // for the whole answer
constexpr int kBacklog = 128;
constexpr size_t kPiece = 16 << 10;
constexpr size_t kWorthCompressing = 1024;

// On every answer: nothing is to be kept, guessed at, framed or loaded from elsewhere.
constexpr char kHeaders[] =
    "Cache-Control: no-store\r\n"
    "X-Content-Type-Options: nosniff\r\n"
    "Referrer-Policy: no-referrer\r\n"
    "Cross-Origin-Resource-Policy: same-origin\r\n"
    "Content-Security-Policy: default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'\r\n"
    "Connection: close\r\n";

const char* Reason(int code) {
  switch (code) {
    case 200:
      return "OK";
    case 400:
      return "Bad Request";
    case 403:
      return "Forbidden";
    case 404:
      return "Not Found";
    case 405:
      return "Method Not Allowed";
    case 503:
      return "Service Unavailable";
    case 504:
      return "Gateway Timeout";
    default:
      return "Internal Server Error";
  }
}

struct SocketAddress {
  sockaddr_storage storage = {};
  socklen_t size = 0;

  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage); }
  sockaddr* get() { return reinterpret_cast<sockaddr*>(&storage); }
  bool is_ipv6() const { return storage.ss_family == AF_INET6; }
  int port() const {
    return ntohs(is_ipv6() ? reinterpret_cast<const sockaddr_in6&>(storage).sin6_port
                           : reinterpret_cast<const sockaddr_in&>(storage).sin_port);
  }
  // "127.0.0.1" or "[::1]".
  std::string host() const {
    std::array<char, NI_MAXHOST> text = {};
    getnameinfo(get(), size, text.data(), text.size(), nullptr, 0, NI_NUMERICHOST);
    return is_ipv6() ? absl::StrCat("[", text.data(), "]") : std::string(text.data());
  }
};

// Looks the host's name up. Of several addresses the first of IPv4, which every program tries.
absl::StatusOr<SocketAddress> Resolve(const HttpAddress& where) {
  // RFC 6761: localhost is always this, also where no file says so.
  const std::string host = where.host == "localhost" ? "127.0.0.1" : where.host;
  addrinfo hints = {};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  const int error = getaddrinfo(host.c_str(), absl::StrCat(where.port).c_str(), &hints, &found);
  if (error != 0) {
    return absl::UnavailableError(absl::StrCat("http_address: '", host, "' is no address: ", gai_strerror(error)));
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

// A listening socket. CivetWeb says only that it failed to start; the kernel says why.
absl::StatusOr<UniqueFd> Listen(const SocketAddress& address) {
  const auto failed = [&] {
    return absl::ErrnoToStatus(errno, absl::StrCat("http_address ", address.host(), ":", address.port(),
                                                   ": cannot listen; choose another one, or off"));
  };
  UniqueFd fd(socket(address.storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd.valid()) return failed();
  const int one = 1;
  const int off = 0;
  setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
  if (address.is_ipv6()) {
    setsockopt(fd.get(), IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off);  // [::] is for all of IPv4, too
  }
  if (bind(fd.get(), address.get(), address.size) != 0 || listen(fd.get(), kBacklog) != 0) return failed();
  return fd;
}

SocketAddress AddressOf(int socket) {
  SocketAddress address;
  address.size = sizeof address.storage;
  if (getsockname(socket, address.get(), &address.size) != 0) address = {};
  return address;
}

SocketAddress Ipv4Loopback(int port) {
  sockaddr_in loopback = {};
  loopback.sin_family = AF_INET;
  loopback.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  loopback.sin_port = htons(static_cast<uint16_t>(port));
  SocketAddress address{.size = sizeof loopback};
  std::memcpy(address.get(), &loopback, sizeof loopback);
  return address;
}

// The descriptor of this process that listens on `wanted`; -1: none.
int ListenerOn(const SocketAddress& wanted) {
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd", error)) {
    int fd = -1;
    int listens = 0;
    socklen_t size = sizeof listens;
    if (!absl::SimpleAtoi(entry.path().filename().native(), &fd)) continue;
    if (getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listens, &size) != 0 || listens == 0) continue;
    const SocketAddress address = AddressOf(fd);
    if (address.size == wanted.size && address.host() == wanted.host() && address.port() == wanted.port()) return fd;
  }
  return -1;
}

// A connection that nobody uses.
void Knock(const SocketAddress& address) {
  const UniqueFd fd(socket(address.storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  (void)connect(fd.get(), address.get(), address.size);
}

// Debian's CivetWeb is built without IPv6, which only its opening of sockets needs. So it gets our socket in place of
// its own.
bool ReplaceListener(const SocketAddress& own, const UniqueFd& socket) {
  const int fd = ListenerOn(own);
  if (fd < 0 || dup3(socket.get(), fd, O_CLOEXEC) < 0) return false;
  // Its thread may still be waiting on the old one. A connection to that wakes it, and one to the new one keeps it
  // awake.
  Knock(AddressOf(socket.get()));
  Knock(own);
  return true;
}

std::optional<std::string> Header(const mg_connection* connection, const char* name) {
  const char* value = mg_get_header(connection, name);
  if (value == nullptr) return std::nullopt;
  return value;
}

// Sends all of it, unless the client takes longer than it may: some time, and a second for each MiB.
void Send(mg_connection* connection, const std::string& bytes) {
  const auto deadline = std::chrono::steady_clock::now() + kSendTimeout + std::chrono::seconds(bytes.size() >> 20);
  for (size_t sent = 0; sent < bytes.size() && std::chrono::steady_clock::now() < deadline; sent += kPiece) {
    if (mg_write(connection, bytes.data() + sent, std::min(kPiece, bytes.size() - sent)) <= 0) return;
  }
}

class CivetHttpServer : public HttpServer {
 public:
  CivetHttpServer(std::string host, HttpRouter router) : host_(std::move(host)), router_(std::move(router)) {}
  ~CivetHttpServer() override {
    if (context_ != nullptr) mg_stop(context_);
  }

  bool Start(const std::string& listening_port) {
    // No files are served, and no other site may read anything: CivetWeb would allow it to all by itself.
    const std::array<const char*, 15> options = {"listening_ports",
                                                 listening_port.c_str(),
                                                 "num_threads",
                                                 kThreads,
                                                 "request_timeout_ms",
                                                 kTimeoutMs,
                                                 "enable_directory_listing",
                                                 "no",
                                                 "access_control_allow_origin",
                                                 "",
                                                 "access_control_allow_methods",
                                                 "",
                                                 "access_control_allow_headers",
                                                 "",
                                                 nullptr};
    mg_callbacks callbacks = {};
    callbacks.begin_request = [](mg_connection* connection) {
      return static_cast<CivetHttpServer*>(mg_get_request_info(connection)->user_data)->Serve(connection);
    };
    context_ = mg_start(&callbacks, this, const_cast<const char**>(options.data()));
    if (context_ == nullptr) return false;
    mg_server_port port = {};
    mg_get_server_ports(context_, 1, &port);
    address_ = absl::StrCat(host_, ":", port.port);
    return true;
  }

  // On a socket that CivetWeb cannot open itself.
  bool StartOn(const UniqueFd& socket) {
    if (!Start("127.0.0.1:0")) return false;
    mg_server_port port = {};
    mg_get_server_ports(context_, 1, &port);
    address_ = absl::StrCat(host_, ":", AddressOf(socket.get()).port());
    return ReplaceListener(Ipv4Loopback(port.port), socket);
  }

  std::string address() const override { return address_; }

 private:
  // Returns the code, which tells CivetWeb that the request has its answer.
  int Serve(mg_connection* connection) {
    // Else CivetWeb reads the rest of a request that has its answer, however long its client takes to send it.
    mg_disable_connection_keep_alive(connection);
    const mg_request_info& info = *mg_get_request_info(connection);
    const HttpRequest request{.method = info.request_method,
                              .path = info.local_uri,
                              .query = info.query_string == nullptr ? "" : info.query_string,
                              .host = Header(connection, "Host"),
                              .accept_encoding = Header(connection, "Accept-Encoding")};
    const HttpRouter::Match match = router_.Find(request);
    if (match.page == nullptr) return Answer(connection, request, match.refusal, /*compress=*/false);
    const bool too_many = match.page->costly && costly_.fetch_add(1) >= kCostlyAtATime;
    const absl::Cleanup done = [&] {
      if (match.page->costly) --costly_;
    };
    if (too_many) return Busy(connection, request);
    try {
      return Answer(connection, request, match.page->answer(match.parameters), match.page->compress);
    } catch (const std::bad_alloc&) {  // CivetWeb would end the daemon
      return Busy(connection, request);
    }
  }

  static int Busy(mg_connection* connection, const HttpRequest& request) {
    return Answer(connection, request, HttpText(503, "too many requests at a time; ask again\n"), /*compress=*/false);
  }

  static int Answer(mg_connection* connection, const HttpRequest& request, const HttpResponse& response,
                    bool compress) {
    std::string zipped;
    if (compress && response.body.size() >= kWorthCompressing && request.accept_encoding.has_value() &&
        AcceptsGzip(*request.accept_encoding)) {
      zipped = Gzip(response.body);
    }
    const std::string& body = zipped.empty() ? response.body : zipped;
    std::string answer = absl::StrCat("HTTP/1.1 ", response.code, " ", Reason(response.code),
                                      "\r\nContent-Type: ", response.content_type, "\r\nContent-Length: ", body.size(),
                                      "\r\n", kHeaders);
    if (compress) absl::StrAppend(&answer, "Vary: Accept-Encoding\r\n");
    if (!zipped.empty()) absl::StrAppend(&answer, "Content-Encoding: gzip\r\n");
    for (const auto& [name, value] : response.headers) absl::StrAppend(&answer, name, ": ", value, "\r\n");
    absl::StrAppend(&answer, "\r\n");
    if (request.method != "HEAD") absl::StrAppend(&answer, body);
    Send(connection, answer);
    return response.code;
  }

  const std::string host_;
  const HttpRouter router_;
  std::atomic<int> costly_{0};  // under way
  std::string address_;
  mg_context* context_ = nullptr;
};

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

absl::StatusOr<std::unique_ptr<HttpServer>> HttpServer::Start(const std::string& text, std::vector<HttpPage> pages) {
  const absl::StatusOr<HttpAddress> where = ParseHttpAddress(text);
  if (!where.ok()) return where.status();
  const absl::StatusOr<SocketAddress> address = Resolve(*where);
  if (!address.ok()) return address.status();
  absl::StatusOr<UniqueFd> socket = Listen(*address);
  if (!socket.ok()) return socket.status();
  const std::string host = address->host();
  auto server = std::make_unique<CivetHttpServer>(host, HttpRouter(std::move(pages), IsLocalHost(host)));
  bool started = false;
  if (address->is_ipv6()) {
    started = server->StartOn(*socket);
  } else {
    socket->Reset();  // it was only to see whether CivetWeb can open one
    started = server->Start(absl::StrCat(host, ":", where->port));
  }
  if (!started) {
    return absl::UnavailableError(absl::StrCat("http_address ", text, ": CivetWeb could not start its server"));
  }
  return server;
}

}  // namespace vrambroker
