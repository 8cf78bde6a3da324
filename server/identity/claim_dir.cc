// SPDX-License-Identifier: Apache-2.0
#include "server/identity/claim_dir.h"

#include <dirent.h>
#include <fcntl.h>
#include <spdlog/spdlog.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <memory>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "allocator/base/unique_fd.h"
#include "server/identity/unix_socket.h"

namespace vrambroker {
namespace {

constexpr size_t kMaxClaimName = 63;
constexpr mode_t kSocketMode = 0666;  // the directory says who reaches them
constexpr char kConnections[] = "vrambroker.sock";
constexpr char kDescriptors[] = "vrambroker-fd.sock";
constexpr char kCounts[] = "vram-count.sock";

std::string BaseOf(absl::string_view socket_dir) {
  return absl::StrCat(socket_dir, "/claims");
}

// The directory of all claims, which only this user can change. Everyone may pass through it, nobody may list it.
absl::StatusOr<UniqueFd> OpenBase(const std::string& socket_dir) {
  const std::string path = BaseOf(socket_dir);
  if (mkdir(path.c_str(), 0711) != 0 && errno != EEXIST) {
    return absl::ErrnoToStatus(errno, absl::StrCat("cannot create ", path));
  }
  UniqueFd base(open(path.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
  if (!base.valid()) return absl::ErrnoToStatus(errno, absl::StrCat("cannot open ", path));
  struct stat found = {};
  if (fstat(base.get(), &found) != 0) return absl::ErrnoToStatus(errno, absl::StrCat("cannot look at ", path));
  if (found.st_uid != geteuid()) {
    return absl::FailedPreconditionError(absl::StrCat(path, " belongs to uid ", found.st_uid, ", not to uid ",
                                                      geteuid(), "; remove it, and the daemon creates it"));
  }
  if (fchmod(base.get(), 0711) != 0) return absl::ErrnoToStatus(errno, absl::StrCat("cannot change ", path));
  return base;
}

// A claim's directory, which nobody else can change from now on: its owner may have put anything there.
absl::StatusOr<UniqueFd> TakeDir(const UniqueFd& base, const std::string& name, const std::string& path) {
  UniqueFd dir(openat(base.get(), name.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
  if (!dir.valid()) return absl::ErrnoToStatus(errno, absl::StrCat("cannot open ", path));
  if (fchown(dir.get(), geteuid(), getegid()) != 0 || fchmod(dir.get(), 0700) != 0) {
    return absl::ErrnoToStatus(errno, absl::StrCat("cannot take ", path, ", to put the claim's sockets there"));
  }
  return dir;
}

absl::Status RemoveSocket(const UniqueFd& dir, const char* socket, const std::string& path) {
  if (unlinkat(dir.get(), socket, 0) == 0 || errno == ENOENT) return absl::OkStatus();
  if (errno == EISDIR && unlinkat(dir.get(), socket, AT_REMOVEDIR) == 0) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat(path, "/", socket, " is in the way of the claim's socket; remove it"));
}

absl::StatusOr<ClientSocket> Listen(const UniqueFd& dir, const char* socket, int type, const std::string& path) {
  if (absl::Status status = RemoveSocket(dir, socket, path); !status.ok()) return status;
  // By the descriptor: the directory at the path may be another one by now. And that is short enough for any path.
  return ListenUnix(absl::StrCat("/proc/self/fd/", dir.get(), "/", socket), type, kSocketMode);
}

// Gives the directory a name that is no claim's.
absl::StatusOr<std::string> PutAside(const UniqueFd& base, const std::string& name, const std::string& path) {
  constexpr int kMostAside = 10000;
  for (int number = 1; number <= kMostAside; ++number) {
    std::string aside = absl::StrCat("_", name, ".", number);
    if (renameat2(base.get(), name.c_str(), base.get(), aside.c_str(), RENAME_NOREPLACE) == 0) return aside;
    if (errno != EEXIST) break;
  }
  return absl::ErrnoToStatus(errno, absl::StrCat("cannot rename ", path));
}

absl::Status GiveDir(const UniqueFd& dir, const ClaimOwner& owner, const std::string& path) {
  const mode_t mode = !owner.uid.has_value() ? 0755 : owner.gid.has_value() ? 0750 : 0700;
  const uid_t uid = owner.uid.value_or(geteuid());
  const gid_t gid = owner.gid.value_or(getegid());
  if (fchmod(dir.get(), mode) == 0 && fchown(dir.get(), uid, gid) == 0) return absl::OkStatus();
  if (errno == EPERM && fchmod(dir.get(), 0711) == 0) return absl::OkStatus();
  return absl::ErrnoToStatus(errno, absl::StrCat("cannot give ", path, " to the claim's owner"));
}

}  // namespace

absl::Status CheckClaimName(absl::string_view name) {
  const auto is_allowed = [](char c) {
    return absl::ascii_isalnum(static_cast<unsigned char>(c)) || absl::StrContains("._-:@", absl::string_view(&c, 1));
  };
  if (name.empty()) return absl::InvalidArgumentError("name: a claim needs one");
  if (name.size() > kMaxClaimName) {
    return absl::InvalidArgumentError(
        absl::StrCat("name: ", name.size(), " characters; at most ", kMaxClaimName, " are allowed"));
  }
  if (!std::all_of(name.begin(), name.end(), is_allowed)) {
    return absl::InvalidArgumentError("name: only letters, digits and . _ - : @ are allowed");
  }
  // No dot: a directory that is hidden, or the one above. No -: an option. No _: of metrics alone ("_other").
  if (absl::StrContains("._-", absl::string_view(name.data(), 1))) {
    return absl::InvalidArgumentError("name: the first character may not be one of . _ -");
  }
  return absl::OkStatus();
}

std::string ClaimDir(absl::string_view socket_dir, absl::string_view name) {
  return absl::StrCat(BaseOf(socket_dir), "/", name);
}

absl::Status CheckClaimDir(absl::string_view socket_dir, absl::string_view name) {
  const size_t length = absl::StrCat(ClaimDir(socket_dir, name), "/", kDescriptors).size();
  constexpr size_t kMost = sizeof(sockaddr_un::sun_path) - 1;
  if (length <= kMost) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "name: the paths of the claim's sockets would have ", length, " characters, and the system allows ", kMost,
      "; choose a name that is ", length - kMost, " characters shorter, or a shorter --socket-dir"));
}

absl::StatusOr<ClaimSockets> ListenClaim(const std::string& socket_dir, const std::string& name,
                                         const ClaimOwner& owner, ClaimDirUse use) {
  const std::string path = ClaimDir(socket_dir, name);
  const absl::StatusOr<UniqueFd> base = OpenBase(socket_dir);
  if (!base.ok()) return base.status();
  int error = mkdirat(base->get(), name.c_str(), 0700) == 0 ? 0 : errno;
  if (error == EEXIST && use == ClaimDirUse::kNew) {
    const absl::StatusOr<std::string> aside = PutAside(*base, name, path);
    if (!aside.ok()) return aside.status();
    spdlog::warn("{} was there before the claim, and is {} in the same directory now: remove it", path, *aside);
    error = mkdirat(base->get(), name.c_str(), 0700) == 0 ? 0 : errno;
  }
  if (error != 0 && error != EEXIST) return absl::ErrnoToStatus(error, absl::StrCat("cannot create ", path));
  const absl::StatusOr<UniqueFd> dir = TakeDir(*base, name, path);
  if (!dir.ok()) return dir.status();
  absl::StatusOr<ClientSocket> descriptors = Listen(*dir, kDescriptors, SOCK_SEQPACKET, path);
  if (!descriptors.ok()) return descriptors.status();
  absl::StatusOr<ClientSocket> connections = Listen(*dir, kConnections, SOCK_STREAM, path);
  if (!connections.ok()) return connections.status();
  absl::StatusOr<ClientSocket> counts = Listen(*dir, kCounts, SOCK_SEQPACKET, path);
  if (!counts.ok()) return counts.status();
  if (absl::Status status = GiveDir(*dir, owner, path); !status.ok()) return status;
  return ClaimSockets{
      .connections = *std::move(connections), .descriptors = *std::move(descriptors), .counts = *std::move(counts)};
}

absl::Status RemoveClaimDir(const std::string& socket_dir, const std::string& name) {
  const std::string path = ClaimDir(socket_dir, name);
  const absl::StatusOr<UniqueFd> base = OpenBase(socket_dir);
  if (!base.ok()) return base.status();
  const absl::StatusOr<UniqueFd> dir = TakeDir(*base, name, path);
  if (absl::IsNotFound(dir.status())) return absl::OkStatus();
  if (!dir.ok()) return dir.status();
  for (const char* socket : {kConnections, kDescriptors, kCounts}) {
    if (absl::Status status = RemoveSocket(*dir, socket, path); !status.ok()) return status;
  }
  if (unlinkat(base->get(), name.c_str(), AT_REMOVEDIR) == 0) return absl::OkStatus();
  if (errno == ENOTEMPTY || errno == EEXIST) {
    const absl::StatusOr<std::string> aside = PutAside(*base, name, path);
    if (!aside.ok()) return aside.status();
    return absl::FailedPreconditionError(absl::StrCat(path, " has files that are not the daemon's: it is ", *aside,
                                                      " in the same directory now; remove it"));
  }
  return absl::ErrnoToStatus(errno, absl::StrCat("cannot remove ", path));
}

void RemoveOtherClaimDirs(const std::string& socket_dir, const absl::flat_hash_set<std::string>& names) {
  const std::unique_ptr<DIR, int (*)(DIR*)> all(opendir(BaseOf(socket_dir).c_str()), closedir);
  if (all == nullptr) return;
  std::vector<std::string> others;
  while (const dirent* const entry = readdir(all.get())) {
    const std::string name = entry->d_name;
    if (CheckClaimName(name).ok() && !names.contains(name)) others.push_back(name);
    // Put aside, and empty by now.
    if (absl::StartsWith(name, "_")) (void)unlinkat(dirfd(all.get()), name.c_str(), AT_REMOVEDIR);
  }
  for (const std::string& name : others) {
    const absl::Status status = RemoveClaimDir(socket_dir, name);
    spdlog::warn("there is no claim '{}' in the file of claims: {}", name,
                 status.ok() ? "its directory is removed" : std::string(status.message()));
  }
}

}  // namespace vrambroker
