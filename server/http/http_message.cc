// SPDX-License-Identifier: Apache-2.0
#include "server/http/http_message.h"

#include <algorithm>
#include <boost/beast/http/error.hpp>
#include <boost/beast/http/status.hpp>
#include <exception>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

namespace vrambroker {
namespace {

namespace http = boost::beast::http;

constexpr size_t kWorthCompressing = 1024;

// Sent with every answer: forbids caching, sniffing, framing and loading from other sites.
constexpr char kHeaders[] =
    "Cache-Control: no-store\r\n"
    "X-Content-Type-Options: nosniff\r\n"
    "Referrer-Policy: no-referrer\r\n"
    "Cross-Origin-Resource-Policy: same-origin\r\n"
    "Content-Security-Policy: default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'\r\n"
    "Connection: close\r\n";

std::string ToString(boost::beast::string_view text) {
  return {text.data(), text.size()};
}

}  // namespace

HttpResponse TooManyRequests() {
  return HttpText(503, "too many requests at a time; ask again\n");
}

std::string Serialize(const HttpRequest& request, const HttpResponse& response, bool compress) {
  std::string zipped;
  if (compress && response.body.size() >= kWorthCompressing && request.accept_encoding.has_value() &&
      AcceptsGzip(*request.accept_encoding)) {
    zipped = Gzip(response.body);
  }
  const std::string& body = zipped.empty() ? response.body : zipped;
  std::string answer =
      absl::StrCat("HTTP/1.1 ", response.code, " ", ToString(http::obsolete_reason(http::int_to_status(response.code))),
                   "\r\nContent-Type: ", response.content_type, "\r\nContent-Length: ", body.size(), "\r\n", kHeaders);
  if (compress) absl::StrAppend(&answer, "Vary: Accept-Encoding\r\n");
  if (!zipped.empty()) absl::StrAppend(&answer, "Content-Encoding: gzip\r\n");
  for (const auto& [name, value] : response.headers) absl::StrAppend(&answer, name, ": ", value, "\r\n");
  absl::StrAppend(&answer, "\r\n");
  if (request.method != "HEAD") absl::StrAppend(&answer, body);
  return answer;
}

std::string MakeAnswer(const HttpRequest& request, const HttpPage& page, const HttpParameters& parameters) {
  try {
    return Serialize(request, page.answer(parameters), page.compress);
  } catch (const std::exception&) {  // out of memory, most likely: the daemon goes on
    return Serialize(request, TooManyRequests(), /*compress=*/false);
  }
}

HttpRequest ToRequest(const http::request<http::empty_body>& head) {
  const auto header = [&](http::field name) -> std::optional<std::string> {
    const auto it = head.find(name);
    if (it == head.end()) return std::nullopt;
    return ToString(it->value());
  };
  HttpRequest request{.method = ToString(head.method_string()),
                      .path = ToString(head.target()),
                      .host = header(http::field::host),
                      .accept_encoding = header(http::field::accept_encoding)};
  // RFC 9112, section 3.2. A client or proxy choosing another Host header than the daemon would take the answer for
  // another site's.
  const size_t hosts = head.count(http::field::host);
  if (hosts > 1) {
    request.fault = absl::StrCat("the request has ", hosts, " Host headers; send one\n");
  } else if (hosts == 0 && head.version() >= 11) {
    request.fault = "the request has no Host header, which HTTP/1.1 needs\n";
  }
  // A target in proxy form, "http://localhost:9477/metrics": the target's host counts.
  if (absl::StartsWithIgnoreCase(request.path, "http://")) {
    const std::string rest = request.path.substr(7);
    const size_t slash = std::min(rest.find_first_of("/?"), rest.size());
    request.host = rest.substr(0, slash);
    request.path = rest.substr(slash);
  }
  if (const size_t mark = request.path.find('?'); mark != std::string::npos) {
    request.query = request.path.substr(mark + 1);
    request.path.resize(mark);
  }
  return request;
}

std::optional<HttpResponse> AnswerTo(const boost::system::error_code& error) {
  if (error == http::error::header_limit || error == http::error::buffer_overflow) {
    return HttpText(431, absl::StrCat("the request is longer than ", kMaxHeadBytes, " bytes\n"));
  }
  if (error == http::error::end_of_stream || error == http::error::partial_message ||
      error.category() != http::make_error_code(http::error::bad_method).category()) {
    return std::nullopt;  // the client has gone, or was too slow
  }
  return HttpText(400, "this is not an HTTP request\n");
}

}  // namespace vrambroker
