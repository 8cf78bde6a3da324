// SPDX-License-Identifier: Apache-2.0
//
// PodClaims: a comparison of claims with the kubelet's list of pods.
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
constexpr std::chrono::seconds kSecond(1);

// Returns an idle claim.
UnitClaim Claim(const std::string& name, const std::string& units) {
  return {.name = name,
          .labels = {{kResourceLabel, kResource}, {kDeviceLabel, "GPU-1"}, {kUnitsLabel, units}},
          .is_idle = true};
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
  // Compares often enough for a drain, but not for long enough.
  void CompareOften(const std::vector<UnitClaim>& claims, const std::vector<ContainerUnits>& containers,
                    std::chrono::seconds after = std::chrono::seconds(0)) {
    for (int i = 0; i < PodClaims::kUnlistedTimes; ++i) {
      EXPECT_THAT(Compare(claims, containers, after).drain, IsEmpty());
    }
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

TEST_F(PodClaimsTest, AClaimIsDrainedWhenItsPodIsListedNoMore) {
  const std::vector<UnitClaim> claims = {OfPod(Claim("a", "0-1"), "trainer"), OfPod(Claim("b", "4"), "server")};
  CompareOften(claims, {});
  EXPECT_THAT(Compare(claims, {}, kWhile - kSecond).drain, IsEmpty());
  EXPECT_THAT(Compare(claims, {}, kWhile).drain, ElementsAre("a", "b"));
}

// A pause with a start of the kubelet leaves few lists.
TEST_F(PodClaimsTest, FewListsDoNotDrain) {
  const std::vector<UnitClaim> claims = {OfPod(Claim("a", "0-1"), "trainer")};
  EXPECT_THAT(Compare(claims, {}).drain, IsEmpty());
  EXPECT_THAT(Compare(claims, {}, 100 * kWhile).drain, IsEmpty());
  EXPECT_THAT(Compare(claims, {}, 100 * kWhile + kSecond).drain, ElementsAre("a"));
}

TEST_F(PodClaimsTest, AClaimThatIsListedAgainIsUnlistedAnew) {
  const std::vector<UnitClaim> claims = {OfPod(Claim("a", "0-1"), "trainer")};
  CompareOften(claims, {});
  EXPECT_THAT(Compare(claims, {Container("trainer", {0, 1})}, kWhile).drain, IsEmpty());
  CompareOften(claims, {}, kWhile + kSecond);
  EXPECT_THAT(Compare(claims, {}, 2 * kWhile + kSecond).drain, ElementsAre("a"));
}

// A claim in use still has its processes, even if the kubelet has forgotten the pod.
TEST_F(PodClaimsTest, AClaimInUseIsNotDrained) {
  std::vector<UnitClaim> claims = {OfPod(Claim("a", "0-1"), "trainer"), OfPod(Claim("b", "2-3"), "trainer")};
  for (UnitClaim& claim : claims) claim.is_idle = false;
  const std::vector<ContainerUnits> other = {Container("next", {3})};
  CompareOften(claims, other);
  EXPECT_THAT(Compare(claims, other, 1000 * kWhile).drain, IsEmpty());
  for (UnitClaim& claim : claims) claim.is_idle = true;
  EXPECT_THAT(Compare(claims, other, 1000 * kWhile).drain, ElementsAre("a", "b"));
}

// The claim may belong to an init container, for example. The container's image may take minutes to arrive.
TEST_F(PodClaimsTest, AClaimThatNoListHasShownIsKeptForLong) {
  const std::vector<UnitClaim> claims = {Claim("a", "0-1")};
  CompareOften(claims, {});
  EXPECT_THAT(Compare(claims, {}, PodClaims::kNeverListedFor - kSecond).drain, IsEmpty());
  EXPECT_THAT(Compare(claims, {}, PodClaims::kNeverListedFor).drain, ElementsAre("a"));
}

// A StatefulSet makes pods again under the same name.
TEST_F(PodClaimsTest, AClaimGoesWhenItsUnitsAreGivenAgain) {
  pod_claims_.NoteCreated("old", start_);
  pod_claims_.NoteCreated("new", start_ + PodClaims::kLongAdmission + kSecond);
  const std::vector<UnitClaim> claims = {OfPod(Claim("old", "0-3"), "trainer"), Claim("new", "3-6")};
  EXPECT_THAT(Compare({claims[0]}, {Container("trainer", {0, 1, 2, 3})}).drain, IsEmpty());
  const ClaimChanges changes = Compare(claims, {Container("trainer", {3, 4, 5, 6})}, 2 * PodClaims::kLongAdmission);
  EXPECT_THAT(changes.drain, ElementsAre("old"));
  ASSERT_THAT(changes.label, SizeIs(1));
  EXPECT_EQ(changes.label[0].name, "new");
}

// The change comes at once, because the old pod had already been listed.
TEST_F(PodClaimsTest, AClaimOfAListedPodGoesWhenItsUnitsAreGivenAgain) {
  pod_claims_.NoteCreated("old", start_);
  UnitClaim old_claim = OfPod(Claim("old", "0"), "trainer");
  old_claim.is_idle = false;
  pod_claims_.NoteCreated("new", start_ + PodClaims::kAdmission + kSecond);
  const std::vector<ContainerUnits> containers = {Container("trainer", {0})};
  const ClaimChanges changes = Compare({old_claim, Claim("new", "0")}, containers, kWhile);
  EXPECT_THAT(changes.drain, IsEmpty());
  ASSERT_THAT(changes.label, SizeIs(1));
  // The end of the old claim's last process is still noticed afterwards.
  old_claim.is_idle = true;
  EXPECT_THAT(Compare({old_claim, changes.label[0]}, containers, 2 * kWhile).drain, ElementsAre("old"));
}

TEST_F(PodClaimsTest, AClaimOfBeforeTheStartGoesWhenItsUnitsAreGivenAgain) {
  pod_claims_.NoteCreated("new", start_);
  const std::vector<UnitClaim> claims = {OfPod(Claim("old", "0-3"), "trainer"), Claim("other", "7"), Claim("new", "0")};
  EXPECT_THAT(Compare(claims, {Container("trainer", {0})}).drain, ElementsAre("old"));
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

// The kubelet asks for the units of an init container and of the later containers before starting any container.
TEST_F(PodClaimsTest, AnInitContainersClaimIsKeptWithItsPod) {
  pod_claims_.NoteCreated("init", start_);
  pod_claims_.NoteCreated("main", start_ + kSecond);
  const std::vector<UnitClaim> claims = {Claim("init", "0-7"), Claim("main", "3,5")};
  const std::vector<ContainerUnits> containers = {Container("trainer", {3, 5})};
  const ClaimChanges changes = Compare(claims, containers);
  EXPECT_THAT(changes.drain, IsEmpty());
  ASSERT_THAT(changes.label, SizeIs(2));
  EXPECT_EQ(changes.label[0].labels.at(kPodLabel), "trainer");
  EXPECT_FALSE(changes.label[0].labels.contains(kContainerLabel));
  EXPECT_EQ(changes.label[1].labels.at(kContainerLabel), "main");

  CompareOften(changes.label, containers, 100 * kWhile);
  CompareOften(changes.label, {}, 101 * kWhile);
  EXPECT_THAT(Compare(changes.label, {}, 102 * kWhile).drain, ElementsAre("init", "main"));
}

TEST_F(PodClaimsTest, UnitsOfAnotherResourceOrDeviceAreOthers) {
  ContainerUnits resource = Container("trainer", {0});
  resource.resource = "vrambroker.dev/memory-1gi";
  ContainerUnits device = Container("trainer", {0});
  device.units.device = "GPU-2";
  const std::vector<UnitClaim> claims = {OfPod(Claim("a", "0"), "trainer")};
  CompareOften(claims, {resource, device});
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
  const std::vector<UnitClaim> claims = {
      OfPod(Claim("a", "nonsense"), "trainer"),
      {.name = "b", .labels = {{kResourceLabel, kResource}, {kPodLabel, "trainer"}}, .is_idle = true}};
  CompareOften(claims, {Container("trainer", {0})});
  EXPECT_THAT(Compare(claims, {Container("trainer", {0})}, kWhile).drain, ElementsAre("a", "b"));
}

}  // namespace
}  // namespace vrambroker::kubernetes
