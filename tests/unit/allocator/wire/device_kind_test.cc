// SPDX-License-Identifier: Apache-2.0
#include "allocator/wire/device_kind.h"

#include <gtest/gtest.h>

namespace vrambroker {
namespace {

TEST(DeviceKindTest, NamesAreThoseOfDevices) {
  EXPECT_EQ(KindName(v1::DEVICE_KIND_HOST), "host");
  EXPECT_EQ(KindName(v1::DEVICE_KIND_CUDA), "cuda");
  EXPECT_EQ(KindNamed("host"), v1::DEVICE_KIND_HOST);
  EXPECT_EQ(KindNamed("cuda"), v1::DEVICE_KIND_CUDA);
}

TEST(DeviceKindTest, AnUnknownKindIsNoOtherKind) {
  EXPECT_EQ(KindNamed("third"), v1::DEVICE_KIND_UNSPECIFIED);
  EXPECT_EQ(KindName(static_cast<v1::DeviceKind>(1000)), "unspecified");
}

}  // namespace
}  // namespace vrambroker
