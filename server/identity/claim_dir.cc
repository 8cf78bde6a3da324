// SPDX-License-Identifier: Apache-2.0
#include "server/identity/claim_dir.h"

#include <dirent.h>
#include <fcntl.h>
#include <linux/openat2.h>
#include <spdlog/spdlog.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <memory>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "allocator/base/unique_fd.h"
#include "server/identity/unix_socket.h"

namespace vrambroker {
namespace {

constexpr size_t kMaxClaimName = 63;
constexpr mode_t kSocketMode = 0666;  // the directory controls access
constexpr char kConnections[] = "vrambroker.sock";
constexpr char kDescriptors[] = "vrambroker-fd.sock";
constexpr char kCounts[] = "vram-count.sock";
constexpr size_t kMostRemoved = 1024;  // files of owners, for a single claim
constexpr size_t kMostRemovedAtStart = 64 << 10;
constexpr size_t kMostLeftovers = 8;  // per user

std::string BaseOf(absl::string_view socket_dir) {
  return absl::StrCat(socket_dir, "/claims");
}

// Opens the directory of all claims, writable only by this user. Everyone may pass through the directory, but not list
// it.
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

// Opens a claim's directory and denies others further changes: the owner may have put anything inside.
absl::StatusOr<UniqueFd> TakeDir(const UniqueFd& base, const std::string& name, const std::string& path) {
  UniqueFd dir(openat(base.get(), name.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
  if (!dir.valid()) return absl::ErrnoToStatus(errno, absl::StrCat("cannot open ", path));
  if (fchown(dir.get(), geteuid(), getegid()) != 0 || fchmod(dir.get(), 0700) != 0) {
    return absl::ErrnoToStatus(errno, absl::StrCat("cannot take ", path, ", to put the claim's sockets there"));
  }
  return dir;
}

// Makes room for the socket. Renames a directory put in the way by the owner.
absl::Status ClearWay(const UniqueFd& dir, const char* socket, const std::string& path) {
  constexpr int kMostMoved = 100;
  if (unlinkat(dir.get(), socket, 0) == 0 || errno == ENOENT) return absl::OkStatus();
  if (errno == EISDIR && unlinkat(dir.get(), socket, AT_REMOVEDIR) == 0) return absl::OkStatus();
  for (int number = 1; number <= kMostMoved; ++number) {
    const std::string moved = absl::StrCat(socket, ".", number);
    if (renameat2(dir.get(), socket, dir.get(), moved.c_str(), RENAME_NOREPLACE) == 0) {
      spdlog::warn("{}/{} was in the way of the claim's socket, and is {} in the same directory now", path, socket,
                   moved);
      return absl::OkStatus();
    }
    if (errno != EEXIST) break;
  }
  return absl::FailedPreconditionError(
      absl::StrCat(path, "/", socket, " is in the way of the claim's socket; remove it"));
}

absl::StatusOr<ClientSocket> Listen(const UniqueFd& dir, const char* socket, int type, const std::string& path) {
  if (absl::Status status = ClearWay(dir, socket, path); !status.ok()) return status;
  // By the descriptor: the path may lead to another directory by now. The descriptor's path is also short enough for a
  // socket.
  return ListenUnix(absl::StrCat("/proc/self/fd/", dir.get(), "/", socket), type, kSocketMode);
}

absl::StatusOr<ClaimSockets> ListenIn(const UniqueFd& dir, const std::string& path) {
  absl::StatusOr<ClientSocket> descriptors = Listen(dir, kDescriptors, SOCK_SEQPACKET, path);
  if (!descriptors.ok()) return descriptors.status();
  absl::StatusOr<ClientSocket> connections = Listen(dir, kConnections, SOCK_STREAM, path);
  if (!connections.ok()) return connections.status();
  absl::StatusOr<ClientSocket> counts = Listen(dir, kCounts, SOCK_SEQPACKET, path);
  if (!counts.ok()) return counts.status();
  return ClaimSockets{
      .connections = *std::move(connections), .descriptors = *std::move(descriptors), .counts = *std::move(counts)};
}

// Gives the directory a name invalid for a claim.
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

using Entries = std::unique_ptr<DIR, int (*)(DIR*)>;

// Iterates from the first entry; null: unreadable.
Entries EntriesOf(const UniqueFd& dir) {
  UniqueFd own(openat(dir.get(), ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  Entries entries(own.valid() ? fdopendir(own.get()) : nullptr, closedir);
  if (entries != nullptr) (void)own.Release();
  return entries;
}

// Removes the contents of claim directories, with the owner's permissions: leaves mounts and the contents of other
// users' directories. Works by descriptors and follows no link, so that nothing outside is removed, whatever the owner
// does meanwhile.
class Remover {
 public:
  explicit Remover(size_t most_entries) : left_(most_entries) {}

  // Removes the directory `name` in `base`, with its contents. False: something is left.
  bool Remove(const UniqueFd& base, const std::string& name, const UniqueFd& dir, uid_t owner) {
    constexpr int kTries = 3;  // repeats, since entries may come and go meanwhile
    for (int i = 0; i < kTries; ++i) {
      if (unlinkat(base.get(), name.c_str(), AT_REMOVEDIR) == 0) return true;
      if ((errno != ENOTEMPTY && errno != EEXIST) || !Empty(dir, owner, /*depth=*/0)) return false;
    }
    return false;
  }

 private:
  static constexpr int kMostDepth = 16;

  bool Empty(const UniqueFd& dir, uid_t owner, int depth) {
    const Entries all = EntriesOf(dir);
    if (all == nullptr) return false;
    bool is_empty = true;
    while (const dirent* const entry = readdir(all.get())) {
      const absl::string_view name = entry->d_name;
      if (name == "." || name == "..") continue;
      if (left_ == 0) return false;
      --left_;
      if (unlinkat(dir.get(), entry->d_name, 0) == 0 || unlinkat(dir.get(), entry->d_name, AT_REMOVEDIR) == 0) continue;
      const bool is_gone = (errno == ENOTEMPTY || errno == EEXIST) && depth < kMostDepth &&
                           RemoveIn(dir, entry->d_name, owner, depth + 1);
      is_empty = is_empty && is_gone;
    }
    return is_empty;
  }

  bool RemoveIn(const UniqueFd& parent, const char* name, uid_t owner, int depth) {
    const UniqueFd dir = OpenIn(parent, name);
    struct stat found = {};
    return dir.valid() && fstat(dir.get(), &found) == 0 && found.st_uid == owner && Empty(dir, owner, depth) &&
           unlinkat(parent.get(), name, AT_REMOVEDIR) == 0;
  }

  // Refuses another file system, and another mount of the same file system.
  static UniqueFd OpenIn(const UniqueFd& parent, const char* name) {
    constexpr int kFlags = O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC;
    open_how how = {.flags = kFlags, .mode = 0, .resolve = RESOLVE_NO_XDEV | RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS};
    UniqueFd dir(static_cast<int>(syscall(SYS_openat2, parent.get(), name, &how, sizeof how)));
    if (dir.valid() || (errno != ENOSYS && errno != EPERM)) return dir;
    dir = UniqueFd(openat(parent.get(), name, kFlags));  // before Linux 5.6, or in a container without openat2()
    struct stat inner = {};
    struct stat outer = {};
    const bool is_same = dir.valid() && fstat(dir.get(), &inner) == 0 && fstat(parent.get(), &outer) == 0 &&
                         inner.st_dev == outer.st_dev;
    return is_same ? std::move(dir) : UniqueFd();
  }

  size_t left_;
};

// Removes directories put aside, as far as possible. Returns the paths of remaining directories of `owner`.
std::vector<std::string> RemoveAside(const UniqueFd& base, const std::string& base_path, uid_t owner,
                                     Remover& remover) {
  std::vector<std::string> left;
  const Entries all = EntriesOf(base);
  if (all == nullptr) return left;
  while (const dirent* const entry = readdir(all.get())) {
    const std::string name = entry->d_name;
    if (!absl::StartsWith(name, "_")) continue;
    const UniqueFd dir(openat(base.get(), entry->d_name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
    struct stat found = {};
    if (!dir.valid() || fstat(dir.get(), &found) != 0) continue;
    // A directory owned by this process may have been anybody's: there, only empty directories are removed.
    const uid_t uid = found.st_uid == geteuid() ? static_cast<uid_t>(-1) : found.st_uid;
    if (!remover.Remove(base, name, dir, uid) && found.st_uid == owner) {
      left.push_back(absl::StrCat(base_path, "/", name));
    }
  }
  return left;
}

// Bounds the number of a user's leftover directories that cannot be removed.
absl::Status CheckLeftovers(const UniqueFd& base, const std::string& base_path, const ClaimOwner& owner) {
  Remover remover(kMostRemoved);
  const std::vector<std::string> left = RemoveAside(base, base_path, owner.uid.value_or(geteuid()), remover);
  if (!owner.uid.has_value() || *owner.uid == geteuid() || left.size() < kMostLeftovers) return absl::OkStatus();
  return absl::ResourceExhaustedError(
      absl::StrCat("uid ", *owner.uid, " has ", left.size(), " directories of removed claims that the daemon cannot ",
                   "remove, with directories of others than uid ", *owner.uid,
                   " in them, or too many files: ", "empty them first (", left.front(), ")"));
}

// Removes a removed claim's directory. A directory that cannot be removed is put aside and returned to its owner.
absl::Status RemoveDir(const UniqueFd& base, const std::string& name, const std::string& path,
                       const std::optional<ClaimOwner>& known_owner, Remover& remover) {
  const UniqueFd found_dir(openat(base.get(), name.c_str(), O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
  struct stat found = {};
  if (!found_dir.valid() || fstat(found_dir.get(), &found) != 0) {
    return errno == ENOENT ? absl::OkStatus() : absl::ErrnoToStatus(errno, absl::StrCat("cannot open ", path));
  }
  const absl::StatusOr<UniqueFd> dir = TakeDir(base, name, path);
  if (!dir.ok()) return dir.status();
  const ClaimOwner owner = known_owner.value_or(ClaimOwner{.uid = found.st_uid, .gid = {}});
  if (remover.Remove(base, name, *dir, owner.uid.value_or(geteuid()))) return absl::OkStatus();
  const absl::StatusOr<std::string> aside = PutAside(base, name, path);
  if (!aside.ok()) return aside.status();
  // Not for the group: the group has lost its claim.
  if (absl::Status status = GiveDir(*dir, {.uid = owner.uid, .gid = {}}, path); !status.ok()) return status;
  return absl::FailedPreconditionError(absl::StrCat(
      path, " has more than the daemon can remove at once, or directories of others than its owner: it is ", *aside,
      " in the same directory now, and goes when the daemon can remove it"));
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
  // No dot: a hidden directory, or the parent. No -: an option. No _: reserved for metrics ("_other").
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
  if (use == ClaimDirUse::kNew) {
    if (absl::Status status = CheckLeftovers(*base, BaseOf(socket_dir), owner); !status.ok()) return status;
  }
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
  absl::StatusOr<ClaimSockets> sockets = ListenIn(*dir, path);
  absl::Status given = GiveDir(*dir, owner, path);  // also if unusable, for the owner to repair
  if (sockets.ok() && !given.ok()) return given;
  return sockets;
}

absl::Status RemoveClaimDir(const std::string& socket_dir, const std::string& name, const ClaimOwner& owner) {
  const absl::StatusOr<UniqueFd> base = OpenBase(socket_dir);
  if (!base.ok()) return base.status();
  Remover remover(kMostRemoved);
  return RemoveDir(*base, name, ClaimDir(socket_dir, name), owner, remover);
}

void RemoveOtherClaimDirs(const std::string& socket_dir, const absl::flat_hash_set<std::string>& names) {
  const absl::StatusOr<UniqueFd> base = OpenBase(socket_dir);
  if (!base.ok()) return;
  const Entries all = EntriesOf(*base);
  if (all == nullptr) return;
  std::vector<std::string> others;
  while (const dirent* const entry = readdir(all.get())) {
    const std::string name = entry->d_name;
    if (CheckClaimName(name).ok() && !names.contains(name)) others.push_back(name);
  }
  Remover remover(kMostRemovedAtStart);
  (void)RemoveAside(*base, BaseOf(socket_dir), geteuid(), remover);
  for (const std::string& name : others) {
    const absl::Status status = RemoveDir(*base, name, ClaimDir(socket_dir, name), std::nullopt, remover);
    spdlog::warn("there is no claim '{}' in the file of claims: {}", name,
                 status.ok() ? "its directory is removed" : std::string(status.message()));
  }
}

}  // namespace vrambroker
