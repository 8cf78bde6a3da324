// SPDX-License-Identifier: Apache-2.0
#include "server/sessions/named_devices.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "allocator/base/bytes.h"
#include "allocator/device/host_device.h"

namespace vrambroker {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::StartsWith;

class NamedDevicesTest : public ::testing::Test {
 protected:
  NamedDevicesTest() {
    for (int ordinal = 0; ordinal < 3; ++ordinal) {
      owned_.push_back(std::make_unique<SegmentPool>(MakeHostDevice(ordinal, 64_MiB), 64_MiB, &next_segment_));
      pools_.push_back(owned_.back().get());
    }
  }

  std::vector<uint32_t> Named(const std::vector<std::string>& names) {
    const absl::StatusOr<std::vector<uint32_t>> devices = NamedDevices(names, pools_);
    EXPECT_TRUE(devices.ok()) << devices.status();
    return devices.value_or(std::vector<uint32_t>());
  }
  std::string Why(const std::vector<std::string>& names, absl::StatusCode code) {
    const absl::Status status = NamedDevices(names, pools_).status();
    EXPECT_EQ(status.code(), code) << status;
    EXPECT_THAT(std::string(status.message()), StartsWith("devices: "));
    return std::string(status.message());
  }

  std::atomic<uint64_t> next_segment_ = 1;
  std::vector<std::unique_ptr<SegmentPool>> owned_;
  std::vector<SegmentPool*> pools_;
};

TEST_F(NamedDevicesTest, OrdinalsAndUuidsAreTakenEachDeviceOnce) {
  EXPECT_THAT(Named({}), IsEmpty());
  EXPECT_THAT(Named({"2", "HOST-0", "02", "0", "HOST-2"}), ElementsAre(2, 0));
}

TEST_F(NamedDevicesTest, DevicesThatThereAreNotAreNamedWithThoseThatThereAre) {
  for (const std::string name : {"3", "99999999999999999999", "HOST-3", "host-0", "GPU-1b2c3d4e"}) {
    EXPECT_THAT(Why({"0", name}, absl::StatusCode::kNotFound),
                HasSubstr("no device " + name + "; the daemon has 0 (HOST-0), 1 (HOST-1), 2 (HOST-2)"));
  }
}

TEST_F(NamedDevicesTest, WhatIsNeitherIsRefused) {
  for (const std::string name : {"", " 0", "gpu", "0,1", "HOST_0", "a\nb-c", "HOST-\xc3\xa4"}) {
    Why({name}, absl::StatusCode::kInvalidArgument);
  }
  EXPECT_THAT(Why({"a\nb"}, absl::StatusCode::kInvalidArgument), HasSubstr("'a\\nb' is neither"));
  Why({std::string(65, '0')}, absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(Named(std::vector<std::string>(64, "1")), ElementsAre(1));
  EXPECT_THAT(Why(std::vector<std::string>(65, "1"), absl::StatusCode::kInvalidArgument), HasSubstr("at most 64"));
}

}  // namespace
}  // namespace vrambroker
