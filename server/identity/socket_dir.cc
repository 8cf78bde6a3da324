// SPDX-License-Identifier: Apache-2.0
#include "server/identity/socket_dir.h"

#include <fcntl.h>
#include <pwd.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <optional>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "allocator/device/process_files.h"

namespace vrambroker {
namespace {

// Each further attempt means that another daemon started or ended at the same moment.
constexpr int kAttempts = 100;

std::string UserName(uid_t uid) {
  std::array<char, 4096> buffer = {};
  passwd entry = {};
  passwd* found = nullptr;
  getpwuid_r(uid, &entry, buffer.data(), buffer.size(), &found);
  return found == nullptr ? absl::StrCat("uid ", uid) : absl::StrCat("user ", found->pw_name);
}

// The process listening on the daemon's socket. Pid 0: a process that cannot be named.
std::optional<ucred> ProcessServing(const std::string& dir) {
  const std::string path = absl::StrCat(dir, "/vrambroker.sock");
  sockaddr_un address = {.sun_family = AF_UNIX};
  if (path.size() >= sizeof address.sun_path) return std::nullopt;
  std::memcpy(address.sun_path, path.c_str(), path.size());
  const UniqueFd fd(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  ucred process = {};
  if (connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0) {
    if (errno == EAGAIN) return process;  // a process listens, and many clients wait
    return std::nullopt;
  }
  socklen_t size = sizeof process;
  if (getsockopt(fd.get(), SOL_SOCKET, SO_PEERCRED, &process, &size) != 0) process = {};
  return process;
}

absl::Status ServedBy(pid_t pid, const std::string& dir) {
  return absl::FailedPreconditionError(absl::StrCat("another vrambrokerd",
                                                    pid == 0 ? "" : absl::StrCat(" (pid ", pid, ")"), " serves ", dir,
                                                    "; stop it or choose another --socket-dir"));
}

// Error: `what`, owned by another user, stands in the way.
absl::Status NotOurs(const std::string& what, uid_t owner, const std::string& dir) {
  if (const std::optional<ucred> other = ProcessServing(dir); other.has_value() && other->pid != 0) {
    return absl::FailedPreconditionError(absl::StrCat("another vrambrokerd (pid ", other->pid, ", of ",
                                                      UserName(other->uid), ") serves ", dir,
                                                      "; choose another --socket-dir"));
  }
  const bool may_remove = what != dir && faccessat(AT_FDCWD, dir.c_str(), W_OK, AT_EACCESS) == 0;
  return absl::FailedPreconditionError(absl::StrCat(
      what, " belongs to ", UserName(owner), ", whose vrambrokerd serves or has served ", dir,
      "; choose another --socket-dir",
      may_remove ? absl::StrCat(", or, if no vrambrokerd of that user runs any more, remove ", what) : ""));
}

// Checks that only this user or root can write: other users with write access could replace the sockets and pose as the
// daemon.
absl::Status CheckDir(const std::string& dir) {
  struct stat found = {};
  if (lstat(dir.c_str(), &found) != 0) return absl::ErrnoToStatus(errno, absl::StrCat("cannot look at ", dir));
  const bool is_safe = S_ISDIR(found.st_mode) && (found.st_mode & 0022) == 0;
  if (is_safe && (found.st_uid == geteuid() || found.st_uid == 0)) return absl::OkStatus();
  if (is_safe && ProcessServing(dir).has_value()) return NotOurs(dir, found.st_uid, dir);
  return absl::FailedPreconditionError(
      absl::StrCat(dir,
                   " is not a directory that only this user or root can write to; choose another --socket-dir, "
                   "and the daemon creates it"));
}

UniqueFd OpenOrCreate(const std::string& path) {
  return UniqueFd(open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0600));
}

bool IsRegular(const UniqueFd& file) {
  struct stat found = {};
  return fstat(file.get(), &found) == 0 && S_ISREG(found.st_mode);
}

bool IsPrivate(const struct stat& found) {
  return S_ISREG(found.st_mode) && found.st_uid == geteuid() && (found.st_mode & 0077) == 0;
}
bool IsPrivate(const UniqueFd& file) {
  struct stat found = {};
  return fstat(file.get(), &found) == 0 && IsPrivate(found);
}
bool IsPrivate(const std::string& path) {
  struct stat found = {};
  return lstat(path.c_str(), &found) == 0 && IsPrivate(found);
}

// Whether the path still leads to the opened file.
bool IsAt(const UniqueFd& file, const std::string& path) {
  struct stat opened = {};
  struct stat found = {};
  return fstat(file.get(), &opened) == 0 && lstat(path.c_str(), &found) == 0 && opened.st_dev == found.st_dev &&
         opened.st_ino == found.st_ino;
}

bool TryLock(const UniqueFd& file) {
  return flock(file.get(), LOCK_EX | LOCK_NB) == 0;
}

// The process named by a lock file; 0: none.
pid_t PidIn(const UniqueFd& file) {
  std::array<char, 16> text = {};
  pid_t pid = 0;
  if (pread(file.get(), text.data(), text.size() - 1, 0) <= 0 || !absl::SimpleAtoi(text.data(), &pid)) return 0;
  return pid;
}

absl::Status WritePid(const UniqueFd& file, const std::string& path) {
  const std::string pid = absl::StrCat(getpid(), "\n");
  if (ftruncate(file.get(), 0) != 0 || pwrite(file.get(), pid.data(), pid.size(), 0) < 0) {
    return absl::ErrnoToStatus(errno, absl::StrCat("cannot write ", path));
  }
  return absl::OkStatus();
}

// Whether `owner` runs this program as `pid`.
bool IsDaemonOf(uid_t owner, pid_t pid) {
  struct stat found = {};
  return pid != 0 && pid != getpid() && stat(absl::StrCat("/proc/", pid).c_str(), &found) == 0 &&
         found.st_uid == owner && ReadProcessFile(pid, "comm") == ReadProcessFile(getpid(), "comm");
}

// FailedPrecondition if a daemon serves `dir` by a lock file unlike ours: of version 0.1, or of another user. A daemon
// starting or stopping has no socket, only the lock.
absl::Status CheckOldDaemon(const UniqueFd& file, const std::string& dir) {
  if (const std::optional<ucred> process = ProcessServing(dir); process.has_value()) {
    return ServedBy(process->pid, dir);
  }
  if (TryLock(file)) return absl::OkStatus();
  struct stat found = {};
  if (fstat(file.get(), &found) != 0) return absl::ErrnoToStatus(errno, "fstat");
  const pid_t pid = PidIn(file);
  // A private file is locked by its owner, or by root: by a daemon that served here when the directory was that user's.
  if ((found.st_mode & 0077) == 0) return ServedBy(pid, dir);
  // Other users can lock this file, too, so the lock proves nothing. The pid does, if only the owner can write the
  // file.
  const bool is_daemon = (found.st_mode & 0022) == 0 && IsDaemonOf(found.st_uid, pid);
  return is_daemon ? ServedBy(pid, dir) : absl::OkStatus();
}

absl::Status CannotOpen(const std::string& path, const std::string& dir, int error) {
  if (error == ELOOP || error == EISDIR) {
    return absl::FailedPreconditionError(absl::StrCat(path, " is not a regular file; remove it"));
  }
  // Another user's private file may be locked or not: the lock cannot be tested. So the file is never replaced, even if
  // the directory is ours now: that user's daemon may live, and two daemons would serve here.
  struct stat found = {};
  if (error == EACCES && lstat(path.c_str(), &found) == 0 && S_ISREG(found.st_mode)) {
    return NotOurs(path, found.st_uid, dir);
  }
  return absl::ErrnoToStatus(error, absl::StrCat("cannot open ", path, "; choose another --socket-dir"));
}

// Puts a new, locked file into the place of `path`. The new file also serves as the lock for concurrent replacements.
// Aborted: another daemon changed the files; retry.
absl::StatusOr<UniqueFd> Replace(const std::string& path, const std::string& dir) {
  const std::string new_path = absl::StrCat(path, ".new");
  UniqueFd file = OpenOrCreate(new_path);
  if (!file.valid()) return CannotOpen(new_path, dir, errno);
  if (!IsPrivate(file)) return absl::FailedPreconditionError(absl::StrCat(new_path, " is in the way; remove it"));
  if (!TryLock(file)) return ServedBy(PidIn(file), dir);
  if (!IsAt(file, new_path)) return absl::AbortedError("another daemon has just replaced the lock file");
  if (IsPrivate(path)) {
    unlink(new_path.c_str());
    return absl::AbortedError("another daemon has just replaced the lock file");
  }
  if (absl::Status status = WritePid(file, new_path); !status.ok()) return status;
  if (rename(new_path.c_str(), path.c_str()) != 0) {
    return absl::ErrnoToStatus(errno, absl::StrCat("cannot replace ", path));
  }
  return file;
}

// Tries once. Aborted: another daemon changed the files; retry.
absl::StatusOr<UniqueFd> TryLockDir(const std::string& dir) {
  const std::string path = absl::StrCat(dir, "/vrambroker.lock");
  UniqueFd file = OpenOrCreate(path);
  if (!file.valid()) return CannotOpen(path, dir, errno);
  if (!IsRegular(file)) return CannotOpen(path, dir, EISDIR);
  if (IsPrivate(file)) {
    if (!TryLock(file)) return ServedBy(PidIn(file), dir);
    if (!IsAt(file, path)) return absl::AbortedError("another daemon has just replaced the lock file");
    if (absl::Status status = WritePid(file, path); !status.ok()) return status;
    return file;
  }
  if (absl::Status status = CheckOldDaemon(file, dir); !status.ok()) return status;
  return Replace(path, dir);
}

}  // namespace

absl::StatusOr<UniqueFd> LockSocketDir(const std::string& dir) {
  if (mkdir(dir.c_str(), 0755) != 0 && errno != EEXIST) {
    return absl::ErrnoToStatus(
        errno, absl::StrCat("cannot create the socket directory ", dir, "; choose another one with --socket-dir"));
  }
  if (absl::Status status = CheckDir(dir); !status.ok()) return status;
  absl::StatusOr<UniqueFd> lock = absl::AbortedError("not tried");
  for (int i = 0; i < kAttempts && absl::IsAborted(lock.status()); ++i) lock = TryLockDir(dir);
  return lock;
}

}  // namespace vrambroker
