// SPDX-License-Identifier: Apache-2.0
//
// Units: the kubelet's names for shares of a device's memory.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "allocator/base/bytes.h"
#include "deploy/kubernetes/units.h"

namespace vrambroker::kubernetes {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

std::vector<std::string> Ids(const std::string& device, const std::vector<uint32_t>& numbers) {
  std::vector<std::string> ids;
  for (const uint32_t number : numbers) ids.push_back(UnitId(device, number));
  return ids;
}

std::vector<std::string> operator+(std::vector<std::string> a, const std::vector<std::string>& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

TEST(KubernetesUnitsTest, IdsAreReadAsTheyAreWritten) {
  EXPECT_EQ(UnitId("GPU-7c3e", 12), "GPU-7c3e::12");
  const absl::StatusOr<DeviceUnits> units = ParseUnitIds({"MIG-a::b::3", "MIG-a::b::0"});
  ASSERT_TRUE(units.ok()) << units.status();
  EXPECT_EQ(units->device, "MIG-a::b");
  EXPECT_THAT(units->numbers, ElementsAre(0, 3));
}

TEST(KubernetesUnitsTest, WhatIsNoIdIsRefused) {
  for (const std::string id : {"", "GPU-1", "::3", "GPU-1::", "GPU-1::x", "GPU-1::-1", "GPU-1::+1", "GPU-1::01",
                               "GPU-1:: 1", "GPU-1::4294967296"}) {
    EXPECT_TRUE(absl::IsInvalidArgument(ParseUnitIds({"GPU-1::0", id}).status())) << id;
  }
  EXPECT_TRUE(absl::IsInvalidArgument(ParseUnitIds({}).status()));
}

TEST(KubernetesUnitsTest, UnitsOfTwoDevicesAreRefusedWithAdvice) {
  const absl::Status status = ParseUnitIds(Ids("GPU-1", {0, 1}) + Ids("GPU-2", {0})).status();
  EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("the 3 units are of several devices (GPU-1, GPU-2)"));
  EXPECT_THAT(std::string(status.message()), HasSubstr("--resource-per-device"));
}

// gRPC breaks the connection over a text of some KiB.
TEST(KubernetesUnitsTest, ErrorsRepeatOnlyTheBeginningOfAnId) {
  const std::string device(100000, 'x');
  for (const std::vector<std::string>& ids : std::vector<std::vector<std::string>>{
           {device}, {device + "::0", "GPU-1::0"}, {"GPU-1::0", device + "::0"}, {"GPU-1::" + device}}) {
    const absl::Status status = ParseUnitIds(ids).status();
    EXPECT_FALSE(status.ok());
    EXPECT_LT(status.message().size(), 600u) << status;
  }
  EXPECT_THAT(std::string(ParseUnitIds({"a\nb"}).status().message()), HasSubstr("\"a_b\" is no unit of memory"));
}

TEST(KubernetesUnitsTest, TheFullestDeviceThatSufficesIsChosen) {
  const std::vector<std::string> available = Ids("A", {0, 1, 2, 3, 4}) + Ids("B", {7, 2, 9}) + Ids("C", {0});
  EXPECT_THAT(ChooseUnits(available, {}, 1), ElementsAre("C::0"));
  EXPECT_THAT(ChooseUnits(available, {}, 2), ElementsAre("B::2", "B::7"));
  EXPECT_THAT(ChooseUnits(available, {}, 4), ElementsAre("A::0", "A::1", "A::2", "A::3"));
  EXPECT_THAT(ChooseUnits(available, {}, 6), IsEmpty());
  EXPECT_THAT(ChooseUnits({"nonsense"}, {}, 1), IsEmpty());
}

TEST(KubernetesUnitsTest, RequiredUnitsDecideTheDevice) {
  const std::vector<std::string> available = Ids("A", {0, 1, 2, 3}) + Ids("B", {0, 1});
  EXPECT_THAT(ChooseUnits(available, {"A::3"}, 2), ElementsAre("A::0", "A::3"));
  EXPECT_THAT(ChooseUnits(available, {"B::0"}, 3), IsEmpty());
  EXPECT_THAT(ChooseUnits(available, {"A::0", "B::0"}, 2), IsEmpty());
  EXPECT_THAT(ChooseUnits(available, {"A::0", "A::1"}, 1), IsEmpty());
}

TEST(KubernetesUnitsTest, UnitsAreWrittenAsRangesThatFit) {
  EXPECT_EQ(FormatUnits({0, 1, 2, 3, 7, 12, 13}, 128), "0-3,7,12-13");
  EXPECT_THAT(ParseUnits("0-3,7,12-13"), ElementsAre(0, 1, 2, 3, 7, 12, 13));
  EXPECT_EQ(FormatUnits({}, 128), "");
  std::set<uint32_t> scattered;
  for (uint32_t number = 0; number < 1000; number += 2) scattered.insert(number);
  const std::string text = FormatUnits(scattered, 128);
  EXPECT_LE(text.size(), 128);
  EXPECT_GT(text.size(), 120);
  for (const uint32_t number : ParseUnits(text)) EXPECT_TRUE(scattered.contains(number)) << number;
}

TEST(KubernetesUnitsTest, WhatIsWrongInALabelIsLeftOut) {
  EXPECT_THAT(ParseUnits("x,3,-,4-,5-x,9-7"), ElementsAre(3, 4));
  EXPECT_LE(ParseUnits("0-4294967295").size(), kMostUnits + 1);
}

TEST(KubernetesUnitsTest, TheResourceIsNamedAfterTheUnit) {
  EXPECT_EQ(ResourceName(256_MiB), "vrambroker.dev/memory-256mi");
  EXPECT_EQ(ResourceName(1_GiB), "vrambroker.dev/memory-1gi");
  EXPECT_EQ(ResourceName(1536_MiB), "vrambroker.dev/memory-1536mi");
  for (const uint64_t unit : {1_MiB, 256_MiB, 1_GiB}) {
    EXPECT_TRUE(CheckUnitBytes(unit).ok()) << unit;
    EXPECT_TRUE(CheckResourceName(ResourceName(unit)).ok()) << unit;
  }
  for (const uint64_t unit : {0_MiB, 1000 * 1_KiB, 1_MiB + 1}) EXPECT_FALSE(CheckUnitBytes(unit).ok()) << unit;
}

TEST(KubernetesUnitsTest, NamesAreCheckedAsKubernetesDoes) {
  for (const std::string name : {"a/b", "example.com/Memory_1.x", "a-b.c/9"}) {
    EXPECT_TRUE(CheckResourceName(name).ok()) << name;
  }
  for (const std::string name : {"", "memory", "/memory", "a/", "A.com/b", "-a/b", "a..b/c", "a/b/c", "a/-b", "a/b-",
                                 "a/b c", "kubernetes.io/memory", "x.kubernetes.io/memory"}) {
    EXPECT_FALSE(CheckResourceName(name).ok()) << name;
  }
  EXPECT_FALSE(CheckResourceName("a/" + std::string(64, 'b')).ok());
}

}  // namespace
}  // namespace vrambroker::kubernetes
