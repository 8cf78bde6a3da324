// SPDX-License-Identifier: Apache-2.0
#include "server/rpc/stream_guard.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <string>

#include "absl/status/status.h"

namespace vrambroker {
namespace {

using std::chrono::seconds;
using ::testing::HasSubstr;

constexpr SteadyTime kAttack = SteadyTime(seconds(1000));
constexpr auto kMostResets = static_cast<size_t>(StreamGuard::kProcess.resets);
constexpr StreamGuard::Who kMe = {.pid = 7, .user = 1};
constexpr StreamGuard::Who kSibling = {.pid = 8, .user = 1};
constexpr StreamGuard::Who kStranger = {.pid = 9, .user = 2};

Http2Frame Frame(Http2FrameType type, uint32_t stream, uint8_t flags = 0, uint32_t bytes = 10) {
  return {.bytes = bytes, .type = type, .flags = flags, .stream = stream};
}

TEST(StreamBookTest, StreamsBeginAndEnd) {
  StreamBook book;
  for (const uint32_t stream : {1, 3, 5, 7}) {
    EXPECT_EQ(*book.FromClient(Frame(Http2FrameType::kHeaders, stream)), StreamEvent::kBegan);
  }
  EXPECT_EQ(book.open(), 4);
  EXPECT_EQ(*book.FromClient(Frame(Http2FrameType::kData, 1, Http2Frame::kEndStream)), StreamEvent::kNone)
      << "the answer is to come";
  EXPECT_EQ(book.FromServer(Frame(Http2FrameType::kHeaders, 1)), StreamEvent::kNone);
  EXPECT_EQ(book.FromServer(Frame(Http2FrameType::kData, 1)), StreamEvent::kNone);
  EXPECT_EQ(book.FromServer(Frame(Http2FrameType::kHeaders, 1, Http2Frame::kEndStream)), StreamEvent::kCompleted);
  EXPECT_EQ(*book.FromClient(Frame(Http2FrameType::kRstStream, 3)), StreamEvent::kReset);
  EXPECT_EQ(book.FromServer(Frame(Http2FrameType::kRstStream, 5)), StreamEvent::kReset) << "the client made it do that";
  EXPECT_EQ(book.FromServer(Frame(Http2FrameType::kData, 7, Http2Frame::kEndStream)), StreamEvent::kCompleted);
  EXPECT_EQ(book.open(), 0);
}

TEST(StreamBookTest, AStreamEndsOnceAndNeverComesBack) {
  StreamBook book;
  EXPECT_EQ(*book.FromClient(Frame(Http2FrameType::kHeaders, 3)), StreamEvent::kBegan);
  EXPECT_EQ(book.FromServer(Frame(Http2FrameType::kHeaders, 3, Http2Frame::kEndStream)), StreamEvent::kCompleted);
  EXPECT_EQ(book.FromServer(Frame(Http2FrameType::kRstStream, 3)), StreamEvent::kNone);
  EXPECT_EQ(*book.FromClient(Frame(Http2FrameType::kRstStream, 3)), StreamEvent::kNone);
  EXPECT_EQ(*book.FromClient(Frame(Http2FrameType::kHeaders, 3)), StreamEvent::kNone) << "trailers";
  EXPECT_EQ(*book.FromClient(Frame(Http2FrameType::kHeaders, 1)), StreamEvent::kNone);
  EXPECT_EQ(book.open(), 0);
}

// The book would never count streams with lower numbers.
TEST(StreamBookTest, AStreamWithAServersNumberIsRefused) {
  StreamBook book;
  for (const uint32_t stream : {0u, 2u, 0x7ffffffeu}) {
    for (const Http2FrameType type : {Http2FrameType::kHeaders, Http2FrameType::kContinuation}) {
      EXPECT_TRUE(absl::IsInvalidArgument(book.FromClient(Frame(type, stream)).status())) << stream;
    }
  }
  EXPECT_EQ(*book.FromClient(Frame(Http2FrameType::kHeaders, 1)), StreamEvent::kBegan);
}

TEST(StreamBookTest, HeadersAreBounded) {
  StreamBook book;
  constexpr uint32_t kHalf = StreamBook::kMaxHeaderBytes / 2;
  for (const uint32_t stream : {1, 3}) {
    EXPECT_TRUE(book.FromClient(Frame(Http2FrameType::kHeaders, stream, 0, kHalf)).ok());
    EXPECT_TRUE(book.FromClient(Frame(Http2FrameType::kContinuation, stream, 0, kHalf)).ok());
  }
  const absl::Status status = book.FromClient(Frame(Http2FrameType::kContinuation, 3, 0, 1)).status();
  EXPECT_TRUE(absl::IsInvalidArgument(status));
  EXPECT_THAT(std::string(status.message()), HasSubstr("headers take more than 65536 bytes"));
}

TEST(StreamGuardTest, WhoGivesUpCallsNowAndThenMayStay) {
  StreamGuard guard;
  for (int i = 0; i < 10'000; ++i) {
    EXPECT_TRUE(guard.Began(kMe, 2, kAttack).ok());
    EXPECT_TRUE(guard.Began(kMe, 2, kAttack).ok());
    EXPECT_TRUE(guard.Reset(kMe, 1, kAttack).ok()) << i;
    guard.Completed(kMe);
  }
  EXPECT_TRUE(guard.Reset(kMe, kMostResets - 1, kAttack).ok()) << "all at once, when the program ends";
}

TEST(StreamGuardTest, MoreResetsThanCompletedStreamsAreAnAttack) {
  StreamGuard guard;
  EXPECT_TRUE(guard.Reset(kMe, kMostResets, kAttack).ok());
  EXPECT_TRUE(guard.CheckConnect(kMe, kAttack).ok());
  const absl::Status status = guard.Reset(kMe, 1, kAttack);
  EXPECT_TRUE(absl::IsResourceExhausted(status));
  EXPECT_THAT(std::string(status.message()), HasSubstr("its process gave up more than 1000 calls"));
  EXPECT_FALSE(guard.CheckConnect(kMe, kAttack).ok());
  EXPECT_FALSE(guard.CheckConnect(kMe, kAttack + StreamGuard::kBanTime - seconds(1)).ok());
  EXPECT_TRUE(guard.CheckConnect(kMe, kAttack + StreamGuard::kBanTime).ok());
  EXPECT_TRUE(guard.CheckConnect(kSibling, kAttack).ok());
  EXPECT_TRUE(guard.CheckConnect({.pid = kMe.pid, .user = 2}, kAttack).ok()) << "the number is another process's now";
}

TEST(StreamGuardTest, CompletedStreamsAreNotSavedUp) {
  StreamGuard guard;
  for (int i = 0; i < 10'000; ++i) {
    EXPECT_TRUE(guard.Began(kMe, 1, kAttack).ok());
    guard.Completed(kMe);
  }
  EXPECT_FALSE(guard.Reset(kMe, kMostResets + 1, kAttack).ok());
}

TEST(StreamGuardTest, ResetsAreForgivenWithTime) {
  StreamGuard guard;
  for (int i = 0; i < 10'000; ++i) EXPECT_TRUE(guard.Reset(kMe, 50, kAttack + seconds(i)).ok()) << i;
  EXPECT_FALSE(guard.Reset(kMe, kMostResets + 1, kAttack + seconds(10'000)).ok()) << "all at once";
}

// A user cannot escape by closing connections in time, or by starting a process for each connection.
TEST(StreamGuardTest, AUserWhoseProcessesEachStayBelowTheirBound) {
  StreamGuard guard;
  pid_t pid = 100;
  absl::Status status;
  for (; status.ok() && pid < 200; ++pid) status = guard.Reset({.pid = pid, .user = 1}, kMostResets, kAttack);
  EXPECT_EQ(pid, 100 + 17);
  EXPECT_THAT(std::string(status.message()), HasSubstr("its user gave up more than 16000 calls"));
  EXPECT_FALSE(guard.CheckConnect(kMe, kAttack).ok());
  EXPECT_TRUE(guard.CheckConnect(kStranger, kAttack).ok());
  EXPECT_TRUE(guard.CheckConnect(kMe, kAttack + StreamGuard::kBanTime).ok());
}

TEST(StreamGuardTest, WhoHasDoneLittleIsSparedWhenItsUserIsAboveTheBound) {
  StreamGuard guard;
  absl::Status status;
  for (pid_t pid = 100; status.ok(); ++pid) status = guard.Reset({.pid = pid, .user = 1}, kMostResets, kAttack);
  EXPECT_TRUE(guard.Reset(kMe, 1, kAttack).ok()) << "it gives up a call";
  EXPECT_FALSE(guard.Reset(kMe, 200, kAttack).ok());
}

TEST(StreamGuardTest, OpenStreamsAreBounded) {
  StreamGuard guard;
  EXPECT_TRUE(guard.Began(kStranger, StreamGuard::kMaxOpenOfConnection, kAttack).ok());
  EXPECT_FALSE(guard.Began(kStranger, StreamGuard::kMaxOpenOfConnection + 1, kAttack).ok()) << "of the connection";
  for (size_t i = 0; i < StreamGuard::kProcess.open; ++i) EXPECT_TRUE(guard.Began(kMe, 1, kAttack).ok());
  EXPECT_THAT(std::string(guard.Began(kMe, 1, kAttack).message()), HasSubstr("its process 4097"));
  EXPECT_FALSE(guard.CheckConnect(kMe, kAttack).ok());
  guard.Completed(kMe);
  guard.Completed(kMe);
  EXPECT_TRUE(guard.Began(kMe, 1, kAttack).ok()) << "two have ended";
}

TEST(StreamGuardTest, OpenStreamsOfAUserAreBounded) {
  StreamGuard guard;
  size_t open = 0;
  absl::Status status;
  for (; status.ok() && open < 100'000; ++open) {
    status = guard.Began({.pid = static_cast<pid_t>(open / 1000), .user = 1}, 1, kAttack);
  }
  EXPECT_EQ(open, StreamGuard::kUser.open + 1);
  EXPECT_THAT(std::string(status.message()), HasSubstr("its user 16385"));
  EXPECT_TRUE(guard.Began(kStranger, 1, kAttack).ok());
  // The guard spares processes of the user with few open streams.
  const StreamGuard::Who quiet = {.pid = 5000, .user = 1};
  for (size_t i = 0; i < StreamGuard::kSparedOpen; ++i) EXPECT_TRUE(guard.Began(quiet, 1, kAttack).ok()) << i;
  EXPECT_TRUE(guard.CheckConnect(quiet, kAttack).ok());
  EXPECT_FALSE(guard.Began(quiet, 1, kAttack).ok());
  EXPECT_FALSE(guard.CheckConnect(quiet, kAttack).ok());
}

TEST(StreamGuardTest, NewConnectionsOfAUserAreSpreadOverTime) {
  StreamGuard guard;
  int at_once = 0;
  while (at_once < 100'000 && guard.MayOpen(kMe.user, kAttack)) ++at_once;
  EXPECT_EQ(at_once, StreamGuard::kConnectsAtOnce);
  EXPECT_TRUE(guard.MayOpen(kStranger.user, kAttack));
  int later = 0;
  while (later < 100'000 && guard.MayOpen(kMe.user, kAttack + seconds(1))) ++later;
  EXPECT_EQ(later, StreamGuard::kConnects);
}

// Crowds of other processes do not make the guard forget a ban or a debt.
TEST(StreamGuardTest, WhoHasDoneSomethingIsRemembered) {
  StreamGuard guard;
  const auto crowd = [&](pid_t first) {
    for (pid_t pid = first; pid < first + 200; ++pid) {
      const StreamGuard::Who who = {.pid = pid, .user = static_cast<uid_t>(pid)};
      EXPECT_TRUE(guard.Began(who, 1, kAttack).ok());
      guard.Completed(who);
    }
  };
  const StreamGuard::Who banned = {.pid = 10, .user = 10};
  EXPECT_FALSE(guard.Began(banned, StreamGuard::kMaxOpenOfConnection + 1, kAttack).ok());
  guard.Completed(banned);
  const StreamGuard::Who gives_up = {.pid = 11, .user = 11};
  EXPECT_TRUE(guard.Reset(gives_up, kMostResets, kAttack).ok());
  const StreamGuard::Who connects = {.pid = 12, .user = 12};
  while (guard.MayOpen(connects.user, kAttack)) {
  }
  const StreamGuard::Who has_open = {.pid = 13, .user = 13};
  for (size_t i = 0; i < StreamGuard::kProcess.open; ++i) EXPECT_TRUE(guard.Began(has_open, 1, kAttack).ok());
  crowd(1000);
  crowd(2000);
  EXPECT_FALSE(guard.CheckConnect(banned, kAttack).ok());
  EXPECT_FALSE(guard.Reset(gives_up, 1, kAttack).ok());
  EXPECT_FALSE(guard.MayOpen(connects.user, kAttack));
  EXPECT_FALSE(guard.Began(has_open, 1, kAttack).ok());
}

TEST(StreamGuardTest, TheQuietAreForgotten) {
  StreamGuard guard;
  for (int i = 0; i < 100'000; ++i) {
    const StreamGuard::Who who = {.pid = i, .user = static_cast<uid_t>(i)};
    const SteadyTime now = kAttack + std::chrono::milliseconds(i);
    EXPECT_TRUE(guard.Began(who, 1, now).ok());
    EXPECT_TRUE(guard.Reset(who, 1, now).ok());
    ASSERT_LT(guard.remembered(), 1000U);
  }
}

}  // namespace
}  // namespace vrambroker
