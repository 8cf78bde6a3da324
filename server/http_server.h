// SPDX-License-Identifier: Apache-2.0
//
// HttpServer: the pages of an HttpRouter over plain HTTP (CivetWeb): sockets, threads, headers. Read-only.
#ifndef VRAMBROKER_SERVER_HTTP_SERVER_H_
#define VRAMBROKER_SERVER_HTTP_SERVER_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "server/http_router.h"

namespace vrambroker {

struct HttpAddress {
  std::string host;  // without brackets
  int port = 0;
};

// Reads "127.0.0.1:9477", "[::1]:9477" or "localhost:9477"; looks no name up. InvalidArgument says what is wrong and
// how to write it.
absl::StatusOr<HttpAddress> ParseHttpAddress(const std::string& text);

// Serves until it is destroyed. Pages are called from its own threads, several at a time.
class HttpServer {
 public:
  // `address` is for ParseHttpAddress(); port 0 takes any free one. On a loopback address, only requests to such a host
  // are answered (HttpRouter). Errors name the address and why it cannot be used.
  static absl::StatusOr<std::unique_ptr<HttpServer>> Start(const std::string& address, std::vector<HttpPage> pages);
  virtual ~HttpServer() = default;

  // The address in use, "127.0.0.1:9477".
  virtual std::string address() const = 0;
};

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_HTTP_SERVER_H_
