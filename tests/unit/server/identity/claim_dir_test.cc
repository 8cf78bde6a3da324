// SPDX-License-Identifier: Apache-2.0
#include "server/identity/claim_dir.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

#include "absl/strings/str_cat.h"
#include "tests/support/other_process.h"
#include "tests/support/util.h"

namespace vrambroker {
namespace {

using ::testing::HasSubstr;
using testing_support::kOther;
using testing_support::RunAs;

// Whether the claim's socket can be connected to.
bool CanConnect(const std::string& path) {
  sockaddr_un address = {.sun_family = AF_UNIX};
  std::memcpy(address.sun_path, path.c_str(), path.size());
  const UniqueFd fd(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  return connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0;
}

std::string TextOf(const std::string& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

int ExitCode(pid_t child) {
  int status = 0;
  waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

class ClaimDirTest : public ::testing::Test {
 protected:
  void SetUp() override { ASSERT_EQ(chmod(dir_.c_str(), 0755), 0); }

  static struct stat Stat(const std::string& path) {
    struct stat found = {};
    EXPECT_EQ(lstat(path.c_str(), &found), 0) << path;
    return found;
  }
  absl::StatusOr<ClaimSockets> Listen(const ClaimOwner& owner, ClaimDirUse use = ClaimDirUse::kKept) {
    return ListenClaim(dir_, "team", owner, use);
  }

  const std::string dir_ = testing_support::MakeTempDir();
  const std::string claim_ = dir_ + "/claims/team";
  const std::string socket_ = claim_ + "/vrambroker.sock";
};

TEST_F(ClaimDirTest, NamesAreThoseOfDirectories) {
  for (const std::string& name :
       {std::string("a"), std::string("slurm-17"), std::string("team.a_b:c@d"), std::string(63, 'x')}) {
    EXPECT_TRUE(CheckClaimName(name).ok()) << name;
  }
  for (const std::string& name : {std::string(), std::string("."), std::string(".."), std::string(".a"),
                                  std::string("-a"), std::string("_other"), std::string("a/b"), std::string("a b"),
                                  std::string("a\n"), std::string("ü"), std::string("a\0b", 3), std::string(64, 'x')}) {
    EXPECT_TRUE(absl::IsInvalidArgument(CheckClaimName(name))) << name;
  }
}

TEST_F(ClaimDirTest, APathThatClientsCannotConnectToIsRefusedAndSaysHowMuchItIsTooLong) {
  const std::string deep = "/" + std::string(60, 'd');
  EXPECT_TRUE(CheckClaimDir(deep, std::string(19, 'n')).ok());
  const absl::Status status = CheckClaimDir(deep, std::string(21, 'n'));
  EXPECT_TRUE(absl::IsInvalidArgument(status));
  EXPECT_THAT(std::string(status.message()), HasSubstr("2 characters shorter"));
}

TEST_F(ClaimDirTest, TheDirectoryIsItsOwnersAlone) {
  if (geteuid() != 0) GTEST_SKIP() << "only root gives directories away";
  const absl::StatusOr<ClaimSockets> sockets = Listen({.uid = kOther, .gid = {}});
  ASSERT_TRUE(sockets.ok()) << sockets.status();
  EXPECT_EQ(Stat(claim_).st_uid, kOther);
  EXPECT_EQ(Stat(claim_).st_mode & 0777, 0700u);
  EXPECT_EQ(Stat(dir_ + "/claims").st_mode & 0777, 0711u) << "nobody may list it";
  const auto connects = [&] { _exit(CanConnect(socket_) ? 0 : 1); };
  EXPECT_EQ(ExitCode(RunAs(kOther, 0, connects)), 0);
  EXPECT_EQ(ExitCode(RunAs(kOther + 1, 0, connects)), 1);
}

TEST_F(ClaimDirTest, AGroupMayEnterWhereThereIsOne) {
  if (geteuid() != 0) GTEST_SKIP() << "only root gives directories away";
  const absl::StatusOr<ClaimSockets> sockets = Listen({.uid = 0, .gid = kOther});
  ASSERT_TRUE(sockets.ok()) << sockets.status();
  EXPECT_EQ(Stat(claim_).st_mode & 0777, 0750u);
  EXPECT_EQ(ExitCode(RunAs(kOther, 0, [&] { _exit(CanConnect(socket_) ? 0 : 1); })), 0);
}

// A daemon that is not root cannot give the directory away: who connects is checked in any case.
TEST_F(ClaimDirTest, WithoutThePowerToGiveItAwayTheDirectoryStaysTheDaemons) {
  if (geteuid() != 0) GTEST_SKIP() << "needs to become another user";
  ASSERT_EQ(chown(dir_.c_str(), kOther, kOther), 0);
  const int code = ExitCode(RunAs(kOther, 0, [&] {
    const absl::StatusOr<ClaimSockets> sockets =
        ListenClaim(dir_, "team", {.uid = kOther + 1, .gid = {}}, ClaimDirUse::kNew);
    _exit(!sockets.ok() ? 1 : (Stat(claim_).st_mode & 0777) != 0711 ? 2 : Stat(claim_).st_uid != kOther ? 3 : 0);
  }));
  EXPECT_EQ(code, 0);
}

// The next daemon, after one that was killed: the directory, which containers may have mounted, stays the same.
TEST_F(ClaimDirTest, TheNextDaemonListensInTheSameDirectory) {
  ASSERT_TRUE(Listen({.uid = kOther, .gid = {}}).ok());
  const ino_t inode = Stat(claim_).st_ino;
  EXPECT_FALSE(CanConnect(socket_)) << "nobody listens";
  const absl::StatusOr<ClaimSockets> sockets = Listen({.uid = geteuid(), .gid = {}});
  ASSERT_TRUE(sockets.ok()) << sockets.status();
  EXPECT_EQ(Stat(claim_).st_ino, inode);
  EXPECT_EQ(Stat(claim_).st_uid, geteuid());
  EXPECT_TRUE(CanConnect(socket_));
}

// The owner of the directory may put there whatever it likes.
TEST_F(ClaimDirTest, WhatAnOwnerPutsThereHarmsNobodyElse) {
  const std::string victim = dir_ + "/victim";
  std::ofstream(victim) << "kept";
  const mode_t mode = Stat(victim).st_mode;
  std::filesystem::create_directories(claim_);
  ASSERT_EQ(symlink(victim.c_str(), socket_.c_str()), 0);
  ASSERT_EQ(link(victim.c_str(), (claim_ + "/vrambroker-fd.sock").c_str()), 0);
  const absl::StatusOr<ClaimSockets> sockets = Listen({.uid = geteuid() == 0 ? kOther : geteuid(), .gid = {}});
  ASSERT_TRUE(sockets.ok()) << sockets.status();
  EXPECT_TRUE(S_ISSOCK(Stat(socket_).st_mode));
  EXPECT_EQ(Stat(victim).st_mode, mode);
  EXPECT_EQ(Stat(victim).st_uid, geteuid());
  EXPECT_EQ(TextOf(victim), "kept");
}

TEST_F(ClaimDirTest, WhatIsInTheWayIsNamed) {
  std::filesystem::create_directories(socket_ + "/full");
  const absl::Status status = Listen({.uid = geteuid(), .gid = {}}).status();
  EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr(socket_ + " is in the way of the claim's socket; remove it"));
  std::filesystem::remove_all(claim_);
  std::ofstream(claim_ + "x").close();
  std::filesystem::rename(claim_ + "x", claim_);
  EXPECT_FALSE(Listen({.uid = geteuid(), .gid = {}}).ok()) << "no directory";
}

TEST_F(ClaimDirTest, ItIsRemovedButForWhatIsNotTheDaemons) {
  ASSERT_TRUE(Listen({.uid = kOther, .gid = {}}).ok());
  EXPECT_TRUE(RemoveClaimDir(dir_, "team").ok());
  EXPECT_FALSE(std::filesystem::exists(claim_));
  EXPECT_TRUE(RemoveClaimDir(dir_, "team").ok()) << "there is none";
  ASSERT_TRUE(Listen({.uid = kOther, .gid = {}}).ok());
  std::ofstream(claim_ + "/notes") << "mine";
  const absl::Status status = RemoveClaimDir(dir_, "team");
  EXPECT_THAT(std::string(status.message()), HasSubstr("has files that are not the daemon's"));
  EXPECT_THAT(std::string(status.message()), HasSubstr("it is _team.1 in the same directory now; remove it"));
  EXPECT_EQ(TextOf(dir_ + "/claims/_team.1/notes"), "mine");
  EXPECT_FALSE(std::filesystem::exists(claim_));
}

// A container has the directory of the claim, and not only its path.
TEST_F(ClaimDirTest, WhoHasTheDirectoryOfARemovedClaimIsNotInALaterOneOfItsName) {
  ASSERT_TRUE(Listen({.uid = kOther, .gid = {}}, ClaimDirUse::kNew).ok());
  const UniqueFd mounted(open(claim_.c_str(), O_PATH | O_DIRECTORY | O_CLOEXEC));
  std::ofstream(claim_ + "/notes") << "mine";
  (void)RemoveClaimDir(dir_, "team");
  ASSERT_TRUE(Listen({.uid = kOther, .gid = {}}, ClaimDirUse::kNew).ok());
  EXPECT_TRUE(std::filesystem::exists(socket_));
  EXPECT_NE(faccessat(mounted.get(), "vrambroker.sock", F_OK, 0), 0);
}

TEST_F(ClaimDirTest, ANewClaimNeverTakesADirectoryThatIsThere) {
  std::filesystem::create_directories(claim_);
  std::ofstream(claim_ + "/notes") << "mine";
  const UniqueFd mounted(open(claim_.c_str(), O_PATH | O_DIRECTORY | O_CLOEXEC));
  ASSERT_TRUE(Listen({.uid = geteuid(), .gid = {}}, ClaimDirUse::kNew).ok());
  EXPECT_NE(faccessat(mounted.get(), "vrambroker.sock", F_OK, 0), 0);
  EXPECT_EQ(TextOf(dir_ + "/claims/_team.1/notes"), "mine");
  RemoveOtherClaimDirs(dir_, {"team"});
  EXPECT_TRUE(std::filesystem::exists(dir_ + "/claims/_team.1")) << "it is not empty";
  std::filesystem::remove(dir_ + "/claims/_team.1/notes");
  RemoveOtherClaimDirs(dir_, {"team"});
  EXPECT_FALSE(std::filesystem::exists(dir_ + "/claims/_team.1"));
}

TEST_F(ClaimDirTest, ThoseOfClaimsThatAreNoMoreAreRemoved) {
  ASSERT_TRUE(Listen({.uid = kOther, .gid = {}}).ok());
  ASSERT_TRUE(ListenClaim(dir_, "gone", {.uid = kOther, .gid = {}}, ClaimDirUse::kNew).ok());
  RemoveOtherClaimDirs(dir_, {"team"});
  EXPECT_TRUE(std::filesystem::exists(claim_));
  EXPECT_FALSE(std::filesystem::exists(dir_ + "/claims/gone"));
}

TEST_F(ClaimDirTest, AFolderOfClaimsThatIsAnothersIsNotUsed) {
  if (geteuid() != 0) GTEST_SKIP() << "needs another user's directory";
  std::filesystem::create_directories(dir_ + "/claims");
  ASSERT_EQ(chown((dir_ + "/claims").c_str(), kOther, kOther), 0);
  const absl::Status status = Listen({.uid = 0, .gid = {}}).status();
  EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("belongs to uid 54321"));
}

}  // namespace
}  // namespace vrambroker
