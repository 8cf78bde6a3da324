// SPDX-License-Identifier: Apache-2.0
#include "server/rpc/http2_frames.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/support/http2_frame.h"

namespace vrambroker {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing_support::Http2FrameText;
using testing_support::kHttp2Preface;

// Reads `all` in pieces of `piece` bytes, and returns frames as "type/flags/stream/bytes". Expects all bytes to be
// passed on.
std::vector<std::string> Read(Http2Frames& frames, const absl::string_view all, size_t piece) {
  std::vector<std::string> found;
  std::string passed;
  absl::string_view bytes = all;
  for (; !bytes.empty(); bytes.remove_prefix(std::min(piece, bytes.size()))) {
    EXPECT_TRUE(frames
                    .Read(bytes.substr(0, piece), passed,
                          [&](const Http2Frame& frame) {
                            found.push_back(absl::StrCat(static_cast<int>(frame.type), "/", frame.flags, "/",
                                                         frame.stream, "/", frame.bytes));
                            return absl::OkStatus();
                          })
                    .ok());
  }
  EXPECT_EQ(passed, all);
  return found;
}

TEST(Http2FramesTest, InWhateverPiecesTheyCome) {
  const std::string bytes =
      absl::StrCat(kHttp2Preface, Http2FrameText(4, 0, 0, ""),
                   Http2FrameText(1, 5, 0x7fffffff, std::string(70'000, 'h')), Http2FrameText(0, 1, 258, "x"),
                   Http2FrameText(200, 0, 3, std::string(9, '\0')), Http2FrameText(3, 0, 0x80000003, "1234"));
  for (const size_t piece : {1UL, 2UL, 7UL, 23UL, 24UL, 25UL, 33UL, 1000UL, bytes.size()}) {
    Http2Frames frames(Http2Frames::From::kClient);
    EXPECT_THAT(Read(frames, bytes, piece),
                ElementsAre("4/0/0/0", "1/5/2147483647/70000", "0/1/258/1", "200/0/3/9", "3/0/3/4"))
        << piece;
  }
}

TEST(Http2FramesTest, AServerHasNoPreface) {
  Http2Frames frames(Http2Frames::From::kServer);
  EXPECT_FALSE(frames.greeted());
  EXPECT_THAT(Read(frames, Http2FrameText(4, 1, 0, ""), 4), ElementsAre("4/1/0/0"));
  EXPECT_TRUE(frames.greeted());
}

TEST(Http2FramesTest, AClientHasGreetedWithItsFirstFrame) {
  Http2Frames frames(Http2Frames::From::kClient);
  EXPECT_THAT(Read(frames, kHttp2Preface, 10), ElementsAre());
  EXPECT_FALSE(frames.greeted());
  EXPECT_THAT(Read(frames, Http2FrameText(4, 0, 0, "settings"), 10), ElementsAre("4/0/0/8"));
  EXPECT_TRUE(frames.greeted());
}

TEST(Http2FramesTest, AnotherProtocolIsRefusedAtItsFirstWrongByte) {
  for (const absl::string_view text : {"GET / HTTP/1.1\r\n", "PRI * HTTP/2.1", "\x16\x03"}) {
    Http2Frames frames(Http2Frames::From::kClient);
    std::string passed;
    const absl::Status status = frames.Read(text, passed, [](const Http2Frame&) { return absl::OkStatus(); });
    EXPECT_TRUE(absl::IsInvalidArgument(status));
    EXPECT_THAT(std::string(status.message()), HasSubstr("does not speak HTTP/2"));
  }
}

TEST(Http2FramesTest, AnErrorOfTheCallerEndsIt) {
  Http2Frames frames(Http2Frames::From::kServer);
  int seen = 0;
  const std::string two = absl::StrCat(Http2FrameText(0, 0, 1, "a"), Http2FrameText(0, 0, 1, "b"));
  std::string passed;
  EXPECT_TRUE(absl::IsCancelled(frames.Read(two, passed, [&](const Http2Frame&) {
    ++seen;
    return absl::CancelledError();
  })));
  EXPECT_EQ(seen, 1);
  EXPECT_EQ(passed, "");
}

// RFC 7541, section C.2.3, has this header as its example.
TEST(Http2FramesTest, AHeaderIsNeverIndexed) {
  EXPECT_EQ(Http2Header("password", "secret"), "\x10\x08password\x06secret");
}

TEST(Http2FramesTest, EachStreamThatBeginsGetsTheHeader) {
  constexpr uint8_t kSettings = 4;
  constexpr uint8_t kHeaders = 1;
  constexpr uint8_t kContinuation = 9;
  const std::string added = Http2Header("who", "me");
  const auto room = [&](uint32_t stream) { return Http2FrameText(kContinuation, 4, stream, added); };
  const std::string settings = Http2FrameText(kSettings, 4, 0, "");
  const std::string data = Http2FrameText(0, 5, 1, std::string(300, 'd'));
  const std::string trailers = Http2FrameText(kHeaders, 5, 1, "trailers");
  const std::string bytes = absl::StrCat(
      kHttp2Preface, settings, Http2FrameText(kHeaders, 4 | 1 | 8 | 0x20, 1, "padded, with a priority"), data,
      // The second call's headers need several frames; the third call's headers are empty.
      Http2FrameText(kHeaders, 1, 3, "h1"), Http2FrameText(kContinuation, 0, 3, "h2"),
      Http2FrameText(kContinuation, 4, 3, "h3"), Http2FrameText(kHeaders, 4, 0x7ffffffe, ""), trailers);
  const std::string expected =
      absl::StrCat(kHttp2Preface, settings, Http2FrameText(kHeaders, 1 | 8 | 0x20, 1, "padded, with a priority"),
                   room(1), data, Http2FrameText(kHeaders, 1, 3, "h1"), Http2FrameText(kContinuation, 0, 3, "h2"),
                   Http2FrameText(kContinuation, 0, 3, "h3"), room(3), Http2FrameText(kHeaders, 0, 0x7ffffffe, ""),
                   room(0x7ffffffe), trailers);
  for (const size_t piece : {1UL, 5UL, 24UL, 40UL, bytes.size()}) {
    Http2Frames frames(Http2Frames::From::kClient, added);
    std::string passed;
    for (size_t at = 0; at < bytes.size(); at += piece) {
      EXPECT_TRUE(frames
                      .Read(absl::string_view(bytes).substr(at, piece), passed,
                            [](const Http2Frame&) { return absl::OkStatus(); })
                      .ok());
    }
    EXPECT_EQ(passed, expected) << piece;
  }
}

}  // namespace
}  // namespace vrambroker
