// SPDX-License-Identifier: Apache-2.0
#include "server/http/http_router.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <zlib.h>

#include <string>

#include "server/http/http_server.h"

namespace vrambroker {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Pair;

HttpPage Page(std::string path, std::vector<std::string> parameters = {}) {
  return {.path = std::move(path), .parameters = std::move(parameters), .answer = [](const HttpParameters&) {
            return HttpText(200, "here\n");
          }};
}

HttpRouter Router(bool local_only = true) {
  return HttpRouter({Page("/"), Page("/metrics"), Page("/api/map", {"device"})}, local_only);
}

TEST(HttpRouterTest, FindsExactlyThePage) {
  const HttpRouter router = Router();
  const HttpRouter::Match match = router.Find({.method = "GET", .path = "/api/map", .query = "device=1"});
  ASSERT_NE(match.page, nullptr);
  EXPECT_EQ(match.page->path, "/api/map");
  EXPECT_THAT(match.parameters, ElementsAre(Pair("device", "1")));
  EXPECT_NE(router.Find({.method = "HEAD", .path = "/"}).page, nullptr);
}

TEST(HttpRouterTest, SaysWhatThereIs) {
  const HttpRouter router = Router();
  for (const char* path : {"/metrics/", "/metrics/more", "/api", "", "/Metrics", "//"}) {
    const HttpRouter::Match match = router.Find({.method = "GET", .path = path});
    EXPECT_EQ(match.page, nullptr) << path;
    EXPECT_EQ(match.refusal.code, 404) << path;
    EXPECT_THAT(match.refusal.body, HasSubstr("/ /api/map /metrics")) << path;
  }
}

TEST(HttpRouterTest, OnlyReads) {
  const HttpRouter router = Router();
  for (const char* method : {"POST", "PUT", "DELETE", "OPTIONS", "PATCH", "get"}) {
    const HttpRouter::Match match = router.Find({.method = method, .path = "/metrics"});
    EXPECT_EQ(match.refusal.code, 405) << method;
    EXPECT_THAT(match.refusal.headers, ElementsAre(Pair("Allow", "GET, HEAD")));
  }
}

TEST(HttpRouterTest, NamesTheParameterAtFault) {
  const HttpRouter router = Router();
  for (const auto& [query, text] : std::vector<std::pair<std::string, std::string>>{
           {"devise=1", "'devise' is not a parameter of /api/map; it takes device"},
           {"device=1&device=2", "'device': given twice"},
           {"device=%1", "% that is not followed by two hexadecimal digits"},
           {"%zz=1", "%"},
           {"\x1b[2J=1", "'\\x1b[2J'"}}) {
    const HttpRouter::Match match = router.Find({.method = "GET", .path = "/api/map", .query = query});
    EXPECT_EQ(match.refusal.code, 400) << query;
    EXPECT_THAT(match.refusal.body, HasSubstr(text)) << query;
  }
  EXPECT_THAT(router.Find({.method = "GET", .path = "/metrics", .query = "a"}).refusal.body, HasSubstr("takes none"));
}

TEST(HttpRouterTest, OnItsOwnMachineOnlyLocalHostsAreServed) {
  for (const char* host : {"localhost", "LOCALHOST:9477", "127.0.0.1", "127.0.0.1:9477", "127.8.8.8", "[::1]",
                           "[::1]:80", "[::ffff:127.0.0.1]", "[::ffff:127.0.0.1]:80"}) {
    EXPECT_NE(Router().Find({.method = "GET", .path = "/", .host = host}).page, nullptr) << host;
  }
  for (const char* host :
       {"evil.example", "evil.example:9477", "localhost.evil.example", "127.0.0.1.evil.example", "", ":1", "10.0.0.1",
        "0.0.0.0", "128.0.0.1", "[::1].evil", "[::1", "[", "[]", "[::ffff:127.0.0.1].evil", "[::ffff:10.0.0.1]",
        "[localhost]", "[::2]", "127.1", "2130706433"}) {
    const HttpRouter::Match match = Router().Find({.method = "GET", .path = "/", .host = host});
    EXPECT_EQ(match.refusal.code, 403) << host;
    EXPECT_THAT(match.refusal.body, HasSubstr("http_address"));
    // A daemon on a network address answers to any host name.
    EXPECT_NE(Router(false).Find({.method = "GET", .path = "/", .host = host}).page, nullptr) << host;
  }
  EXPECT_NE(Router().Find({.method = "GET", .path = "/"}).page, nullptr);  // an HTTP/1.0 request needs no host
}

TEST(ParseQueryTest, Decodes) {
  const absl::StatusOr<HttpParameters> parameters = ParseQuery("a=1&&b=x%20y+z%26&c&d=%F0%9F%98%80=");
  ASSERT_TRUE(parameters.ok());
  EXPECT_THAT(*parameters,
              ElementsAre(Pair("a", "1"), Pair("b", "x y z&"), Pair("c", ""), Pair("d", "\xF0\x9F\x98\x80=")));
  for (const char* bad : {"a=%", "a=%2", "a=%g0", "a=%-1", "a=%+1", "a=% 1"}) EXPECT_FALSE(ParseQuery(bad).ok()) << bad;
}

TEST(GzipTest, OnlyWhereItIsWanted) {
  for (const char* header : {"gzip", "deflate, gzip;q=0.5", "GZIP", "*", "br, gzip ; q=1"}) {
    EXPECT_TRUE(AcceptsGzip(header)) << header;
  }
  for (const char* header : {"", "br", "gzip;q=0", "gzip;q=0.0", "gzip;q=x", "xgzip"})
    EXPECT_FALSE(AcceptsGzip(header)) << header;
}

TEST(GzipTest, ComesBackWhole) {
  std::string text;
  for (int i = 0; i < 100'000; ++i) text += std::to_string(i * 7919);
  const std::string zipped = Gzip(text);
  EXPECT_LT(zipped.size(), text.size());
  std::string back(text.size() + 1, '\0');
  z_stream stream = {};
  ASSERT_EQ(inflateInit2(&stream, 15 + 16), Z_OK);
  stream.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(zipped.data()));
  stream.avail_in = static_cast<uInt>(zipped.size());
  stream.next_out = reinterpret_cast<Bytef*>(back.data());
  stream.avail_out = static_cast<uInt>(back.size());
  EXPECT_EQ(inflate(&stream, Z_FINISH), Z_STREAM_END);
  back.resize(stream.total_out);
  inflateEnd(&stream);
  EXPECT_EQ(back, text);
}

}  // namespace
}  // namespace vrambroker
