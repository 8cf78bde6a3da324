// SPDX-License-Identifier: Apache-2.0
#include "client/session/open_device.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "absl/status/status.h"

namespace vrambroker::client_internal {
namespace {

using ::testing::HasSubstr;

TEST(OpenDeviceTest, AHostDeviceNeedsNoDriver) {
  const auto device = OpenDevice({.ordinal = 1, .uuid = "HOST-1", .kind = "host"});
  ASSERT_TRUE(device.ok()) << device.status();
  EXPECT_EQ((*device)->properties().kind, "host");
}

// A daemon of a later version may have devices of a kind that has no name here.
TEST(OpenDeviceTest, AKindOfALaterVersionIsRefused) {
  const absl::Status status = OpenDevice({.ordinal = 2, .uuid = "NEW-2", .kind = "unspecified"}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("device 2 (NEW-2) is of a kind that this client library does not "
                        "know (unspecified): update the library"));
}

}  // namespace
}  // namespace vrambroker::client_internal
