// SPDX-License-Identifier: Apache-2.0
#include "server/identity/claim_dir.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mount.h>
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

// Returns true if a client can connect to the claim's socket.
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
  absl::Status Remove() {
    return RemoveClaimDir(dir_, "team", {.uid = geteuid() == 0 ? kOther : geteuid(), .gid = {}});
  }
  // Makes a directory and its missing parents, and gives the new directories to the owner.
  static void Make(const std::string& path) {
    const std::string parent = path.substr(0, path.rfind('/'));
    if (!std::filesystem::exists(parent)) Make(parent);
    std::filesystem::create_directory(path);
    if (geteuid() != 0) return;
    EXPECT_EQ(chown(path.c_str(), kOther, kOther), 0);
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

// A daemon without root cannot give the directory away. The daemon checks each client that connects in any case.
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

// A daemon that follows a killed daemon keeps the directory, which containers may have mounted.
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

// An owner may put any file into the owner's directory.
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

TEST_F(ClaimDirTest, WhatIsInTheWayGetsAnotherName) {
  std::filesystem::create_directories(claim_);
  Make(socket_ + "/full");
  Make(socket_ + ".1");
  const absl::StatusOr<ClaimSockets> sockets = Listen({.uid = geteuid() == 0 ? kOther : geteuid(), .gid = {}});
  ASSERT_TRUE(sockets.ok()) << sockets.status();
  EXPECT_TRUE(CanConnect(socket_));
  EXPECT_TRUE(std::filesystem::exists(socket_ + ".2/full"));
  EXPECT_TRUE(Remove().ok());
  EXPECT_FALSE(std::filesystem::exists(claim_));
}

TEST_F(ClaimDirTest, ADirectoryThatCannotBeUsedIsItsOwnersAgain) {
  if (geteuid() != 0) GTEST_SKIP() << "only root gives directories away";
  std::filesystem::create_directories(socket_ + "/full");
  for (int i = 1; i <= 100; ++i) std::filesystem::create_directories(absl::StrCat(socket_, ".", i));
  ASSERT_EQ(chown(claim_.c_str(), kOther, kOther), 0);
  const absl::Status status = Listen({.uid = kOther, .gid = {}}).status();
  EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr(socket_ + " is in the way of the claim's socket; remove it"));
  EXPECT_EQ(Stat(claim_).st_uid, kOther);
}

TEST_F(ClaimDirTest, WhatIsNoDirectoryIsNotUsed) {
  std::filesystem::create_directories(dir_ + "/claims");
  std::ofstream(claim_).close();
  EXPECT_FALSE(Listen({.uid = geteuid(), .gid = {}}).ok());
}

TEST_F(ClaimDirTest, ItIsRemovedWithAllThatItsOwnerHasPutThere) {
  ASSERT_TRUE(Listen({.uid = kOther, .gid = {}}).ok());
  EXPECT_TRUE(Remove().ok());
  EXPECT_FALSE(std::filesystem::exists(claim_));
  EXPECT_TRUE(Remove().ok()) << "there is none";
  const std::string victim = dir_ + "/victim";
  std::filesystem::create_directories(victim);
  std::ofstream(victim + "/kept").close();
  for (int round = 0; round < 40; ++round) {
    ASSERT_TRUE(Listen({.uid = kOther, .gid = {}}, ClaimDirUse::kNew).ok());
    Make(claim_ + "/a/b/c");
    std::ofstream(claim_ + "/a/b/notes") << "mine";
    std::filesystem::create_directory_symlink(victim, claim_ + "/a/link");
    std::filesystem::create_directory_symlink(victim, claim_ + "/link");
    EXPECT_EQ(Remove(), absl::OkStatus());
  }
  EXPECT_TRUE(std::filesystem::is_empty(dir_ + "/claims"));
  EXPECT_TRUE(std::filesystem::exists(victim + "/kept"));
}

// An owner may have moved directories into the claim's directory that other users can write to. Mounts may lie in the
// claim's directory, too.
TEST_F(ClaimDirTest, NothingIsRemovedThatItsOwnerCouldNotRemove) {
  if (geteuid() != 0) GTEST_SKIP() << "needs another user's directory";
  ASSERT_TRUE(Listen({.uid = kOther, .gid = {}}).ok());
  std::filesystem::create_directories(claim_ + "/others/kept");
  Make(claim_ + "/mounted");
  const bool is_mounted = mount("none", (claim_ + "/mounted").c_str(), "tmpfs", 0, nullptr) == 0;
  if (is_mounted) {
    ASSERT_EQ(chown((claim_ + "/mounted").c_str(), kOther, kOther), 0);
    std::ofstream(claim_ + "/mounted/kept").close();
  }
  std::ofstream(claim_ + "/notes") << "mine";
  const absl::Status status = Remove();
  EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("it is _team.1 in the same directory now"));
  const std::string aside = dir_ + "/claims/_team.1";
  EXPECT_TRUE(std::filesystem::exists(aside + "/others/kept"));
  EXPECT_FALSE(std::filesystem::exists(aside + "/notes"));
  EXPECT_EQ(Stat(aside).st_uid, kOther) << "it is the owner's again";
  if (is_mounted) {
    EXPECT_TRUE(std::filesystem::exists(aside + "/mounted/kept"));
    EXPECT_EQ(umount((aside + "/mounted").c_str()), 0);
  }
  EXPECT_FALSE(std::filesystem::exists(claim_));
}

