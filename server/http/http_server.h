// SPDX-License-Identifier: Apache-2.0
//
// HttpServer: the pages of an HttpRouter over plain HTTP (Boost.Beast): connections, threads, headers. Read-only.
#ifndef VRAMBROKER_SERVER_HTTP_HTTP_SERVER_H_
#define VRAMBROKER_SERVER_HTTP_HTTP_SERVER_H_

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "server/http/http_router.h"

namespace vrambroker {

// Reason for closing a connection that the client kept open.
enum class HttpDrop { kTooMany, kSlowRequest, kSlowReader };
inline constexpr std::array kHttpDrops = {HttpDrop::kTooMany, HttpDrop::kSlowRequest, HttpDrop::kSlowReader};
const char* HttpDropName(HttpDrop reason);  // "too_many"

// Thread-safe.
struct HttpStats {
  std::atomic<uint64_t> listen_failures{0};
  std::atomic<uint64_t> connections{0};
  std::array<std::atomic<uint64_t>, kHttpDrops.size()> dropped{};  // by HttpDrop
};

struct HttpServerOptions {
  // Connections at a time; each takes a descriptor. 0: an eighth of the process's limit, at most 4096.
  size_t max_connections = 0;
  HttpStats* stats = nullptr;  // outlives the server
  // Called on the server's thread once the server listens on a port that was taken at the start.
  std::function<void()> listens = [] {};
};

// Serves until destroyed. A single thread waits for all requests and readers, and never blocks on any of them. Other
// threads call the pages, several at a time, once a request is complete.
class HttpServer {
 public:
  // `address` is for ParseHttpAddress(); port 0 takes any free port. On a loopback address, answers only requests to a
  // loopback host (HttpRouter). A port taken by another program is not an error: the server logs and counts the
  // failure, and retries every second. Errors name the address and why it cannot be used.
  static absl::StatusOr<std::unique_ptr<HttpServer>> Start(const std::string& address, std::vector<HttpPage> pages,
                                                           HttpServerOptions options);
  virtual ~HttpServer() = default;

  // Whether the server has its port by now.
  virtual bool listening() const = 0;
  // The listening, or wanted, address: "127.0.0.1:9477".
  virtual std::string address() const = 0;
};

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_HTTP_HTTP_SERVER_H_
