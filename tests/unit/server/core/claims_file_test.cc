// SPDX-License-Identifier: Apache-2.0
//
// The file of claims: tests write, change and read the file without a broker.
#include "server/wire/claim_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mount.h>
#include <sys/stat.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/core/claims.h"
#include "tests/support/util.h"

namespace vrambroker {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

TEST(ClaimFileTest, AStateIsChangedInPlace) {
  const std::string path = testing_support::MakeTempDir() + "/claims";
  std::vector<Claim> claims = {{.name = "a", .terms = {.labels = {{"x", "\n  name: \"b\"\n"}}}},
                               {.name = "b"},
                               {.name = "b.b", .state = ClaimState::kDraining}};
  ASSERT_TRUE(SaveClaims(path, claims).ok());
  const auto inode = [&] {
    struct stat found = {};
    EXPECT_EQ(stat(path.c_str(), &found), 0);
    return found.st_ino;
  };
  const ino_t before = inode();
  claims[1].state = ClaimState::kRevoked;
  EXPECT_TRUE(SaveClaimState(path, claims[1]).ok());
  EXPECT_EQ(inode(), before);
  const std::vector<Claim> loaded = LoadClaims(path).value();
  ASSERT_EQ(loaded.size(), 3u);
  for (size_t i = 0; i < claims.size(); ++i) EXPECT_EQ(loaded[i].state, claims[i].state) << i;
  EXPECT_TRUE(absl::IsNotFound(SaveClaimState(path, {.name = "c"})));
  EXPECT_TRUE(absl::IsNotFound(SaveClaimState(path + "x", claims[1])));
}

TEST(ClaimFileTest, WhatHasNotChangedIsSavedAsItWas) {
  const std::string dir = testing_support::MakeTempDir();
  const auto text = [&](const char* name) {
    std::ifstream file(dir + name);
    return std::string{std::istreambuf_iterator<char>(file), {}};
  };
  ClaimSaver saver;
  std::vector<Claim> claims = {{.id = ClaimId{1}, .name = "a"}, {.id = ClaimId{2}, .name = "b"}};
  const auto expect_same = [&] {
    EXPECT_TRUE(saver.Save(dir + "/saved", claims).ok());
    EXPECT_TRUE(SaveClaims(dir + "/all", claims).ok());
    EXPECT_EQ(text("/saved"), text("/all"));
  };
  expect_same();
  claims[1].terms.labels["k"] = "v";
  expect_same();
  claims[0].state = ClaimState::kDraining;
  claims[1].terms.limit = 0.5;
  expect_same();
  claims.erase(claims.begin());
  claims.push_back({.id = ClaimId{3}, .name = "a", .terms = {.priority = 1}});
  expect_same();
}

TEST(ClaimFileTest, ARevocationIsKeptOnAFullDisk) {
  const std::string dir = testing_support::MakeTempDir();
  if (mount("none", dir.c_str(), "tmpfs", 0, "size=64k") != 0) GTEST_SKIP() << "needs a file system of its own";
  const std::string path = dir + "/claims";
  Claim claim{.name = "team"};
  EXPECT_TRUE(SaveClaims(path, {claim}).ok());
  std::ofstream(dir + "/full") << std::string(1 << 20, 'x');
  claim.state = ClaimState::kRevoked;
  EXPECT_FALSE(SaveClaims(path, {claim}).ok()) << "the disk is full";
  EXPECT_TRUE(SaveClaimState(path, claim).ok());
  const absl::StatusOr<std::vector<Claim>> loaded = LoadClaims(path);
  EXPECT_EQ(umount(dir.c_str()), 0);
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  EXPECT_EQ(loaded->front().state, ClaimState::kRevoked);
}

// An older daemon kept each device as often as the claim named the device. The load writes the file anew, and later
// states change in place.
TEST(ClaimFileTest, AnOlderDaemonsFileIsWrittenAnew) {
  const std::string path = testing_support::MakeTempDir() + "/claims";
  const auto write = [&](const std::string& claims) {
    std::ofstream(path, std::ios::trunc) << claims << "# The end.\n";
    EXPECT_EQ(chmod(path.c_str(), 0600), 0);
  };
  write("claims { name: 'a' state: DRAINING terms { devices: 1 devices: 0 devices: 1 any_owner: true } }");
  const absl::StatusOr<std::vector<Claim>> loaded = LoadClaims(path);
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  EXPECT_THAT(loaded->front().terms.devices, ElementsAre(0u, 1u));
  EXPECT_TRUE(SaveClaimState(path, {.name = "a", .state = ClaimState::kRevoked}).ok());
  EXPECT_EQ(LoadClaims(path)->front().state, ClaimState::kRevoked);
}

TEST(ClaimFileTest, AsManyOfTheLargestClaimsAsThereCanBeAreReadAgain) {
  const std::string path = testing_support::MakeTempDir() + "/claims";
  Claim largest{.terms = {.limit = 0.12345678901234567,
                          .guarantee = 0.12345678901234567,
                          .priority = -1000,
                          .tenant = std::string(63, 't'),
                          .max_wait = std::chrono::hours(1),
                          .owner = {.uid = 4294967294, .gid = 4294967294}},
                .state = ClaimState::kRevoked,
                .created = std::chrono::system_clock::now(),
                .is_own = true,
                .maker = ProcessId{.pid = 1 << 22, .started = uint64_t{1} << 63}};
  for (size_t device = 0; device < 64; ++device) largest.terms.devices.push_back(device);
  for (size_t label = 0; label < Claims::kMaxLabels; ++label) {
    largest.terms.labels[absl::StrCat(std::string(61, 'k'), label)] = std::string(Claims::kMaxLabelValue, '\x01');
  }
  // A sanitizer makes each claim many times as long to write and read, and needs fewer claims.
  const size_t count = Claims::kMaxClaims / (testing_support::kSanitized ? 16 : 1);
  std::vector<Claim> claims(count, largest);
  for (size_t i = 0; i < claims.size(); ++i) claims[i].name = absl::StrCat(std::string(58, 'n'), i);
  ASSERT_TRUE(SaveClaims(path, claims).ok());
  EXPECT_LT(std::filesystem::file_size(path), size_t{64} << 20) << "half of what is read";
  const absl::StatusOr<std::vector<Claim>> loaded = LoadClaims(path);
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  EXPECT_EQ(loaded->size(), count);
}

TEST(ClaimFileTest, AFileThatIsTooLargeIsPutAside) {
  const std::string path = testing_support::MakeTempDir() + "/claims";
  ASSERT_TRUE(SaveClaims(path, {{.name = "a"}}).ok());
  std::filesystem::resize_file(path, uint64_t{1} << 30);
  const absl::StatusOr<std::vector<Claim>> loaded = LoadClaims(path);
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  EXPECT_THAT(*loaded, IsEmpty());
  EXPECT_FALSE(std::filesystem::exists(path));
  EXPECT_EQ(std::filesystem::file_size(path + ".too-large"), uint64_t{1} << 30);
}

// A daemon without its claims would let every session have all memory.
TEST(ClaimFileTest, AFileThatCannotBeReadIsSaidNotIgnored) {
  const std::string path = testing_support::MakeTempDir() + "/claims";
  for (const std::string text :
       {"claims { name: 'a' ", "claims { name: 'a/b' }", "claims { name: 'a' } claims { name: 'a' }",
        "claims { name: 'a' terms { limit {} } }"}) {
    std::ofstream(path) << text;
    const absl::Status status = LoadClaims(path).status();
    EXPECT_TRUE(absl::IsFailedPrecondition(status)) << text << ": " << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(path));
  }
}

}  // namespace
}  // namespace vrambroker
