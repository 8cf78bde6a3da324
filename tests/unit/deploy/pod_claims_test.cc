// SPDX-License-Identifier: Apache-2.0
//
// PodClaims: claims and the kubelet's list of pods, compared.
#include "deploy/kubernetes/pod_claims.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <set>
#include <string>
#include <vector>

#include "deploy/kubernetes/labels.h"

namespace vrambroker::kubernetes {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::SizeIs;

constexpr char kResource[] = "vrambroker.dev/memory-256mi";
constexpr auto kWhile = PodClaims::kUnlistedFor;

UnitClaim Claim(const std::string& name, const std::string& units) {
  return {.name = name, .labels = {{kResourceLabel, kResource}, {kDeviceLabel, "GPU-1"}, {kUnitsLabel, units}}};
}

UnitClaim OfPod(UnitClaim claim, const std::string& pod) {
  claim.labels[kNamespaceLabel] = "default";
  claim.labels[kPodLabel] = pod;
  return claim;
}

ContainerUnits Container(const std::string& pod, const std::set<uint32_t>& numbers) {
  return {.pod_namespace = "default",
          .pod = pod,
          .container = "main",
          .resource = kResource,
          .units = {.device = "GPU-1", .numbers = numbers}};
}

class PodClaimsTest : public ::testing::Test {
 protected:
  ClaimChanges Compare(const std::vector<UnitClaim>& claims, const std::vector<ContainerUnits>& containers,
                       std::chrono::seconds after = std::chrono::seconds(0)) {
    return pod_claims_.Compare(claims, containers, start_ + after);
  }

  PodClaims pod_claims_;
  const PodClaims::Clock::time_point start_ = PodClaims::Clock::now();
};

TEST_F(PodClaimsTest, AClaimTakesTheNameOfItsPodOnce) {
  const UnitClaim claim = Claim("a", "0-1");
  const ClaimChanges changes = Compare({claim}, {Container("trainer", {0, 1})});
  ASSERT_THAT(changes.label, SizeIs(1));
  EXPECT_EQ(changes.label[0].name, "a");
  std::map<std::string, std::string> labels = claim.labels;
  labels[kNamespaceLabel] = "default";
  labels[kPodLabel] = "trainer";
  labels[kContainerLabel] = "main";
  EXPECT_EQ(changes.label[0].labels, labels);
  EXPECT_THAT(changes.drain, IsEmpty());

  const ClaimChanges again = Compare(changes.label, {Container("trainer", {0, 1})}, 1000 * kWhile);
  EXPECT_THAT(again.label, IsEmpty());
  EXPECT_THAT(again.drain, IsEmpty());
}

TEST_F(PodClaimsTest, AnUnlistedClaimIsDrainedAfterAWhile) {
  const std::vector<UnitClaim> claims = {OfPod(Claim("a", "0-1"), "trainer"), Claim("b", "4")};
  EXPECT_THAT(Compare(claims, {}).drain, IsEmpty());
  EXPECT_THAT(Compare(claims, {}, kWhile - std::chrono::seconds(1)).drain, IsEmpty());
  EXPECT_THAT(Compare(claims, {}, kWhile).drain, ElementsAre("a", "b"));
}

TEST_F(PodClaimsTest, AClaimThatIsListedAgainIsUnlistedAnew) {
  const std::vector<UnitClaim> claims = {OfPod(Claim("a", "0-1"), "trainer")};
  Compare(claims, {});
  EXPECT_THAT(Compare(claims, {Container("trainer", {0, 1})}, kWhile).drain, IsEmpty());
  EXPECT_THAT(Compare(claims, {}, kWhile + std::chrono::seconds(1)).drain, IsEmpty());
  EXPECT_THAT(Compare(claims, {}, 2 * kWhile + std::chrono::seconds(1)).drain, ElementsAre("a"));
}

TEST_F(PodClaimsTest, UnitsThatAnotherPodHasNowFreeTheClaimAtOnce) {
  const ClaimChanges changes =
      Compare({OfPod(Claim("old", "0-3"), "trainer"), Claim("new", "2-5")}, {Container("next", {2, 3, 4, 5})});
  EXPECT_THAT(changes.drain, ElementsAre("old"));
  ASSERT_THAT(changes.label, SizeIs(1));
  EXPECT_EQ(changes.label[0].name, "new");
}

TEST_F(PodClaimsTest, PodsOfTheSameNameInOtherNamespacesAreOthers) {
  ContainerUnits other = Container("trainer", {0});
  other.pod_namespace = "team";
  EXPECT_THAT(Compare({OfPod(Claim("a", "0"), "trainer")}, {other}).drain, ElementsAre("a"));
}

// The kubelet asks for an init container's units and for those of the containers after it before it starts any of them.
TEST_F(PodClaimsTest, AnInitContainersClaimIsKeptWithItsPod) {
  std::vector<UnitClaim> claims = {Claim("init", "0-7"), Claim("main", "3,5")};
  const ClaimChanges changes = Compare(claims, {Container("trainer", {3, 5})});
  EXPECT_THAT(changes.drain, IsEmpty());
  ASSERT_THAT(changes.label, SizeIs(2));
  EXPECT_EQ(changes.label[0].labels.at(kPodLabel), "trainer");
  EXPECT_FALSE(changes.label[0].labels.contains(kContainerLabel));
  EXPECT_EQ(changes.label[1].labels.at(kContainerLabel), "main");

  EXPECT_THAT(Compare(changes.label, {Container("trainer", {3, 5})}, 2 * kWhile).drain, IsEmpty());
  EXPECT_THAT(Compare(changes.label, {}, 3 * kWhile).drain, IsEmpty());
  EXPECT_THAT(Compare(changes.label, {}, 4 * kWhile).drain, ElementsAre("init", "main"));
}

TEST_F(PodClaimsTest, UnitsOfAnotherResourceOrDeviceAreOthers) {
  ContainerUnits resource = Container("trainer", {0});
  resource.resource = "vrambroker.dev/memory-1gi";
  ContainerUnits device = Container("trainer", {0});
  device.units.device = "GPU-2";
  const std::vector<UnitClaim> claims = {Claim("a", "0")};
  Compare(claims, {resource, device});
  EXPECT_THAT(Compare(claims, {resource, device}, kWhile).drain, ElementsAre("a"));
}

TEST_F(PodClaimsTest, LongNamesAreCutAsLabelsAre) {
  const std::string pod(253, 'p');
  const std::vector<ContainerUnits> containers = {Container(pod, {0})};
  const ClaimChanges changes = Compare({Claim("a", "0")}, containers);
  ASSERT_THAT(changes.label, SizeIs(1));
  EXPECT_EQ(changes.label[0].labels.at(kPodLabel), pod.substr(0, 128));
  EXPECT_THAT(Compare(changes.label, containers, kWhile).drain, IsEmpty());
}

TEST_F(PodClaimsTest, AClaimWithoutReadableUnitsIsOfNoPod) {
  const std::vector<UnitClaim> claims = {Claim("a", "nonsense"),
                                         {.name = "b", .labels = {{kResourceLabel, kResource}}}};
  Compare(claims, {Container("trainer", {0})});
  EXPECT_THAT(Compare(claims, {Container("trainer", {0})}, kWhile).drain, ElementsAre("a", "b"));
}

}  // namespace
}  // namespace vrambroker::kubernetes
