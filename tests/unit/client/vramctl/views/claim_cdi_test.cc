// SPDX-License-Identifier: Apache-2.0
#include "client/vramctl/views/claim_cdi.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>

namespace vrambroker::vramctl {
namespace {

v1::Claim ClaimOf(const std::string& name) {
  v1::Claim claim;
  claim.set_name(name);
  claim.set_state(v1::CLAIM_STATE_ACTIVE);
  claim.set_socket_dir("/run/vrambroker/claims/" + name);
  return claim;
}

TEST(ClaimCdiTest, AContainerGetsTheClaimsDirectoryWhereClientsLook) {
  const auto cdi = ClaimCdi(ClaimOf("slurm-17"));
  ASSERT_TRUE(cdi.ok()) << cdi.status();
  EXPECT_EQ((*cdi)["cdiVersion"], "0.3.0");
  EXPECT_EQ(CdiDevice("slurm-17"), std::string((*cdi)["kind"]) + "=" + std::string((*cdi)["devices"][0]["name"]));
  const auto& edits = (*cdi)["devices"][0]["containerEdits"];
  ASSERT_EQ(edits["mounts"].size(), 1u);
  EXPECT_EQ(edits["mounts"][0]["hostPath"], "/run/vrambroker/claims/slurm-17");
  EXPECT_EQ(edits["mounts"][0]["options"][0], "ro") << "the room of /run is the machine's";
  EXPECT_EQ(edits["env"][0], "VRAMBROKER_SOCKET_DIR=" + std::string(edits["mounts"][0]["containerPath"]));
  EXPECT_EQ(CdiPath("slurm-17"), "/run/cdi/vrambroker-slurm-17.json");
}

TEST(ClaimCdiTest, ProgramsThatKnowNothingGetTheLibrary) {
  const auto cdi = ClaimCdi(ClaimOf("team"), "/usr/lib/libvrambroker-preload.so");
  ASSERT_TRUE(cdi.ok()) << cdi.status();
  const auto& edits = (*cdi)["devices"][0]["containerEdits"];
  ASSERT_EQ(edits["mounts"].size(), 2u);
  EXPECT_EQ(edits["mounts"][0]["hostPath"], "/run/vrambroker/claims/team");
  const auto& library = edits["mounts"][1];
  EXPECT_EQ(library["hostPath"], "/usr/lib/libvrambroker-preload.so");
  EXPECT_EQ(library["options"], (nlohmann::ordered_json{"ro", "nosuid", "nodev", "bind"})) << "it is executed";
  EXPECT_EQ(edits["env"][1], "LD_PRELOAD=" + std::string(library["containerPath"]));
}

TEST(ClaimCdiTest, NamesThatRuntimesRefuseAreRefused) {
  for (const char* name : {"a", "7", "a.b_c-d:e", "team-a"}) EXPECT_TRUE(ClaimCdi(ClaimOf(name)).ok()) << name;
  for (const char* name : {"a@b", "a-", "a.", "a:"}) {
    EXPECT_TRUE(absl::IsInvalidArgument(ClaimCdi(ClaimOf(name)).status())) << name;
  }
}

TEST(ClaimCdiTest, NamesThatBeginWithADigitNeedALaterVersion) {
  const auto cdi = ClaimCdi(ClaimOf("17"));
  ASSERT_TRUE(cdi.ok()) << cdi.status();
  EXPECT_EQ((*cdi)["cdiVersion"], "0.5.0");
}

TEST(ClaimCdiTest, AClaimThatIsBeingRemovedIsForNobody) {
  for (const v1::ClaimState state : {v1::CLAIM_STATE_DRAINING, v1::CLAIM_STATE_REVOKED}) {
    v1::Claim claim = ClaimOf("leaving");
    claim.set_state(state);
    EXPECT_TRUE(absl::IsFailedPrecondition(ClaimCdi(claim).status()));
  }
}

TEST(ClaimCdiTest, AClaimOfARuleHasNoSockets) {
  v1::Claim claim = ClaimOf("batch");
  claim.clear_socket_dir();
  claim.set_rule("batch jobs");
  EXPECT_TRUE(absl::IsFailedPrecondition(ClaimCdi(claim).status()));
}

}  // namespace
}  // namespace vrambroker::vramctl
