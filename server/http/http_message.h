// SPDX-License-Identifier: Apache-2.0
//
// HTTP/1.1 wire format of requests and answers. For HttpServer.
#ifndef VRAMBROKER_SERVER_HTTP_HTTP_MESSAGE_H_
#define VRAMBROKER_SERVER_HTTP_HTTP_MESSAGE_H_

#include <boost/beast/http/empty_body.hpp>
#include <boost/beast/http/message.hpp>
#include <boost/system/error_code.hpp>
#include <cstddef>
#include <optional>
#include <string>

#include "server/http/http_router.h"

namespace vrambroker {

constexpr size_t kMaxHeadBytes = 16 << 10;  // browsers send the cookies of everything running on localhost

HttpRequest ToRequest(const boost::beast::http::request<boost::beast::http::empty_body>& head);

// Answers an invalid request. nullopt: send no answer.
std::optional<HttpResponse> AnswerTo(const boost::system::error_code& error);
HttpResponse TooManyRequests();

// Returns the whole answer as sent.
std::string Serialize(const HttpRequest& request, const HttpResponse& response, bool compress);
// Makes the page, and serializes the answer.
std::string MakeAnswer(const HttpRequest& request, const HttpPage& page, const HttpParameters& parameters);

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_HTTP_HTTP_MESSAGE_H_
