// SPDX-License-Identifier: Apache-2.0
//
// HttpRouter: finds the page for a request, and the headers common to all answers. Pure: knows no sockets.
#ifndef VRAMBROKER_SERVER_HTTP_HTTP_ROUTER_H_
#define VRAMBROKER_SERVER_HTTP_HTTP_ROUTER_H_

#include <functional>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/btree_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace vrambroker {

using HttpParameters = absl::btree_map<std::string, std::string>;

struct HttpRequest {
  std::string method;               // "GET"
  std::string path;                 // decoded, without the query: "/api/map"
  std::string query;                // as received: "device=0&session=a%20b"
  std::optional<std::string> host;  // the Host header; none: HTTP/1.0
  std::string fault = {};           // reason to refuse the request (400); empty: valid
  std::optional<std::string> accept_encoding;
};

struct HttpResponse {
  int code = 200;
  std::string content_type;
  std::string body;
  std::vector<std::pair<std::string, std::string>> headers = {};
};

// Limits concurrent pages: a few costly pages at a time, and a single large page, which may take hundreds of MB. So
// neither kind can delay /metrics and /healthz.
enum class PageCost { kCheap, kCostly, kLarge };

struct HttpPage {
  std::string path;
  std::vector<std::string> parameters;  // known parameters; unknown parameters are refused
  std::function<HttpResponse(const HttpParameters& parameters)> answer;
  PageCost cost = PageCost::kCheap;
  bool compress = false;  // where the asker can read gzip
};

class HttpRouter {
 public:
  // `local_only`: refuses requests whose Host header names another machine. Otherwise a web site mapping its own name
  // to 127.0.0.1 (DNS rebinding) could read everything.
  HttpRouter(std::vector<HttpPage> pages, bool local_only);

  // The page for a request, with its parameters; or the answer to an unanswerable request: 400 (a header, a parameter),
  // 403 (the host), 404 (with all paths), 405.
  struct Match {
    const HttpPage* page = nullptr;  // null: `refusal` is the answer
    HttpParameters parameters;
    HttpResponse refusal;
  };
  Match Find(const HttpRequest& request) const;

 private:
  std::map<std::string, HttpPage, std::less<>> pages_;  // by path
  bool local_only_;
};

// Returns 4xx or 5xx for an error, with its message as text.
HttpResponse HttpError(const absl::Status& status);
HttpResponse HttpText(int code, const std::string& text);

// "localhost", 127.x.y.z or [::1], each perhaps with a port.
bool IsLocalHost(absl::string_view host);

// "a=1&b=x%20y". InvalidArgument: broken escapes, a name given twice.
absl::StatusOr<HttpParameters> ParseQuery(absl::string_view query);

// Whether an Accept-Encoding header allows gzip.
bool AcceptsGzip(absl::string_view accept_encoding);
std::string Gzip(absl::string_view text);

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_HTTP_HTTP_ROUTER_H_
