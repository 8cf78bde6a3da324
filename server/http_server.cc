// SPDX-License-Identifier: Apache-2.0
#include "server/http_server.h"

#include <CivetServer.h>
#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <cerrno>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "allocator/device.h"

namespace vrambroker {
namespace {

constexpr char kTextPlain[] = "text/plain; charset=utf-8";

void Answer(mg_connection* connection, int code, const char* reason, const char* type, const std::string& body) {
  mg_printf(connection, "HTTP/1.1 %d %s\r\nContent-Type: %s\r\nContent-Length: %zu\r\nCache-Control: no-store\r\n\r\n",
            code, reason, type, body.size());
  mg_write(connection, body.data(), body.size());
}

// A page for exactly one path; CivetWeb would also send it everything below.
class Page : public CivetHandler {
 public:
  using Render = std::function<void(mg_connection*)>;
  Page(std::string path, Render render) : path_(std::move(path)), render_(std::move(render)) {}

  bool handleGet(CivetServer* /*server*/, mg_connection* connection) override {
    if (path_ != mg_get_request_info(connection)->local_uri) {
      Answer(connection, 404, "Not Found", kTextPlain, "not found; try /metrics or /healthz\n");
    } else {
      render_(connection);
    }
    return true;
  }

 private:
  const std::string path_;
  const Render render_;
};

// CivetWeb says only that it failed to start; the kernel says why.
absl::Status TryBind(const HttpAddress& where) {
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(where.port));
  inet_pton(AF_INET, where.host.c_str(), &address.sin_addr);
  UniqueFd fd(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const int one = 1;
  setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
  if (!fd.valid() || bind(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0 ||
      listen(fd.get(), 1) != 0) {
    return absl::ErrnoToStatus(errno, absl::StrCat("http_address ", where.host, ":", where.port,
                                                   ": cannot listen; choose another one, or off"));
  }
  return absl::OkStatus();
}

class CivetHttpServer : public HttpServer {
 public:
  CivetHttpServer(const std::string& host, const std::string& listening_port, HttpPages pages)
      : pages_(std::move(pages)),
        metrics_page_("/metrics",
                      [this](mg_connection* connection) {
                        Answer(connection, 200, "OK", "text/plain; version=0.0.4; charset=utf-8", pages_.metrics());
                      }),
        health_page_("/healthz",
                     [this](mg_connection* connection) {
                       const bool healthy = pages_.healthy();
                       Answer(connection, healthy ? 200 : 503, healthy ? "OK" : "Service Unavailable", kTextPlain,
                              healthy ? "ok\n" : "stopping\n");
                     }),
        other_page_("/",
                    [](mg_connection* connection) {
                      Answer(connection, 200, "OK", kTextPlain, "vrambroker: /metrics, /healthz\n");
                    }),
        // A few threads and a short timeout: silent connections must not keep Prometheus out.
        server_(std::vector<std::string>{"listening_ports", listening_port, "num_threads", "8", "request_timeout_ms",
                                         "5000", "enable_directory_listing", "no"}) {
    server_.addHandler("/metrics", metrics_page_);
    server_.addHandler("/healthz", health_page_);
    server_.addHandler("/", other_page_);
    const std::vector<int> ports = server_.getListeningPorts();
    address_ = absl::StrCat(host, ":", ports.empty() ? 0 : ports.front());
  }

  std::string address() const override { return address_; }

 private:
  const HttpPages pages_;
  Page metrics_page_;
  Page health_page_;
  Page other_page_;
  std::string address_;
  CivetServer server_;  // last: stops before the pages go
};

}  // namespace

absl::StatusOr<HttpAddress> ParseHttpAddress(const std::string& text) {
  const size_t colon = text.rfind(':');
  HttpAddress address{.host = text.substr(0, colon)};
  in_addr parsed = {};
  if (colon == std::string::npos || !absl::SimpleAtoi(text.substr(colon + 1), &address.port) || address.port < 0 ||
      address.port > 65535 || inet_pton(AF_INET, address.host.c_str(), &parsed) != 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("'", text, "' is not an IPv4 address and a port; write it as 127.0.0.1:9477, or off"));
  }
  return address;
}

absl::StatusOr<std::unique_ptr<HttpServer>> HttpServer::Start(const std::string& address, HttpPages pages) {
  const absl::StatusOr<HttpAddress> where = ParseHttpAddress(address);
  if (!where.ok()) return where.status();
  if (absl::Status status = TryBind(*where); !status.ok()) return status;
  try {
    return std::make_unique<CivetHttpServer>(where->host, address, std::move(pages));
  } catch (const CivetException& error) {
    return absl::UnavailableError(absl::StrCat("http_address ", address, ": ", error.what()));
  }
}

}  // namespace vrambroker
