// SPDX-License-Identifier: Apache-2.0
//
// DaemonClient and UnitClaims(): claims told by a played daemon.
#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "deploy/kubernetes/daemon_client.h"
#include "deploy/kubernetes/labels.h"
#include "deploy/kubernetes/node.h"
#include "tests/support/util.h"
#include "vrambroker/v1/admin.grpc.pb.h"

namespace vrambroker::kubernetes {
namespace {

using ::testing::ElementsAre;

// Lists two claims to a page.
class PlayedAdmin : public v1::Admin::Service {
 public:
  grpc::Status ListClaims(grpc::ServerContext* /*context*/, const v1::ListClaimsRequest* request,
                          v1::ListClaimsResponse* response) override {
    response->set_own_only(own_only);
    for (const std::string& claim : claims) {
      if (claim <= request->after()) continue;
      if (response->claims_size() == 2) {
        response->set_more(true);
        break;
      }
      response->add_claims()->set_name(claim);
    }
    return grpc::Status::OK;
  }
  grpc::Status DeleteClaim(grpc::ServerContext* /*context*/, const v1::DeleteClaimRequest* request,
                           v1::DeleteClaimResponse* /*response*/) override {
    deleted.push_back(*request);
    return {answer, "played"};
  }
  grpc::Status UpdateClaim(grpc::ServerContext* /*context*/, const v1::UpdateClaimRequest* request,
                           v1::UpdateClaimResponse* /*response*/) override {
    updated.push_back(*request);
    return {answer, "played"};
  }

  std::vector<std::string> claims;
  bool own_only = false;
  grpc::StatusCode answer = grpc::StatusCode::OK;
  std::vector<v1::DeleteClaimRequest> deleted;
  std::vector<v1::UpdateClaimRequest> updated;
};

class DaemonClientTest : public ::testing::Test {
 protected:
  DaemonClientTest() {
    grpc::ServerBuilder builder;
    builder.AddListeningPort(absl::StrCat("unix:", dir_, "/vrambroker.sock"), grpc::InsecureServerCredentials());
    builder.RegisterService(&admin_);
    server_ = builder.BuildAndStart();
  }

  const std::string dir_ = testing_support::MakeTempDir();
  PlayedAdmin admin_;
  std::unique_ptr<grpc::Server> server_;
  const DaemonClient daemon_{dir_, testing_support::kPatience};
};

TEST_F(DaemonClientTest, ClaimsAreThoseOfAllPages) {
  for (const size_t count : {size_t{0}, size_t{2}, size_t{5}}) {
    admin_.claims = {"a", "b", "c", "d", "e"};
    admin_.claims.resize(count);
    const absl::StatusOr<std::vector<v1::Claim>> claims = daemon_.Claims();
    ASSERT_TRUE(claims.ok()) << claims.status();
    std::vector<std::string> names;
    for (const v1::Claim& claim : *claims) names.push_back(claim.name());
    EXPECT_EQ(names, admin_.claims);
  }
  admin_.own_only = true;
  EXPECT_TRUE(absl::IsPermissionDenied(daemon_.Claims().status()));
}

TEST_F(DaemonClientTest, AClaimThatIsDrainedKeepsItsSessions) {
  EXPECT_TRUE(daemon_.DrainClaim("a").ok());
  ASSERT_EQ(admin_.deleted.size(), 1U);
  EXPECT_EQ(admin_.deleted[0].name(), "a");
  EXPECT_EQ(admin_.deleted[0].mode(), v1::DeleteClaimRequest::DRAIN);
  admin_.answer = grpc::StatusCode::NOT_FOUND;
  EXPECT_TRUE(daemon_.DrainClaim("gone").ok());
  admin_.answer = grpc::StatusCode::PERMISSION_DENIED;
  EXPECT_TRUE(absl::IsPermissionDenied(daemon_.DrainClaim("a")));
}

TEST_F(DaemonClientTest, LabelsReplaceThoseOfTheClaim) {
  EXPECT_TRUE(daemon_.SetLabels("a", {{"pod", "trainer"}}).ok());
  ASSERT_EQ(admin_.updated.size(), 1U);
  EXPECT_EQ(admin_.updated[0].name(), "a");
  EXPECT_TRUE(admin_.updated[0].replace_labels());
  EXPECT_EQ(admin_.updated[0].labels().size(), 1U);
  EXPECT_EQ(admin_.updated[0].labels().at("pod"), "trainer");
  admin_.answer = grpc::StatusCode::NOT_FOUND;
  EXPECT_TRUE(absl::IsNotFound(daemon_.SetLabels("gone", {})));
}

TEST(UnitClaimsTest, AreThePluginsOwnThatAreNotEnding) {
  const auto claim = [](const std::string& name, v1::ClaimState state = v1::CLAIM_STATE_ACTIVE) {
    v1::Claim made;
    made.set_name(name);
    made.set_state(state);
    (*made.mutable_terms()->mutable_labels())[kResourceLabel] = "vrambroker.dev/memory-256mi";
    made.add_devices();
    made.add_devices();
    return made;
  };
  v1::Claim others = claim("others");
  others.mutable_terms()->mutable_labels()->clear();
  v1::Claim used = claim("used");
  used.set_sessions(1);
  v1::Claim left = claim("left");  // memory of a child, without a session
  left.mutable_devices(1)->set_reserved_bytes(1);
  const std::vector<UnitClaim> claims =
      UnitClaims({claim("idle"), others, used, left, claim("draining", v1::CLAIM_STATE_DRAINING),
                  claim("revoked", v1::CLAIM_STATE_REVOKED)});
  std::vector<std::string> texts;
  for (const UnitClaim& unit_claim : claims) {
    texts.push_back(
        absl::StrCat(unit_claim.name, " ", unit_claim.labels.at(kResourceLabel), unit_claim.is_idle ? " idle" : ""));
  }
  EXPECT_THAT(texts, ElementsAre("idle vrambroker.dev/memory-256mi idle", "used vrambroker.dev/memory-256mi",
                                 "left vrambroker.dev/memory-256mi"));
}

}  // namespace
}  // namespace vrambroker::kubernetes