// An owner whose directories cannot be removed gets no further claims; another owner still gets claims.
TEST_F(ClaimDirTest, WhatCannotBeRemovedIsBounded) {
  if (geteuid() != 0) GTEST_SKIP() << "needs another user's directory";
  const ClaimOwner owner{.uid = kOther, .gid = {}};
  int made = 0;
  absl::Status refused;
  while (made < 100) {
    if (refused = Listen(owner, ClaimDirUse::kNew).status(); !refused.ok()) break;
    ++made;
    std::filesystem::create_directories(claim_ + "/others/kept");
    EXPECT_FALSE(Remove().ok());
  }
  EXPECT_EQ(made, 8);
  EXPECT_TRUE(absl::IsResourceExhausted(refused)) << refused;
  EXPECT_THAT(std::string(refused.message()), HasSubstr("uid 54321 has 8 directories of removed claims"));
  EXPECT_FALSE(std::filesystem::exists(claim_));
  ASSERT_TRUE(ListenClaim(dir_, "others", {.uid = kOther + 1, .gid = {}}, ClaimDirUse::kNew).ok());
  EXPECT_TRUE(RemoveClaimDir(dir_, "others", {.uid = kOther + 1, .gid = {}}).ok());
  for (int i = 1; i <= made; ++i) std::filesystem::remove(absl::StrCat(dir_, "/claims/_team.", i, "/others/kept"));
  EXPECT_TRUE(Listen(owner, ClaimDirUse::kNew).ok());
  EXPECT_TRUE(Remove().ok());
  EXPECT_TRUE(std::filesystem::is_empty(dir_ + "/claims"));
}

TEST_F(ClaimDirTest, ManyFilesAreRemovedLittleByLittle) {
  ASSERT_TRUE(Listen({.uid = kOther, .gid = {}}).ok());
  constexpr int kFiles = 2500;
  for (int i = 0; i < kFiles; ++i) std::ofstream(absl::StrCat(claim_, "/", i)).close();
  EXPECT_FALSE(Remove().ok()) << "too many at once";
  const std::string aside = dir_ + "/claims/_team.1";
  int calls = 0;
  while (std::filesystem::exists(aside) && calls < 10) {
    ASSERT_TRUE(ListenClaim(dir_, "next", {.uid = kOther, .gid = {}}, ClaimDirUse::kNew).ok());
    EXPECT_TRUE(RemoveClaimDir(dir_, "next", {.uid = kOther, .gid = {}}).ok());
    ++calls;
  }
  EXPECT_EQ(calls, 2);
}

// A container holds the directory of the claim, not only the directory's path.
TEST_F(ClaimDirTest, WhoHasTheDirectoryOfARemovedClaimIsNotInALaterOneOfItsName) {
  ASSERT_TRUE(Listen({.uid = kOther, .gid = {}}, ClaimDirUse::kNew).ok());
  const UniqueFd mounted(open(claim_.c_str(), O_PATH | O_DIRECTORY | O_CLOEXEC));
  std::ofstream(claim_ + "/notes") << "mine";
  EXPECT_TRUE(Remove().ok());
  ASSERT_TRUE(Listen({.uid = kOther, .gid = {}}, ClaimDirUse::kNew).ok());
  EXPECT_TRUE(std::filesystem::exists(socket_));
  EXPECT_NE(faccessat(mounted.get(), "vrambroker.sock", F_OK, 0), 0);
}

// An owner may close the claim's directory. The daemon opens the directory again while making the sockets.
TEST_F(ClaimDirTest, ADirectoryThatIsTakenAgainCanBeWrittenTo) {
  if (geteuid() != 0) GTEST_SKIP() << "needs to become another user";
  ASSERT_EQ(chown(dir_.c_str(), kOther, kOther), 0);
  const int code = ExitCode(RunAs(kOther, 0, [&] {
    if (!Listen({.uid = kOther, .gid = {}}).ok() || chmod(claim_.c_str(), 0500) != 0) _exit(1);
    _exit(Listen({.uid = kOther, .gid = {}}).ok() ? 0 : 2);
  }));
  EXPECT_EQ(code, 0);
}

TEST_F(ClaimDirTest, ALinkInItsPlaceIsNotFollowed) {
  ASSERT_TRUE(ListenClaim(dir_, "other", {.uid = kOther, .gid = {}}, ClaimDirUse::kNew).ok());
  const std::string elsewhere = dir_ + "/elsewhere";
  std::filesystem::create_directories(elsewhere);
  ASSERT_EQ(chmod(elsewhere.c_str(), 0755), 0);
  std::filesystem::create_directory_symlink(elsewhere, claim_);
  EXPECT_FALSE(Listen({.uid = kOther, .gid = {}}).ok());
  EXPECT_FALSE(Remove().ok());
  EXPECT_TRUE(std::filesystem::is_empty(elsewhere));
  EXPECT_EQ(Stat(elsewhere).st_uid, geteuid());
  EXPECT_EQ(Stat(elsewhere).st_mode & 0777, 0755u);
}

TEST_F(ClaimDirTest, ANewClaimNeverTakesADirectoryThatIsThere) {
  std::filesystem::create_directories(claim_);
  std::ofstream(claim_ + "/notes") << "mine";
  const UniqueFd mounted(open(claim_.c_str(), O_PATH | O_DIRECTORY | O_CLOEXEC));
  ASSERT_TRUE(Listen({.uid = geteuid(), .gid = {}}, ClaimDirUse::kNew).ok());
  EXPECT_NE(faccessat(mounted.get(), "vrambroker.sock", F_OK, 0), 0);
  EXPECT_EQ(TextOf(dir_ + "/claims/_team.1/notes"), "mine");
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
