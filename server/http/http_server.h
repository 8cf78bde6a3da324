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

// Why the server closed a connection that its client kept.
enum class HttpDrop { kTooMany, kSlowRequest, kSlowReader };
inline constexpr std::array kHttpDrops = {HttpDrop::kTooMany, HttpDrop::kSlowRequest, HttpDrop::kSlowReader};
const char* HttpDropName(HttpDrop reason);  // "too_many"

// Synchronises itself.
struct HttpStats {
  std::atomic<uint64_t> listen_failures{0};
  std::atomic<uint64_t> connections{0};
  std::array<std::atomic<uint64_t>, kHttpDrops.size()> dropped{};  // by HttpDrop
};

struct HttpServerOptions {
  // Connections at a time, each of which is a descriptor. 0: an eighth of what the process may have, at most 4096.
  size_t max_connections = 0;
  HttpStats* stats = nullptr;  // outlives the server
  // Called from its thread once it listens on a port that was taken when it started.
  std::function<void()> listens = [] {};
};

// Serves until it is destroyed. One thread waits for all requests and readers, and never for one of them. Pages are
// called from other threads, several at a time, once a whole request is there.
class HttpServer {
 public:
  // `address` is for ParseHttpAddress(); port 0 takes any free one. On a loopback address, only requests to such a host
  // are answered (HttpRouter). A port that another program has is no error: it is logged, counted, and tried again
  // every second. Errors name the address and why it cannot be used.
  static absl::StatusOr<std::unique_ptr<HttpServer>> Start(const std::string& address, std::vector<HttpPage> pages,
                                                           HttpServerOptions options);
  virtual ~HttpServer() = default;

  // Whether it has the port by now.
  virtual bool listening() const = 0;
  // The address that it listens on, or wants to: "127.0.0.1:9477".
  virtual std::string address() const = 0;
};

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_HTTP_HTTP_SERVER_H_
