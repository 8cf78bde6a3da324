// SPDX-License-Identifier: Apache-2.0
#include "server/http/http_router.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <zlib.h>

#include <algorithm>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"

namespace vrambroker {
namespace {

// %41 and + decoded; nullopt for anything else after a %.
std::optional<std::string> Decode(absl::string_view text) {
  std::string out;
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] != '%') {
      out += text[i] == '+' ? ' ' : text[i];
      continue;
    }
    uint32_t code = 0;
    if (i + 2 >= text.size() || !absl::ascii_isxdigit(static_cast<unsigned char>(text[i + 1])) ||
        !absl::SimpleHexAtoi(text.substr(i + 1, 2), &code)) {
      return std::nullopt;
    }
    out += static_cast<char>(code);
    i += 2;
  }
  return out;
}

// Quotes a part of a request for an error message.
std::string Quote(absl::string_view text) {
  return absl::StrCat("'", absl::CHexEscape(text.substr(0, 60)), text.size() > 60 ? "...'" : "'");
}

int HttpCode(absl::StatusCode code) {
  switch (code) {
    case absl::StatusCode::kInvalidArgument:
    case absl::StatusCode::kOutOfRange:
      return 400;
    case absl::StatusCode::kPermissionDenied:
      return 403;
    case absl::StatusCode::kNotFound:
      return 404;
    case absl::StatusCode::kResourceExhausted:
    case absl::StatusCode::kUnavailable:
    case absl::StatusCode::kAborted:
      return 503;
    case absl::StatusCode::kDeadlineExceeded:
      return 504;
    default:
      return 500;
  }
}

}  // namespace

HttpResponse HttpText(int code, const std::string& text) {
  return {.code = code, .content_type = "text/plain; charset=utf-8", .body = text};
}

HttpResponse HttpError(const absl::Status& status) {
  return HttpText(HttpCode(status.code()), absl::StrCat(std::string(status.message()), "\n"));
}

bool IsLocalHost(absl::string_view host) {
  absl::string_view name = host.substr(0, host.find(':'));
  if (absl::StartsWith(host, "[")) {
    const size_t end = std::min(host.find(']'), host.size());
    const absl::string_view rest = host.substr(std::min(end + 1, host.size()));
    if (!rest.empty() && rest[0] != ':') return false;
    name = host.substr(1, end - 1);
    if (end < host.size() && name == "::1") return true;
    if (end == host.size() || !absl::ConsumePrefix(&name, "::ffff:")) return false;  // IPv4's addresses, mapped
  } else if (absl::EqualsIgnoreCase(name, "localhost")) {
    return true;
  }
  in_addr address = {};
  return inet_pton(AF_INET, std::string(name).c_str(), &address) == 1 && (ntohl(address.s_addr) >> 24) == 127;
}

absl::StatusOr<HttpParameters> ParseQuery(absl::string_view query) {
  HttpParameters parameters;
  for (const absl::string_view part : absl::StrSplit(query, '&', absl::SkipEmpty())) {
    const size_t equals = std::min(part.find('='), part.size());
    const std::optional<std::string> name = Decode(part.substr(0, equals));
    const std::optional<std::string> value = Decode(part.substr(std::min(equals + 1, part.size())));
    if (!name.has_value() || !value.has_value()) {
      return absl::InvalidArgumentError("the query has a % that is not followed by two hexadecimal digits");
    }
    if (!parameters.emplace(*name, *value).second) {
      return absl::InvalidArgumentError(absl::StrCat(Quote(*name), ": given twice"));
    }
  }
  return parameters;
}

bool AcceptsGzip(absl::string_view accept_encoding) {
  for (const absl::string_view coding : absl::StrSplit(accept_encoding, ',')) {
    const std::vector<absl::string_view> parts = absl::StrSplit(coding, ';');
    const absl::string_view name = absl::StripAsciiWhitespace(parts[0]);
    if (!absl::EqualsIgnoreCase(name, "gzip") && name != "*") continue;
    double quality = 1;
    for (size_t i = 1; i < parts.size(); ++i) {
      absl::string_view parameter = absl::StripAsciiWhitespace(parts[i]);
      if (absl::ConsumePrefix(&parameter, "q=") && !absl::SimpleAtod(parameter, &quality)) quality = 0;
    }
    return quality > 0;
  }
  return false;
}

std::string Gzip(absl::string_view text) {
  z_stream stream = {};
  // 15 bits of window, and 16 for gzip's header. Level 1: the answer is read once, usually on the same machine.
  if (deflateInit2(&stream, 1, Z_DEFLATED, 15 + 16, 8, Z_DEFAULT_STRATEGY) != Z_OK) return "";
  std::string out(deflateBound(&stream, text.size()), '\0');
  stream.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(text.data()));
  stream.avail_in = static_cast<uInt>(text.size());
  stream.next_out = reinterpret_cast<Bytef*>(out.data());
  stream.avail_out = static_cast<uInt>(out.size());
  const bool whole = deflate(&stream, Z_FINISH) == Z_STREAM_END;
  out.resize(whole ? stream.total_out : 0);
  deflateEnd(&stream);
  return out;
}

HttpRouter::HttpRouter(std::vector<HttpPage> pages, bool local_only) : local_only_(local_only) {
  for (HttpPage& page : pages) {
    std::string path = page.path;
    pages_.emplace(std::move(path), std::move(page));
  }
}

HttpRouter::Match HttpRouter::Find(const HttpRequest& request) const {
  const auto refuse = [](HttpResponse response) { return Match{.refusal = std::move(response)}; };
  if (!request.fault.empty()) return refuse(HttpText(400, request.fault));
  // HTTP/1.0 has no Host header, but browsers do not speak HTTP/1.0.
  if (local_only_ && request.host.has_value() && !IsLocalHost(*request.host)) {
    return refuse(HttpText(403,
                           "this port serves only its own machine: use localhost or 127.0.0.1, or set http_address to "
                           "a network address\n"));
  }
  const auto it = pages_.find(request.path);
  if (it == pages_.end()) {
    std::vector<std::string> paths;
    paths.reserve(pages_.size());
    for (const auto& [path, page] : pages_) paths.push_back(path);
    return refuse(HttpText(404, absl::StrCat("not found; available: ", absl::StrJoin(paths, " "), "\n")));
  }
  if (request.method != "GET" && request.method != "HEAD") {
    HttpResponse response = HttpText(405, "this port is read-only: use GET or HEAD\n");
    response.headers.emplace_back("Allow", "GET, HEAD");
    return refuse(std::move(response));
  }
  const HttpPage& page = it->second;
  absl::StatusOr<HttpParameters> parameters = ParseQuery(request.query);
  if (!parameters.ok()) return refuse(HttpError(parameters.status()));
  for (const auto& [name, value] : *parameters) {
    if (std::find(page.parameters.begin(), page.parameters.end(), name) != page.parameters.end()) continue;
    return refuse(HttpText(
        400, absl::StrCat(Quote(name), " is not a parameter of ", page.path,
                          page.parameters.empty() ? ", which takes none"
                                                  : absl::StrCat("; it takes ", absl::StrJoin(page.parameters, ", ")),
                          "\n")));
  }
  return {.page = &page, .parameters = *std::move(parameters), .refusal = {}};
}

}  // namespace vrambroker
