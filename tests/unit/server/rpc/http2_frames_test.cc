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

// As "type/flags/stream/bytes", read in pieces of `piece` bytes.
std::vector<std::string> Read(Http2Frames& frames, absl::string_view bytes, size_t piece) {
  std::vector<std::string> found;
  for (; !bytes.empty(); bytes.remove_prefix(std::min(piece, bytes.size()))) {
    EXPECT_TRUE(frames
                    .Read(bytes.substr(0, piece),
                          [&](const Http2Frame& frame) {
                            found.push_back(absl::StrCat(static_cast<int>(frame.type), "/", frame.flags, "/",
                                                         frame.stream, "/", frame.bytes));
                            return absl::OkStatus();
                          })
                    .ok());
  }
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
    const absl::Status status = frames.Read(text, [](const Http2Frame&) { return absl::OkStatus(); });
    EXPECT_TRUE(absl::IsInvalidArgument(status));
    EXPECT_THAT(std::string(status.message()), HasSubstr("does not speak HTTP/2"));
  }
}

TEST(Http2FramesTest, AnErrorOfTheCallerEndsIt) {
  Http2Frames frames(Http2Frames::From::kServer);
  int seen = 0;
  const std::string two = absl::StrCat(Http2FrameText(0, 0, 1, "a"), Http2FrameText(0, 0, 1, "b"));
  EXPECT_TRUE(absl::IsCancelled(frames.Read(two, [&](const Http2Frame&) {
    ++seen;
    return absl::CancelledError();
  })));
  EXPECT_EQ(seen, 1);
}

}  // namespace
}  // namespace vrambroker
