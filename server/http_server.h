// SPDX-License-Identifier: Apache-2.0
//
// HttpServer: /metrics and /healthz over plain HTTP (CivetWeb), read-only.
#ifndef VRAMBROKER_SERVER_HTTP_SERVER_H_
#define VRAMBROKER_SERVER_HTTP_SERVER_H_

#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"

namespace vrambroker {

struct HttpAddress {
  std::string host;  // IPv4
  int port = 0;
};

// Reads HOST:PORT. InvalidArgument says what is wrong and how to write it.
absl::StatusOr<HttpAddress> ParseHttpAddress(const std::string& text);

struct HttpPages {
  std::function<std::string()> metrics;  // text exposition format 0.0.4
  std::function<bool()> healthy;         // /healthz: 200 or 503
};

// Serves until it is destroyed. Pages are called from its own threads.
class HttpServer {
 public:
  // `address` is HOST:PORT, IPv4; port 0 takes any free one. Errors name the address and why it cannot be used.
  static absl::StatusOr<std::unique_ptr<HttpServer>> Start(const std::string& address, HttpPages pages);
  virtual ~HttpServer() = default;

  // The address in use, "127.0.0.1:9477".
  virtual std::string address() const = 0;
};

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_HTTP_SERVER_H_
