// SPDX-License-Identifier: Apache-2.0
#include "client/connection/connection.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

namespace vrambroker::client_internal {
namespace {

using ::testing::HasSubstr;

TEST(FromGrpcTest, NoErrorIsWithoutWords) {
  const absl::Status unknown = FromGrpc(grpc::Status(grpc::StatusCode::UNIMPLEMENTED, ""));
  EXPECT_TRUE(absl::IsUnimplemented(unknown));
  EXPECT_THAT(std::string(unknown.message()), HasSubstr("does not know this call, since it is of an earlier version"));
  EXPECT_EQ(FromGrpc(grpc::Status(grpc::StatusCode::INTERNAL, "")).message(), "the daemon has given no reason");
  EXPECT_EQ(FromGrpc(grpc::Status(grpc::StatusCode::UNIMPLEMENTED, "its words")).message(), "its words");
  EXPECT_TRUE(FromGrpc(grpc::Status::OK).ok());
}

TEST(ExplainClosedTest, OnlyWhatGrpcSaysOfAClosedConnection) {
  const absl::Status closed = ExplainClosed(absl::UnavailableError("Transport closed"));
  EXPECT_TRUE(absl::IsUnavailable(closed));
  EXPECT_THAT(std::string(closed.message()), HasSubstr("(Transport closed): this user has as many connections"));
  EXPECT_EQ(ExplainClosed(absl::UnavailableError("the daemon stops")).message(), "the daemon stops");
  EXPECT_EQ(ExplainClosed(absl::InternalError("Socket closed")).message(), "Socket closed");
}

}  // namespace
}  // namespace vrambroker::client_internal
