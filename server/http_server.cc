// SPDX-License-Identifier: Apache-2.0
#include "server/http_server.h"

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

// A listening socket. CivetWeb says only that it failed to start; the kernel says why.
absl::StatusOr<UniqueFd> Listen(const HttpAddress& where) {
  UniqueFd fd(socket(where.socket_address.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  const int one = 1;
  const int off = 0;
  setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
  if (where.socket_address.ss_family == AF_INET6) {
    setsockopt(fd.get(), IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off);  // [::] is for all of IPv4, too
  }
  if (!fd.valid() ||
      bind(fd.get(), reinterpret_cast<const sockaddr*>(&where.socket_address), where.socket_address_size) != 0 ||
      listen(fd.get(), kBacklog) != 0) {
    return absl::ErrnoToStatus(errno, absl::StrCat("http_address ", where.host, ":", where.port,
                                                   ": cannot listen; choose another one, or off"));
  }
  return fd;
}

int PortOf(int socket) {
  sockaddr_storage address = {};
  socklen_t size = sizeof address;
  if (getsockname(socket, reinterpret_cast<sockaddr*>(&address), &size) != 0) return 0;
  return ntohs(address.ss_family == AF_INET6 ? reinterpret_cast<const sockaddr_in6&>(address).sin6_port
                                             : reinterpret_cast<const sockaddr_in&>(address).sin_port);
}

// The descriptor of this process that listens on 127.0.0.1:`port`; -1: none.
int ListenerOn(int port) {
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd", error)) {
    int fd = -1;
    if (!absl::SimpleAtoi(entry.path().filename().native(), &fd)) continue;
    int listens = 0;
    socklen_t size = sizeof listens;
    if (getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listens, &size) == 0 && listens != 0 && PortOf(fd) == port)
      return fd;
  }
  return -1;
}

// Debian's CivetWeb is built without IPv6, which only its opening of sockets needs. So it gets our socket in place of
// its own, which listens on 127.0.0.1:`port`.
bool ReplaceListener(int port, const UniqueFd& socket) {
  const int own = ListenerOn(port);
  if (own < 0 || dup3(socket.get(), own, O_CLOEXEC) < 0) return false;
  // Its thread may be waiting on the old one: a connection wakes it, and there is nobody to accept it.
  const UniqueFd wake(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(static_cast<uint16_t>(port));
  (void)connect(wake.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address);
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
    address_ = absl::StrCat(host_, ":", PortOf(socket.get()));
    return ReplaceListener(port.port, socket);
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
  HttpAddress address;
  std::string host = text.substr(0, colon);
  const bool in_brackets = host.size() > 2 && host.front() == '[' && host.back() == ']';
  if (in_brackets) host = host.substr(1, host.size() - 2);
  if (colon == std::string::npos || !absl::SimpleAtoi(text.substr(colon + 1), &address.port) || address.port < 0 ||
      address.port > 65535 || host.empty() || absl::StrContains(host, ':') != in_brackets) {
    return absl::InvalidArgumentError(absl::StrCat(
        "'", text, "' is not a host and a port; write it as 127.0.0.1:9477, localhost:9477 or [::1]:9477, or off"));
  }
  if (host == "localhost") host = "127.0.0.1";  // RFC 6761: always this, also where no file says so
  addrinfo hints = {};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  const int error = getaddrinfo(host.c_str(), absl::StrCat(address.port).c_str(), &hints, &found);
  if (error != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("'", host, "' is no address of this machine: ", gai_strerror(error)));
  }
  const absl::Cleanup free_found = [found] { freeaddrinfo(found); };
  // A name may have several: the first of IPv4, which every program tries.
  const addrinfo* chosen = found;
  for (const addrinfo* each = found; each != nullptr && chosen->ai_family != AF_INET; each = each->ai_next)
    chosen = each;
  std::array<char, NI_MAXHOST> numeric = {};
  getnameinfo(chosen->ai_addr, chosen->ai_addrlen, numeric.data(), numeric.size(), nullptr, 0, NI_NUMERICHOST);
  address.host = chosen->ai_family == AF_INET6 ? absl::StrCat("[", numeric.data(), "]") : std::string(numeric.data());
  std::memcpy(&address.socket_address, chosen->ai_addr, chosen->ai_addrlen);
  address.socket_address_size = chosen->ai_addrlen;
  return address;
}

absl::StatusOr<std::unique_ptr<HttpServer>> HttpServer::Start(const std::string& address, std::vector<HttpPage> pages) {
  const absl::StatusOr<HttpAddress> where = ParseHttpAddress(address);
  if (!where.ok()) return where.status();
  absl::StatusOr<UniqueFd> socket = Listen(*where);
  if (!socket.ok()) return socket.status();
  auto server = std::make_unique<CivetHttpServer>(where->host, HttpRouter(std::move(pages), IsLocalHost(where->host)));
  bool started = false;
  if (where->socket_address.ss_family == AF_INET6) {
    started = server->StartOn(*socket);
  } else {
    socket->Reset();  // it was only to see whether CivetWeb can open one
    started = server->Start(absl::StrCat(where->host, ":", where->port));
  }
  if (!started) {
    return absl::UnavailableError(absl::StrCat("http_address ", address, ": CivetWeb could not start its server"));
  }
  return server;
}

}  // namespace vrambroker
